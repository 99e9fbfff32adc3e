"""Local search by step time: descent, and simulated annealing (Kirkpatrick, Gelatt & Vecchi, Science 220, 1983).

Annealing draws the tolerated slowdown first, so that a lower bound (``bounds``) rejects most changes without simulation. Effort
is limited in changes, not seconds, so plans are deterministic.
"""

from __future__ import annotations

import copy
import heapq
import itertools
import math
import random
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from hetero_mpi.planning.durations import exposed_s
from hetero_mpi.planning.memory import shared_memories
from hetero_mpi.planning.search.costs import Costs
from hetero_mpi.planning.search.moves import Moves, nearest, with_rank
from hetero_mpi.planning.search.pipelines import ROUNDING_RATIO, Fitting, Line, Lines, used
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.request import PlanRequest, shares_nics

DEPTH_ALLOWANCES = (0.0, 0.1, 0.5, 1.5)
"""Values of ``allowance`` to try in ``Costs.paced``."""
OWNED_STATE_ACTIONS_FACTOR = 12
"""Factor by which simulated actions cost more with sharded optimizer state."""

Step = Callable[[Sequence[Fitting]], float]
Start = tuple[Lines, float]
"""Pipelines and their step time, which is infinite if they do not fit or leave too many ranks idle."""


class Depths(NamedTuple):
    """Pipelines at several depths with estimated step times."""

    first: Start
    """The variant with the smallest estimate."""
    rest: Iterator[Start]
    """The other variants, smallest estimates first."""
    shallowest: Lines
    """The variant with the fewest micro-batches in flight."""


