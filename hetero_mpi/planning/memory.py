"""Predicted bytes of a stage on its rank, and on its host."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from hetero_mpi.planning.schedule import holdings, schedule_of
from hetero_mpi.planning.types.cost import (
    GRADIENT_BYTES,
    STREAMED_LAYERS,
    LayerCost,
    ModelCost,
)
from hetero_mpi.planning.types.plan import WARM_UP, PipelinePlan, Plan, StagePlan
from hetero_mpi.planning.types.profile import ClusterProfile

STAGING_BUFFERS = 2
"""Host buffers per boundary and direction: one in transfer while the other is filled or read."""


@dataclass(frozen=True)
class StageMemory:
    """Peak bytes of one stage on its rank, by cause."""

    parameters: int
    state: int
    """Gradients, optimizer moments, master weights."""
    activations: int
    """Kept by all micro-batches in flight together, and of those whose weight gradients are put off."""
    workspace: int
    """The largest of any one layer (logits, for a head), and what recomputing brings back at once."""
    staging: int

    @property
    def total(self) -> int:
        return self.parameters + self.state + self.activations + self.workspace + self.staging


def shared_parameters(model: ModelCost, first: int, last: int) -> int:
    """Parameters that the chain counts twice but a holder of both tied ends keeps once."""
    both_ends = first == 0 and last == len(model.layers)
    return model.tied_bytes // GRADIENT_BYTES if model.tied and both_ends else 0


def shared_bytes(model: ModelCost, first: int, last: int) -> int:
    """Bytes of these: both ends on one rank share the values of a tied matrix; the head keeps a gradient of its own."""
    matrix = model.layers[0]
    return shared_parameters(model, first, last) * matrix.parameter_bytes // max(1, matrix.parameters)


def stage_trainable(model: ModelCost, first: int, last: int) -> int:
    """Trainable parameters of the layers [first, last); a tied matrix belongs to the embedding."""
    return sum(layer.trainable_parameters for layer in model.layers[first:last])


def stage_memory(
    model: ModelCost,
    first: int,
    last: int,
    tokens: int,
    in_flight: int,
    recompute: bool = False,
    deferred: int = 0,
    slice_tokens: int | None = None,
) -> StageMemory:
    """Bytes for the layers [first, last), ``in_flight`` micro-batches of ``tokens`` tokens kept for their backward and
    ``deferred`` ones for their weight gradients. ``slice_tokens``: what is computed at once, where that is less."""
    slice_tokens = tokens if slice_tokens is None else min(tokens, slice_tokens)
    layers = model.layers[first:last]
    input_bytes = model.layers[first - 1].boundary_bytes_per_token * tokens if first > 0 else 0
    output_bytes = layers[-1].boundary_bytes_per_token * tokens if last < len(model.layers) else 0
    kept = sum(_kept_per_token(model, index, recompute) for index in range(first, last))
    put_off = sum(layer.deferred_bytes_per_token for layer in layers)
    workspace = _workspace(layers, slice_tokens)
    again = max((layer.activation_bytes_per_token for layer in layers), default=0.0) if recompute else 0.0
    return StageMemory(
        parameters=sum(layer.parameter_bytes for layer in layers) - shared_bytes(model, first, last),
        state=math.ceil(model.state_bytes(first, last)),
        activations=in_flight * math.ceil(kept * tokens) + deferred * math.ceil(put_off * tokens),
        workspace=workspace + math.ceil(again * slice_tokens),
        staging=2 * STAGING_BUFFERS * (input_bytes + output_bytes),
    )


def streamed_memory(
    model: ModelCost,
    first: int,
    last: int,
    tokens: int,
    in_flight: int,
    slice_tokens: int,
    shares_host_memory: bool = False,
    kept_tokens: int = 0,
) -> StageMemory:
    """Bytes on the device for the layers [first, last) of a streamed stage: the weights of ``STREAMED_LAYERS`` layers, every
    layer's input of each micro-batch in flight (of ``kept_tokens`` all activations), and one layer's activations of a slice.
    Adapters and their state; or of what is trained whole the gradients of ``STREAMED_LAYERS`` layers.

    Where the device computes in host memory, frozen weights lie in mapped files, of which the system keeps what there is room for;
    what is trained whole is all there.
    """
    whole = stage_memory(model, first, last, tokens, in_flight)
    layers = model.layers[first:last]
    streamed = [model.streamed_bytes(index) for index in range(first, last)]
    parameters, state = whole.parameters - sum(streamed) + STREAMED_LAYERS * max(streamed), whole.state
    if model.trained_whole and shares_host_memory:
        parameters = whole.parameters
    elif model.trained_whole:
        parameters = STREAMED_LAYERS * max(streamed)
        state = STREAMED_LAYERS * max(model.gradient_bytes(index) for index in range(first, last))
    inputs = sum(layer.boundary_bytes_per_token for layer in model.layers[max(0, first - 1) : last - 1])
    # Beside a layer's activations there are its outputs of all slices, forward, or their gradients, backward.
    between = 2 * max((layer.boundary_bytes_per_token for layer in model.layers[max(0, first - 1) : last]), default=0)
    again = max(layer.activation_bytes_per_token for layer in layers) * (kept_tokens < tokens)
    kept = sum(layer.activation_bytes_per_token for layer in layers)
    return replace(
        whole,
        parameters=parameters,
        state=state,
        activations=in_flight * (inputs * (tokens - kept_tokens) + math.ceil(kept * kept_tokens)),
        workspace=_workspace(layers, slice_tokens) + math.ceil(again * slice_tokens) + between * tokens,
    )


def memory_of(
    profile: ClusterProfile,
    pipeline: PipelinePlan,
    stage: StagePlan,
    sequence_length: int,
    holding: tuple[int, int],
    member: int = 0,
) -> StageMemory:
    """Bytes of a stage of a plan that holds so many micro-batches: (in flight, deferred). Of a group: of one of its members."""
    rank = stage.ranks[member]
    model, shares = profile.model_on(rank), profile.devices[rank].shares_host_memory
    model = model.part(stage.share(member), stage.expert_share(member))
    tokens, (in_flight, deferred) = pipeline.size(0) * sequence_length, holding
    at_once = min(pipeline.size(0), stage.slice_sequences or pipeline.size(0)) * sequence_length
    if stage.head_tokens is not None:
        model = sliced_costs(model, min(stage.head_tokens, at_once))
    if stage.streamed:
        kept = min(tokens, stage.kept_slices * at_once)
        return streamed_memory(model, stage.first, stage.last, tokens, in_flight, at_once, shares, kept)
    own = stage_memory(model, stage.first, stage.last, tokens, in_flight, stage.recompute, deferred, at_once)
    if not stage.grouped:
        return own
    return replace(own, staging=own.staging + group_sum_bytes(model, tokens))


def sliced_costs(model: ModelCost, tokens: int) -> ModelCost:
    """The costs where the head computes ``tokens`` tokens at once; ``model`` itself where it cannot."""
    return _sliced_costs(model, tokens) if model.layers[-1].logits_bytes_per_token else model


@lru_cache(maxsize=256)  # an equal model gets the first one's costs: what is returned here is never ``model`` itself
def _sliced_costs(model: ModelCost, tokens: int) -> ModelCost:
    head = model.layers[-1]
    at_once = head.logits_bytes_per_token + head.workspace_bytes_per_token
    sliced = replace(
        head,
        activation_bytes_per_token=max(0.0, head.activation_bytes_per_token - head.logits_bytes_per_token),
        divided_activations=0.0,
        workspace_bytes_per_token=0.0,
        workspace_bytes=head.workspace_bytes + math.ceil(at_once * tokens),
        logits_bytes_per_token=0.0,
    )
    return replace(model, layers=(*model.layers[:-1], sliced))


def group_sum_bytes(model: ModelCost, tokens: int) -> int:
    """Bytes of host memory in which a group adds up the hidden states of a micro-batch: own parts, those that come, and sums."""
    return 3 * tokens * model.layers[0].boundary_bytes_per_token


def _workspace(layers: Sequence[LayerCost], tokens: int) -> int:
    return max(math.ceil(layer.workspace_bytes_per_token * tokens) + layer.workspace_bytes for layer in layers)


def _kept_per_token(model: ModelCost, index: int, recompute: bool) -> float:
    """Bytes a layer keeps until backward; a block that is recomputed keeps its input only."""
    layer = model.layers[index]
    block = 0 < index < len(model.layers) - 1
    if not (recompute and block):
        return layer.activation_bytes_per_token
    return min(layer.activation_bytes_per_token, model.layers[index - 1].boundary_bytes_per_token)


def stage_holdings(pipeline: PipelinePlan, stage: StagePlan, model: ModelCost) -> tuple[tuple[int, int], ...]:
    """``holdings`` of one stage of a plan: known without its list, unless its weight gradients are put off."""
    if pipeline.order == WARM_UP and (not pipeline.split_backward or stage is pipeline.stages[0]):
        return ((min(stage.warm_up + 1, pipeline.micro_batches), 0),)
    alone = Plan((pipeline,), pipeline.sequences, 1, len(model.layers))
    return holdings(schedule_of(alone, model)[stage.ranks[0]])


def streamed_bytes(model: ModelCost, first: int, last: int) -> int:
    """Bytes of the weights that a streamed stage brings to its device, layer by layer."""
    return sum(model.streamed_bytes(layer) for layer in range(first, last))


def host_state_bytes(model: ModelCost, first: int, last: int, on_disk: Collection[int] = ()) -> int:
    """Bytes in host memory of a streamed stage whose device has memory of its own: the weights (of layers ``on_disk`` buffers),
    and of what is trained whole its state."""
    filed = [model.streamed_bytes(layer) for layer in on_disk]
    weights = streamed_bytes(model, first, last) - sum(filed) + STREAMED_LAYERS * max(filed, default=0)
    if not model.trained_whole:
        return weights
    state = math.ceil(model.state_bytes(first, last))
    return weights + state + (model.tied_bytes if last == len(model.layers) else 0)


def usable_bytes(memory_bytes: int, reserve: float) -> int:
    """Bytes of a rank's memory that a plan may use when the share ``reserve`` is kept free."""
    return int(memory_bytes * (1 - reserve))


def state_on_device(profile: ClusterProfile, stage: StagePlan) -> bool:
    """True where masters and moments of what its rank owns are in the memory of its device."""
    streamed = stage.streamed and profile.model.trained_whole
    return not streamed or profile.devices[stage.ranks[0]].shares_host_memory
