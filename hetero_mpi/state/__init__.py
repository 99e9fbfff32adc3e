"""Training state: redistribution between ranks, checkpoints, peer replicas."""
