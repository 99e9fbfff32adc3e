"""``launch --elastic``: a process outside MPI that starts a job again on the hosts that are left."""
