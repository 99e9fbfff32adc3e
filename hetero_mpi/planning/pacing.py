"""Depths at which gradients are back in time, at the pace of the slowest stage or link of a pipeline.

A stage that is d micro-batches deeper than the next needs, after forward x, a gradient that the next computes after forward x - d:
the next has d periods for both and the messages. 1F1B's d = 1 suffices where it is quick.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from hetero_mpi.planning.types.plan import PipelinePlan, Plan

ROUNDING = 1e-9
SHORTEST_S = 1e-12
"""No period is shorter."""


def classic_depths(stages: int, micro_batches: int) -> tuple[int, ...]:
    """1F1B's own warm-up depths: as many micro-batches ahead as stages follow, and never more than there are."""
    return tuple(min(stages - 1 - i, micro_batches) for i in range(stages))


def with_classic_depths(plan: Plan) -> Plan:
    """Every stage as many micro-batches ahead as stages follow it."""

    def changed(pipeline: PipelinePlan) -> PipelinePlan:
        depths = classic_depths(len(pipeline.stages), pipeline.micro_batches - 1)
        stages = (replace(stage, warm_up=depth) for stage, depth in zip(pipeline.stages, depths, strict=True))
        return replace(pipeline, stages=tuple(stages))

    return replace(plan, pipelines=tuple(map(changed, plan.pipelines)))


def scheduled_depths(schedule: str, stages: int, micro_batches: int) -> tuple[int, ...]:
    """The warm-up that a schedule given by name asks for: all micro-batches for GPipe, 1F1B's own for the others."""
    return (micro_batches,) * stages if schedule == "gpipe" else classic_depths(stages, micro_batches)


def period_s(compute_s: Sequence[float], hops_s: Sequence[float]) -> float:
    """What the slowest stage, or a link with its messages out and back at once, takes for a micro-batch."""
    return max(*compute_s, *(hop_s / 2 for hop_s in hops_s), SHORTEST_S)


def paced_each(compute_s: Sequence[float], hops_s: Sequence[float], period: float, allowance: float) -> list[int]:
    """Warm-up of every stage, the last one's 0; each stage has ``allowance`` periods more than it needs after the next.

    ``compute_s``: forward and backward of a micro-batch by stage; ``hops_s``: its messages, out and back, by link;
    ``period``: seconds.
    """
    wanted = [0]
    for behind_s, hop_s in zip(reversed(compute_s[1:]), reversed(hops_s), strict=True):
        wanted.append(wanted[-1] + max(1, math.ceil((behind_s + hop_s) / period + allowance - ROUNDING)))
    return wanted[::-1]
