"""Classes of interchangeable ranks, and tables of layer and link times."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from hetero_mpi.planning.bounds import usable_devices
from hetero_mpi.planning.device_times import host_optimizer_s, offload_s, repeated_s, weights_s
from hetero_mpi.planning.memory import StageMode
from hetero_mpi.planning.types.cost import ModelCost
from hetero_mpi.planning.types.profile import ClusterProfile, DeviceProfile
from hetero_mpi.planning.types.request import PlanRequest
from hetero_mpi.util.grouping import Item, grouped

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
MAX_LEVEL_DIFFERENCE = 0.12
"""Maximum relative difference between figures that count as equal; each is measured within 5 %."""
MAX_PAIRED_RANKS = 128
"""Maximum number of ranks for tables by pair of ranks; larger clusters have tables by pair of hosts."""


def rank_classes(profile: ClusterProfile) -> list[list[int]]:
    """Partition the usable ranks into classes of interchangeable ranks.

    Two ranks are interchangeable if their devices are equal, swapping them preserves every link, and their hosts have equal
    limits. They are ranks of one host, or the only ranks of equal hosts.
    """
    contents, hosts = rank_contents(profile), [device.host for device in profile.devices]
    ordered = sorted(contents, key=lambda rank: (contents[rank], rank))
    # With host links only, equal ranks of one host have equal links: one of them represents all.
    groups = in_classes(ordered, lambda a, b: not profile.links and (hosts[a], contents[a]) == (hosts[b], contents[b]))
    ranks = {group[0]: group for group in groups}
    pairs = ((pair, profile.link(*pair)) for pair in itertools.permutations(ranks, 2))
    links = {pair: (link.latency_s, link.bytes_per_s) for pair, link in pairs}

    def exchangeable(a: int, b: int) -> bool:
        return bool(
            contents[a] == contents[b]
            and (
                hosts[a] == hosts[b]
                or hosts.count(hosts[a]) == hosts.count(hosts[b]) == 1
                or (profile.links and profile.host(a) is None)
            )
            and links[a, b] == links[b, a]
            and all(links[a, x] == links[b, x] and links[x, a] == links[x, b] for x in ranks if x not in (a, b))
        )

    return [sorted(rank for first in firsts for rank in ranks[first]) for firsts in in_classes(ranks, exchangeable)]


def in_classes(items: Iterable[Item], alike: Callable[[Item, Item], bool]) -> list[list[Item]]:
    """Group each item with the first class whose first member is ``alike``."""
    classes: list[list[Item]] = []
    for item in items:
        fitting = next((members for members in classes if alike(members[0], item)), None)
        if fitting is None:
            classes.append([item])
        else:
            fitting.append(item)
    return classes


def rank_contents(profile: ClusterProfile) -> dict[int, str]:
    """Map each usable rank to a string of all its properties except its number and host name."""
    counts = Counter(device.host for device in profile.devices)
    content_by_rank = {}
    for device in usable_devices(profile):
        layers = sorted((kind, repr(times)) for kind, times in device.layers.items())
        host = profile.host(device.rank)
        limits = None if host is None else (host.memory_bytes, host.shared_nic, host.cores, counts[device.host] == 1)
        plain = replace(device, rank=0, host="", memory_reason="", layers={})
        content_by_rank[device.rank] = f"{limits} {layers} {vars(plain)}"
    return content_by_rank


def may_split(profile: ClusterProfile, rank: int) -> bool:
    """Whether ``rank`` has times of a split backward for all layer kinds except the embedding, which has no input."""
    layers = profile.devices[rank].layers
    times = [layers[kind] for kind in {layer.kind for layer in profile.model.layers[1:]}]
    return all(t.input_s is not None and t.weight_s is not None for t in times)


class StageGrid:
    """Stages [first, last) with up to ``longest`` layers, indexed [first, last - first - 1]."""

    def __init__(self, layers: int, longest: int) -> None:
        first, count = np.arange(layers + 1)[:, None], np.arange(1, min(longest, layers) + 1)[None, :]
        self.first, self.last, self.inside = first, np.minimum(first + count, layers), first + count <= layers
        self.count = np.maximum(1, self.last - first)

    def over(self, seconds: Floats) -> Floats:
        """Sum ``seconds`` [layer] over the layers of every stage."""
        total = np.concatenate([[0.0], np.cumsum(seconds)])
        return np.asarray(total[self.last] - total[self.first])


def seconds_by_mode(
    model: ModelCost, request: PlanRequest, devices: list[DeviceProfile], micro_batch: int, slices: Sequence[int]
) -> tuple[list[StageMode], Floats, Floats, Floats, Floats]:
    """Return the memory strategies, fastest first, and the tables of ``_mode_s`` by strategy."""
    # Offloaded with slices of any of the sizes or none, resident with the smallest or none.
    parts = [None, *sorted({size for size in slices if size < micro_batch})]
    resident = [StageMode(again, False, part) for part in parts[:2] for again in sorted(set(request.recompute_choices))]
    streamed = parts if slices else []
    every = [-(-micro_batch // (part or micro_batch)) for part in streamed]
    modes = resident + [
        StageMode(False, True, part, n) for part, most in zip(streamed, every, strict=True) for n in (0, most)
    ]
    seconds = [_mode_s(model, devices, mode, micro_batch, request.sequence_length) for mode in modes]
    forward_s, backward_s, overhead_s, step_s = map(np.array, zip(*seconds, strict=True))
    order = np.argsort((forward_s + backward_s).sum(axis=(1, 2)) + overhead_s.sum(axis=(1, 2)), kind="stable")
    return [modes[i] for i in order.tolist()], forward_s[order], backward_s[order], overhead_s[order], step_s[order]


def _mode_s(
    model: ModelCost, devices: list[DeviceProfile], mode: StageMode, micro_batch: int, sequence_length: int
) -> tuple[list[list[float]], list[list[float]], list[tuple[float, float]], list[float]]:
    """Return tables of seconds: forward and backward [rank][layer], overhead [rank], and optimizer [rank] per parameter.

    An offloaded layer is a separate call, recomputes slices that are not kept, and takes at least as long as its copies.
    """
    part, ends = mode.slice_sequences or micro_batch, len(model.layers) - 1
    parts = [min(part, micro_batch - begin) * sequence_length for begin in range(0, micro_batch, part)]
    kinds = {layer.kind: index for index, layer in enumerate(model.layers)}
    forward_s, backward_s, overhead_s, step_s = [], [], [], []
    for device in devices:
        call_s, repeated_slices = device.forward_overhead_s, parts[mode.kept_slices :]
        calls_s = len(parts) * call_s, len(parts) * device.backward_overhead_s
        seconds = dict[str, tuple[float, float]]()
        for kind, index in kinds.items():
            times = device.layers[kind]
            there_s, back_s = (sum(map(curve_at, parts)) for curve_at in (times.forward_s.at, times.backward_s.at))
            again_s = sum(repeated_s(times, tokens) for tokens in repeated_slices)
            if mode.streamed:
                least_s = _copies_s(device, model, index)
                there_s, back_s = there_s + calls_s[0], back_s + again_s + calls_s[1] + len(repeated_slices) * call_s
                seconds[kind] = max(least_s[0], there_s), max(least_s[1], back_s)
            else:
                seconds[kind] = there_s, back_s + again_s * (mode.recompute and 0 < index < ends)
        forward_s.append([seconds[layer.kind][0] for layer in model.layers])
        backward_s.append([seconds[layer.kind][1] for layer in model.layers])
        overhead_s.append((0.0, 0.0) if mode.streamed else calls_s)
        steps_on_host = mode.streamed and model.trained_whole and not device.shares_host_memory
        step_s.append(host_optimizer_s(device) if steps_on_host else device.optimizer_s_per_parameter)
    return forward_s, backward_s, overhead_s, step_s


def _copies_s(device: DeviceProfile, model: ModelCost, layer: int) -> tuple[float, float]:
    """Seconds of the copies that lower-bound an offloaded layer's forward and backward."""
    weight_s, coming = weights_s(device, model.streamed_bytes(layer)), model.trained_whole * model.gradient_bytes(layer)
    return weight_s, max(weight_s, offload_s(device, model, layer) + weights_s(device, coming))


