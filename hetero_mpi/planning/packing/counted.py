"""The packing bound of small clusters: pipelines of whole ranks, by counting how many of each class they have.

For a step time T, ``chains`` says of every vector of ranks the largest share of the batch it can carry by T, at best. Whether
pipelines of disjoint ranks carry the batch together is then a knapsack over vectors. Of no vector more is found out than
decides that: at first each may carry what its speed allows, and only of those that the best packing is made of ``chains``
is asked, until a packing stands or none is left.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetero_mpi.planning.packing.chains import Chains
from hetero_mpi.planning.packing.relaxed import Facts, RankClass
from hetero_mpi.planning.packing.stages import StageTables
from hetero_mpi.planning.several.fleet import Floats

Whole = NDArray[np.int64]

MOST_VECTORS = 400
"""Classes are joined until there are no more vectors than these."""
MOST_UNLIKE = 1.13
"""No classes are joined of which one is more than so many times as fast, or as large, as the other."""
AT_ONCE = 4
"""So many shares are looked at side by side."""
TOLERANCE = 0.004
"""The search for the largest step time that can be shown ends within this share of it."""


@dataclass(frozen=True)
class Packing:
    """What could carry the batch, as far as the relaxation knows."""

    bound_s: float
    """No plan is faster."""
    possible_s: float
    """The least step time that was found possible: that of a known plan, or of ``pipelines``."""
    pipelines: tuple[tuple[tuple[int, ...], int], ...] = ()
    """(ranks, sequences) of each pipeline that could do the batch by ``possible_s``; empty: the known plan alone."""


class Counted:
    """The vectors of an instance, and ``Chains`` up to any of them."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.tables = StageTables(facts)
        self.shape = tuple(len(one.ranks) + 1 for one in facts.classes)
        self.vectors: Whole = np.indices(self.shape).reshape(len(self.shape), -1)
        self.number = self.vectors.shape[1]
        self._chains: dict[tuple[int, int], tuple[Chains, Whole]] = {}
        self.blocks = len(facts.blocks) + facts.ends
        self.sequences_per_s: Floats = facts.speeds @ self.vectors / self.blocks
        places = np.arange(self.number)
        inside = (self.vectors[:, None, :] <= self.vectors[:, :, None]).all(axis=0)
        self.rest: Whole = np.where(inside, places[:, None] - places[None, :], self.number)
        """[vector, some of its ranks]: the vector of the others; beyond all of them where there is none."""

    def chains(self, vector: int, pipelines: int) -> tuple[Chains, Whole]:
        """(all chains of at most these ranks, their vectors' places among all vectors)."""
        key = vector, pipelines
        if key not in self._chains:
            count = tuple(int(n) for n in self.vectors[:, vector])
            chains = Chains(self.facts, count, self.tables.of(pipelines))
            inner = np.indices(chains.shape).reshape(len(count), -1)
            self._chains[key] = chains, np.asarray(np.ravel_multi_index(tuple(inner), self.shape))
        return self._chains[key]


