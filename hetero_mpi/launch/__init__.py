"""Starting the job: the launcher that belongs to the loaded MPI library, host files, the network interface."""
