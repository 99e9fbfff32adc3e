"""The costs of stages of pipelines: whether memory holds them, how long they take, no less than what; and steps of whole plans."""

from __future__ import annotations

import copy
import itertools
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence

import numpy as np

from hetero_mpi.planning.bounds import cycle_bound_s
from hetero_mpi.planning.durations import exposed_s
from hetero_mpi.planning.orders.warm_up import paced_each, period_s, scheduled_depths
from hetero_mpi.planning.search.cluster import ClusterArrays, Floats
from hetero_mpi.planning.search.pipelines import Fitting, Line, LineTimes, falling
from hetero_mpi.planning.tables import may_split, shared_memories, shares_nics
from hetero_mpi.planning.types.profile import ClusterProfile

ROUNDING = 1e-9


class Costs:
    """The costs of stages at one micro-batch size. Tables of plain lists: single figures are asked for, millions of them."""

    def __init__(self, cluster: ClusterArrays) -> None:
        self.cluster, self.count = cluster, len(cluster.devices)
        self.host: list[int] = cluster.host.tolist()
        self.splits = [may_split(cluster.profile, device.rank) for device in cluster.devices]
        self.forward, self.backward, self.repeated = (
            [[0.0, *itertools.accumulate(row)] for row in table.tolist()]
            for table in (cluster.forward_s, cluster.backward_s, cluster.repeated_s)
        )
        """[rank][layer]: seconds of all layers before."""
        self.overhead: list[tuple[float, float]] = cluster.overhead_s.tolist()
        self._usable, self._ratio = cluster.usable.tolist(), cluster.ratio.tolist()
        place = cluster.place
        self.latency: list[list[float]] = cluster.latency_s[place][:, place].tolist()
        self.per_byte: list[list[float]] = cluster.per_byte_s[place][:, place].tolist()
        self._message: list[float] = cluster.message_bytes.tolist()
        self.step_fixed: list[float] = cluster.step_fixed_s.tolist()
        self.step_per_parameter: list[float] = cluster.step_per_parameter_s.tolist()
        trainable = itertools.accumulate(float(layer.trainable_parameters) for layer in cluster.model.layers)
        self.trainable = [0.0, *trainable]
        self.deepest = self.unshared = self._deepest(1)
        """By whether forwards are repeated, [rank][first][layers - 1]: most micro-batches in flight; longer stages fit nowhere."""
        self._known: dict[tuple[tuple[int, ...], ...], LineTimes] = {}
        """By ranks, layers and whether forwards are repeated, of every stage."""
        self._paced: dict[tuple[tuple[int, ...], tuple[int, ...], int, float, bool], tuple[int, ...]] = {}
        """By ranks, layers, sequences, allowance and whether forwards are repeated for depth alone."""
        self._bytes: dict[tuple[float, bool], tuple[list[list[float]], ...]] = {}
        """By device and whether forwards are repeated, [first][layers - 1]: bytes whatever the depth, bytes of each micro-batch in
        flight; where others own the state."""

    def of(self, pipelines: float) -> Costs:
        """The same where so many pipelines share the state; infinite: where others own all of it."""
        deepest = self._deepest(pipelines) if self.cluster.model.trained_whole else self.deepest
        if deepest == self.deepest:
            return self
        other = copy.copy(self)
        other.deepest, other._paced = deepest, {}
        if pipelines == math.inf:
            tables = self.cluster.stages(float(self.cluster.usable.max()), pipelines).bytes
            other._bytes = {kind: tuple(table.tolist() for table in own) for kind, own in tables.items()}
        return other

    def _deepest(self, pipelines: float) -> dict[bool, list[list[list[int]]]]:
        choices = sorted(set(self.cluster.request.recompute_choices))
        return {again: self._rooms(again, pipelines) for again in choices}

    def _rooms(self, recompute: bool, pipelines: float) -> list[list[list[int]]]:
        cluster, known = self.cluster, dict[tuple[float, float], list[list[int]]]()
        stages = cluster.stages(float(cluster.usable.max()), pipelines)
        rooms = list(zip(cluster.usable.tolist(), cluster.ratio.tolist(), strict=True))
        for room in rooms:
            if room not in known:
                relief = max(0.0, float(cluster.usable.mean()) - room[0])
                deepest = stages.deepest(*room, recompute, relief)
                known[room] = np.clip(deepest, 0, cluster.request.global_batch).astype(int).tolist()
        return [known[room] for room in rooms]

    def room(self, again: bool, rank: int, first: int, count: int) -> int:
        """Most micro-batches in flight of a stage that repeats its forwards, or does not."""
        return _room(self.deepest[again][rank][first], count)

    def fitted(self, line: Line) -> Fitting | None:
        """``line``, no deeper than memory allows, forwards repeated where it asks for that; None: it does not fit."""
        flying, recompute, cuts = [], [], line.cuts
        most = line.micro_batches
        for place, rank in enumerate(line.ranks):
            most = min(most, line.flying[place])
            deepest, repeated = 0, False
            for again in self.deepest:
                depth = self.room(again, rank, cuts[place], line.counts[place])
                if depth > deepest:
                    deepest, repeated = depth, again
                if deepest >= most:
                    break
            most = min(most, deepest)
            if most < 1:
                return None
            flying.append(most)
            recompute.append(repeated)
        line = line._replace(flying=tuple(flying))
        times = self._times(line, recompute)
        bound_s = 0.0
        if not line.is_split:
            seconds = times.forward, times.backward, times.out, times.back
            bound_s = cycle_bound_s(*seconds, [depth - 1 for depth in flying], line.micro_batches)
        step_s = max(self.steps_s(line, math.inf))
        return Fitting(
            line, tuple(recompute), times, (bound_s + step_s) * (1 - ROUNDING), self._spare_bytes(line, recompute)
        )

    def _spare_bytes(self, line: Line, recompute: Sequence[bool]) -> float:
        """Bytes that its ranks have left for state, where others own all that they hold; infinite: that was not asked."""
        if not self._bytes:
            return math.inf
        spare = 0.0
        for rank, first, count, flying, again in zip(
            line.ranks, line.cuts, line.counts, line.flying, recompute, strict=False
        ):
            fixed, each = self._bytes[self._ratio[rank], again]
            spare += self._usable[rank] - fixed[first][count - 1] - each[first][count - 1] * flying
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
        schedule = self.cluster.request.schedule
        if schedule != "auto":
            depths = scheduled_depths(schedule, len(line.ranks), line.micro_batches)
            return line._replace(flying=tuple(min(depth + 1, line.micro_batches) for depth in depths))
        key = line.ranks, line.counts, line.sequences, allowance, repeat
        if key not in self._paced:
            self._paced[key] = self._depths(line, allowance, repeat)
        return line._replace(flying=self._paced[key])

    def _depths(self, line: Line, allowance: float, repeat: bool) -> tuple[int, ...]:
        times = self._times(line, [False] * len(line.ranks))
        compute = [f + b for f, b in zip(times.forward, times.backward, strict=True)]
        hops = [out + back for out, back in zip(times.out, times.back, strict=True)]
        warm_up = paced_each(compute, hops, period_s(compute, hops), allowance)
        flying = [min(line.micro_batches, depth + 1) for depth in warm_up]
        if repeat or len(self.deepest) < 2:
            return tuple(flying)
        for place, (rank, first) in enumerate(zip(line.ranks, line.cuts, strict=False)):
            plain = self.room(False, rank, first, line.counts[place])
            flying[place] = min(flying[place], plain) if plain >= len(line.ranks) - place else flying[place]
        return falling(flying)

    def hops_s(self) -> Floats:
        """[rank, rank] a message there and one back, behind the first layer."""
        away = np.array(self.latency) + self._message[0] * np.array(self.per_byte)
        return np.where(np.eye(self.count, dtype=bool), 0.0, away + away.T)

    def _times(self, line: Line, recompute: Sequence[bool]) -> LineTimes:
        key = line.ranks, line.counts, tuple(recompute)
        if key in self._known:
            return self._known[key]
        times, cuts, previous = LineTimes([], [], [], []), line.cuts, -1
        for place, rank in enumerate(line.ranks):
            first, last = cuts[place], cuts[place + 1]
            forward, backward, overhead = self.forward[rank], self.backward[rank], self.overhead[rank]
            again = self.repeated[rank][last] - self.repeated[rank][first] if recompute[place] else 0.0
            times.forward.append(forward[last] - forward[first] + overhead[0])
            times.backward.append(backward[last] - backward[first] + overhead[1] + again)
            if place:
                size = self._message[first - 1]
                times.out.append(self.latency[previous][rank] + size * self.per_byte[previous][rank])
                times.back.append(self.latency[rank][previous] + size * self.per_byte[rank][previous])
            previous = rank
        self._known[key] = times
        return times

    def whole_s(self, fitting: Fitting) -> list[float]:
        """When every layer's gradients are whole, where they are held."""
        line, begun, cuts, found = fitting.line, fitting.spans_s[0], fitting.line.cuts, list[float]()
        for place, rank in enumerate(line.ranks):
            first, last = cuts[place], cuts[place + 1]
            backward, repeated = self.backward[rank], self.repeated[rank]
            end_s = begun[place] + self.overhead[rank][1] + backward[last]
            if fitting.recompute[place]:
                end_s += repeated[last]
                found += [end_s - repeated[layer] - backward[layer] for layer in range(first, last)]
            else:
                found += [end_s - seconds for seconds in backward[first:last]]
        return found

    def steps_s(self, line: Line, pipelines: float) -> list[float]:
        """Every stage's optimizer, where as many pipelines own as much each; of a tied model, whose ends count their matrix
        otherwise, nothing."""
        if self.cluster.model.tied:
            return [0.0] * len(line.ranks)
        trained = [self.trainable[cut] for cut in line.cuts]
        return [
            self.step_fixed[rank] + self.step_per_parameter[rank] * (after - before) / pipelines
            for rank, before, after in zip(line.ranks, trained, trained[1:], strict=False)
        ]


