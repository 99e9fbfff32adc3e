"""Costs of a tensor-parallel group on one host: the group as one device, and its internal exchanges.

Each member computes its shard of the sharded layers and all of the other layers. Members synchronise twice per block, in
forward and in backward. So a layer takes as long as its slowest member plus the all-reduces; in a layer with experts, the
slowest members of the expert part and of the rest add up.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from hetero_mpi.planning.contention import copying_at_once
from hetero_mpi.planning.memory import stage_memory
from hetero_mpi.planning.types.cluster_changes import restricted
from hetero_mpi.planning.types.cost import LayerCost
from hetero_mpi.planning.types.plan import StagePlan
from hetero_mpi.planning.types.profile import ClusterProfile, Curve, DeviceProfile, LayerTimes
from hetero_mpi.planning.types.sizes import EMBEDDING, GRADIENT_BYTES, HEAD

DIVIDED_TIME_RATIO = 0.9
"""Default fraction of block and head time that is sharded: all but norms, residuals and call overhead."""
BUSIEST_SPREAD_RATIO = 1.5
"""The busier half of an untrained Mixtral's 8 experts gets 54 to 94 % of the tokens, 77 % on average: 1.5 times its share
(``benchmarks/RESULTS.md``). Which half varies by layer and input."""


def device_of(profile: ClusterProfile, stage: StagePlan) -> DeviceProfile:
    """Return the device that computes a stage: its rank's device, or its tensor-parallel group as one device."""
    return group_device(profile, stage) if stage.grouped else profile.devices[stage.ranks[0]]


def group_device(profile: ClusterProfile, group: StagePlan, alone: int | None = None) -> DeviceProfile:
    """Return the group, or only its rank ``alone`` without exchanges, as one device (``memory_bytes`` is meaningless)."""
    ranks = group.ranks if alone is None else (alone,)
    key = "group", group.ranks, group.shares, group.experts, ranks
    return profile.cached(key, lambda: _group_as_device(profile, group, ranks))


def _group_as_device(profile: ClusterProfile, group: StagePlan, ranks: Sequence[int]) -> DeviceProfile:
    members = [profile.devices[rank] for rank in ranks]
    layers = {}
    for kind, layer in {layer.kind: layer for layer in profile.model.layers}.items():
        parts = [
            member_times(
                profile, device, kind, group.share(member), busiest(group.expert_share(member), profile.model.experts)
            )
            for device, member in zip(members, map(group.ranks.index, ranks), strict=True)
        ]
        layers[kind] = _slowest(profile, ranks, layer if len(ranks) > 1 else replace(layer, group_sums=0), parts)
    trained = [
        sum(layer.trainable_parameters for layer in profile.model.part(group.share(i), group.expert_share(i)).layers)
        for i in range(len(members))
    ]
    all_trained = max(1, sum(layer.trainable_parameters for layer in profile.model.layers))
    return replace(
        members[0],
        layers=layers,
        optimizer_fixed_s=max(device.optimizer_fixed_s for device in members),
        optimizer_s_per_parameter=max(
            device.optimizer_s_per_parameter * count / all_trained
            for device, count in zip(members, trained, strict=True)
        ),
        forward_overhead_s=max(device.forward_overhead_s for device in members),
        backward_overhead_s=max(device.backward_overhead_s for device in members),
        activation_ratio=max(device.activation_ratio for device in members),
        halved={},
        without_experts={},
    )


def busiest(share: float, experts: int | None) -> float:
    """Upper estimate of the fraction of tokens routed to a member that holds this ``share`` of the experts."""
    return min(1.0, share + BUSIEST_SPREAD_RATIO * math.sqrt(share * (1 - share) / (experts or 1)))


class MemberTimes(NamedTuple):
    """Times of one layer kind on one member, excluding all-reduces."""

    experts: LayerTimes
    rest: LayerTimes
    """Times of everything else, computed before the all-reduce that precedes the experts."""


