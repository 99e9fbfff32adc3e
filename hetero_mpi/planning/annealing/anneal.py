"""Simulated annealing of a whole plan (Kirkpatrick, Gelatt & Vecchi, Science 220, 1983), where plans are too many to look at all
and ranks few enough that thousands of changes reach far.

How much longer a step may get is drawn before a change is looked at, so that one whose lower bound (``cycles``) is over that
is dropped without being simulated: most are. Looks are counted, not timed, and ranks are taken in an order that does not depend on
their numbers: the same plan for the same cluster, every time.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from hetero_mpi.planning.annealing.changes import Changes, Lines
from hetero_mpi.planning.annealing.clock import Clock, is_plain
from hetero_mpi.planning.annealing.lines import Costs, Fitting, Line
from hetero_mpi.planning.several.fleet import Fleet, in_own_order
from hetero_mpi.planning.several.polish import WORTHWHILE, Polisher
from hetero_mpi.planning.types.plan import Plan
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.request import PlanRequest

FAR, NEAR = (0.02, 0.0005), (0.003, 0.0005)
"""The mean share by which a step may get longer, at the beginning and at the end of a round: far from a plan, and near the
best."""
LOOKS, EFFORT = 1500, 500_000
"""Changes looked at in a round, and simulated actions that it may spend on them: a fraction of a second."""
THOROUGH_LOOKS, THOROUGH_EFFORT = 3000, 4_000_000
"""The same, of a thorough request."""


def annealed(
    plan: Plan,
    step_s: float,
    profile: ClusterProfile,
    request: PlanRequest,
    others: Sequence[tuple[Plan, float]] = (),
) -> tuple[Plan, float]:
    """``plan``, which fits and takes ``step_s``, or better. Ranks leave the order that they stand in only for more than the
    request is indifferent to. ``others``: plans to begin from as well, and their step times. None with a split backward or a
    short micro-batch is begun from. Unless the request is thorough, one round far and one near, and only where pipelines are timed
    without simulating them together."""
    if not (request.thorough or is_plain(profile)):
        return plan, step_s
    starts = [one for one in ((plan, step_s), *others) if _is_alike(one[0])]
    annealer = Annealer(profile, request)
    rounds = []
    for seed, start in enumerate(starts):
        far = annealer.round(*start, FAR, random.Random(seed))
        rounds.append(annealer.round(*far, NEAR, random.Random(seed)))
    if not rounds:
        return plan, step_s
    best = min(rounds, key=lambda one: one[1])
    if request.thorough:
        best = annealer.round(*best, NEAR, random.Random(len(rounds)))
    return annealer.chosen((plan, step_s), best)


def _is_alike(plan: Plan) -> bool:
    return not any(one.split_backward or one.sequences % one.micro_batch for one in plan.pipelines)


class Annealer:
    """What is known of an instance's stages and pipelines, and the rounds."""

    def __init__(self, profile: ClusterProfile, request: PlanRequest) -> None:
        self.request, self.left = request, 0
        self.items = len(profile.model.layers)
        self.polisher = Polisher(profile, request, 0)
        sizes = sorted(set(request.micro_batch_choices))
        first = Fleet(profile, request, sizes[0], None, in_own_order(profile, sizes[0] * request.sequence_length))
        self.costs = {size: Costs(Fleet(profile, request, size, first)) for size in sizes}
        self.ranks = [device.rank for device in first.devices]
        self.clock = Clock(self.costs, first) if is_plain(profile) else None
        self._known: dict[Line, Fitting | None] = {}

    def round(self, plan: Plan, step_s: float, heat: tuple[float, float], draw: random.Random) -> tuple[Plan, float]:
        """``plan``, which takes ``step_s``, or better. ``heat``: see ``FAR``."""
        warm, cold = heat
        looks, self.left = (THOROUGH_LOOKS, THOROUGH_EFFORT) if self.request.thorough else (LOOKS, EFFORT)
        changes = Changes(self.costs, draw)
        now, now_s = self._lines(plan), step_s
        best, best_s = None, step_s
        for look in range(looks):
            if self.left <= 0:
                break
            allowed = warm * (cold / warm) ** (look / looks)
            limit_s = now_s * (1 + allowed * draw.expovariate(1.0))
            lines = changes.changed(now)
            found = self._within(limit_s, lines) if lines != now else None
            if found is not None:
                now, now_s = tuple(fitting.line for fitting in found[0]), found[1]
                if now_s < best_s:
                    best, best_s = found
        checked = None if best is None else self.polisher.fitted(self._plan(best))
        return (plan, step_s) if checked is None else (checked, self.polisher.step_s(checked))

    def chosen(self, plan: tuple[Plan, float], other: tuple[Plan, float]) -> tuple[Plan, float]:
        """``other`` where it is enough of a gain."""
        least = max(WORTHWHILE, self.request.indifference)
        return other if other[1] < plan[1] * (1 - least) else plan

    def _lines(self, plan: Plan) -> Lines:
        number = {rank: index for index, rank in enumerate(self.ranks)}
        return tuple(
            Line(
                tuple(number[stage.ranks[0]] for stage in pipeline.stages),
                tuple(stage.last - stage.first for stage in pipeline.stages),
                tuple(min(stage.warm_up + 1, pipeline.micro_batches) for stage in pipeline.stages),
                pipeline.micro_batch,
                pipeline.sequences,
            )
            for pipeline in plan.pipelines
        )

    def _within(self, limit_s: float, lines: Lines) -> tuple[list[Fitting], float] | None:
        """The pipelines as they fit, and their step time; None: they do not, or take longer than ``limit_s``."""
        fittings = []
        for line in lines:
            if line not in self._known:
                self._known[line] = self.costs[line.micro_batch].fitted(line)
            fitting = self._known[line]
            if fitting is None or fitting.bound_s > limit_s:
                return None
            fittings.append(fitting)
        self.left -= sum(4 * len(line.ranks) * line.micro_batches for line in lines)
        step_s = self._step_s(fittings)
        return (fittings, step_s) if step_s <= limit_s else None

    def _step_s(self, fittings: Sequence[Fitting]) -> float:
        if self.clock is not None:
            return self.clock.step_s(fittings)
        plan = self.polisher.fitted(self._plan(fittings))
        return math.inf if plan is None else self.polisher.step_s(plan)

    def _plan(self, fittings: Sequence[Fitting]) -> Plan:
        pipelines = tuple(fitting.pipeline(self.ranks) for fitting in fittings)
        return Plan(pipelines, self.request.global_batch, self.request.sequence_length, self.items)
