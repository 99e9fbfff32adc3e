"""Memory of a stage on its rank and on its host, in bytes.

Layer bounds are integers or arrays of integers, so that the same code computes one stage or a table of all stages.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetero_mpi.planning.orders import computed_by_rank
from hetero_mpi.planning.schedule import Action, Op, holdings
from hetero_mpi.planning.types.cost import ModelCost
from hetero_mpi.planning.types.plan import WARM_UP, PipelinePlan, StagePlan
from hetero_mpi.planning.types.profile import ClusterProfile, HostProfile
from hetero_mpi.planning.types.sizes import GRADIENT_BYTES, OFFLOADED_LAYER_COUNT
from hetero_mpi.util.grouping import grouped

STAGING_BUFFER_COUNT = 2
"""Host buffers per boundary and direction: one in transfer, one being filled or read."""
Layer = int | NDArray[np.int64]
"""A layer index, or an array of them, one per stage."""
Bytes = Any
"""An integer, or an array of them, one per stage."""


@dataclass(frozen=True)
class StageMemory:
    """Peak bytes of a stage on its rank, by cause."""

    parameters: Bytes
    state: Bytes
    """Gradients, optimizer moments and master weights."""
    activations: Bytes
    """Activations of all micro-batches that are in flight or have deferred weight gradients."""
    workspace: Bytes
    """Maximum workspace of a layer (for a head: the logits), plus activations recomputed at once."""
    staging: Bytes

    @property
    def total(self) -> Bytes:
        return self.parameters + self.state + self.activations + self.workspace + self.staging


class StageMode(NamedTuple):
    """A rank's memory strategy for a stage; see ``StagePlan``."""

    recompute: bool = False
    streamed: bool = False
    slice_sequences: int | None = None
    kept_slices: int = 0


RESIDENT = StageMode()
"""Everything stays on the device, without recomputation or slices."""


def usable_bytes(memory_bytes: int, reserve: float) -> int:
    """Bytes of a rank's memory that a plan may use if the fraction ``reserve`` stays free."""
    return int(memory_bytes * (1 - reserve))


def rank_usable_bytes(profile: ClusterProfile, rank: int, reserve: float) -> int:
    """Memory budget of ``rank`` in bytes, capped by its host's memory if no other rank computes in it."""
    device, host = profile.devices[rank], profile.host(rank)
    device_bytes = usable_bytes(device.memory_bytes, reserve)
    if host is None or not device.shares_host_memory:
        return device_bytes
    sharing_count = sum(neighbour.host == device.host and neighbour.shares_host_memory for neighbour in profile.devices)
    return device_bytes if sharing_count > 1 else min(device_bytes, usable_bytes(host.memory_bytes, reserve))


def shared_memories(profile: ClusterProfile) -> list[tuple[HostProfile, tuple[int, ...]]]:
    """Return each host in whose memory several ranks compute, with those ranks."""
    computing = grouped((device for device in profile.devices if device.shares_host_memory), lambda device: device.host)
    ranks_of = {host: tuple(device.rank for device in computing.get(host.name, ())) for host in profile.hosts}
    return [(host, ranks) for host, ranks in ranks_of.items() if len(ranks) > 1]


def shared_parameters(model: ModelCost, first: Layer, last: Layer) -> Any:
    """Number of parameters that the layers count twice but a rank holding both tied ends stores once."""
    both_ends = (first == 0) & (last == len(model.layers))
    return model.tied_bytes // GRADIENT_BYTES * both_ends if model.tied else 0


def shared_bytes(model: ModelCost, first: Layer, last: Layer) -> Bytes:
    """Bytes of ``shared_parameters``: the values are shared, but the head keeps its own gradient."""
    matrix, both_ends = model.layers[0], (first == 0) & (last == len(model.layers))
    # Python's integers, which do not overflow, until the last product.
    matrix_bytes = shared_parameters(model, 0, len(model.layers)) * matrix.parameter_bytes // max(1, matrix.parameters)
    return matrix_bytes * both_ends


def _ceil(number: Any) -> Bytes:
    return np.ceil(number).astype(np.int64)


def stage_memory(
    model: ModelCost,
    first: Layer,
    last: Layer,
    tokens: int,
    in_flight: int,
    mode: StageMode | StagePlan = RESIDENT,
    deferred: int = 0,
    sequence_length: int = 1,
    in_host_memory: bool = False,
) -> StageMemory:
    """Device memory of a stage with the layers [first, last), by cause.

    For each micro-batch in flight, an offloaded stage holds the inputs of every layer (for kept slices, all activations). It
    also holds the weights of ``OFFLOADED_LAYER_COUNT`` layers, one layer's activations of a slice, and the adapters' state or,
    in full fine-tuning, the gradients of ``OFFLOADED_LAYER_COUNT`` layers. If the device computes in host memory, frozen
    weights are memory-mapped files, and full fine-tuning keeps everything.

    Args:
        tokens: Number of tokens per micro-batch.
        in_flight: Number of micro-batches kept for backward.
        deferred: Number of micro-batches kept for their weight gradients.
    """
    slice_tokens = min(tokens, (mode.slice_sequences or tokens) * sequence_length)
    model = model.sliced(slice_tokens)
    tables = model.stage_tables
    recompute, most_kept = mode.recompute and not mode.streamed, tables.most_kept[first, last]
    kept_table, recomputed = tables.kept_recomputing if recompute else tables.kept, most_kept * recompute
    parameters: Bytes = tables.parameters[first, last] - shared_bytes(model, first, last)
    state, outputs = _ceil(tables.state[first, last]), 0
    deferred_bytes = deferred * _ceil(tables.deferred[first, last] * tokens)
    activations = in_flight * _ceil(kept_table[first, last] * tokens) + deferred_bytes
    if mode.streamed:
        streamed = OFFLOADED_LAYER_COUNT * tables.most_streamed[first, last]
        if not model.trained_whole:
            parameters = parameters - tables.streamed[first, last] + streamed
        elif not in_host_memory:
            parameters, state = streamed, OFFLOADED_LAYER_COUNT * tables.most_gradients[first, last]
        before, kept_tokens = np.maximum(0, np.subtract(first, 1)), min(tokens, mode.kept_slices * slice_tokens)
        inputs = tables.outputs[before, np.subtract(last, 1)] * (tokens - kept_tokens)
        activations = in_flight * (inputs + _ceil(kept_table[first, last] * kept_tokens))
        recomputed = most_kept * (kept_tokens < tokens)
        # Beside a layer's activations there are its outputs of all slices, forward, or their gradients, backward.
        outputs = 2 * tables.most_output[before, last] * tokens
    return StageMemory(
        parameters=parameters,
        state=state,
        activations=activations,
        workspace=tables.workspace(slice_tokens)[first, last] + _ceil(recomputed * slice_tokens) + outputs,
        staging=2 * STAGING_BUFFER_COUNT * tokens * (tables.crossing[first] + tables.crossing[last]),
    )


