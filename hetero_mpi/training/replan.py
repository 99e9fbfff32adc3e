"""Replan during a run when the speed of machines has changed, without changing numerical results.

The number of pipelines, their batch shares and their micro-batch sizes stay the same. With several pipelines, each keeps its
ranks.

Run as a program, this module reads a question from stdin and writes the answer to stdout as JSON. The separate process keeps
planning from holding the training process's interpreter lock.
"""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from hetero_mpi.planning.contention import while_computing
from hetero_mpi.planning.decision.decide import decide
from hetero_mpi.planning.decision.groups import improve_group_plan
from hetero_mpi.planning.decision.planner import complete_plan
from hetero_mpi.planning.decision.several_stages import in_requested_order, nearest_searched
from hetero_mpi.planning.outline import outlined
from hetero_mpi.planning.owners import owned_units
from hetero_mpi.planning.schedule import holders
from hetero_mpi.planning.types.cluster_changes import renumbered, restricted
from hetero_mpi.planning.types.codec import decode, encode
from hetero_mpi.planning.types.cost import LayerCost, ModelCost
from hetero_mpi.planning.types.plan import IdleRank, PipelinePlan, Plan, PlanReport
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.request import PlanRequest
from hetero_mpi.util import units
from hetero_mpi.util.errors import UserError

_REPLANNED_REASON = "made during the run, for the speeds measured then"
_TOO_SLOW_REASON = "the rank or its links are too slow, by the speeds measured during the run"
_NO_FASTER_PLAN_REASON = "the search found no faster plan with it, by the speeds measured during the run"
MIN_IDLING_GAIN_RATIO = 0.2
"""Minimum relative gain for idling a working rank, because an idle rank cannot show that it has recovered."""


MIN_GAIN_RATIO = 0.05
"""Minimum relative gain; predictions are too inaccurate for smaller ones to count."""
MIN_PAYBACK = 2.0
"""Minimum gain over the remaining steps, as a multiple of the cost of moving state."""
_VALUE_BYTES, _MOMENTS_BYTES = 4, 8
"""Bytes sent per trained parameter for its value and for its two moments, in fp32."""
_Transfer = tuple[int, int, int]
"""(from rank, to rank, layer)"""


@dataclass(frozen=True)
class ReplanQuestion:
    """The running plan and the cluster at its measured speeds."""

    profile: ClusterProfile
    """The profile at the speeds measured during the run (``drifted_profile``)."""
    request: PlanRequest
    report: PlanReport
    """The running plan."""
    remaining_steps: int
    rebuild_s: float
    """Fixed cost of a change, in seconds."""


@dataclass(frozen=True)
class Prospect:
    """The gain and the cost of changing plans."""

    now_s: float
    """Step time of the running plan at the new speeds."""
    then_s: float
    """Step time of the new plan."""
    cost_s: float
    """Seconds to move the trained state."""

    def __str__(self) -> str:
        now, then, cost = map(units.seconds, (self.now_s, self.then_s, self.cost_s))
        return f"a step {now} -> {then}, if layers move in {cost}"

    @property
    def gain_s(self) -> float:
        """Seconds gained per step."""
        return self.now_s - self.then_s

    def hopeless(self, remaining_steps: int) -> bool:
        """Whether the gain is too small, or too few steps remain to pay for the move."""
        return self.gain_s < MIN_GAIN_RATIO * self.now_s or self.gain_s * remaining_steps < MIN_PAYBACK * self.cost_s

    def pays(self, steps_since: int, remaining_steps: int) -> bool:
        """Whether to move layers now, ``steps_since`` steps after the speed change."""
        return not self.hopeless(remaining_steps) and self.gain_s * steps_since >= self.cost_s


@dataclass(frozen=True)
class ReplanAnswer:
    """The best plan found and its gain; the running plan if none is better."""

    report: PlanReport
    prospect: Prospect


