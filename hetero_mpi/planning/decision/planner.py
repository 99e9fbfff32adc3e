"""``make_plan``: from a profile and a request to a plan, with a report of its prediction, bound, memory and reasons.

``complete_plan`` checks a plan that was written or edited by hand and works out the same for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from hetero_mpi.errors import UserError
from hetero_mpi.planning.bounds import fluid_bound_s
from hetero_mpi.planning.decision.alone import best_alone, or_alone
from hetero_mpi.planning.decision.decide import decide, in_order, nearest_searched
from hetero_mpi.planning.decision.explain import busiest, grouped, idle_ranks, reasons
from hetero_mpi.planning.decision.group_rules import group_problems
from hetero_mpi.planning.decision.shortage import explain_shortage
from hetero_mpi.planning.decision.streaming import streamed_texts
from hetero_mpi.planning.dry_run import validate
from hetero_mpi.planning.durations import host_optimizer_s
from hetero_mpi.planning.memory import predict_hosts, predict_memory, with_copies
from hetero_mpi.planning.orders import INTERLEAVINGS, ORDERS, OTHER_ORDERS, SCHEDULES
from hetero_mpi.planning.outline import outlined
from hetero_mpi.planning.schedule import schedule_of
from hetero_mpi.planning.simulator import SimulatedStep
from hetero_mpi.planning.types.cost import COPY_BYTES
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan
from hetero_mpi.planning.types.plan_report import HostMemory, IdleRank, PlanReport, RankMemory
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.request import PlanRequest
from hetero_mpi.planning.words import describe_bytes


def make_plan(profile: ClusterProfile, request: PlanRequest) -> PlanReport:
    """The fastest plan that fits in memory, by simulated step time, with figures and reasons; deterministic.

    Decides which ranks take part in which pipelines and in which order, shares of the batch,
    the layers of every stage, micro-batches, warm-up depths, splitting and where to recompute. How ranks are numbered changes
    nothing, unless the request is indifferent to small differences: then ranks stand in their own order where that costs no
    more (``natural``). Of equally fast plans, the one with fewer ranks is taken. Copies of the trained state are
    counted where ranks compute in host memory, unless nothing fits beside them. Raises ``UserError`` when nothing fits: what is
    short by how much, and which changes were found to help.
    """
    if request.schedule in OTHER_ORDERS:
        return _in_order(profile, request)
    plain, profile = profile, with_copies(profile, request)
    decision = decide(profile, request)
    remarks: tuple[str, ...] = ()
    if decision is None and profile is not plain:
        remarks = (f"memory: no plan leaves room for {_copies(plain, request)}; the run says which it goes without",)
        profile, decision = plain, decide(plain, request)
    elif profile is not plain:
        remarks = (f"memory: {_copies(plain, request)} are counted",)
    if decision is None:
        raise UserError(explain_shortage(profile, request))
    single = best_alone(plain, request)
    decision = or_alone(decision, single, plain, request, profile)
    if single is not None and single.step_s is not None and single.step_s < decision.step_s:
        why = "it has no room for copies of the trained state" if request.allow_idle else "plan.allow_idle = false"
        single = replace(single, problem=why)
    plan = decision.plan
    assert not (problems := [*_chain_problems(plan, profile), *_rank_problems(plan, profile)]), problems
    simulation = outlined(plan, profile)
    idle = idle_ranks(decision, profile, request)
    told = (*reasons(decision, profile, request, simulation), *streamed_texts(plan, profile), *remarks)
    full = _figures(plan, profile, request, simulation)
    return replace(full, alone=single, idle=idle, reasons=(*told, *_given_up(plan, plain)))


def _in_order(profile: ClusterProfile, request: PlanRequest) -> PlanReport:
    """The plan for the nearest schedule that is searched for, computed in the order that the request names."""
    nearest, name = nearest_searched(request), request.schedule
    found = make_plan(profile, nearest)
    plan = in_order(found.plan, profile, request)
    if plan is None:
        most = max(len(pipeline.stages) for pipeline in found.plan.pipelines)
        raise UserError(
            f"schedule = {name!r}: the {most} ranks of a pipeline cannot hold two stages each of the chain's "
            f"{found.plan.layers} layers in that order and in their memory (streamed stages are not tried); "
            f"take another schedule, or fewer ranks"
        )
    full = complete_plan(plan, profile, nearest)
    alike = "ranks" if name in INTERLEAVINGS else "ranks and layers"
    told = f"{name}: {SCHEDULES[name]}", f"{alike} as for the schedule {nearest.schedule}"
    return replace(full, idle=found.idle, reasons=(*told, *full.reasons[1:]))


def _copies(profile: ClusterProfile, request: PlanRequest) -> str:
    copies = request.copy_bytes_per_trainable_parameter / COPY_BYTES
    each = copies * profile.model.copy_bytes_per_trainable_parameter
    return f"copies of the trained state ({each:.3g} bytes a trained parameter)"


def complete_plan(plan: Plan, profile: ClusterProfile, request: PlanRequest) -> PlanReport:
    """A hand-written plan, checked, with its prediction, bound, memory, idle ranks and reasons.

    Raises one ``UserError`` that lists every difference: stages that do not cover the chain exactly once, ranks that
    do not exist, occur twice or lack the dtype, batches that do not add up, a schedule that deadlocks, memory that is
    short.
    """
    problems = [*_chain_problems(plan, profile), *_rank_problems(plan, profile), *_batch_problems(plan, request)]
    if problems:
        raise UserError("\n".join(f"plan: {problem}" for problem in problems))
    validate(schedule_of(plan, profile.model), plan, profile.model)
    simulation = outlined(plan, profile)
    full = _figures(plan, profile, request, simulation)
    lines = [
        *(_short(one, f"rank {one.rank} needs", "", "it") for one in full.memory),
        *(_short(one, f"the ranks of host {one.host} need", "its ", "them") for one in full.hosts),
    ]
    if any(lines):
        raise UserError("\n".join(filter(None, lines)))
    idle = (device.rank for device in profile.devices if not plan.of_rank(device.rank))
    together = grouped(plan, profile, simulation.step_s, None)
    told = ("given by hand", *together, busiest(plan, profile, simulation), *streamed_texts(plan, profile))
    return replace(
        full,
        alone=best_alone(profile, request),
        idle=tuple(IdleRank(rank, "not named in the given plan") for rank in idle),
        reasons=(*told, *_given_up(plan, profile)),
    )


def _short(one: RankMemory | HostMemory, who: str, whose: str, them: str) -> str:
    """Of which memory how much is lacking; empty: none is."""
    lacking = one.peak_bytes - one.usable_bytes
    if lacking <= 0:
        return ""
    needs = f"{describe_bytes(one.peak_bytes)} of {whose}{describe_bytes(one.usable_bytes)} usable"
    return f"plan: {who} {needs}: short by {lacking} bytes; give {them} fewer layers or less warm_up"


def _given_up(plan: Plan, profile: ClusterProfile) -> Iterator[str]:
    """What the user has given up for shorter messages and for memory."""
    model = profile.model
    if model.wire is not None and any(len(pipeline.held) > 1 for pipeline in plan.pipelines):
        yield f"boundaries travel as {model.wire} (train.wire): the loss is no longer equal to that of one process"
    saved = math.floor(sum(layer.eight_bit_saving_bytes for layer in model.layers))
    if saved:
        yield f"memory: moments in 8 bits take {describe_bytes(saved)} less than in fp32, all owners together"


def differences(plan: Plan, request: PlanRequest) -> list[str]:
    """What a plan that was given does otherwise than the request would have it; none of it keeps it from being run."""
    found = []
    if len(plan.pipelines) > request.max_pipelines:
        found.append(f"{len(plan.pipelines)} pipelines: the planner was to make {request.max_pipelines} at most")
    sizes = _sizes(plan, request)
    for index, pipeline in enumerate(plan.pipelines):
        where, choices = f"pipelines[{index}]", ", ".join(map(str, sizes))
        if pipeline.micro_batch not in sizes:
            found.append(f"{where}: micro_batch = {pipeline.micro_batch}: the job leaves {choices}")
        if pipeline.split_backward and True not in request.split_choices:
            found.append(f"{where}: split_backward = true: the planner was not to split backward")
        again = [i for i, stage in enumerate(pipeline.stages) if stage.recompute not in request.recompute_choices]
        if again:
            stages_text = ", ".join(map(str, again))
            does = str(pipeline.stages[again[0]].recompute).lower()
            found.append(
                f"{where}: recompute = {does} of stages {stages_text}: train.recompute of the job says otherwise"
            )
    return found


def _sizes(plan: Plan, request: PlanRequest) -> list[int]:
    """The micro-batches that the request leaves to the plan: also larger ones where a rank is by itself or several hold a stage."""
    larger = request.alone_micro_batch_choices if plan.leader_of or len(plan.ranks) == 1 else ()
    return sorted({*request.micro_batch_choices, *larger})


def _figures(plan: Plan, profile: ClusterProfile, request: PlanRequest, simulation: SimulatedStep) -> PlanReport:
    return PlanReport(
        plan,
        predicted_step_s=simulation.step_s,
        bound_step_s=_bound_s(plan, profile, request),
        memory=predict_memory(plan, profile, request.memory_reserve),
        hosts=predict_hosts(plan, profile, request.memory_reserve),
    )


def _bound_s(plan: Plan, profile: ClusterProfile, request: PlanRequest) -> float:
    """The fluid bound, with the micro-batches that the plan may have and the optimizer wherever it may run."""
    if any(stage.streamed for _, _, stage in plan.numbered):
        quickest = tuple(
            replace(d, optimizer_s_per_parameter=min(d.optimizer_s_per_parameter, host_optimizer_s(d)))
            for d in profile.devices
        )
        return fluid_bound_s(replace(profile, devices=quickest), request)
    return fluid_bound_s(profile, replace(request, micro_batch_choices=tuple(_sizes(plan, request))))


def _chain_problems(plan: Plan, profile: ClusterProfile) -> Iterator[str]:
    layers = len(profile.model.layers)
    if plan.layers != layers:
        yield f"layers = {plan.layers}: the model's chain has {layers} layers (embedding, blocks, head)"
    if not plan.pipelines:
        yield "no pipelines: at least one holds the model"
    for index, pipeline in enumerate(plan.pipelines):
        if pipeline.order not in ORDERS:
            yield f"pipelines[{index}].order = {pipeline.order!r}: known are {', '.join(ORDERS)}"
        expected = 0
        for place, stage in enumerate(pipeline.stages):
            where = f"pipelines[{index}].stages[{place}]"
            if stage.first != expected or stage.last <= stage.first:
                yield (
                    f"{where} holds layers [{stage.first}, {stage.last}): it must begin with layer {expected} and hold at least one"
                )
            if stage.warm_up < 0:
                yield f"{where}.warm_up = {stage.warm_up}: must not be negative"
            if stage.slice_sequences is not None and stage.slice_sequences < 1:
                yield f"{where}.slice_sequences = {stage.slice_sequences}: must be at least 1"
            if not 0 < stage.state_weight < math.inf:
                yield f"{where}.state_weight = {stage.state_weight}: must be a number over 0"
            if pipeline.split_backward and place > 0 and (stage.streamed or stage.slice_sequences is not None):
                yield f"{where} is streamed or computed in slices, which goes back in one part: leave out split_backward"
            expected = stage.last
        if expected != layers:
            yield f"pipelines[{index}] ends with layer {expected - 1}: the chain's last layer is {layers - 1}"


def _rank_problems(plan: Plan, profile: ClusterProfile) -> Iterator[str]:
    seen: dict[int, tuple[int, StagePlan]] = {}
    for number, index, stage in plan.numbered:
        yield from group_problems(number, stage, plan, profile)
        for rank in stage.ranks:
            where = f"stage {number} names rank {rank}"
            if not 0 <= rank < len(profile.devices):
                yield f"{where}: the profile has ranks 0 to {len(profile.devices) - 1}"
            elif rank in seen:
                yield from _again(f"{where} again", plan.pipelines[index], seen[rank][0] == index, stage, seen[rank][1])
            elif profile.model.dtype not in profile.devices[rank].dtypes:
                yield f"{where}, whose device does not offer {profile.model.dtype}"
            seen[rank] = index, stage


def _again(where: str, pipeline: PipelinePlan, same: bool, stage: StagePlan, earlier: StagePlan) -> Iterator[str]:
    """What is wrong with a rank's further stage. ``same``: the earlier one is of the same pipeline."""
    if not same:
        yield f"{where}: a rank takes part in one pipeline"
    elif pipeline.order not in INTERLEAVINGS:
        orders = " or ".join(sorted(INTERLEAVINGS))
        yield (
            f"{where}, and the pipeline's order is {pipeline.order!r}: where ranks hold several stages it is {orders}"
        )
    if stage.streamed or earlier.streamed:
        yield f"{where}: a rank with a streamed stage holds no other one"
    if stage.state_weight != earlier.state_weight:
        weights = f"{earlier.state_weight} and {stage.state_weight}"
        yield f"{where}: state_weight is {weights}, but it is the rank's: make them equal"


def _batch_problems(plan: Plan, request: PlanRequest) -> Iterator[str]:
    if plan.global_batch != request.global_batch:
        yield f"global_batch = {plan.global_batch}: the job says {request.global_batch}"
    if plan.sequence_length != request.sequence_length:
        yield f"sequence_length = {plan.sequence_length}: the job says {request.sequence_length}"
    for index, pipeline in enumerate(plan.pipelines):
        if not 1 <= pipeline.micro_batch <= pipeline.sequences:
            yield (
                f"pipelines[{index}]: micro_batch = {pipeline.micro_batch} of sequences = {pipeline.sequences}: must be at "
                f"least 1 and no more than its sequences"
            )
    shares = [pipeline.sequences for pipeline in plan.pipelines]
    if sum(shares) != plan.global_batch:
        terms = " + ".join(map(str, shares))
        yield f"sequences = {terms}: the pipelines' shares must add up to global_batch = {plan.global_batch}"
