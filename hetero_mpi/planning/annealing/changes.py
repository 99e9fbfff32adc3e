"""Changes of pipelines that annealing draws from: of everything a plan decides, each by a little.

Every change returns new lines, or None where it cannot be made; what memory makes of it is seen later.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from hetero_mpi.planning.annealing.lines import Costs, Line

ALLOWANCES = (0.0, 0.1, 0.25, 0.5, 0.9)
"""Shares of a period by which gradients may come back early, for guessing depths."""
DEEPER = (-2, -1, 1, 2)
AMOUNTS = (1, 2, 4)
"""Sequences that go from one pipeline to another at once."""
AT_ONCE = (1, 1, 1, 2, 3)
"""How many changes are made before the result is looked at: one of these."""

Lines = tuple[Line, ...]


class Changes:
    """``costs``: by micro-batch size. ``draw`` decides everything."""

    def __init__(self, costs: Mapping[int, Costs], draw: random.Random) -> None:
        self.costs, self.draw = costs, draw
        self.sizes = sorted(costs)
        self.ranks = range(len(next(iter(costs.values())).fleet.devices))
        kinds: list[tuple[int, Callable[[Lines, int], Lines | None]]] = [
            (30, self._item_moved),
            (15, self._stage_moved),
            (10, self._rank_exchanged),
            (10, self._stage_added_or_dropped),
            (15, self._deeper_or_shallower),
            (10, self._share_moved),
            (3, self._resized),
            (7, self._paced_anew),
        ]
        self._weights, self._kinds = zip(*kinds, strict=True)

    def changed(self, lines: Lines) -> Lines:
        for _ in range(self.draw.choice(AT_ONCE)):
            (kind,) = self.draw.choices(self._kinds, self._weights)
            lines = kind(lines, self.draw.randrange(len(lines))) or lines
        return lines

    def _paced(self, line: Line) -> Line:
        return self.costs[line.micro_batch].paced(line, self.draw.choice(ALLOWANCES))

    def _item_moved(self, lines: Lines, index: int) -> Lines | None:
        """From one stage to any other; now and then in all pipelines of as many stages, whose sums then go on together."""
        line = lines[index]
        if len(line.ranks) < 2:
            return None
        giving, taking = self.draw.sample(range(len(line.ranks)), 2)
        together, anew = self.draw.random() < 0.5, self.draw.random() < 0.5

        def moved(one: Line) -> Line:
            if one.counts[giving] < 2:
                return one
            counts = list(one.counts)
            counts[giving], counts[taking] = counts[giving] - 1, counts[taking] + 1
            one = replace(one, counts=tuple(counts))
            return self._paced(one) if anew else one

        alike = [i == index or (together and len(one.ranks) == len(line.ranks)) for i, one in enumerate(lines)]
        return tuple(moved(one) if chosen else one for one, chosen in zip(lines, alike, strict=True))

    def _stage_moved(self, lines: Lines, index: int) -> Lines | None:
        """A rank with all it holds, to another place of its pipeline."""
        line = lines[index]
        places = list(range(len(line.ranks)))
        place = places.pop(self.draw.randrange(len(places)))
        places.insert(self.draw.randrange(len(places) + 1), place)
        moved = replace(line, ranks=tuple(line.ranks[p] for p in places), counts=tuple(line.counts[p] for p in places))
        return _with(lines, {index: self._paced(moved)})

    def _rank_exchanged(self, lines: Lines, index: int) -> Lines | None:
        """For an idle one, or for one of any pipeline; each takes over what the other holds."""
        line, idle = lines[index], self._idle(lines)
        place = self.draw.randrange(len(line.ranks))
        if idle and self.draw.random() < 0.3:
            return _with(lines, {index: self._paced(_at(line, place, self.draw.choice(idle)))})
        other = self.draw.randrange(len(lines))
        there = self.draw.randrange(len(lines[other].ranks))
        a, b = line.ranks[place], lines[other].ranks[there]
        if other == index:
            return _with(lines, {index: self._paced(_at(_at(line, place, b), there, a))})
        return _with(lines, {index: self._paced(_at(line, place, b)), other: self._paced(_at(lines[other], there, a))})

    def _stage_added_or_dropped(self, lines: Lines, index: int) -> Lines | None:
        """An idle rank is put to work; or one is taken off, and perhaps put to work elsewhere."""
        idle = self._idle(lines)
        if idle and self.draw.random() < 0.5:
            return self._added(lines, index, self.draw.choice(idle))
        line = lines[index]
        if len(line.ranks) < 2:
            return None
        place = self.draw.randrange(len(line.ranks))
        counts = list(_without(line.counts, place))
        for _ in range(line.counts[place]):
            counts[self.draw.randrange(len(counts))] += 1
        dropped = replace(
            line, ranks=_without(line.ranks, place), counts=tuple(counts), flying=_without(line.flying, place)
        )
        lines = _with(lines, {index: self._paced(dropped)})
        others = [i for i in range(len(lines)) if i != index]
        if others and self.draw.random() < 0.8:
            return self._added(lines, self.draw.choice(others), line.ranks[place])
        return lines

    def _added(self, lines: Lines, index: int, rank: int) -> Lines | None:
        """The rank takes some items off a stage, at either end of it."""
        line = lines[index]
        place = self.draw.randrange(len(line.ranks))
        count = line.counts[place]
        if count < 2:
            return None
        taken = self.draw.randrange(1, count)
        before = self.draw.random() < 0.5
        pair = ((rank, taken), (line.ranks[place], count - taken))
        ranks, counts = zip(*(pair if before else pair[::-1]), strict=True)
        grown = Line(
            (*line.ranks[:place], *ranks, *line.ranks[place + 1 :]),
            (*line.counts[:place], *counts, *line.counts[place + 1 :]),
            (),
            line.micro_batch,
            line.sequences,
        )
        return _with(lines, {index: self._paced(grown)})

    def _deeper_or_shallower(self, lines: Lines, index: int) -> Lines | None:
        """At one stage; none before it stays shallower, none behind it deeper."""
        line = lines[index]
        place, by = self.draw.randrange(len(line.ranks)), self.draw.choice(DEEPER)
        depth = line.flying[place] + by
        if not 1 <= depth <= line.micro_batches:
            return None
        flying = tuple(
            max(now, depth) if i <= place and by > 0 else min(now, depth) if i >= place and by < 0 else now
            for i, now in enumerate(line.flying)
        )
        return _with(lines, {index: replace(line, flying=flying)})

    def _share_moved(self, lines: Lines, index: int) -> Lines | None:
        others = [i for i in range(len(lines)) if i != index]
        amount = self.draw.choice(AMOUNTS)
        if not others or lines[index].sequences <= amount:
            return None
        other = self.draw.choice(others)
        giving, taking = self._with_share(lines[index], -amount), self._with_share(lines[other], amount)
        return _with(lines, {index: giving, other: taking}) if giving and taking else None

    def _with_share(self, line: Line, by: int) -> Line | None:
        """In micro-batches as large as they were, or the next smaller ones that divide it."""
        sequences = line.sequences + by
        fitting = [size for size in self.sizes if size <= line.micro_batch and sequences % size == 0]
        return replace(line, sequences=sequences, micro_batch=fitting[-1]) if fitting else None

    def _resized(self, lines: Lines, index: int) -> Lines | None:
        line, size = lines[index], self.draw.choice(self.sizes)
        if line.sequences % size:
            return None
        return _with(lines, {index: self._paced(replace(line, micro_batch=size))})

    def _paced_anew(self, lines: Lines, index: int) -> Lines | None:
        return _with(lines, {index: self._paced(lines[index])})

    def _idle(self, lines: Lines) -> list[int]:
        busy = {rank for line in lines for rank in line.ranks}
        return [rank for rank in self.ranks if rank not in busy]


def _with(lines: Lines, other: Mapping[int, Line]) -> Lines:
    return tuple(other.get(index, line) for index, line in enumerate(lines))


def _at(line: Line, place: int, rank: int) -> Line:
    return replace(line, ranks=(*line.ranks[:place], rank, *line.ranks[place + 1 :]))


def _without(values: Sequence[int], place: int) -> tuple[int, ...]:
    return (*values[:place], *values[place + 1 :])
