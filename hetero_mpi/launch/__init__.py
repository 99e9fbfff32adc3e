"""Starting a job: the launcher of the loaded MPI library, host files, network interfaces, supervision, and ``doctor``."""
