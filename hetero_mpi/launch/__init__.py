"""Starting a job: the launcher of the loaded MPI library, host files, the network interface, supervision, and ``doctor``."""
