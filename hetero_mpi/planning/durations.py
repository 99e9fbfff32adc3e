"""Durations of actions: the only source of predicted times for the planner, the simulator and the report."""

import itertools
from collections.abc import Hashable, Sequence
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
from hetero_mpi.planning.schedule import COMPUTE, SENDS, Action, Op, reduced_layers, tied_heads
from hetero_mpi.planning.types.cost import ModelCost
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan
from hetero_mpi.planning.types.profile import ClusterProfile, DeviceProfile
from hetero_mpi.planning.types.sizes import DTYPE_BYTES, GRADIENT_BYTES, OFFLOADED_LAYER_COUNT
from hetero_mpi.util.grouping import grouped


def update_s(number: int, plan: Plan, profile: ClusterProfile) -> float:
    """Seconds of the optimizer step on a stage's rank, for the state that the rank owns.

    A tensor-parallel group takes as long as its slowest member, after the all-reduce of replicated gradients.
    """
    stage = plan.numbered[number][2]
    if stage.grouped:
        parts = (profile.model.part(stage.share(index), stage.expert_share(index)) for index in range(len(stage.ranks)))
        owned_by_rank = zip(stage.ranks, (owned_share(plan, part, number) for part in parts), strict=True)
        seconds = (optimizer_s(profile, profile.devices[rank], count) for rank, count in owned_by_rank)
        return whole_sums_s(profile, stage) + max(seconds)
    owned = sum(owned_share(plan, profile.model, index) for index in plan.of_rank(stage.ranks[0]))
    return optimizer_s(profile, profile.devices[stage.ranks[0]], owned, stage.streamed)


def _late_values_s(number: int, plan: Plan, profile: ClusterProfile) -> float:
    """Seconds that a stage's first forward waits for updated parameters, which arrive layer by layer while it runs."""
    _, index, stage = plan.numbered[number]
    if len(plan.pipelines) == 1:
        return 0.0
    layers = range(stage.first, stage.last)
    like_layers = grouped(layers, lambda layer: (plan.holders[layer], value_bytes(profile.model, layer)))
    coming_s = sum(len(alike) * values_s(plan, profile, alike[0]) for alike in like_layers.values())
    pipeline = plan.pipelines[index]
    forward_s = stage_s(profile, pipeline, stage, pipeline.size(0), plan.sequence_length, Op.F)
    return exposed_s(coming_s, forward_s, len(layers)) if coming_s else 0.0


def exposed_s(coming_s: float, forward_s: float, layers: int) -> float:
    """Seconds by which a transfer delays a forward of ``layers`` equal layers that each wait for their part."""
    return max(coming_s / layers, coming_s - forward_s * (layers - 1) / layers)


def tied_s(profile: ClusterProfile, embedding: int, head: int) -> float:
    """Seconds to send a tied matrix's gradient from the head's rank to the embedding's rank (the head's REDUCE)."""
    return profile.transfer_s(head, embedding, profile.model.tied_bytes)


def return_s(profile: ClusterProfile, embedding: int, head: int) -> float:
    """Seconds to send a tied matrix's new values, in the compute dtype, to the head's rank (part of STEP)."""
    parameters = profile.model.tied_bytes // GRADIENT_BYTES
    return profile.transfer_s(embedding, head, parameters * DTYPE_BYTES[profile.model.dtype])


def _step_s(action: Action, plan: Plan, profile: ClusterProfile) -> float:
    """Seconds of a rank's STEP: optimizer, wait for updated parameters, and transfer of a tied matrix to the head."""
    numbers = plan.of_rank(plan.numbered[action.stage][2].ranks[0])
    step_s = update_s(action.stage, plan, profile) + sum(_late_values_s(number, plan, profile) for number in numbers)
    for head, embedding in tied_heads(plan, profile.model).items():
        if head in numbers or embedding in numbers:
            ranks = (plan.numbered[number][2].ranks[0] for number in (embedding, head))
            embedding_s = update_s(embedding, plan, profile) + values_s(plan, profile, 0)
            step_s = max(step_s, embedding_s + return_s(profile, *ranks))
    return step_s


