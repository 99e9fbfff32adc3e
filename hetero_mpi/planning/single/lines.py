"""Very many ranks: the best pipeline along a line of ranks, any of which may be left out, by dynamic programming.

A *line* is an order of all classes of ranks, the members of a class side by side. The best pipeline that keeps this order is
found backward, one rank at a time; lines that begin with large memories, fast ranks or good links are tried, and the best
changed as long as that helps. What is found is a sequence of classes, as the search over few ranks looks at.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetero_mpi.planning.single.search import ALLOWANCES, ROUNDING, Order, Outlook
from hetero_mpi.planning.tables import Table

LOOKS = 9_000_000
"""Table entries that all lines together may work through: a count, not a clock, so that the same input gives the same plan."""
DEEPER = 2
"""Depths up to this many times the number of stages are looked at."""
OVERHEAD = 3500
"""What one rank of a line costs besides its table, in table entries."""

Line = tuple[int, ...]
"""Every class once."""


@dataclass
class _Best:
    """The best pipeline that begins with a certain class, by the item it begins with."""

    work_s: Table
    depth: NDArray[np.int64]
    """Micro-batches in flight at its first stage."""
    compute_s: Table
    """Forward + backward of its first stage."""
    step: NDArray[np.int64]
    """Index of the ``_Step`` of its first rank."""


@dataclass
class _Step:
    """One rank of a line: what follows it, by the item that it begins with."""

    kind: int
    cut: NDArray[np.int64]
    """Item that the next stage begins with."""
    following: NDArray[np.int64]
    """Index of the next stage's ``_Step``, by cut; -1: none."""


class Lines:
    """The lines of one micro-batch size. ``all_used``: no rank may be left out.

    ``period_s``: the pace that is hoped for, in seconds per micro-batch. Stages are then as much deeper than the next as
    ``search.paced`` makes them, so that there is memory for the depth that the links ask for. Infinite: classic depths.
    """

    def __init__(self, outlook: Outlook, sizes: list[int], all_used: bool, period_s: float = math.inf) -> None:
        self.instance, self.sizes, self.all_used, self.period_s = outlook.instance, sizes, all_used, period_s
        self.items = outlook.instance.items
        self.deepest = min(self.instance.micro_batches, DEEPER * min(sum(sizes), self.items))
        count = len(sizes)
        self.hop_s = np.full((count, count, self.items + 1), np.inf)
        self.all_messages_s = np.full((count, count, self.items + 1), np.inf)
        for a, b in itertools.product(range(count), repeat=2):
            if a != b or sizes[a] > 1:
                self.hop_s[a, b], self.all_messages_s[a, b] = outlook.hop((a, b))
        self.known: dict[int, Table] = {}
        self.steps: list[_Step] = []
        self.ends: dict[Line, dict[int, _Best]] = {(): {}}
        self.looks = 0

    def totals(self, kind: int) -> Table:
        """Forward + backward as [depth - 1, last, first] (the transpose of a stage's table, for contiguous rows)."""
        like = self.instance.like[kind]
        if like not in self.known:
            depths = range(1, self.deepest + 1)
            self.known[like] = np.stack([self.instance.stage(kind, depth).total_s.T for depth in depths])
        return self.known[like]

    def best(self, line: Line) -> list[tuple[float, Order]]:
        """(work bound, order) of the best pipelines along ``line``, at most one per class that may come first."""
        firsts = [(float(one.work_s[0]), self._order(int(one.step[0]))) for one in self._along(line).values()]
        return sorted(first for first in firsts if first[0] < math.inf)

    def _along(self, line: Line) -> dict[int, _Best]:
        """First class -> the best pipeline along the end ``line`` of a line. Lines share their ends."""
        if line not in self.ends:
            bests = dict(self._along(line[1:]))
            kind = line[0]
            for member in range(self.sizes[kind]):
                found = self._one_more(kind, bests)
                if self.all_used:
                    bests = {kind: found}
                elif member == 0:
                    bests[kind] = found
                else:
                    old = bests[kind]
                    # One more rank of the class only where it shortens the step.
                    better = found.work_s < old.work_s * (1 - 1e-9)
                    bests[kind] = _Best(
                        np.where(better, found.work_s, old.work_s),
                        np.where(better, found.depth, old.depth),
                        np.where(better, found.compute_s, old.compute_s),
                        np.where(better, found.step, old.step),
                    )
            self.looks += self.sizes[kind] * (self.items**2 + OVERHEAD)
            self.ends[line] = bests
        return self.ends[line]

    def _one_more(self, kind: int, bests: dict[int, _Best]) -> _Best:
        """One rank of class ``kind`` in front of the best that can follow it."""
        onward = np.full(self.items + 1, np.inf)
        depth = np.ones(self.items + 1, dtype=np.int64)
        following = np.full(self.items + 1, -1)
        if bests:
            kinds = list(bests)
            work = np.stack([bests[k].work_s for k in kinds])
            reach = np.maximum(self.all_messages_s[kind, kinds], self.hop_s[kind, kinds] + work)
            reach = np.where(np.isinf(work), np.inf, reach)
            chosen, cuts = reach.argmin(axis=0), np.arange(self.items + 1)
            onward = reach[chosen, cuts]
            apart = np.stack([bests[k].compute_s for k in kinds])[chosen, cuts] + self.hop_s[kind, kinds][chosen, cuts]
            apart = np.where(np.isfinite(apart), apart, 0.0) / self.period_s
            deeper = np.maximum(1, np.ceil(apart + ALLOWANCES[0] - ROUNDING)).astype(np.int64)
            depth = np.stack([bests[k].depth for k in kinds])[chosen, cuts] + deeper
            following = np.stack([bests[k].step for k in kinds])[chosen, cuts]
        if not (self.all_used and bests):
            onward[self.items], depth[self.items], following[self.items] = 0.0, 1, -1
        flying = np.clip(depth, 1, self.deepest)
        compute = self._compute(kind, flying)
        work_s = np.maximum(self.instance.micro_batches * compute, compute + onward[:, None])
        cut = work_s.argmin(axis=0)
        items = np.arange(self.items + 1)
        self.steps.append(_Step(kind, cut, following))
        index = np.full(self.items + 1, len(self.steps) - 1)
        return _Best(work_s[cut, items], depth[cut], compute[cut, items], index)

    def _order(self, index: int) -> Order:
        return self._path(index)[0]

    def _compute(self, kind: int, flying: NDArray[np.int64]) -> Table:
        """Forward + backward as [last, first], with ``flying[last]`` micro-batches in flight."""
        if not self.all_used:
            return np.asarray(self.totals(kind)[flying - 1, np.arange(self.items + 1)])
        # A rank that is met once: only the tables of the depths that occur.
        compute = np.empty((self.items + 1, self.items + 1))
        for depth in np.unique(flying).tolist():
            chosen = flying == depth
            compute[chosen] = self.instance.stage(kind, depth).total_s.T[chosen]
        return compute

    def _path(self, index: int) -> tuple[Order, tuple[int, ...]]:
        """(order, cuts) of the pipeline that begins with the step ``index``."""
        order: list[int] = []
        cuts = [0]
        while index >= 0:
            step = self.steps[index]
            order.append(step.kind)
            cuts.append(int(step.cut[cuts[-1]]))
            index = int(step.following[cuts[-1]])
        return tuple(order), tuple(cuts)

    def cuts_of(self, order: Order) -> tuple[int, ...] | None:
        """The best cuts over ``order``; None: nothing fits at these depths. Needs ``all_used``."""
        bests: dict[int, _Best] = {}
        for kind in reversed(order):
            bests = {kind: self._one_more(kind, bests)}
        first = bests[order[0]]
        return self._path(int(first.step[0]))[1] if first.work_s[0] < math.inf else None


