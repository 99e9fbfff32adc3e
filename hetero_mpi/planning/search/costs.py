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
from hetero_mpi.planning.durations import repeated_s, summed_bytes, value_bytes
from hetero_mpi.planning.orders.warm_up import paced_each, period_s, scheduled_depths
from hetero_mpi.planning.search.pipelines import ROUNDING, Fitting, Line, LineTimes, falling
from hetero_mpi.planning.tables import (
    FEW,
    Floats,
    Indices,
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
    usable: Floats
    """Bytes."""
    relief: Floats
    """Bytes of the state that it would own which others have room for."""
    ratio: Floats
    splits: list[bool]
    forward_s: Floats
    """[rank, layer]"""
    backward_s: Floats
    repeated_s: Floats
    overhead_s: Floats
    """[rank, forward and backward]"""
    step_fixed_s: Floats
    step_per_parameter_s: Floats
    place: Indices
    latency_s: Floats
    """[place, place]"""
    per_byte_s: Floats
    members: Sequence[tuple[int, ...]] = ()
    """Where columns take the place of ranks (``columns.in_columns``): the ranks of ``base`` in each."""
    base: Costs | None = None
    tables: dict[tuple[int, float], Stages] = field(default_factory=dict)
    _bytes: dict[tuple[float, bool], tuple[list[list[float]], ...]] = field(default_factory=dict, init=False)
    """By device and whether forwards are repeated, [first][layers - 1]: bytes whatever the depth, bytes of each micro-batch in
    flight; where others own the state."""
    _times: dict[tuple[tuple[int, ...], ...], LineTimes] = field(default_factory=dict, init=False)
    """By ranks, layers and whether forwards are repeated, of every stage."""
    _paced: dict[tuple[Any, ...], tuple[int, ...]] = field(default_factory=dict, init=False)
    """By ranks, layers, sequences, allowance and whether forwards are repeated for depth alone."""

    @property
    def count(self) -> int:
        return len(self.usable)

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
        return np.asarray(self.micro_batch / (self.forward_s.sum(axis=1) + self.backward_s.sum(axis=1)))

    @property
    def unlinked(self) -> bool:
        """Whether messages take no time at all. Then it does not matter who is whose neighbour."""
        return not self.latency_s.any() and not self.per_byte_s.any()

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
        if hosts not in (1, count):  # around a ring from host to host (``comm.group_paths``)
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
        for recompute in set(self.request.recompute_choices):
            fixed, each = stage_bytes(self.model, self.tokens, recompute, pipelines)
            fits = np.argwhere(fixed + each <= most_bytes)
            longest = max([longest, *(fits[:, 1] - fits[:, 0]).tolist()])
        key = longest, pipelines
        if key not in self.tables:
            self.tables[key] = Stages(self.model, self.tokens, *key)
        return self.tables[key]

    @cached_property
    def deepest(self) -> dict[bool, list[list[list[int]]]]:
        """Forwards are repeated or not -> [rank][first][layers - 1]: most micro-batches in flight; longer stages fit nowhere."""
        return self.unshared

    @cached_property
    def unshared(self) -> dict[bool, list[list[list[int]]]]:
        return self._deepest(1)

    def of(self, pipelines: float) -> Costs:
        """The same where so many pipelines share the state; infinite: where others own all of it."""
        deepest = self._deepest(pipelines) if self.model.trained_whole else self.deepest
        if deepest == self.deepest:
            return self
        other = copy.copy(self)
        other.deepest, other._paced = deepest, {}
        if pipelines == math.inf:
            stages, ways = self.stages(pipelines), itertools.product(set(self.ratio.tolist()), deepest)
            other._bytes = {way: tuple(table.tolist() for table in stages.bytes(*way)) for way in ways}
        return other

    def _deepest(self, pipelines: float) -> dict[bool, list[list[list[int]]]]:
        choices = sorted(set(self.request.recompute_choices))
        return {again: self._depths_of(again, pipelines) for again in choices}

    def _depths_of(self, recompute: bool, pipelines: float) -> list[list[list[int]]]:
        stages, known = self.stages(pipelines), dict[tuple[float, ...], list[list[int]]]()
        rooms = list(zip(self.usable.tolist(), self.ratio.tolist(), self.relief.tolist(), strict=True))
        for usable, ratio, relief in set(rooms):
            deepest = stages.deepest(usable, ratio, recompute, relief)
            known[usable, ratio, relief] = np.clip(deepest, 0, self.request.global_batch).astype(int).tolist()
        return [known[room] for room in rooms]

    # Single figures

    def _summed(self, table: Floats) -> list[list[float]]:
        """[rank][layer]: seconds of all layers before."""
        return [[0.0, *itertools.accumulate(row)] for row in table.tolist()]

    @cached_property
    def forward(self) -> list[list[float]]:
        return self._summed(self.forward_s)

    @cached_property
    def backward(self) -> list[list[float]]:
        return self._summed(self.backward_s)

    @cached_property
    def repeated(self) -> list[list[float]]:
        return self._summed(self.repeated_s)

    @cached_property
    def trainable(self) -> list[float]:
        """[layer]: trained parameters of all layers before."""
        return [0.0, *itertools.accumulate(float(layer.trainable_parameters) for layer in self.model.layers)]

    @cached_property
    def _lists(self) -> tuple[Any, ...]:
        arrays = self.overhead_s, self.place, self.latency_s, self.per_byte_s, self.message_bytes
        return tuple(array.tolist() for array in arrays)

    @cached_property
    def _steps(self) -> tuple[list[float], list[float]]:
        return self.step_fixed_s.tolist(), self.step_per_parameter_s.tolist()

    @cached_property
    def _rooms(self) -> tuple[list[float], list[float]]:
        return self.usable.tolist(), self.ratio.tolist()

    def fitted(self, line: Line) -> Fitting | None:
        """``line``, no deeper than memory allows, forwards repeated where it asks for that; None: it does not fit."""
        flying, recompute, cuts = [], [], line.cuts
        most = line.micro_batches
        for place, rank in enumerate(line.ranks):
            most = min(most, line.flying[place])
            deepest, repeated = 0, False
            for again, tables in self.deepest.items():
                depth = _room(tables[rank][cuts[place]], line.counts[place])
                if depth > deepest:
                    deepest, repeated = depth, again
                if deepest >= most:
                    break
            most = min(most, deepest)
            if most < 1:
                return None
            flying.append(most)
            recompute.append(repeated)
        return self.timed(line._replace(flying=tuple(flying)), tuple(recompute))

    def timed(self, line: Line, recompute: tuple[bool, ...]) -> Fitting:
        """``line`` with its times, whatever memory says."""
        times, bound_s = self.times(line, recompute), 0.0
        if not line.is_split:
            bound_s = cycle_bound_s(*times, [depth - 1 for depth in line.flying], line.micro_batches)
        bound_s = (bound_s + max(self.steps_s(line, math.inf))) * (1 - ROUNDING)
        return Fitting(line, recompute, times, bound_s, self._spare_bytes(line, recompute))

    def _spare_bytes(self, line: Line, recompute: Sequence[bool]) -> float:
        """Bytes that its ranks have left for state, where others own all that they hold; infinite: that was not asked."""
        if not self._bytes:
            return math.inf
        spare, (usable, ratio) = 0.0, self._rooms
        stages = zip(line.ranks, line.cuts, line.counts, line.flying, recompute, strict=False)
        for rank, first, count, flying, again in stages:
            fixed, each = self._bytes[ratio[rank], again]
            spare += usable[rank] - fixed[first][count - 1] - each[first][count - 1] * flying
        return spare

    def holds(self, fitting: Fitting) -> bool:
        """Whether its ranks have memory for all the state of what they hold."""
        line = fitting.line
        stages = zip(fitting.recompute, line.ranks, line.cuts, line.counts, line.flying, strict=False)
        return self.deepest is self.unshared or all(
            _room(self.unshared[again][rank][first], count) >= flying for again, rank, first, count, flying in stages
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
        times = self.times(line, (False,) * len(line.ranks))
        compute = [f + b for f, b in zip(times.forward, times.backward, strict=True)]
        hops = [out + back for out, back in zip(times.out, times.back, strict=True)]
        warm_up = paced_each(compute, hops, period_s(compute, hops), allowance)
        flying = [min(line.micro_batches, depth + 1) for depth in warm_up]
        if repeat or len(self.deepest) < 2:
            return tuple(flying)
        for place, (rank, first) in enumerate(zip(line.ranks, line.cuts, strict=False)):
            plain = _room(self.deepest[False][rank][first], line.counts[place])
            flying[place] = min(flying[place], plain) if plain >= len(line.ranks) - place else flying[place]
        return falling(flying)

    def hops_s(self) -> Floats:
        """[rank, rank] a message there and one back, behind the first layer."""
        away = (self.latency_s + self.message_bytes[0] * self.per_byte_s)[self.place][:, self.place]
        return np.where(np.eye(self.count, dtype=bool), 0.0, away + away.T)

    def times(self, line: Line, recompute: tuple[bool, ...]) -> LineTimes:
        key = line.ranks, line.counts, recompute
        if key in self._times:
            return self._times[key]
        overheads, places, latency, per_byte, message = self._lists
        (forward_s, backward_s, out_s, back_s), cuts, previous = ([], [], [], []), line.cuts, -1
        for place, rank in enumerate(line.ranks):
            first, last = cuts[place], cuts[place + 1]
            forward, backward, overhead = self.forward[rank], self.backward[rank], overheads[rank]
            again = self.repeated[rank][last] - self.repeated[rank][first] if recompute[place] else 0.0
            forward_s.append(forward[last] - forward[first] + overhead[0])
            backward_s.append(backward[last] - backward[first] + overhead[1] + again)
            here = places[rank]
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
        overheads = self._lists[0]
        for place, rank in enumerate(line.ranks):
            first, last = cuts[place], cuts[place + 1]
            backward, repeated = self.backward[rank], self.repeated[rank]
            end_s = begun[place] + overheads[rank][1] + backward[last]
            if fitting.recompute[place]:
                end_s += repeated[last]
                found += [end_s - repeated[layer] - backward[layer] for layer in range(first, last)]
            else:
                found += [end_s - seconds for seconds in backward[first:last]]
        return found

    def steps_s(self, line: Line, pipelines: float) -> list[float]:
        """Every stage's optimizer, where as many pipelines own as much each; of a tied model, whose ends count their matrix
        otherwise, nothing."""
        if self.model.tied:
            return [0.0] * len(line.ranks)
        trained, (fixed, per_parameter) = [self.trainable[cut] for cut in line.cuts], self._steps
        return [
            fixed[rank] + per_parameter[rank] * (after - before) / pipelines
            for rank, before, after in zip(line.ranks, trained, trained[1:], strict=False)
        ]


def costs_by_size(profile: ClusterProfile, request: PlanRequest) -> dict[int, Costs]:
    """Micro-batch size -> costs, the smallest first; ranks in an order that does not depend on their numbers."""
    sizes = sorted(set(request.micro_batch_choices))
    devices = in_own_order(profile, sizes[0] * request.sequence_length)
    first = tabulated(profile, request, sizes[0], devices)
    return {size: first if size == sizes[0] else tabulated(profile, request, size, devices, first) for size in sizes}


def tabulated(
    profile: ClusterProfile,
    request: PlanRequest,
    micro_batch: int,
    devices: list[DeviceProfile],
    like: Costs | None = None,
) -> Costs:
    """``devices``: the usable ones, in the order in which they are to be counted. ``like``: costs of these at another micro-batch,
    whose links need not be looked up again."""
    kinds, tokens = list(dict.fromkeys(x.kind for x in profile.model.layers)), micro_batch * request.sequence_length
    place = np.array([kinds.index(layer.kind) for layer in profile.model.layers])
    kinds_s = [
        [
            (t.forward_s.at(tokens), t.backward_s.at(tokens), repeated_s(t, tokens))
            for t in (device.layers[kind] for kind in kinds)
        ]
        for device in devices
    ]
    forward_s, backward_s, repeats_s = np.array(kinds_s)[:, place].transpose(2, 0, 1).copy()
    repeats_s[:, [0, -1]] = 0.0
    names = list(dict.fromkeys(device.host for device in devices))
    host = np.array([names.index(device.host) for device in devices])
    usable = np.array([float(rank_usable_bytes(profile, one.rank, request.memory_reserve)) for one in devices])
    linked = _links(profile, devices, host) if like is None else (like.place, like.latency_s, like.per_byte_s)
    return Costs(
        profile,
        request,
        micro_batch,
        devices,
        host,
        usable,
        np.maximum(0.0, usable.mean() - usable),
        np.array([device.activation_ratio for device in devices]),
        [may_split(profile, device.rank) for device in devices],
        forward_s,
        backward_s,
        repeats_s,
        np.array([(one.forward_overhead_s, one.backward_overhead_s) for one in devices]),
        np.array([one.optimizer_fixed_s for one in devices]),
        np.array([one.optimizer_s_per_parameter for one in devices]),
        *linked,
    )


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
