"""Start the ranks with the launcher of the loaded MPI library."""
