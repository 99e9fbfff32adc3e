"""Models from transformers: as a chain of layers, with initial weights and the list of supported families."""
