"""Search for plans with one stage per rank: estimate candidates, simulate the best, then improve them locally.

Each pipeline count starts from its own candidates (``orders``), independent of larger counts and of rank numbering. The best
candidates are simulated and improved by descent; the best result is then annealed.
"""

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hetero_mpi.planning.fit import like_ranks
from hetero_mpi.planning.search.costs import costs_by_size
from hetero_mpi.planning.search.memory_fit import Fitter
from hetero_mpi.planning.search.orders import Candidate, Candidates, Orders
from hetero_mpi.planning.search.pipelines import ROUNDING_RATIO, Fitting, Line, Lines, used
from hetero_mpi.planning.search.rounds import Clock, LocalSearch, Start, always_split, is_plain
from hetero_mpi.planning.tables import in_classes
from hetero_mpi.planning.types.plan import Plan
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.request import PlanRequest, shares_nics
from hetero_mpi.util.grouping import grouped

MAX_SEARCH_RANKS = 64
"""Larger clusters skip this search and use the best layout (``layouts``)."""
MAX_RANKS_WITHOUT_LAYOUTS = 12
"""With more ranks, only the pipeline counts of given start plans are searched, because estimates omit all-reduces."""
MAX_SPREAD_RANKS = 4
"""Up to this many ranks, extra candidates use all ranks, in case optimizer state must be sharded very unevenly, and if a
rank is added or missing, other orders are searched besides those of given plans."""
MAX_ALL_COUNTS_RANKS = 6
"""Up to this many ranks, all pipeline counts are improved, with effort proportional to the number of ranks."""
MAX_PIPELINE_COUNTS, MAX_COUNTS_IN_BRIEF = 3, 2
"""Maximum number of pipeline counts improved with more ranks, in whole and in brief searches."""
MAX_SLOWDOWN_RATIO = 1.08
"""A pipeline count is pruned if its best candidate is slower than the best improved plan so far by more than this factor."""
SCREENING_ROUNDS, IMPROVEMENT_ROUNDS, MAX_CANDIDATES, MAX_SIMULATED_CANDIDATES = 25, 15, 12, 8
"""Number of rounds to screen and to improve candidates; maximum number of candidates to keep and to simulate."""
MAX_DESCENTS, MAX_DESCENT_LOOKS = 4, 120
"""Maximum number of descents, and of changes tried in each."""
MAX_ANNEALED_RATIO = 1.03
"""With more ranks, a pipeline count is annealed unless its descended plan is slower than the best by more than this factor."""
HEAT = (0.01, 0.0005)
MAX_ANNEALING_LOOKS, MAX_SIMULATED_ACTIONS = 1000, 300_000
"""Maximum number of annealing changes and of simulated actions, which together take a fraction of a second."""
NEAR_ROUNDS, NEAR_CANDIDATES, NEAR_TIMED, NEAR_LOOKS = 8, 2, 4, 40
"""Near a given plan: rounds of improvement, candidates kept, plans timed, and changes tried in a descent."""
THOROUGH_FACTOR = 4
"""Factor by which thorough requests raise both limits; other limits are raised by ``Costs.effort``."""
NIC_ACTIONS_FACTOR = 8
"""Factor by which simulated actions cost more with shared NICs."""


@dataclass(frozen=True)
class Decision:
    """The chosen plan with its step time and the step times of alternatives."""

    plan: Plan
    step_s: float
    one_pipeline_s: float | None = None
    """Step time of the best plan with one pipeline; infinite if none fits, None if not searched."""
    at_work_s: float | None = None
    """Step time of the best plan without idle ranks; infinite if none fits, None if not searched."""
    one_stage_s: float | None = None
    """Step time of the best plan with one stage per rank, if the chosen plan has virtual stages."""
    similar: tuple[Plan, ...] = ()
    """Good plans for other pipeline counts, if searched."""
    without_groups_s: float | None = None
    """Step time of the best plan without tensor parallelism, if the chosen plan uses it; infinite if none fits."""


