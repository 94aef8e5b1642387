"""A shard: one process that holds (a part of) the model and serves headrace.v1.Generation."""
