"""The hand-written plans of the equality tests' cases: who holds which layers, and takes which part of the batch."""

from dataclasses import replace
from pathlib import Path

from hetero_mpi.planning.orders import ORDERS
from hetero_mpi.planning.types.plan import PipelinePlan, Plan
from hetero_mpi.planning.types.toml_files import save_plan
from tests.support.plans import pipeline, plan_of
from tests.support.training_cases import GLOBAL_BATCH, GROUPED, LAYERS, Case


def cuts(split: str, ranks: int) -> list[int]:
    """Boundaries of the stages along the chain of ``LAYERS`` layers."""
    if ranks == 1:
        return [0, LAYERS]
    if split in ("looped", "V"):
        stages = len(_several(split, ranks))
        return [round(i * LAYERS / stages) for i in range(stages + 1)]
    if split in ("even", "reversed"):
        return [round(i * LAYERS / ranks) for i in range(ranks + 1)]
    if split == "uneven":
        return {2: [0, 5, 6], 3: [0, 1, 4, 6], 4: [0, 1, 2, 5, 6]}[ranks]
    return {2: [0, 1, 6], 3: [0, 1, 5, 6], 4: [0, 1, 3, 5, 6]}[ranks]


def write_plan(
    path: Path, case: Case, ranks: int, split: str | None = None, pipelines: str | None = None
) -> Path | None:
    """The case's hand-written plan for so many ranks; None where the planner decides."""
    split, pipelines = split or case.split, pipelines or case.pipelines
    if split == "planner":
        return None
    if pipelines in GROUPED and ranks > 1:
        save_plan(_of_groups(case, _member_shares(pipelines, ranks)), path)
        return path
    groups = grouped("one" if pipelines in GROUPED else pipelines, split, ranks)
    shares = SHARES[case.shares][len(groups)]
    made = []
    for number, (order, edges) in enumerate(groups):
        micro_batch = min(shares[number], (1 + number if case.shares == "unequal" else case.micro_batch))
        if len(groups) == 1:
            micro_batch = case.micro_batch
        made.append(_pipeline(case, order, edges, micro_batch, shares[number]))
    save_plan(plan_of(*made), path)
    return path


SHARES = {
    "whole": {1: [8], 2: [4, 4], 3: [4, 2, 2], 4: [2, 2, 2, 2]},
    "unequal": {1: [8], 2: [5, 3], 3: [4, 3, 1], 4: [1, 4, 1, 2]},
}
"""Sequences of each pipeline, by their number; with micro-batches of 1, 2, ... where unequal, so that some are short."""


def _member_shares(pipelines: str, ranks: int) -> list[tuple[int, ...]]:
    """Of each stage's ranks."""
    if pipelines == "group":
        return [{2: (3, 1), 3: (2, 1, 1), 4: (1, 1, 1, 1)}[ranks]]
    return {2: [(1, 3)], 3: [(3, 1), ()], 4: [(3, 1), (2, 2)]}[ranks]


EXPERTS = {(1, 3): (0, 4), (3, 1): (1, 3), (2, 2): (4, 0)}
"""Shares of the heads of two ranks -> of the experts: more of the heads on one rank, of the experts on the other."""


def _of_groups(case: Case, shares: list[tuple[int, ...]]) -> Plan:
    holders: list[int | dict[int, int]] = []
    rank = 0
    for own in shares:
        holders.append(dict(enumerate(own, rank)) if own else rank)
        rank += max(1, len(own))
    edges = cuts("uneven", len(shares))
    made = pipeline(holders, edges, case.micro_batch, GLOBAL_BATCH, recompute=case.recompute)
    if case.family == "mixtral":
        stages = [replace(stage, experts=EXPERTS[stage.shares]) if stage.shares else stage for stage in made.stages]
        made = replace(made, stages=tuple(stages))
    return plan_of(made)


def grouped(pipelines: str, split: str, ranks: int) -> list[tuple[list[int], list[int]]]:
    """(ranks in chain order, boundaries) of every pipeline."""
    if split in ("looped", "V") and ranks > 1:
        return [(_several(split, ranks), cuts(split, ranks))]
    if pipelines == "one" or ranks == 1:
        return [(list(range(ranks))[:: -1 if split == "reversed" else 1], cuts(split, ranks))]
    if pipelines == "each" or ranks == 2:
        return [([rank], [0, LAYERS]) for rank in range(ranks)]
    if pipelines == "two" and ranks == 4:
        return [([3, 0], [0, 4, LAYERS]), ([1, 2], [0, 1, LAYERS])]
    *most, alone = range(ranks)
    first = (most, cuts("uneven", ranks - 1))
    return [first, ([alone], [0, LAYERS])] if pipelines == "tail" else [([alone], [0, LAYERS]), first]


def _several(split: str, ranks: int) -> list[int]:
    """The ranks of the stages in chain order: each rank twice, as far as the layers go."""
    order = list(range(ranks))
    return (order + (order if split == "looped" else order[::-1]))[:LAYERS]


def _pipeline(case: Case, order: list[int], edges: list[int], micro_batch: int, sequences: int) -> PipelinePlan:
    schedule = case.schedule
    if schedule in ORDERS and len(set(order)) == len(order):  # it orders several stages of a rank
        schedule = "split" if ORDERS[schedule].SPLITS else "1f1b"
    made = pipeline(
        order, edges, micro_batch, sequences, schedule, recompute=case.recompute, slice_sequences=case.slice_sequences
    )
    stages = (replace(stage, streamed=case.streamed and i % 2 == 0) for i, stage in enumerate(made.stages))
    split = made.split_backward and case.slice_sequences is None and case.tuning == "full"  # others go back in one part
    return replace(made, stages=tuple(stages), split_backward=split)
