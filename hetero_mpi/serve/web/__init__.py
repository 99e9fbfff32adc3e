"""The HTTP server on rank 0: connections, limits and access control, whatever it serves."""
