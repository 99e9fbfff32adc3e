"""Properties of a host: memory, NIC, disk, concurrent host-to-device copies, and all-reduces in host memory."""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from hetero_mpi.comm.links import HostFlows, fit_line
from hetero_mpi.comm.ranks.world import World
from hetero_mpi.device.backend import Backend, host_memory
from hetero_mpi.planning.types.profile import HostProfile


@dataclass(frozen=True)
class MeasuredMemory:
    usable_bytes: int
    reason: str
    shares_host_memory: bool
    host_bytes: int
    host_reason: str


def measure_memory(world: World, backend: Backend) -> list[MeasuredMemory]:
    """Measure the memory of every rank, before any allocation. Collective.

    Ranks sharing a GPU divide its memory; each CPU rank has all of its host's memory, with a common limit per host.
    """
    host, shares, sharing = host_memory(), backend.shares_host_memory(), sharing_ranks(world, backend)
    rank_memory = backend.memory(1 if shares else sharing)
    row = [rank_memory.usable_bytes, rank_memory.reason, shares, host.usable_bytes, host.reason]
    return [MeasuredMemory(*values) for values in world.all_gather_json(row)]


def sharing_ranks(world: World, backend: Backend) -> int:
    """Number of ranks that use the same device as this rank. Collective."""
    everyone = world.all_gather_json([world.host, backend.identity()])
    return everyone.count([world.host, backend.identity()])


def host_profiles(
    hosts: Sequence[str],
    memories: Sequence[MeasuredMemory],
    cores: Sequence[float],
    flows: Sequence[HostFlows],
    sums: Sums | None = None,
    copies: Mapping[str, float] | None = None,
    disks: Mapping[str, float] | None = None,
) -> tuple[HostProfile, ...]:
    """Build the profiles of all hosts, in order of first rank, from lists per rank (``cores``: 0 for accelerators)."""
    together = {flow.host: (flow.shares_nic, flow.total_rates[0]) for flow in flows}
    profiles = []
    for name in dict.fromkeys(hosts):
        host_memories = (memory for host, memory in zip(hosts, memories, strict=True) if host == name)
        least = min(host_memories, key=lambda memory: memory.host_bytes)
        shared_nic, flows_bytes_per_s = together.get(name, (False, math.inf))
        latency_s, bytes_per_s = (sums or {}).get(name, (0.0, None))
        copied = (copies or {}).get(name, math.inf)
        own_cores = round(sum(count for host, count in zip(hosts, cores, strict=True) if host == name), 3) or None
        figures = shared_nic, flows_bytes_per_s, copied, latency_s, bytes_per_s, own_cores
        host = HostProfile(name, least.host_bytes, least.host_reason, *figures)
        profiles.append(replace(host, disk_bytes_per_s=(disks or {}).get(name)))
    return tuple(profiles)


_READ_BYTES, _PIECE_BYTES = 256 << 20, 32 << 20


def measure_disks(world: World, folder: Path) -> dict[str, float]:
    """Map each host to its uncached read rate of ``folder`` in bytes/s (none if unwritable or in memory). Collective."""
    bytes_per_s = None
    world.sleeping_barrier()
    if world.local_rank == 0:
        with contextlib.suppress(OSError):
            bytes_per_s = _read_per_s(next(path for path in (folder, *folder.absolute().parents) if path.exists()))
    world.sleeping_barrier()
    return {
        host: rate
        for host, rate in zip(world.hosts, world.all_gather_json(bytes_per_s), strict=True)
        if rate is not None
    }


