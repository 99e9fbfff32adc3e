"""One pipeline of a crew, cut, timed and polished: where its stages end, how deep they warm up, where forwards are repeated.

A *crew* is the ranks of one pipeline in order (``pace``). ``Cutter.best`` finds the least time in which filling the stages one
after another finds a place for every item, then changes cuts and depths by one as long as the simulated pipeline gets shorter.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hetero_mpi.planning.pacing import paced_together, period_s
from hetero_mpi.planning.several.chains import spans_of_many_s
from hetero_mpi.planning.several.fleet import Fleet, Floats
from hetero_mpi.planning.several.pace import Crew

WORTHWHILE = 1e-4
"""A change must shorten the pipeline by more than this share."""
HALVINGS = 12
ALLOWANCES = (0.0, 0.3, 1.0, 2.5)
"""Shares of a period by which a gradient may be late, for guessing depths."""


@dataclass(frozen=True)
class Run:
    """One pipeline: what its stages hold, and when each begins and ends its last backward."""

    crew: Crew
    cuts: tuple[int, ...]
    warm_up: tuple[int, ...]
    recompute: tuple[bool, ...]
    micro_batches: int
    begun_s: tuple[float, ...]
    end_s: tuple[float, ...]
    step_s: float
    """With sums as they were estimated, and the optimizer; infinite: it does not fit."""


@dataclass
class _Rank:
    """Running sums over items, by rank; equal ranks share one."""

    whole: list[float]
    forward: list[float]
    backward: list[float]
    repeated: list[float]
    overhead: tuple[float, float]
    fixed_s: float
    per_parameter_s: float
    plain: list[list[float]]
    """[first][items - 1]: most micro-batches in flight without repeating forwards."""
    again: list[list[float]]


class Cutter:
    """Pipelines of one fleet. ``left``: forwards and backwards that may yet be simulated."""

    def __init__(self, fleet: Fleet, effort: int) -> None:
        self.fleet, self.items, self.left = fleet, fleet.items, effort
        self.trained = [0.0, *itertools.accumulate(float(x.trainable_parameters) for x in fleet.model.layers)]
        self.message: list[float] = fleet.message_bytes.tolist()
        self._ranks: dict[int, _Rank] = {}
        self._alike: dict[tuple[object, ...], _Rank] = {}
        self._deepest: dict[tuple[float, float], tuple[list[list[float]], list[list[float]]]] = {}
        self._known: dict[tuple[object, ...], Run] = {}
        self._sums: dict[tuple[object, ...], Floats] = {}

    def rank(self, index: int) -> _Rank:
        if index not in self._ranks:
            fleet = self.fleet
            f, b, r = fleet.forward_s[index], fleet.backward_s[index], fleet.repeated_s[index]
            room = float(fleet.usable[index]), float(fleet.ratio[index])
            key = (
                f.tobytes(), b.tobytes(), r.tobytes(), room, float(fleet.step_fixed_s[index]),
                float(fleet.step_per_parameter_s[index]), *fleet.overhead_s[index].tolist(),
            )  # fmt: skip
            if key not in self._alike:
                if room not in self._deepest:
                    stages = fleet.stages(room[0])
                    self._deepest[room] = stages.deepest(*room, False).tolist(), stages.deepest(*room, True).tolist()

                def summed(seconds: Floats) -> list[float]:
                    return [0.0, *np.cumsum(seconds).tolist()]

                self._alike[key] = _Rank(
                    summed(f + b), summed(f), summed(b), summed(r), tuple(fleet.overhead_s[index].tolist()),
                    float(fleet.step_fixed_s[index]), float(fleet.step_per_parameter_s[index]), *self._deepest[room],
                )  # fmt: skip
            self._ranks[index] = self._alike[key]
        return self._ranks[index]

    def way_s(self, a: int, b: int, cut: int) -> float:
        """Seconds of a message from rank to rank, over the cut before item ``cut``."""
        fleet = self.fleet
        i, j = fleet.place[a], fleet.place[b]
        return float(fleet.latency_s[i, j] + self.message[cut - 1] * fleet.per_byte_s[i, j])

    def all_reduce_s(self, members: tuple[int, ...], size_bytes: Floats) -> Floats:
        """``Fleet.all_reduce_s``, remembered."""
        key = members, size_bytes.tobytes()
        if key not in self._sums:
            self._sums[key] = self.fleet.all_reduce_s(members, size_bytes)
        return self._sums[key]

    def best(self, crew: Crew, micro_batches: int, sum_s: Floats) -> Run:
        """The best pipeline found; some of the last ranks may be left out. ``sum_s`` [items]: of every item's gradients."""
        key = self._key(crew, micro_batches, sum_s)
        if key not in self._known:
            self._known[key] = self._best(crew, micro_batches, sum_s)
        found = self._known[key]
        return found if found.crew == crew[: len(found.crew)] else _of_others(found, crew)

    def _key(self, crew: Crew, micro_batches: int, sum_s: Floats) -> tuple[object, ...]:
        """The same for crews of equal ranks with equal ways between them."""
        ways = tuple(
            (self.way_s(a, b, 1), self.way_s(b, a, 1), self.way_s(a, b, self.items - 1))
            for a, b in itertools.pairwise(crew)
        )
        return tuple(id(self.rank(r)) for r in crew), ways, micro_batches, sum_s.tobytes()

    def _best(self, crew: Crew, micro_batches: int, sum_s: Floats) -> Run:
        starts: list[tuple[int, ...]] = []
        for eager in (False, True):
            cuts = self._shortest(crew, micro_batches, eager)
            if cuts is not None and cuts not in starts:
                starts.append(cuts)
        runs = [self.deepened(crew[: len(cuts) - 1], cuts, micro_batches, sum_s) for cuts in starts]
        best = min(runs, key=lambda run: run.step_s, default=None)
        if best is None or best.step_s == math.inf:
            return Run(crew, (), (), (), micro_batches, (), (), math.inf)
        return self.polished(best, sum_s)

    def _shortest(self, crew: Crew, micro_batches: int, eager: bool) -> tuple[int, ...] | None:
        """Cuts of the least time in which everything finds a place."""
        low, high, best = 0.0, 1.02 * micro_batches * max(self.rank(r).whole[-1] for r in crew) / len(crew), None
        for _ in range(10):
            best = self.filled(crew, micro_batches, high, eager)
            if best is not None:
                break
            low, high = high, 2 * high
        if best is None:
            return None
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            cuts = self.filled(crew, micro_batches, middle, eager)
            if cuts is None:
                low = middle
            else:
                best, high = cuts, middle
        return best

    def filled(self, crew: Crew, micro_batches: int, step_s: float, eager: bool) -> tuple[int, ...] | None:
        """Cuts such that every stage is done by ``step_s``, each as long as that and its memory allow (``pace``); None: not all
        items find a place. ``eager``: with one micro-batch more in flight than balanced stages need."""
        cuts, passed = [0], 0.0
        hops = [self.way_s(a, b, 1) + self.way_s(b, a, 1) for a, b in itertools.pairwise(crew)]
        keep = 1 - 1 / micro_batches
        for place, index in enumerate(crew):
            rank, first = self.rank(index), cuts[-1]
            pace = (step_s - rank.fixed_s - passed) / micro_batches
            if pace <= 0:
                return None
            following = len(crew) - 1 - place
            behind = (micro_batches - 1) * (1 - keep**following) + sum(hops[place:]) / pace
            flying = min(micro_batches, math.ceil(1 + behind - 1e-6) + (1 if eager and following else 0))
            last, again = self._furthest(rank, index, first, flying, micro_batches, step_s, passed)
            if last <= first:
                return None
            cuts.append(last)
            if last == self.items:
                return tuple(cuts)
            own = rank.whole[last] - rank.whole[first] + sum(rank.overhead)
            own += rank.repeated[last] - rank.repeated[first] if again else 0.0
            hop = hops[place] if place < len(hops) else 0.0
            passed += own + hop
        return None

    def _furthest(
        self, rank: _Rank, index: int, first: int, flying: int, micro_batches: int, step_s: float, passed: float
    ) -> tuple[int, bool]:  # fmt: skip
        """(furthest end of a stage that begins with ``first``, whether it must repeat forwards)"""
        best, with_again = first, False
        for again, room in ((False, rank.plain), (True, rank.again)):
            slots = room[first]
            # The longer the stage, the fewer micro-batches fit.
            fit = bisect_right(slots, -float(flying), key=lambda most: -most)
            last = min(first + fit, self.items)
            while last > best:
                own = rank.whole[last] - rank.whole[first] + sum(rank.overhead)
                own += rank.repeated[last] - rank.repeated[first] if again else 0.0
                fixed = rank.fixed_s + rank.per_parameter_s * (self.trained[last] - self.trained[first])
                busy = micro_batches * own + fixed
                over = passed + busy - step_s
                if over <= 0:
                    best, with_again = last, again
                    break
                each = own / (last - first) * micro_batches
                last -= max(1, int(0.7 * over / each)) if each > 0 else 1
        return best, with_again

    def evaluate(
        self, crew: Crew, cuts: Sequence[int], warm_up: Sequence[int], micro_batches: int, sum_s: Floats
    ) -> Run:
        """Simulates one pipeline; forwards are repeated where memory asks for it."""
        forward, backward, steps, recompute = [], [], [], []
        for place, index in enumerate(crew):
            rank, first, last = self.rank(index), cuts[place], cuts[place + 1]
            again = _repeats(rank, first, last, min(warm_up[place] + 1, micro_batches))
            if again is None:
                return Run(crew, tuple(cuts), tuple(warm_up), (), micro_batches, (), (), math.inf)
            recompute.append(again)
            forward.append(rank.forward[last] - rank.forward[first] + rank.overhead[0])
            more = rank.repeated[last] - rank.repeated[first] if again else 0.0
            backward.append(rank.backward[last] - rank.backward[first] + rank.overhead[1] + more)
            steps.append(rank.fixed_s + rank.per_parameter_s * (self.trained[last] - self.trained[first]))
        out = [self.way_s(a, b, cut) for (a, b), cut in zip(itertools.pairwise(crew), cuts[1:], strict=False)]
        home = [self.way_s(b, a, cut) for (a, b), cut in zip(itertools.pairwise(crew), cuts[1:], strict=False)]
        self.left -= 2 * len(crew) * micro_batches
        begun, ends = spans_of_many_s((forward, backward, out, home), warm_up, micro_batches)
        whole = max(ends)
        if sum_s.any():
            # Pipelines cut unlike sum their items one after another, from the last to the first.
            chain = [0.0, *np.cumsum(sum_s).tolist()]
            for place, index in enumerate(crew):
                rank, first, last = self.rank(index), cuts[place], cuts[place + 1]
                held = rank.backward[last] + (rank.repeated[last] if recompute[place] else 0.0)
                for item in (first, last - 1):
                    after = held - rank.backward[item] - (rank.repeated[item] if recompute[place] else 0.0)
                    whole = max(whole, begun[place] + rank.overhead[1] + after + chain[item + 1])
        return Run(
            crew, tuple(cuts), tuple(warm_up), tuple(recompute), micro_batches, tuple(begun), tuple(ends),
            whole + max(steps),
        )  # fmt: skip

    def deepened(self, crew: Crew, cuts: tuple[int, ...], micro_batches: int, sum_s: Floats) -> Run:
        """The best of several depths: 1F1B's own, and such that gradients are back in time."""
        count = len(crew)
        shallow = tuple(min(count - 1 - place, micro_batches - 1) for place in range(count))
        tried = {shallow: self.evaluate(crew, cuts, shallow, micro_batches, sum_s)}
        for allowance, recompute in itertools.product(ALLOWANCES, (False, True)):
            warm_up = self._paced(crew, cuts, micro_batches, allowance, recompute)
            if warm_up not in tried:
                tried[warm_up] = self.evaluate(crew, cuts, warm_up, micro_batches, sum_s)
        return min(tried.values(), key=lambda run: run.step_s)

    def _paced(
        self, crew: Crew, cuts: tuple[int, ...], micro_batches: int, allowance: float, recompute: bool
    ) -> tuple[int, ...]:
        """Depths at which gradients are back in time at the pace of the slowest stage, as far as memory goes, without
        repeating forwards for it or with."""
        compute = []
        for place, index in enumerate(crew):
            rank, first, last = self.rank(index), cuts[place], cuts[place + 1]
            compute.append(rank.whole[last] - rank.whole[first] + sum(rank.overhead))
            if _repeats(rank, first, last, min(len(crew) - place, micro_batches)):
                compute[-1] += rank.repeated[last] - rank.repeated[first]
        hops = [
            self.way_s(a, b, cut) + self.way_s(b, a, cut)
            for (a, b), cut in zip(itertools.pairwise(crew), cuts[1:], strict=False)
        ]
        wanted = paced_together(compute, hops, period_s(compute, hops), allowance)
        warm_up: list[int] = []
        for place, index in enumerate(crew):
            rank, first, n = self.rank(index), cuts[place], cuts[place + 1] - cuts[place] - 1
            depth = min([wanted[place], micro_batches - 1, *warm_up[-1:]])
            room = rank.plain[first][n] if n < len(rank.plain[first]) else -1.0
            if recompute or room < 1:
                room = max(room, rank.again[first][n] if n < len(rank.again[first]) else -1.0)
            warm_up.append(int(max(0, min(depth, room - 1))))
        return tuple(warm_up)

    def polished(self, run: Run, sum_s: Floats) -> Run:
        """Cuts moved by one item, depths changed, as long as that helps; each place is looked at again after the others."""
        tried = place = 0
        while tried < len(run.crew) and self.left > 0:
            tried, place = tried + 1, (place + 1) % len(run.crew)
            for cuts, warm_up in self.near(run, place):
                changed = self.evaluate(run.crew, cuts, warm_up, run.micro_batches, sum_s)
                if changed.step_s < run.step_s * (1 - WORTHWHILE):
                    run, tried = changed, 0
                    break
        return run

    def near(self, run: Run, place: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """(cuts, depths) one change away, at one stage."""
        if place > 0:
            for by in (-1, 1):
                cut = run.cuts[place] + by
                if run.cuts[place - 1] < cut < run.cuts[place + 1]:
                    yield (*run.cuts[:place], cut, *run.cuts[place + 1 :]), run.warm_up
        if place == len(run.crew) - 1:
            return
        depth, rank, first = run.warm_up[place], self.rank(run.crew[place]), run.cuts[place]
        n = run.cuts[place + 1] - first - 1
        wanted = {depth - 1, depth + 1, depth + 3}
        if run.recompute[place] and n < len(rank.plain[first]):
            wanted.add(int(rank.plain[first][n]) - 1)
        for other in sorted(wanted - {depth}):
            if 0 <= other < run.micro_batches:
                # No stage may be deeper than one before it.
                before = tuple(max(d, other) for d in run.warm_up[:place])
                after = tuple(min(d, other) for d in run.warm_up[place + 1 :])
                yield run.cuts, (*before, other, *after)


def _repeats(rank: _Rank, first: int, last: int, flying: int) -> bool | None:
    """Whether a stage must repeat its forwards; None: it does not fit."""
    n = last - first - 1
    if n >= len(rank.plain[first]):
        return None
    return False if flying <= rank.plain[first][n] else True if flying <= rank.again[first][n] else None


def _of_others(run: Run, crew: Crew) -> Run:
    """The same pipeline of equal ranks."""
    return Run(
        crew[: len(run.crew)] if run.cuts else crew, run.cuts, run.warm_up, run.recompute, run.micro_batches, run.begun_s,
        run.end_s, run.step_s,
    )  # fmt: skip
