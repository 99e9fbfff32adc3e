"""Inference: text generation with a model that is distributed over the ranks (``generate``), and evaluation."""
