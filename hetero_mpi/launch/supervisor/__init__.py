"""``launch --elastic``: a process outside MPI that restarts a job on the remaining hosts."""