def _room(by_count: Sequence[int], count: int) -> int:
    return by_count[count - 1] if count <= len(by_count) else 0


def is_plain(profile: ClusterProfile) -> bool:
    """Whether pipelines meet in nothing but sums of gradients: not in a NIC, a host's memory, or a tied matrix."""
    return not (profile.model.tied or shares_nics(profile) or shared_memories(profile))


class Clock:
    """Sums between the pipelines of a plan, remembered by who takes part in them."""

    def __init__(self, costs: Mapping[int, Costs], cluster: ClusterArrays) -> None:
        self.costs, self.cluster = costs, cluster
        self._is_summed = [size > 0 for size in cluster.summed_bytes.tolist()]
        self._known: dict[tuple[int, ...], tuple[list[float], list[float]]] = {}
        self._whole: dict[Line, list[float]] = {}

    def step_s(self, lines: Sequence[Fitting]) -> float:
        """Seconds of a step of these pipelines, which share no rank. See ``is_plain``."""
        ended, coming = max(max(line.spans_s[1]) for line in lines), dict[int, float]()
        if len(lines) > 1:
            ended = max(ended, self._summed_s(lines, coming))
        return ended + max(seconds for line in lines for seconds in self._steps_s(line, len(lines), coming))

    def _steps_s(self, fitting: Fitting, pipelines: int, coming: Mapping[int, float]) -> list[float]:
        line = fitting.line
        steps = self.costs[line.micro_batch].steps_s(line, pipelines)
        return [
            own_s + (exposed_s(coming_s, forward_s, layers) if (coming_s := coming.get(rank, 0.0)) else 0.0)
            for own_s, rank, forward_s, layers in zip(
                steps, line.ranks, fitting.times.forward, line.counts, strict=True
            )
        ]

    def _summed_s(self, lines: Sequence[Fitting], coming: dict[int, float]) -> float:
        """When the last gradient is summed: all ranks take part in the sums of their layers from the last one to the first, each as
        soon as the gradient is whole everywhere and all have done their earlier ones.

        ``coming``: is told how long new values of its layers take to every rank."""
        whole = list(map(max, *map(self._whole_s, lines)))
        free: dict[int, float] = {}
        cuts = [line.line.cuts for line in lines]
        for first, last in itertools.pairwise(sorted(set(itertools.chain(*cuts)))[::-1]):
            # Between two cuts of any pipelines the same ranks sum one layer after the other.
            ranks = tuple(line.line.ranks[bisect_left(own, first) - 1] for line, own in zip(lines, cuts, strict=True))
            (sums, values), now = self._exchanges_s(ranks), max(free.get(rank, 0.0) for rank in ranks)
            layers = [layer for layer in range(first - 1, last - 1, -1) if self._is_summed[layer]]
            for layer in layers:
                now = max(now, whole[layer]) + sums[layer]
            free.update(dict.fromkeys(ranks if layers else (), now))
            of_all_s = sum(values[last:first])
            for rank in ranks:
                coming[rank] = coming.get(rank, 0.0) + of_all_s
        return max(free.values(), default=0.0)

    def _whole_s(self, fitting: Fitting) -> list[float]:
        line = fitting.line
        if line not in self._whole:
            self._whole[line] = self.costs[line.micro_batch].whole_s(fitting)
        return self._whole[line]

    def _exchanges_s(self, ranks: tuple[int, ...]) -> tuple[list[float], list[float]]:
        """Seconds of every layer to sum its gradients, and to bring its new values."""
        if ranks not in self._known:
            sizes = self.cluster.summed_bytes, self.cluster.value_bytes
            sums, values = (self.cluster.exchange_s(ranks, size).tolist() for size in sizes)
            self._known[ranks] = sums, values
        return self._known[ranks]