class LocalSearch:
    """Improves pipelines by local moves.

    Args:
        costs: costs by micro-batch size.
        step_s: returns the step time of pipelines that fit individually, infinite if they do not fit together.
        estimate_step_s: approximates ``step_s`` from tables alone.
        owned_step_s: returns the step time of pipelines that fit only if other ranks own part of their optimizer state.
        least_ranks: minimum number of ranks in use.
    """

    def __init__(
        self, costs: dict[int, Costs], step_s: Step, estimate_step_s: Step, owned_step_s: Step, least_ranks: int = 0
    ) -> None:
        self.costs, self.step_s, self.owned_step_s = costs, step_s, owned_step_s
        self.estimate_step_s, self.least = estimate_step_s, least_ranks
        first = next(iter(costs.values()))
        self.request, self.layer_count, self._splits = first.request, first.layer_count, first.splits
        self.count, self.fixed = first.count, self.request.schedule != "auto"
        self._levels: list[tuple[dict[int, Costs], dict[Line, Fitting | None]]] = [(costs, {})]
        """Memory checks to pass in order: with all state owned by other ranks, then with each rank's own share."""
        self._state_bytes = first.model.owned_bytes(0, self.layer_count)
        self._shared: dict[int, LocalSearch] = {1: self}

    def shared_by(self, pipelines: int) -> LocalSearch:
        """This search with optimizer state sharded over ``pipelines``."""
        if pipelines not in self._shared:
            shared_search = copy.copy(self)
            shared_search.costs, owning_none = (
                {size: costs_of_size.shared_by(sharers) for size, costs_of_size in self.costs.items()}
                for sharers in (pipelines, math.inf)
            )
            if shared_search.costs != self.costs:
                shared_search._levels = [(shared_search.costs, {})]
            if owning_none != self.costs:
                shared_search._levels = [(owning_none, {}), *shared_search._levels]
            self._shared[pipelines] = shared_search
        return self._shared[pipelines]

    def using_at_least(self, least_ranks: int) -> LocalSearch:
        """This search restricted to pipelines that use at least ``least_ranks`` ranks."""
        restricted = copy.copy(self)
        restricted.least = least_ranks
        return restricted

    def annealed(
        self,
        start: Start,
        heat: tuple[float, float],
        looks: int,
        actions: float,
        draw: random.Random,
        ranks: bool = True,
    ) -> Start:
        """Run simulated annealing from ``start``, which need not fit in memory.

        Args:
            heat: mean tolerated relative slowdown, initial and final.
            looks: number of changes to try.
            actions: maximum number of forwards and backwards to simulate.
            ranks: as for ``Moves``.
        """
        warm, cold = heat
        changes = Moves(self.costs, draw, ranks)
        now, now_s = best, best_s = start
        for look in range(looks):
            if actions <= 0:
                break
            allowed = warm * (cold / warm) ** (look / looks)
            limit_s = now_s * (1 + allowed * draw.expovariate(1.0))
            changed = changes.changed(now)
            if changed == now or used(changed) < min(self.least, used(now) + 1):
                continue
            fittings = self.fitted_within(limit_s, changed)
            if fittings is None:
                now = changed if now_s == math.inf else now
                continue
            if used(changed) < self.least:
                now = changed
                continue
            if self.least_s(fittings) > limit_s:
                continue
            spent = actions_of(changed)
            actions -= spent
            found_s = self.step_s(fittings)
            if found_s <= limit_s:
                now, now_s = tuple(fitting.line for fitting in fittings), found_s
                if now_s < best_s and not self.holds(fittings):
                    actions -= OWNED_STATE_ACTIONS_FACTOR * spent
                    found_s = self.owned_step_s(fittings)
                if found_s < best_s:
                    best, best_s = now, found_s
        return best, best_s

    def descended(self, start: Start, looks: int, actions: float) -> Start:
        """Descend from ``start`` to a local optimum; ``looks`` and ``actions`` are as for ``annealed``."""
        lines, step_s = start
        improved = used(lines) >= self.least
        while improved and looks > 0:
            improved = False
            for changed in itertools.islice(nearest(lines, not self.fixed), looks):
                looks -= 1
                fittings = self.fitted_within(step_s, changed) if actions > 0 else None
                if fittings is None or self.least_s(fittings) > step_s:
                    continue
                actions -= actions_of(changed)
                found_s = self.step_s(fittings)
                if found_s < step_s * (1 - ROUNDING_RATIO) and not self.holds(fittings):
                    actions -= OWNED_STATE_ACTIONS_FACTOR * actions_of(changed)
                    found_s = self.owned_step_s(fittings)
                if found_s < step_s * (1 - ROUNDING_RATIO):
                    lines, step_s, improved = tuple(fitting.line for fitting in fittings), found_s, True
                    break
        return lines, step_s

    def least_s(self, fittings: Sequence[Fitting]) -> float:
        """Lower bound of the step time, without link contention and with evenly sharded state."""
        splits = any(fitting.line.is_split for fitting in fittings)
        return 0.0 if splits else self.estimate_step_s(fittings) * (1 - ROUNDING_RATIO)

    def holds(self, fittings: Sequence[Fitting]) -> bool:
        """Whether every rank can hold all optimizer state of its stage."""
        return all(self.costs[fitting.line.micro_batch].holds(fitting) for fitting in fittings)

    def may_split(self, lines: Lines) -> bool:
        """Whether the search may choose a split backward for these pipelines."""
        if self.fixed or len(set(self.request.split_choices)) < 2 or len(lines) == used(lines):
            return False
        return all(self._splits[rank] for line in lines for rank in line.ranks)

    def timed_starts(
        self, lines_to_time: Iterable[Lines], max_timed: int, actions: float, results_wanted: int
    ) -> list[Start]:
        """Time pipelines at their best depths, with and without a split backward; return those that fit.

        Args:
            max_timed: maximum number of candidates to time, best estimates first.
            actions: maximum number of forwards and backwards to simulate, ignored until one candidate fits.
            results_wanted: stop once this many step times beat the next estimate.
        """
        candidates = []
        for lines in lines_to_time:
            lines = self.with_idle_ranks_used(lines) if used(lines) < self.least else lines
            splits = (False, True) if self.may_split(lines) else (always_split(self.request),)
            candidates += [
                self.with_promising_depths(tuple(line._replace(split=split) for line in lines)) for split in splits
            ]
        starts: list[Start] = []
        for depths in sorted(filter(None, candidates), key=lambda depths: depths.first[1])[:max_timed]:
            if sum(step_s <= depths.first[1] for _, step_s in starts) >= results_wanted:
                break
            if actions > 0 or not starts:
                start = self.fastest(depths)
                actions -= actions_of(start[0])
                starts += [start] if start[1] < math.inf else []
        return starts

    def with_idle_ranks_used(self, lines: Lines) -> Lines:
        """Add idle ranks with one layer each, placed where it costs least time, until ``least`` ranks are in use."""
        for rank in range(self.count):
            if used(lines) < self.least and not any(rank in line.ranks for line in lines):
                fitting = ((extended, self.fitted_within(math.inf, extended)) for extended in with_rank(lines, rank))
                priced = [(self.step_s(fittings), extended) for extended, fittings in fitting if fittings is not None]
                lines = min(priced, key=lambda priced_lines: priced_lines[0], default=(math.inf, lines))[1]
        return lines

    def price(self, lines: Lines) -> float:
        """Step time; infinite if out of memory or if too few ranks are in use."""
        fittings = self.fitted_within(math.inf, lines)
        if fittings is None or used(lines) < self.least:
            return math.inf
        return self.step_s(fittings) if self.holds(fittings) else self.owned_step_s(fittings)

    def with_promising_depths(self, lines: Lines) -> Depths | None:
        """``lines`` at several depths at which each pipeline fits; None if there are none."""
        variants: dict[Lines, list[Fitting]] = {}
        ways = itertools.product(DEPTH_ALLOWANCES[: 1 if self.fixed else None], (True, False))
        paced = (tuple(self.costs[line.micro_batch].paced(line, *way) for line in lines) for way in ways)
        for candidate in paced if self.fixed else (lines, *paced):
            fittings = self.fitted_within(math.inf, candidate)
            if fittings is not None and used(candidate) >= self.least:
                variants.setdefault(tuple(fitting.line for fitting in fittings), fittings)
        if not variants:
            return None
        by_estimate = self._by_estimate(list(variants.items()))
        return Depths(next(by_estimate), by_estimate, min(variants, key=lambda v: sum(sum(line.flying) for line in v)))

    def _by_estimate(self, variants: Sequence[tuple[Lines, list[Fitting]]]) -> Iterator[Start]:
        """Yield pipelines with their estimated step times, fastest first; lower bounds postpone estimates until needed."""
        bounds = [max(fitting.bound_s for fitting in fittings) for _, fittings in variants]
        waiting = [(bound_s, False, index) for index, bound_s in enumerate(bounds)]
        heapq.heapify(waiting)
        while waiting:
            seconds, is_estimated, index = waiting[0]
            if is_estimated:
                heapq.heappop(waiting)
                yield variants[index][0], seconds
            else:
                heapq.heapreplace(waiting, (self.estimate_step_s(variants[index][1]), True, index))

    def fastest(self, depths: Depths) -> Start:
        """The first start that fits, with its step time; infinite if none fits.

        If neither the first start nor the one with the fewest micro-batches in flight fits, none is assumed to fit.
        """
        lines = depths.first[0]
        if (step_s := self.price(lines)) < math.inf or self.price(depths.shallowest) == math.inf:
            return lines, step_s
        priced = ((lines, self.price(lines)) for lines, _ in depths.rest)
        return next(start for start in priced if start[1] < math.inf)

    def fitted_within(self, limit_s: float, lines: Lines) -> list[Fitting] | None:
        """Fit pipelines in memory, with room for all sharded state; None if out of memory or slower than ``limit_s``."""
        for costs, fitting_of_line in self._levels:
            fittings = []
            for line in lines:
                if line not in fitting_of_line:
                    fitting_of_line[line] = costs[line.micro_batch].fitted(line)
                fitting = fitting_of_line[line]
                if fitting is None or fitting.bound_s > limit_s:
                    return None
                if self.fixed and fitting.line != costs[line.micro_batch].scheduled(line):
                    return None
                fittings.append(fitting)
            if sum(fitting.spare_bytes for fitting in fittings) >= self._state_bytes:
                return fittings
        return None


