"""Guards the ranks between MPI's start and their world: an exception in one rank, or a rank that does not come, ends all of them.

Each rank counts its steps while it joins. A rank that has not joined at the time limit reports its step to rank 0 from a thread,
which names the ranks that all others wait for: those without a report, else those with the fewest steps.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from hetero_mpi.comm.ranks.collectives import decode, encode
from hetero_mpi.comm.ranks.leave import end_all, end_alone
from hetero_mpi.comm.ranks.world import CollectiveUserError, World
from hetero_mpi.util import units
from hetero_mpi.util.background import Background
from hetero_mpi.util.errors import ExitCode, UserError

LIMIT_S = 60.0
"""Longest time from MPI's start until the ranks are one world: it takes some 10 ms."""
_REPORT_S = 3.0
"""Longest wait of rank 0 for the other ranks' reports; the others wait twice as long for rank 0."""
_LOOK_S = 0.05
_REPORT_TAG = 1


def world_of_strangers(mpi: Any, library: str, thread_level: str) -> World:
    """All ranks before they know of each other, with this rank's host in the place of every host."""
    comm = mpi.COMM_WORLD
    rank, size = comm.Get_rank(), comm.Get_size()
    return World(comm, rank, size, (os.uname().nodename,) * size, library, thread_level)


@contextmanager
def joining(world: World, watched: bool) -> Iterator[None]:
    """A block in which the ranks join. Raises CollectiveUserError; anything else in one of several ranks ends all of them.

    ``watched``: the ranks begin at the same moment, so that one that is late counts as hanging.
    """
    joined = threading.Event()
    watching = None
    if watched and world.size > 1 and world.thread_level == "multiple":
        watching = Background("watching the ranks join", partial(_watch, world, joined))
    try:
        yield
    except CollectiveUserError:
        raise
    except BaseException as error:
        if world.size == 1:
            raise
        cause = str(error) if isinstance(error, UserError) else error
        end_alone(world, cause, getattr(error, "exit_code", ExitCode.FAILED))
    finally:
        joined.set()
    world.doing = "starting"
    if watching is not None:
        watching.finish()


def next_step(world: World, text: str) -> None:
    """The next step of joining begins on this rank; ``text`` as in "rank 1 failed while ..."."""
    world.doing = f"joining the other ranks, {text}"
    world.activity.marks += 1


def _watch(world: World, joined: threading.Event) -> None:
    """End the job if this rank has not joined within ``LIMIT_S``."""
    from mpi4py import MPI

    if joined.wait(LIMIT_S):
        return
    report = world.activity.marks, world.host, world.doing
    if world.rank > 0:
        MPI.COMM_WORLD.Isend(encode(report), 0, _REPORT_TAG)
        if not joined.wait(2 * _REPORT_S):
            end_all(world, _late_text({world.rank: report}, [0]), ExitCode.HUNG)
        return
    reports, status, deadline = {0: report}, MPI.Status(), time.monotonic() + _REPORT_S
    while len(reports) < world.size and time.monotonic() < deadline and not joined.wait(_LOOK_S):
        while MPI.COMM_WORLD.Iprobe(tag=_REPORT_TAG, status=status):
            message = np.empty(status.Get_count(MPI.BYTE), np.uint8)
            MPI.COMM_WORLD.Recv(message, status.Get_source(), _REPORT_TAG)
            reports[status.Get_source()] = decode(message)
    if not joined.is_set():
        silent_ranks = [rank for rank in range(world.size) if rank not in reports]
        end_all(world, _late_text(reports, silent_ranks), ExitCode.HUNG)


def _late_text(reports: Mapping[int, tuple[int, str, str]], silent_ranks: Sequence[int]) -> str:
    """The message about ranks that have not joined. ``reports``: rank -> (steps, host, current action)."""
    fewest_steps = min(steps for steps, _, _ in reports.values())
    late = {rank: f"on {host}: {doing}" for rank, (steps, host, doing) in reports.items() if steps == fewest_steps}
    late = dict.fromkeys(silent_ranks, "does not answer: stopped, or cut off from the others") or late
    return "\n".join(
        [
            f"The ranks have not joined within {units.seconds(LIMIT_S)} after MPI's start: the job ends with exit code "
            f"{ExitCode.HUNG}. All wait for:",
            *(f"  rank {rank} {where}" for rank, where in sorted(late.items())),
            "Look at these processes and their hosts. If every rank stands here, messages between them do not arrive: "
            "`python -m hetero_mpi doctor` with the same hosts tests the network.",
        ]
    )
