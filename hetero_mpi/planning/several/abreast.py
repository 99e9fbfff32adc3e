"""Makes a plan better by changing all its pipelines at once, whole stages with what they hold: the step before ``polish``.

Where several pipelines end together, one that gets faster alone gains nothing; and where a rank holds as much as its memory
allows, it can change places with another only if each takes its own items along. Every change is tried at several depths: those
that it had, 1F1B's own, and such that gradients are back in time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from hetero_mpi.planning.durations import Durations
from hetero_mpi.planning.pacing import paced_together, period_s
from hetero_mpi.planning.schedule import Action, Op
from hetero_mpi.planning.several.polish import WORTHWHILE, Polisher
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan
from hetero_mpi.planning.types.profile import ClusterProfile

ALLOWANCES = (0.0, 0.5, 1.2)
"""Shares of a period by which a gradient may be late, for guessing depths."""

Row = tuple[tuple[int, int, int], ...]
"""One pipeline's stages: (rank, items, warm-up)."""


def abreast(plan: Plan, step_s: float, profile: ClusterProfile, polisher: Polisher) -> tuple[Plan, float]:
    """``plan``, which fits and takes ``step_s``, or better; ``polisher`` times the changes as long as it has effort left."""
    improved = polisher.request.schedule == "auto"
    while improved and polisher.left > 0:
        improved = False
        for rows in _changes([_row(pipeline) for pipeline in plan.pipelines]):
            if polisher.left <= 0:
                break
            found = _best_depths(_with_rows(plan, rows), profile, polisher)
            # Ranks leave the order that they stand in only for more than the request is indifferent to.
            least = max(WORTHWHILE, polisher.request.indifference)
            if found is not None and found[1] < step_s * (1 - least):
                (plan, step_s), improved = found, True
                break
    return plan, step_s


def _row(pipeline: PipelinePlan) -> Row:
    return tuple((stage.ranks[0], stage.last - stage.first, stage.warm_up) for stage in pipeline.stages)


def _changes(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """The same change in all pipelines of as many stages; in each of them by itself, where there are unlike ones."""
    lengths = {len(row) for row in rows}
    for length in sorted(lengths):
        alike = [index for index, row in enumerate(rows) if len(row) == length]
        for chosen in [alike, *([[index] for index in alike] if len(rows) > 1 else [])]:
            for i, j in itertools.permutations(range(length), 2):
                if i < j:
                    yield [_exchanged(row, i, j) if index in chosen else row for index, row in enumerate(rows)]
                if all(rows[index][j][1] > 1 for index in chosen):
                    yield [_given(row, i, j) if index in chosen else row for index, row in enumerate(rows)]


def _exchanged(row: Row, i: int, j: int) -> Row:
    """Stages i and j change places, each with its items; depths stay where they are."""
    ranks = [(rank, items) for rank, items, _ in row]
    ranks[i], ranks[j] = ranks[j], ranks[i]
    return tuple((*pair, depth) for pair, (_, _, depth) in zip(ranks, row, strict=True))


def _given(row: Row, i: int, j: int) -> Row:
    """One item more for stage i, one fewer for j; those between move on."""
    more = {i: 1, j: -1}
    return tuple((rank, items + more.get(place, 0), depth) for place, (rank, items, depth) in enumerate(row))


def _with_rows(plan: Plan, rows: Sequence[Row]) -> Plan:
    pipelines = []
    for pipeline, row in zip(plan.pipelines, rows, strict=True):
        cuts = [0, *itertools.accumulate(items for _, items, _ in row)]
        stages = tuple(StagePlan((rank,), cuts[i], cuts[i + 1], depth) for i, (rank, _, depth) in enumerate(row))
        pipelines.append(PipelinePlan(stages, pipeline.micro_batch, pipeline.sequences, pipeline.split_backward))
    return Plan(tuple(pipelines), plan.global_batch, plan.sequence_length, plan.items)


def _best_depths(plan: Plan, profile: ClusterProfile, polisher: Polisher) -> tuple[Plan, float] | None:
    best: tuple[Plan, float] | None = None
    tried: set[Plan] = set()
    for depths in ([tuple(s.warm_up for s in p.stages) for p in plan.pipelines], *_paced(plan, profile)):
        fitting = polisher.fitted(_at_depths(plan, depths))
        if fitting is None or fitting in tried:
            continue
        tried.add(fitting)
        step_s = polisher.step_s(fitting)
        best = (fitting, step_s) if best is None or step_s < best[1] else best
    return best


def _at_depths(plan: Plan, depths: Sequence[Sequence[int]]) -> Plan:
    pipelines = []
    for pipeline, own in zip(plan.pipelines, depths, strict=True):
        stages = tuple(
            StagePlan(stage.ranks, stage.first, stage.last, min(depth, pipeline.micro_batches - 1))
            for stage, depth in zip(pipeline.stages, own, strict=True)
        )
        pipelines.append(PipelinePlan(stages, pipeline.micro_batch, pipeline.sequences, pipeline.split_backward))
    return Plan(tuple(pipelines), plan.global_batch, plan.sequence_length, plan.items)


def _paced(plan: Plan, profile: ClusterProfile) -> Iterator[list[tuple[int, ...]]]:
    """1F1B's own depths, and deeper ones: in flight at a stage is what the stages behind take at the pace of the slowest."""
    costs, number = Durations(plan, profile), 0
    spans: list[tuple[list[float], list[float]]] = []
    for pipeline in plan.pipelines:
        numbers = range(number, number + len(pipeline.stages))
        number = numbers.stop
        own = [costs.of(Action(Op.F, s, 0))[0] + costs.of(Action(Op.B, s, 0))[0] for s in numbers]
        hops = [costs.of(Action(Op.SEND_F, s, 0))[0] + costs.of(Action(Op.SEND_B, s + 1, 0))[0] for s in numbers[:-1]]
        spans.append((own, hops))
    yield [tuple(reversed(range(len(own)))) for own, _ in spans]
    for allowance in ALLOWANCES:
        depths = []
        for own, hops in spans:
            depths.append(tuple(paced_together(own, hops, period_s(own, hops), allowance)))
        yield depths
