"""Changes of pipelines that annealing draws from: of everything a plan decides, each by a little.

Every change returns new lines, or None where it cannot be made; what memory makes of it is seen later.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

from hetero_mpi.planning.annealing.costs import Costs
from hetero_mpi.planning.annealing.estimate import Estimate
from hetero_mpi.planning.annealing.lines import Line, Lines

ALLOWANCES = (0.0, 0.1, 0.25, 0.5, 0.9)
"""Shares of a period by which gradients may come back early, for guessing depths."""
DEEPER = (-2, -1, 1, 2)
AMOUNTS = (1, 2, 4)
"""Sequences that go from one pipeline to another at once."""
AT_ONCE = (1, 1, 1, 2, 3)
"""How many changes are made before the result is looked at: one of these."""
SLOPES = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
"""Micro-batches that a stage is deeper than the next, for guessing depths."""
DEPTHS = (1.0, 1.2, 1.5, 2.0)
"""For cutting anew: see ``Estimate.placed``."""
CUT_ANEW = 0.5
"""How often a pipeline whose ranks have changed is cut anew."""
TOGETHER = 0.5
"""How often a change is made in all pipelines of as many stages, which then stay alike."""

What = Literal["all", "ranks", "cuts"]
"""What is changed: everything; which ranks stand in which order, and shares, for ``Estimate`` to find cuts and depths; or cuts and
depths."""


class Changes:
    """``costs``, ``estimates``: by micro-batch size. ``draw`` decides everything."""

    def __init__(
        self,
        costs: Mapping[int, Costs],
        estimates: Mapping[int, Estimate],
        draw: random.Random,
        of: What = "all",
    ) -> None:
        self.estimates, self.costs, self.draw, self.ranks_only = estimates, costs, draw, of == "ranks"
        self.sizes = sorted(costs)
        first = costs[self.sizes[0]]
        self.request, self.ranks, self.host = first.cluster.request, range(first.count), first.host
        self.splits = first.splits
        self.may_toggle = self.request.schedule == "auto" and len(set(self.request.split_choices)) > 1
        kinds: list[tuple[int, Callable[[Lines, int], Lines | None]]] = []
        if of != "cuts":
            kinds += [
                (12, self._stage_moved),
                (6, self._run_moved),
                (10, self._rank_exchanged),
                (10, self._stage_added_or_dropped),
                (10, self._share_moved),
                (3, self._resized),
            ]
        if of == "all":
            kinds += [(8, self._cut_anew), (3 if self.may_toggle else 0, self._split)]
        if of != "ranks":
            kinds += [
                (30, self._layer_moved),
                (15, self._deeper_or_shallower),
                (7, self._paced_anew),
                (4, self._sloped),
            ]
        weights, self._kinds = zip(*kinds, strict=True)
        self._weights = list(itertools.accumulate(weights))

    def changed(self, lines: Lines) -> Lines:
        for _ in range(self.draw.choice(AT_ONCE)):
            (kind,) = self.draw.choices(self._kinds, cum_weights=self._weights)
            lines = kind(lines, self.draw.randrange(len(lines))) or lines
        return lines

    def _paced(self, line: Line) -> Line:
        if self.ranks_only:
            return line
        return self.costs[line.micro_batch].paced(line, self.draw.choice(ALLOWANCES), self.draw.random() < 0.5)

    def _formed(self, line: Line, ranks: tuple[int, ...], counts: tuple[int, ...]) -> Line:
        """``line`` of these ranks, with these layers or cut anew."""
        line = line._replace(ranks=ranks, counts=counts)
        if self.ranks_only:
            return line
        cut = self._cut(line) if self.draw.random() < CUT_ANEW else None
        return cut or self._paced(line)

    def _cut(self, line: Line) -> Line | None:
        found = self.estimates[line.micro_batch].cut(line, self.draw.choice(DEPTHS))
        return None if found is None else self._paced(found[1])

    def _cut_anew(self, lines: Lines, index: int) -> Lines | None:
        cut = self._cut(lines[index])
        if cut is None or len(cut.ranks) < len(lines[index].ranks):
            return None if cut is None else _with(lines, {index: cut})
        alike = {i: self._paced(lines[i]._replace(counts=cut.counts)) for i in self._alike(lines, index)}
        return _with(lines, alike | {index: cut})

    def _alike(self, lines: Lines, index: int) -> list[int]:
        """The pipeline alone, or all of as many stages."""
        count = len(lines[index].ranks)
        if len(lines) < 2 or self.draw.random() >= TOGETHER:
            return [index]
        return [i for i, line in enumerate(lines) if len(line.ranks) == count]

    def _layer_moved(self, lines: Lines, index: int) -> Lines | None:
        """From one stage to any other."""
        line = lines[index]
        if len(line.ranks) < 2:
            return None
        giving, taking = self.draw.sample(range(len(line.ranks)), 2)
        anew = self.draw.random() < 0.5

        def moved(one: Line) -> Line:
            if one.counts[giving] < 2:
                return one
            counts = list(one.counts)
            counts[giving], counts[taking] = counts[giving] - 1, counts[taking] + 1
            one = one._replace(counts=tuple(counts))
            return self._paced(one) if anew else one

        return _with(lines, {i: moved(lines[i]) for i in self._alike(lines, index)})

    def _stage_moved(self, lines: Lines, index: int) -> Lines | None:
        """A rank with all it holds, to another place of its pipeline."""
        places = list(range(len(lines[index].ranks)))
        place = places.pop(self.draw.randrange(len(places)))
        places.insert(self.draw.randrange(len(places) + 1), place)
        return self._placed(lines, index, places)

    def _run_moved(self, lines: Lines, index: int) -> Lines | None:
        """A host's neighbouring stages with all they hold, to another place of the pipeline, also in reverse."""
        ranks = lines[index].ranks
        first = last = self.draw.randrange(len(ranks))
        while first > 0 and self.host[ranks[first - 1]] == self.host[ranks[first]]:
            first -= 1
        while last + 1 < len(ranks) and self.host[ranks[last + 1]] == self.host[ranks[last]]:
            last += 1
        run = list(range(first, last + 1))
        rest = [*range(first), *range(last + 1, len(ranks))]
        at = self.draw.randrange(len(rest) + 1)
        return self._placed(lines, index, [*rest[:at], *(run[::-1] if self.draw.random() < 0.5 else run), *rest[at:]])

    def _placed(self, lines: Lines, index: int, places: Sequence[int]) -> Lines:
        """Stages in this order."""

        def moved(line: Line) -> Line:
            return self._formed(line, *(tuple(values[p] for p in places) for values in (line.ranks, line.counts)))

        return _with(lines, {i: moved(lines[i]) for i in self._alike(lines, index)})

    def _rank_exchanged(self, lines: Lines, index: int) -> Lines | None:
        """For an idle one, or for one of any pipeline."""
        line, idle = lines[index], self._idle(lines)
        place = self.draw.randrange(len(line.ranks))
        if idle and self.draw.random() < 0.3:
            return _with(
                lines, {index: self._formed(line, _at(line.ranks, place, self.draw.choice(idle)), line.counts)}
            )
        other = self.draw.randrange(len(lines))
        there = self.draw.randrange(len(lines[other].ranks))
        a, b = line.ranks[place], lines[other].ranks[there]
        if other == index:
            return _with(lines, {index: self._formed(line, _at(_at(line.ranks, place, b), there, a), line.counts)})
        mine, others = _at(line.ranks, place, b), _at(lines[other].ranks, there, a)
        changed = self._formed(lines[other], others, lines[other].counts)
        return _with(lines, {index: self._formed(line, mine, line.counts), other: changed})

    def _stage_added_or_dropped(self, lines: Lines, index: int) -> Lines | None:
        """An idle rank is put to work; or one is taken off, and perhaps put to work elsewhere."""
        idle = self._idle(lines)
        if idle and self.draw.random() < 0.5:
            return self._added(lines, index, self.draw.choice(idle))
        line = lines[index]
        if len(line.ranks) < 2:
            return None
        place = self.draw.randrange(len(line.ranks))
        counts = [*line.counts[:place], *line.counts[place + 1 :]]
        if not self.ranks_only:
            for _ in range(line.counts[place]):
                counts[self.draw.randrange(len(counts))] += 1
        ranks = (*line.ranks[:place], *line.ranks[place + 1 :])
        lines = _with(lines, {index: self._formed(line, ranks, tuple(counts))})
        others = [i for i in range(len(lines)) if i != index]
        if others and self.draw.random() < 0.8:
            return self._added(lines, self.draw.choice(others), line.ranks[place])
        return lines

    def _added(self, lines: Lines, index: int, rank: int) -> Lines | None:
        """The rank takes some layers off a stage, at either end of it."""
        line = lines[index]
        place, before = self.draw.randrange(len(line.ranks)), self.draw.random() < 0.5
        count, at = line.counts[place], place + (not before)
        ranks = (*line.ranks[:at], rank, *line.ranks[at:])
        if self.ranks_only:
            return _with(lines, {index: line._replace(ranks=ranks, counts=(*line.counts, 1))})
        if count < 2:
            return None
        taken = self.draw.randrange(1, count)
        pair = (taken, count - taken) if before else (count - taken, taken)
        counts = (*line.counts[:place], *pair, *line.counts[place + 1 :])
        return _with(lines, {index: self._formed(line, ranks, counts)})

    def _deeper_or_shallower(self, lines: Lines, index: int) -> Lines | None:
        """At one stage; none before it stays shallower, none behind it deeper."""
        place, by = self.draw.randrange(len(lines[index].ranks)), self.draw.choice(DEEPER)

        if self.request.schedule != "auto":
            return None
        return _with(lines, {i: deeper(lines[i], place, by) for i in self._alike(lines, index)})

    def _sloped(self, lines: Lines, index: int) -> Lines | None:
        """Every stage as many micro-batches deeper than the next."""
        slope = self.draw.choice(SLOPES)

        def changed(line: Line) -> Line:
            behind = range(len(line.ranks) - 1, -1, -1)
            return line._replace(flying=tuple(min(1 + math.ceil(slope * k), line.micro_batches) for k in behind))

        if self.request.schedule != "auto":
            return None
        return _with(lines, {i: changed(lines[i]) for i in self._alike(lines, index)})

    def _split(self, lines: Lines, index: int) -> Lines | None:
        """Backward in two parts, or in one."""
        split = not lines[index].split
        chosen = self._alike(lines, index)
        if split and not all(self.splits[rank] and len(lines[i].ranks) > 1 for i in chosen for rank in lines[i].ranks):
            return None
        return _with(lines, {i: lines[i]._replace(split=split) for i in chosen})

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
        if not fitting:
            return None
        changed = line._replace(sequences=sequences, micro_batch=fitting[-1])
        return self._paced(changed) if self.request.schedule != "auto" else changed

    def _resized(self, lines: Lines, index: int) -> Lines | None:
        line, size = lines[index], self.draw.choice(self.sizes)
        if line.sequences % size:
            return None
        return _with(lines, {index: self._paced(line._replace(micro_batch=size))})

    def _paced_anew(self, lines: Lines, index: int) -> Lines | None:
        return _with(lines, {index: self._paced(lines[index])})

    def _idle(self, lines: Lines) -> list[int]:
        busy = {rank for line in lines for rank in line.ranks}
        return [rank for rank in self.ranks if rank not in busy]


