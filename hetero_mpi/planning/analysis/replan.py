"""A better plan for machines that have changed their speed while a run goes on, from which nothing of the numbers changes.

The number of pipelines, their shares of the batch and their micro-batches stay. With one pipeline everything else is open;
with several every pipeline keeps its ranks.

As a program (``python -m hetero_mpi.planning.analysis.replan``) it reads a question and writes an answer, as JSON: a run asks a
process of its own, since a thread that plans would take the interpreter from the one that trains.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from hetero_mpi.planning.contention import while_computing
from hetero_mpi.planning.decision.decide import decide, in_order, nearest_searched
from hetero_mpi.planning.decision.groups import improved
from hetero_mpi.planning.decision.planner import complete_plan
from hetero_mpi.planning.outline import outlined
from hetero_mpi.planning.owners import owned_units
from hetero_mpi.planning.schedule import held_by, holders
from hetero_mpi.planning.types.cluster_changes import renumbered, restricted
from hetero_mpi.planning.types.codec import decode, encode
from hetero_mpi.planning.types.cost import LayerCost, ModelCost
from hetero_mpi.planning.types.plan import IdleRank, PipelinePlan, Plan, PlanReport
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.request import PlanRequest
from hetero_mpi.util.errors import UserError

_MADE = "made while the run went on, for the speeds measured then"
_LEFT_OUT = "too slow, or its links are, by the speeds measured while the run went on"
_STILL_OUT = "the search found no faster plan with it, by the speeds measured while the run went on"
IDLE_GAIN = 0.2
"""A rank that computes is left out only for so much more than keeping it gains: a rank that sleeps cannot show that it has
become fast again."""


LEAST_GAIN = 0.05
"""A step must become shorter by this share, or nothing moves: predictions are not better than that."""
MARGIN = 2.0
"""Least gain of the remaining steps, in parts of what moving costs."""
_VALUE_BYTES, _MOMENTS_BYTES = 4, 8
"""Bytes of a trained parameter on its way: itself and two moments, in fp32."""
_Way = tuple[int, int, int]
"""(from rank, to rank, layer)"""


@dataclass(frozen=True)
class ReplanQuestion:
    """A plan that runs, and the machines as they are now."""

    profile: ClusterProfile
    """At the speeds that were measured during the run (``drifted_profile``)."""
    request: PlanRequest
    report: PlanReport
    """The plan that runs."""
    remaining_steps: int
    rebuild_s: float
    """Part of the cost of a change that does not depend on what moves."""


@dataclass(frozen=True)
class Prospect:
    """The gain and the cost of a change of plans."""

    now_s: float
    """A step under the plan as it is, at the new speeds."""
    then_s: float
    """A step under the new plan."""
    cost_s: float
    """Seconds that moving takes."""

    @property
    def gain_s(self) -> float:
        """Per step."""
        return self.now_s - self.then_s

    def hopeless(self, remaining_steps: int) -> bool:
        """Whatever comes: the gain is too small, or the run too short."""
        return self.gain_s < LEAST_GAIN * self.now_s or self.gain_s * remaining_steps < MARGIN * self.cost_s

    def pays(self, steps_since: int, remaining_steps: int) -> bool:
        """True if layers should move now, ``steps_since`` steps after the speeds have changed."""
        return not self.hopeless(remaining_steps) and self.gain_s * steps_since >= self.cost_s


@dataclass(frozen=True)
class ReplanAnswer:
    """The best plan found, and what it would bring; the plan that runs where nothing is better."""

    report: PlanReport
    prospect: Prospect


def answer(question: ReplanQuestion) -> ReplanAnswer:
    """The plan with which the remaining steps and the change to it take the least time. Deterministic."""
    now, profile = question.report.plan, question.profile

    def step_s(plan: Plan) -> float:
        return outlined(plan, profile).step_s

    def cost_s(plan: Plan) -> float:
        return question.rebuild_s + moving_s(profile, now, plan)

    def seconds(plan: Plan) -> float:
        return question.remaining_steps * step_s(plan) + cost_s(plan)

    now_s = step_s(now)
    best, least_s = now, question.remaining_steps * now_s
    # A group's sums have bits of their own: none is formed while a run goes on.
    groups = question.request.groups and bool(now.leader_of)
    searched = replace(question, request=replace(nearest_searched(question.request), groups=groups))
    for found in _candidates(searched):
        plan = in_order(found, profile, question.request)
        if plan is not None and (its_s := seconds(plan)) < least_s:
            best, least_s = plan, its_s
    if best is not now:
        for plan in (_less_moved(best, question, seconds), best):
            with contextlib.suppress(UserError):  # memory: of ranks exchanged, and of pipelines that share a host's
                completed = complete_plan(plan, profile, question.request)
                idle = tuple(IdleRank(one.rank, _why_idle(one.rank, question)) for one in completed.idle)
                report = replace(completed, idle=idle, reasons=(_MADE, *completed.reasons[1:]))
                return ReplanAnswer(report, Prospect(now_s, step_s(plan), cost_s(plan)))
    return ReplanAnswer(question.report, Prospect(now_s, now_s, 0.0))


def _why_idle(rank: int, question: ReplanQuestion) -> str:
    """The reason given before, as far as it has nothing to do with times; else what was found now."""
    known = {idle.rank: idle.reason for idle in question.report.idle}
    model, device = question.profile.model, question.profile.devices[rank]
    if rank in known and model.dtype not in device.dtypes:
        return known[rank]
    return _STILL_OUT if rank in known else _LEFT_OUT


def _less_moved(plan: Plan, question: ReplanQuestion, seconds: Callable[[Plan], float]) -> Plan:
    """``plan`` with ranks of a pipeline exchanged where layers then stay where they are, and it costs next to nothing: ranks that
    are alike differ by the noise of what was measured. Ranks of groups stay."""
    if plan.leader_of:
        return plan
    before = question.report.plan.holders
    most_s = seconds(plan) * (1 + question.request.indifference)
    for number, index, _ in plan.numbered:
        stage = plan.numbered[number][2]
        ranks = [other.ranks[0] for other in plan.pipelines[index].stages]
        kept = {rank: sum(rank in before[layer] for layer in range(stage.first, stage.last)) for rank in ranks}
        keeper, rank = max(ranks, key=lambda one: kept[one]), stage.ranks[0]
        if kept[keeper] > kept[rank]:
            exchanged = {rank: keeper, keeper: rank}
            other = renumbered(plan, [exchanged.get(one, one) for one in range(len(question.profile.devices))])
            plan = other if seconds(other) <= most_s else plan
    return plan


def _candidates(question: ReplanQuestion) -> Iterator[Plan]:
    plan, profile = question.report.plan, question.profile
    if plan.leader_of:
        yield improved(plan, profile, question.request)
    busy = while_computing(profile, plan.ranks)
    recut = replace(plan, pipelines=tuple(_recut(one, busy, question.request) for one in plan.pipelines))
    yield recut
    if len(plan.pipelines) > 1:
        return
    (pipeline,) = plan.pipelines
    request = replace(question.request, thorough=False, max_pipelines=1, micro_batch_choices=(pipeline.micro_batch,))
    free = _decided(profile, request)
    if free is None:
        return
    kept_s = min(outlined(one, profile).step_s for one in (plan, recut))
    if set(pipeline.held) <= set(free.ranks) or outlined(free, profile).step_s < (1 - IDLE_GAIN) * kept_s:
        yield free


def _recut(pipeline: PipelinePlan, profile: ClusterProfile, request: PlanRequest) -> PipelinePlan:
    """One pipeline with other cuts, another order of its ranks and other depths, if one is found; else as it is."""
    ranks = sorted(pipeline.held)
    # A short last micro-batch is taken to be a whole one.
    whole = -(-pipeline.sequences // pipeline.micro_batch) * pipeline.micro_batch
    request = replace(
        request,
        global_batch=whole,
        micro_batch_choices=(pipeline.micro_batch,),
        max_pipelines=1,
        indifference=max(request.indifference, 1e-4),
        allow_idle=False,
        thorough=False,
    )
    found = _decided(restricted(profile, ranks), request)
    return pipeline if found is None else replace(renumbered(found, ranks).pipelines[0], sequences=pipeline.sequences)


def _decided(profile: ClusterProfile, request: PlanRequest) -> Plan | None:
    try:
        decision = decide(profile, request)
    except UserError:  # such as a micro-batch, given by hand, that does not divide the batch
        return None
    return decision.plan if decision is not None else None


def moving_s(profile: ClusterProfile, old: Plan, new: Plan) -> float:
    """Seconds until every rank has the trained state that it needs and does not have, as ``state.redistribute`` sends it: a
    parameter's owner sends the values to all that will hold it, and the moments to its next owner. Of a group first all give
    their parts to the owner; whole tensors are sent to each member. Each rank receives and sends one thing at a time."""
    model, sent = profile.model, dict[_Way, float]()
    after, together = owned_units(new, model), {stage.ranks[0]: stage.ranks for _, _, stage in new.numbered}
    needing = holders(new)
    for (layer, unit), (source, count) in owned_units(old, model).items():
        owning = together[after[layer, unit][0]]
        for rank in needing[layer]:
            size = count * (_VALUE_BYTES + _moments_bytes(model.layers[layer]) * (rank in owning))
            sent[source, rank, layer] = sent.get((source, rank, layer), 0) + size
    return _busiest_s(profile, _parts(old, model)) + _busiest_s(profile, sent)


def _parts(plan: Plan, model: ModelCost) -> dict[_Way, float]:
    """Bytes that members of groups give their first rank: their share of what is cut, and of several pipelines theirs owns."""
    found, weight = {}, plan.state_weights
    for _, _, stage in plan.numbered:
        for place, rank in enumerate(stage.ranks[1:], 1):
            for number in range(stage.first, stage.last):
                layer, leader = model.layers[number], stage.ranks[0]
                owned = weight[leader] / sum(weight[other] for other in held_by(plan, number))
                experts = layer.expert_trainable * stage.expert_share(place)
                cut = (layer.divided_trainable - layer.expert_trainable) * stage.share(place) + experts
                found[rank, leader, number] = owned * cut * (_VALUE_BYTES + _moments_bytes(layer))
    return found


def _moments_bytes(layer: LayerCost) -> float:
    """Bytes of a trained parameter's moments."""
    return _MOMENTS_BYTES - layer.moments_saving_bytes / max(1, layer.trainable_parameters)


def _busiest_s(profile: ClusterProfile, sent: Mapping[_Way, float]) -> float:
    busy: dict[tuple[str, int], float] = {}
    for (source, destination, _), size in sent.items():
        if source != destination and size:
            seconds = profile.transfer_s(source, destination, size)
            for end in (("send", source), ("receive", destination)):
                busy[end] = busy.get(end, 0.0) + seconds
    return max(busy.values(), default=0.0)


def main() -> int:
    """Question on stdin, answer on stdout. Stands back behind whatever else the machine computes."""
    os.nice(10)
    question = decode(ReplanQuestion, json.load(sys.stdin), "question")
    json.dump(encode(answer(question), infinity_as_text=True), sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
