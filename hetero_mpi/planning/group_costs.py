"""What it takes a group of ranks of one host to hold a stage together: as one device, and what its members exchange.

A member computes its share of what a layer divides, and all of the rest. In every block the members wait for each other twice
forward and twice backward, so that each layer takes as long as its slowest member, and then the sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from hetero_mpi.planning.memory import stage_memory
from hetero_mpi.planning.types.cluster_changes import restricted
from hetero_mpi.planning.types.cost import EMBEDDING, GRADIENT_BYTES, HEAD, LayerCost, ModelCost
from hetero_mpi.planning.types.plan import StagePlan
from hetero_mpi.planning.types.profile import ClusterProfile, Curve, DeviceProfile, LayerTimes

DIVIDED_TIME = 0.9
"""Of the time of blocks and head so much is divided, where it was not measured: all but norms, residuals and calls."""

Group = tuple[tuple[int, ...], tuple[int, ...]]
"""(ranks, shares)"""


def device_of(profile: ClusterProfile, stage: StagePlan) -> DeviceProfile:
    """What computes a stage: its rank's device, or that of a group."""
    return group_device(profile, stage.ranks, stage.shares) if stage.grouped else profile.devices[stage.ranks[0]]


def group_device(profile: ClusterProfile, ranks: tuple[int, ...], shares: tuple[int, ...]) -> DeviceProfile:
    """A group as one device, as fast as its members are together, with their memory left out: a layer takes as long as its slowest
    member and the group's sums. Backward comes in one part. Its number is the first rank's."""
    known = profile.group_devices
    if (ranks, shares) not in known:
        known[ranks, shares] = _together(profile, ranks, [share / sum(shares) for share in shares])
    return known[ranks, shares]


def _together(profile: ClusterProfile, ranks: Sequence[int], shares: Sequence[float]) -> DeviceProfile:
    members = [profile.devices[rank] for rank in ranks]
    kinds = {layer.kind: layer for layer in profile.model.layers}
    layers = {}
    for kind, layer in kinds.items():
        parts = [member_times(profile, one, kind, share) for one, share in zip(members, shares, strict=True)]
        layers[kind] = _slowest(profile, ranks, layer, parts)
    return replace(
        members[0],
        layers=layers,
        optimizer_fixed_s=max(one.optimizer_fixed_s for one in members),
        optimizer_s_per_parameter=max(
            one.optimizer_s_per_parameter * share for one, share in zip(members, shares, strict=True)
        ),
        forward_overhead_s=max(one.forward_overhead_s for one in members),
        backward_overhead_s=max(one.backward_overhead_s for one in members),
        activation_ratio=max(one.activation_ratio for one in members),
        alone={},
        halved={},
    )


def member_times(profile: ClusterProfile, device: DeviceProfile, kind: str, share: float) -> LayerTimes:
    """What a member computes of a kind of layer, without sums: on the line between half the heads and all, where that was measured.
    More heads take no less time, and a share no less than its part of the whole."""
    whole, half = device.layers[kind], device.halved.get(kind)
    heads = profile.model.heads or 2
    half_share = heads // 2 / heads
    default = 0.0 if kind == EMBEDDING else DIVIDED_TIME

    def part(own: Curve, measured: Curve | None) -> Curve:
        tokens = measured.tokens if measured is not None else own.tokens
        seconds = []
        for count in tokens:
            all_s = own.at(count)
            divided_s = default * all_s
            if measured is not None and share < 1:
                all_s = max(all_s, measured.at(count))  # what is cut may take longer than what is not
                divided_s = min(all_s, (all_s - measured.at(count)) / (1 - half_share))
            seconds.append(all_s - (1 - share) * divided_s)
        return Curve(tokens, tuple(seconds))

    # Half of it is not timed with the forward repeated: that takes as long as the forward.
    repeated = part(whole.recompute_s, None) if whole.recompute_s is not None and half is None else None
    return LayerTimes(
        part(whole.forward_s, half.forward_s if half is not None else None),
        part(whole.backward_s, half.backward_s if half is not None else None),
        repeated,
    )


def _slowest(
    profile: ClusterProfile, ranks: Sequence[int], layer: LayerCost, parts: Sequence[LayerTimes]
) -> LayerTimes:
    """The times of a layer that all members compute, with their sums."""
    forward, backward = layer.group_sums * (layer.kind != HEAD), layer.group_sums * (layer.kind != EMBEDDING)

    def of(curves: Sequence[Curve], sums: int) -> Curve:
        tokens = sorted({count for curve in curves for count in curve.tokens})
        seconds = (
            max(curve.at(count) for curve in curves) + sums * hidden_sum_s(profile, ranks, count) for count in tokens
        )
        return Curve(tuple(tokens), tuple(seconds))

    repeats = [one.recompute_s for one in parts if one.recompute_s is not None]
    return LayerTimes(
        of([one.forward_s for one in parts], forward),
        of([one.backward_s for one in parts], backward),
        of(repeats, forward + backward) if len(repeats) == len(parts) else None,
    )


def hidden_sum_s(profile: ClusterProfile, ranks: Sequence[int], tokens: int) -> float:
    """Seconds in which a group adds up the hidden states of so many tokens, or their gradients: out of the devices, in host memory,
    back to the devices."""
    size_bytes = tokens * profile.model.layers[0].boundary_bytes_per_token
    members = [profile.devices[rank] for rank in ranks]
    copies_s = max(
        2 * one.copy_latency_s + size_bytes * (1 / one.device_to_host_bytes_per_s + 1 / one.host_to_device_bytes_per_s)
        for one in members
    )
    return copies_s + sum_s(profile, ranks, size_bytes)


