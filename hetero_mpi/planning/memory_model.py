"""Memory budgets: how many micro-batches a stage can keep in flight, and the predicted peaks of every rank and host."""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetero_mpi.planning.memory import (
    STAGING_BUFFER_COUNT,
    Bytes,
    Layer,
    StageMemory,
    StageMode,
    host_state_bytes,
    memory_of,
    peak_bytes,
    rank_usable_bytes,
    shared_bytes,
    stage_holdings,
    stage_memory,
    state_on_device,
    usable_bytes,
)
from hetero_mpi.planning.orders import computed_by_rank
from hetero_mpi.planning.owners import owned_state_bytes
from hetero_mpi.planning.types.cost import ModelCost
from hetero_mpi.planning.types.plan import WARM_UP, HostMemory, PipelinePlan, Plan, RankMemory, StagePlan
from hetero_mpi.planning.types.profile import ClusterProfile, DeviceProfile
from hetero_mpi.planning.types.request import PlanRequest
from hetero_mpi.planning.types.sizes import GRADIENT_BYTES


class MemoryBudget(NamedTuple):
    """Memory available to a stage."""

    usable: float
    ratio: float
    """``DeviceProfile.activation_ratio``."""
    relief: float
    """Bytes of this stage's optimizer state that other ranks have memory for."""
    in_host_memory: bool
    of_host: float
    """Bytes of host memory for offloaded state; infinite if it is unlimited or may spill to disk."""


