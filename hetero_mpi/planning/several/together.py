"""Unlike pipelines side by side: what they take together, and who takes how much of the global batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hetero_mpi.planning.several.cutting import Cutter, Run
from hetero_mpi.planning.several.fleet import Floats, Indices
from hetero_mpi.planning.several.pace import Crew, Pace
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan


def together_s(runs: Sequence[Run], cutter: Cutter) -> float:
    """Seconds of a step of these pipelines, as ``simulator.simulate`` has it: sums of gradients, each as soon as it is whole
    everywhere, the last item first on every rank; then the optimizer."""
    fleet = cutter.fleet
    end_s = max(end for run in runs for end in run.end_s)
    steps = 0.0
    for run in runs:
        for place, index in enumerate(run.crew):
            rank = cutter.rank(index)
            trained = cutter.trained[run.cuts[place + 1]] - cutter.trained[run.cuts[place]]
            steps = max(steps, rank.fixed_s + rank.per_parameter_s * trained)
    if len(runs) < 2 or not fleet.summed_bytes.any():
        return end_s + steps
    holders = np.empty((fleet.items, len(runs)), dtype=np.int64)
    whole = np.empty((fleet.items, len(runs)))
    for p, run in enumerate(runs):
        for place, index in enumerate(run.crew):
            first, last = run.cuts[place], run.cuts[place + 1]
            seconds = fleet.backward_s[index, first:last]
            if run.recompute[place]:
                seconds = seconds + fleet.repeated_s[index, first:last]
            after = np.cumsum(seconds[::-1])[::-1] + fleet.overhead_s[index, 1]
            holders[first:last, p] = index
            whole[first:last, p] = run.begun_s[place] + after
    sums = sums_s(holders, cutter)
    free = np.zeros(len(fleet.devices))
    for item in range(fleet.items - 1, -1, -1):
        if sums[item] > 0:
            ranks = holders[item]
            free[ranks] = max(float(whole[item].max()), float(free[ranks].max())) + sums[item]
    return max(end_s, float(free.max())) + steps


def sums_s(holders: Indices, cutter: Cutter) -> Floats:
    """Seconds [item] to sum every item over its holders, [item, pipeline]."""
    fleet = cutter.fleet
    found = np.zeros(fleet.items)
    first = 0
    for item in range(1, fleet.items + 1):
        if item == fleet.items or (holders[item] != holders[first]).any():
            found[first:item] = cutter.all_reduce_s(tuple(holders[first].tolist()), fleet.summed_bytes[first:item])
            first = item
    return found


def sums_of(pace: Pace, crews: Sequence[Crew]) -> Floats:
    """[item]: ``pace.sums_s`` of every item."""
    block, embedding, head = pace.sums_s(crews)
    return np.array([embedding, *[block] * pace.blocks, head])


def dealt(crews: Sequence[Crew], counts: Sequence[int], cutter: Cutter, sum_s: Floats, looks: int) -> list[Run]:
    """The crews' pipelines with as many micro-batches each as makes the slowest fastest, near ``counts``."""
    runs = [cutter.best(crew, count, sum_s) for crew, count in zip(crews, counts, strict=True) if count > 0]
    for _ in range(looks):
        worst = max(range(len(runs)), key=lambda p: (runs[p].step_s, p))
        if runs[worst].micro_batches < 2 or cutter.left <= 0:
            break
        limit_s = runs[worst].step_s
        fewer = cutter.best(_whole(runs[worst], crews), runs[worst].micro_batches - 1, sum_s)
        taker, better = -1, fewer
        for p in sorted(range(len(runs)), key=lambda p: (runs[p].step_s * (1 + 1 / runs[p].micro_batches), p))[:4]:
            if p != worst:
                more = cutter.best(_whole(runs[p], crews), runs[p].micro_batches + 1, sum_s)
                if more.step_s < limit_s * (1 - 1e-6) and (taker < 0 or more.step_s < better.step_s):
                    taker, better = p, more
        if taker < 0 or fewer.step_s >= limit_s * (1 - 1e-6):
            break
        runs[worst], runs[taker] = fewer, better
    return runs


def _whole(run: Run, crews: Sequence[Crew]) -> Crew:
    """The crew that a run was made of: it may have left out the last ranks."""
    return next(crew for crew in crews if crew[0] == run.crew[0])


def plan_of(runs: Sequence[Run], cutter: Cutter) -> Plan:
    """The runs as a plan; what the last micro-batches have too much is left out of the longest share."""
    fleet = cutter.fleet
    size, batch = fleet.micro_batch, fleet.request.global_batch
    pipelines = [
        PipelinePlan(
            tuple(
                StagePlan((fleet.devices[index].rank,), run.cuts[i], run.cuts[i + 1], run.warm_up[i], run.recompute[i])
                for i, index in enumerate(run.crew)
            ),
            size,
            run.micro_batches * size,
        )
        for run in runs
    ]
    over = sum(pipeline.sequences for pipeline in pipelines) - batch
    longest = max(range(len(pipelines)), key=lambda p: (pipelines[p].sequences, -p))
    last = pipelines[longest]
    pipelines[longest] = PipelinePlan(last.stages, size, last.sequences - over)
    return Plan(tuple(pipelines), batch, fleet.request.sequence_length, fleet.items)