def actions_of(lines: Lines) -> int:
    """Number of forwards and backwards in a step."""
    return sum(2 * len(line.ranks) * line.micro_batches for line in lines)


def always_split(request: PlanRequest) -> bool:
    """Whether every pipeline with several stages must split its backward."""
    return request.schedule == "split" or (request.schedule == "auto" and False not in request.split_choices)


def is_plain(profile: ClusterProfile) -> bool:
    """Whether pipelines interact only through all-reduces, with no shared NIC, host memory or tied matrix."""
    return not (profile.model.tied or shares_nics(profile) or shared_memories(profile))


class Clock:
    """Computes step times including gradient all-reduces, cached by ranks. ``costs`` is keyed by micro-batch size."""

    def __init__(self, costs: Mapping[int, Costs]) -> None:
        self.costs, self.first = costs, next(iter(costs.values()))
        self._is_summed = [size > 0 for size in self.first.summed_bytes.tolist()]
        self._known: dict[tuple[int, ...], tuple[list[float], list[float]]] = {}
        self._final_s: dict[Line, list[float]] = {}

    def step_s(self, lines: Sequence[Fitting]) -> float:
        """Step time, in seconds, of pipelines that interact only through all-reduces (``is_plain``)."""
        ended, coming = max(max(line.spans_s[1]) for line in lines), dict[int, float]()
        if len(lines) > 1 or self.first.base is not None:
            ended = max(ended, self._summed_s(lines, coming))
        return ended + max(seconds for line in lines for seconds in self._steps_s(line, len(lines), coming))

    def _steps_s(self, fitting: Fitting, pipelines: int, coming: Mapping[int, float]) -> list[float]:
        line = fitting.line
        steps = self.costs[line.micro_batch].steps_s(line, fitting.ways, pipelines)
        return [
            own_s + (exposed_s(coming_s, forward_s, layers) if (coming_s := coming.get(rank, 0.0)) else 0.0)
            for own_s, rank, forward_s, layers in zip(
                steps, line.ranks, fitting.times.forward, line.counts, strict=True
            )
        ]

    def _summed_s(self, lines: Sequence[Fitting], coming: dict[int, float]) -> float:
        """Time at which all gradients are reduced, last layer first; adds the seconds to receive values to ``coming``."""
        final_s = [max(times_s) for times_s in zip(*map(self._whole_s, lines), strict=True)]
        free: dict[int, float] = {}
        cuts = [line.line.cuts for line in lines]
        for first, last in itertools.pairwise(sorted(set(itertools.chain(*cuts)))[::-1]):
            # Between two consecutive cuts the same ranks reduce layer after layer.
            ranks = tuple(
                line.line.ranks[bisect_left(line_cuts, first) - 1] for line, line_cuts in zip(lines, cuts, strict=True)
            )
            (sums, values), now = self._exchanges_s(ranks), max(free.get(rank, 0.0) for rank in ranks)
            layers = [layer for layer in range(first - 1, last - 1, -1) if self._is_summed[layer]]
            for layer in layers:
                now = max(now, final_s[layer]) + sums[layer]
            free.update(dict.fromkeys(ranks if layers else (), now))
            of_all_s = sum(values[last:first])
            for rank in ranks:
                coming[rank] = coming.get(rank, 0.0) + of_all_s
        return max(free.values(), default=0.0)

    def _whole_s(self, fitting: Fitting) -> list[float]:
        line = fitting.line
        if line not in self._final_s:
            self._final_s[line] = self.costs[line.micro_batch].final_gradients_s(fitting)
        return self._final_s[line]

    def _exchanges_s(self, ranks: tuple[int, ...]) -> tuple[list[float], list[float]]:
        """Seconds per layer for the gradient all-reduce and for the broadcast of updated values."""
        if ranks not in self._known:
            sizes = self.first.summed_bytes, self.first.value_bytes
            sums, values = (self.first.exchange_s(ranks, size).tolist() for size in sizes)
            self._known[ranks] = sums, values
        return self._known[ranks]
