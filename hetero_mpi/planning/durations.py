"""How long each action takes: the one source of times for planner, simulator and report."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from operator import add

import numpy as np

from hetero_mpi.comm.transport import ring_of
from hetero_mpi.planning.contention import while_running
from hetero_mpi.planning.device_times import (
    compute_s,
    disk_s,
    layer_s,
    offload_s,
    optimizer_s,
    overhead_s,
    recompute_s,
    repeated_s,
    weights_s,
)
from hetero_mpi.planning.group_costs import broadcast_s, device_of, group_device, whole_sums_s
from hetero_mpi.planning.owners import owned_share
from hetero_mpi.planning.schedule import COMPUTE, Action, Op, held_by, reduced_layers, tied_heads
from hetero_mpi.planning.types.cost import ModelCost
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan
from hetero_mpi.planning.types.profile import ClusterProfile, DeviceProfile
from hetero_mpi.planning.types.sizes import DTYPE_BYTES, GRADIENT_BYTES, STREAMED_LAYERS


def update_s(number: int, plan: Plan, profile: ClusterProfile) -> float:
    """Seconds of the optimizer step of the rank that holds a stage: over the parameters that it owns. Of a group: of its slowest
    member, over its parts of what its leader owns, after the sums of what all of them hold."""
    stage = plan.numbered[number][2]
    if stage.grouped:
        parts = (profile.model.part(stage.share(one), stage.expert_share(one)) for one in range(len(stage.ranks)))
        each = zip(stage.ranks, (owned_share(plan, part, number) for part in parts), strict=True)
        seconds = (optimizer_s(profile, profile.devices[rank], count) for rank, count in each)
        return whole_sums_s(profile, stage) + max(seconds)
    owned = sum(owned_share(plan, profile.model, one) for one in plan.of_rank(stage.ranks[0]))
    return optimizer_s(profile, profile.devices[stage.ranks[0]], owned, stage.streamed)


def _late_values_s(number: int, plan: Plan, profile: ClusterProfile) -> float:
    """Seconds that a stage's first forward waits for new values from their owners, which come layer by layer beside it."""
    _, index, stage = plan.numbered[number]
    if len(plan.pipelines) == 1:
        return 0.0
    alike: dict[tuple[tuple[int, ...], int], list[int]] = {}
    for layer in range(stage.first, stage.last):
        alike.setdefault((held_by(plan, layer), value_bytes(profile.model, layer)), []).append(layer)
    coming_s = sum(len(layers) * values_s(plan, profile, layers[0]) for layers in alike.values())
    pipeline = plan.pipelines[index]
    forward_s = stage_s(profile, pipeline, stage, pipeline.size(0), plan.sequence_length, Op.F)
    return exposed_s(coming_s, forward_s, stage.last - stage.first) if coming_s else 0.0


def exposed_s(coming_s: float, forward_s: float, layers: int) -> float:
    """Seconds that ``coming_s`` of new values add to a forward of so many like layers, each of which waits for its own."""
    return max(coming_s / layers, coming_s - forward_s * (layers - 1) / layers)


def tied_s(profile: ClusterProfile, embedding: int, head: int) -> float:
    """Seconds to bring the gradient of a tied matrix from the head's rank to the embedding's (the head's REDUCE)."""
    return profile.transfer_s(head, embedding, profile.model.tied_bytes)


def return_s(profile: ClusterProfile, embedding: int, head: int) -> float:
    """Seconds to bring the new values of a tied matrix, in the compute dtype, to the head's rank (part of STEP)."""
    parameters = profile.model.tied_bytes // GRADIENT_BYTES
    return profile.transfer_s(embedding, head, parameters * DTYPE_BYTES[profile.model.dtype])


def _step_s(action: Action, plan: Plan, profile: ClusterProfile) -> float:
    """Seconds of a rank's STEP: its optimizer, what the next forwards wait for new values, and where the model is tied, the way
    of these to the head: the embedding's rank sends them when it has them, the head's waits for them."""
    held = plan.of_rank(plan.numbered[action.stage][2].ranks[0])
    own = update_s(action.stage, plan, profile) + sum(_late_values_s(number, plan, profile) for number in held)
    for head, embedding in tied_heads(plan, profile.model).items():
        if head in held or embedding in held:
            ranks = (plan.numbered[number][2].ranks[0] for number in (embedding, head))
            there = update_s(embedding, plan, profile) + values_s(plan, profile, 0)
            own = max(own, there + return_s(profile, *ranks))
    return own


