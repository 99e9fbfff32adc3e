"""Private links between hosts: a WireGuard mesh, and the check that MPI's bytes go through it."""
