"""Pipelines as they are annealed: quick to change and quick to drop."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from hetero_mpi.planning.memory import StageMode
from hetero_mpi.planning.outline import spans_of_many_s
from hetero_mpi.planning.types.plan import PipelinePlan, StagePlan

ROUNDING_RATIO = 1e-9


class Line(NamedTuple):
    """One pipeline: of every stage the rank (as the cluster counts them), how many layers it holds, and the most micro-batches in
    flight, which do not grow along the line."""

    ranks: tuple[int, ...]
    counts: tuple[int, ...]
    flying: tuple[int, ...]
    micro_batch: int
    sequences: int
    split: bool = False
    """Backward in two parts, where there is more than one stage."""

    @property
    def is_split(self) -> bool:
        return self.split and len(self.ranks) > 1

    @property
    def micro_batches(self) -> int:
        return self.sequences // self.micro_batch

    @property
    def cuts(self) -> tuple[int, ...]:
        return (0, *itertools.accumulate(self.counts))


Lines = tuple[Line, ...]


class LineTimes(NamedTuple):
    """The times of every stage, and of the messages behind it; seconds per micro-batch."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    out: tuple[float, ...]
    back: tuple[float, ...]


@dataclass(frozen=True)
class Fitting:
    """A line that memory holds."""

    line: Line
    ways: tuple[StageMode, ...]
    """Of every stage."""
    times: LineTimes
    bound_s: float
    """Its step takes no less."""
    spare_bytes: float
    """What its ranks leave free together when they own no state; infinite: not asked."""

    @cached_property
    def spans_s(self) -> tuple[list[float], list[float]]:
        """When each stage begins its last backward, when it has done it."""
        return _spans_s(self.times, self.line.flying, self.line.micro_batches)

    def pipeline(self, ranks: Sequence[int], fixed: bool) -> PipelinePlan:
        """``ranks``: the job's, by the cluster's; ``fixed``: are depths those of a schedule, also of one stage, which waits for
        nobody?"""
        line, cuts, several = self.line, self.line.cuts, fixed or len(self.line.ranks) > 1
        warm_up = [depth - 1 if several else 0 for depth in line.flying]
        stages = tuple(
            StagePlan((ranks[rank],), cuts[i], cuts[i + 1], warm_up[i], **self.ways[i]._asdict())
            for i, rank in enumerate(line.ranks)
        )
        return PipelinePlan(stages, line.micro_batch, line.sequences, line.is_split)


@lru_cache(maxsize=1 << 14)
def _spans_s(times: LineTimes, flying: tuple[int, ...], micro_batches: int) -> tuple[list[float], list[float]]:
    """Like pipelines are simulated once."""
    return spans_of_many_s(times, [depth - 1 for depth in flying], micro_batches)


def used(lines: Sequence[Line]) -> int:
    """How many ranks."""
    return sum(len(line.ranks) for line in lines)


def falling(flying: Sequence[int]) -> tuple[int, ...]:
    """Micro-batches in flight, fewer than at the stage before, which would wait otherwise."""
    return tuple(itertools.accumulate(flying, lambda before, in_flight: max(1, min(in_flight, before - 1))))
