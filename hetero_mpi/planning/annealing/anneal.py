"""Simulated annealing (Kirkpatrick, Gelatt & Vecchi, Science 220, 1983) of whole plans: the last word of every search.

How much longer a step may get is drawn before a change is looked at, so that one whose lower bound (``cycles``) is over that
is dropped without being simulated: most are. Looks are counted, not timed, and ranks are taken in an order that does not depend on
their numbers: the same plan for the same cluster, every time.

The number of pipelines stays as it is while a plan is annealed; every number has looks of its own, and the better half of them
goes on with more.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hetero_mpi.planning.annealing.changes import Changes, Lines
from hetero_mpi.planning.annealing.clock import Clock, is_plain
from hetero_mpi.planning.annealing.lines import Costs, Fitting, Line
from hetero_mpi.planning.pacing import scheduled_depths
from hetero_mpi.planning.several.fitting import WORTHWHILE, Fitter
from hetero_mpi.planning.several.fleet import Fleet, in_own_order
from hetero_mpi.planning.tables import shares_cards
from hetero_mpi.planning.types.plan import Plan
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.request import PlanRequest

FAR, NEAR = (0.02, 0.0005), (0.003, 0.0005)
"""The mean share by which a step may get longer, at the beginning and at the end of a round: far from a plan, and near the
best."""
LOOKS, EFFORT = 1500, 500_000
"""Changes looked at in a round, and simulated actions that it may spend on them: a fraction of a second."""
THOROUGH = 4
"""So many times as much of both for a thorough request."""
FEW = 5
"""Up to so many ranks, every number of pipelines is begun with."""
CARDS = 12
"""How much longer the simulation of an action takes where messages queue for shared cards."""

Step = Callable[[Sequence[Fitting]], float]


@dataclass
class Budget:
    """What a round may spend."""

    looks: int
    actions: float


class Rounds:
    """Rounds of annealing over the pipelines that ``costs`` describe. ``step_s``: of pipelines that fit by themselves; infinite:
    they do not fit together. ``least``: so many ranks are in use, or more."""

    def __init__(self, costs: dict[int, Costs], step_s: Step, least: int = 0) -> None:
        self.costs, self.step_s, self.least = costs, step_s, least
        self.fixed = next(iter(costs.values())).fleet.request.schedule != "auto"
        self._known: dict[Line, Fitting | None] = {}

    def round(
        self, lines: Lines, step_s: float, heat: tuple[float, float], draw: random.Random, budget: Budget
    ) -> tuple[Lines, float]:
        """``lines``, which take ``step_s`` (infinite: they do not fit), or better ones. ``heat``: see ``FAR``."""
        warm, cold = heat
        changes, left = Changes(self.costs, draw), budget.actions
        now, now_s, best, best_s = lines, step_s, lines, step_s
        for look in range(budget.looks):
            if left <= 0:
                break
            allowed = warm * (cold / warm) ** (look / budget.looks)
            limit_s = now_s * (1 + allowed * draw.expovariate(1.0))
            changed = changes.changed(now)
            if changed == now or _used(changed) < min(self.least, _used(now) + 1):
                continue
            fittings = self._within(limit_s, changed)
            if fittings is None:
                now = changed if now_s == math.inf else now
                continue
            if _used(changed) < self.least:
                now = changed
                continue
            left -= sum(2 * len(line.ranks) * line.micro_batches for line in changed)
            found_s = self.step_s(fittings)
            if found_s <= limit_s:
                now, now_s = tuple(fitting.line for fitting in fittings), found_s
                if now_s < best_s:
                    best, best_s = now, now_s
        return best, best_s

    def fitted(self, line: Line) -> Fitting | None:
        if line not in self._known:
            self._known[line] = self.costs[line.micro_batch].fitted(line)
        return self._known[line]

    def _within(self, limit_s: float, lines: Lines) -> list[Fitting] | None:
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


def _used(lines: Lines) -> int:
    return sum(len(line.ranks) for line in lines)


class Annealer:
    """Anneals plans of one profile and request."""

    def __init__(self, profile: ClusterProfile, request: PlanRequest) -> None:
        self.profile, self.request = profile, request
        self.items = len(profile.model.layers)
        self.fitter = Fitter(profile, request)
        sizes = sorted(set(request.micro_batch_choices))
        first = Fleet(profile, request, sizes[0], None, in_own_order(profile, sizes[0] * request.sequence_length))
        self.costs = {size: Costs(Fleet(profile, request, size, first)) for size in sizes}
        self.ranks = [device.rank for device in first.devices]
        self.clock = Clock(self.costs, first) if is_plain(profile) else None
        most = self.items * min(request.max_pipelines, request.global_batch)
        self.rounds = Rounds(self.costs, self._step_s, 0 if request.allow_idle else min(len(self.ranks), most))

    def best(self, starts: Sequence[tuple[Plan, float]]) -> tuple[Plan, float] | None:
        """The best start, which the others need not be, or better: each start with looks of its own, then the better half of
        them, and so on; near the best at last. Ranks leave the order that they stand in only for more than the request is
        indifferent to."""
        begun = min(starts, key=lambda one: one[1], default=None)
        short = begun is not None and _used(self.lines(begun[0])) < self.rounds.least
        times = THOROUGH if self.request.thorough else 1
        actions = times * EFFORT / (CARDS if shares_cards(self.profile) else 1)
        alive = [(self.lines(plan), step_s) for plan, step_s in starts]
        alive = [(lines, step_s if _used(lines) >= self.rounds.least else math.inf) for lines, step_s in alive]
        if len(self.ranks) <= FEW:
            alive += self._dealt({len(lines) for lines, _ in alive})
        if not alive:
            return None
        number = 0
        while True:
            budget = Budget(times * LOOKS // len(alive), actions / len(alive))
            for index, one in enumerate(alive):
                number += 1
                alive[index] = self.rounds.round(*one, FAR, random.Random(number), budget)
            alive.sort(key=lambda one: one[1])
            if len(alive) == 1:
                break
            alive = alive[: (len(alive) + 1) // 2]
        lines, step_s = self.rounds.round(*alive[0], NEAR, random.Random(0), Budget(times * LOOKS, actions))
        plan = self.fitter.fitted(self.plan(lines)) if step_s < math.inf else None
        least = max(WORTHWHILE, self.request.indifference)
        if plan is None:
            return begun
        step_s = self.fitter.step_s(plan)
        return begun if begun is not None and not short and step_s >= begun[1] * (1 - least) else (plan, step_s)

    def _dealt(self, known: set[int]) -> list[tuple[Lines, float]]:
        """Pipelines of like speed with even cuts, of every number that is not ``known``; most do not fit yet."""
        speed = self.costs[min(self.costs)].fleet.speed
        order = sorted(range(len(self.ranks)), key=lambda rank: (-float(speed[rank]), rank))
        size, batch = min(self.costs), self.request.global_batch
        found = []
        for number in range(1, min(self.request.max_pipelines, len(order), batch // size) + 1):
            if number in known:
                continue
            lines = []
            for index in range(number):
                ranks = tuple(order[index::number][: self.items])
                cuts = [self.items * k // len(ranks) for k in range(len(ranks) + 1)]
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
        return Plan(pipelines, self.request.global_batch, self.request.sequence_length, self.items)

    def _step_s(self, fittings: Sequence[Fitting]) -> float:
        if self.clock is not None and not any(fitting.line.is_split for fitting in fittings):
            return self.clock.step_s(fittings)
        plan = self.fitter.fitted(self._plan(fittings))
        return math.inf if plan is None else self.fitter.step_s(plan)
