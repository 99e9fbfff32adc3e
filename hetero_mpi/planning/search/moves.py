"""Local moves: small changes that return new pipelines, or None if impossible. The caller checks memory."""

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping

from hetero_mpi.planning.search.costs import Costs
from hetero_mpi.planning.search.pipelines import Line, Lines

ALLOWANCES = (0.0, 0.1, 0.25, 0.5, 0.9)
"""Fractions of a period by which gradients may arrive early."""
DEPTH_CHANGES = (-4, -2, -1, 1, 2, 4, 8)
MOVED_SEQUENCES = (1, 2, 4)
"""Choices of the number of sequences moved between pipelines at once."""
MOVES_AT_ONCE = (1, 1, 1, 2, 3)
"""Choices of the number of moves applied together."""
DEPTH_SLOPES = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
"""Choices of the depth difference between neighbouring stages."""
FALLING_RATIO = 0.5
"""Probability that other depths are changed so that all of them differ."""
JOINT_MOVE_RATIO = 0.5
"""Probability of applying a move to all pipelines with the same number of stages."""


class Moves:
    """Random moves. ``costs`` is keyed by micro-batch size; ``ranks=False`` allows only changes of layer counts and depths."""

    def __init__(self, costs: Mapping[int, Costs], draw: random.Random, ranks: bool = True) -> None:
        self.costs, self.draw, self.sizes = costs, draw, sorted(costs)
        first = costs[self.sizes[0]]
        self.count, self.splits, request = first.count, first.splits, first.request
        self.automatic = request.schedule == "auto"
        kinds: list[tuple[int, Callable[[Lines, int], Lines | None]]] = [(30, self._layer), (7, self._depths)]
        if self.automatic:
            kinds += [(15, self._depth), (4, self._slope)]
        if ranks:
            kinds += [(12, self._place), (10, self._exchange), (10, self._rank), (10, self._share), (3, self._size)]
            kinds += [(3, self._split)] if self.automatic and len(set(request.split_choices)) > 1 else []
        weights, self._kinds = zip(*kinds, strict=True)
        self._weights = list(itertools.accumulate(weights))

    def changed(self, lines: Lines) -> Lines:
        for _ in range(self.draw.choice(MOVES_AT_ONCE)):
            (kind,) = self.draw.choices(self._kinds, cum_weights=self._weights)
            lines = kind(lines, self.draw.randrange(len(lines))) or lines
        return lines

    def _paced(self, line: Line) -> Line:
        return self.costs[line.micro_batch].paced(line, self.draw.choice(ALLOWANCES), self.draw.random() < 0.5)

    def _together(self, lines: Lines, index: int, change: Callable[[Line], Line]) -> Lines:
        """Change one pipeline or, at random, all pipelines with the same number of stages."""
        count, alone = len(lines[index].ranks), len(lines) < 2 or self.draw.random() >= JOINT_MOVE_RATIO
        alike = [index] if alone else [i for i, line in enumerate(lines) if len(line.ranks) == count]
        return _with(lines, {i: change(lines[i]) for i in alike})

    def _layer(self, lines: Lines, index: int) -> Lines | None:
        """Move a layer from one stage to any other."""
        if len(lines[index].ranks) < 2:
            return None
        giving, taking = self.draw.sample(range(len(lines[index].ranks)), 2)
        anew = self.draw.random() < 0.5

        def recut(line: Line) -> Line:
            if line.counts[giving] < 2:
                return line
            counts = list(line.counts)
            counts[giving], counts[taking] = counts[giving] - 1, counts[taking] + 1
            line = line._replace(counts=tuple(counts))
            return self._paced(line) if anew else line

        return self._together(lines, index, recut)

    def _depth(self, lines: Lines, index: int) -> Lines:
        """Change the depth of one stage, and adjust other stages to keep depths monotonic."""
        stage, by = self.draw.randrange(len(lines[index].ranks)), self.draw.choice(DEPTH_CHANGES)
        fall = self.draw.random() < FALLING_RATIO
        return self._together(lines, index, lambda line: deeper(line, stage, by, fall))

    def _slope(self, lines: Lines, index: int) -> Lines:
        """Set a constant depth difference between stages."""
        slope = self.draw.choice(DEPTH_SLOPES)

        def changed(line: Line) -> Line:
            behind = range(len(line.ranks) - 1, -1, -1)
            return line._replace(flying=tuple(min(1 + math.ceil(slope * k), line.micro_batches) for k in behind))

        return self._together(lines, index, changed)

    def _depths(self, lines: Lines, index: int) -> Lines:
        return _with(lines, {index: self._paced(lines[index])})

    def _place(self, lines: Lines, index: int) -> Lines:
        """Move a rank with its layers to another position in its pipeline."""
        places = list(range(len(lines[index].ranks)))
        stage = places.pop(self.draw.randrange(len(places)))
        places.insert(self.draw.randrange(len(places) + 1), stage)

        def relocated(line: Line) -> Line:
            ranks, counts = (tuple(values[p] for p in places) for values in (line.ranks, line.counts))
            return self._paced(line._replace(ranks=ranks, counts=counts))

        return self._together(lines, index, relocated)

    def _exchange(self, lines: Lines, index: int) -> Lines:
        """Swap a rank with an idle rank or with a rank of any pipeline."""
        idle = self._idle(lines)
        mine = self.draw.choice(lines[index].ranks)
        if idle and self.draw.random() < 0.3:
            idle_rank = self.draw.choice(idle)
        else:
            idle_rank = self.draw.choice(lines[self.draw.randrange(len(lines))].ranks)
        turned = {mine: idle_rank, idle_rank: mine}
        changed = {
            i: self._paced(line._replace(ranks=tuple(turned.get(rank, rank) for rank in line.ranks)))
            for i, line in enumerate(lines)
            if mine != idle_rank and (mine in line.ranks or idle_rank in line.ranks)
        }
        return _with(lines, changed)

    def _rank(self, lines: Lines, index: int) -> Lines | None:
        """Add an idle rank, or remove a rank and possibly add it to another pipeline."""
        idle = self._idle(lines)
        if idle and self.draw.random() < 0.5:
            return self._added(lines, index, self.draw.choice(idle))
        line = lines[index]
        if len(line.ranks) < 2:
            return None
        stage = self.draw.randrange(len(line.ranks))
        counts = [*line.counts[:stage], *line.counts[stage + 1 :]]
        for _ in range(line.counts[stage]):
            counts[self.draw.randrange(len(counts))] += 1
        ranks = (*line.ranks[:stage], *line.ranks[stage + 1 :])
        lines = _with(lines, {index: self._paced(line._replace(ranks=ranks, counts=tuple(counts)))})
        other_indices = [i for i in range(len(lines)) if i != index]
        if other_indices and self.draw.random() < 0.8:
            return self._added(lines, self.draw.choice(other_indices), line.ranks[stage])
        return lines

    def _added(self, lines: Lines, index: int, rank: int) -> Lines | None:
        """Insert ``rank`` as a new stage with layers from either end of an existing stage."""
        line = lines[index]
        stage, before = self.draw.randrange(len(line.ranks)), self.draw.random() < 0.5
        count, at = line.counts[stage], stage + (not before)
        if count < 2:
            return None
        layers_taken = self.draw.randrange(1, count)
        pair = (layers_taken, count - layers_taken) if before else (count - layers_taken, layers_taken)
        ranks = (*line.ranks[:at], rank, *line.ranks[at:])
        counts = (*line.counts[:stage], *pair, *line.counts[stage + 1 :])
        return _with(lines, {index: self._paced(line._replace(ranks=ranks, counts=counts))})

    def _split(self, lines: Lines, index: int) -> Lines:
        """Toggle split backward."""
        split = not lines[index].split

        def changed(line: Line) -> Line:
            able = len(line.ranks) > 1 and all(self.splits[rank] for rank in line.ranks)
            return line._replace(split=split and able)

        return self._together(lines, index, changed)

    def _share(self, lines: Lines, index: int) -> Lines | None:
        other_indices = [i for i in range(len(lines)) if i != index]
        amount = self.draw.choice(MOVED_SEQUENCES)
        if not other_indices or lines[index].sequences <= amount:
            return None
        receiver = self.draw.choice(other_indices)
        giving, taking = self._with_share(lines[index], -amount), self._with_share(lines[receiver], amount)
        return _with(lines, {index: giving, receiver: taking}) if giving and taking else None

    def _with_share(self, line: Line, by: int) -> Line | None:
        """Change a pipeline's batch share; its micro-batch size shrinks to the largest one that divides the new share."""
        sequences = line.sequences + by
        fitting = [size for size in self.sizes if size <= line.micro_batch and sequences % size == 0]
        return self._paced(line._replace(sequences=sequences, micro_batch=fitting[-1])) if fitting else None

    def _size(self, lines: Lines, index: int) -> Lines | None:
        line, size = lines[index], self.draw.choice(self.sizes)
        if line.sequences % size:
            return None
        return _with(lines, {index: self._paced(line._replace(micro_batch=size))})

    def _idle(self, lines: Lines) -> list[int]:
        busy = {rank for line in lines for rank in line.ranks}
        return [rank for rank in range(self.count) if rank not in busy]


