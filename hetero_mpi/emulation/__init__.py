"""Emulated clusters: devices and links with the speeds of a profile."""
