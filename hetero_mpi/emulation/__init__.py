"""Emulated clusters, whose devices and links have the speeds of a profile."""
