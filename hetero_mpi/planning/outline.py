"""What a simulated step comes to, without its events: as ``simulator.simulate`` has it to the last bit, many times as fast.

Where no messages queue for a shared NIC, pipelines meet only in the gradient all-reduces and the STEP: each is timed by itself
(``simulator.spans_s``), equal ones once.
"""

from __future__ import annotations

from hetero_mpi.planning.durations import Durations, finished_layers_s
from hetero_mpi.planning.schedule import Action, Op, held_by
from hetero_mpi.planning.simulator import SimulatedStep, simulate, spans_s
from hetero_mpi.planning.tables import shares_nics
from hetero_mpi.planning.types.plan import WARM_UP, PipelinePlan, Plan
from hetero_mpi.planning.types.profile import ClusterProfile


def outlined(plan: Plan, profile: ClusterProfile) -> SimulatedStep:
    """A simulation of ``plan``; without events where that is possible: no shared NICs, no short micro-batches, the usual order."""
    unusual = any(pipeline.sequences % pipeline.micro_batch or pipeline.order != WARM_UP for pipeline in plan.pipelines)
    if shares_nics(profile) or unusual:
        return simulate(plan, profile)
    outline = _Outline(plan, profile)
    outline.sum()
    return outline.summary()


class _Outline:
    def __init__(self, plan: Plan, profile: ClusterProfile) -> None:
        self.plan, self.profile = plan, profile
        self.costs = Durations(plan, profile)
        self.clock: dict[int, float] = {}
        self.busy: dict[int, float] = {}
        self.whole: dict[tuple[int, int], float] = {}
        """(rank, layer) -> when its gradients are whole there."""
        known: dict[object, tuple[list[float], list[float]]] = {}
        number = 0
        for pipeline in plan.pipelines:
            self._pipeline(pipeline, number, known)
            number += len(pipeline.stages)

    def _seconds(self, op: Op, number: int) -> float:
        return self.costs.of(Action(op, number, 0))[0]

    def _pipeline(
        self, pipeline: PipelinePlan, number: int, known: dict[object, tuple[list[float], list[float]]]
    ) -> None:
        count, stages = pipeline.micro_batches, range(number, number + len(pipeline.stages))
        split = [pipeline.split_backward and s > number for s in stages]
        forward = tuple(self._seconds(Op.F, s) for s in stages)
        backward = tuple(self._seconds(Op.I if part else Op.B, s) for s, part in zip(stages, split, strict=True))
        weights = tuple(self._seconds(Op.W, s) if part else 0.0 for s, part in zip(stages, split, strict=True))
        out = tuple(self._seconds(Op.SEND_F, s) for s in stages[:-1])
        back = tuple(self._seconds(Op.SEND_B, s) for s in stages[1:])
        depths = tuple(min(stage.warm_up, count) for stage in pipeline.stages)
        put_off = weights if pipeline.split_backward else None
        key = forward, backward, out, back, depths, count, put_off
        if key not in known:
            known[key] = spans_s(*key)
        for s, begun, end in zip(stages, *known[key], strict=True):
            stage, place = pipeline.stages[s - number], s - number
            rank = stage.ranks[0]
            self.clock[rank] = end
            self.busy[rank] = count * (forward[place] + backward[place] + weights[place])
            if any(layer in self.costs.summed for layer in range(stage.first, stage.last)) or self.costs.tied_heads:
                last = Action(Op.W if split[place] else Op.B, s, count - 1)
                for layer, after_s in finished_layers_s(last, self.plan, self.profile).items():
                    self.whole[rank, layer] = begun + after_s

    def sum(self) -> None:
        """As ``simulator`` does: all ranks take part in the all-reduces of their layers from the last one to the first."""
        costs = self.costs
        free: dict[int, float] = {}
        for number, first in costs.tied_heads.items():
            head, embedding = costs.stages[number].ranks[0], costs.stages[first].ranks[0]
            end = self.whole[head, self.plan.layers - 1] + costs.of(Action(Op.REDUCE, number, layer=0))[0]
            self.clock[head] = max(self.clock[head], end)
            self.whole[embedding, 0] = max(self.whole[embedding, 0], end)
        numbers = {stage.ranks[0]: number for number, stage in enumerate(costs.stages)}
        for layer in sorted(costs.summed, reverse=True):
            ranks = held_by(self.plan, layer)
            whole_s = max(self.whole[rank, layer] for rank in ranks)
            begun_s = max(whole_s, *(free.get(rank, 0.0) for rank in ranks))
            free.update(dict.fromkeys(ranks, begun_s + costs.of(Action(Op.REDUCE, numbers[ranks[0]], layer=layer))[0]))
        for rank, end in free.items():
            self.clock[rank] = max(self.clock[rank], end)

    def summary(self) -> SimulatedStep:
        together = max(self.clock.values())
        steps = {
            stage.ranks[0]: self.costs.of(Action(Op.STEP, number))[0] for number, stage in enumerate(self.costs.stages)
        }
        step_s = max(together + seconds for seconds in steps.values())
        busy = {rank: self.busy[rank] + steps[rank] for rank in self.busy}
        busy |= {rank: busy[leader] for rank, leader in self.plan.leader_of.items()}
        busy = {rank: busy[rank] for rank in sorted(busy)}
        return SimulatedStep(step_s, (), busy)
