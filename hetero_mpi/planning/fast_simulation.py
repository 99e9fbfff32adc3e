"""The length of a simulated step, without its events: as ``simulator.simulate`` has it to the last bit, many times as fast.

Where no messages queue for a shared NIC, pipelines meet only in the gradient all-reduces and the STEP: each is timed by itself
(``simulator.spans_s``), equal ones once.
"""

from __future__ import annotations

from collections.abc import Sequence

from hetero_mpi.planning.durations import Durations, finished_layers_s
from hetero_mpi.planning.schedule import Action, Op, held_by
from hetero_mpi.planning.simulator import SimulatedStep, simulate, spans_s
from hetero_mpi.planning.tables import shares_nics
from hetero_mpi.planning.types.plan import WARM_UP, PipelinePlan, Plan
from hetero_mpi.planning.types.profile import ClusterProfile

Spans = tuple[list[float], list[float]]
"""When each stage of a pipeline begins its last backward, and when it has done it."""


def outlined(plan: Plan, profile: ClusterProfile) -> SimulatedStep:
    """A simulation of ``plan``; without events where that is possible: no shared NICs, no short micro-batches, the usual order."""
    unusual = any(pipeline.sequences % pipeline.micro_batch or pipeline.order != WARM_UP for pipeline in plan.pipelines)
    if shares_nics(profile) or unusual:
        return simulate(plan, profile)
    costs, clock, busy = Durations(plan, profile), dict[int, float](), dict[int, float]()
    whole: dict[tuple[int, int], float] = {}
    """(rank, layer) -> when its gradients are whole there."""
    known: dict[object, Spans] = {}
    number = 0
    for pipeline in plan.pipelines:
        (begun, ends), computing_s = _pipeline(costs, pipeline, number, known)
        for place, stage in enumerate(pipeline.stages):
            rank = stage.ranks[0]
            clock[rank], busy[rank] = ends[place], pipeline.micro_batches * computing_s[place]
            if costs.tied_heads or any(layer in costs.summed for layer in range(stage.first, stage.last)):
                op = Op.W if pipeline.split_backward and place > 0 else Op.B
                last = Action(op, number + place, pipeline.micro_batches - 1)
                for layer, after_s in finished_layers_s(last, plan, costs.profile).items():
                    whole[rank, layer] = begun[place] + after_s
        number += len(pipeline.stages)
    _sum(costs, clock, whole)
    together = max(clock.values())
    steps = {stage.ranks[0]: costs.of(Action(Op.STEP, number))[0] for number, stage in enumerate(costs.stages)}
    busy = {rank: seconds + steps[rank] for rank, seconds in busy.items()}
    busy |= {rank: busy[leader] for rank, leader in plan.leader_of.items()}
    step_s = max(together + seconds for seconds in steps.values())
    return SimulatedStep(step_s, (), {rank: busy[rank] for rank in sorted(busy)})


def _pipeline(
    costs: Durations, pipeline: PipelinePlan, number: int, known: dict[object, Spans]
) -> tuple[Spans, list[float]]:
    """Its spans, and seconds that each stage computes for a micro-batch. ``number``: of its first stage; ``known``: of pipelines
    before."""
    stages = range(number, number + len(pipeline.stages))

    def seconds(op: Op, numbers: Sequence[int]) -> tuple[float, ...]:
        return tuple(costs.of(Action(op, s, 0))[0] for s in numbers)

    forward, split = seconds(Op.F, stages), pipeline.split_backward
    backward = seconds(Op.B, stages[:1]) + seconds(Op.I if split else Op.B, stages[1:])
    weights = (0.0, *(seconds(Op.W, stages[1:]) if split else (0.0 for _ in stages[1:])))
    depths = tuple(min(stage.warm_up, pipeline.micro_batches) for stage in pipeline.stages)
    out, back = seconds(Op.SEND_F, stages[:-1]), seconds(Op.SEND_B, stages[1:])
    key = forward, backward, out, back, depths, pipeline.micro_batches, weights if split else None
    if key not in known:
        known[key] = spans_s(*key)
    return known[key], [f + b + w for f, b, w in zip(forward, backward, weights, strict=True)]


def _sum(costs: Durations, clock: dict[int, float], whole: dict[tuple[int, int], float]) -> None:
    """Adds the sums of gradients, as ``simulator`` does: all ranks take part in those of their layers from the last one to the
    first."""
    for number, first in costs.tied_heads.items():
        head, embedding = costs.stages[number].ranks[0], costs.stages[first].ranks[0]
        end = whole[head, costs.plan.layers - 1] + costs.of(Action(Op.REDUCE, number, layer=0))[0]
        clock[head] = max(clock[head], end)
        whole[embedding, 0] = max(whole[embedding, 0], end)
    numbers = {stage.ranks[0]: number for number, stage in enumerate(costs.stages)}
    free: dict[int, float] = {}
    for layer in sorted(costs.summed, reverse=True):
        ranks = held_by(costs.plan, layer)
        begun_s = max(max(whole[rank, layer], free.get(rank, 0.0)) for rank in ranks)
        free |= dict.fromkeys(ranks, begun_s + costs.of(Action(Op.REDUCE, numbers[ranks[0]], layer=layer))[0])
    for rank, end in free.items():
        clock[rank] = max(clock[rank], end)
