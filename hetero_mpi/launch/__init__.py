"""Starting a job: the MPI library's launcher, host files, network interfaces, supervision, and ``doctor``."""