def answer(question: ReplanQuestion) -> ReplanAnswer:
    """Find the plan that minimises the remaining run time including the move. Deterministic."""
    now, profile = question.report.plan, question.profile

    def step_s(plan: Plan) -> float:
        return outlined(plan, profile).step_s

    def cost_s(plan: Plan) -> float:
        return question.rebuild_s + moving_s(profile, now, plan)

    def seconds(plan: Plan) -> float:
        return question.remaining_steps * step_s(plan) + cost_s(plan)

    now_s = step_s(now)
    best, least_s = now, question.remaining_steps * now_s
    # A new tensor-parallel group would change rounding: none is formed during a run.
    groups = question.request.groups and bool(now.leader_of)
    searched = replace(question, request=replace(nearest_searched(question.request), groups=groups))
    for candidate in _candidates(searched):
        plan = in_requested_order([candidate], profile, replace(question.request, allow_idle=False))
        if plan is not None and (total_s := seconds(plan)) < least_s:
            best, least_s = plan, total_s
    if best is not now:
        for plan in (_with_fewer_moves(best, question, seconds), best):
            with contextlib.suppress(UserError):  # out of memory after an exchange, or on a shared host
                completed = complete_plan(plan, profile, question.request, _REPLANNED_REASON)
                idle = tuple(IdleRank(entry.rank, _why_idle(entry.rank, question)) for entry in completed.idle)
                return ReplanAnswer(replace(completed, idle=idle), Prospect(now_s, step_s(plan), cost_s(plan)))
    return ReplanAnswer(question.report, Prospect(now_s, now_s, 0.0))


def _why_idle(rank: int, question: ReplanQuestion) -> str:
    """Keep a previous reason that is not about speed; otherwise give a new one."""
    reason_by_rank = {idle.rank: idle.reason for idle in question.report.idle}
    model, device = question.profile.model, question.profile.devices[rank]
    if rank in reason_by_rank and model.dtype not in device.dtypes:
        return reason_by_rank[rank]
    return _NO_FASTER_PLAN_REASON if rank in reason_by_rank else _TOO_SLOW_REASON


def _with_fewer_moves(plan: Plan, question: ReplanQuestion, seconds: Callable[[Plan], float]) -> Plan:
    """Swap ranks within pipelines where that keeps layers in place at no cost, as equal ranks differ only by noise."""
    if plan.leader_of:
        return plan
    before = question.report.plan.holders
    most_s = seconds(plan) * (1 + question.request.indifference)
    for number, index, _ in plan.numbered:
        stage = plan.numbered[number][2]
        ranks = [changed.ranks[0] for changed in plan.pipelines[index].stages]
        kept_layers = {rank: sum(rank in before[layer] for layer in range(stage.first, stage.last)) for rank in ranks}
        keeper, rank = max(ranks, key=lambda peer: kept_layers[peer]), stage.ranks[0]
        if kept_layers[keeper] > kept_layers[rank]:
            exchanged = {rank: keeper, keeper: rank}
            changed = renumbered(plan, [exchanged.get(peer, peer) for peer in range(len(question.profile.devices))])
            plan = changed if seconds(changed) <= most_s else plan
    return plan


def _candidates(question: ReplanQuestion) -> Iterator[Plan]:
    plan, profile = question.report.plan, question.profile
    if plan.leader_of:
        yield improve_group_plan(plan, profile, question.request)
    busy = while_computing(profile, plan.ranks)
    recut = replace(plan, pipelines=tuple(_recut(p, busy, question.request) for p in plan.pipelines))
    yield recut
    if len(plan.pipelines) > 1:
        return
    (pipeline,) = plan.pipelines
    request = replace(question.request, thorough=False, max_pipelines=1, micro_batch_choices=(pipeline.micro_batch,))
    free = _decided_plan(profile, request)
    if free is None:
        return
    kept_s = min(outlined(p, profile).step_s for p in (plan, recut))
    if (
        set(pipeline.stages_of) <= set(free.ranks)
        or outlined(free, profile).step_s < (1 - MIN_IDLING_GAIN_RATIO) * kept_s
    ):
        yield free