def exchange_s(profile: ClusterProfile, ranks: Sequence[int], size_bytes: float) -> float:
    """Seconds of a reduce-scatter or all-gather of ``size_bytes`` over ``ranks``, in whatever order these are given, the way the
    runtime does it, each rank owning as much.

    ``comm.transport`` says which. Around a ring from host to host: n - 1 hops of 1/n of the bytes from each rank to the
    next. One message leaves every host in each hop, whose NIC it shares with none; a hop is taken to be as long as the
    slowest link between any two of the ranks, since the ring does not choose its neighbours. By direct exchange: one hop,
    in which every rank sends 1/n to every other, as long as the busiest rank sends or receives; its messages
    follow one another, through its own NIC.

    Either way (n - 1) / n of the bytes leave every rank (Patarasuk & Yuan 2009: none moves fewer), so that both cost the same
    wherever all links are alike.
    """
    count = len(ranks)
    if count < 2 or not size_bytes:
        return 0.0
    seconds = profile.messages_s(ranks, size_bytes / count)
    if ring_of(ranks, [profile.devices[rank].host for rank in ranks]) is not None:
        return (count - 1) * float(seconds.max())
    # Sorted first: the same sums to the last bit however ranks are numbered.
    busiest = (np.sort(seconds, axis=axis).sum(axis=axis).max() for axis in (0, 1))
    return float(max(busiest))


def summed_bytes(model: ModelCost, layer: int) -> int:
    """Bytes of the gradients of ``layer`` as they are summed (fp32); a tied head's matrix is summed with layer 0."""
    return GRADIENT_BYTES * model.layers[layer].trainable_parameters


def sum_s(plan: Plan, profile: ClusterProfile, layer: int) -> float:
    """Seconds to bring the gradients of ``layer`` to their owners, among the ranks that hold it, one per pipeline."""
    return _exchange_s(plan, profile, layer, summed_bytes(profile.model, layer))


def values_s(plan: Plan, profile: ClusterProfile, layer: int) -> float:
    """Seconds to bring new values of ``layer``, in the compute dtype, from their owners to the other ranks that hold it."""
    model = profile.model
    return _exchange_s(plan, profile, layer, value_bytes(model, layer))


def value_bytes(model: ModelCost, layer: int) -> int:
    """Bytes of new values of a layer's trained parameters."""
    return model.layers[layer].trainable_parameters * DTYPE_BYTES[model.dtype]


def _exchange_s(plan: Plan, profile: ClusterProfile, layer: int, size_bytes: int) -> float:
    """Seconds among a layer's holders: who owns more than others has more to receive, and to send. Of a group, as if its leader
    exchanged all: its members exchange their parts beside each other, through the NIC that their host has for all of them."""
    weights = [plan.state_weights[rank] for rank in held_by(plan, layer)]
    return exchange_s(profile, held_by(plan, layer), size_bytes) * (len(weights) * max(weights) / sum(weights))


def _reduce_s(action: Action, plan: Plan, profile: ClusterProfile) -> float:
    assert action.layer is not None
    embedding = tied_heads(plan, profile.model).get(action.stage) if action.layer == 0 else None
    if embedding is None:
        return sum_s(plan, profile, action.layer)
    numbered = plan.numbered
    return tied_s(profile, numbered[embedding][2].ranks[0], numbered[action.stage][2].ranks[0])


def message_bytes(action: Action, plan: Plan, profile: ClusterProfile) -> int:
    """Bytes that a send or receive moves, or a REDUCE sums; 0 for other actions."""
    if action.op is Op.REDUCE:
        assert action.layer is not None
        share = action.layer == 0 and action.stage in tied_heads(plan, profile.model)
        return profile.model.tied_bytes if share else summed_bytes(profile.model, action.layer)
    _, index, stage = plan.numbered[action.stage]
    boundary = {Op.SEND_F: stage.last, Op.RECV_B: stage.last, Op.SEND_B: stage.first, Op.RECV_F: stage.first}
    if action.op not in boundary:
        return 0
    assert action.micro_batch is not None
    tokens = plan.pipelines[index].size(action.micro_batch) * plan.sequence_length
    return profile.model.sent_bytes_per_token(boundary[action.op] - 1) * tokens


def duration(action: Action, plan: Plan, profile: ClusterProfile) -> float:
    """Seconds of one action by itself. Of a send: on its link, copies at both ends included; of a receive: 0.

    Planner, simulator and report have no other source of times.
    """
    numbered = plan.numbered
    _, index, stage = numbered[action.stage]
    if action.op in COMPUTE:
        assert action.micro_batch is not None
        pipeline = plan.pipelines[index]
        return stage_s(profile, pipeline, stage, pipeline.size(action.micro_batch), plan.sequence_length, action.op)
    if action.op in (Op.SEND_F, Op.SEND_B):
        peer = numbered[action.stage + (1 if action.op is Op.SEND_F else -1)][2]
        return profile.transfer_s(stage.ranks[0], peer.ranks[0], message_bytes(action, plan, profile))
    if action.op is Op.STEP:
        return _step_s(action, plan, profile)
    return _reduce_s(action, plan, profile) if action.op is Op.REDUCE else 0.0


