"""The world's collectives, checked from inside on any number of ranks.

mpirun -np 3 python tests/programs/comm_world.py
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial

import numpy as np

from hetero_mpi.comm.links import measure_links
from hetero_mpi.comm.mpi_transport import MpiTransport
from hetero_mpi.comm.ranks.mpi_start import run_guarded
from hetero_mpi.comm.ranks.world import CollectiveUserError, World
from hetero_mpi.util.errors import UserError


def check_json(world: World) -> None:
    """Values of unequal length, from any root."""
    ranks = list(range(world.size))
    for root in ranks:
        value = {"text": "ä" * 1000, "root": root, "half": 0.1, "none": None}
        assert world.broadcast_json(value if world.rank == root else None, root) == value
    gathered = world.gather_json(["x" * world.rank, world.rank])
    assert gathered == ([["x" * rank, rank] for rank in ranks] if world.rank == 0 else None)
    assert world.all_gather_json({"rank": world.rank, "pad": "y" * (5 * world.rank)}) == [
        {"rank": rank, "pad": "y" * (5 * rank)} for rank in ranks
    ]


def check_arrays(world: World) -> None:
    """Shape, dtype and bits survive, empty and zero-dimensional arrays included; sums are over all ranks."""
    last = world.size - 1
    for array in (
        np.arange(24, dtype=np.int32).reshape(2, 3, 4),
        np.asarray(np.float64(0.1)),
        np.zeros((0, 5), np.float32),
        np.arange(6, dtype=np.float32).reshape(2, 3).T,
    ):
        (got,) = world.broadcast_arrays([array] if world.rank == last else None, root=last)
        assert got.shape == array.shape and got.dtype == array.dtype and np.array_equal(got, array)
    total = world.all_reduce_sum(np.full((3, 2), world.rank + 0.5, np.float32))
    assert total.dtype == np.float32 and np.array_equal(total, np.full((3, 2), world.size**2 / 2, np.float32))
    assert int(world.all_reduce_sum(np.asarray(world.rank))) == world.size * (world.size - 1) // 2


def check_leading(world: World) -> None:
    """Rank 0 works, the others sleep through it; its problem is everybody's, in its own words, with its exit code."""
    passed = []
    with world.on_leader("something slow"):
        assert world.current_action == "something slow"
        if world.rank == 0:
            time.sleep(0.2)
        passed.append(world.rank)
    assert passed == [world.rank] and world.current_action == "testing"
    caught = None
    try:
        with world.on_leader("something hard"):
            if world.rank == 0:
                raise UserError("test.fault", "the disk is full")
    except CollectiveUserError as error:
        caught = error
    assert str(caught) == "the disk is full" and caught is not None and caught.exit_code == UserError.exit_code
    world.current_action = "testing"


def check_agreement(world: World) -> None:
    """A problem of the last rank is raised by every rank; no problem, no error."""
    last = world.size - 1
    world.agree(None)
    with world.collective_errors("something easy"):
        assert world.current_action == "something easy"
    assert world.current_action == "testing"
    problem = UserError("test.fault", "no disk") if world.rank == last else None
    ways: tuple[Callable[[UserError | None], None], ...] = (world.agree, partial(in_block, world))
    for raise_it in ways:
        try:
            raise_it(problem)
        except CollectiveUserError as error:
            assert "no disk" in str(error) and (world.size == 1 or f"rank {last} on {world.hosts[last]}" in str(error))
            assert error.exit_code == UserError.exit_code and error.kind == "test.fault"
        else:
            raise AssertionError("a rank had a problem and nobody raised it")


def in_block(world: World, problem: UserError | None) -> None:
    """``agree``, by way of ``collective_errors``."""
    with world.collective_errors("something hard"):
        if problem is not None:
            raise problem


def main(world: World) -> int:
    """Run all checks; every rank's view and the links are printed by rank 0 as JSON."""
    world.current_action = "testing"
    check_json(world)
    check_arrays(world)
    check_leading(world)
    check_agreement(world)
    world.current_action = "measuring links"
    with MpiTransport(world.comm) as transport:
        links = measure_links(world, transport, (64, 2_048, 65_536), repeats=2)
    views = world.gather_json(
        {
            "rank": world.rank,
            "size": world.size,
            "host": world.host,
            "hosts": world.hosts,
            "local_rank": world.local_rank,
            "local_size": world.local_size,
            "library": world.library,
            "thread_level": world.thread_level,
            "links": [asdict(samples) for samples in links],
        }
    )
    if world.rank == 0:
        print(json.dumps(views))
    return 0


if __name__ == "__main__":
    sys.exit(run_guarded(main))
