"""The costs of stages on all usable ranks, at one micro-batch size: arrays for searches over hundreds of ranks, and plain lists of
them where single figures are asked for, millions of them.

Times are tabulated per rank and layer, links per pair of *places*: a rank is a place of its own in small clusters; in
large ones a host is, since millions of pairs of ranks say no more than tens of thousands of pairs of hosts.
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
from hetero_mpi.planning.device_times import host_optimizer_s, offload_s, repeated_s, weights_s
from hetero_mpi.planning.durations import summed_bytes, value_bytes
from hetero_mpi.planning.memory import usable_bytes
from hetero_mpi.planning.orders.warm_up import paced_each, period_s, scheduled_depths
from hetero_mpi.planning.search.pipelines import ROUNDING, Fitting, Line, LineTimes, falling
from hetero_mpi.planning.tables import (
    FEW,
    Floats,
    Indices,
    Room,
    StageMode,
    Stages,
    in_own_order,
    levels,
    may_split,
    rank_usable_bytes,
    stage_bytes,
)
from hetero_mpi.planning.types.cost import ModelCost
from hetero_mpi.planning.types.profile import ClusterProfile, DeviceProfile
from hetero_mpi.planning.types.request import PlanRequest

SHARING = 64
"""Up to so many ranks plans are laid out that fit only because pipelines share the state. Of more, nothing mends those that do not
fit when whole parameters are dealt."""


@dataclass(eq=False)
class Costs:
    """Ranks are counted as in ``devices``, which leaves out those without the model's dtype."""

    profile: ClusterProfile
    request: PlanRequest
    micro_batch: int
    devices: list[DeviceProfile]
    host: Indices
    rooms: list[Room]
    splits: list[bool]
    ways: list[StageMode]
    """To hold a stage, the quickest first."""
    forward_s: Floats
    """[way, rank, layer]"""
    backward_s: Floats
    """Where the way asks for it with the forward repeated."""
    overhead_s: Floats
    """[way, rank, forward and backward]"""
    step_fixed_s: Floats
    step_per_parameter_s: Floats
    """[way, rank]"""
    place: Indices
    latency_s: Floats
    """[place, place]"""
    per_byte_s: Floats
    members: Sequence[tuple[int, ...]] = ()
    """Where columns take the place of ranks (``columns.in_columns``): the ranks of ``base`` in each."""
    base: Costs | None = None
    tables: dict[tuple[int, float], Stages] = field(default_factory=dict)
    _bytes: dict[tuple[Any, ...], tuple[list[list[float]], ...]] = field(default_factory=dict, init=False)
    """By way and room, [first][layers - 1]: bytes whatever the depth, bytes of each micro-batch in flight; where others own the
    state."""
    _times: dict[tuple[Any, ...], LineTimes] = field(default_factory=dict, init=False)
    """By ranks, layers and ways, of every stage."""
    _paced: dict[tuple[Any, ...], tuple[int, ...]] = field(default_factory=dict, init=False)
    """By ranks, layers, sequences, allowance and whether other ways are taken for depth alone."""

    @property
    def count(self) -> int:
        return len(self.rooms)

    @cached_property
    def usable(self) -> Floats:
        """Bytes."""
        return np.array([room.usable for room in self.rooms])

    @property
    def model(self) -> ModelCost:
        return self.profile.model

    @property
    def layer_count(self) -> int:
        return len(self.profile.model.layers)

    @property
    def tokens(self) -> int:
        return self.micro_batch * self.request.sequence_length

    @cached_property
    def message_bytes(self) -> Floats:
        sent = [self.model.sent_bytes_per_token(layer) for layer in range(self.layer_count)]
        return np.array([float(each * self.tokens) for each in sent])

    @cached_property
    def summed_bytes(self) -> Floats:
        return np.array([float(summed_bytes(self.model, layer)) for layer in range(self.layer_count)])

    @cached_property
    def value_bytes(self) -> Floats:
        return np.array([float(value_bytes(self.model, layer)) for layer in range(self.layer_count)])

    @cached_property
    def speed(self) -> Floats:
        """Sequences per second of each rank, were it alone with a memory that holds everything."""
        return np.asarray(self.micro_batch / (self.forward_s[0].sum(axis=1) + self.backward_s[0].sum(axis=1)))

    @cached_property
    def outward_level(self) -> Floats:
        """The higher the faster: messages per second over each rank's best link to another host, alike for like ranks."""
        away = self.latency_s + self.message_bytes.max() * self.per_byte_s
        host_of = np.zeros(len(away), dtype=np.int64)
        host_of[self.place] = self.host
        away = np.where(host_of[:, None] == host_of[None, :], np.inf, away).min(axis=1)
        return levels(1 / np.maximum(np.where(np.isinf(away), 0.0, away)[self.place], 1e-9))

    def exchange_s(self, ranks: Sequence[int], size_bytes: Floats) -> Floats:
        """``durations.exchange_s`` for several sizes at once; of a column, between its members."""
        if self.base is not None:
            return self.base.exchange_s([rank for column in ranks for rank in self.members[column]], size_bytes)
        count = len(ranks)
        if count < 2:
            return np.zeros(len(size_bytes))
        sizes, which = np.unique(size_bytes, return_inverse=True)
        part = sizes / count
        places = self.place[np.array(ranks)]
        others = ~np.eye(count, dtype=bool)
        latency_s = self.latency_s[np.ix_(places, places)] * others
        per_byte_s = self.per_byte_s[np.ix_(places, places)] * others
        hosts = len(set(self.host[np.array(ranks)].tolist()))
        if hosts not in (1, count):  # around a ring from host to host (``comm.transport``)
            slowest = [float((latency_s + per_byte_s * size).max()) for size in part.tolist()]
            return np.where(sizes > 0, (count - 1) * np.array(slowest), 0.0)[which]
        busiest = np.maximum(
            (latency_s.sum(axis=1)[:, None] + per_byte_s.sum(axis=1)[:, None] * part).max(axis=0),
            (latency_s.sum(axis=0)[:, None] + per_byte_s.sum(axis=0)[:, None] * part).max(axis=0),
        )
        return np.where(sizes > 0, busiest, 0.0)[which]

    # Memory

    def sharing(self, pipelines: float) -> float:
        """How many of so many pipelines are taken to share the state."""
        return pipelines if self.model.trained_whole and len(self.devices) <= SHARING else 1

    def stages(self, pipelines: float) -> Stages:
        """Tables of all stages that fit on some rank, where so many pipelines share the state."""
        longest, pipelines, most_bytes = 1, self.sharing(pipelines), float(self.usable.max())
        for recompute in {way.recompute for way in self.ways}:
            fixed, each = stage_bytes(self.model, self.tokens, recompute, pipelines)
            fits = np.argwhere(fixed + each <= most_bytes)
            longest = max([longest, *(fits[:, 1] - fits[:, 0]).tolist()])
        key = self.layer_count if any(way.streamed for way in self.ways) else longest, pipelines
        if key not in self.tables:
            self.tables[key] = Stages(self.model, self.micro_batch, self.request.sequence_length, *key)
        return self.tables[key]

    @cached_property
    def deepest(self) -> dict[StageMode, list[list[list[int]]]]:
        """StageMode -> [rank][first][layers - 1]: most micro-batches in flight; longer stages fit nowhere."""
        return self.unshared

    @cached_property
    def unshared(self) -> dict[StageMode, list[list[list[int]]]]:
        return self._deepest(1)

    def of(self, pipelines: float) -> Costs:
        """The same where so many pipelines share the state; infinite: where others own all of it."""
        deepest = self._deepest(pipelines) if self.model.trained_whole else self.deepest
        if deepest == self.deepest:
            return self
        other = copy.copy(self)
        other.deepest, other._paced = deepest, {}
        if pipelines == math.inf:
            stages, kinds = self.stages(pipelines), {(room.ratio, room.in_host_memory) for room in self.rooms}
            keys = ((way, *kind) for way, kind in itertools.product(deepest, kinds))
            other._bytes = {key: tuple(table.tolist() for table in stages.bytes(*key)) for key in keys}
        return other

    def _deepest(self, pipelines: float) -> dict[StageMode, list[list[list[int]]]]:
        stages, most, found = self.stages(pipelines), self.request.global_batch, {}
        for way in self.ways:
            known = {room: np.clip(stages.deepest(way, room), 0, most).astype(int).tolist() for room in set(self.rooms)}
            found[way] = [known[room] for room in self.rooms]
        return found

    # Single figures

    def _summed(self, table: Floats) -> dict[StageMode, list[list[float]]]:
        """StageMode -> [rank][layer]: seconds of all layers before."""
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
        """[layer]: trained parameters of all layers before."""
        return [0.0, *itertools.accumulate(float(layer.trainable_parameters) for layer in self.model.layers)]

    @cached_property
    def overhead(self) -> dict[StageMode, list[tuple[float, float]]]:
        return dict(zip(self.ways, self.overhead_s.tolist(), strict=True))

    @cached_property
    def _lists(self) -> tuple[Any, ...]:
        return tuple(array.tolist() for array in (self.place, self.latency_s, self.per_byte_s, self.message_bytes))

    @cached_property
    def _steps(self) -> tuple[list[float], dict[StageMode, list[float]]]:
        each_s = dict(zip(self.ways, self.step_per_parameter_s.tolist(), strict=True))
        return self.step_fixed_s.tolist(), each_s

    def fitted(self, line: Line) -> Fitting | None:
        """``line``, no deeper than memory allows, held in the quickest way that is as deep; None: it does not fit."""
        flying, ways, cuts = [], [], line.cuts
        most = line.micro_batches
        for place, rank in enumerate(line.ranks):
            most = min(most, line.flying[place])
            deepest, held = 0, self.ways[0]
            for way, tables in self.deepest.items():
                depth = _room(tables[rank][cuts[place]], line.counts[place])
                if depth > deepest:
                    deepest, held = depth, way
                if deepest >= most:
                    break
            most = min(most, deepest)
            if most < 1:
                return None
            flying.append(most)
            ways.append(held)
        return self.timed(line._replace(flying=tuple(flying)), tuple(ways))

    def timed(self, line: Line, ways: tuple[StageMode, ...]) -> Fitting:
        """``line`` with its times, whatever memory says."""
        times, bound_s = self.times(line, ways), 0.0
        if not line.is_split:
            bound_s = cycle_bound_s(*times, [depth - 1 for depth in line.flying], line.micro_batches)
        bound_s = (bound_s + max(self.steps_s(line, ways, math.inf))) * (1 - ROUNDING)
        return Fitting(line, ways, times, bound_s, self._spare_bytes(line, ways))

    def _spare_bytes(self, line: Line, ways: Sequence[StageMode]) -> float:
        """Bytes that its ranks have left for state, where others own all that they hold; infinite: that was not asked."""
        if not self._bytes:
            return math.inf
        spare = 0.0
        for rank, first, count, flying, way in zip(line.ranks, line.cuts, line.counts, line.flying, ways, strict=False):
            room = self.rooms[rank]
            fixed, each = self._bytes[way, room.ratio, room.in_host_memory]
            spare += room.usable - fixed[first][count - 1] - each[first][count - 1] * flying
        return spare

    def holds(self, fitting: Fitting) -> bool:
        """Whether its ranks have memory for all the state of what they hold."""
        line = fitting.line
        stages = zip(fitting.ways, line.ranks, line.cuts, line.counts, line.flying, strict=False)
        return self.deepest is self.unshared or all(
            _room(self.unshared[way][rank][first], count) >= flying for way, rank, first, count, flying in stages
        )

    def paced(self, line: Line, allowance: float, repeat: bool) -> Line:
        """``line`` so deep that gradients are back in time at the pace of its slowest stage or link, ``allowance`` periods
        earlier than they have to be. ``repeat``: also where forwards are repeated for that depth alone. A schedule given by name
        leaves no choice."""
        schedule = self.request.schedule
        if schedule != "auto":
            depths = scheduled_depths(schedule, len(line.ranks), line.micro_batches)
            return line._replace(flying=tuple(min(depth + 1, line.micro_batches) for depth in depths))
        key = line.ranks, line.counts, line.sequences, allowance, repeat
        if key not in self._paced:
            self._paced[key] = self._depths(line, allowance, repeat)
        return line._replace(flying=self._paced[key])

    def _depths(self, line: Line, allowance: float, repeat: bool) -> tuple[int, ...]:
        held, most = list[StageMode](), list[int]()
        for rank, first, count in zip(line.ranks, line.cuts, line.counts, strict=False):
            rooms = ((way, _room(tables[rank][first], count)) for way, tables in self.deepest.items())
            way, depth = next((one for one in rooms if one[1] > 0), (self.ways[0], 0))
            held.append(way)
            most.append(depth)
        times = self.times(line, tuple(held))
        compute = [f + b for f, b in zip(times.forward, times.backward, strict=True)]
        hops = [out + back for out, back in zip(times.out, times.back, strict=True)]
        warm_up = paced_each(compute, hops, period_s(compute, hops), allowance)
        flying = [min(line.micro_batches, depth + 1) for depth in warm_up]
        if repeat or len(self.ways) < 2:
            return tuple(flying)
        for place, depth in enumerate(most):
            flying[place] = min(flying[place], depth) if depth >= len(most) - place else flying[place]
        return falling(flying)

    def hops_s(self) -> Floats:
        """[rank, rank] a message there and one back, behind the first layer."""
        away = (self.latency_s + self.message_bytes[0] * self.per_byte_s)[self.place][:, self.place]
        return np.where(np.eye(self.count, dtype=bool), 0.0, away + away.T)

    def times(self, line: Line, ways: tuple[StageMode, ...]) -> LineTimes:
        key = line.ranks, line.counts, ways
        if key in self._times:
            return self._times[key]
        places, latency, per_byte, message = self._lists
        (forward_s, backward_s, out_s, back_s), cuts, previous = ([], [], [], []), line.cuts, -1
        for place, (rank, way) in enumerate(zip(line.ranks, ways, strict=True)):
            first, last, here = cuts[place], cuts[place + 1], places[rank]
            forward, backward, overhead = self.forward[way][rank], self.backward[way][rank], self.overhead[way][rank]
            forward_s.append(forward[last] - forward[first] + overhead[0])
            backward_s.append(backward[last] - backward[first] + overhead[1])
            if place:
                size = message[first - 1]
                out_s.append(latency[previous][here] + size * per_byte[previous][here])
                back_s.append(latency[here][previous] + size * per_byte[here][previous])
            previous = here
        self._times[key] = LineTimes(tuple(forward_s), tuple(backward_s), tuple(out_s), tuple(back_s))
        return self._times[key]

    def whole_s(self, fitting: Fitting) -> list[float]:
        """When every layer's gradients are whole, where they are held."""
        line, begun, cuts, found = fitting.line, fitting.spans_s[0], fitting.line.cuts, list[float]()
        for place, (rank, way) in enumerate(zip(line.ranks, fitting.ways, strict=True)):
            backward, first, last = self.backward[way][rank], cuts[place], cuts[place + 1]
            end_s = begun[place] + self.overhead[way][rank][1] + backward[last]
            found += [end_s - seconds for seconds in backward[first:last]]
        return found

    def steps_s(self, line: Line, ways: Sequence[StageMode], pipelines: float) -> list[float]:
        """Every stage's optimizer, where as many pipelines own as much each; of a tied model, whose ends count their matrix
        otherwise, nothing."""
        if self.model.tied:
            return [0.0] * len(line.ranks)
        trained, (fixed, per_parameter) = [self.trainable[cut] for cut in line.cuts], self._steps
        return [
            fixed[rank] + per_parameter[way][rank] * (after - before) / pipelines
            for rank, way, before, after in zip(line.ranks, ways, trained, trained[1:], strict=False)
        ]


