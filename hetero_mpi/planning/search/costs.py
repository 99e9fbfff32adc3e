"""Stage costs on all usable ranks for one micro-batch size, as arrays and as lists for fast single lookups.

Compute times are tabulated per rank and layer, link times per pair of *places*. A place is a rank in small clusters and a host
in large ones.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from hetero_mpi.planning.bounds import cycle_bound_s
from hetero_mpi.planning.durations import exchange_s, summed_bytes, value_bytes
from hetero_mpi.planning.memory import Layer, StageMode
from hetero_mpi.planning.memory_model import MemoryBudget, MemoryModel
from hetero_mpi.planning.orders.warm_up import paced_each, period_s, scheduled_depths
from hetero_mpi.planning.search.pipelines import ROUNDING_RATIO, Fitting, Line, LineTimes, falling
from hetero_mpi.planning.tables import (
    Floats,
    Indices,
    StageGrid,
    in_own_order,
    levels,
    links_of,
    may_split,
    seconds_by_mode,
)
from hetero_mpi.planning.types.cost import ModelCost
from hetero_mpi.planning.types.profile import ClusterProfile, DeviceProfile
from hetero_mpi.planning.types.request import PlanRequest, shares_nics

MAX_SHARING_RANKS = 64
"""Clusters with more ranks are searched as if optimizer state were not sharded."""
MIN_WIDE_RANKS, MAX_WIDE_RANKS = 13, 32
"""Range of ranks with twice as many candidates: plans for fewer ranks rarely gain, those for more take too long, as do those
with shared NICs."""


@dataclass(eq=False)
class Costs:
    """Costs per rank. A rank here is an index into ``devices``, which excludes devices without the model's dtype."""

    memory: MemoryModel
    micro_batch: int
    devices: list[DeviceProfile]
    rooms: list[MemoryBudget]
    ways: list[StageMode]
    """Memory strategies, fastest first."""
    forward_s: Floats
    """[way, rank, layer]: seconds per micro-batch."""
    backward_s: Floats
    """[way, rank, layer]: seconds per micro-batch, including the recomputed forward."""
    overhead_s: Floats
    """[way, rank, 2]: fixed seconds that each forward and each backward adds."""
    step_per_parameter_s: Floats
    """[way, rank]: optimizer seconds per trained parameter."""
    place_of: Indices
    latency_s: Floats
    """[place, place], as is ``per_byte_s``."""
    per_byte_s: Floats
    members: Sequence[tuple[int, ...]]
    """Indices into ``devices``: one tuple per rank, or one per column with its members (``columns.in_columns``)."""
    base: Costs | None = None
    """The costs per rank, if this object describes columns."""
    _bytes: dict[tuple[Any, ...], tuple[list[list[float]], ...]] = field(default_factory=dict, init=False)
    """(way, kind of budget) -> [first][layers - 1]: fixed bytes and bytes per micro-batch, without optimizer state."""
    _times: dict[tuple[Any, ...], LineTimes] = field(default_factory=dict, init=False)
    """Cache of ``times``, keyed by ranks, layer counts and ways."""
    _paced: dict[tuple[Any, ...], tuple[int, ...]] = field(default_factory=dict, init=False)
    """Cache of ``paced`` depths, keyed by ranks, layer counts, sequences, ``allowance`` and ``repeat``."""
    _bases: dict[tuple[Any, ...], tuple[list[float], list[float], list[int]]] = field(default_factory=dict, init=False)
    """Cache of ``_basis``, keyed by ranks and layer counts."""

    @property
    def count(self) -> int:
        return len(self.rooms)

    @property
    def request(self) -> PlanRequest:
        return self.memory.request

    @cached_property
    def host(self) -> Indices:
        """Host index of each rank, or of each column's first rank."""
        names = list(dict.fromkeys(device.host for device in self.devices))
        return np.array([names.index(self.devices[ranks[0]].host) for ranks in self.members])

    @cached_property
    def splits(self) -> list[bool]:
        able = [may_split(self.memory.profile, device.rank) for device in self.devices]
        return [all(able[rank] for rank in ranks) for ranks in self.members]

    @cached_property
    def step_fixed_s(self) -> Floats:
        return np.array([max(self.devices[rank].optimizer_fixed_s for rank in ranks) for ranks in self.members])

    @cached_property
    def usable(self) -> Floats:
        return np.array([room.usable for room in self.rooms])

    @property
    def effort(self) -> int:
        """Factor by which numbers of candidates are raised, for thorough requests and for many ranks."""
        request = self.request
        is_whole = not (request.near or request.near_counts or shares_nics(self.memory.profile))
        return 1 + request.thorough + (is_whole and MIN_WIDE_RANKS <= len(self.devices) <= MAX_WIDE_RANKS)

    @property
    def model(self) -> ModelCost:
        return self.memory.model

    @property
    def layer_count(self) -> int:
        return len(self.model.layers)

    @cached_property
    def message_bytes(self) -> Floats:
        tokens = self.micro_batch * self.request.sequence_length
        return np.array([float(self.model.sent_bytes_per_token(i) * tokens) for i in range(self.layer_count)])

    @cached_property
    def summed_bytes(self) -> Floats:
        return np.array([float(summed_bytes(self.model, layer)) for layer in range(self.layer_count)])

    @cached_property
    def value_bytes(self) -> Floats:
        return np.array([float(value_bytes(self.model, layer)) for layer in range(self.layer_count)])

    @cached_property
    def speed(self) -> Floats:
        """Sequences per second that each rank would process alone with unlimited memory."""
        return np.asarray(self.micro_batch / (self.forward_s[0].sum(axis=1) + self.backward_s[0].sum(axis=1)))

    @cached_property
    def outward_level(self) -> Floats:
        """Speed level of each rank's fastest link to another host; equal for similar ranks."""
        away = self.latency_s + self.message_bytes.max() * self.per_byte_s
        host_of = np.zeros(len(away), dtype=np.int64)
        host_of[self.place_of] = self.host
        away = np.where(host_of[:, None] == host_of[None, :], np.inf, away).min(axis=1)
        return levels(1 / np.maximum(np.where(np.isinf(away), 0.0, away)[self.place_of], 1e-9))

    def exchange_s(self, ranks: Sequence[int], size_bytes: Floats) -> Floats:
        """``durations.exchange_s`` for several sizes at once; columns exchange among all their members."""
        members = [self.devices[index].rank for rank in ranks for index in self.members[rank]]
        sizes, which = np.unique(size_bytes, return_inverse=True)
        return np.array([exchange_s(self.memory.profile, members, size) for size in sizes.tolist()])[which]

    # Memory

    def sharing(self, pipelines: float) -> float:
        """Number of data-parallel replicas over which optimizer state is sharded."""
        return pipelines if self.model.trained_whole and len(self.devices) <= MAX_SHARING_RANKS else 1

    def grid(self, pipelines: float) -> StageGrid:
        """All stages that fit on at least one rank if optimizer state is sharded over ``pipelines``."""
        if any(way.streamed for way in self.ways):
            return StageGrid(self.layer_count, self.layer_count)
        longest, most_bytes, (first, last) = 1, float(self.usable.max()), self.memory.every
        for recompute in {way.recompute for way in self.ways}:
            fixed, each = self.stage_bytes(first, last, StageMode(recompute), pipelines)
            fits = np.argwhere(fixed + each <= most_bytes)
            longest = max([longest, *(fits[:, 1] - fits[:, 0]).tolist()])
        return StageGrid(self.layer_count, longest)

    def stage_bytes(self, first: Layer, last: Layer, way: StageMode, pipelines: float, *kind: Any) -> tuple[Any, Any]:
        """``MemoryModel.stage_bytes`` with optimizer state sharded over ``pipelines``."""
        return self.memory.stage_bytes(first, last, self.micro_batch, way, self.sharing(pipelines), *kind)

    def max_in_flight(self, grid: StageGrid, way: StageMode, room: MemoryBudget, pipelines: float) -> Floats:
        """Maximum number of micro-batches in flight for each stage of ``grid``; negative if the stage does not fit."""
        stages, share = (grid.first, grid.last), self.sharing(pipelines)
        return np.where(grid.inside, self.memory.max_in_flight(*stages, self.micro_batch, way, room, share), -1.0)

    @cached_property
    def deepest(self) -> dict[StageMode, list[list[list[int]]]]:
        """Map each strategy to [rank][first][layers - 1]: maximum micro-batches in flight; longer stages fit on no rank."""
        return self.unshared

    @cached_property
    def unshared(self) -> dict[StageMode, list[list[list[int]]]]:
        return self._deepest(1)

    def shared_by(self, pipelines: float) -> Costs:
        """Costs with optimizer state sharded over ``pipelines``; if infinite, other ranks own all of the state."""
        deepest = self._deepest(pipelines) if self.model.trained_whole else self.deepest
        if deepest == self.deepest:
            return self
        shared = copy.copy(self)
        shared.deepest, shared._paced, shared._bases, shared._bytes = deepest, {}, {}, {}
        if pipelines == math.inf:
            grid, kinds = self.grid(pipelines), {(room.ratio, room.in_host_memory) for room in self.rooms}
            for way, kind in itertools.product(deepest, kinds):
                of_way = self.stage_bytes(grid.first, grid.last, way, pipelines, *kind)
                shared._bytes[way, kind] = tuple(table.tolist() for table in of_way)
        return shared

    def _deepest(self, pipelines: float) -> dict[StageMode, list[list[list[int]]]]:
        grid, batch, depths_by_mode = self.grid(pipelines), self.request.global_batch, {}
        for way in self.ways:
            depths = {room: self.max_in_flight(grid, way, room, pipelines) for room in set(self.rooms)}
            depths_by_room = {room: np.clip(each, 0, batch).astype(int).tolist() for room, each in depths.items()}
            depths_by_mode[way] = [depths_by_room[room] for room in self.rooms]
        return depths_by_mode

    # Single lookups

    def _summed(self, table: Floats) -> dict[StageMode, list[list[float]]]:
        """Map each strategy to [rank][layer]: total seconds of all earlier layers."""
        sums = zip(self.ways, np.cumsum(table, axis=2).tolist(), strict=True)
        return {way: [[0.0, *row] for row in rows] for way, rows in sums}

    @cached_property
    def forward(self) -> dict[StageMode, list[list[float]]]:
        return self._summed(self.forward_s)

    @cached_property
    def backward(self) -> dict[StageMode, list[list[float]]]:
        return self._summed(self.backward_s)

    @cached_property
    def trainable(self) -> list[float]:
        """[layer]: number of trained parameters in all earlier layers."""
        return [0.0, *itertools.accumulate(float(layer.trainable_parameters) for layer in self.model.layers)]

    @cached_property
    def overhead(self) -> dict[StageMode, list[tuple[float, float]]]:
        return dict(zip(self.ways, self.overhead_s.tolist(), strict=True))

    @cached_property
    def _lists(self) -> tuple[Any, ...]:
        return tuple(array.tolist() for array in (self.place_of, self.latency_s, self.per_byte_s, self.message_bytes))

    @cached_property
    def _steps(self) -> tuple[list[float], dict[StageMode, list[float]]]:
        return self.step_fixed_s.tolist(), dict(zip(self.ways, self.step_per_parameter_s.tolist(), strict=True))

    def fitted(self, line: Line) -> Fitting | None:
        """Fit ``line`` in memory with the fastest strategies for its depths, or smaller depths; None if it does not fit."""
        flying, ways, cuts = [], [], line.cuts
        max_flying = line.micro_batches
        for stage, rank in enumerate(line.ranks):
            max_flying = min(max_flying, line.flying[stage])
            deepest, mode = 0, self.ways[0]
            for way, tables in self.deepest.items():
                depth = _room(tables[rank][cuts[stage]], line.counts[stage])
                if depth > deepest:
                    deepest, mode = depth, way
                if deepest >= max_flying:
                    break
            max_flying = min(max_flying, deepest)
            if max_flying < 1:
                return None
            flying.append(max_flying)
            ways.append(mode)
        return self.timed(line._replace(flying=tuple(flying)), tuple(ways))

    def timed(self, line: Line, ways: tuple[StageMode, ...]) -> Fitting:
        """Time ``line`` without checking memory."""
        times, bound_s = self.times(line, ways), 0.0
        if not line.is_split:
            bound_s = cycle_bound_s(*times, [depth - 1 for depth in line.flying], line.micro_batches)
        bound_s = (bound_s + max(self.steps_s(line, ways, math.inf))) * (1 - ROUNDING_RATIO)
        return Fitting(line, ways, times, bound_s, self._spare_bytes(line, ways))

    def _spare_bytes(self, line: Line, ways: Sequence[StageMode]) -> float:
        """Bytes that the ranks of ``line`` have left for optimizer state; infinite if not tabulated."""
        if not self._bytes:
            return math.inf
        spare = 0.0
        for rank, first, count, flying, way in zip(line.ranks, line.cuts, line.counts, line.flying, ways, strict=False):
            room = self.rooms[rank]
            fixed, each = self._bytes[way, (room.ratio, room.in_host_memory)]
            spare += room.usable - fixed[first][count - 1] - each[first][count - 1] * flying
        return spare

    def holds(self, fitting: Fitting) -> bool:
        """Whether every rank can hold all optimizer state of its stage."""
        line = fitting.line
        stages = zip(fitting.ways, line.ranks, line.cuts, line.counts, line.flying, strict=False)
        return self.deepest is self.unshared or all(
            _room(self.unshared[way][rank][first], count) >= flying for way, rank, first, count, flying in stages
        )

    def paced(self, line: Line, allowance: float, repeat: bool) -> Line:
        """Set depths so that gradients arrive in time when the slowest stage or link sets the pace.

        Args:
            allowance: number of periods by which gradients arrive early.
            repeat: allow depths that fit in memory only with recomputation.
        """
        if self.request.schedule != "auto":
            return self.scheduled(line)
        key = line.ranks, line.counts, line.sequences, allowance, repeat
        if key not in self._paced:
            self._paced[key] = self._depths(line, allowance, repeat)
        return line._replace(flying=self._paced[key])

    def scheduled(self, line: Line) -> Line:
        """Set the depths that the request's schedule prescribes."""
        depths = scheduled_depths(self.request.schedule, len(line.ranks), line.micro_batches)
        return line._replace(flying=tuple(min(depth + 1, line.micro_batches) for depth in depths))

    def _depths(self, line: Line, allowance: float, repeat: bool) -> tuple[int, ...]:
        compute, hops, max_depths = self._basis(line.ranks, line.counts)
        warm_up = paced_each(compute, hops, period_s(compute, hops), allowance)
        flying = [min(line.micro_batches, depth + 1) for depth in warm_up]
        if repeat or len(self.ways) < 2:
            return tuple(flying)
        for stage, depth in enumerate(max_depths):
            flying[stage] = min(flying[stage], depth) if depth >= len(max_depths) - stage else flying[stage]
        return falling(flying)

    def _basis(self, ranks: tuple[int, ...], counts: tuple[int, ...]) -> tuple[list[float], list[float], list[int]]:
        """Basis of ``_depths``: compute seconds and maximum depth of each stage at its fastest, message seconds of each link."""
        if (ranks, counts) not in self._bases:
            line, modes, max_depths = Line(ranks, counts, (), self.micro_batch, 0), list[StageMode](), list[int]()
            for rank, first, count in zip(ranks, line.cuts, counts, strict=False):
                rooms = ((way, _room(tables[rank][first], count)) for way, tables in self.deepest.items())
                way, depth = next((each for each in rooms if each[1] > 0), (self.ways[0], 0))
                modes.append(way)
                max_depths.append(depth)
            times = self.times(line, tuple(modes))
            compute = [f + b for f, b in zip(times.forward, times.backward, strict=True)]
            hops = [out + back for out, back in zip(times.out, times.back, strict=True)]
            self._bases[ranks, counts] = compute, hops, max_depths
        return self._bases[ranks, counts]

    def times(self, line: Line, ways: tuple[StageMode, ...]) -> LineTimes:
        key = line.ranks, line.counts, ways
        if key in self._times:
            return self._times[key]
        places, latency, per_byte, message = self._lists
        (forward_s, backward_s, out_s, back_s), cuts, previous = ([], [], [], []), line.cuts, -1
        for stage, (rank, way) in enumerate(zip(line.ranks, ways, strict=True)):
            first, last, position = cuts[stage], cuts[stage + 1], places[rank]
            forward, backward, overhead = self.forward[way][rank], self.backward[way][rank], self.overhead[way][rank]
            forward_s.append(forward[last] - forward[first] + overhead[0])
            backward_s.append(backward[last] - backward[first] + overhead[1])
            if stage:
                size = message[first - 1]
                out_s.append(latency[previous][position] + size * per_byte[previous][position])
                back_s.append(latency[position][previous] + size * per_byte[position][previous])
            previous = position
        self._times[key] = LineTimes(tuple(forward_s), tuple(backward_s), tuple(out_s), tuple(back_s))
        return self._times[key]

    def final_gradients_s(self, fitting: Fitting) -> list[float]:
        """Time at which each layer's gradients are final on its rank, in seconds."""
        line, begins_s, cuts, final_s = fitting.line, fitting.spans_s[0], fitting.line.cuts, list[float]()
        for stage, (rank, way) in enumerate(zip(line.ranks, fitting.ways, strict=True)):
            backward, first, last = self.backward[way][rank], cuts[stage], cuts[stage + 1]
            end_s = begins_s[stage] + self.overhead[way][rank][1] + backward[last]
            final_s += [end_s - seconds for seconds in backward[first:last]]
        return final_s

    def steps_s(self, line: Line, ways: Sequence[StageMode], pipelines: float) -> list[float]:
        """Optimizer seconds of each stage if state is sharded evenly over ``pipelines``; zero for tied models."""
        if self.model.tied:
            return [0.0] * len(line.ranks)
        trained, (fixed, per_parameter) = [self.trainable[cut] for cut in line.cuts], self._steps
        return [
            fixed[rank] + per_parameter[way][rank] * (after - before) / pipelines
            for rank, way, before, after in zip(line.ranks, ways, trained, trained[1:], strict=False)
        ]


def costs_by_size(profile: ClusterProfile, request: PlanRequest, slices: Sequence[int] = ()) -> dict[int, Costs]:
    """Map each micro-batch size, smallest first, to its costs. ``slices``: slice sizes to try for offloaded stages."""
    sizes, memory = sorted(set(request.micro_batch_choices)), MemoryModel(profile, request)
    devices = in_own_order(profile, sizes[0] * request.sequence_length)
    rooms, links, members = memory.budgets(devices), links_of(profile, devices), [(i,) for i in range(len(devices))]
    seconds = {size: seconds_by_mode(profile.model, request, devices, size, slices) for size in sizes}
    return {size: Costs(memory, size, devices, rooms, *seconds[size], *links, members) for size in sizes}


def _room(by_count: Sequence[int], count: int) -> int:
    return by_count[count - 1] if count <= len(by_count) else 0
