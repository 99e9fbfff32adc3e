"""Lightweight pipelines for the search."""

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
    """A pipeline: the rank, layer count and number of micro-batches in flight (non-increasing) of each stage."""

    ranks: tuple[int, ...]
    counts: tuple[int, ...]
    flying: tuple[int, ...]
    micro_batch: int
    sequences: int
    split: bool = False
    """Split the backward if there are several stages."""

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
    """Seconds per micro-batch for each stage's passes and for the messages between neighbouring stages."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    out: tuple[float, ...]
    back: tuple[float, ...]


@dataclass(frozen=True)
class Fitting:
    """A ``Line`` that fits in memory, with its timing."""

    line: Line
    ways: tuple[StageMode, ...]
    """Memory strategy of each stage."""
    times: LineTimes
    bound_s: float
    """Lower bound of the step time."""
    spare_bytes: float
    """Bytes that all ranks together have left for optimizer state; infinite if not tabulated."""

    @cached_property
    def spans_s(self) -> tuple[list[float], list[float]]:
        """Start and end of each stage's last backward, in seconds."""
        return _spans_s(self.times, self.line.flying, self.line.micro_batches)

    def pipeline(self, ranks: Sequence[int], fixed: bool) -> PipelinePlan:
        """Convert to a ``PipelinePlan``. ``ranks``: job ranks by index; ``fixed``: single stages keep their depth too."""
        line, cuts, several = self.line, self.line.cuts, fixed or len(self.line.ranks) > 1
        warm_up = [depth - 1 if several else 0 for depth in line.flying]
        stages = tuple(
            StagePlan((ranks[rank],), cuts[i], cuts[i + 1], warm_up[i], **self.ways[i]._asdict())
            for i, rank in enumerate(line.ranks)
        )
        return PipelinePlan(stages, line.micro_batch, line.sequences, line.is_split)


@lru_cache(maxsize=1 << 14)
def _spans_s(times: LineTimes, flying: tuple[int, ...], micro_batches: int) -> tuple[list[float], list[float]]:
    """``Fitting.spans_s``, cached so that equal pipelines are simulated only once."""
    return spans_of_many_s(times, [depth - 1 for depth in flying], micro_batches)


def used(lines: Sequence[Line]) -> int:
    """Number of ranks that ``lines`` use."""
    return sum(len(line.ranks) for line in lines)


def falling(flying: Sequence[int]) -> tuple[int, ...]:
    """Make depths strictly decreasing, but no less than 1."""
    return tuple(itertools.accumulate(flying, lambda before, in_flight: max(1, min(in_flight, before - 1))))
