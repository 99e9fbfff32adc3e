"""Communication between ranks with mpi4py and numpy; never imports torch.

``ranks/`` joins the job and provides collective calls; ``transport`` moves bytes between ranks; ``links`` measures the network.
"""
