"""Errors, units, TOML, disks, threads, terminals: all packages may import these."""
