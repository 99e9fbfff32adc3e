"""The search for the packing bound of counted ranks: what is supposed of pipelines, case by case, for one step time after
another."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from hetero_mpi.planning import large_bound
from hetero_mpi.planning.packing.counted import Counted, Shares, Whole
from hetero_mpi.planning.packing.relaxed import Facts, Summing
from hetero_mpi.planning.packing.whole import Rule, Span, Torn

MOST_TOLD_APART = 4
"""Up to so many pipelines it is told apart how many there are."""
LONG = 0.1
"""Sums between hosts of so large a share of a step or more are long."""
GROWTH = 3
"""Each step away from a known plan's time is so many times as large as the one before."""
TOLERANCE = 0.002
"""The search for the largest step time that can be shown ends within this share of it."""
ROUGHLY = 0.006
"""The same, where the bound is to be quick."""


@dataclass(frozen=True)
class Case:
    """What is supposed of pipelines."""

    summing: Summing
    limit: int
    """There are no more of them; 0: any number."""
    homes: frozenset[int] = frozenset()
    """All of them have ranks there."""
    rule: Rule | None = None
    """What all of them have in common besides."""


@dataclass(frozen=True)
class Packing:
    """What could carry the batch, as far as the relaxation knows."""

    bound_s: float
    """No plan is faster."""
    possible_s: float
    """The least step time that was found possible: that of a known plan, or of ``pipelines``."""
    pipelines: tuple[tuple[tuple[int, ...], int], ...] = ()
    """(ranks, sequences) of each pipeline that could do the batch by ``possible_s``; empty: the known plan alone."""


def packing(facts: Facts, low_s: float, known_s: float, closely: bool = True) -> Packing:
    """``low_s``: a bound to begin with. ``known_s``: some plan's step time, above which nothing is of interest. Not ``closely``:
    micro-batches may have any sizes, and no cases are told apart; several times as fast, and less tight where sums are long."""
    search = Search(facts, closely)
    tolerance = TOLERANCE if closely else ROUGHLY
    high_s = known_s
    found: tuple[tuple[tuple[int, ...], int], ...] = ()
    share = tolerance / 2
    while high_s > low_s * (1 + tolerance):
        # What is known is near: the steps away from it grow until one is impossible.
        middle_s = max(math.sqrt(low_s * high_s), high_s * (1 - share))
        share *= GROWTH
        parts = search.possible(middle_s)
        if parts is None:
            low_s = middle_s
        else:
            high_s, found = middle_s, parts
    return Packing(low_s, high_s, found)


class Numbers:
    """How many pipelines there may be, by counting blocks by hosts (``large_bound``): what sums over slow networks rule out."""

    def __init__(self, facts: Facts, most: int) -> None:
        facts = Facts(facts.profile, facts.request, True)  # whose hosts are told apart
        groups = large_bound.hosts_of(facts)
        self._counted = {number: large_bound.Counted(facts, groups, number) for number in range(2, most + 1)}
        self._impossible_s = dict.fromkeys(self._counted, 0.0)
        """Step times that are known to be too short."""

    def possible(self, step_s: float) -> list[int]:
        """Numbers of two and more pipelines that may do the step in so long."""
        return [number for number in self._counted if not self._impossible(number, step_s)]

    def _impossible(self, number: int, step_s: float) -> bool:
        if step_s > self._impossible_s[number]:
            counted = self._counted[number]
            few = number <= large_bound.MOST_BOXED
            if counted.impossible(step_s) or (few and large_bound.Shares(counted).impossible(step_s)):
                self._impossible_s[number] = step_s
        return step_s <= self._impossible_s[number]