class MemoryModel:
    """Memory of stages on the ranks of one profile, under one request."""

    def __init__(self, profile: ClusterProfile, request: PlanRequest) -> None:
        self.profile, self.request, self.model = profile, request, profile.model
        reserve, count = request.memory_reserve, len(profile.model.layers) + 1
        self.usable = [rank_usable_bytes(profile, rank, reserve) for rank in range(len(profile.devices))]
        """Bytes that a plan may use on each rank."""
        self.every = np.arange(count)[:, None], np.arange(count)[None, :]
        """First and last layer of every stage, as index arrays."""
        self._owned = np.cumsum([0.0, *(self.model.owned_bytes(i, i + 1) for i in range(count - 1))])
        self._tables: dict[tuple[int, StageMode, float, bool], tuple[NDArray[np.float64], NDArray[np.float64]]] = {}
        self._kinds = [(device.activation_ratio, device.shares_host_memory) for device in profile.devices]
        self._parts: dict[tuple[object, ...], tuple[int, int, int]] = {}
        self._holdings: dict[tuple[object, ...], tuple[tuple[int, int], ...]] = {}

    def budgets(self, devices: Sequence[DeviceProfile]) -> list[MemoryBudget]:
        """Return the memory budgets of stages on the given devices."""
        mean, budgets = sum(float(self.usable[d.rank]) for d in devices) / len(devices), []
        limited = self.model.trained_whole or self.request.without_files
        sharers = Counter(device.host for device in self.profile.devices if not device.shares_host_memory)
        for device in devices:
            host, own_bytes, of_host = self.profile.host(device.rank), float(self.usable[device.rank]), math.inf
            if host is not None and limited:
                of_host = usable_bytes(host.memory_bytes, self.request.memory_reserve) / max(1, sharers[device.host])
            shares, relief = device.shares_host_memory, max(0.0, mean - own_bytes)
            budgets.append(MemoryBudget(own_bytes, device.activation_ratio, relief, shares, of_host))
        return budgets

    def stage_bytes(
        self,
        first: Layer,
        last: Layer,
        micro_batch: int,
        mode: StageMode,
        pipelines: float = 1,
        ratio: float = 1.0,
        in_host_memory: bool = False,
    ) -> tuple[Bytes, Bytes]:
        """Return (fixed bytes, bytes per micro-batch in flight) of the layers [first, last); infinite if there are none.

        Args:
            pipelines: Number of data-parallel replicas that share the optimizer state; infinite if other ranks own all of it.
            ratio: Ratio of the rank's kept activation bytes to the model's.
        """
        key = micro_batch, mode, ratio, in_host_memory
        if key not in self._tables:
            model, length, (begin, end) = self.model.keeping(ratio), self.request.sequence_length, self.every
            parts = stage_memory(model, begin, end, micro_batch * length, 1, mode, 0, length, in_host_memory)
            fixed = np.where(begin < end, parts.total - parts.activations, np.inf)
            self._tables[key] = fixed, np.where(begin < end, parts.activations, 0.0)
        fixed, per_micro_batch = (table[first, last] for table in self._tables[key])
        keeps_state = in_host_memory or not mode.streamed
        return fixed - self._unowned_bytes(first, last, pipelines) if keeps_state else fixed, per_micro_batch

    def max_in_flight(
        self, first: Layer, last: Layer, micro_batch: int, mode: StageMode, budget: MemoryBudget, pipelines: float = 1
    ) -> Any:
        """Maximum number of micro-batches in flight within ``budget``; negative if the stage does not fit."""
        ratio, in_host_memory = budget.ratio, budget.in_host_memory
        fixed, per_micro_batch = self.stage_bytes(first, last, micro_batch, mode, pipelines, ratio, in_host_memory)
        state_in_host, relief = mode.streamed and not in_host_memory, 0.0
        if pipelines > 1 and self.model.trained_whole and not state_in_host:
            relief = np.minimum(budget.relief, (self._owned[last] - self._owned[first]) / pipelines)
        max_count = np.floor((budget.usable + relief - fixed) / np.maximum(per_micro_batch, 1e-9))
        if state_in_host and budget.of_host < math.inf:
            host_bytes = host_state_bytes(self.model, first, last) - self._unowned_bytes(first, last, pipelines)
            max_count = np.where(host_bytes <= budget.of_host, max_count, -1.0)
        return max_count

    def _unowned_bytes(self, first: Layer, last: Layer, pipelines: float) -> Any:
        """Bytes of a stage's state that other replicas own."""
        shared = 1 - 1 / pipelines if self.model.trained_whole else 0.0
        return shared * (self._owned[last] - self._owned[first])

    def parts(self, pipeline: PipelinePlan, stage: StagePlan, recompute: bool) -> tuple[int, int, int]:
        """Bytes of a stage on one rank that owns all the state of its layers.

        Returns:
            Fixed bytes, bytes per micro-batch in flight, bytes per micro-batch with deferred weight gradients.
        """
        mode = recompute, stage.streamed, stage.slice_sequences, stage.kept_slices
        key = stage.first, stage.last, mode, pipeline.size(0), self._kinds[stage.ranks[0]]
        if key not in self._parts:
            length, variant = self.request.sequence_length, replace(stage, recompute=recompute)
            resident, deferred = (memory_of(self.profile, pipeline, variant, length, pair) for pair in ((1, 0), (0, 1)))
            self._parts[key] = resident.total - resident.activations, resident.activations, deferred.activations
        return self._parts[key]

    def holdings(
        self, pipeline: PipelinePlan, index: int, warm_up: int, first_warm_up: int
    ) -> tuple[tuple[int, int], ...]:
        """``stage_holdings`` of stage ``index`` if it and the first stage had these depths, which only ``warm_up`` obeys."""
        if pipeline.order != WARM_UP:
            return stage_holdings(pipeline, pipeline.stages[index])
        most = pipeline.micro_batches - 1
        key = pipeline.split_backward, index > 0, min(warm_up, most), min(first_warm_up, most), most
        if key not in self._holdings:
            first_stage = replace(pipeline.stages[0], warm_up=first_warm_up)
            stage = replace(pipeline.stages[index], warm_up=warm_up)
            stages = (first_stage, stage) if index else (stage,)
            self._holdings[key] = stage_holdings(replace(pipeline, stages=stages), stage)
        return self._holdings[key]

    def check(self, plan: Plan) -> bool:
        """Return whether the plan fits in the memory of every rank and every host."""
        return not self.overfull(plan)

    def overfull(self, plan: Plan) -> dict[int, float]:
        """Map ranks that lack memory, of their own or of their host, to the ratio of needed to usable bytes."""
        devices, reserve = self.profile.devices, self.request.memory_reserve
        ratios = {m.rank: m.peak_bytes / max(1, m.usable_bytes) for m in predict_memory(plan, self.profile, reserve)}
        for host in predict_hosts(plan, self.profile, reserve):
            for rank in (rank for rank in ratios if devices[rank].host == host.host):
                ratios[rank] = max(ratios[rank], host.peak_bytes / max(1, host.usable_bytes))
        return {rank: ratio for rank, ratio in ratios.items() if ratio > 1}

    def check_hosts(self, plan: Plan) -> bool:
        """Return whether the plan fits in the memory of every host, without checking ranks."""
        hosts = predict_hosts(plan, self.profile, self.request.memory_reserve)
        return all(memory.peak_bytes <= memory.usable_bytes for memory in hosts)


def predict_memory(plan: Plan, profile: ClusterProfile, reserve: float = 0.0) -> tuple[RankMemory, ...]:
    """Predict the peak and usable bytes of every rank that holds a stage, in rank order."""
    peaks: dict[int, int] = {}
    owned: dict[Hashable, dict[int, float]] = {}
    for pipeline in plan.pipelines:
        for rank, indices in pipeline.stages_of.items():
            stage = pipeline.stages[indices[0]]
            member = stage.ranks.index(rank)
            if len(indices) == 1:
                peak = peak_bytes(profile, pipeline, stage, plan.sequence_length, member)
            else:
                peak = _multi_stage_bytes(profile, pipeline, rank, plan.sequence_length)
            held_stages = [pipeline.stages[index] for index in indices]
            peaks[rank] = peak - _elsewhere_bytes(plan, profile, held_stages, member, owned)
            peaks[rank] += sum(_regrouped_bytes(plan, profile.model, held_stage, member) for held_stage in held_stages)
    return tuple(
        RankMemory(rank, peaks[rank], usable_bytes(profile.devices[rank].memory_bytes, reserve))
        for rank in sorted(peaks)
    )


