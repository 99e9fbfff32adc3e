"""The HTTP server on rank 0: connections, limits and access control, independent of the content."""