def member_times(
    profile: ClusterProfile, device: DeviceProfile, kind: str, share: float, experts: float
) -> MemberTimes:
    """Times of a member with these shares of heads and experts, interpolated between half and full if half was measured.

    Times never decrease with the share, and are at least that share of the full time.
    """
    full_times, half, without = device.layers[kind], device.halved.get(kind), device.without_experts.get(kind)
    half_share = _half_share(profile.model.heads)
    half_experts = _half_share(profile.model.experts)
    default = 0.0 if kind == EMBEDDING else DIVIDED_TIME_RATIO

    def part(full_curve: Curve, measured: Curve | None, without_experts_curve: Curve | None) -> tuple[Curve, Curve]:
        tokens, seconds = (measured or full_curve).tokens, []
        for count in tokens:
            all_s, experts_s = full_curve.at(count), 0.0
            divided_s = default * all_s
            if measured is not None and (share < 1 or experts < 1):
                half_s = measured.at(count)
                all_s = max(all_s, half_s)  # a shard may take longer than the full layer
                if without_experts_curve is not None:
                    experts_s = min(all_s, max(0.0, half_s - without_experts_curve.at(count)) / half_experts)
                divided_s = (all_s - half_s - (1 - half_experts) * experts_s) / (1 - half_share)
                divided_s = min(all_s - experts_s, max(0.0, divided_s))
            seconds.append((experts * experts_s, all_s - experts_s - (1 - share) * divided_s))
        of_experts, of_rest = zip(*seconds, strict=True)
        return Curve(tokens, of_experts), Curve(tokens, of_rest)

    forward = part(full_times.forward_s, half.forward_s if half else None, without.forward_s if without else None)
    backward = part(full_times.backward_s, half.backward_s if half else None, without.backward_s if without else None)
    # Half of it is not timed with the forward repeated: that takes as long as the forward.
    timed = full_times.recompute_s if half is None else None
    repeated = part(timed, None, None) if timed is not None else (None, None)
    return MemberTimes(*map(LayerTimes, forward, backward, repeated))