def _multi_stage_bytes(profile: ClusterProfile, pipeline: PipelinePlan, rank: int, sequence_length: int) -> int:
    """Peak bytes of a rank with several stages: its activations at the worst position of its list, plus one workspace.

    Adjacent stages need no staging buffers, and tied ends share their values.
    """
    indices, model = pipeline.stages_of[rank], profile.model_on(rank)

    def memory_at(index: int, in_flight: int, deferred: int) -> StageMemory:
        return memory_of(profile, pipeline, pipeline.stages[index], sequence_length, (in_flight, deferred))

    empty = {index: memory_at(index, 0, 0) for index in indices}
    saved = {index: memory_at(index, 1, 0).activations for index in indices}
    delayed = {index: memory_at(index, 0, 1).activations for index in indices}
    held_bytes = peak_held_bytes = 0
    for name, index, _ in computed_by_rank(pipeline)[rank]:
        change = {"F": saved[index], "B": -saved[index], "I": delayed[index] - saved[index], "W": -delayed[index]}
        held_bytes += change[name]
        peak_held_bytes = max(peak_held_bytes, held_bytes)
    tokens, ends = pipeline.size(0) * sequence_length, {0, len(pipeline.stages) - 1}
    between = sum(
        model.layers[pipeline.stages[index].last - 1].boundary_bytes_per_token * tokens
        for index in indices
        if index + 1 in indices
    )
    shared = shared_bytes(model, 0, len(model.layers)) if ends <= set(indices) else 0
    return int(
        sum(memory.parameters + memory.state + memory.staging for memory in empty.values())
        + max(memory.workspace for memory in empty.values())
        + peak_held_bytes
        - 4 * STAGING_BUFFER_COUNT * between
        - shared
    )


def _elsewhere_bytes(
    plan: Plan, profile: ClusterProfile, held: Sequence[StagePlan], member: int, owned: dict[Hashable, dict[int, float]]
) -> int:
    """Bytes of optimizer state that other replicas own, so that this rank need not hold them in device memory.

    Each member of a tensor-parallel group keeps its shard of what the leader owns. ``owned``: cache of ``owned_state_bytes``.
    """
    if len(plan.pipelines) == 1 or not state_on_device(profile, held[0]):
        return 0
    model, leader = profile.model, held[0].ranks[0]
    shares = held[0].share(member), held[0].expert_share(member)
    part = model.part(*shares)
    if shares not in owned:
        owned[shares] = owned_state_bytes(plan, model, part)
    return math.floor(sum(part.owned_bytes(stage.first, stage.last) for stage in held) - owned[shares][leader])


def _regrouped_bytes(plan: Plan, model: ModelCost, stage: StagePlan, member: int) -> int:
    """Bytes of the buffers that exchange gradients with replicas that shard the same layers differently."""
    if not plan.leader_of:
        return 0
    peers = [peer for _, _, peer in plan.numbered if (peer.shares, peer.experts) != (stage.shares, stage.experts)]
    layers = {layer for peer in peers for layer in range(peer.first, peer.last)}
    parts = model.part(stage.share(member), stage.expert_share(member)).layers
    return GRADIENT_BYTES * sum(parts[i].trainable_parameters for i in range(stage.first, stage.last) if i in layers)


def predict_hosts(plan: Plan, profile: ClusterProfile, reserve: float = 0.0) -> tuple[HostMemory, ...]:
    """Predict the peak and usable bytes of every host with a memory limit, in the profile's order.

    Ranks that compute in host memory (CPU, integrated GPUs) count in full. Other ranks count only with their offloaded state
    (``host_state_bytes``), as their staging buffers are negligible.
    """
    if not profile.hosts:
        return ()
    peaks = {memory.rank: memory.peak_bytes for memory in predict_memory(plan, profile, reserve)}
    stored, layers = dict[int, int](), plan.layers
    for stage in (stage for _, _, stage in plan.numbered if stage.streamed):
        stored[stage.ranks[0]] = host_state_bytes(profile.model, stage.first, stage.last, stage.disk_layers(layers))
    used = Counter[str]()
    for device in profile.devices:
        used[device.host] += int((peaks if device.shares_host_memory else stored).get(device.rank, 0))
    limits = ((host.name, usable_bytes(host.memory_bytes, reserve)) for host in profile.hosts)
    return tuple(HostMemory(name, used[name], usable) for name, usable in limits if used[name])
