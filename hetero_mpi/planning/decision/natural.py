"""Among plans that are equally good, the one that a person would have written: ranks in their own order.

Measured times differ by a few per cent from one measurement to the next, and with them which order of equal devices looks
fastest. Where the request says that a small share of the step does not matter (``PlanRequest.indifference``), the planner's
choice is replaced by a plan at most that much slower

1. on the lowest-numbered of alike ranks, all in ascending order, where there is one pipeline; else
2. on these, where alike ranks stand in ascending order among themselves; else
3. and 4., the same on the very ranks that were chosen.

With an indifference of 0 only ranks that are equal are exchanged (2. and 4.); else those that differ by no more than a
measurement's noise, as ``smoothed`` has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from statistics import median
from typing import Any

from hetero_mpi.planning.annealing.anneal import Annealer
from hetero_mpi.planning.annealing.costs import ROUNDING
from hetero_mpi.planning.annealing.lines import Lines
from hetero_mpi.planning.tables import NOISE, in_classes, rank_classes
from hetero_mpi.planning.types.codec import encode
from hetero_mpi.planning.types.plan import Plan
from hetero_mpi.planning.types.profile import ClusterProfile, Curve, DeviceProfile, LayerTimes, LinkProfile


def in_natural_order(plan: Plan, step_s: float, annealer: Annealer) -> tuple[Plan, float]:
    """``plan``, which takes ``step_s``, or one that the request is indifferent to and whose ranks are more nearly in order."""
    profile, request = annealer.profile, annealer.request
    limit_s = step_s * (1 + max(request.indifference, ROUNDING))
    calm = smoothed(profile) if request.indifference > 0 else profile
    alike = {rank: members for members in rank_classes(calm) for rank in members}
    lines = annealer.lines(plan)
    chosen = [annealer.ranks[rank] for line in lines for rank in line.ranks]
    for ranks in _wishes(chosen, alike, len(lines) == 1 and request.indifference > 0):
        if ranks == chosen:
            break
        left = iter(annealer.ranks.index(rank) for rank in ranks)
        wished: Lines = tuple(line._replace(ranks=tuple(next(left) for _ in line.ranks)) for line in lines)
        found = annealer.in_order(wished, limit_s)
        if found is not None:
            return found
    return plan, step_s


def _wishes(ranks: list[int], alike: dict[int, list[int]], one: bool) -> Iterator[list[int]]:
    """Orders of ranks that would be preferred to ``ranks``, the most wanted first."""
    classes = {id(alike[rank]): alike[rank] for rank in ranks}
    counted = (sorted(members)[: sum(rank in members for rank in ranks)] for members in classes.values())
    for wanted in (sorted(rank for members in counted for rank in members), sorted(ranks)):
        if one:
            yield wanted
        yield _filled(ranks, wanted, alike)


def _filled(ranks: list[int], ascending: list[int], alike: dict[int, list[int]]) -> list[int]:
    """Each place keeps its class; the members of a class take their places in ascending order."""
    waiting, result = list(ascending), []
    for rank in ranks:
        chosen = next(other for other in waiting if other in alike[rank])
        waiting.remove(chosen)
        result.append(chosen)
    return result


def smoothed(profile: ClusterProfile) -> ClusterProfile:
    """``profile`` with like devices made equal, and like links between like devices.

    Devices are alike when they have the same name, backend and dtypes, and times, copies and memory within ``NOISE`` of the
    fastest of them; they get the medians of their times and the least of their memories, so that what fits here fits each of
    them. Links are alike when they join the same kinds of devices (on one host or not) and their times for the model's largest
    message are within ``NOISE`` of the fastest.
    """
    groups = _device_groups(profile)
    kind = {device.rank: index for index, group in enumerate(groups) for device in group}
    middles = [_middle(group) for group in groups]
    devices = tuple(replace(middles[kind[one.rank]], rank=one.rank, host=one.host) for one in profile.devices)
    return replace(profile, devices=devices, links=_links(profile, kind))


def _device_groups(profile: ClusterProfile) -> list[list[DeviceProfile]]:
    def what(device: DeviceProfile) -> tuple[str, ...]:
        shapes = [(kind, t.forward_s.tokens, t.backward_s.tokens) for kind, t in sorted(device.layers.items())]
        return device.backend, device.name, repr(device.dtypes), repr(shapes), repr(device.shares_host_memory)

    def order(device: DeviceProfile) -> tuple[tuple[str, ...], tuple[float, ...], str]:
        record = {key: value for key, value in encode(device).items() if key not in ("rank", "host", "memory_reason")}
        return what(device), _figures(device), repr(sorted(record.items()))

    def alike(a: DeviceProfile, b: DeviceProfile) -> bool:
        return what(a) == what(b) and _close(_figures(a), _figures(b))

    return in_classes(sorted(profile.devices, key=order), alike)


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

    def curve(curves: list[Curve | None]) -> Any:
        """None: not every profile has it."""
        known = [one for one in curves if one is not None]
        if len(known) < len(curves) or len({one.tokens for one in known}) > 1:
            return None
        return Curve(known[0].tokens, tuple(map(median, zip(*(one.seconds for one in known), strict=True))))

    def times(kind: str) -> LayerTimes:
        of = [device.layers[kind] for device in group]
        return LayerTimes(*(curve([getattr(one, field.name) for one in of]) for field in fields(LayerTimes)))

    numbers = [field.name for field in fields(DeviceProfile) if field.type == "float"]
    middle: dict[str, Any] = {name: median(getattr(device, name) for device in group) for name in numbers}
    least, layers = (
        min(device.memory_bytes for device in group),
        {kind: times(kind) for kind in sorted(group[0].layers)},
    )
    return replace(group[0], layers=layers, memory_bytes=least, **middle)


def _links(profile: ClusterProfile, kind: dict[int, int]) -> tuple[LinkProfile, ...]:
    """Links in groups of equal ends and like speed; each group gets its medians, both directions alike.

    First among the links of two hosts, then among the medians of these: two hosts' speeds that lie near each other must not
    tear the links of one host apart.
    """
    size = profile.model.sequence_length * profile.model.most_sent_bytes_per_token

    def seconds(links: list[LinkProfile]) -> float:
        return median(link.latency_s + size / link.bytes_per_s for link in links)

    def runs(groups: list[list[LinkProfile]]) -> list[list[LinkProfile]]:
        near = in_classes(sorted(groups, key=seconds), lambda a, b: seconds(b) <= seconds(a) * (1 + NOISE))
        return [[link for links in run for link in links] for run in near]

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
