"""Finding the model: one module for each place that it can come from, one function that chooses."""
