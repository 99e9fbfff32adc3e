"""What ranks take whose threads share the cores of a host.

A profile has the work of each rank: seconds in which its threads compute, with cores of their own. Where the CPU ranks of a
plan have more threads on a host than it has cores, each takes longer by that ratio. So no plan does more work per second than
the cores can.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace

from hetero_mpi.planning.types.cluster_changes import with_slowness
from hetero_mpi.planning.types.profile import ClusterProfile, DeviceProfile


def while_computing(profile: ClusterProfile, ranks: Collection[int]) -> ClusterProfile:
    """``profile`` with the times that ``ranks`` take while all of them, and no other ranks, compute; its hosts then have a core for
    every thread. The same object where none share cores."""
    if not any(host.cores is not None for host in profile.hosts):
        return profile
    slower = _slowness(profile, ranks)
    if not slower:
        return profile
    hosts = tuple(replace(host, cores=None) for host in profile.hosts)
    # Members of a group wait for each other in every layer: with less than a core each, for ranks that do not run.
    devices = tuple(replace(one, halved={}) if one.rank in slower else one for one in profile.devices)
    return with_slowness(replace(profile, devices=devices, hosts=hosts), slower)


def spread_out(profile: ClusterProfile) -> list[int] | None:
    """The ranks that are left where no host has more threads than cores; None: all of them."""
    left, used = [], Counter[str]()
    for device in profile.devices:
        host = profile.host(device.rank)
        fits = host is None or host.cores is None or used[device.host] + device.threads <= max(1.0, host.cores)
        if not _computes_on_cores(device) or fits or not used[device.host]:
            left.append(device.rank)
            used[device.host] += device.threads * _computes_on_cores(device)
    return left if len(left) < len(profile.devices) else None


def _slowness(profile: ClusterProfile, ranks: Collection[int]) -> dict[int, float]:
    """Rank -> how many times as long it takes, for those that take longer."""
    computing = [profile.devices[rank] for rank in ranks if _computes_on_cores(profile.devices[rank])]
    threads = Counter[str]()
    for device in computing:
        threads[device.host] += device.threads
    found = {}
    for device in computing:
        host = profile.host(device.rank)
        if host is not None and host.cores is not None and threads[device.host] > host.cores:
            found[device.rank] = threads[device.host] / host.cores
    return found


def _computes_on_cores(device: DeviceProfile) -> bool:
    return device.backend == "cpu"
