"""Code shared by all kinds of models: the layer interface, loss, seeds, gradient hooks, split backward, and NF4."""
