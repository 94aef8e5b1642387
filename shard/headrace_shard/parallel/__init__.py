"""Tensor parallelism: who holds which slices of the weights, the collectives, and how a step reaches every rank."""
