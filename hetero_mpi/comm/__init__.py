"""Ranks talking to each other: mpi4py and numpy, never torch.

``world`` joins the MPI job and refuses a broken start, ``transport`` moves bytes between ranks, ``links`` measures how
fast.
"""
