"""The command ``generate``: text from a model that is spread over the ranks."""