def nearest(lines: Lines, depths: bool) -> Iterator[Lines]:
    """One small change away: a layer at a cut, one micro-batch deeper or shallower (``depths``), or in another pipeline."""
    for index, line in enumerate(lines):
        for place, by in itertools.product(range(1, len(line.counts)), (-1, 1)):
            counts = list(line.counts)
            counts[place - 1], counts[place] = counts[place - 1] + by, counts[place] - by
            if min(counts) > 0:
                yield _with(lines, {index: line._replace(counts=tuple(counts))})
        for place, by in itertools.product(range(len(line.counts) if depths else 0), (-1, 1)):
            yield _with(lines, {index: deeper(line, place, by)})
        for other, taking in enumerate(lines):
            if other != index and line.sequences > line.micro_batch == taking.micro_batch:
                shares = line.sequences - line.micro_batch, taking.sequences + line.micro_batch
                given = (one._replace(sequences=share) for one, share in zip((line, taking), shares, strict=True))
                yield _with(lines, dict(zip((index, other), given, strict=True)))


def with_rank(lines: Lines, rank: int) -> Iterator[Lines]:
    """``rank`` as a stage of one layer, at either side of any other, which gives it up."""
    for index, line in enumerate(lines):
        for place, at in ((place, place + behind) for place in range(len(line.ranks)) for behind in (0, 1)):
            if line.counts[place] > 1:
                own, depth = _at(line.counts, place, line.counts[place] - 1), line.flying[place]
                values = (line.ranks, rank), (own, 1), (line.flying, depth)
                ranks, counts, flying = ((*now[:at], new, *now[at:]) for now, new in values)
                yield _with(lines, {index: line._replace(ranks=ranks, counts=counts, flying=flying)})


def deeper(line: Line, place: int, by: int) -> Line:
    """By so many micro-batches at one stage; none before it stays shallower, none behind it deeper."""
    depth = min(max(1, line.flying[place] + by), line.micro_batches)
    flying = tuple(
        max(now, depth) if i <= place and by > 0 else min(now, depth) if i >= place and by < 0 else now
        for i, now in enumerate(line.flying)
    )
    return line._replace(flying=flying)


def _with(lines: Lines, other: Mapping[int, Line]) -> Lines:
    return tuple(other.get(index, line) for index, line in enumerate(lines))


def _at(ranks: tuple[int, ...], place: int, rank: int) -> tuple[int, ...]:
    return (*ranks[:place], rank, *ranks[place + 1 :])