def _read_per_s(folder: Path) -> float | None:
    kinds = {Path(partition.mountpoint): partition.fstype for partition in psutil.disk_partitions(all=True)}
    if next((kinds[p] for p in (folder.resolve(), *folder.resolve().parents) if p in kinds), "") in ("tmpfs", "ramfs"):
        return None
    into, at = bytearray(_PIECE_BYTES), 0
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        for _ in range(_READ_BYTES // _PIECE_BYTES):
            file.write(os.urandom(_PIECE_BYTES))
        os.fsync(file.fileno())
        file.seek(0)
        if hasattr(os, "posix_fadvise"):  # only pages that are on disk can be dropped
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        begin = time.perf_counter()
        while count := file.readinto(into):
            at += count
        return at / (time.perf_counter() - begin)


_MIN_SUM_BYTES, _SIZE_FACTOR = 4096, 8
_MAX_REPEATS = 5
"""Maximum number of repetitions of each size, after a warm-up."""
_MAX_SIZE_S = 0.2

Sums = dict[str, tuple[float, float]]
"""Host -> (latency_s, bytes_per_s) of an all-reduce between its first two ranks."""


def measure_sums(world: World, largest_bytes: int) -> Sums:
    """Measure all-reduces on every host that has several ranks. Collective."""
    lines_by_host = _measure_per_host(world, [True] * world.size, 2, lambda pair: _timed(pair, largest_bytes))
    return {host: (lines[-1][0], lines[-1][1]) for host, lines in lines_by_host.items()}


def _measure_per_host(
    world: World, eligible: Sequence[bool], max_ranks: int | None, measure: Callable[[World], Any]
) -> dict[str, list[Any]]:
    """Map each host with several eligible ranks to ``measure`` on the first ``max_ranks``, all at once. Collective."""
    local_group: World | None = None
    for host in dict.fromkeys(world.hosts):
        ranks = [rank for rank, name in enumerate(world.hosts) if name == host and eligible[rank]][:max_ranks]
        if len(ranks) > 1:
            local_group = world.subset(ranks) or local_group
    world.sleeping_barrier()
    measured = measure(local_group) if local_group is not None else None
    world.sleeping_barrier()
    values_by_host: dict[str, list[Any]] = {}
    for host, value in zip(world.hosts, world.all_gather_json(measured), strict=True):
        if value is not None:
            values_by_host.setdefault(host, []).append(value)
    return values_by_host


def _timed(pair: World, largest_bytes: int) -> tuple[float, float]:
    sizes = [_MIN_SUM_BYTES]
    while sizes[-1] * _SIZE_FACTOR <= largest_bytes:
        sizes.append(sizes[-1] * _SIZE_FACTOR)
    return fit_line(sizes, [_sum_s(pair, size) for size in sizes])


def _sum_s(pair: World, size: int) -> float:
    """Seconds of an fp32 all-reduce: exchange of halves, sum and all-gather (as in ``engine.host_group``)."""
    sent, received, gathered = (np.zeros((2, size // 2), np.uint8) for _ in range(3))
    seconds: list[float] = []
    for _ in range(_MAX_REPEATS + 1):
        begin = time.perf_counter()
        pair.all_to_all_bytes(sent, received)
        halves = received.view(np.float32)
        total = halves[0] + halves[1]
        pair.all_gather_bytes(total.view(np.uint8), gathered)
        seconds.append(time.perf_counter() - begin)
        if pair.all_gather_json(sum(seconds) > _MAX_SIZE_S)[0]:  # one rank says it for both
            break
    return max(1e-9, statistics.median(seconds[1:] or seconds))


_COPIED_BYTES, _COPYING_S = 64 << 20, 0.1
"""Bytes per copy (more than the caches hold), and seconds during which copies are repeated."""


def measure_copies(world: World, backend: Backend) -> dict[str, float]:
    """Map each host with several discrete devices to the total bytes/s of concurrent host-to-device copies. Collective."""
    copying = world.all_gather_json(not backend.shares_host_memory())
    rates = _measure_per_host(world, copying, None, lambda rates_of_host: _copied_per_s(rates_of_host, backend))
    backend.free_unused()
    return {host: sum(rates_of_host) for host, rates_of_host in rates.items()}


def _copied_per_s(group: World, backend: Backend) -> float:
    """Bytes per second copied to this rank's device, with one copy always queued behind the running one."""
    device_buffer = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device=backend.device)
    host_buffer, copying, count = backend.host_buffer((_COPIED_BYTES,), torch.uint8), backend.copying(), 0
    before = copying.copy(device_buffer, host_buffer)
    before.wait()
    group.barrier()
    begin = time.perf_counter()
    while time.perf_counter() - begin < _COPYING_S:
        now = copying.copy(device_buffer, host_buffer)
        before.wait()
        before, count = now, count + 1
    before.wait()
    return count * _COPIED_BYTES / (time.perf_counter() - begin)
