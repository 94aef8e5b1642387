"""From logits to tokens: penalties, filters, the draw, log probabilities. Vectorised over the batch."""
