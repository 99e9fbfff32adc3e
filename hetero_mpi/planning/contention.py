"""Contention among the ranks of one host for its cores and for the bandwidth between its memory and its devices.

Profiled times assume dedicated cores. If a host's CPU ranks and other programs have more threads than the host has cores, its
CPU ranks slow down by that ratio. Concurrent copies share the host's copy bandwidth.
"""

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from hetero_mpi.planning.types.cluster_changes import with_slowness
from hetero_mpi.planning.types.plan import Plan
from hetero_mpi.planning.types.profile import ClusterProfile, DeviceProfile, HostProfile
from hetero_mpi.util.grouping import grouped


def while_running(profile: ClusterProfile, plan: Plan) -> ClusterProfile:
    """Return the cluster under the plan's load: all ranks compute, and offloaded stages copy or read all the time."""
    streaming = [stage.ranks[0] for _, _, stage in plan.numbered if stage.streamed]
    reading = Counter(profile.devices[stage.ranks[0]].host for _, _, stage in plan.numbered if stage.on_disk)
    running = with_copying(while_computing(profile, plan.ranks), streaming)
    if not reading:
        return running
    parts = ((h, (h.disk_bytes_per_s or 0.0) / max(1, reading[h.name])) for h in running.hosts)
    hosts = tuple(replace(host, disk_bytes_per_s=speed or None) for host, speed in parts)
    return replace(running, hosts=hosts)


def while_computing(profile: ClusterProfile, ranks: Collection[int]) -> ClusterProfile:
    """Slow the cluster down as if all of ``ranks`` compute, and drop core limits; unchanged if there is no contention."""
    slower = slowness(profile, ranks)
    if not slower:
        return profile
    hosts = tuple(replace(host, cores=None) for host in profile.hosts)
    return with_slowness(replace(profile, hosts=hosts), slower)


def slowness(profile: ClusterProfile, ranks: Collection[int]) -> dict[int, float]:
    """Map each rank with less than one core per thread to its slowdown while all of ``ranks`` compute."""
    ratio_by_rank: dict[int, float] = {}
    for host, cores, members in _sharing(profile, ranks):
        ratio = (sum(device.threads for device in members) + host.other_threads) / cores
        ratio_by_rank |= {device.rank: ratio for device in members if ratio > 1}
    return ratio_by_rank


def spread_out(profile: ClusterProfile) -> list[int]:
    """Return the ranks that remain if each host runs only as many CPU ranks as its cores can serve (at least one)."""
    computing = set(range(len(profile.devices)))
    for _, cores, members in _sharing(profile, computing):
        threads = itertools.accumulate(device.threads for device in members)
        computing -= {d.rank for d, used in zip(members, threads, strict=True) if used > max(cores, d.threads)}
    return sorted(computing)


def worth_of_all(profile: ClusterProfile, worth: Mapping[int, float]) -> float:
    """Maximum worth of one second of all ranks' time, given the ``worth`` of each rank's second with dedicated cores."""
    total = sum(worth.values())
    for _, cores, members in _sharing(profile, worth):
        values = [worth[device.rank] for device in members]
        max_worth = cores * max(worth[device.rank] / device.threads for device in members)
        total -= max(0.0, sum(values) - max_worth)
    return total


def _sharing(
    profile: ClusterProfile, ranks: Collection[int]
) -> Iterator[tuple[HostProfile, float, list[DeviceProfile]]]:
    """Yield each host with a core limit and CPU ranks among ``ranks``: the host, its core count and those devices."""
    limited = [(host, host.cores) for host in profile.hosts if host.cores is not None]
    devices = [profile.devices[rank] for rank in ranks] if limited else ()  # searches ask for every plan
    by_host = grouped((device for device in devices if device.backend == "cpu"), lambda device: device.host)
    for host, cores in limited:
        if host.name in by_host:
            yield host, cores, by_host[host.name]


def copying_at_once(profile: ClusterProfile, ranks: Iterable[int]) -> dict[int, DeviceProfile]:
    """Map each rank to its device, with a proportional share of the host's bandwidth while all of ``ranks`` copy."""
    devices = {rank: profile.devices[rank] for rank in ranks}
    demand: dict[str, float] = {}
    for device in devices.values():
        if not device.shares_host_memory and math.isfinite(device.host_to_device_bytes_per_s):
            demand[device.host] = demand.get(device.host, 0.0) + device.host_to_device_bytes_per_s
    for rank, device in devices.items():
        host = profile.host(rank)
        part = host.copies_bytes_per_s / demand[device.host] if host is not None and device.host in demand else 1.0
        if part < 1 and not device.shares_host_memory:
            devices[rank] = replace(
                device,
                host_to_device_bytes_per_s=part * device.host_to_device_bytes_per_s,
                device_to_host_bytes_per_s=part * device.device_to_host_bytes_per_s,
            )
    return devices


def with_copying(profile: ClusterProfile, ranks: Iterable[int]) -> ClusterProfile:
    """Return the cluster with the copy bandwidths that remain while the devices of ``ranks`` copy concurrently."""
    changed = copying_at_once(profile, ranks)
    if all(device is profile.devices[rank] for rank, device in changed.items()):
        return profile
    return replace(profile, devices=tuple(changed.get(device.rank, device) for device in profile.devices))
