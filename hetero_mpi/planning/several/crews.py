"""Which ranks form which pipelines, when pipelines need not be alike: local search on ``pace.Pace``'s estimate.

For a step time T a little under what the crews at hand take, ranks are exchanged between crews, moved, put to work or taken off,
whatever brings most micro-batches done by T; when the batch is done, T is lowered. All single changes of all crews are looked at
together: what a crew does without its i-th rank, with another rank in its place, with one more at any place. A move or an
exchange between two crews is the sum of two such changes.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from hetero_mpi.planning.several.fleet import Floats
from hetero_mpi.planning.several.pace import Crew, Pace, Sums

STEP = 0.985
"""The time to be reached next, as a share of what the crews at hand take."""
CLOSE = 0.002
"""Step times are found within this share."""
TOGETHER = 512
"""Crews that are estimated in one go."""
GAIN = 0.02
"""Micro-batches that a change must bring."""


@dataclass
class Roster:
    """Crews and whoever is in none of them."""

    crews: list[Crew]
    idle: list[int]
    step_s: float
    """Estimated; infinite: the batch cannot be done."""


@dataclass
class _Values:
    """What crews could do by the time at hand if one thing were changed: micro-batches, by crew, place and kind of rank."""

    now: Floats
    without: dict[tuple[int, int], float] = field(default_factory=dict)
    instead: dict[tuple[int, int, int], float] = field(default_factory=dict)
    more: dict[tuple[int, int], tuple[float, int]] = field(default_factory=dict)
    """(crew, kind) -> (value, best place, negated)"""


class _Do(enum.IntEnum):
    MOVE = 0
    """The rank at ``place`` of ``crew`` goes to crew ``other``."""
    EXCHANGE = 1
    """It changes places with the rank at ``there`` of crew ``other``."""
    JOIN = 2
    """An idle rank of kind ``there`` joins ``crew``."""
    RELIEVE = 3
    """An idle rank of kind ``there`` takes its place."""
    LEAVE = 4


class _Change(NamedTuple):
    loss: float
    """Micro-batches, negative where it is a gain: changes are sorted by it."""
    do: _Do
    crew: int
    place: int = 0
    other: int = -1
    there: int = 0


class Crews:
    """Local search over crews of one fleet. ``left``: stages of crews that may yet be looked at."""

    def __init__(self, pace: Pace, effort: int) -> None:
        self.pace, self.left = pace, effort
        self.kind, self.first = kinds_of(pace)

    def of(self, crews: Sequence[Crew]) -> Roster:
        used = {rank for crew in crews for rank in crew}
        idle = [rank for rank in range(len(self.pace.fleet.devices)) if rank not in used]
        return Roster(list(crews), idle, self.step_s(crews))

    def step_s(self, crews: Sequence[Crew], hint_s: float | None = None) -> float:
        """The least time by which ``crews`` can do the batch, within ``CLOSE``."""
        batch, sums = self.pace.batch, self.pace.sums_s(crews)
        distinct = list(dict.fromkeys(crews))
        fluid = float(self.pace.fleet.request.global_batch / self.pace.fleet.speed.sum())
        low, high, guess = 0.0, hint_s or 1.3 * fluid, None
        for _ in range(60):
            done = self.pace.counts(distinct, high, sums, guess)
            if np.floor(done).sum() >= batch:
                break
            low, high, guess = high, high * 1.5, np.maximum(done, 1.0)
        else:
            return float("inf")
        while high - low > CLOSE * high:
            middle = (low + high) / 2 if low else high / 1.3
            done = self.pace.counts(distinct, middle, sums, guess)
            guess = np.maximum(done, 1.0)
            low, high = (low, middle) if np.floor(done).sum() >= batch else (middle, high)
        return high

    def improved(self, start: Roster) -> Roster:
        """``start`` or better crews."""
        best = start
        crews, idle = list(start.crews), list(start.idle)
        while self.left > 0:
            target_s = best.step_s * STEP
            reached = self._reach(crews, idle, target_s)
            if reached is None:
                break
            crews, idle = reached
            seconds = self.step_s(crews, target_s)
            if seconds >= best.step_s:
                break
            best = Roster(list(crews), list(idle), seconds)
        return best

    def _reach(self, crews: list[Crew], idle: list[int], step_s: float) -> tuple[list[Crew], list[int]] | None:
        """Crews that do the batch by ``step_s``, or come nearer to it when the effort is spent; None: none found."""
        crews, idle = list(crews), list(idle)
        known: dict[tuple[int, ...], float] = {}
        last: Sums | None = None
        while self.left > 0:
            sums = self.pace.sums_s(crews)
            if sums != last:
                last = sums
                known.clear()
            values = self._values(crews, step_s, known, sums)
            if np.floor(values.now).sum() >= self.pace.batch:
                return crews, idle
            if not self._apply(crews, idle, values):
                return None
        return crews, idle

    def _signature(self, crew: Crew) -> tuple[int, ...]:
        return tuple(self.kind[rank] for rank in crew)

    def _evaluate(self, wanted: Sequence[Crew], step_s: float, known: dict[tuple[int, ...], float], sums: Sums) -> None:
        new: dict[tuple[int, ...], Crew] = {}
        for crew in wanted:
            signature = self._signature(crew)
            if signature not in known and signature not in new:
                new[signature] = crew
        self.left -= sum(map(len, new))
        # Crews of like length together: the table is as wide as the longest.
        order = sorted(new, key=len)
        for begin in range(0, len(order), TOGETHER):
            part = order[begin : begin + TOGETHER]
            values = self.pace.counts([new[signature] for signature in part], step_s, sums)
            known.update(zip(part, values.tolist(), strict=True))

    def _values(self, crews: list[Crew], step_s: float, known: dict[tuple[int, ...], float], sums: Sums) -> _Values:
        """Every crew with one rank fewer, another one, or one more."""
        wanted: list[Crew] = list(crews)
        for crew in {self._signature(c): c for c in crews}.values():
            for place in range(len(crew)):
                wanted += [_instead(crew, place)] if len(crew) > 1 else []
                wanted += [_instead(crew, place, rank) for rank in self.first]
            wanted += [_before(crew, place, rank) for place in range(len(crew) + 1) for rank in self.first]
        self._evaluate(wanted, step_s, known, sums)
        values = _Values(np.array([known[self._signature(crew)] for crew in crews]))
        for c, crew in enumerate(crews):
            own = self._signature(crew)
            for place in range(len(own)):
                values.without[c, place] = known[_instead(own, place)] if len(own) > 1 else 0.0
                for kind in range(len(self.first)):
                    values.instead[c, place, kind] = known[_instead(own, place, kind)]
            for kind in range(len(self.first)):
                values.more[c, kind] = max((known[_before(own, at, kind)], -at) for at in range(len(own) + 1))
        return values

    def _apply(self, crews: list[Crew], idle: list[int], values: _Values) -> bool:
        """The best changes, as many as touch different crews; was there any?"""
        touched: set[int] = set()
        for change in sorted(self._changes(crews, idle, values)):
            c, d = change.crew, change.other
            if c in touched or d in touched:
                continue
            rank = crews[c][change.place]
            if change.do in (_Do.JOIN, _Do.RELIEVE):
                found = next((r for r in idle if self.kind[r] == change.there), None)
                if found is None:
                    continue
                idle.remove(found)
                joining = found
            if change.do is _Do.MOVE:
                crews[c] = _instead(crews[c], change.place)
                crews[d] = _before(crews[d], -values.more[d, self.kind[rank]][1], rank)
            elif change.do is _Do.EXCHANGE:
                crews[c] = _instead(crews[c], change.place, crews[d][change.there])
                crews[d] = _instead(crews[d], change.there, rank)
            elif change.do is _Do.JOIN:
                crews[c] = _before(crews[c], -values.more[c, change.there][1], joining)
            else:
                idle.append(rank)
                crews[c] = _instead(crews[c], change.place, *([joining] if change.do is _Do.RELIEVE else []))
            touched |= {c, d} - {-1}
        crews[:] = [crew for crew in crews if crew]
        idle.sort()
        return bool(touched)

    def _changes(self, crews: list[Crew], idle: list[int], values: _Values) -> list[_Change]:
        """All single changes that gain something."""
        now, found = values.now.tolist(), []
        waiting = sorted({self.kind[rank] for rank in idle})
        places = [(c, i, self.kind[rank]) for c, crew in enumerate(crews) for i, rank in enumerate(crew)]
        for n, (c, i, kind) in enumerate(places):
            lost = now[c] - values.without[c, i]
            found.append(_Change(lost, _Do.LEAVE, c, i))
            for d in range(len(crews)):
                if d != c:
                    found.append(_Change(lost + now[d] - values.more[d, kind][0], _Do.MOVE, c, i, d))
            for other in waiting:
                found.append(_Change(now[c] - values.instead[c, i, other], _Do.RELIEVE, c, i, -1, other))
            for d, j, other in places[n + 1 :]:
                if d != c and other != kind:
                    both = values.instead[c, i, other] + values.instead[d, j, kind]
                    found.append(_Change(now[c] + now[d] - both, _Do.EXCHANGE, c, i, d, j))
        for c in range(len(crews)):
            for other in waiting:
                found.append(_Change(now[c] - values.more[c, other][0], _Do.JOIN, c, 0, -1, other))
        return [one for one in found if one.loss < -GAIN]


def _instead(crew: tuple[int, ...], place: int, *others: int) -> tuple[int, ...]:
    return (*crew[:place], *others, *crew[place + 1 :])


def _before(crew: tuple[int, ...], place: int, other: int) -> tuple[int, ...]:
    return (*crew[:place], other, *crew[place:])


def kinds_of(pace: Pace) -> tuple[list[int], list[int]]:
    """(kind of every rank, first rank of every kind): like devices on one host are of one kind."""
    fleet = pace.fleet
    known: dict[tuple[object, ...], int] = {}
    kind = []
    for rank in range(len(fleet.devices)):
        key = (
            int(fleet.host[rank]),
            fleet.forward_s[rank].tobytes(),
            fleet.backward_s[rank].tobytes(),
            float(fleet.usable[rank]),
            float(fleet.ratio[rank]),
            float(fleet.step_per_parameter_s[rank]),
        )
        kind.append(known.setdefault(key, len(known)))
    return kind, [kind.index(k) for k in range(len(known))]
