"""One training step on one rank: run the rank's actions, exchange tensors, reduce gradients, and run the optimizer."""
