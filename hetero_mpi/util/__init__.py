"""Helpers for errors, units, TOML, disks, threads and terminals, which all packages may import."""
