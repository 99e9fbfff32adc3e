"""Ranks talking to each other: mpi4py and numpy, never torch.

``joining`` enters the MPI job and refuses a broken start, ``world`` is what its ranks do together, ``transport`` moves bytes
between them, ``links`` measures how fast.
"""
