"""The command ``serve``: a model distributed over the ranks behind an OpenAI-compatible HTTP API."""
