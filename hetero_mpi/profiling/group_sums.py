"""How fast two ranks of one host add up a tensor in its memory, as a group does that holds a stage together."""

from __future__ import annotations

import statistics
import time

import numpy as np

from hetero_mpi.comm.links import fit_line
from hetero_mpi.comm.ranks.world import World

_SMALLEST, _GROWTH = 4096, 8
_TIMES = 5
"""Repetitions of each size, after one that warms up; fewer where a size takes long."""
_LONG_ENOUGH_S = 0.2

Sums = dict[str, tuple[float, float]]
"""Host -> (latency_s, bytes_per_s) of a sum between its first two ranks."""


def measure_sums(world: World, largest_bytes: int) -> Sums:
    """Of every host with several ranks. Collective; on all hosts at once, while other ranks are still."""
    own: World | None = None
    for host in dict.fromkeys(world.hosts):
        ranks = [rank for rank, name in enumerate(world.hosts) if name == host][:2]
        if len(ranks) > 1:
            own = world.subset(ranks) or own
    world.meet_asleep()
    found = _timed(own, largest_bytes) if own is not None else None
    world.meet_asleep()
    gathered = world.all_gather_json(found)
    return {host: (line[0], line[1]) for host, line in zip(world.hosts, gathered, strict=True) if line is not None}


def _timed(pair: World, largest_bytes: int) -> tuple[float, float]:
    sizes, size = [], _SMALLEST
    while size <= max(_SMALLEST, largest_bytes):
        sizes.append(size)
        size *= _GROWTH
    seconds = [_sum_s(pair, size) for size in sizes]
    return fit_line(sizes, seconds)


def _sum_s(pair: World, size: int) -> float:
    """Seconds of a sum of fp32 numbers: halves to and fro, added, and together again (``engine.host_group``)."""
    given, taken, whole = (np.zeros((2, size // 2), np.uint8) for _ in range(3))
    seconds: list[float] = []
    for _ in range(_TIMES + 1):
        begin = time.perf_counter()
        pair.all_to_all_bytes(given, taken)
        halves = taken.view(np.float32)
        total = halves[0] + halves[1]
        pair.all_gather_bytes(total.view(np.uint8), whole)
        seconds.append(time.perf_counter() - begin)
        if pair.all_gather_json(sum(seconds) > _LONG_ENOUGH_S)[0]:  # one rank says it for both
            break
    return max(1e-9, statistics.median(seconds[1:] or seconds))
