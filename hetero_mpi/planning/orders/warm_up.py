"""``warm_up`` forwards, then one forward and one backward alternating, then the remaining backwards.

Three stages and four micro-batches at the classic depths (2, 1, 0); every forward and backward takes one clock::

    clock        0   1   2   3   4   5   6   7   8   9  10  11
    rank 0     0F0 0F1 0F2   .   . 0B0 0F3 0B1   . 0B2   . 0B3
    rank 1       . 1F0 1F1   . 1B0 1F2 1B1 1F3 1B2   . 1B3   .
    rank 2       .   . 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3   .   .

A warm-up beyond the classic depth keeps more micro-batches in flight, which hides slow links; a warm-up of all micro-batches is
GPipe. With ``split_backward``, every stage but the first (whose input gradient is unused) computes I at once and W
``weight_lag`` micro-batches later. The order is deadlock-free if no stage warms up deeper than its predecessor.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan

SPLITS = False
MAX_ROUNDING_ERROR = 1e-9
MIN_PERIOD_S = 1e-12


def weight_lag(pipeline: PipelinePlan, stage: StagePlan) -> int:
    """Number of micro-batches by which a stage's weight gradients lag behind its input gradients in a split backward.

    Later stages have fewer micro-batches in flight, and defer weight gradients until they use as much memory as the first stage
    (ZB-H1 of Qi et al. 2023, arXiv:2401.10241, section 3).
    """
    deepest = pipeline.micro_batches - 1
    return max(0, min(pipeline.stages[0].warm_up, deepest) - min(stage.warm_up, deepest))


def computing(pipeline: PipelinePlan, index: int) -> Iterator[tuple[str, int]]:
    """See ``orders.Order``."""
    stage, count = pipeline.stages[index], pipeline.micro_batches
    split, depth = pipeline.split_backward and index > 0, min(stage.warm_up, count)
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


def classic_depths(stages: int, micro_batches: int) -> tuple[int, ...]:
    """Warm-up depths of 1F1B: the number of later stages, at most the number of micro-batches."""
    return tuple(min(stages - 1 - i, micro_batches) for i in range(stages))


def with_classic_depths(plan: Plan) -> Plan:
    """``plan`` with the warm-up depths of 1F1B."""
    depths = (d for pipe in plan.pipelines for d in classic_depths(len(pipe.stages), pipe.micro_batches - 1))
    return plan.with_stages(replace(stage, warm_up=d) for (_, _, stage), d in zip(plan.numbered, depths, strict=True))


def scheduled_depths(schedule: str, stages: int, micro_batches: int) -> tuple[int, ...]:
    """Warm-up depths of a named schedule: all micro-batches for GPipe, the depths of 1F1B for all others."""
    return (micro_batches,) * stages if schedule == "gpipe" else classic_depths(stages, micro_batches)


def period_s(compute_s: Sequence[float], hops_s: Sequence[float]) -> float:
    """Seconds per micro-batch of the slowest stage or link; a link carries messages in both directions at once."""
    return max(*compute_s, *(hop_s / 2 for hop_s in hops_s), MIN_PERIOD_S)


def paced_each(compute_s: Sequence[float], hops_s: Sequence[float], period: float, allowance: float) -> list[int]:
    """Smallest warm-up depths at which gradients return in time for this pace; 0 for the last stage.

    If a stage is d micro-batches deeper than the next one, there are d periods for the next stage's forward and backward and for
    the messages between them (1F1B: d = 1).

    Args:
        compute_s: forward and backward seconds of a micro-batch, by stage.
        hops_s: seconds of its messages in both directions, by link.
        period: seconds per micro-batch.
        allowance: extra periods to grant each stage.
    """
    depths = [0]
    for behind_s, hop_s in zip(reversed(compute_s[1:]), reversed(hops_s), strict=True):
        depths.append(depths[-1] + max(1, math.ceil((behind_s + hop_s) / period + allowance - MAX_ROUNDING_ERROR)))
    return depths[::-1]
