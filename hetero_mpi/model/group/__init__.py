"""Tensor parallelism with unequal shards: a group of ranks holds a stage, each rank a shard of every layer."""
