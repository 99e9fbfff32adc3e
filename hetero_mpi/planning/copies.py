"""How fast devices of one host copy to and from its memory when several do so at once: the host's paths carry no more for them all
than was measured."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from hetero_mpi.planning.types.plan import Plan
from hetero_mpi.planning.types.profile import ClusterProfile, DeviceProfile


def copying_at_once(profile: ClusterProfile, ranks: Iterable[int]) -> dict[int, DeviceProfile]:
    """Rank -> its device as it copies while the others of ``ranks`` do; what their host carries is shared in proportion to what
    each would copy by itself."""
    devices = {rank: profile.devices[rank] for rank in ranks}
    wanted: dict[str, float] = {}
    for device in devices.values():
        if not device.shares_host_memory and math.isfinite(device.host_to_device_bytes_per_s):
            wanted[device.host] = wanted.get(device.host, 0.0) + device.host_to_device_bytes_per_s
    for rank, device in devices.items():
        host = profile.host(rank)
        part = host.copies_bytes_per_s / wanted[device.host] if host is not None and device.host in wanted else 1.0
        if part < 1 and not device.shares_host_memory:
            devices[rank] = replace(
                device,
                host_to_device_bytes_per_s=part * device.host_to_device_bytes_per_s,
                device_to_host_bytes_per_s=part * device.device_to_host_bytes_per_s,
            )
    return devices


def with_streams(profile: ClusterProfile, plan: Plan) -> ClusterProfile:
    """The cluster as ``plan`` finds it, whose streamed stages all copy throughout the step."""
    return with_copying(profile, [stage.ranks[0] for _, _, stage in plan.numbered if stage.streamed])


def with_copying(profile: ClusterProfile, ranks: Iterable[int]) -> ClusterProfile:
    """The cluster with these devices as fast as they copy all at once."""
    if all(math.isinf(host.copies_bytes_per_s) for host in profile.hosts):
        return profile
    changed = copying_at_once(profile, ranks)
    if all(device is profile.devices[rank] for rank, device in changed.items()):
        return profile
    return replace(profile, devices=tuple(changed.get(device.rank, device) for device in profile.devices))
