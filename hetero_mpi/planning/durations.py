"""How long each action takes: the one source of times for planner, simulator and report."""

from __future__ import annotations

from collections.abc import Sequence

from hetero_mpi.planning.cost import ModelCost
from hetero_mpi.planning.memory import GRADIENT_BYTES, shared_parameters, stage_trainable
from hetero_mpi.planning.plan import Plan, StagePlan
from hetero_mpi.planning.profile import ClusterProfile, DeviceProfile, LayerTimes
from hetero_mpi.planning.schedule import Action, Op, held_by, stages, summed_items


def compute_s(profile: ClusterProfile, device: DeviceProfile, first: int, last: int, tokens: int, op: Op) -> float:
    """Seconds of forward, backward or a part of it (``F``, ``B``, ``I``, ``W``) through the items [first, last)."""
    total = _overhead_s(device, op)
    for layer in profile.model.layers[first:last]:
        total += layer_s(device.layers[layer.kind], op, tokens)
    return total


def layer_s(times: LayerTimes, op: Op, tokens: int) -> float:
    """Seconds of one layer. Without a measured split, I stands for the whole backward and W for nothing."""
    if op is Op.F:
        return times.forward_s.at(tokens)
    if op is Op.W:
        return times.weight_s.at(tokens) if times.weight_s is not None else 0.0
    curve = times.input_s if op is Op.I and times.input_s is not None else times.backward_s
    return curve.at(tokens)


def _overhead_s(device: DeviceProfile, op: Op) -> float:
    if op is Op.F:
        return device.forward_overhead_s
    return 0.0 if op is Op.W else device.backward_overhead_s


def repeated_s(times: LayerTimes, tokens: int) -> float:
    """What backward takes longer when it repeats a layer's forward: as measured, or as long as the forward."""
    if times.recompute_s is None:
        return times.forward_s.at(tokens)
    return max(0.0, times.recompute_s.at(tokens) - times.backward_s.at(tokens))


def recompute_s(profile: ClusterProfile, device: DeviceProfile, first: int, last: int, tokens: int) -> float:
    """Seconds of the forward that backward repeats: of the blocks among the items [first, last)."""
    blocks = profile.model.layers[max(first, 1) : min(last, len(profile.model.layers) - 1)]
    total = 0.0
    for layer in blocks:
        total += repeated_s(device.layers[layer.kind], tokens)
    return total


def optimizer_s(profile: ClusterProfile, device: DeviceProfile, first: int, last: int) -> float:
    """Seconds of one optimizer step over the items [first, last)."""
    return device.optimizer_fixed_s + device.optimizer_s_per_parameter * stage_trainable(profile.model, first, last)


def tied_s(profile: ClusterProfile, embedding: int, head: int) -> float:
    """Seconds to bring a tied gradient from the head's rank to the embedding's, and the new values back."""
    size = profile.model.tied_bytes
    return profile.transfer_s(head, embedding, size) + profile.transfer_s(embedding, head, size)


def ring_s(profile: ClusterProfile, ranks: Sequence[int], size_bytes: float) -> float:
    """Seconds to sum ``size_bytes`` over ``ranks`` in a ring: 2 (n - 1) rounds, each as long as its slowest message.

    Every round moves 1/n of the bytes from each rank to the next (Patarasuk & Yuan 2009: no all-reduce moves fewer).
    """
    count = len(ranks)
    if count < 2:
        return 0.0
    neighbours = zip(ranks, (*ranks[1:], ranks[0]), strict=True)
    return 2 * (count - 1) * max(profile.transfer_s(a, b, size_bytes / count) for a, b in neighbours)


def summed_bytes(model: ModelCost, item: int) -> int:
    """Bytes of the gradients of ``item`` as they are summed (fp32); a tied head's matrix is summed with item 0."""
    trainable = model.layers[item].trainable_parameters
    if item == len(model.layers) - 1:
        trainable -= shared_parameters(model, 0, len(model.layers))
    return GRADIENT_BYTES * max(0, trainable)