def exchange_s(profile: ClusterProfile, ranks: Sequence[int], size_bytes: float) -> float:
    """Seconds of a reduce-scatter or all-gather of ``size_bytes`` over ``ranks``, each rank owning an equal share.

    ``comm.transport`` chooses between a ring over hosts (n - 1 hops of 1/n of the bytes; each hop takes as long as the slowest
    link between any two ranks, as one message leaves each host) and direct exchange (every rank sends 1/n to every other; the
    busiest rank's messages follow one another through its NIC). Either way (n - 1) / n of the bytes leave every rank, which is
    optimal (Patarasuk & Yuan 2009).
    """
    count = len(ranks)
    if count < 2 or not size_bytes:
        return 0.0

    def seconds() -> float:
        parts_s = profile.messages_s(ranks, size_bytes / count)
        if ring_of(ranks, [profile.devices[rank].host for rank in ranks]) is not None:
            return (count - 1) * float(parts_s.max())
        # Sorted first: the same sums to the last bit however ranks are numbered.
        return float(max(np.sort(parts_s, axis=axis).sum(axis=axis).max() for axis in (0, 1)))

    return profile.cached((tuple(ranks), size_bytes), seconds)


def summed_bytes(model: ModelCost, layer: int) -> int:
    """Bytes of the fp32 gradients of ``layer`` in an all-reduce; a tied head's matrix is reduced with layer 0."""
    return GRADIENT_BYTES * model.layers[layer].trainable_parameters


def sum_s(plan: Plan, profile: ClusterProfile, layer: int) -> float:
    """Seconds to reduce the gradients of ``layer`` to their owners among the ranks that hold it (one per pipeline)."""
    return _exchange_s(plan, profile, layer, summed_bytes(profile.model, layer))


def values_s(plan: Plan, profile: ClusterProfile, layer: int) -> float:
    """Seconds to send updated parameters of ``layer``, in the compute dtype, from their owners to its other holders."""
    return _exchange_s(plan, profile, layer, value_bytes(profile.model, layer))


def value_bytes(model: ModelCost, layer: int) -> int:
    """Bytes of a layer's trained parameters in the compute dtype."""
    return model.layers[layer].trainable_parameters * DTYPE_BYTES[model.dtype]


def _exchange_s(plan: Plan, profile: ClusterProfile, layer: int, size_bytes: int) -> float:
    """Seconds of an exchange among a layer's holders, scaled by the largest owned share.

    A tensor-parallel group is modelled as its leader exchanging everything, since its members share one NIC.
    """
    ranks = plan.holders[layer]
    weights = [plan.state_weights[rank] for rank in ranks]
    return exchange_s(profile, ranks, size_bytes) * (len(weights) * max(weights) / sum(weights))


def message_bytes(action: Action, plan: Plan, profile: ClusterProfile) -> int:
    """Bytes that a send or receive moves, or a REDUCE sums; 0 for other actions."""
    if action.op is Op.REDUCE:
        assert action.layer is not None
        is_tied_part = action.layer == 0 and action.stage in tied_heads(plan, profile.model)
        return profile.model.tied_bytes if is_tied_part else summed_bytes(profile.model, action.layer)
    _, index, stage = plan.numbered[action.stage]
    boundary = {Op.SEND_F: stage.last, Op.RECV_B: stage.last, Op.SEND_B: stage.first, Op.RECV_F: stage.first}
    if action.op not in boundary:
        return 0
    assert action.micro_batch is not None
    tokens = plan.pipelines[index].size(action.micro_batch) * plan.sequence_length
    return profile.model.sent_bytes_per_token(boundary[action.op] - 1) * tokens


def duration(action: Action, plan: Plan, profile: ClusterProfile) -> float:
    """Seconds of one action without contention. A send includes the copies at both ends; a receive takes 0."""
    numbered = plan.numbered
    _, index, stage = numbered[action.stage]
    if action.op in COMPUTE:
        assert action.micro_batch is not None
        pipeline = plan.pipelines[index]
        return stage_s(profile, pipeline, stage, pipeline.size(action.micro_batch), plan.sequence_length, action.op)
    if action.op in SENDS:
        peer = numbered[action.other_end().stage][2]
        return profile.transfer_s(stage.ranks[0], peer.ranks[0], message_bytes(action, plan, profile))
    if action.op is Op.STEP:
        return _step_s(action, plan, profile)
    if action.op is not Op.REDUCE:
        return 0.0
    assert action.layer is not None
    embedding = tied_heads(plan, profile.model).get(action.stage) if action.layer == 0 else None
    if embedding is None:
        return sum_s(plan, profile, action.layer)
    return tied_s(profile, numbered[embedding][2].ranks[0], stage.ranks[0])


def stage_s(
    profile: ClusterProfile, pipeline: PipelinePlan, stage: StagePlan, size: int, sequence_length: int, op: Op
) -> float:
    """Seconds that a stage takes for ``op`` on ``size`` sequences; for an offloaded stage, the mean over a step."""
    if stage.streamed:
        leave_s = offload_s(profile.devices[stage.ranks[0]], profile.model, stage.first) if op is not Op.F else 0.0
        return sum(_streamed_s(profile, pipeline, stage, _slices(stage, size, sequence_length), op)) + leave_s
    device, slices = device_of(profile, stage), _slices(stage, size, sequence_length)
    key = (*_content(stage), size, sequence_length, op)
    return profile.cached(key, lambda: reduce(add, [_slice_s(profile, device, stage, part, op) for part in slices]))