def _half_share(parts: int | None) -> float:
    """Fraction of the heads or experts in one half, rounded down as in the profiler."""
    return (parts // 2) / parts if parts is not None and parts > 1 else 0.5


def _slowest(
    profile: ClusterProfile, ranks: Sequence[int], layer: LayerCost, parts: Sequence[MemberTimes]
) -> LayerTimes:
    """Times of a layer on the whole group: those of the slowest member, plus the all-reduces."""
    forward, backward = layer.group_sums * (layer.kind != HEAD), layer.group_sums * (layer.kind != EMBEDDING)

    def slowest_curve(pairs: Sequence[tuple[Curve, Curve]], sums: int) -> Curve:
        """Sum the slowest members' times for experts and rest; ``pairs`` holds each member's (experts, rest) curves."""
        tokens = sorted({count for pair in pairs for curve in pair for count in curve.tokens})
        seconds = (
            sum(max(curve.at(count) for curve in curves) for curves in zip(*pairs, strict=True))
            + sums * hidden_sum_s(profile, ranks, count)
            for count in tokens
        )
        return Curve(tuple(tokens), tuple(seconds))

    repeats = [
        (e.recompute_s, r.recompute_s) for e, r in parts if e.recompute_s is not None and r.recompute_s is not None
    ]
    return LayerTimes(
        slowest_curve([(experts.forward_s, rest.forward_s) for experts, rest in parts], forward),
        slowest_curve([(experts.backward_s, rest.backward_s) for experts, rest in parts], backward),
        slowest_curve(repeats, forward + backward) if len(repeats) == len(parts) else None,
    )


def hidden_sum_s(profile: ClusterProfile, ranks: Sequence[int], tokens: int) -> float:
    """Seconds for a group to all-reduce hidden states or their gradients, including copies to and from host memory."""
    size_bytes = tokens * profile.model.layers[0].boundary_bytes_per_token
    members = copying_at_once(profile, ranks).values()
    copies_s = max(
        2 * d.copy_latency_s + size_bytes * (1 / d.device_to_host_bytes_per_s + 1 / d.host_to_device_bytes_per_s)
        for d in members
    )
    return copies_s + sum_s(profile, ranks, size_bytes)


def sum_s(profile: ClusterProfile, ranks: Sequence[int], size_bytes: float) -> float:
    """Seconds of a ring all-reduce in host memory: 2 (n - 1) hops of 1/n of the bytes, measured or by the slowest link."""
    hops, each = 2 * (len(ranks) - 1), size_bytes / len(ranks)
    host = profile.host(ranks[0])
    if host is not None and host.sum_bytes_per_s is not None:
        return hops * (host.sum_latency_s / 2 + each / host.sum_bytes_per_s)
    links = [profile.link(a, b) for a in ranks for b in ranks if a != b]
    return hops * max((link.latency_s + each / link.bytes_per_s for link in links), default=0.0)


def broadcast_s(profile: ClusterProfile, stage: StagePlan, tokens: int, is_backward: bool) -> float:
    """Seconds to broadcast a stage's input (``is_backward``: output gradient) to its group; 0 if it receives none."""
    layers = profile.model.layers
    if not stage.grouped or (stage.last == len(layers) if is_backward else stage.first == 0):
        return 0.0
    size_bytes = tokens * layers[(stage.last if is_backward else stage.first) - 1].boundary_bytes_per_token
    leader, *followers = stage.ranks
    links = [profile.link(leader, follower) for follower in followers]
    rounds = math.ceil(math.log2(len(stage.ranks)))
    into_s = max(
        device.copy_latency_s + size_bytes / device.host_to_device_bytes_per_s
        for device in copying_at_once(profile, followers).values()
    )
    return rounds * max(link.latency_s + size_bytes / link.bytes_per_s for link in links) + into_s


def whole_sums_s(profile: ClusterProfile, stage: StagePlan) -> float:
    """Seconds per step to all-reduce the gradients of parameters that every member of a group holds."""
    replicated_parameters = [layer.trainable_parameters - layer.divided_trainable for layer in profile.model.layers]
    gradient_bytes = [GRADIENT_BYTES * count for count in replicated_parameters[stage.first : stage.last] if count]
    return sum(sum_s(profile, stage.ranks, size_bytes) for size_bytes in gradient_bytes)


class ChainSeconds(NamedTuple):
    """Seconds for forward and backward through all layers on one member."""

    replicated: float
    """Time that does not depend on the member's share."""
    divided: float
    """Time that is divided by heads."""
    experts: float
    """Time of all experts; 0 if not measured."""

    def with_heads(self, share: float) -> float:
        """Seconds with this share of the heads, excluding experts."""
        return self.replicated + share * self.divided


def member_chain_s(profile: ClusterProfile, device: DeviceProfile, tokens: int) -> ChainSeconds:
    def chain_s(share: float, experts: float) -> tuple[float, float]:
        times = {kind: member_times(profile, device, kind, share, experts) for kind in device.layers}
        seconds = [
            [layer_times.forward_s.at(tokens) + layer_times.backward_s.at(tokens) for layer_times in times[layer.kind]]
            for layer in profile.model.layers
        ]
        of_experts, of_rest = map(sum, zip(*seconds, strict=True))
        return of_experts, of_rest

    _, replicated_s = chain_s(0.0, 0.0)
    # Half the experts: only sharded layers separate experts from the rest.
    half_s, all_s = chain_s(1.0, 0.5)
    return ChainSeconds(replicated_s, all_s - replicated_s, 2 * half_s)


def contracted(profile: ClusterProfile, groups: Sequence[StagePlan], tokens: int, part: float = 1.0) -> ClusterProfile:
    """Merge each group into one rank with ``part`` of its joint memory; links into it include the leader's broadcast."""
    followers = {rank for group in groups for rank in group.ranks[1:]}
    kept_ranks = [rank for rank in range(len(profile.devices)) if rank not in followers]
    number = {rank: index for index, rank in enumerate(kept_ranks)}
    small = restricted(profile, kept_ranks)
    devices, links = list(small.devices), {(link.source, link.destination): link for link in small.links}
    for group in groups:
        leader = number[group.ranks[0]]
        memory = math.floor(part * _memory_bytes(profile, group, tokens))
        devices[leader] = replace(group_device(profile, group), rank=leader, memory_bytes=memory)
        inner = replace(group, first=1, last=len(profile.model.layers) - 1)
        row_bytes = max(1, profile.model.layers[0].boundary_bytes_per_token)
        arrives = [broadcast_s(profile, inner, count, is_backward=False) for count in (0, tokens)]
        each_s = (arrives[1] - arrives[0]) / (tokens * row_bytes)
        for source in range(len(kept_ranks)):
            if source != leader:
                link = links.get((source, leader), small.link(source, leader))
                speed = 1 / (1 / link.bytes_per_s + each_s) if each_s else link.bytes_per_s
                links[source, leader] = replace(link, latency_s=link.latency_s + arrives[0], bytes_per_s=speed)
    return replace(small, devices=tuple(devices), links=tuple(links.values()))


def _memory_bytes(profile: ClusterProfile, group: StagePlan, tokens: int) -> float:
    """Size in bytes of the largest single-rank stage that the group can hold."""
    layers = len(profile.model.layers)
    model = profile.model.sliced(tokens)
    full_bytes = float(stage_memory(model, 0, layers, tokens, 1).total)
    limits = []
    for member, rank in enumerate(group.ranks):
        part = model.part(group.share(member), group.expert_share(member))
        limits.append(profile.devices[rank].memory_bytes * full_bytes / stage_memory(part, 0, layers, tokens, 1).total)
    return min(limits)
