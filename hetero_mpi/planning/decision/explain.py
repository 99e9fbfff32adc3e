"""The sentences that go with a plan: why this one, what was beaten by how much, what limits it, why a rank is idle."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from hetero_mpi.planning.bounds import usable_devices
from hetero_mpi.planning.contention import slowness, while_running
from hetero_mpi.planning.decision.alternatives import Outcome, other_ways
from hetero_mpi.planning.decision.decide import Decision, decide
from hetero_mpi.planning.device_times import disk_s, weights_s
from hetero_mpi.planning.durations import Durations, pass_s, update_s
from hetero_mpi.planning.memory import host_state_bytes, streamed_bytes
from hetero_mpi.planning.schedule import Action, Op
from hetero_mpi.planning.simulator import SimulatedStep
from hetero_mpi.planning.types.cluster_changes import restricted
from hetero_mpi.planning.types.plan import FROM_DISK, IdleRank, Plan, StagePlan
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.request import PlanRequest
from hetero_mpi.util import units

SMALL = 6
"""Up to so many ranks in use, the reasons say what the one that computes least is good for."""
LIMITING = 0.1
"""Copies that take more than this share of a stage's time are said to limit it."""
UNTRIED = "the search found no faster plan with it"


def reasons(
    decision: Decision, profile: ClusterProfile, request: PlanRequest, simulation: SimulatedStep
) -> tuple[str, ...]:
    """Why the plan of ``decision`` is the plan."""
    plan = decision.plan
    return (
        _counts(plan, profile),
        *grouped(plan, profile, simulation.step_s, decision.without_groups_s),
        *(other.sentence(simulation.step_s) for other in other_ways(decision, profile, request)),
        busiest(plan, profile, simulation),
        *_least(plan, profile, request, simulation),
    )


def grouped(plan: Plan, profile: ClusterProfile, step_s: float, without_s: float | None) -> Iterator[str]:
    """Which ranks hold a stage together, and what that is good for. ``without_s``: of the best plan without; None: not known."""
    for number, index, stage in plan.numbered:
        if stage.grouped:
            where = f"stage {number} of pipeline {index}" if len(plan.pipelines) > 1 else f"stage {number}"
            text = f"ranks {_listed(stage.ranks)} hold {where} together, {_listed(stage.shares)} of "
            text += f"{profile.model.heads} key/value heads"
            experts = f", {_listed(stage.experts)} of {profile.model.experts} experts" if stage.experts else ""
            yield text + experts
            yield from _on_processors(stage, profile)
        if stage.grouped and slowness(profile, plan.ranks).keys() & {*stage.ranks}:
            yield f"ranks of stage {number} have less than a core a thread: they wait longer for each other than is predicted"
    if plan.leader_of and without_s is not None:
        without = "without ranks that hold a stage together"
        yield (
            Outcome(f"the best plan {without}", without_s).sentence(step_s)
            if without_s < math.inf
            else f"no plan {without} fits in memory"
        )


def _on_processors(stage: StagePlan, profile: ClusterProfile) -> Iterator[str]:
    """Which experts processors compute beside devices with memory of their own."""
    devices = [profile.devices[rank] for rank in stage.ranks]
    if not stage.experts or all(one.backend == "cpu" for one in devices):
        return
    layers = profile.model.layers[stage.first : stage.last]
    held = sum(one.parameter_bytes * one.expert_parameters / max(1, one.parameters) for one in layers)
    for place, one in enumerate(devices):
        if one.backend == "cpu" and stage.experts[place]:
            size = units.size(held * stage.expert_share(place))
            own = f"{stage.experts[place]} experts of each layer, {size} that no device holds"
            yield f"the processor of rank {one.rank} computes {own}"


def streamed_texts(plan: Plan, profile: ClusterProfile) -> Iterator[str]:
    """Sentences on what each rank streams, and what the copies cost; and on hosts of which it is not known what they could keep."""
    profile = while_running(profile, plan)
    if profile.model.trained_whole and (hosts := [host.name for host in profile.hosts if not host.memory_bytes]):
        yield f"memory of {units.shorten(', '.join(hosts), 60)} is not known: no rank keeps its state in host memory there"
    for number, _, stage in plan.numbered:
        if stage.streamed:
            yield f"rank {stage.ranks[0]} {_streamed_text(number, plan, profile)}"


