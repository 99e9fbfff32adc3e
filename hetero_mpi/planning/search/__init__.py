"""Search for plans with one stage per rank.

Example: ranks 0, 1, 2 with 1, 1.5, 3 s per forward of a block; 6 layers (embedding, 4 blocks, head); 4 micro-batches; one
pipeline; 0.2 s latency per message::

                               ranks   layers  in flight
    candidates (``orders``)    0 1     4 2     3 2         37.43 s   estimate; rank 2 gets no layer
    simulated (``rounds``)     0 1     4 2     4 1         37.2 s    at the best depths
                               0 1 2   3 2 1   4 3 1       42.7 s    all ranks in use
    descent (``moves``)        0 1 2   4 1 1   4 3 1       39.0 s    moved a layer from rank 1 to rank 0
                               0 1 2   4 1 1   4 2 1       37.7 s    one fewer micro-batch in flight at rank 1; local optimum
    result (``search``)        0 1     4 2     4 1         37.2 s    annealing from here finds nothing faster
"""
