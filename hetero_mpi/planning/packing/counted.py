"""The packing bound of small clusters: pipelines of whole ranks, by counting how many of each class they have.

For a step time T, ``chains`` says of every vector of ranks the largest share of the batch it can carry by T, at best. Whether
pipelines of disjoint ranks carry the batch together is then a knapsack over vectors. Of no vector more is found out than
decides that: at first each may carry what its speed allows, and only of those that the best packing is made of ``chains``
is asked, until a packing stands or none is left.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from hetero_mpi.planning.packing.chains import BoundChains
from hetero_mpi.planning.packing.relaxed import Facts
from hetero_mpi.planning.packing.stages import StageTables
from hetero_mpi.planning.several.cluster import Floats

Whole = NDArray[np.int64]

MOST_WORK = 2_000_000
"""So many (vector, class, block) are asked of ``chains``, about two seconds; then every step time left counts as possible."""


class Counted:
    """The vectors of an instance, and ``BoundChains`` up to any of them."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self._tables = StageTables(facts)
        self.shape = tuple(len(one.ranks) + 1 for one in facts.classes)
        self.vectors: Whole = np.indices(self.shape).reshape(len(self.shape), -1)
        self.number = self.vectors.shape[1]
        self._chains: dict[tuple[int, int], BoundChains] = {}
        self.blocks = len(facts.blocks) + facts.ends
        self.work = 0
        self.sequences_per_s: Floats = facts.speeds @ self.vectors / self.blocks
        places = np.arange(self.number)
        inside = (self.vectors[:, None, :] <= self.vectors[:, :, None]).all(axis=0)
        self.rest: Whole = np.where(inside, places[:, None] - places[None, :], self.number)
        """[vector, some of its ranks]: the vector of the others; beyond all of them where there is none."""

    def places(self, vector: int) -> Whole:
        """Of all vectors of these ranks or some of them."""
        shape = tuple(int(n) + 1 for n in self.vectors[:, vector])
        inner = np.indices(shape).reshape(len(shape), -1)
        return np.asarray(np.ravel_multi_index(tuple(inner), self.shape))

    def chains(self, vector: int, pipelines: int) -> BoundChains:
        """All chains of at most these ranks, where so many pipelines or more sum gradients."""
        key = vector, pipelines
        if key not in self._chains:
            self._chains[key] = BoundChains(self._tables, tuple(int(n) for n in self.vectors[:, vector]), pipelines)
        return self._chains[key]


class Shares:
    """What every vector can carry: at least ``least``, at most ``most`` sequences, where there is one pipeline, or two and more."""

    def __init__(self, counted: Counted, pipelines: int) -> None:
        self.counted, self.pipelines = counted, pipelines
        self.batch = counted.facts.request.global_batch
        self.fewest = self.batch if pipelines == 1 else 1
        """Sequences that any pipeline does at least: one alone does all."""
        self._known: dict[float, tuple[Whole, Whole]] = {}
        self.step_s = 0.0
        self.least: Whole = np.zeros(counted.number, dtype=np.int64)
        self.most = self.least

    def possible(self, step_s: float) -> bool:
        """Could the batch be done by ``step_s``, as far as is known here?"""
        self._begin(step_s)
        looked: set[int] = set()
        while True:
            sequences, parts = packed(self.counted, self.most, self.pipelines == 1)
            if sequences < self.batch:
                return False
            open_ = sorted({vector for vector in parts if self.least[vector] < self.most[vector]})
            if not open_ or self.counted.work > MOST_WORK:
                return True
            wanted = {s for vector in open_ for s in self._wanted(vector)} - looked
            if wanted:
                # All ranks first: what even they could not do tells of many vectors at once.
                looked |= wanted
                self._look(self.counted.number - 1, sorted(wanted))
            for vector in open_:
                if self.least[vector] < self.most[vector]:
                    self._look(vector, self._wanted(vector))

    def _begin(self, step_s: float) -> None:
        """What shorter and longer step times have shown holds here too."""
        speed = step_s * self.counted.sequences_per_s * (1 + 1e-9)
        # Each of the other pipelines does one sequence at least.
        ceiling = self.batch - (self.pipelines - 1)
        self.least, self.most = np.zeros_like(self.least), np.minimum(ceiling, np.floor(speed)).astype(np.int64)
        for other_s, (least, most) in self._known.items():
            if other_s <= step_s:
                self.least = np.maximum(self.least, least)
            if other_s >= step_s:
                self.most = np.minimum(self.most, most)
        self.most[self.most < self.fewest] = 0
        self.step_s = step_s
        self._known[step_s] = self.least, self.most

    def _look(self, vector: int, shares: list[int]) -> None:
        """Whether these ranks, at best, carry these shares."""
        places = self.counted.places(vector)
        speed = self.step_s * self.counted.sequences_per_s
        spare = (float(speed[-1]) - self.batch) * self.counted.blocks * (1 + 1e-9) + 1e-6
        ceiling = min(self.batch, math.floor(speed[vector] * (1 + 1e-9)))
        self.counted.work += len(shares) * len(places) * self.counted.blocks * len(self.counted.shape)
        found = self.counted.chains(vector, self.pipelines).carried(shares, self.step_s, ceiling, spare)
        for share, carried in zip(shares, found, strict=True):
            if carried[-1]:
                self.least[vector] = max(self.least[vector], share)
            # What those ranks could not do, though any of the others might have stood behind them, fewer cannot either.
            beyond = places[~carried]
            self.most[beyond] = np.minimum(self.most[beyond], share - 1)
        self.most[self.most < self.fewest] = 0
        self.least = np.minimum(self.least, self.most)
        self._known[self.step_s] = self.least, self.most

    def _wanted(self, vector: int) -> list[int]:
        most = int(self.most[vector])
        return sorted({most, max(self.fewest, (int(self.least[vector]) + most + 1) // 2)} - {0}) if most else []


def packed(counted: Counted, most: Whole, alone: bool) -> tuple[int, list[int]]:
    """(most sequences that vectors of disjoint ranks, or all ranks ``alone``, carry; these vectors). More ranks carry no less."""
    last = counted.number - 1
    if alone:
        return int(most[last]), [last] * bool(most[last])
    # best[vector]: its first pipeline, taken[vector], carries some, and the best of the other ranks carry the rest.
    best, taken = np.append(np.zeros_like(most), -(10**9)), np.zeros_like(most)
    for vector in range(1, counted.number):
        total = most[1:] + best[counted.rest[vector, 1:]]
        taken[vector] = 1 + total.argmax()
        best[vector] = total[taken[vector] - 1]
    parts, vector = [], last
    while best[vector] > 0:
        parts.append(int(taken[vector]))
        vector -= int(taken[vector])
    return int(best[last]), parts