def sum_s(plan: Plan, profile: ClusterProfile, item: int) -> float:
    """Seconds to sum the gradients of ``item`` over all ranks that hold it: of a tied matrix, first head to embedding
    within each pipeline (all at once); then around a ring of the pipelines."""
    tied = 0.0
    if item == 0 and profile.model.tied:
        ends = zip(held_by(plan, 0), held_by(plan, plan.items - 1), strict=True)
        tied = max(tied_s(profile, embedding, head) if embedding != head else 0.0 for embedding, head in ends)
    return tied + ring_s(profile, held_by(plan, item), summed_bytes(profile.model, item))


def message_bytes(action: Action, plan: Plan, profile: ClusterProfile) -> int:
    """Bytes that a send or receive moves, or a REDUCE sums; 0 for other actions."""
    if action.op is Op.REDUCE:
        assert action.item is not None
        return summed_bytes(profile.model, action.item)
    _, index, stage = stages(plan)[action.stage]
    boundary = {Op.SEND_F: stage.last, Op.RECV_B: stage.last, Op.SEND_B: stage.first, Op.RECV_F: stage.first}
    if action.op not in boundary:
        return 0
    tokens = _tokens(plan, index, action)
    return profile.model.layers[boundary[action.op] - 1].boundary_bytes_per_token * tokens


def _tokens(plan: Plan, index: int, action: Action) -> int:
    """Tokens of the action's micro-batch."""
    assert action.micro_batch is not None
    return plan.pipelines[index].size(action.micro_batch) * plan.sequence_length


def duration(action: Action, plan: Plan, profile: ClusterProfile) -> float:
    """Seconds of one action by itself. Of a send: on its link, copies at both ends included; of a receive: 0.

    Planner, simulator and report have no other source of times.
    """
    numbered = stages(plan)
    _, index, stage = numbered[action.stage]
    device = profile.devices[stage.ranks[0]]
    if action.op in (Op.F, Op.B, Op.I, Op.W):
        tokens = _tokens(plan, index, action)
        again = action.op in (Op.B, Op.I) and stage.recompute
        repeated = recompute_s(profile, device, stage.first, stage.last, tokens) if again else 0.0
        return repeated + compute_s(profile, device, stage.first, stage.last, tokens, action.op)
    if action.op in (Op.SEND_F, Op.SEND_B):
        peer = numbered[action.stage + (1 if action.op is Op.SEND_F else -1)][2]
        return profile.transfer_s(stage.ranks[0], peer.ranks[0], message_bytes(action, plan, profile))
    if action.op is Op.STEP:
        return optimizer_s(profile, device, stage.first, stage.last)
    if action.op is Op.REDUCE:
        assert action.item is not None
        return sum_s(plan, profile, action.item)
    return 0.0


def finished_items_s(action: Action, plan: Plan, profile: ClusterProfile) -> dict[int, float]:
    """item -> seconds from the beginning of a stage's last backward (B or W) until the item's gradients are whole.

    Backward runs from the last item to the first: gradients of later items can be summed while it still does.
    """
    _, index, stage = stages(plan)[action.stage]
    device, tokens = profile.devices[stage.ranks[0]], _tokens(plan, index, action)
    passed = _overhead_s(device, action.op)
    found = {}
    for item in reversed(range(stage.first, stage.last)):
        times = device.layers[profile.model.layers[item].kind]
        passed += layer_s(times, action.op, tokens)
        if stage.recompute and action.op is Op.B and 0 < item < plan.items - 1:
            passed += repeated_s(times, tokens)
        found[item] = passed
    return found


class Durations:
    """``duration`` remembered by operation, stage and size: most micro-batches are alike."""

    def __init__(self, plan: Plan, profile: ClusterProfile) -> None:
        self.plan, self.profile = plan, profile
        self.numbered = stages(plan)
        self.stages: list[StagePlan] = [stage for _, _, stage in self.numbered]
        self.summed = summed_items(plan, profile.model)
        self._known: dict[tuple[Op, int, int | None], tuple[float, int]] = {}

    def of(self, action: Action) -> tuple[float, int]:
        """(seconds, bytes)"""
        size = action.item
        if action.micro_batch is not None:
            size = self.plan.pipelines[self.numbered[action.stage][1]].size(action.micro_batch)
        key = (action.op, action.stage, size)
        if key not in self._known:
            self._known[key] = (
                duration(action, self.plan, self.profile),
                message_bytes(action, self.plan, self.profile),
            )
        return self._known[key]
