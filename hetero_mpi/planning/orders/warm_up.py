"""As many forwards as the stage warms up, then a forward and a backward in turn, then the remaining backwards.

Three stages, four micro-batches, classic depth (2, 1, 0), every forward and backward one clock long::

    clock        0   1   2   3   4   5   6   7   8   9  10  11
    rank 0     0F0 0F1 0F2   .   . 0B0 0F3 0B1   . 0B2   . 0B3
    rank 1       . 1F0 1F1   . 1B0 1F2 1B1 1F3 1B2   . 1B3   .
    rank 2       .   . 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3   .   .

A stage that warms up deeper than the classic depth keeps more micro-batches in flight, which hides slow links; at a depth of
all micro-batches this is GPipe. With ``split_backward`` every stage but the first (for whose input gradient nobody waits) does I
at once and W ``weight_lag`` micro-batches later. Free of deadlock when no stage warms up deeper than the one before it.
"""

from __future__ import annotations

from collections.abc import Iterator

from hetero_mpi.planning.types.plan import PipelinePlan, StagePlan

SPLITS = False


def weight_lag(pipeline: PipelinePlan, stage: StagePlan) -> int:
    """Micro-batches by which a stage's weight gradients trail its input gradients where backward is split.

    Deep in the pipeline few micro-batches are in flight; as many more wait there for their weight gradients as bring every
    stage to the first one's memory (ZB-H1 of Qi et al. 2023, arXiv:2401.10241, section 3).
    """
    deepest = pipeline.micro_batches - 1
    return max(0, min(pipeline.stages[0].warm_up, deepest) - min(stage.warm_up, deepest))


def computing(pipeline: PipelinePlan, place: int) -> Iterator[tuple[str, int]]:
    """See ``orders.Order``."""
    stage, count = pipeline.stages[place], pipeline.micro_batches
    split, depth = pipeline.split_backward and place > 0, min(stage.warm_up, count)
    lag = weight_lag(pipeline, stage)
    yield from (("F", m) for m in range(depth))
    for m in range(count):
        if depth + m < count:
            yield "F", depth + m
        yield ("I" if split else "B"), m
        if split and m >= lag:
            yield "W", m - lag
    if split:
        yield from (("W", m) for m in range(max(0, count - lag), count))