def _streamed_text(number: int, plan: Plan, profile: ClusterProfile) -> str:
    _, index, stage = plan.numbered[number]
    model, device = profile.model, profile.devices[stage.ranks[0]]
    if model.trained_whole and device.shares_host_memory:
        return "computes layer by layer; all that it trains stays in its memory"
    size_bytes, files = streamed_bytes(model, stage.first, stage.last), _files_text(number, plan, profile)
    if weights_s(device, size_bytes) == 0.0:
        return (
            f"streams {units.size(size_bytes)} from mapped files, of which its memory keeps what it has room for{files}"
        )
    free = replace(device, copy_latency_s=0.0, host_to_device_bytes_per_s=math.inf, device_to_host_bytes_per_s=math.inf)
    without = replace(profile, devices=tuple(free if one is device else one for one in profile.devices))
    seconds, computing = (
        pass_s(known, plan.pipelines[index], stage, plan.sequence_length) for known in (profile, without)
    )
    share, cost = 1 - computing / seconds, "copies take"
    if share >= LIMITING:
        cost = f"copies limit it: {units.size(device.host_to_device_bytes_per_s)}/s,"
    with_state = ""
    if model.trained_whole:
        kept = units.size(host_state_bytes(model, stage.first, stage.last))
        each = f"optimizer {units.seconds(update_s(number, plan, profile))}"
        with_state = f" ({kept} there with the rest of what it trains; {each})"
    return f"streams {units.size(size_bytes)} from host memory{with_state}, {cost} {share:.0%} of its time{files}"


def _files_text(number: int, plan: Plan, profile: ClusterProfile) -> str:
    """Words on what each pass reads from the disk, and how long a step waits for it; none where it reads nothing."""
    _, index, stage = plan.numbered[number]
    if not stage.on_disk:
        return ""
    pipeline, device = plan.pipelines[index], profile.devices[stage.ranks[0]]
    filed = sum(map(profile.model.streamed_bytes, stage.disk_layers(plan.layers)))
    blocks = f"{units.plural(stage.on_disk, 'block')} of these, {units.size(filed)}"
    text = f"; {blocks}, for which its host has no memory, are {FROM_DISK}"
    second_s = disk_s(profile, device, filed)
    if not second_s:
        return f"{text}, whose speed was not measured: the prediction leaves it out"
    with_s, without_s = (
        pass_s(profile, pipeline, one, plan.sequence_length) for one in (stage, replace(stage, on_disk=0))
    )
    waits = units.seconds(pipeline.micro_batches * (with_s - without_s))
    return f"{text} at {units.bandwidth(filed / second_s)}: a step waits {waits} for it"


def _listed(numbers: Sequence[int]) -> str:
    """
    >>> _listed([0, 1, 2])
    '0, 1 and 2'
    """
    return " and ".join([", ".join(map(str, numbers[:-1])), str(numbers[-1])])


def _least(plan: Plan, profile: ClusterProfile, request: PlanRequest, simulation: SimulatedStep) -> Iterator[str]:
    """A sentence on the rank that computes least, where the cluster is small: the best plan without it. (Of two ranks, how
    fast the other is by itself is what ``PlanReport.alone`` says.)"""
    used = sorted(simulation.busy_s)
    if len(profile.devices) == 2 or not 2 <= len(used) <= SMALL or not request.allow_idle:
        return
    rank = min(used, key=lambda r: (simulation.busy_s[r], r))
    held = _held(plan, rank)
    others = restricted(profile, [d.rank for d in profile.devices if d.rank != rank])
    found = decide(others, replace(request, brief=True))
    name = f"rank {rank} ({profile.devices[rank].name}) holds {held} ({_stages(plan, rank)}): without it"
    if found is None:
        yield f"{name} the model does not fit in memory"
    else:
        change = round(units.ratio(found.step_s, simulation.step_s) - 1, 3)
        # The search is not exact: the plan without it may be the shorter one.
        how = f"{abs(change):.1%} {'longer' if change > 0 else 'shorter'}" if change else "as long"
        yield f"{name} the step is {how}"


