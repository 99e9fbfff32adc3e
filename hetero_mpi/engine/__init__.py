"""One step on one rank: actions executed, tensors sent and received, gradients reduced, the optimizer."""
