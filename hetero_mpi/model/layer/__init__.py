"""Code shared by all kinds of models: interface of layers, loss, seeds, gradient hooks, split backward, NF4."""
