"""Partitions of ranks into pipelines, of few ranks all of them: those that look best by estimate are plans to begin with."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence

from hetero_mpi.planning.annealing.lines import Line, Lines, used
from hetero_mpi.planning.annealing.rounds import Rounds, Start, always_split

Partition = tuple[tuple[int, ...], ...]
"""Of every pipeline its ranks, in order."""
LOOKED_AT = 60
"""Partitions of one number of pipelines, with micro-batch size and cuts, that are simulated."""


def best_partitions(rounds: Rounds, pipelines: int, all_ways: bool) -> Iterator[Start]:
    """Partitions of so many pipelines, all or ``likely`` ones, each with what suits it best of a few cuts, micro-batch sizes and
    depths, with backward in one part and in two."""
    known: dict[Line, tuple[float, Line] | None] = {}
    ways = partitions(len(rounds.speed), pipelines, rounds.layer_count) if all_ways else likely(rounds, pipelines)
    every = [
        (step_s, index, lines)
        for index, partition in enumerate(ways)
        if sum(map(len, partition)) >= rounds.least
        for step_s, lines in _cut(partition, rounds, known)
    ]
    best: dict[int, Start] = {}
    for _, index, lines in heapq.nsmallest(LOOKED_AT, every, key=lambda one: one[:2]):
        for split in (False, True) if rounds.may_split(lines) else (always_split(rounds.request),):
            start = rounds.fastest(rounds.deepened(tuple(line._replace(split=split) for line in lines)))
            best[index] = min(start, best.get(index, start), key=lambda one: one[1])
    yield from (start for start in best.values() if start[1] < math.inf)


def partitions(count: int, pipelines: int, stages: int) -> list[Partition]:
    """Of ranks 0 to ``count`` - 1, in so many pipelines of at most so many stages each."""
    found: list[Partition] = [()]
    for rank in range(count):
        found = [other for partition in found for other in _with(partition, rank, pipelines, stages)]
    return [partition for partition in found if len(partition) == pipelines]


def likely(rounds: Rounds, pipelines: int) -> list[Partition]:
    """All ranks in pipelines with as much memory each, and in pipelines as fast."""
    found = []
    for weights in (rounds.usable_bytes, rounds.speed):
        partition: list[list[int]] = [[] for _ in range(pipelines)]
        for rank in sorted(range(len(weights)), key=lambda rank: (-weights[rank], rank)):
            least = min(partition, key=lambda line: (bool(line), sum(weights[own] for own in line)))
            if len(least) < rounds.layer_count:
                least.append(rank)
        found.append(tuple(map(tuple, partition)))
    return found


def _with(partition: Partition, rank: int, pipelines: int, stages: int) -> Iterator[Partition]:
    """Without ``rank``, at every place of every pipeline, and as a pipeline of its own."""
    yield partition
    for index, line in enumerate(partition):
        for place in range(len(line) + 1) if len(line) < stages else ():
            yield (*partition[:index], (*line[:place], rank, *line[place:]), *partition[index + 1 :])
    if len(partition) < pipelines:
        yield (*partition, (rank,))


def _cut(
    partition: Partition, rounds: Rounds, known: dict[Line, tuple[float, Line] | None]
) -> Iterator[tuple[float, Lines]]:
    """The time by estimate, and pipelines: of each micro-batch size with layers dealt out by speed, and cut by estimate."""
    batch = rounds.request.global_batch
    speeds = [[rounds.speed[rank] for rank in ranks] for ranks in partition]
    for size in rounds.costs:
        if batch % size or batch // size < len(partition):
            continue
        lines, cuts = [], []
        for ranks, own, share in zip(
            partition, speeds, dealt([sum(own) for own in speeds], batch // size), strict=True
        ):
            line = Line(ranks, tuple(dealt(own, rounds.layer_count)), (batch,) * len(ranks), size, size * share)
            if line not in known:
                known[line] = rounds.estimates[size].cut(line, depth=1.0)
            lines.append(line)
            cuts.append(known[line] or (math.inf, line))
        step_s = max(step_s for step_s, _ in cuts)
        yield step_s, tuple(lines)
        cut = tuple(line for _, line in cuts)
        if step_s < math.inf and used(cut) == used(lines):
            yield step_s, cut


def dealt(weights: Sequence[float], total: int) -> list[int]:
    """``total`` in whole numbers, one each at least, as nearly in proportion to ``weights`` as that goes."""
    counts = [1] * len(weights)
    for _ in range(total - len(weights)):
        index = max(range(len(weights)), key=lambda k: weights[k] / (counts[k] + 1))
        counts[index] += 1
    return counts
