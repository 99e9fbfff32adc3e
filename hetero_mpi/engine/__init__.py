"""One training step on one rank: run its actions, exchange tensors, reduce gradients, step the optimizer."""