def _content(stage: StagePlan) -> tuple[Hashable, ...]:
    """Return the fields that determine the compute time of a resident stage."""
    return stage.ranks, stage.shares, stage.experts, stage.first, stage.last, stage.recompute, stage.slice_sequences


def pass_s(profile: ClusterProfile, pipeline: PipelinePlan, stage: StagePlan, sequence_length: int) -> float:
    """Seconds for the forward and backward of a full micro-batch on one stage."""
    return sum(stage_s(profile, pipeline, stage, pipeline.micro_batch, sequence_length, op) for op in (Op.F, Op.B))


def _slices(stage: StagePlan, size: int, sequence_length: int) -> list[int]:
    """Number of tokens in each slice of a micro-batch of ``size`` sequences."""
    part = stage.slice_sequences or size
    return [min(part, size - begin) * sequence_length for begin in range(0, size, part)]


def _slice_s(profile: ClusterProfile, device: DeviceProfile, stage: StagePlan, tokens: int, op: Op) -> float:
    repeats = op in (Op.B, Op.I) and stage.recompute
    repeated = recompute_s(profile, device, stage.first, stage.last, tokens) if repeats else 0.0
    if stage.grouped:
        repeated += broadcast_s(profile, stage, tokens, op is not Op.F)
    return repeated + compute_s(profile, device, stage.first, stage.last, tokens, op)


_Pass = tuple[bool, bool]
"""Initial state of a pass over an offloaded stage: (first two layers' weights are resident, gradients are copied in)."""


def _passes(pipeline: PipelinePlan, stage: StagePlan, op: Op, trains_all: bool) -> dict[_Pass, float]:
    """Map each initial state to the fraction of a step's passes that begin in it.

    Warm-up forwards and final backwards run back to back; in between, forwards and backwards alternate. ``trains_all``: full
    fine-tuning, whose updated weights leave the device.
    """
    count, fits_buffers = pipeline.micro_batches, stage.last - stage.first <= OFFLOADED_LAYER_COUNT
    cold_passes = 0 if fits_buffers else min(stage.warm_up, count - 1)
    if op is Op.F:
        cold_passes += trains_all
        return {(False, False): cold_passes / count, (True, False): 1 - cold_passes / count}
    later_passes = {(False, trains_all): cold_passes / count, (True, trains_all): (count - 1 - cold_passes) / count}
    return {**later_passes, (True, False): 1 / count + later_passes.get((True, False), 0.0)}


def _streamed_s(
    profile: ClusterProfile, pipeline: PipelinePlan, stage: StagePlan, slices: Sequence[int], op: Op
) -> list[float]:
    """Mean seconds per pass: the wait until the first layer is on the device, then each layer in computing order."""
    mean_s = [0.0] * (1 + stage.last - stage.first)
    for begins, share in _passes(pipeline, stage, op, profile.model.trained_whole).items():
        if share > 0:
            pass_times_s = _copying_pass_s(profile, stage, slices, op, *begins)
            mean_s = [sum_s + share * own_s for sum_s, own_s in zip(mean_s, pass_times_s, strict=True)]
    return mean_s


def _copying_pass_s(
    profile: ClusterProfile, stage: StagePlan, slices: Sequence[int], op: Op, weights_there: bool, gradients_come: bool
) -> list[float]:
    """Like ``_streamed_s``, for one pass.

    A layer takes as long as its slices or the concurrent copies, whichever is longer. The copies are the next layer's weights
    and, in the backward of full fine-tuning, the previous layer's gradients out and the next layer's gradients in. Each layer
    is a separate call. Backward recomputes slices whose activations are not kept.
    """
    model, device, is_backward = profile.model, profile.devices[stage.ranks[0]], op is not Op.F
    order = range(stage.last - 1, stage.first - 1, -1) if is_backward else range(stage.first, stage.last)
    calls_s, repeated_slices = overhead_s(device, op), slices[stage.kept_slices :] if is_backward else ()

    def computing_s(layer: int) -> float:
        times = device.layers[model.layers[layer].kind]
        repeats_s = sum(device.forward_overhead_s + repeated_s(times, tokens) for tokens in repeated_slices)
        return sum(calls_s + layer_s(times, op, tokens) for tokens in slices) + repeats_s

    ready = OFFLOADED_LAYER_COUNT * weights_there
    copies = [
        0.0 if index < ready else weights_s(device, model.streamed_bytes(layer)) for index, layer in enumerate(order)
    ]
    leaving = [0.0, *(offload_s(device, model, layer) if is_backward else 0.0 for layer in order)]
    coming = [weights_s(device, gradients_come * model.gradient_bytes(layer)) for layer in order]
    layer_copies = zip([*copies[1:], 0.0], leaving, [*coming[1:], 0.0], order, strict=False)
    layer_times_s = [max(copy_s, out_s + in_s, computing_s(layer)) for copy_s, out_s, in_s, layer in layer_copies]
    times_s = [max(copies[0], coming[0]), *layer_times_s]
    # Layers on disk are spread evenly and read ahead, so that all of the pass waits for all of them.
    disk_layers = {*stage.disk_layers(len(model.layers))}.difference(order[:ready])
    late_s = sum(disk_s(profile, device, model.streamed_bytes(layer)) for layer in disk_layers) - sum(times_s)
    return [one_s + max(0.0, late_s) / len(times_s) for one_s in times_s] if disk_layers else times_s


