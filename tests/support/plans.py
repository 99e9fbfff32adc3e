"""Plans of tests, told by ranks and boundaries.

    plan_of(pipeline([0, 1, 2], [0, 1, 3, 4]))                                     # three stages of a chain of four layers
    plan_of(pipeline([{0: 3, 1: 1}, 2], [0, 2, 4], sequences=3), pipeline([3], [0, 4], sequences=1))

The second one has two pipelines; ranks 0 and 1 hold the first stage together, with three heads and one.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from hetero_mpi.planning.orders import ORDERS
from hetero_mpi.planning.types.plan import WARM_UP, PipelinePlan, Plan, StagePlan
from hetero_mpi.planning.types.toml_files import save_plan
from tests.support.training_cases import SEQUENCE

GLOBAL_BATCH = 4


def pipeline(
    holders: Sequence[int | Mapping[int, int]],
    edges: Sequence[int],
    micro_batch: int = 1,
    sequences: int = GLOBAL_BATCH,
    schedule: str = "1f1b",
    **stage: Any,
) -> PipelinePlan:
    """A pipeline whose stages hold the layers between ``edges``.

    Args:
        holders: Of each stage its rank, or rank -> share of the heads.
        schedule: ``1f1b``, ``gpipe``, ``split`` (1F1B with split backward), or a name of ``ORDERS``.
        stage: Further fields of every stage.
    """
    count, stages = -(-sequences // micro_batch), []
    for place, (holder, (first, last)) in enumerate(zip(holders, pairwise(edges), strict=True)):
        depth = count if schedule == "gpipe" else min(len(holders) - 1 - place, count)
        ranks, shares = (tuple(holder), tuple(holder.values())) if isinstance(holder, Mapping) else ((holder,), ())
        stages.append(StagePlan(ranks, first, last, depth, shares=shares, **stage))
    order = schedule if schedule in ORDERS else WARM_UP
    return PipelinePlan(tuple(stages), micro_batch, sequences, schedule == "split" or ORDERS[order].SPLITS, order)


def plan_of(*pipelines: PipelinePlan, length: int = SEQUENCE) -> Plan:
    """The plan of these pipelines, whose sequences are the global batch."""
    batch = sum(pipeline.sequences for pipeline in pipelines)
    return Plan(pipelines, batch, length, pipelines[0].stages[-1].last)


def write_plan(path: Path, *pipelines: PipelinePlan, length: int = SEQUENCE) -> Path:
    """Write ``plan_of`` these pipelines."""
    save_plan(plan_of(*pipelines, length=length), path)
    return path