def nearest(lines: Lines, depths: bool) -> Iterator[Lines]:
    """Yield minimal changes: a layer moved across a cut, one or two depths changed, a micro-batch moved between pipelines."""
    for index, line in enumerate(lines):
        for stage, by in itertools.product(range(1, len(line.counts)), (-1, 1)):
            counts = list(line.counts)
            counts[stage - 1], counts[stage] = counts[stage - 1] + by, counts[stage] - by
            if min(counts) > 0:
                yield _with(lines, {index: line._replace(counts=tuple(counts))})
        for stage, by in itertools.product(range(len(line.counts) if depths else 0), (-1, 1)):
            for changed in dict.fromkeys(deeper(line, stage, by, fall) for fall in (True, False)):
                yield _with(lines, {index: changed})
        for receiver, taking in enumerate(lines):
            if receiver != index and line.sequences > line.micro_batch == taking.micro_batch:
                less = line._replace(sequences=line.sequences - line.micro_batch)
                more = taking._replace(sequences=taking.sequences + line.micro_batch)
                yield _with(lines, {index: less, receiver: more})
    for index, line in enumerate(lines if depths else ()):
        for stage, receiver in itertools.permutations(range(len(line.counts)), 2):
            yield _with(lines, {index: deeper(deeper(line, stage, 1), receiver, -1)})


