"""The gRPC contract of a shard group: generation.proto and the code generated from it."""
