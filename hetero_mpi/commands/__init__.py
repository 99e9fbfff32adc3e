"""The command ``profile``, and commands that need no MPI ranks. ``cli`` and ``api`` call these modules."""
