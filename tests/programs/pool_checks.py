"""What tests/test_rank_pool.py asks of ranks that stay: ``pid``, or ``fails`` (rank 1, while the others wait for it)."""

import os
import sys

from hetero_mpi.comm.ranks.world import World


def main(world: World) -> int:
    if sys.argv[1] == "fails" and world.rank == 1:
        raise RuntimeError("rank 1 is out of luck")
    world.barrier()
    print(world.rank, os.getpid(), flush=True)
    return 0