def finished_layers_s(action: Action, plan: Plan, profile: ClusterProfile) -> dict[int, float]:
    """Map each layer to the seconds from the start of the last backward (B or W) until its gradients are final.

    Backward runs from the last layer to the first, so later layers are reduced while it is still running. A layer finishes when
    the backward of a stage starting at that layer would. The result is in order of time.
    """
    _, index, stage = plan.numbered[action.stage]
    assert action.micro_batch is not None
    pipeline, device = plan.pipelines[index], device_of(profile, stage)
    size = pipeline.size(action.micro_batch)
    *earlier_slices, tokens = _slices(stage, size, plan.sequence_length)
    if stage.streamed:
        ends = itertools.accumulate(_streamed_s(profile, pipeline, stage, [*earlier_slices, tokens], action.op))
        order = reversed(range(stage.first, stage.last))
        return {
            number: end_s + offload_s(device, profile.model, number)
            for number, end_s in zip(order, itertools.islice(ends, 1, None), strict=True)
        }

    def finished() -> dict[int, float]:
        earlier_s = sum(_slice_s(profile, device, stage, part, action.op) for part in earlier_slices)
        return {
            number: earlier_s + _slice_s(profile, device, replace(stage, first=number), tokens, action.op)
            for number in reversed(range(stage.first, stage.last))
        }

    return profile.cached(("finished", *_content(stage), *earlier_slices, tokens, action.op), finished)


class Durations:
    """Caches ``duration`` by operation, stage and size, with all of the plan's ranks computing at once."""

    def __init__(self, plan: Plan, profile: ClusterProfile) -> None:
        self.plan, self.profile = plan, while_running(profile, plan)
        self.stages: list[StagePlan] = [stage for _, _, stage in plan.numbered]
        self.summed = reduced_layers(plan, profile.model)
        self.tied_heads = tied_heads(plan, profile.model)
        self._pipelines = [plan.pipelines[index] for _, index, _ in plan.numbered]
        self._cache: dict[tuple[Op, int, int | None], tuple[float, int]] = {}
        first: dict[tuple[tuple[int, ...], int], int] = {}
        self._first_alike = {
            layer: first.setdefault((plan.holders[layer], summed_bytes(profile.model, layer)), layer)
            for layer in self.summed
        }
        """Layer -> first layer with the same holders and gradient size, whose all-reduce costs the same."""

    def cost_of(self, action: Action) -> tuple[float, int]:
        op, stage, size = action.op, action.stage, action.layer
        if action.micro_batch is not None:
            size = self._pipelines[stage].size(action.micro_batch)
        elif op is Op.REDUCE and (action.layer != 0 or stage not in self.tied_heads):
            stage, size = -1, self._first_alike[action.layer or 0]  # a sum takes all its ranks equally long
        key = (op, stage, size)
        if key not in self._cache:
            costs = duration(action, self.plan, self.profile), message_bytes(action, self.plan, self.profile)
            self._cache[key] = costs
        return self._cache[key]

    def exchanged_s(self, action: Action, rank: int) -> float:
        """Seconds within an action that ``rank`` spends exchanging with, or waiting for, its tensor-parallel group."""
        stage, pipeline = self.stages[action.stage], self._pipelines[action.stage]
        if not stage.grouped or action.op not in COMPUTE or action.micro_batch is None:
            return 0.0
        device, alone = group_device(self.profile, stage, rank), replace(stage, ranks=(rank,), shares=(), experts=None)
        slices = _slices(stage, pipeline.size(action.micro_batch), self.plan.sequence_length)
        own_s = sum(_slice_s(self.profile, device, alone, tokens, action.op) for tokens in slices)
        return max(0.0, self.cost_of(action)[0] - own_s)
