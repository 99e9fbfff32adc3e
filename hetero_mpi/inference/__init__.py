"""The command ``generate``: text from a model that is distributed over the ranks."""
