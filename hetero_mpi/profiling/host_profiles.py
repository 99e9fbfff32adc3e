"""What the ranks of a host have in common: its memory, counted once, its NIC, and how fast two of them add up a tensor in it,
as a group does that holds a stage together.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetero_mpi.comm.links import HostFlows, fit_line
from hetero_mpi.comm.ranks.world import World
from hetero_mpi.device.backend import Backend, host_memory
from hetero_mpi.planning.types.profile import HostProfile


@dataclass(frozen=True)
class MeasuredMemory:
    """What a rank may use, and what its host has."""

    usable_bytes: int
    reason: str
    shares_host_memory: bool
    host_bytes: int
    host_reason: str


def measure_memory(world: World, backend: Backend) -> list[MeasuredMemory]:
    """Memory of every rank, before any of them has taken some. Collective.

    A CPU rank may use all of its host's memory, as every other one there may: that they fit together is for the host's own limit.
    Ranks that share a GPU divide its memory.
    """
    host, shares, sharing = host_memory(), backend.shares_host_memory(), sharing_ranks(world, backend)
    own = backend.memory(1 if shares else sharing)
    row = [own.usable_bytes, own.reason, shares, host.usable_bytes, host.reason]
    return [MeasuredMemory(*values) for values in world.all_gather_json(row)]


def sharing_ranks(world: World, backend: Backend) -> int:
    """Ranks of this host that compute on this rank's device, itself included. Collective."""
    everyone = world.all_gather_json([world.host, backend.identity()])
    return everyone.count([world.host, backend.identity()])


def host_profiles(
    hosts: Sequence[str],
    memories: Sequence[MeasuredMemory],
    cores: Sequence[float],
    flows: Sequence[HostFlows],
    sums: Sums | None = None,
) -> tuple[HostProfile, ...]:
    """Every host, in the order of its first rank. ``hosts``, ``memories`` and ``cores`` (0: an accelerator's rank): of every
    rank."""
    together = {flow.host: (flow.shared, flow.together[0]) for flow in flows}
    found = []
    for name in dict.fromkeys(hosts):
        own = (memory for host, memory in zip(hosts, memories, strict=True) if host == name)
        least = min(own, key=lambda memory: memory.host_bytes)
        shared_nic, flows_bytes_per_s = together.get(name, (False, float("inf")))
        latency_s, bytes_per_s = (sums or {}).get(name, (0.0, None))
        own_cores = round(sum(count for host, count in zip(hosts, cores, strict=True) if host == name), 3) or None
        figures = shared_nic, flows_bytes_per_s, latency_s, bytes_per_s, own_cores
        found.append(HostProfile(name, least.host_bytes, least.host_reason, *figures))
    return tuple(found)


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
    sizes = [_SMALLEST]
    while sizes[-1] * _GROWTH <= largest_bytes:
        sizes.append(sizes[-1] * _GROWTH)
    return fit_line(sizes, [_sum_s(pair, size) for size in sizes])


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