def _recut(pipeline: PipelinePlan, profile: ClusterProfile, request: PlanRequest) -> PipelinePlan:
    """``pipeline`` with its cuts, rank order and depths planned again; unchanged if that yields no plan."""
    ranks = sorted(pipeline.stages_of)
    # A short last micro-batch counts as full.
    rounded_sequences = -(-pipeline.sequences // pipeline.micro_batch) * pipeline.micro_batch
    request = replace(
        request,
        global_batch=rounded_sequences,
        micro_batch_choices=(pipeline.micro_batch,),
        max_pipelines=1,
        indifference=max(request.indifference, 1e-4),
        allow_idle=False,
        thorough=False,
    )
    plan = _decided_plan(restricted(profile, ranks), request)
    return pipeline if plan is None else replace(renumbered(plan, ranks).pipelines[0], sequences=pipeline.sequences)


def _decided_plan(profile: ClusterProfile, request: PlanRequest) -> Plan | None:
    try:
        decision = decide(profile, request)
    except UserError:  # such as a hand-written micro-batch size that does not divide the batch
        return None
    return decision.plan if decision is not None else None


def moving_s(profile: ClusterProfile, old: Plan, new: Plan) -> float:
    """Seconds to redistribute the trained state as ``state.redistribute`` does.

    Tensor-parallel groups first gather at their first rank. Owners then send values to all new holders, and moments to the new
    owner. Each rank sends and receives one message at a time.
    """
    model, sent = profile.model, dict[_Transfer, float]()
    after, together = owned_units(new, model), {stage.ranks[0]: stage.ranks for _, _, stage in new.numbered}
    needing = holders(new)
    for (layer, unit), (source, count) in owned_units(old, model).items():
        owning = together[after[layer, unit][0]]
        for rank in needing[layer]:
            size = count * (_VALUE_BYTES + _moments_bytes(model.layers[layer]) * (rank in owning))
            sent[source, rank, layer] = sent.get((source, rank, layer), 0) + size
    return _busiest_s(profile, _group_part_bytes(old, model)) + _busiest_s(profile, sent)


def _group_part_bytes(plan: Plan, model: ModelCost) -> dict[_Transfer, float]:
    """Bytes that group members send to their first rank: the part of their shards whose state that rank owns."""
    bytes_by_transfer, weight = {}, plan.state_weights
    for _, _, stage in plan.numbered:
        for member, rank in enumerate(stage.ranks[1:], 1):
            for number in range(stage.first, stage.last):
                layer, leader = model.layers[number], stage.ranks[0]
                owned = weight[leader] / sum(weight[holder] for holder in plan.holders[number])
                experts = layer.expert_trainable * stage.expert_share(member)
                cut = (layer.divided_trainable - layer.expert_trainable) * stage.share(member) + experts
                bytes_by_transfer[rank, leader, number] = owned * cut * (_VALUE_BYTES + _moments_bytes(layer))
    return bytes_by_transfer


def _moments_bytes(layer: LayerCost) -> float:
    return _MOMENTS_BYTES - layer.moments_saving_bytes / max(1, layer.trainable_parameters)


def _busiest_s(profile: ClusterProfile, sent: Mapping[_Transfer, float]) -> float:
    busy: dict[tuple[str, int], float] = {}
    for (source, destination, _), size in sent.items():
        if source != destination and size:
            seconds = profile.transfer_s(source, destination, size)
            for end in (("send", source), ("receive", destination)):
                busy[end] = busy.get(end, 0.0) + seconds
    return max(busy.values(), default=0.0)


def main() -> int:
    """Read the question from stdin and write the answer to stdout, at low priority."""
    os.nice(10)
    question = decode(ReplanQuestion, json.load(sys.stdin), "question")
    json.dump(encode(answer(question), infinity_as_text=True), sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