def stage_s(
    profile: ClusterProfile, pipeline: PipelinePlan, stage: StagePlan, size: int, sequence_length: int, op: Op
) -> float:
    """Seconds of forward, backward or a part of it of a stage of a plan, for a micro-batch of ``size`` sequences. Where the stage
    is streamed, the mean of a step's."""
    if stage.streamed:
        leave_s = offload_s(profile.devices[stage.ranks[0]], profile.model, stage.first) if op is not Op.F else 0.0
        return sum(_streamed_s(profile, pipeline, stage, _slices(stage, size, sequence_length), op)) + leave_s
    device = device_of(profile, stage)
    seconds = [_slice_s(profile, device, stage, tokens, op) for tokens in _slices(stage, size, sequence_length)]
    return reduce(add, seconds)


def pass_s(profile: ClusterProfile, pipeline: PipelinePlan, stage: StagePlan, sequence_length: int) -> float:
    """Seconds of forward and backward of a whole micro-batch."""
    return sum(stage_s(profile, pipeline, stage, pipeline.micro_batch, sequence_length, op) for op in (Op.F, Op.B))


def _slices(stage: StagePlan, size: int, sequence_length: int) -> list[int]:
    """Tokens of each slice of a micro-batch of ``size`` sequences."""
    part = stage.slice_sequences or size
    return [min(part, size - begin) * sequence_length for begin in range(0, size, part)]


def _slice_s(profile: ClusterProfile, device: DeviceProfile, stage: StagePlan, tokens: int, op: Op) -> float:
    again = op in (Op.B, Op.I) and stage.recompute
    repeated = recompute_s(profile, device, stage.first, stage.last, tokens) if again else 0.0
    if stage.grouped:
        repeated += broadcast_s(profile, stage, tokens, op is not Op.F)
    return repeated + compute_s(profile, device, stage.first, stage.last, tokens, op)


_Pass = tuple[bool, bool]
"""The state in which a forward or backward of a streamed stage begins: are there the weights of the two layers with which it begins
(where it goes back the way that the pass before has come), and sums of gradients of the micro-batches before."""


def _passes(pipeline: PipelinePlan, stage: StagePlan, op: Op, whole: bool) -> dict[_Pass, float]:
    """The passes of a step, with the share of each. ``whole``: all weights are trained, and leave the device when they change.

    Warm-up is forwards that follow one another, and as many backwards do at a step's end; between, they take turns.
    """
    count, few = pipeline.micro_batches, stage.last - stage.first <= STREAMED_LAYERS
    alike = 0 if few else min(stage.warm_up, count - 1)
    if op is Op.F:
        alike += whole
        return {(False, False): alike / count, (True, False): 1 - alike / count}
    others = {(False, whole): alike / count, (True, whole): (count - 1 - alike) / count}
    return {**others, (True, False): 1 / count + others.get((True, False), 0.0)}


def _streamed_s(
    profile: ClusterProfile, pipeline: PipelinePlan, stage: StagePlan, slices: Sequence[int], op: Op
) -> list[float]:
    """Seconds until the first layer's weights (and the gradients that come) are there, then of every layer in computing order; the
    mean of a step's passes."""
    found = [0.0] * (1 + stage.last - stage.first)
    for begins, share in _passes(pipeline, stage, op, profile.model.trained_whole).items():
        if share > 0:
            own = _copying_pass_s(profile, stage, slices, op, *begins)
            found = [sum_s + share * own_s for sum_s, own_s in zip(found, own, strict=True)]
    return found


