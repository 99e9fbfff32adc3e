"""User-defined models: a list of layers with a loss function and data."""
