"""Tables for large clusters: like ranks, hosts and links share one row, with their number."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from hetero_mpi.planning.analysis.idle_time import Idling
from hetero_mpi.planning.types.plan import RankMemory
from hetero_mpi.planning.types.profile import ClusterProfile, DeviceProfile, HostProfile, LinkProfile
from hetero_mpi.planning.words import counted
from hetero_mpi.report import units

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
MOST_ROWS = 16
"""Number of ranks of a profile, or of hosts, up to which each has a row of its own."""
MOST_STAGES = 48
"""Number of stages of a plan up to which each has a row of its own."""
LONGEST_NAME = 26
"""Characters of a device's or host's name in a table; some CPUs' names are sentences."""
SHORT_NAME = 14
"""The same where two names stand beside each other."""
EVERY_STAGE = "every stage: `inspect PLAN --all`, of the plan.toml that `plan -o` and `train` write"


def device_text(device: DeviceProfile) -> str:
    """``cuda RTX 4090``: backend and name of a device. Ranks with the same text share a row."""
    name = device.name if device.name.lower().startswith(device.backend) else f"{device.backend} {device.name}"
    return units.device_name(name, LONGEST_NAME)


def place_text(profile: ClusterProfile | None, rank: int) -> str:
    """``RTX 4090, alpha``: a rank's device and host; empty where the profile does not tell."""
    if profile is None or not 0 <= rank < len(profile.devices):
        return ""
    return f"{profile.devices[rank].name}, {profile.devices[rank].host}"


def grouped(values: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Values by key, in the order in which the keys first occur."""
    found: dict[K, list[T]] = {}
    for value in values:
        found.setdefault(key(value), []).append(value)
    return found


def least_most(values: Sequence[float], show: Callable[[float], str]) -> str:
    """``1.20 ms to 1.31 ms``: least and greatest value as ``show`` writes them; one figure where both look the same."""
    if not values:
        return ""
    least, most = show(min(values)), show(max(values))
    return least if least == most else f"{least} to {most}"


def fullest_text(memory: Sequence[RankMemory]) -> str:
    """``1.20 GB of 8.00 GB``: memory of the fullest rank."""
    if not memory:
        return ""
    fullest = max(memory, key=lambda one: one.peak_bytes / max(one.usable_bytes, 1))
    return f"{units.size(fullest.peak_bytes)} of {units.size(fullest.usable_bytes)}"


def utilisation(shares: Mapping[int, float]) -> str:
    """``rank 0 84 %, rank 1 90 %``; of many ranks the least, the median and the greatest."""
    if len(shares) <= MOST_STAGES:
        return ", ".join(f"rank {rank} {units.percent(shares[rank])}" for rank in sorted(shares))
    idlest, busiest = min(shares, key=lambda r: shares[r]), max(shares, key=lambda r: shares[r])
    return (
        f"of {len(shares)} ranks the least busy is rank {idlest} with {units.percent(shares[idlest])}, the median "
        f"{units.percent(statistics.median(shares.values()))}, the busiest rank {busiest} with {units.percent(shares[busiest])}"
    )


def mean_idling(causes: Sequence[Idling]) -> Idling:
    """The mean over several ranks, cause by cause."""
    count = len(causes)
    return Idling(*(sum(seconds) / count for seconds in zip(*(vars(cause).values() for cause in causes), strict=True)))


def rank_rows(
    profile: ClusterProfile, block_s: Mapping[int, Sequence[float]], kind: Callable[[DeviceProfile], Hashable],
    name: Callable[[Sequence[int]], str],
) -> list[tuple[str, ...]]:  # fmt: skip
    """A row per kind of rank: its ranks as ``name`` writes them, hosts, forward and backward times, memory and its reason."""
    rows: list[tuple[str, ...]] = []
    for devices in grouped(profile.devices, kind).values():
        hosts = sorted({device.host for device in devices})
        forward, backward = zip(*(block_s[device.rank] for device in devices), strict=True)
        reasons = dict.fromkeys(device.memory_reason for device in devices)
        rows.append((
            name([device.rank for device in devices]),
            units.shortened(hosts[0]) if len(hosts) == 1 else f"{len(hosts)} hosts",
            device_text(devices[0]),
            least_most(forward, units.seconds),
            least_most(backward, units.seconds),
            least_most([device.memory_bytes for device in devices], units.size),
            next(iter(reasons)) if len(reasons) == 1 else "",
        ))  # fmt: skip
    return rows


def host_rows(profile: ClusterProfile) -> list[tuple[str, ...]]:
    """A row per kind of host: number, devices, and what the ranks of such a host share."""

    def kinds(host: HostProfile) -> str:
        return counted((device_text(device) for device in profile.devices if device.host == host.name), ", ")

    rows: list[tuple[str, ...]] = []
    for kind, hosts in grouped(profile.hosts, kinds).items():
        sharing = sum(host.shared_nic for host in hosts)
        nic = "shared" if sharing == len(hosts) else f"shared on {sharing}" if sharing else "not shared"
        flows = [host.flows_bytes_per_s for host in hosts if host.flows_bytes_per_s != float("inf")]
        copies = [host.copies_bytes_per_s for host in hosts if host.copies_bytes_per_s != float("inf")]
        rows.append((str(len(hosts)), kind, nic, *(least_most(found, units.bandwidth) for found in (flows, copies))))
    return rows


def link_rows(profile: ClusterProfile) -> list[tuple[str, ...]]:
    """A row per class of links: within a host or between hosts, from which kind of device to which."""

    def ends(link: LinkProfile) -> tuple[bool, str]:
        devices = profile.devices[link.source], profile.devices[link.destination]
        return not link.same_host, " - ".join(
            sorted(units.device_name(device_text(one), SHORT_NAME) for one in devices)
        )

    return [
        (
            "between hosts" if between else "inside a host",
            devices,
            f"{len(links):,}",
            least_most([link.latency_s for link in links], units.seconds),
            least_most([link.bytes_per_s for link in links], units.bandwidth),
        )
        for (between, devices), links in sorted(grouped(profile.told_links(), ends).items())
    ]