class Search:
    """Whether the batch can be done by a step time, for one time after another.

    What pipelines are told of one another decides what their sums cost. At first that is little: two of them sum, inside a host
    wherever it has ranks enough. Where pipelines that look possible contradict that, cases are told apart: *all* pipelines
    have ranks of a host, or its sums leave it; there are exactly so many pipelines, or more; where a sum between hosts would take
    too long, all pipelines hold the same blocks on a host, at least and at most so many.
    """

    def __init__(self, facts: Facts, closely: bool) -> None:
        self.counted, self.closely = Counted(facts), closely
        request = facts.request
        self.most = min(int(self.counted.vectors[:, -1].sum()), request.max_pipelines, request.global_batch)
        self._shares: dict[tuple[Summing, Rule | None], Shares] = {}
        self._numbers = Numbers(facts, self.most) if closely and facts.sums else None

    def possible(self, step_s: float) -> tuple[tuple[tuple[int, ...], int], ...] | None:
        """Pipelines (ranks, sequences) that look as if they could; None: there are none."""
        several = range(2, self.most + 1) if self._numbers is None else self._numbers.possible(step_s)
        cases = [Case(Summing(1), 1)]
        if several:
            cases.insert(0, Case(Summing(min(several)), max(several) if max(several) < self.most else 0))
        while cases:
            case = cases.pop()
            shares = self._shares_of(case)
            if shares.step_s != step_s:
                shares.begin(step_s)
            parts = shares.impossible(case.limit, case.homes)
            if parts is not None:
                closer = self._apart(case, parts, step_s)
                if not closer:
                    return _named(self.counted, parts, shares.most)
                cases += closer
        return None

    def _shares_of(self, case: Case) -> Shares:
        key = case.summing, case.rule
        if key not in self._shares:
            base = self._shares_of(replace(case, rule=None)) if case.rule else None
            self._shares[key] = Shares(self.counted, case.summing, self.closely, case.rule, base)
        return self._shares[key]

    def _apart(self, case: Case, parts: list[int], step_s: float) -> list[Case]:
        """The cases that ``case``, in which ``parts`` look possible, falls apart into; the most likely one last."""
        if case.summing.pipelines == 1 or not self.counted.facts.sums or not self.closely:
            return []
        return self._closer(case, parts) or self._ruled(case, parts, step_s)

    def _closer(self, case: Case, parts: list[int]) -> list[Case]:
        """Those where ``parts`` contradict what ``case`` knows."""
        summing, at_home = case.summing, self.counted.at_home
        torn = [
            home
            for home in self.counted.homes_with(summing.pipelines)
            if home not in summing.leaving and 0 < sum(bool(at_home[home, vector]) for vector in parts) < len(parts)
        ]
        if torn:
            home = torn[0]
            found = [replace(case, homes=case.homes | {home}), _leaving(case, home)]
            if len(torn) > 1:
                # Likely enough that sums matter little; if this looks possible, nothing else need be looked at.
                found.append(_leaving(case, *torn))
            return found
        if summing.pipelines < min(case.limit or len(parts), len(parts), MOST_TOLD_APART):
            return [replace(case, limit=summing.pipelines), _more(case)]
        return []

    def _ruled(self, case: Case, parts: list[int], step_s: float) -> list[Case]:
        """Those by how many blocks pipelines hold at a home where sums between hosts are long: all of them the same ones, or one is
        torn between hosts, if there is time for its sum."""
        summing, rule = case.summing, case.rule
        if isinstance(rule, Span):
            return self._halves(case, rule)
        if rule or len(parts) != summing.pipelines or (case.limit != len(parts) and len(parts) >= MOST_TOLD_APART):
            return []
        facts = self.counted.facts
        shared = {
            home: self._torn_s(home, summing)
            for home in self.counted.homes_with(summing.pipelines)
            if home not in summing.leaving and self.counted.at_home[home, parts].all()
        }
        home = max(shared, key=lambda one: shared[one], default=None)
        if home is None or shared[home] < LONG * step_s:
            return []
        exact = replace(case, limit=summing.pipelines)
        found = self._halves(exact, Span(home, 0, len(facts.blocks)))
        share = -(-facts.request.global_batch // summing.pipelines)
        # The pipeline with the largest share has a holder of the block, too.
        if share * min(one.work_s[0] for one in facts.classes) + shared[home] <= step_s:
            found.insert(0, replace(exact, rule=Torn(shared[home])))
        if home not in case.homes:
            found.insert(0, _leaving(exact, home))
        if case.limit != summing.pipelines:
            found.insert(0, _more(case))
        return found

    def _torn_s(self, home: int, summing: Summing) -> float:
        """Least seconds of the sum of a block that only some pipelines hold at ``home``."""
        facts = self.counted.facts
        sums_s = facts.sums_s(replace(summing, leaving=frozenset({home})))
        return min(sums_s[kind][0] for kind, one in enumerate(facts.classes) if one.home == home)

    def _halves(self, case: Case, span: Span) -> list[Case]:
        """``case`` with fewer and with more blocks of ``span``; the half in which speeds are matched comes last."""
        if span.least == span.most:
            return []
        facts, middle = self.counted.facts, (span.least + span.most) // 2
        speed = sum(
            v * n for v, n, one in zip(facts.speeds, facts.count, facts.classes, strict=True) if one.home == span.home
        )
        matched = len(facts.blocks) * speed / float(facts.speeds @ facts.count)
        spans = [replace(span, most=middle), replace(span, least=middle + 1)]
        spans.sort(key=lambda one: one.least <= matched < one.most + 1)
        return [replace(case, homes=case.homes | {span.home}, rule=one) for one in spans]


def _leaving(case: Case, *homes: int) -> Case:
    """Sums leave these homes, too."""
    return replace(case, summing=replace(case.summing, leaving=case.summing.leaving.union(homes)))


def _more(case: Case) -> Case:
    """There is one pipeline more at least."""
    return replace(case, summing=replace(case.summing, pipelines=case.summing.pipelines + 1))


def _named(counted: Counted, parts: list[int], most: Whole) -> tuple[tuple[tuple[int, ...], int], ...]:
    """(ranks, sequences) of pipelines given as vectors; all ranks of a class are as good as one another."""
    left = [list(one.ranks) for one in counted.facts.classes]
    named = []
    for vector in parts:
        ranks = [left[kind].pop(0) for kind, n in enumerate(counted.vectors[:, vector].tolist()) for _ in range(n)]
        named.append((tuple(ranks), int(most[vector])))
    return tuple(named)
