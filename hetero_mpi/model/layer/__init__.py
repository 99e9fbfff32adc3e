"""Parts that every kind of model shares: the interface of its layers, loss, seeds, gradient hooks, split backward, NF4."""
