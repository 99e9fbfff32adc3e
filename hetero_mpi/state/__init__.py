"""The state of a run: moved between ranks, written to checkpoints, kept as replicas."""
