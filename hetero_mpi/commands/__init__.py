"""Commands without MPI ranks, and ``profile``; ``cli`` and ``api`` call their modules."""