def _copying_pass_s(
    profile: ClusterProfile, stage: StagePlan, slices: Sequence[int], op: Op, weights_there: bool, gradients_come: bool
) -> list[float]:
    """The same of one pass.

    A layer takes as long as all of its slices or as the copies beside it, whichever is longer: of the next one's weights; in
    backward also, where all weights are trained, of the gradients of the one before, which leave, and of the next one, which come.
    Each layer is called by itself and costs what a stage of one layer does. In backward it repeats its forward, but of slices that
    are kept.
    """
    model, device, back = profile.model, profile.devices[stage.ranks[0]], op is not Op.F
    order = range(stage.last - 1, stage.first - 1, -1) if back else range(stage.first, stage.last)
    calls_s, again = overhead_s(device, op), slices[stage.kept_slices :] if back else ()

    def computing_s(layer: int) -> float:
        times = device.layers[model.layers[layer].kind]
        repeats_s = sum(device.forward_overhead_s + repeated_s(times, tokens) for tokens in again)
        return sum(calls_s + layer_s(times, op, tokens) for tokens in slices) + repeats_s

    there = STREAMED_LAYERS * weights_there
    copies = [
        0.0 if place < there else weights_s(device, model.streamed_bytes(layer)) for place, layer in enumerate(order)
    ]
    leaving = [0.0, *(offload_s(device, model, layer) if back else 0.0 for layer in order)]
    coming = [weights_s(device, gradients_come * model.gradient_bytes(layer)) for layer in order]
    beside = zip([*copies[1:], 0.0], leaving, [*coming[1:], 0.0], order, strict=False)
    computed = [max(copy_s, out_s + in_s, computing_s(layer)) for copy_s, out_s, in_s, layer in beside]
    found = [max(copies[0], coming[0]), *computed]
    # Layers on disk are spread evenly and read ahead, so that all of the pass waits for all of them.
    filed = {*stage.disk_layers(len(model.layers))}.difference(order[:there])
    late_s = sum(disk_s(profile, device, model.streamed_bytes(layer)) for layer in filed) - sum(found)
    return [one_s + max(0.0, late_s) / len(found) for one_s in found] if filed else found


def finished_layers_s(action: Action, plan: Plan, profile: ClusterProfile) -> dict[int, float]:
    """layer -> seconds from the beginning of a stage's last backward (B or W) until the layer's gradients are whole, in the
    order of time.

    Backward runs from the last layer to the first: gradients of later layers can be summed while it still does. A layer is
    done after as long as the backward of a stage that begins with it takes.
    """
    _, index, stage = plan.numbered[action.stage]
    assert action.micro_batch is not None
    pipeline, device = plan.pipelines[index], device_of(profile, stage)
    size = pipeline.size(action.micro_batch)
    *before, tokens = _slices(stage, size, plan.sequence_length)
    if stage.streamed:
        ends = itertools.accumulate(_streamed_s(profile, pipeline, stage, [*before, tokens], action.op))
        order = reversed(range(stage.first, stage.last))
        return {
            number: end_s + offload_s(device, profile.model, number)
            for number, end_s in zip(order, itertools.islice(ends, 1, None), strict=True)
        }
    before_s = sum(_slice_s(profile, device, stage, part, action.op) for part in before)
    return {
        number: before_s + _slice_s(profile, device, replace(stage, first=number), tokens, action.op)
        for number in reversed(range(stage.first, stage.last))
    }


class Durations:
    """``duration`` remembered by operation, stage and size: most micro-batches are alike.

    Attributes:
        profile: with the times that the plan's ranks take while all of them compute.
    """

    def __init__(self, plan: Plan, profile: ClusterProfile) -> None:
        self.plan, self.profile = plan, while_running(profile, plan)
        self.stages: list[StagePlan] = [stage for _, _, stage in plan.numbered]
        self.summed = reduced_layers(plan, profile.model)
        self.tied_heads = tied_heads(plan, profile.model)
        self._pipelines = [plan.pipelines[index] for _, index, _ in plan.numbered]
        self._known: dict[tuple[Op, int, int | None], tuple[float, int]] = {}
        first: dict[tuple[tuple[int, ...], int], int] = {}
        self._alike = {
            layer: first.setdefault((held_by(plan, layer), summed_bytes(profile.model, layer)), layer)
            for layer in self.summed
        }
        """Layer -> the first one that is summed alike: most are, and holders may be many."""

    def of(self, action: Action) -> tuple[float, int]:
        """(seconds, bytes)"""
        op, stage, size = action.op, action.stage, action.layer
        if action.micro_batch is not None:
            size = self._pipelines[stage].size(action.micro_batch)
        elif op is Op.REDUCE and (action.layer != 0 or stage not in self.tied_heads):
            stage, size = -1, self._alike[action.layer or 0]  # a sum takes all its ranks equally long
        key = (op, stage, size)
        if key not in self._known:
            known = duration(action, self.plan, self.profile), message_bytes(action, self.plan, self.profile)
            self._known[key] = known
        return self._known[key]

    def exchanged_s(self, action: Action, rank: int) -> float:
        """Seconds of an action in which ``rank`` exchanges with the other ranks of its group, or waits for them."""
        stage, pipeline = self.stages[action.stage], self._pipelines[action.stage]
        if not stage.grouped or action.op not in COMPUTE or action.micro_batch is None:
            return 0.0
        device, alone = group_device(self.profile, stage, rank), replace(stage, ranks=(rank,), shares=(), experts=None)
        slices = _slices(stage, pipeline.size(action.micro_batch), self.plan.sequence_length)
        own_s = sum(_slice_s(self.profile, device, alone, tokens, action.op) for tokens in slices)
        return max(0.0, self.of(action)[0] - own_s)
