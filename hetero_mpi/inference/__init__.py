"""Inference: text generation (``generate``) and evaluation (``evaluate``) with a model that is split over the ranks."""
