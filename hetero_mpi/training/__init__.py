"""A training run on all ranks, coordinated by rank 0: setup, training loop, changes of plan, and recovery."""
