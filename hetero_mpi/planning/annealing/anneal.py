"""Simulated annealing (Kirkpatrick, Gelatt & Vecchi, Science 220, 1983) of whole plans: the last word of every search.

The number of pipelines stays as it is while a plan is annealed, and what is found for a number does not depend on how many more are
allowed. First which ranks stand in which order is annealed by estimate alone (``Estimate``); what comes of that, and the plan it
began with, are then annealed by their step times, the better half of them longer.

Ranks are taken in an order that does not depend on their numbers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import NamedTuple

from hetero_mpi.planning.annealing.clock import Clock, is_plain
from hetero_mpi.planning.annealing.costs import ROUNDING, Costs
from hetero_mpi.planning.annealing.lines import Fitting, Line, Lines, used
from hetero_mpi.planning.annealing.partitions import best_partitions
from hetero_mpi.planning.annealing.rounds import Budget, Rounds, Start, always_split
from hetero_mpi.planning.several.cluster import ClusterArrays, in_own_order
from hetero_mpi.planning.several.fitting import Fitter
from hetero_mpi.planning.several.layouts import polishes
from hetero_mpi.planning.tables import shares_nics
from hetero_mpi.planning.types.plan import Plan
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.request import PlanRequest

FAR, NEAR = (0.02, 0.0005), (0.003, 0.0005)
"""The mean share by which a step may get longer, at the beginning and at the end of a round: far from a plan, and near the
best."""
LOOKS, LOOKS_OF_MORE, MORE, EFFORT = 1000, 500, 8, 300_000
"""Changes looked at in a round, up to so many ranks and of more; simulated actions that it may spend on them: a fraction of a
second."""
THOROUGH = 4
"""So many times as much of both for a thorough request."""
NICS, NICS_OF_MORE = 6, 12
"""By what effort is divided where messages queue for shared NICs, since an action's simulation takes about 12 times as long; of up
to ``MORE`` ranks, and of more."""
ORDERS, PER_PAIR = 2000, 30
"""Orders of ranks that are estimated: so many, or so many for each pair of ranks."""
KEPT = 5
"""Orders that are simulated, the last ones that were the best."""
DEPTHS = 1.0, 1.4
"""Depths that orders are estimated with."""
STARTS = 4
FEW, STARTS_OF_FEW, DOWNHILL = 4, 12, 100
"""Up to so many ranks all ways of putting them into pipelines are begun with; so many of them, after so many looks downhill, are
annealed."""
MANY, MOST_NUMBERS, LONGER = 16, 3, 2
"""Of more ranks only so many numbers of pipelines are searched, those of the fastest starts; and so many times as long where
``polishes`` leaves starts of fewer numbers."""
NUMBERS_IN_BRIEF = 2
"""The same where the request is to be answered briefly."""
MUCH_SLOWER, SLOWER, HOPELESS = 2.0, 1.04, 1.02
"""A number of pipelines is left out whose start is so much slower than the best of fewer pipelines, or, of more than ``FEW`` ranks,
is still by the second when its ranks have been put in order, or by the third when it has been annealed."""


class Annealed(NamedTuple):
    """The best plan that annealing found or began with, and seconds of others: infinite: none was found to fit; None: not asked."""

    plan: Plan
    step_s: float
    one_pipeline_s: float | None
    """The best plan of one pipeline."""
    at_work_s: float | None
    """The best plan in which no rank idles that can be given something."""


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
        self.every = min(len(self.ranks), most)
        """So many ranks are at work where none may idle."""
        self.numbers = NUMBERS_IN_BRIEF if request.brief else MOST_NUMBERS if len(self.ranks) > MANY else None
        """So many numbers of pipelines are searched, those of the fastest starts; None: all."""
        least = 0 if request.allow_idle or self.numbers is None else self.every
        self.rounds = Rounds(self.costs, self._step_s, self.clock.step_s, self._owned_s, least)
        times = (THOROUGH if request.thorough else 1) * (LONGER if polishes(profile, len(self.ranks)) else 1)
        looks, less = (LOOKS, NICS) if len(self.ranks) <= MORE else (LOOKS_OF_MORE, NICS_OF_MORE)
        self.budget = Budget(times * looks, times * EFFORT / (less if shares_nics(profile) else 1))
        self._known: dict[Lines, float] = {}
        self.orders = times * min(ORDERS, PER_PAIR * len(self.ranks) ** 2)

    def best(self, starts: Sequence[tuple[Plan, float]]) -> Annealed | None:
        """The best start, which the others need not be, or better. Ranks leave the order that they stand in only for more than the
        request is indifferent to."""
        timed = [(self.lines(plan), step_s) for plan, step_s in starts]
        least = 0 if self.request.allow_idle else self.every
        begun = min((one for one in starts if used(self.lines(one[0])) >= least), key=lambda one: one[1], default=None)
        numbers: dict[int, list[Start]] = {}
        for lines, step_s in timed:
            step_s = step_s if used(lines) >= self.rounds.least else math.inf
            numbers.setdefault(len(lines), []).append((lines, step_s))
        few, most = len(self.ranks) <= FEW, len(self.ranks) if len(self.ranks) <= MANY else 0
        for number in range(1, min(self.request.max_pipelines, self.request.global_batch, most) + 1):
            partitions = (
                list(best_partitions(self.rounds.of(number), number, few)) if few or number not in numbers else []
            )
            if partitions:
                numbers.setdefault(number, []).extend(partitions)
        best, *others = self._of_all(numbers)
        found = self.fitter.fitted(self.plan(best[0])) if best[1] < math.inf else None
        chosen = begun
        if found is not None:
            found = self.fitter.repeating(found)
            step_s, gain = self.fitter.step_s(found), max(ROUNDING, self.request.indifference)
            if begun is None or step_s < begun[1] * (1 - gain):
                chosen = found, step_s
        return None if chosen is None else Annealed(*chosen, *others)

    def _of_all(self, numbers: dict[int, list[Start]]) -> tuple[Start, float | None, float | None]:
        """The best plan of any number of pipelines, by the starts of each; and the seconds of ``Annealed``.

        Where all numbers are searched, what is found for one depends on fewer pipelines alone, not on how many more are allowed,
        and a plan with idle ranks is followed by one that puts them to work, whether ranks may idle or not.
        """
        best: Start = (), math.inf
        whole, one_s, some = best, math.inf, self.numbers is not None
        begins = {number: min(step_s for _, step_s in own) for number, own in numbers.items()}
        order = (
            sorted(numbers, key=lambda number: (begins[number], number))[: self.numbers] if some else sorted(numbers)
        )
        for number in order:
            known_s = best[1] if some else max(best[1], whole[1])
            if begins[number] == math.inf or begins[number] <= known_s * MUCH_SLOWER:
                other = self._annealed(numbers[number], known_s, self.rounds.of(number))
                best = other if other[1] < best[1] * (1 - ROUNDING) else best
                if not some:
                    other = self._at_work(other, numbers[number], whole[1]) if used(other[0]) < self.every else other
                    whole = other if other[1] < whole[1] * (1 - ROUNDING) else whole
            if number == 1:
                one_s = min(best[1], whole[1])
        if some:
            return best, None, None
        if not self.request.allow_idle or whole[1] < best[1] * (1 - ROUNDING):
            best = whole
        return best, one_s, whole[1]

    def _at_work(self, found: Start, starts: Sequence[Start], known_s: float) -> Start:
        """A plan of as many pipelines in which no rank idles, from ``found``, in which some do."""
        number = len(found[0])
        rounds = self.rounds.of(number).requiring(self.every)
        lines = rounds.filled(found[0])
        begun = [(lines, rounds.price(lines)), *(start for start in starts if used(start[0]) >= self.every)]
        few = len(self.ranks) <= FEW
        if few:
            begun += best_partitions(rounds, number, all_ways=True)
        return self._annealed(begun, known_s, rounds, ordered=few)

    def in_order(self, lines: Lines, limit_s: float) -> tuple[Plan, float] | None:
        """A plan of these ranks in this order, with other cuts and depths if need be, that takes no longer than ``limit_s``."""
        rounds = self.rounds.of(len(lines))
        starts = [(lines, rounds.price(lines))]
        for depth in sorted(set(DEPTHS)):
            cut = rounds.cut(lines, depth)
            if cut is not None and used(cut[1]) == used(lines):
                starts.append(rounds.fastest(rounds.deepened(cut[1])))
        best = min(starts, key=lambda one: one[1])
        if limit_s < best[1] < math.inf:
            best = rounds.round(*best, NEAR, random.Random(0), self.budget.part(4), "cuts")
        if best[1] > limit_s:
            return None
        plan = self.fitter.fitted(self.plan(best[0]))
        return None if plan is None else (plan, self.fitter.step_s(plan))

    def _annealed(self, starts: Sequence[Start], known_s: float, rounds: Rounds, ordered: bool = True) -> Start:
        """The best plan found of one number of pipelines; unless ``ordered``, near the best start alone."""
        lines, alive = min(starts, key=lambda one: one[1])[0], list(starts)
        if len(self.ranks) == 1:  # its micro-batch is all that there is to choose
            sized = [(lines[0]._replace(micro_batch=size),) for size in self.costs]
            return min([*starts, *((one, rounds.price(one)) for one in sized)], key=lambda one: one[1])
        found = [rounds.deepened(lines)]
        for place, depth in enumerate(DEPTHS if ordered else ()):
            every = rounds.ordered(lines, depth, random.Random(place), self.orders)
            found += [rounds.deepened(other) for other in every[-KEPT:]]
        found = sorted(filter(None, found), key=lambda one: one[0][1])
        alive += [rounds.fastest(one) for one in found[:STARTS]]
        alive.sort(key=lambda one: one[1])
        number = 0
        if len(self.ranks) <= FEW:
            alive = [rounds.descended(*one, DOWNHILL) for one in alive[:STARTS_OF_FEW]]
        elif known_s * SLOWER < alive[0][1] < math.inf:
            return alive[0]
        else:
            alive = alive[: STARTS if ordered else 1]
        while True:
            for place, one in enumerate(alive):
                number += 1
                alive[place] = rounds.round(*one, FAR, random.Random(number), self.budget.part(2 * len(alive)))
            alive.sort(key=lambda one: one[1])
            if len(alive) == 1:
                break
            alive = alive[: (len(alive) + 1) // 2]
        if alive[0][1] > known_s * HOPELESS:
            return alive[0]
        return rounds.round(*alive[0], NEAR, random.Random(0), self.budget)

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
        return self._plan(self.rounds.of(len(lines)).within(math.inf, lines) or ())

    def _plan(self, fittings: Sequence[Fitting]) -> Plan:
        pipelines = tuple(fitting.pipeline(self.ranks, self.rounds.fixed) for fitting in fittings)
        return Plan(pipelines, self.request.global_batch, self.request.sequence_length, self.layer_count)

    def _step_s(self, fittings: Sequence[Fitting]) -> float:
        if self.is_plain and not any(fitting.line.is_split for fitting in fittings):
            return self.clock.step_s(fittings)
        return self._owned_s(fittings)

    def _owned_s(self, fittings: Sequence[Fitting]) -> float:
        key = tuple(fitting.line for fitting in fittings)
        if key not in self._known:
            plan = self.fitter.fitted(self._plan(fittings))
            self._known[key] = math.inf if plan is None else self.fitter.step_s(plan)
        return self._known[key]