def memory_of(
    profile: ClusterProfile,
    pipeline: PipelinePlan,
    stage: StagePlan,
    sequence_length: int,
    holding: tuple[int, int],
    member: int = 0,
) -> StageMemory:
    """Memory of a plan's stage on one ``member`` of its ranks, while it holds (in flight, deferred) micro-batches."""
    rank, (in_flight, deferred), tokens = stage.ranks[member], holding, pipeline.size(0) * sequence_length
    model, shares = profile.model_on(rank), profile.devices[rank].shares_host_memory
    model = model.sliced(tokens_at_once(pipeline, stage, sequence_length))
    model = model.part(stage.share(member), stage.expert_share(member))
    layers = stage.first, stage.last
    parts = stage_memory(model, *layers, tokens, in_flight, stage, deferred, sequence_length, shares)
    # Host memory in which a group adds up the hidden states of a micro-batch: own parts, those that come, and sums.
    sums = 3 * tokens * model.layers[0].boundary_bytes_per_token * (stage.grouped and not stage.streamed)
    return StageMemory(*map(int, vars(replace(parts, staging=parts.staging + sums)).values()))


def tokens_at_once(pipeline: PipelinePlan, stage: StagePlan, sequence_length: int) -> int:
    """Number of tokens that a stage computes at once: a micro-batch or a slice of it."""
    return min(pipeline.size(0), stage.slice_sequences or pipeline.size(0)) * sequence_length


def slices_head(model: ModelCost, pipeline: PipelinePlan, stage: StagePlan, sequence_length: int) -> bool:
    tokens = tokens_at_once(pipeline, stage, sequence_length)
    return stage.last == len(model.layers) and model.sliced(tokens) is not model


def stage_holdings(pipeline: PipelinePlan, stage: StagePlan) -> tuple[tuple[int, int], ...]:
    """Return ``holdings`` of one stage, in closed form if its order is ``warm_up`` and its backward is not split."""
    if pipeline.order == WARM_UP and (not pipeline.split_backward or stage is pipeline.stages[0]):
        return ((min(stage.warm_up + 1, pipeline.micro_batches), 0),)
    computed = computed_by_rank(pipeline)[stage.ranks[0]]
    return holdings([Action(Op(name), index, micro_batch) for name, index, micro_batch in computed])


def warm_ups(pipeline: PipelinePlan) -> tuple[int, ...]:
    """Forwards of each stage before its forwards and backwards alternate; all of them if no backward comes between forwards."""
    if pipeline.order == WARM_UP:
        return tuple(stage.warm_up for stage in pipeline.stages)
    computed = {rank: [*actions] for rank, actions in computed_by_rank(pipeline).items()}
    texts = ("".join(op for op, i, _ in computed[stage.ranks[0]] if i == n) for n, stage in enumerate(pipeline.stages))
    forwards = (len(ops) - len(ops.lstrip("F")) for ops in texts)
    return tuple(count - (count < pipeline.micro_batches) for count in forwards)


def peak_bytes(
    profile: ClusterProfile, pipeline: PipelinePlan, stage: StagePlan, sequence_length: int, member: int = 0
) -> int:
    """Peak bytes of a rank that holds a single stage, over its schedule."""
    pairs = stage_holdings(pipeline, stage)
    return int(max(memory_of(profile, pipeline, stage, sequence_length, pair, member).total for pair in pairs))


def streamed_bytes(model: ModelCost, first: Layer, last: Layer) -> Bytes:
    """Bytes of the weights that an offloaded stage copies to its device, layer by layer."""
    return model.stage_tables.streamed[first, last]


def host_state_bytes(model: ModelCost, first: Layer, last: Layer, on_disk: Collection[int] = ()) -> Bytes:
    """Host memory of an offloaded stage: weights (buffers for those ``on_disk``) and, in full fine-tuning, state."""
    disk_bytes = [model.streamed_bytes(layer) for layer in on_disk]
    weights = streamed_bytes(model, first, last) - sum(disk_bytes) + OFFLOADED_LAYER_COUNT * max(disk_bytes, default=0)
    if not model.trained_whole:
        return weights
    return weights + _ceil(model.stage_tables.state[first, last]) + model.tied_bytes * (last == len(model.layers))


def state_on_device(profile: ClusterProfile, stage: StagePlan) -> bool:
    """Whether the owned master weights and moments are in device memory."""
    streamed = stage.streamed and profile.model.trained_whole
    return not streamed or profile.devices[stage.ranks[0]].shares_host_memory
