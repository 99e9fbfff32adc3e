"""Communication between ranks, with mpi4py and numpy; never torch.

``ranks/`` joins the MPI job and holds the collective calls; ``transport`` moves bytes between ranks; ``links`` measures latency
and bandwidth.
"""