def _ways(request: PlanRequest, micro_batch: int, slices: Sequence[int]) -> list[StageMode]:
    """``slices``: sequences of a slice, where stages may be streamed: in any of these; resident ones in the smallest."""
    parts = [None, *sorted({size for size in slices if size < micro_batch})]
    resident = [StageMode(again, False, part) for part in parts[:2] for again in sorted(set(request.recompute_choices))]
    streamed = [part for part in parts if part is not None or micro_batch in slices]
    every = [-(-micro_batch // (part or micro_batch)) for part in streamed]
    return resident + [
        StageMode(False, True, part, n) for part, most in zip(streamed, every, strict=True) for n in (0, most)
    ]


def costs_by_size(profile: ClusterProfile, request: PlanRequest, slices: Sequence[int] = ()) -> dict[int, Costs]:
    """Micro-batch size -> costs, the smallest first; ranks in an order that does not depend on their numbers. ``slices``: sequences
    of a slice, in any of which stages may be streamed."""
    sizes = sorted(set(request.micro_batch_choices))
    devices, found = in_own_order(profile, sizes[0] * request.sequence_length), dict[int, Costs]()
    for size in sizes:
        found[size] = tabulated(profile, request, size, devices, slices, found.get(sizes[0]))
    return found


def tabulated(
    profile: ClusterProfile,
    request: PlanRequest,
    micro_batch: int,
    devices: list[DeviceProfile],
    slices: Sequence[int] = (),
    like: Costs | None = None,
) -> Costs:
    """``devices``: the usable ones, in the order in which they are to be counted. ``like``: costs of these at another micro-batch,
    whose links need not be looked up again."""
    names = list(dict.fromkeys(device.host for device in devices))
    host = np.array([names.index(device.host) for device in devices])
    linked = _links(profile, devices, host) if like is None else (like.place, like.latency_s, like.per_byte_s)
    ways = _ways(request, micro_batch, slices)
    seconds = [_way_s(profile.model, devices, way, micro_batch, request.sequence_length) for way in ways]
    forward_s, backward_s, overhead_s, step_s = map(np.array, zip(*seconds, strict=True))
    quickest = np.argsort((forward_s + backward_s).sum(axis=(1, 2)) + overhead_s.sum(axis=(1, 2)), kind="stable")
    return Costs(
        profile,
        request,
        micro_batch,
        devices,
        host,
        _rooms(profile, request, devices) if like is None else like.rooms,
        [may_split(profile, device.rank) for device in devices],
        [ways[place] for place in quickest.tolist()],
        forward_s[quickest],
        backward_s[quickest],
        overhead_s[quickest],
        np.array([one.optimizer_fixed_s for one in devices]),
        step_s[quickest],
        *linked,
    )


def _rooms(profile: ClusterProfile, request: PlanRequest, devices: list[DeviceProfile]) -> list[Room]:
    usable = [float(rank_usable_bytes(profile, one.rank, request.memory_reserve)) for one in devices]
    mean, rooms = sum(usable) / len(usable), []
    limited = profile.model.trained_whole or request.without_files
    for own, device in zip(usable, devices, strict=True):
        host = profile.host(device.rank)
        here = sum(one.host == device.host and not one.shares_host_memory for one in profile.devices)
        of_host = math.inf
        if host is not None and limited:
            of_host = usable_bytes(host.memory_bytes, request.memory_reserve) / max(1, here)
        room = Room(own, device.activation_ratio, max(0.0, mean - own), device.shares_host_memory, of_host)
        rooms.append(room)
    return rooms


def _way_s(
    model: ModelCost, devices: list[DeviceProfile], way: StageMode, micro_batch: int, sequence_length: int
) -> tuple[list[list[float]], list[list[float]], list[tuple[float, float]], list[float]]:
    """Seconds of a micro-batch: [rank][layer] of forward and backward, [rank] of what comes on top; of a trained parameter's step.

    A streamed layer is called by itself, repeats its forward of slices that are not kept, and takes no less than its copies do."""
    part, ends = way.slice_sequences or micro_batch, len(model.layers) - 1
    parts = [min(part, micro_batch - begin) * sequence_length for begin in range(0, micro_batch, part)]
    kinds = {layer.kind: index for index, layer in enumerate(model.layers)}
    forward_s, backward_s, overhead_s, step_s = [], [], [], []
    for device in devices:
        each_s, again = device.forward_overhead_s, parts[way.kept_slices :]
        calls_s = len(parts) * each_s, len(parts) * device.backward_overhead_s
        seconds = dict[str, tuple[float, float]]()
        for kind, index in kinds.items():
            times = device.layers[kind]
            there_s, back_s = (sum(map(of, parts)) for of in (times.forward_s.at, times.backward_s.at))
            again_s = sum(repeated_s(times, tokens) for tokens in again)
            if way.streamed:
                least_s = _copies_s(device, model, index)
                there_s, back_s = there_s + calls_s[0], back_s + again_s + calls_s[1] + len(again) * each_s
                seconds[kind] = max(least_s[0], there_s), max(least_s[1], back_s)
            else:
                seconds[kind] = there_s, back_s + again_s * (way.recompute and 0 < index < ends)
        forward_s.append([seconds[layer.kind][0] for layer in model.layers])
        backward_s.append([seconds[layer.kind][1] for layer in model.layers])
        overhead_s.append((0.0, 0.0) if way.streamed else calls_s)
        kept = way.streamed and model.trained_whole and not device.shares_host_memory
        step_s.append(host_optimizer_s(device) if kept else device.optimizer_s_per_parameter)
    return forward_s, backward_s, overhead_s, step_s


def _copies_s(device: DeviceProfile, model: ModelCost, layer: int) -> tuple[float, float]:
    """Seconds of copies that a streamed layer's forward and its backward cannot be faster than."""
    weight_s, coming = weights_s(device, model.streamed_bytes(layer)), model.trained_whole * model.gradient_bytes(layer)
    return weight_s, max(weight_s, offload_s(device, model, layer) + weights_s(device, coming))


def _links(profile: ClusterProfile, devices: list[DeviceProfile], host: Indices) -> tuple[Indices, Floats, Floats]:
    """(place of every rank; latency, seconds per byte of the way from place to place, copies at both ends included)."""
    place = np.arange(len(devices)) if len(devices) <= FEW else host
    members: list[list[int]] = [[] for _ in range(int(place.max()) + 1)]
    for index, of in enumerate(place.tolist()):
        members[of].append(devices[index].rank)
    latency_s, per_byte_s = np.zeros((len(members), len(members))), np.zeros((len(members), len(members)))
    for a, b in itertools.product(range(len(members)), repeat=2):
        if a == b and len(members[a]) < 2:
            continue
        source, destination = members[a][0], members[b][1 if a == b else 0]
        link, out, into = profile.link(source, destination), profile.devices[source], profile.devices[destination]
        latency_s[a, b] = out.copy_latency_s + link.latency_s + into.copy_latency_s
        per_byte_s[a, b] = (
            1 / out.device_to_host_bytes_per_s + 1 / link.bytes_per_s + 1 / into.host_to_device_bytes_per_s
        )
    return place, latency_s, per_byte_s


def _room(by_count: Sequence[int], count: int) -> int:
    return by_count[count - 1] if count <= len(by_count) else 0
