"""Grammars in a shard: compiled beside the steps, their masks filled while the forward pass runs."""
