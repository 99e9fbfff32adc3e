"""Runs the cases that every transport must pass over MPI, with and without the communication thread.

The loopback transport runs the same cases between threads of the test process.

    mpirun -np 2 python tests/programs/comm_conformance.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial

from hetero_mpi.comm.ranks.mpi_start import run_guarded
from hetero_mpi.comm.ranks.world import World
from tests.support.exchange_cases import SUM_CASES, groups_and_messages_interleave, sums_around_a_ring
from tests.support.message_cases import CASES, HELD_CASES, PIECE_CASES, MakeTransport


def main(world: World) -> int:
    """Run all cases (those of messages on 2 ranks only); rank 0 prints a line of JSON per case that all ranks have passed."""
    from hetero_mpi.comm.mpi_transport import MpiTransport

    def run(kind: str, name: str, case: Callable[..., None], make: MakeTransport) -> None:
        world.current_action = f"{kind} {name}"
        case(make, world.rank)
        world.barrier()
        if world.rank == 0:
            print(json.dumps([kind, name]), flush=True)

    for kind, threaded in (("threaded", True), ("unthreaded", False)):
        make = partial(MpiTransport, world.comm, threaded)
        for name, case in {**CASES, **HELD_CASES}.items() if world.size == 2 else ():
            run(kind, name, case, make)
        for name, sum_case in SUM_CASES.items():
            run(kind, name, partial(sum_case, size=world.size), make)
        hosts = [str(rank % 2) for rank in range(world.size)]
        interleaved = partial(groups_and_messages_interleave, exact=False)
        on_two_hosts: dict[str, Callable[..., None]] = {"ring": sums_around_a_ring, "ring, interleaved": interleaved}
        for name, around in on_two_hosts.items():
            if world.size > 2:
                run(kind, name, partial(around, size=world.size), partial(make, hosts=hosts))
    for name, piece_case in PIECE_CASES.items() if world.size == 2 else ():
        pieces = 1000 if name != "sizes_in_both_directions" else 1 << 20
        run("pieces", name, piece_case, partial(MpiTransport, world.comm, piece_bytes=pieces))
    return 0


if __name__ == "__main__":
    sys.exit(run_guarded(main))
