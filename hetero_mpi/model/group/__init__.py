"""Tensor parallelism with unequal shards: the ranks of a group share a stage, and each holds a shard of every layer."""
