"""The command ``serve``: a model that is distributed over the ranks answers over HTTP, as OpenAI's API does."""
