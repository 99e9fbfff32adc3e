"""Emulated clusters: ranks and links that last as long as those of a profile."""
