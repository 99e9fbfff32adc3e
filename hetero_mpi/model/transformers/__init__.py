"""Models of transformers: a chain of layers, their start values, and the families that are supported."""
