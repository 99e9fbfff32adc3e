"""Models of the user's own: a list of layers, with its loss and its data."""
