"""Predicted peak memory of every rank, counted from the schedule that will run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hetero_mpi.planning.cost import ModelCost
from hetero_mpi.planning.plan import Plan, RankMemory
from hetero_mpi.planning.profile import ClusterProfile
from hetero_mpi.planning.schedule import Action, Op, Schedule, one_f_one_b, stages

STAGING_BUFFERS = 2
"""Host buffers per boundary and direction: one in transfer while the other is filled or read."""
GRADIENT_BYTES = 4
"""Gradients are exchanged in fp32."""


@dataclass(frozen=True)
class StageMemory:
    """Peak bytes of one stage on its rank, by cause."""

    parameters: int
    state: int
    """Gradients, optimizer moments, master weights."""
    activations: int
    """Of all micro-batches in flight together."""
    workspace: int
    """The largest of any one item (logits, for a head), and what recomputing brings back at once."""
    staging: int

    @property
    def total(self) -> int:
        return self.parameters + self.state + self.activations + self.workspace + self.staging


def shared_parameters(model: ModelCost, first: int, last: int) -> int:
    """Parameters that the chain counts twice but a holder of both tied ends keeps once."""
    both_ends = first == 0 and last == len(model.layers)
    return model.tied_bytes // GRADIENT_BYTES if model.tied and both_ends else 0


def stage_trainable(model: ModelCost, first: int, last: int) -> int:
    """Distinct trainable parameters of the items [first, last)."""
    trainable = sum(layer.trainable_parameters for layer in model.layers[first:last])
    return max(0, trainable - shared_parameters(model, first, last))


def stage_memory(
    model: ModelCost, first: int, last: int, tokens: int, in_flight: int, recompute: bool = False
) -> StageMemory:
    """Bytes for the items [first, last), ``in_flight`` micro-batches of ``tokens`` tokens kept for their backward."""
    layers = model.layers[first:last]
    head = model.layers[-1]
    shared_bytes = shared_parameters(model, first, last) * head.parameter_bytes // max(1, head.parameters)
    input_bytes = model.layers[first - 1].boundary_bytes_per_token * tokens if first > 0 else 0
    output_bytes = layers[-1].boundary_bytes_per_token * tokens if last < len(model.layers) else 0
    kept = sum(_kept_per_token(model, item, recompute) for item in range(first, last))
    workspace = max(math.ceil(layer.workspace_bytes_per_token * tokens) + layer.workspace_bytes for layer in layers)
    again = max((layer.activation_bytes_per_token for layer in layers), default=0.0) if recompute else 0.0
    return StageMemory(
        parameters=sum(layer.parameter_bytes for layer in layers) - shared_bytes,
        state=math.ceil(stage_trainable(model, first, last) * model.state_bytes_per_trainable_parameter),
        activations=in_flight * math.ceil(kept * tokens),
        workspace=workspace + math.ceil(again * tokens),
        staging=2 * STAGING_BUFFERS * (input_bytes + output_bytes),
    )


def _kept_per_token(model: ModelCost, item: int, recompute: bool) -> float:
    """Bytes an item keeps until backward; a block that is recomputed keeps its input only."""
    layer = model.layers[item]
    block = 0 < item < len(model.layers) - 1
    if not (recompute and block):
        return layer.activation_bytes_per_token
    return min(layer.activation_bytes_per_token, model.layers[item - 1].boundary_bytes_per_token)


def in_flight(actions: Sequence[Action]) -> int:
    """The most micro-batches whose forward has begun and whose backward has not ended, at any point of the list."""
    now = peak = 0
    for action in actions:
        if action.op is Op.F:
            now += 1
            peak = max(peak, now)
        elif action.op is Op.B:
            now -= 1
    return peak


def usable_bytes(memory_bytes: int, reserve: float) -> int:
    """What a plan may use of a rank's memory when the share ``reserve`` is kept free."""
    return int(memory_bytes * (1 - reserve))


def predict_memory(
    plan: Plan, profile: ClusterProfile, reserve: float = 0.0, schedule: Schedule | None = None
) -> tuple[RankMemory, ...]:
    """Peak against usable bytes of every rank that holds a stage, in rank order. ``schedule``: 1F1B by default."""
    actions = schedule if schedule is not None else one_f_one_b(plan, profile.model.tied)
    peaks: dict[int, int] = {}
    for number, index, stage in stages(plan):
        tokens = plan.pipelines[index].micro_batch * plan.sequence_length
        for rank in stage.ranks:
            flying = in_flight([action for action in actions[rank] if action.stage == number])
            need = stage_memory(profile.model, stage.first, stage.last, tokens, flying, stage.recompute)
            peaks[rank] = peaks.get(rank, 0) + need.total
    return tuple(
        RankMemory(rank, peaks[rank], usable_bytes(profile.devices[rank].memory_bytes, reserve))
        for rank in sorted(peaks)
    )