def orders_along_lines(
    outlooks: list[Outlook], sizes: list[int], weights: list[list[float]], all_used: bool
) -> list[tuple[float, int, Order]]:
    """(work bound, index of the outlook, order) of good pipelines, best first. Deterministic.

    ``weights``: one list per way of sorting the classes (memory, speed, links), largest first; every line is also tried
    reversed. The best line of each micro-batch size is then improved by moving one class at a time.
    """
    lines = [Lines(outlook, sizes, all_used) for outlook in outlooks]
    found: dict[tuple[int, Order], float] = {}

    def look(choice: int, line: Line) -> float:
        results = lines[choice].best(line)
        for value, order in results:
            found[choice, order] = min(value, found.get((choice, order), math.inf))
        return results[0][0] if results else math.inf

    starts = list(dict.fromkeys(_starts(sizes, weights)))
    ranked = sorted((look(choice, line), choice, line) for choice in range(len(lines)) for line in starts)
    for value, choice, line in _first_of_each(ranked):
        improved = True
        while improved and sum(one.looks for one in lines) < LOOKS:
            improved = False
            used = {kind for (of, order), cost in found.items() if of == choice and cost <= value for kind in order}
            for other in _moved(line, used):
                if sum(one.looks for one in lines) >= LOOKS:
                    break
                changed = look(choice, other)
                if changed < value * (1 - 1e-9):
                    value, line, improved = changed, other, True
                    break
    return sorted((value, choice, order) for (choice, order), value in found.items())


def _first_of_each(ranked: Iterable[tuple[float, int, Line]]) -> list[tuple[float, int, Line]]:
    """The best line of each micro-batch size, the best size first."""
    firsts: dict[int, tuple[float, int, Line]] = {}
    for entry in ranked:
        if entry[0] < math.inf:
            firsts.setdefault(entry[1], entry)
    return list(firsts.values())


def _starts(sizes: list[int], weights: list[list[float]]) -> Iterator[Line]:
    for weight in weights:
        line = tuple(sorted(range(len(sizes)), key=lambda kind: (-weight[kind], kind)))
        yield line
        yield line[::-1]


def _moved(line: Line, used: set[int]) -> Iterator[Line]:
    """Lines with one class elsewhere: the used ones first, since moving these changes most."""
    for kind in sorted(line, key=lambda kind: (kind not in used, kind)):
        rest = [other for other in line if other != kind]
        for place in range(len(line)):
            moved = (*rest[:place], kind, *rest[place:])
            if moved != line:
                yield moved
