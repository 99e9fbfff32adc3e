"""The packing bound of small clusters: pipelines of whole ranks, by counting how many of each class they have.

For a step time T, ``chains`` says of every vector of ranks the largest share of the batch it can carry by T, at best. Whether
pipelines of disjoint ranks carry the batch together is then a knapsack over vectors. Of no vector more is found out than
decides that: at first each may carry what its speed allows, and only of those that the best packing is made of ``chains``
is asked, until a packing stands or none is left.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
from numpy.typing import NDArray

from hetero_mpi.planning.packing.chains import Chains
from hetero_mpi.planning.packing.relaxed import ANY, Batch, Facts, RankClass, Summing
from hetero_mpi.planning.packing.stages import StageTables
from hetero_mpi.planning.packing.whole import Rule, Span, WholeChains
from hetero_mpi.planning.several.fleet import Floats

Whole = NDArray[np.int64]

MOST_VECTORS = 1_100
"""Classes are joined until there are no more vectors than these."""
MOST_UNLIKE = 1.13
"""No classes are joined of which one is more than so many times as fast, or as large, as the other."""


class Counted:
    """The vectors of an instance, and ``Chains`` up to any of them."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self._tables: dict[Batch, StageTables] = {}
        self.shape = tuple(len(one.ranks) + 1 for one in facts.classes)
        self.vectors: Whole = np.indices(self.shape).reshape(len(self.shape), -1)
        self.number = self.vectors.shape[1]
        self._chains: dict[tuple[int, Summing, Batch], Chains] = {}
        self._whole: dict[tuple[int, Summing, Batch], WholeChains] = {}
        self.blocks = len(facts.blocks) + facts.ends
        self.sequences_per_s: Floats = facts.speeds @ self.vectors / self.blocks
        homes = [one.home for one in facts.classes]
        self.at_home: NDArray[np.bool_] = np.array(
            [(self.vectors[[h == home for h in homes]] > 0).any(axis=0) for home in range(max(homes) + 1)]
        )
        """[home, vector]: has it a rank there?"""
        places = np.arange(self.number)
        inside = (self.vectors[:, None, :] <= self.vectors[:, :, None]).all(axis=0)
        self.rest: Whole = np.where(inside, places[:, None] - places[None, :], self.number)
        """[vector, some of its ranks]: the vector of the others; beyond all of them where there is none."""

    def homes_with(self, ranks: int) -> list[int]:
        """Homes that are one host with at least so many ranks."""
        found = []
        for home in sorted({one.home for one in self.facts.classes}):
            here = [rank for one in self.facts.classes if one.home == home for rank in one.ranks]
            if len(here) >= ranks and len({int(self.facts.fleet.host[rank]) for rank in here}) == 1:
                found.append(home)
        return found

    def places(self, vector: int) -> Whole:
        """Of all vectors of these ranks or some of them."""
        shape = tuple(int(n) + 1 for n in self.vectors[:, vector])
        inner = np.indices(shape).reshape(len(shape), -1)
        return np.asarray(np.ravel_multi_index(tuple(inner), self.shape))

    def chains(self, vector: int, summing: Summing, batch: Batch) -> Chains:
        """All chains of at most these ranks."""
        key = vector, summing, batch
        if key not in self._chains:
            if batch not in self._tables:
                self._tables[batch] = StageTables(self.facts, batch)
            self._chains[key] = Chains(self._tables[batch], tuple(int(n) for n in self.vectors[:, vector]), summing)
        return self._chains[key]

    def whole(self, vector: int, summing: Summing, batch: Batch) -> WholeChains:
        """The same as whole pipelines."""
        key = vector, summing, batch
        if key not in self._whole:
            self._whole[key] = WholeChains(self.chains(*key))
        return self._whole[key]