class Search:
    """The search for the best plan for a profile and a request."""

    def __init__(self, profile: ClusterProfile, request: PlanRequest, slices: Sequence[int] = ()) -> None:
        """``slices``: slice sizes to try for offloaded stages; if empty, no stage is offloaded."""
        self.profile, self.request = profile, request
        self.layer_count = len(profile.model.layers)
        self.fitter = Fitter(profile, request)
        self.costs = costs_by_size(profile, request, slices)
        sizes = list(self.costs)
        self.ranks = [device.rank for device in self.costs[sizes[0]].devices]
        self.clock, self.is_plain = Clock(self.costs), is_plain(profile)
        self.most = min(request.max_pipelines, request.global_batch // sizes[0], len(self.ranks))
        self.max_used_ranks = min(len(self.ranks), self.layer_count * min(request.max_pipelines, request.global_batch))
        """Number of ranks in use when as many as possible have work."""
        self.rounds = LocalSearch(
            self.costs, self._step_s, self.clock.step_s, self._owned_s, 0 if request.allow_idle else self.max_used_ranks
        )
        self.effort, share = self.costs[sizes[0]].effort, min(1.0, len(self.ranks) / MAX_ALL_COUNTS_RANKS)
        times = THOROUGH_FACTOR if request.thorough else self.effort
        limits = self.effort * SCREENING_ROUNDS, self.effort * IMPROVEMENT_ROUNDS, times * MAX_ANNEALING_LOOKS
        self.short, self.long, self.looks = (round(share * limit) for limit in limits)
        self.actions = times * MAX_SIMULATED_ACTIONS / (NIC_ACTIONS_FACTOR if shares_nics(profile) else 1)
        self.near = [lines for lines in map(self.lines, request.near) if lines]
        self._near_ranks = {rank for plan in request.near for rank in plan.ranks}
        self._good_starts: list[Start] = []
        self._known: dict[Lines, float] = {}
        self._orders: dict[tuple[int, ...], Orders] = {}
        self._candidates: dict[int, tuple[list[Candidate], Candidates, float]] = {}

    def best(self, starts: Sequence[tuple[Plan, float]] = ()) -> Decision | None:
        """Find the best plan; it replaces the fastest of ``starts`` only if the gain exceeds ``request.indifference``."""
        timed = [(self.lines(plan), step_s) for plan, step_s in starts]
        numbers = grouped(timed, lambda start: len(start[0]))
        allowed = (start for start, (lines, _) in zip(starts, timed, strict=True) if used(lines) >= self.rounds.least)
        best_given = min(allowed, key=lambda start: start[1], default=None)
        if self.near:
            counts = [number for number in self.request.near_counts if 1 <= number <= self.most] or [self.most]
            counts.sort(key=lambda number: abs(number - len(self.near[0])))
            numbers = {number: numbers.get(number, []) for number in counts}
        elif len(self.ranks) <= MAX_RANKS_WITHOUT_LAYOUTS:
            numbers = {number: numbers.get(number, []) for number in range(1, self.most + 1)}
        wished = {number: plans for number, plans in numbers.items() if number in self.request.near_counts}
        best_by_count = (not self.near and self._of_all(wished, self.rounds)) or self._of_all(numbers, self.rounds)
        best = min(best_by_count.values(), key=lambda start: start[1], default=((), math.inf))
        one_s = at_work_s = None
        if len(self.ranks) <= MAX_RANKS_WITHOUT_LAYOUTS:
            best_at_work = best
            if self.request.allow_idle and used(best[0]) < self.max_used_ranks and not self.request.near_counts:
                all_of_them = len(self.ranks) <= MAX_ALL_COUNTS_RANKS or not best[0]
                starts_by_count = numbers if all_of_them else {len(best[0]): [best]}
                at_work = self._of_all(
                    starts_by_count, self.rounds.using_at_least(self.max_used_ranks), list(best_by_count.values())
                )
                best_at_work = min(at_work.values(), key=lambda start: start[1], default=((), math.inf))
                best = best_at_work if best_at_work[1] < best[1] * (1 - ROUNDING_RATIO) else best
                best_by_count |= {n: start for n, start in at_work.items() if start[1] < best_by_count.get(n, start)[1]}
            at_work_s, one_s = best_at_work[1], best_by_count[1][1] if 1 in best_by_count else math.inf
        found_plan = self.fitter.fitted(self.plan(best[0])) if best[1] < math.inf else None
        result = best_given
        if found_plan is not None:
            plan = self.fitter.repeating(found_plan)
            step_s, gain = self.fitter.step_s(plan), max(ROUNDING_RATIO, self.request.indifference)
            if best_given is None or step_s < best_given[1] * (1 - gain):
                result = plan, step_s
        self._good_starts = [*best_by_count.values(), *self._good_starts]
        return None if result is None else Decision(*result, one_s, at_work_s)

    def good_plans(self) -> list[tuple[Plan, float]]:
        """One good plan per pipeline count, and some plans that leave out a host."""
        return [(self.plan(lines), step_s) for lines, step_s in best_of(self._good_starts)]

    def _can_run(self, lines: Lines) -> bool:
        """Whether ``lines``, given as a plan to search near, hold all layers and the whole batch on this cluster's ranks."""
        batch, ranks = sum(line.sequences for line in lines), {rank for line in lines for rank in line.ranks}
        has_all = batch == self.request.global_batch and all(line.micro_batch in self.costs for line in lines)
        return has_all and len(ranks) == used(lines) and all(sum(line.counts) == self.layer_count for line in lines)

    def _of_all(
        self, numbers: dict[int, list[Start]], rounds: LocalSearch, further_starts: Sequence[Start] = ()
    ) -> dict[int, Start]:
        """Find the best pipelines for each pipeline count in ``numbers``."""
        starts_by_count, searches = dict[int, list[Start]](), dict[int, LocalSearch]()
        for number, starts in numbers.items():
            local_search = searches[number] = rounds.shared_by(number).using_at_least(rounds.least)
            more = [
                start
                for further in further_starts
                if len(further[0]) == number
                for start in local_search.timed_starts([further[0]], 2, self.actions, MAX_DESCENTS)
            ]
            starts = [further for further in starts if used(further[0]) >= rounds.least]
            if self.near:
                least_s = min((start[1] for earlier in starts_by_count.values() for start in earlier), default=math.inf)
                starts_by_count[number] = starts = self._near_starts(number, local_search, least_s)
                if len(self.ranks) > MAX_SPREAD_RANKS or self._near_ranks == set(self.ranks):
                    continue
            candidates, _, depth = self._begun(number)
            starts_by_count[number] = best_of([*starts, *more, *self._priced(candidates, number, local_search, depth)])
        starts_by_count = {number: starts for number, starts in starts_by_count.items() if starts}
        best = {number: starts[0] for number, starts in starts_by_count.items()}
        close = sorted(best, key=lambda number: (best[number][1], number))
        most = self.effort * (MAX_COUNTS_IN_BRIEF if self.request.near_counts else MAX_PIPELINE_COUNTS)
        close = close[:1] if self.near else sorted(best) if len(self.ranks) <= MAX_ALL_COUNTS_RANKS else close[:most]
        least_s, improved = math.inf, dict[int, Start]()
        for number in close:
            if starts_by_count[number][0][1] <= MAX_SLOWDOWN_RATIO**self.effort * least_s:
                improved[number] = best[number] = self._improved(starts_by_count[number], number, searches[number])
                least_s = min(least_s, best[number][1])
        is_brief = bool(self.near or self.request.near_counts) or len(self.ranks) == 1
        max_ratio = MAX_ANNEALED_RATIO if len(self.ranks) > MAX_ALL_COUNTS_RANKS else math.inf
        for number, start in [] if is_brief else sorted(improved.items(), key=lambda item: item[1][1]):
            if start[1] <= max_ratio * least_s:
                best[number] = searches[number].annealed(start, HEAT, self.looks, self.actions, random.Random(0))
                least_s = min(least_s, best[number][1])
        return best

    def _near_starts(self, number: int, rounds: LocalSearch, limit_s: float) -> list[Start]:
        """Given plans of ``number`` pipelines that this cluster can run, and candidates like them estimated below ``limit_s``."""
        orders, alike = self.orders(number), [lines for lines in self.near if len(lines) == number]
        lines = [lines for lines in alike if self._can_run(lines)]
        for depth in (1.0, 0.0):
            begin, draw = orders.near(alike or self.near[:1], number), np.random.default_rng(number)
            candidates, _ = orders.improved(begin, NEAR_ROUNDS, depth, draw, NEAR_CANDIDATES)
            lines += filter(None, (orders.lines(each, depth) for each in candidates if each.seconds < limit_s))
            if candidates:
                break
        return rounds.timed_starts(dict.fromkeys(lines), NEAR_TIMED, self.actions / 4, 1)

    def _begun(self, number: int) -> tuple[list[Candidate], Candidates, float]:
        """Best candidates for ``number`` pipelines, the population, and their depth factor: 1, or 0 if nothing fits at 1."""
        if number not in self._candidates:
            orders = self.orders(number)
            for depth in (1.0, 0.0):
                draw = np.random.default_rng(number)
                candidates, state = orders.improved(
                    orders.random_candidates(number, draw, depth), self.short, depth, draw, self.effort * MAX_CANDIDATES
                )
                if candidates:
                    break
            self._candidates[number] = candidates, state, depth
        return self._candidates[number]

    def _improved(self, starts: list[Start], number: int, rounds: LocalSearch) -> Start:
        """Improve starts and further candidates by descent."""
        if self.near:
            return rounds.descended(starts[0], NEAR_LOOKS, self.actions / 4)
        _, state, depth = self._begun(number)
        candidates, _ = self.orders(number).improved(
            state, self.long, depth, np.random.default_rng(0), self.effort * MAX_CANDIDATES
        )
        starts = best_of([*starts, *self._priced(candidates, number, rounds, depth)])
        fewer_hosts = list(self._without_a_host(starts[0], rounds, depth))
        self._good_starts += best_of(fewer_hosts)[:1]
        alive = best_of([*starts, *fewer_hosts])[:MAX_DESCENTS]
        if len(self.ranks) == 1:
            return alive[0]
        descended = (rounds.descended(start, MAX_DESCENT_LOOKS, self.actions / 4) for start in alive)
        return min(descended, key=lambda start: start[1])

    def _without_a_host(self, start: Start, rounds: LocalSearch, depth: float) -> Iterator[Start]:
        """Yield variants of ``start`` that leave out one host: behind a slow link, leaving out a single rank may not pay."""
        lines, orders = start[0], self.orders(len(start[0]))
        host = self.rounds.costs[lines[0].micro_batch].host.tolist()
        used_hosts = {host[rank] for line in lines for rank in line.ranks}
        for left_out in used_hosts if len(used_hosts) > 1 else ():
            remaining_ranks = [tuple(rank for rank in line.ranks if host[rank] != left_out) for line in lines]
            pairs = list(zip(lines, remaining_ranks, strict=True))
            for size in self.costs if all(remaining_ranks) else ():
                fewer = (line._replace(ranks=ranks, micro_batch=size) for line, ranks in pairs)
                cut = None if any(line.sequences % size for line in lines) else orders.cut(tuple(fewer), depth)
                if cut is not None and (depths := rounds.with_promising_depths(cut)):
                    yield rounds.fastest(depths)

    def _priced(self, candidates: Sequence[Candidate], number: int, rounds: LocalSearch, depth: float) -> list[Start]:
        """Time the most promising candidates for ``number`` pipelines; return those that fit."""
        orders = self.orders(number)
        lines = [orders.lines(candidate, depth) for candidate in candidates]
        if len(self.ranks) <= MAX_SPREAD_RANKS:
            lines += map(orders.spread_over_all_ranks, candidates)
        return rounds.timed_starts(
            filter(None, dict.fromkeys(lines)),
            2 * self.effort * MAX_SIMULATED_CANDIDATES,
            self.actions / 4,
            MAX_DESCENTS,
        )

    def orders(self, number: int) -> Orders:
        """``Orders`` for ``number`` pipelines, shared by pipeline counts with the same memory limits."""
        costs = self.rounds.shared_by(number).costs
        key = tuple(id(costs_of_size.deepest) for costs_of_size in costs.values())
        if key not in self._orders:
            self._orders[key] = Orders(costs)
        return self._orders[key]

    def in_natural_order(self, plan: Plan, step_s: float) -> tuple[Plan, float]:
        """Reorder ranks by ascending number if that slows the step by no more than ``request.indifference``.

        Otherwise, noise in measured links would decide the order of equal devices. The lowest-numbered equal devices are
        preferred, in ascending order overall (one pipeline only) or within each class of equal devices; then the ranks
        already chosen, in the same two orders.
        """
        lines, limit_s = self.lines(plan), step_s * (1 + max(self.request.indifference, ROUNDING_RATIO))
        devices = self.profile.devices
        usable = [[rank for rank in like if rank in self.ranks] for like in like_ranks(self.profile)]
        classes = [c for x in usable for c in in_classes(x, lambda a, b: devices[a].layers == devices[b].layers)]
        alike = {rank: members for members in classes for rank in members}
        chosen_ranks = [self.ranks[rank] for line in lines for rank in line.ranks]
        for ranks in _preferred_orders(chosen_ranks, alike, len(lines) == 1 and self.request.indifference > 0):
            if ranks == chosen_ranks:
                break
            remaining_ranks = iter(self.ranks.index(rank) for rank in ranks)
            wished = tuple(line._replace(ranks=tuple(next(remaining_ranks) for _ in line.ranks)) for line in lines)
            reordered = self.in_order(wished, limit_s)
            if reordered is not None:
                return reordered
        return plan, step_s

    def in_order(self, lines: Lines, limit_s: float) -> tuple[Plan, float] | None:
        """Keep the order of ranks, but change cuts and depths if needed to stay within ``limit_s``; None if impossible."""
        rounds = self.rounds.shared_by(len(lines))
        starts = [(lines, rounds.price(lines))]
        for depth in (1.0, 1.4):
            cut = self.orders(len(lines)).cut(lines, depth)
            if cut is not None and used(cut) == used(lines) and (depths := rounds.with_promising_depths(cut)):
                starts.append(rounds.fastest(depths))
        best = min(starts, key=lambda start: start[1])
        if limit_s < best[1] < math.inf:
            best = rounds.annealed(best, HEAT, self.looks // 4, self.actions / 4, random.Random(0), ranks=False)
        if best[1] > limit_s:
            return None
        plan = self.fitter.fitted(self.plan(best[0]))
        return None if plan is None else (plan, self.fitter.step_s(plan))

    def lines(self, plan: Plan) -> Lines:
        """The pipelines of ``plan``, without ranks that the cluster lacks."""
        number = {rank: index for index, rank in enumerate(self.ranks)}
        kept_stages = ([stage for stage in pipeline.stages if stage.ranks[0] in number] for pipeline in plan.pipelines)
        return tuple(
            Line(
                tuple(number[stage.ranks[0]] for stage in stages),
                tuple(stage.last - stage.first for stage in stages),
                tuple(min(stage.warm_up + 1, pipeline.micro_batches) for stage in stages),
                pipeline.micro_batch,
                pipeline.sequences,
                pipeline.split_backward or always_split(self.request),
            )
            for stages, pipeline in zip(kept_stages, plan.pipelines, strict=True)
            if stages
        )

    def plan(self, lines: Lines) -> Plan:
        """Convert to a plan, with recomputation and depths fitted to memory."""
        return self._plan(self.rounds.shared_by(len(lines)).fitted_within(math.inf, lines) or ())

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


def best_of(starts: Iterable[Start]) -> list[Start]:
    """Distinct starts that fit, fastest first."""
    return sorted({start[0]: start for start in starts if start[1] < math.inf}.values(), key=lambda start: start[1])


def _preferred_orders(ranks: list[int], alike: dict[int, list[int]], any_order: bool) -> Iterator[list[int]]:
    """Yield rank orders that are preferred to ``ranks``, best first."""
    classes = {id(alike[rank]): alike[rank] for rank in ranks}
    counted = (sorted(members)[: sum(rank in members for rank in ranks)] for members in classes.values())
    for preferred in (sorted(rank for members in counted for rank in members), sorted(ranks)):
        if any_order:
            yield preferred
        yield _in_class_order(ranks, preferred, alike)


def _in_class_order(ranks: list[int], ascending: list[int], alike: dict[int, list[int]]) -> list[int]:
    """Fill each class's positions in ``ranks`` with members of that class in ascending order."""
    waiting, result = list(ascending), []
    for rank in ranks:
        next_rank = next(candidate for candidate in waiting if candidate in alike[rank])
        waiting.remove(next_rank)
        result.append(next_rank)
    return result
