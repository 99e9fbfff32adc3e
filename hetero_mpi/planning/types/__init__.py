"""Inputs and outputs of planning: frozen dataclasses of clusters, models, requests and plans, and their TOML files."""
