"""Ranks and links that differ by no more than a measurement's noise, made equal: what a search over many ranks looks at.

Two measurements of equal devices differ by a few per cent. A search that takes them for unlike devices has very many more
orders to look at, and nothing to gain. So the search runs on the profile made here, where such ranks are exchangeable; the
plan it finds is then costed with the figures as they were measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from hetero_mpi.planning.types.codec import encode
from hetero_mpi.planning.types.profile import ClusterProfile, Curve, DeviceProfile, LayerTimes, LinkProfile

NOISE = 0.12
"""Figures that differ by no more than this share are taken to be the same: measured within 5 % either way."""


def smoothed(profile: ClusterProfile) -> ClusterProfile:
    """``profile`` with like devices made equal, and like links between like devices.

    Devices are alike when they have the same name, backend and dtypes, and times, copies and memory within ``NOISE`` of the
    fastest of them; they get the medians of their times and the least of their memories, so that what fits here fits each of
    them. Links are alike when they join the same kinds of devices (on one host or not) and their times for the model's largest
    message are within ``NOISE`` of the fastest.
    """
    groups = _device_groups(profile)
    kind = {device.rank: index for index, group in enumerate(groups) for device in group}
    devices = {
        device.rank: replace(one, rank=device.rank, host=device.host)
        for group in groups
        for one in [_middle(group)]
        for device in group
    }
    return replace(
        profile,
        devices=tuple(devices[rank] for rank in range(len(devices))),
        links=_links(profile, kind),
    )


def _device_groups(profile: ClusterProfile) -> list[list[DeviceProfile]]:
    def what(device: DeviceProfile) -> tuple[str, ...]:
        shapes = [(kind, t.forward_s.tokens, t.backward_s.tokens) for kind, t in sorted(device.layers.items())]
        return device.backend, device.name, repr(device.dtypes), repr(shapes), repr(device.shares_host_memory)

    def order(device: DeviceProfile) -> tuple[tuple[str, ...], tuple[float, ...], str]:
        record = {key: value for key, value in encode(device).items() if key not in ("rank", "host", "memory_reason")}
        return what(device), _figures(device), repr(sorted(record.items()))

    groups: list[list[DeviceProfile]] = []
    for device in sorted(profile.devices, key=order):
        fitting = next(
            (g for g in groups if what(g[0]) == what(device) and _close(_figures(g[0]), _figures(device))), None
        )
        if fitting is None:
            groups.append([device])
        else:
            fitting.append(device)
    return groups


def _figures(device: DeviceProfile) -> tuple[float, ...]:
    """What must agree between devices that are taken to be equal, the time of all kinds of layers first."""
    curves = [c for _, t in sorted(device.layers.items()) for c in (t.forward_s, t.backward_s)]
    longest = [curve.seconds[-1] for curve in curves]
    copies = (device.device_to_host_bytes_per_s, device.host_to_device_bytes_per_s, device.copy_latency_s)
    overheads = (device.forward_overhead_s, device.backward_overhead_s)
    # Overheads and the optimizer are short and noisy: what they add to a layer's time is what counts.
    unit = sum(longest)
    return (unit, *longest, *copies, float(device.memory_bytes), *(unit + seconds for seconds in overheads))


def _close(a: Sequence[float], b: Sequence[float]) -> bool:
    return len(a) == len(b) and all(x == y or max(x, y) <= min(x, y) * (1 + NOISE) for x, y in zip(a, b, strict=True))


def _middle(group: list[DeviceProfile]) -> DeviceProfile:
    """The device that stands for all of ``group``."""

    def curve(curves: list[Curve]) -> Curve:
        return Curve(curves[0].tokens, tuple(median(at) for at in zip(*(c.seconds for c in curves), strict=True)))

    def measured(curves: list[Curve | None]) -> Curve | None:
        """Of a curve that not every profile has."""
        known = [one for one in curves if one is not None]
        alike = len(known) == len(curves) and len({one.tokens for one in known}) == 1
        return curve(known) if alike else None

    first = group[0]
    times = {kind: [device.layers[kind] for device in group] for kind in sorted(first.layers)}
    layers = {
        kind: LayerTimes(
            curve([t.forward_s for t in of]),
            curve([t.backward_s for t in of]),
            measured([t.recompute_s for t in of]),
            measured([t.input_s for t in of]),
            measured([t.weight_s for t in of]),
        )
        for kind, of in times.items()
    }
    return replace(
        first,
        layers=layers,
        memory_bytes=min(device.memory_bytes for device in group),
        memory_reason=first.memory_reason,
        optimizer_fixed_s=median(device.optimizer_fixed_s for device in group),
        optimizer_s_per_parameter=median(device.optimizer_s_per_parameter for device in group),
        copy_latency_s=median(device.copy_latency_s for device in group),
        device_to_host_bytes_per_s=median(device.device_to_host_bytes_per_s for device in group),
        host_to_device_bytes_per_s=median(device.host_to_device_bytes_per_s for device in group),
        cores=median(device.cores for device in group),
        forward_overhead_s=median(device.forward_overhead_s for device in group),
        backward_overhead_s=median(device.backward_overhead_s for device in group),
    )


def _links(profile: ClusterProfile, kind: dict[int, int]) -> tuple[LinkProfile, ...]:
    """Links in groups of equal ends and like speed; each group gets its medians, both directions alike.

    First among the links of two hosts, then among the medians of these: two hosts' speeds that lie near each other must not
    tear the links of one host apart.
    """
    size = profile.model.sequence_length * profile.model.most_sent_bytes_per_token

    def seconds(links: list[LinkProfile]) -> float:
        return median(link.latency_s + size / link.bytes_per_s for link in links)

    def runs(groups: list[list[LinkProfile]]) -> list[list[LinkProfile]]:
        found: list[list[LinkProfile]] = []
        limit = 0.0
        for links in sorted(groups, key=seconds):
            if not found or seconds(links) > limit:
                found.append([])
                limit = seconds(links) * (1 + NOISE)
            found[-1].extend(links)
        return found

    between: dict[tuple[int, int, bool], dict[tuple[str, ...], list[list[LinkProfile]]]] = {}
    for link in profile.links:
        a, b = sorted((kind[link.source], kind[link.destination]))
        hosts = tuple(sorted((profile.devices[link.source].host, profile.devices[link.destination].host)))
        between.setdefault((a, b, link.same_host), {}).setdefault(hosts, []).append([link])
    result: dict[tuple[int, int], LinkProfile] = {}
    for by_host in between.values():
        for links in runs([run for single in by_host.values() for run in runs(single)]):
            latency, speed = median(link.latency_s for link in links), median(link.bytes_per_s for link in links)
            result |= {(k.source, k.destination): replace(k, latency_s=latency, bytes_per_s=speed) for k in links}
    return tuple(result[link.source, link.destination] for link in profile.links)
