"""Communication between ranks, with mpi4py and numpy; never torch.

``ranks/`` joins the job and has the collective calls; ``transport`` moves bytes between ranks; ``links`` measures the network.
"""