def _stages(plan: Plan, rank: int) -> str:
    numbers = plan.of_rank(rank)
    return f"stage{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _held(plan: Plan, rank: int) -> str:
    """The layers of a rank."""
    held = (plan.numbered[number][2] for number in plan.of_rank(rank))
    return "; ".join(units.layers(stage.first, stage.last, plan.layers) for stage in held)


def _counts(plan: Plan, profile: ClusterProfile) -> str:
    used = sum(len(pipeline.held) for pipeline in plan.pipelines)
    shares = units.join_with_counts(
        (f"{units.plural(one.micro_batches, 'micro-batch')} of {one.micro_batch}" for one in plan.pipelines), " + "
    )
    many = f" in {len(plan.pipelines)} pipelines" if len(plan.pipelines) > 1 else ""
    return f"{used} of {len(profile.devices)} ranks{many}, {shares} = global batch {plan.global_batch}"


def busiest(plan: Plan, profile: ClusterProfile, simulation: SimulatedStep) -> str:
    """The rank that computes most, or the link that is busier still."""
    rank = max(sorted(simulation.busy_s), key=lambda r: simulation.busy_s[r])
    share = units.ratio(simulation.busy_s[rank], simulation.step_s)
    text = f"busiest: {_stages(plan, rank)} (rank {rank}: {_held(plan, rank)}) computes {share:.0%} of the step"
    costs, links = Durations(plan, profile), dict[tuple[int, int], float]()
    for (number, index, stage), (_, next_index, there) in pairwise(plan.numbered):
        if index != next_index or stage.ranks == there.ranks:
            continue
        last = plan.pipelines[index].micro_batches - 1
        for op, sender, ends in ((Op.SEND_F, number, (stage, there)), (Op.SEND_B, number + 1, (there, stage))):
            seconds = last * costs.of(Action(op, sender, 0))[0] + costs.of(Action(op, sender, last))[0]
            pair = ends[0].ranks[0], ends[1].ranks[0]
            links[pair] = links.get(pair, 0.0) + seconds
    link = max(sorted(links), key=lambda one: links[one], default=None)
    if link is not None and links[link] > simulation.busy_s[rank]:
        text += f"; the link {link[0]} -> {link[1]} is busy {units.ratio(links[link], simulation.step_s):.0%} of it"
    return text


def idle_ranks(decision: Decision, profile: ClusterProfile, request: PlanRequest) -> tuple[IdleRank, ...]:
    """Every rank that the plan leaves out, and why."""
    layers, used = len(profile.model.layers), set(decision.plan.ranks)
    every = min(len(usable_devices(profile)), layers * min(request.max_pipelines, request.global_batch))
    spare = f"{layers} layers of work, {len(profile.devices)} ranks"
    why = spare if len(used) >= every else _without_idle(decision, every, profile, request)
    dtype = profile.model.dtype
    return tuple(
        IdleRank(
            device.rank, why if dtype in device.dtypes else f"its device does not offer {dtype} (it offers {offers})"
        )
        for device in profile.devices
        if device.rank not in used
        for offers in ["/".join(device.dtypes) or "nothing"]
    )


def _without_idle(decision: Decision, ranks: int, profile: ClusterProfile, request: PlanRequest) -> str:
    """The cost of giving work to ``ranks`` ranks, which are as many as can be given something."""
    if decision.at_work_s is None:
        return UNTRIED
    if decision.at_work_s < math.inf:
        best, other = (units.seconds(seconds) for seconds in (decision.step_s, decision.at_work_s))
        if best == other or decision.at_work_s < decision.step_s:
            return f"using {ranks} ranks would not shorten the step ({best} either way)"
        return f"using {ranks} ranks would take {other} per step instead of {best}"
    text = f"no plan that uses {ranks} ranks was found to fit in memory"
    if True in request.recompute_choices:
        return text
    again = decide(profile, replace(request, recompute_choices=(False, True)))
    if again is None or again.at_work_s in (None, math.inf):
        return text + ", nor with recompute"
    return text + f'; with train.recompute = "auto" it fits: {units.seconds(again.at_work_s)} per step'