def sum_s(profile: ClusterProfile, ranks: Sequence[int], size_bytes: float) -> float:
    """Seconds in which ranks of one host add up so many bytes in its memory: around a ring, 2 (n - 1) hops of 1/n of the bytes, as
    long as was measured of two ranks, or as the slowest link takes."""
    hops, each = 2 * (len(ranks) - 1), size_bytes / len(ranks)
    host = profile.host(ranks[0])
    if host is not None and host.sum_bytes_per_s is not None:
        return hops * (host.sum_latency_s / 2 + each / host.sum_bytes_per_s)
    links = [profile.link(a, b) for a in ranks for b in ranks if a != b]
    return hops * max(link.latency_s + each / link.bytes_per_s for link in links)


def broadcast_s(profile: ClusterProfile, stage: StagePlan, tokens: int, back: bool) -> float:
    """Seconds in which the leader of a group gives the others what a stage's forward begins with, or its backward: the tensor that
    came from another stage. 0 at the ends of the chain, and of one rank."""
    layers = profile.model.layers
    if not stage.grouped or (stage.last == len(layers) if back else stage.first == 0):
        return 0.0
    size_bytes = tokens * layers[(stage.last if back else stage.first) - 1].boundary_bytes_per_token
    leader, *others = stage.ranks
    links = [profile.link(leader, other) for other in others]
    rounds = math.ceil(math.log2(len(stage.ranks)))
    into_s = max(
        one.copy_latency_s + size_bytes / one.host_to_device_bytes_per_s
        for one in (profile.devices[rank] for rank in others)
    )
    return rounds * max(link.latency_s + size_bytes / link.bytes_per_s for link in links) + into_s


def member_trained(model: ModelCost, stage: StagePlan, member: int) -> int:
    """Trained parameters of a stage that a member of a group holds."""
    return sum(layer.trainable_parameters for layer in model.part(stage.share(member)).layers[stage.first : stage.last])


def whole_sums_s(profile: ClusterProfile, stage: StagePlan) -> float:
    """Seconds, once a step, in which the gradients are added up of what every member of a group holds."""
    if not stage.grouped:
        return 0.0
    held = [layer.trainable_parameters - layer.divided_trainable for layer in profile.model.layers]
    own = [GRADIENT_BYTES * count for count in held[stage.first : stage.last] if count]
    return sum(sum_s(profile, stage.ranks, size_bytes) for size_bytes in own)


def member_chain_s(profile: ClusterProfile, device: DeviceProfile, tokens: int) -> tuple[float, float]:
    """Seconds of the whole chain there and back on a member: (what it computes whatever its share, what is divided)."""

    def chain_s(share: float) -> float:
        times = {kind: member_times(profile, device, kind, share) for kind in device.layers}
        return sum(
            times[layer.kind].forward_s.at(tokens) + times[layer.kind].backward_s.at(tokens)
            for layer in profile.model.layers
        )

    everybodys_s = chain_s(0.0)
    return everybodys_s, chain_s(1.0) - everybodys_s


def contracted(profile: ClusterProfile, groups: Sequence[Group], tokens: int, room: float = 1.0) -> ClusterProfile:
    """The cluster in which each group is one rank, numbered anew in the order of first ranks: as fast as the group, with memory for
    what its members hold together (the part ``room`` of it), and reached by messages that its leader has handed on."""
    followers = {rank for ranks, _ in groups for rank in ranks[1:]}
    kept = [rank for rank in range(len(profile.devices)) if rank not in followers]
    number = {rank: place for place, rank in enumerate(kept)}
    small = restricted(profile, kept)
    devices, links = list(small.devices), {(link.source, link.destination): link for link in small.links}
    for ranks, shares in groups:
        own = number[ranks[0]]
        memory = math.floor(room * _memory_bytes(profile, ranks, shares, tokens))
        devices[own] = replace(group_device(profile, ranks, shares), rank=own, memory_bytes=memory)
        stage = StagePlan(ranks, 1, len(profile.model.layers) - 1, 0, shares=shares)
        row_bytes = max(1, profile.model.layers[0].boundary_bytes_per_token)
        arrives = [broadcast_s(profile, stage, count, back=False) for count in (0, tokens)]
        each_s = (arrives[1] - arrives[0]) / (tokens * row_bytes)
        for other in range(len(kept)):
            if other != own:
                link = links.get((other, own), small.link(other, own))
                speed = 1 / (1 / link.bytes_per_s + each_s) if each_s else link.bytes_per_s
                links[other, own] = replace(link, latency_s=link.latency_s + arrives[0], bytes_per_s=speed)
    return replace(small, devices=tuple(devices), links=tuple(links.values()))


def _memory_bytes(profile: ClusterProfile, ranks: Sequence[int], shares: Sequence[int], tokens: int) -> float:
    """How large a stage may be, as one rank would hold it, that a group can hold."""
    whole = stage_memory(profile.model, 0, len(profile.model.layers), tokens, 1)
    found = []
    for rank, share in zip(ranks, shares, strict=True):
        part = stage_memory(profile.model.part(share / sum(shares)), 0, len(profile.model.layers), tokens, 1)
        found.append(profile.devices[rank].memory_bytes * whole.total / part.total)
    return min(found)