def links_of(profile: ClusterProfile, devices: list[DeviceProfile]) -> tuple[Indices, Floats, Floats]:
    """Return each rank's position, and latency and seconds per byte between positions, including copies at both ends."""
    hosts = list(dict.fromkeys(device.host for device in devices))
    by_rank = len(devices) <= MAX_PAIRED_RANKS
    positions = [i if by_rank else hosts.index(device.host) for i, device in enumerate(devices)]
    members = [*grouped(devices, lambda device: device.rank if by_rank else device.host).values()]
    latency_s, per_byte_s = np.zeros((len(members), len(members))), np.zeros((len(members), len(members)))
    for a, b in itertools.product(range(len(members)), repeat=2):
        if a == b and len(members[a]) < 2:
            continue
        out, into = members[a][0], members[b][1 if a == b else 0]
        link = profile.link(out.rank, into.rank)
        latency_s[a, b] = out.copy_latency_s + link.latency_s + into.copy_latency_s
        per_byte_s[a, b] = (
            1 / out.device_to_host_bytes_per_s + 1 / link.bytes_per_s + 1 / into.host_to_device_bytes_per_s
        )
    return np.array(positions), latency_s, per_byte_s


def in_own_order(profile: ClusterProfile, tokens: int) -> list[DeviceProfile]:
    """Return the usable devices by host, in an order independent of rank numbers and host names (except for ties)."""
    devices = usable_devices(profile)
    hosts = grouped(devices, lambda device: device.host)
    # In large clusters one rank of a host says how it is linked to the others.
    ends = devices if len(devices) <= MAX_PAIRED_RANKS else [members[0] for members in hosts.values()]

    size = tokens * profile.model.most_sent_bytes_per_token
    numbers = [end.rank for end in ends]
    seconds = profile.messages_s(numbers, size) if len(ends) > 1 else np.zeros((len(ends), len(ends)))
    # Exactly rounded sums: the same in whatever order the others come.
    linked = {rank: math.fsum([*seconds[i], *seconds[:, i]]) for i, rank in enumerate(numbers)}

    def key(device: DeviceProfile) -> tuple[float, ...]:
        chain_s = math.fsum(c.at(tokens) for t in device.layers.values() for c in (t.forward_s, t.backward_s))
        steps = device.optimizer_fixed_s, device.optimizer_s_per_parameter
        return (-device.memory_bytes, chain_s, linked.get(device.rank, 0.0), *steps)

    ordered = {name: sorted(members, key=lambda device: (key(device), device.rank)) for name, members in hosts.items()}
    names = sorted(hosts, key=lambda name: ([key(device) for device in ordered[name]], ordered[name][0].rank))
    return [device for name in names for device in ordered[name]]


def levels(values: Floats) -> Floats:
    """Round each value up to a larger one within ``MAX_LEVEL_DIFFERENCE``, if there is one."""
    result, top = np.empty(len(values)), math.inf
    for index in np.argsort(-values, kind="stable").tolist():
        if values[index] * (1 + MAX_LEVEL_DIFFERENCE) < top:
            top = float(values[index])
        result[index] = top
    return result
