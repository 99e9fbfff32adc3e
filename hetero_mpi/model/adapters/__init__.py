"""Adapters: what they reach, how they begin, their files, and what they add to weights."""
