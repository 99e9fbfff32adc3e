"""Simulated annealing (Kirkpatrick, Gelatt & Vecchi, Science 220, 1983) of whole plans: the last word of every search.

The number of pipelines stays as it is while a plan is annealed, and what is found for a number does not depend on how many more are
allowed. First which ranks stand in which order is annealed by estimate alone (``Estimate``); what comes of that, and the plan it
began with, are then annealed by their step times, the better half of them longer.

How much longer a step may get is drawn before a change is looked at, so that one whose lower bound (``cycles``) is over that
is dropped without being simulated: most are. Looks are counted, not timed, and ranks are taken in an order that does not depend on
their numbers: the same plan for the same cluster, every time.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hetero_mpi.planning.annealing.changes import Changes, What
from hetero_mpi.planning.annealing.clock import Clock, is_plain
from hetero_mpi.planning.annealing.costs import ROUNDING, Costs
from hetero_mpi.planning.annealing.estimate import Estimate
from hetero_mpi.planning.annealing.lines import Fitting, Line, Lines, used
from hetero_mpi.planning.pacing import scheduled_depths
from hetero_mpi.planning.several.cluster import ClusterArrays, in_own_order
from hetero_mpi.planning.several.fitting import WORTHWHILE, Fitter
from hetero_mpi.planning.tables import shares_nics
from hetero_mpi.planning.types.plan import Plan
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.request import PlanRequest

FAR, NEAR = (0.02, 0.0005), (0.003, 0.0005)
"""The mean share by which a step may get longer, at the beginning and at the end of a round: far from a plan, and near the
best."""
LOOKS, EFFORT = 1000, 300_000
"""Changes looked at in a round, and simulated actions that it may spend on them: a fraction of a second."""
THOROUGH = 4
"""So many times as much of both for a thorough request."""
FEW = 5
"""Up to so many ranks, every number of pipelines is begun with."""
NICS = 12
"""How much longer the simulation of an action takes where messages queue for shared NICs."""
ORDERS, PER_PAIR = 3000, 30
"""Orders of ranks that are estimated: so many, or so many for each pair of ranks."""
SOONER, LEFT = 0.99, (1.0, 0.1)
"""The time to be reached next, as a share of the best; the mean number of layers by which more may be left over at the beginning
and at the end."""
KEPT = 5
"""Orders that are simulated, the last ones that were the best."""
DEPTHS, ALLOWANCES = (1.0, 1.4), (0.0, 0.1, 0.25, 0.5, 0.9, 1.5, 2.5)
"""Depths that are estimated with, and for which depths are guessed then."""
STARTS = 4
MANY, MOST_NUMBERS = 16, 3
"""Of more ranks than the first, only so many numbers of pipelines are searched, those of the fastest starts."""
MUCH_SLOWER, SLOWER, HOPELESS = 1.3, 1.06, 1.02
"""Of more than ``FEW`` ranks, a number of pipelines is left out whose start is so much slower than the best of fewer pipelines, or
is still by the second when its ranks have been put in order; of any, one that is by the third when it has been annealed."""

Step = Callable[[Sequence[Fitting]], float]
Start = tuple[Lines, float]
"""Pipelines and their step time; infinite: they do not fit, or leave out a rank that must not idle."""


@dataclass
class Budget:
    """What a round may spend."""

    looks: int
    actions: float

    def part(self, parts: int) -> Budget:
        return Budget(self.looks // parts, self.actions / parts)


class Rounds:
    """Rounds of annealing over the pipelines that ``costs`` describe. ``step_s``: of pipelines that fit by themselves; infinite:
    they do not fit together; ``quick_s``: nearly so. ``least``: so many ranks are in use, or more."""

    def __init__(self, costs: dict[int, Costs], step_s: Step, quick_s: Step, least: int = 0) -> None:
        self.costs, self.step_s, self.quick_s, self.least = costs, step_s, quick_s, least
        self.estimates = {size: Estimate(own) for size, own in costs.items()}
        cluster = next(iter(costs.values())).cluster
        self.fixed, self.layer_count = cluster.request.schedule != "auto", cluster.layer_count
        self._known: dict[Line, Fitting | None] = {}

    def round(
        self,
        lines: Lines,
        step_s: float,
        heat: tuple[float, float],
        draw: random.Random,
        budget: Budget,
        of: What = "all",
    ) -> Start:
        """``lines``, which take ``step_s`` (infinite: they do not fit), or better ones. ``heat``: see ``FAR``."""
        warm, cold = heat
        changes, left = Changes(self.costs, self.estimates, draw, of), budget.actions
        now, now_s, best, best_s = lines, step_s, lines, step_s
        for look in range(budget.looks):
            if left <= 0:
                break
            allowed = warm * (cold / warm) ** (look / budget.looks)
            limit_s = now_s * (1 + allowed * draw.expovariate(1.0))
            changed = changes.changed(now)
            if changed == now or used(changed) < min(self.least, used(now) + 1):
                continue
            fittings = self.within(limit_s, changed)
            if fittings is None:
                now = changed if now_s == math.inf else now
                continue
            if used(changed) < self.least:
                now = changed
                continue
            left -= sum(2 * len(line.ranks) * line.micro_batches for line in changed)
            found_s = self.step_s(fittings)
            if found_s <= limit_s:
                now, now_s = tuple(fitting.line for fitting in fittings), found_s
                if now_s < best_s:
                    best, best_s = now, now_s
        return best, best_s

    def ordered(self, lines: Lines, depth: float, draw: random.Random, looks: int) -> list[Lines]:
        """Pipelines of other ranks, or of these in other orders, that take less and less by estimate, cut for that; first as
        ``lines`` have them. Empty: these do not fit. ``depth``: see ``Estimate.placed``."""
        cut = self.cut(lines, depth)
        if cut is None:
            return []
        changes, (warm, cold) = Changes(self.costs, self.estimates, draw, "ranks"), LEFT
        every, target_s, now, known = [cut[1]], cut[0] * SOONER, lines, dict[Line, float]()
        left = self._left(now, target_s, depth, known)
        for look in range(looks):
            changed = changes.changed(now)
            if changed == now:
                continue
            allowed = left + warm * (cold / warm) ** (look / looks) * draw.expovariate(1.0)
            found = self._left(changed, target_s, depth, known)
            if found <= allowed:
                now, left = changed, found
                if left <= 0 and (cut := self.cut(now, depth)) is not None:
                    every.append(cut[1])
                    target_s = cut[0] * SOONER
                    known.clear()
                    left = self._left(now, target_s, depth, known)
        return every

    def price(self, lines: Lines) -> float:
        """Step time; infinite: they do not fit."""
        fittings = self.within(math.inf, lines)
        return math.inf if fittings is None or used(lines) < self.least else self.step_s(fittings)

    def deepened(self, lines: Lines) -> Start:
        """``lines`` with the best of several depths; ``quick_s`` of these."""
        best, best_s = lines, math.inf
        ways = itertools.product(ALLOWANCES[: 1 if self.fixed else None], (True, False))
        paced = (tuple(self.costs[line.micro_batch].paced(line, *way) for line in lines) for way in ways)
        for other in (lines, *paced):
            fittings = self.within(best_s, other)
            if fittings is not None and used(other) >= self.least:
                step_s = self.quick_s(fittings)
                if step_s < best_s:
                    best, best_s = tuple(fitting.line for fitting in fittings), step_s
        return best, best_s

    def cut(self, lines: Lines, depth: float) -> tuple[float, Lines] | None:
        """The least time by estimate, and the cuts for it."""
        found = []
        for line in lines:
            cut = self.estimates[line.micro_batch].cut(line, depth)
            if cut is None:
                return None
            found.append(cut)
        return max(step_s for step_s, _ in found), tuple(line for _, line in found)

    def _left(self, lines: Lines, step_s: float, depth: float, known: dict[Line, float]) -> float:
        """Layers that find no place by ``step_s``, of every pipeline ``known`` when it has been worked out."""
        total = 0.0
        for line in lines:
            if line not in known:
                known[line] = self.layer_count - self.estimates[line.micro_batch].placed(line, step_s, depth)[0]
            total += known[line]
        return total

    def fitted(self, line: Line) -> Fitting | None:
        if line not in self._known:
            self._known[line] = self.costs[line.micro_batch].fitted(line)
        return self._known[line]

    def within(self, limit_s: float, lines: Lines) -> list[Fitting] | None:
        """The pipelines as they fit; None: they do not, or one takes longer than ``limit_s``."""
        fittings = []
        for line in lines:
            fitting = self.fitted(line)
            if fitting is None or fitting.bound_s > limit_s:
                return None
            if self.fixed and fitting.line.flying != line.flying:
                return None
            fittings.append(fitting)
        return fittings


def always_split(request: PlanRequest) -> bool:
    """Is every backward in two parts, where a pipeline has more than one stage?"""
    return request.schedule == "split" or (request.schedule == "auto" and False not in request.split_choices)


class Annealer:
    """Anneals plans of one profile and request."""

    def __init__(self, profile: ClusterProfile, request: PlanRequest) -> None:
        self.profile, self.request = profile, request
        self.layer_count = len(profile.model.layers)
        self.fitter = Fitter(profile, request)
        sizes = sorted(set(request.micro_batch_choices))
        first = ClusterArrays(
            profile, request, sizes[0], None, in_own_order(profile, sizes[0] * request.sequence_length)
        )
        self.costs = {size: Costs(ClusterArrays(profile, request, size, first)) for size in sizes}
        self.ranks = [device.rank for device in first.devices]
        self.clock, self.is_plain = Clock(self.costs, first), is_plain(profile)
        most = self.layer_count * min(request.max_pipelines, request.global_batch)
        self.rounds = Rounds(
            self.costs, self._step_s, self.clock.step_s, 0 if request.allow_idle else min(len(self.ranks), most)
        )
        times = THOROUGH if request.thorough else 1
        self.budget = Budget(times * LOOKS, times * EFFORT / (NICS if shares_nics(profile) else 1))
        self.orders = times * min(ORDERS, PER_PAIR * len(self.ranks) ** 2)

    def best(self, starts: Sequence[tuple[Plan, float]]) -> tuple[Plan, float] | None:
        """The best start, which the others need not be, or better. Ranks leave the order that they stand in only for more than the
        request is indifferent to."""
        whole = (one for one in starts if used(self.lines(one[0])) >= self.rounds.least)
        begun = min(whole, key=lambda one: one[1], default=None)
        numbers: dict[int, list[Start]] = {}
        for plan, step_s in starts:
            lines = self.lines(plan)
            numbers.setdefault(len(lines), []).append((lines, step_s if used(lines) >= self.rounds.least else math.inf))
        if len(self.ranks) <= FEW:
            for lines, step_s in self._dealt(set(numbers)):
                numbers.setdefault(len(lines), []).append((lines, step_s))
        best: Start = (), math.inf
        begins = {number: min(step_s for _, step_s in own) for number, own in numbers.items()}
        if len(self.ranks) <= MANY:
            # Only fewer pipelines have a say in this: what is found for so many does not depend on how many more are allowed.
            order = sorted(numbers)
        else:
            order = sorted(numbers, key=lambda number: (begins[number], number))[:MOST_NUMBERS]
        for number in order:
            least_s = begins[number]
            if least_s == math.inf or least_s <= best[1] * MUCH_SLOWER or len(self.ranks) <= FEW:
                other = self._annealed(numbers[number], best[1])
                best = other if other[1] < best[1] * (1 - ROUNDING) else best
        found = self.fitter.fitted(self.plan(best[0])) if best[1] < math.inf else None
        if found is None:
            return begun
        step_s, least = self.fitter.step_s(found), max(WORTHWHILE, self.request.indifference)
        return begun if begun is not None and step_s >= begun[1] * (1 - least) else (found, step_s)

    def in_order(self, lines: Lines, limit_s: float) -> tuple[Plan, float] | None:
        """A plan of these ranks in this order, with other cuts and depths if need be, that takes no longer than ``limit_s``."""
        starts = [(lines, self.rounds.price(lines))]
        for depth in sorted(set(DEPTHS)):
            cut = self.rounds.cut(lines, depth)
            if cut is not None and used(cut[1]) == used(lines):
                deepened, _ = self.rounds.deepened(cut[1])
                starts.append((deepened, self.rounds.price(deepened)))
        best = min(starts, key=lambda one: one[1])
        if limit_s < best[1] < math.inf:
            best = self.rounds.round(*best, NEAR, random.Random(0), self.budget.part(4), "cuts")
        if best[1] > limit_s:
            return None
        plan = self.fitter.fitted(self.plan(best[0]))
        return None if plan is None else (plan, self.fitter.step_s(plan))

    def _annealed(self, starts: Sequence[Start], known_s: float) -> Start:
        """The best plan found of one number of pipelines."""
        lines, alive = min(starts, key=lambda one: one[1])[0], list(starts)
        found = [self.rounds.deepened(lines)]
        for place, depth in enumerate(DEPTHS):
            every = self.rounds.ordered(lines, depth, random.Random(place), self.orders)
            found += [self.rounds.deepened(other) for other in every[-KEPT:]]
        found.sort(key=lambda one: one[1])
        alive += [(lines, self.rounds.price(lines)) for lines, _ in found[:STARTS]]
        alive.sort(key=lambda one: one[1])
        alive, number = alive[:STARTS], 0
        if len(self.ranks) > FEW and known_s * SLOWER < alive[0][1] < math.inf:
            return alive[0]
        while True:
            for place, one in enumerate(alive):
                number += 1
                alive[place] = self.rounds.round(*one, FAR, random.Random(number), self.budget.part(2 * len(alive)))
            alive.sort(key=lambda one: one[1])
            if len(alive) == 1:
                break
            alive = alive[: (len(alive) + 1) // 2]
        if alive[0][1] > known_s * HOPELESS:
            return alive[0]
        return self.rounds.round(*alive[0], NEAR, random.Random(0), self.budget)

    def _dealt(self, known: set[int]) -> list[tuple[Lines, float]]:
        """Pipelines of like speed with even cuts, of every number that is not ``known``; most do not fit yet."""
        speed = self.costs[min(self.costs)].cluster.speed
        order = sorted(range(len(self.ranks)), key=lambda rank: (-float(speed[rank]), rank))
        size, batch = min(self.costs), self.request.global_batch
        found = []
        for number in range(1, min(self.request.max_pipelines, len(order), batch // size) + 1):
            if number in known:
                continue
            lines = []
            for index in range(number):
                ranks = tuple(order[index::number][: self.layer_count])
                cuts = [self.layer_count * k // len(ranks) for k in range(len(ranks) + 1)]
                sequences = size * (batch // size // number + (index < batch // size % number))
                count = min(sequences // size, 1 if self.request.schedule == "auto" else sequences)
                depths = scheduled_depths(self.request.schedule, len(ranks), count)
                flying = tuple(min(depth + 1, count) for depth in depths)
                counts = tuple(b - a for a, b in itertools.pairwise(cuts))
                lines.append(Line(ranks, counts, flying, size, sequences, always_split(self.request)))
            found.append((tuple(lines), math.inf))
        return found

    def lines(self, plan: Plan) -> Lines:
        number = {rank: index for index, rank in enumerate(self.ranks)}
        return tuple(
            Line(
                tuple(number[stage.ranks[0]] for stage in pipeline.stages),
                tuple(stage.last - stage.first for stage in pipeline.stages),
                tuple(min(stage.warm_up + 1, pipeline.micro_batches) for stage in pipeline.stages),
                pipeline.micro_batch,
                pipeline.sequences,
                pipeline.split_backward or always_split(self.request),
            )
            for pipeline in plan.pipelines
        )

    def plan(self, lines: Lines) -> Plan:
        """Recompute, and depth, as memory allows by the table of whole backwards."""
        return self._plan([fitting for line in lines if (fitting := self.rounds.fitted(line)) is not None])

    def _plan(self, fittings: Sequence[Fitting]) -> Plan:
        pipelines = tuple(fitting.pipeline(self.ranks) for fitting in fittings)
        return Plan(pipelines, self.request.global_batch, self.request.sequence_length, self.layer_count)

    def _step_s(self, fittings: Sequence[Fitting]) -> float:
        if self.is_plain and not any(fitting.line.is_split for fitting in fittings):
            return self.clock.step_s(fittings)
        plan = self.fitter.fitted(self._plan(fittings))
        return math.inf if plan is None else self.fitter.step_s(plan)