def with_rank(lines: Lines, rank: int) -> Iterator[Lines]:
    """Yield ``lines`` with ``rank`` added as a one-layer stage; the layer comes from a neighbouring stage."""
    for index, line in enumerate(lines):
        for stage, at in ((stage, stage + behind) for stage in range(len(line.ranks)) for behind in (0, 1)):
            if line.counts[stage] > 1:
                counts = (*line.counts[:stage], line.counts[stage] - 1, *line.counts[stage + 1 :])
                values = (line.ranks, rank), (counts, 1), (line.flying, line.flying[stage])
                ranks, counts, flying = ((*now[:at], new, *now[at:]) for now, new in values)
                yield _with(lines, {index: line._replace(ranks=ranks, counts=counts, flying=flying)})


def deeper(line: Line, stage: int, by: int, fall: bool = False) -> Line:
    """Change the depth of one stage by ``by``, and adjust other stages to keep depths monotonic.

    Args:
        fall: let depths fall from stage to stage. Of two stages with equal depths, each waits for the other.
    """
    flying = list(line.flying)
    for i in range(stage + 1) if by > 0 else range(stage, len(flying)):
        wished = line.flying[stage] + by + (stage - i if fall else 0)
        depth = min(max(1, wished), line.micro_batches)
        flying[i] = max(flying[i], depth) if by > 0 else min(flying[i], depth)
    return line._replace(flying=tuple(flying))


def _with(lines: Lines, replaced: Mapping[int, Line]) -> Lines:
    return tuple(replaced.get(index, line) for index, line in enumerate(lines))