class Shares:
    """What every vector can carry: at least ``least``, at most ``most`` sequences, when pipelines sum gradients so, and
    all keep such a ``rule``; ``base``: the same without it."""

    def __init__(
        self, counted: Counted, summing: Summing, closely: bool, rule: Rule | None = None, base: Shares | None = None
    ) -> None:
        self.counted, self.summing, self.closely = counted, summing, closely
        self.rule, self.base = rule, base
        self.batch = counted.facts.request.global_batch
        self.fewest = self.batch if summing.pipelines == 1 else 1
        """Sequences that any pipeline does at least: one alone does all."""
        self._known: dict[float, tuple[Whole, Whole]] = {}
        self._whole: set[tuple[float, int]] = set()
        """(step time, vector) of which ``whole`` allows ``most``."""
        self.step_s = 0.0
        self.least: Whole = np.zeros(counted.number, dtype=np.int64)
        self.most = self.least

    def begin(self, step_s: float) -> None:
        """What shorter and longer step times have shown holds here too."""
        speed = step_s * self.counted.sequences_per_s * (1 + 1e-9)
        # Each of the other pipelines does one sequence at least.
        ceiling = self.batch - (self.summing.pipelines - 1)
        self.least, self.most = np.zeros_like(self.least), np.minimum(ceiling, np.floor(speed)).astype(np.int64)
        if isinstance(self.rule, Span):
            self.most = np.minimum(self.most, self._spanned(self.rule, step_s))
        for other_s, (least, most) in [*self._known.items(), *(self.base._known.items() if self.base else ())]:
            if other_s <= step_s:
                self.least = np.maximum(self.least, least)
            if other_s >= step_s:
                self.most = np.minimum(self.most, most)
        self.most[self.most < self.fewest] = 0
        self.step_s = step_s
        self._known[step_s] = self.least, self.most

    def _spanned(self, span: Span, step_s: float) -> Whole:
        """[vector] what speed allows of pipelines with such a span."""
        facts = self.counted.facts
        there = np.array([one.home == span.home for one in facts.classes])
        most = np.full(self.counted.number, float(self.batch))
        for classes, blocks in ((there, span.least), (~there, len(facts.blocks) - span.most)):
            if blocks > 0:
                speed = np.where(classes, facts.speeds, 0.0) @ self.counted.vectors
                most = np.minimum(most, np.floor(step_s * speed / blocks * (1 + 1e-9)))
        return most.astype(np.int64)

    def look(self, vector: int, shares: list[int]) -> None:
        """Whether these ranks, at best, carry these shares."""
        places = self.counted.places(vector)
        ceiling, spare = self._room(vector)
        whole = vector == self.counted.number - 1

        def carried(some: list[int], batch: Batch) -> dict[int, NDArray[np.bool_]]:
            if not some:
                return {}
            found = self.counted.chains(vector, self.summing, batch).carried(some, self.step_s, ceiling, spare)
            return dict(zip(some, found, strict=True))

        found = carried(shares, ANY) if whole or not self.closely else {}
        open_ = [share for share in shares if share not in found or found[share][-1]]
        closer = {share: np.full(len(places), not self.closely) for share in open_}
        for batch in self._batches(min(shares)):
            left = [share for share in closer if not closer[share][-1]]
            for share, vectors in carried(left, batch).items():
                closer[share] |= vectors
        for share in shares:
            if share in closer and closer[share][-1]:
                self.least[vector] = max(self.least[vector], share)
            elif share in closer:
                found[share] = closer[share]
            # What those ranks could not do, though any of the others might have stood behind them, fewer cannot either.
            if share in found:
                beyond = places[~found[share]]
                self.most[beyond] = np.minimum(self.most[beyond], share - 1)
        self.most[self.most < self.fewest] = 0
        self.least = np.minimum(self.least, self.most)
        self._known[self.step_s] = self.least, self.most

    def _room(self, vector: int) -> tuple[int, float]:
        """(the most sequences that these ranks' speed allows, blocks' sequences of their time that may go to waste)."""
        speed = self.step_s * self.counted.sequences_per_s
        spare = (float(speed[-1]) - self.batch) * self.counted.blocks * (1 + 1e-9) + 1e-6
        return min(self.batch, math.floor(speed[vector] * (1 + 1e-9))), spare

    def _batches(self, share: int) -> list[Batch]:
        """How shares of so many sequences or more may be cut: a larger one may end with a longer micro-batch, or a shorter one;
        the whole batch ends as it must."""
        choices = self.counted.facts.choices
        alone = [Batch(size, size) for size in range(share, max(choices)) if size not in choices]
        if share == self.batch:
            return [*(Batch(size, (share - 1) % size + 1) for size in choices if size <= share), *alone[:1]]
        return [*(Batch(size, last) for size in choices for last in range(size, 0, -1)), *alone]

    def impossible(self, pipelines: int, homes: frozenset[int] = frozenset()) -> list[int] | None:
        """None: shown that so many pipelines (0: any number), each with ranks of all ``homes``, cannot do the batch by ``step_s``;
        else vectors that could."""
        looked: set[int] = set()
        has = self.counted.at_home[sorted(homes)].all(axis=0)
        while True:
            sequences, parts = packed(self.counted, np.where(has, self.most, 0), pipelines)
            if sequences < self.batch:
                return None
            open_ = sorted({vector for vector in parts if self.least[vector] < self.most[vector]})
            if not open_ and not (self.closely and self._lowered(sorted(set(parts)))):
                return parts
            wanted = {s for vector in open_ for s in self._wanted(vector)} - looked
            if wanted:
                # All ranks first: what even they could not do tells of many vectors at once.
                looked |= wanted
                self.look(self.counted.number - 1, sorted(wanted))
            for vector in open_:
                if self.least[vector] < self.most[vector]:
                    self.look(vector, self._wanted(vector))

    def _lowered(self, vectors: list[int]) -> bool:
        """Whether whole pipelines (``whole``) can do less than what any of ``vectors`` is thought to."""
        lowered = False
        for vector in vectors:
            most, step = int(self.most[vector]), 1
            if (self.step_s, vector) in self._whole or self.wholly(vector, most):
                self._whole.add((self.step_s, vector))
                continue
            low, high = 0, most  # high: not possible
            while high > self.fewest and low == 0:
                share = max(self.fewest, most - step)
                low, high, step = (share, high, step) if self.wholly(vector, share) else (0, share, 2 * step)
            while high - low > 1 and low > 0:
                middle = (low + high) // 2
                low, high = (middle, high) if self.wholly(vector, middle) else (low, middle)
            # What all these ranks cannot do, fewer of them cannot either.
            places = self.counted.places(vector)
            self.most[places] = np.minimum(self.most[places], low)
            self.most[self.most < self.fewest] = 0
            self.least = np.minimum(self.least, self.most)
            self._known[self.step_s] = self.least, self.most
            self._whole.add((self.step_s, vector))
            lowered = True
        return lowered

    def wholly(self, vector: int, share: int) -> bool:
        """Is there a whole pipeline of these ranks, or some of them, that can do ``share``?"""
        ceiling, spare = self._room(vector)
        for batch in self._batches(share):
            chains = self.counted.chains(vector, self.summing, batch)
            passes = chains.passes([share], self.step_s, ceiling, spare)
            if passes.carried[0, -1] and self.counted.whole(vector, self.summing, batch).possible(passes, self.rule):
                return True
        return False

    def _wanted(self, vector: int) -> list[int]:
        most = int(self.most[vector])
        return sorted({most, max(self.fewest, (int(self.least[vector]) + most + 1) // 2)} - {0}) if most else []


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