class Shares:
    """What every vector can carry: at least ``least``, at most ``most`` sequences, when so many pipelines sum gradients."""

    def __init__(self, counted: Counted, pipelines: int) -> None:
        self.counted, self.pipelines = counted, pipelines
        self.batch = counted.facts.request.global_batch
        self._known: dict[float, tuple[Whole, Whole]] = {}
        self.step_s = 0.0
        self.least: Whole = np.zeros(counted.number, dtype=np.int64)
        self.most = self.least

    def begin(self, step_s: float) -> None:
        """What shorter and longer step times have shown holds here too."""
        speed = step_s * self.counted.sequences_per_s * (1 + 1e-9)
        self.least, self.most = np.zeros_like(self.least), np.minimum(self.batch, np.floor(speed)).astype(np.int64)
        for other_s, (least, most) in self._known.items():
            if other_s <= step_s:
                self.least = np.maximum(self.least, least)
            if other_s >= step_s:
                self.most = np.minimum(self.most, most)
        self.step_s = step_s
        self._known[step_s] = self.least, self.most

    def look(self, vector: int, shares: list[int]) -> None:
        """Whether these ranks, at best, carry these shares."""
        chains, places = self.counted.chains(vector, self.pipelines)
        speed = self.step_s * self.counted.sequences_per_s
        spare = (float(speed[-1]) - self.batch) * self.counted.blocks * (1 + 1e-9) + 1e-6
        ceiling = min(self.batch, math.floor(speed[vector] * (1 + 1e-9)))
        for some in (shares[i : i + AT_ONCE] for i in range(0, len(shares), AT_ONCE)):
            for share, found in zip(some, chains.carried(some, self.step_s, ceiling, spare), strict=True):
                # What those ranks could not do, though any of the others might have stood behind them, fewer cannot either.
                beyond = places[~found]
                self.most[beyond] = np.minimum(self.most[beyond], share - 1)
                if found[-1]:
                    self.least[vector] = max(self.least[vector], share)
        self.least = np.minimum(self.least, self.most)
        self._known[self.step_s] = self.least, self.most

    def impossible(self, pipelines: int) -> list[int] | None:
        """None: shown that so many pipelines (0: any number) cannot do the batch by ``step_s``; else vectors that could."""
        looked: set[int] = set()
        while True:
            sequences, parts = packed(self.counted, self.most, pipelines)
            if sequences < self.batch:
                return None
            open_ = sorted({vector for vector in parts if self.least[vector] < self.most[vector]})
            if not open_:
                return parts
            wanted = {s for vector in open_ for s in self._wanted(vector)} - looked
            if wanted:
                # All ranks first: what even they could not do tells of many vectors at once.
                looked |= wanted
                self.look(self.counted.number - 1, sorted(wanted))
            for vector in open_:
                if self.least[vector] < self.most[vector]:
                    self.look(vector, self._wanted(vector))

    def _wanted(self, vector: int) -> list[int]:
        most = int(self.most[vector])
        return sorted({most, (int(self.least[vector]) + most + 1) // 2} - {0})


class _Best:
    """Most sequences by vector of ranks to choose from, and how the vector is parted for them."""

    def __init__(self, counted: Counted, first: _Best | Whole, second: _Best | None) -> None:
        one = first if isinstance(first, np.ndarray) else first.sequences
        rest = np.append(np.zeros_like(one) if second is None else second.sequences, -(10**9))
        total = one[None, :] + rest[counted.rest]
        self.taken: Whole = total.argmax(axis=1)
        self.sequences: Whole = total[np.arange(len(one)), self.taken]
        self.first, self.second = first, second

    def parts(self, vector: int) -> list[int]:
        """The pipelines' vectors."""
        taken = int(self.taken[vector])
        here = ([taken] if taken else []) if isinstance(self.first, np.ndarray) else self.first.parts(taken)
        return here + ([] if self.second is None else self.second.parts(vector - taken))


def packed(counted: Counted, most: Whole, pipelines: int) -> tuple[int, list[int]]:
    """(most sequences that so many vectors of disjoint ranks carry, or fewer; these vectors). 0 pipelines: any number."""
    alone = best = _Best(counted, most, None)
    ranks = int(counted.vectors[:, -1].sum())
    number = 1
    while number < (pipelines or ranks):
        best = _Best(counted, best, alone if pipelines else best)
        number = number + 1 if pipelines else 2 * number
    return int(best.sequences[-1]), best.parts(counted.number - 1)


def classes_apart(facts: Facts) -> Facts | None:
    """``facts`` with classes joined until the vectors are few; None where unlike ranks would have to be joined."""
    while math.prod(len(one.ranks) + 1 for one in facts.classes) > MOST_VECTORS and len(facts.classes) > 1:
        pairs = itertools.combinations(range(len(facts.classes)), 2)
        unlike, a, b = min(((_unlike(facts.classes[a], facts.classes[b], facts), a, b) for a, b in pairs))
        if unlike > MOST_UNLIKE:
            return None
        facts.join(a, b)
    return facts


def _unlike(a: RankClass, b: RankClass, facts: Facts) -> float:
    """How many times as fast, large or well linked the better one is; of one host a little less, so that they go first."""
    links = [facts.message_s(one.away, facts.message_bytes) for one in (a, b)]
    pairs = [(a.work_s[0], b.work_s[0]), (a.usable, b.usable)] + ([(links[0], links[1])] if a.home != b.home else [])
    ratios = [max(x, y) / max(min(x, y), 1e-30) if x != y else 1.0 for x, y in pairs]
    return max(ratios) * (1.0 if a.home == b.home else 1.001)


def packing(facts: Facts, low_s: float, known_s: float) -> Packing:
    """``low_s``: a bound to begin with. ``known_s``: some plan's step time, above which nothing is of interest."""
    counted = Counted(facts)
    request = facts.request
    most = min(int(counted.vectors[:, -1].sum()), request.max_pipelines, request.global_batch)
    # (pipelines that sum, pipelines there may be; 0: any number)
    cases = [(1, 1), *([(2, 0)] if most > 1 else [])]
    shares = {number: Shares(counted, number) for number, _ in cases}
    high_s = known_s
    found: tuple[tuple[tuple[int, ...], int], ...] = ()
    tried_known = False
    while high_s > low_s * (1 + TOLERANCE):
        middle_s = math.sqrt(low_s * high_s) if tried_known else high_s * (1 - TOLERANCE / 2)
        tried_known = True
        for number, pipelines in cases:
            shares[number].begin(middle_s)
            parts = shares[number].impossible(pipelines)
            if parts is not None:
                high_s, found = middle_s, _named(counted, parts, shares[number].most)
                break
        else:
            low_s = middle_s
    return Packing(low_s, high_s, found)


def _named(counted: Counted, parts: list[int], most: Whole) -> tuple[tuple[tuple[int, ...], int], ...]:
    """(ranks, sequences) of pipelines given as vectors; all ranks of a class are as good as one another."""
    left = [list(one.ranks) for one in counted.facts.classes]
    named = []
    for vector in parts:
        ranks = [left[kind].pop(0) for kind, n in enumerate(counted.vectors[:, vector].tolist()) for _ in range(n)]
        named.append((tuple(ranks), int(most[vector])))
    return tuple(named)
