"""Explain a plan: the cost of alternatives, the bottleneck, and why ranks are idle."""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from hetero_mpi.planning.bounds import usable_devices
from hetero_mpi.planning.contention import slowness, while_running
from hetero_mpi.planning.decision.alternatives import Outcome, alternative_outcomes, without_rank
from hetero_mpi.planning.decision.decide import decide
from hetero_mpi.planning.device_times import disk_s, weights_s
from hetero_mpi.planning.durations import Durations, pass_s, update_s
from hetero_mpi.planning.memory import host_state_bytes, streamed_bytes
from hetero_mpi.planning.schedule import Action, Op
from hetero_mpi.planning.search.search import Decision
from hetero_mpi.planning.simulator import SimulatedStep
from hetero_mpi.planning.types.cluster_changes import with_free_links
from hetero_mpi.planning.types.plan import FROM_DISK, IdleRank, Plan, StagePlan
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.request import PlanRequest
from hetero_mpi.util import units

MAX_RANKS_TO_EXPLAIN_LEAST = 6
"""With at most this many ranks in use, the reasons include the best plan without the least busy rank."""
MIN_LIMITING_COPY_RATIO = 0.1
"""Minimum share of a stage's time that copies must take to be reported as its limit."""
MIN_NAMED_CHANGE_RATIO = 0.02
"""Step times that differ by less count as about equal in the reasons."""
NO_FASTER_PLAN = "the search found no faster plan with it"


def reasons(decision: Decision, profile: ClusterProfile, request: PlanRequest, step: SimulatedStep) -> tuple[str, ...]:
    """Sentences that explain the chosen plan."""
    plan = decision.plan
    return (
        _counts_sentence(plan, profile),
        *group_texts(plan, profile, step.step_s, decision.without_groups_s),
        *(outcome.sentence(step.step_s) for outcome in alternative_outcomes(decision, profile, request)),
        busiest_text(plan, profile, step),
        *_least_busy(decision, profile, request, step),
    )


def group_texts(plan: Plan, profile: ClusterProfile, step_s: float, without_s: float | None) -> Iterator[str]:
    """Describe tensor-parallel groups and their gain. ``without_s``: best step time without groups, if known."""
    for number, index, stage in plan.numbered:
        if stage.grouped:
            where = "the model" if plan.undivided else f"stage {number}"
            where += f" (copy {index})" if plan.undivided and len(plan.pipelines) > 1 else ""
            text = f"ranks {units.listed(stage.ranks)} share {where} (tensor parallelism): {units.listed(stage.shares)} of "
            text += f"{profile.model.heads} key/value heads"
            experts = f", {units.listed(stage.experts)} of {profile.model.experts} experts" if stage.experts else ""
            yield text + experts
            yield from _cpu_expert_sentences(stage, profile)
        if stage.grouped and slowness(profile, plan.ranks).keys() & {*stage.ranks}:
            yield f"ranks of stage {number} have less than one core per thread: they wait longer for each other than predicted"
    if plan.leader_of and without_s is not None:
        without = "without tensor parallelism"
        yield (
            Outcome(f"the best plan {without}", without_s).sentence(step_s)
            if without_s < math.inf
            else f"no plan {without} fits in memory"
        )


def _cpu_expert_sentences(stage: StagePlan, profile: ClusterProfile) -> Iterator[str]:
    """Describe the experts that a group's CPU ranks compute."""
    devices = [profile.devices[rank] for rank in stage.ranks]
    if not stage.experts or all(device.backend == "cpu" for device in devices):
        return
    layers = profile.model.layers[stage.first : stage.last]
    held_bytes = sum(layer.parameter_bytes * layer.expert_parameters / max(1, layer.parameters) for layer in layers)
    for index, device in enumerate(devices):
        if device.backend == "cpu" and stage.experts[index]:
            size = units.size(held_bytes * stage.expert_share(index))
            experts = f"{stage.experts[index]} experts of each layer, {size} that no GPU holds"
            yield f"the CPU of rank {device.rank} computes {experts}"


def offload_texts(plan: Plan, profile: ClusterProfile) -> Iterator[str]:
    """Describe each offloaded stage, its copy time, and hosts whose memory size is unknown."""
    profile = while_running(profile, plan)
    if profile.model.trained_whole and (hosts := [host.name for host in profile.hosts if not host.memory_bytes]):
        yield f"the memory size of {units.shorten(', '.join(hosts), 60)} is unknown: no rank keeps state in host memory there"
    for number, _, stage in plan.numbered:
        if stage.streamed:
            yield f"rank {stage.ranks[0]} {_streamed_text(number, plan, profile)}"


def _streamed_text(number: int, plan: Plan, profile: ClusterProfile) -> str:
    _, index, stage = plan.numbered[number]
    model, device = profile.model, profile.devices[stage.ranks[0]]
    if model.trained_whole and device.shares_host_memory:
        return "computes layer by layer; its trained state stays in its memory"
    size_bytes, files = streamed_bytes(model, stage.first, stage.last), _files_text(number, plan, profile)
    if weights_s(device, size_bytes) == 0.0:
        return f"streams {units.size(size_bytes)} from mapped files, cached as far as memory allows{files}"
    profiles = profile, with_free_links(profile)
    seconds, computing = (pass_s(p, plan.pipelines[index], stage, plan.sequence_length) for p in profiles)
    share, cost = 1 - computing / seconds, "copies take"
    if share >= MIN_LIMITING_COPY_RATIO:
        cost = f"copies limit it: {units.bandwidth(device.host_to_device_bytes_per_s)},"
    with_state = ""
    if model.trained_whole:
        state_size = units.size(host_state_bytes(model, stage.first, stage.last))
        update_time = f"optimizer {units.seconds(update_s(number, plan, profile))}"
        with_state = f" ({state_size} there with the rest of its trained state; {update_time})"
    return f"streams {units.size(size_bytes)} from host memory{with_state}, {cost} {units.percent(share)} of its time{files}"


def _files_text(number: int, plan: Plan, profile: ClusterProfile) -> str:
    """Describe a stage's blocks on disk and how long a step waits for them; empty if all are in memory."""
    _, index, stage = plan.numbered[number]
    if not stage.on_disk:
        return ""
    pipeline, device = plan.pipelines[index], profile.devices[stage.ranks[0]]
    filed = sum(map(profile.model.streamed_bytes, stage.disk_layers(plan.layers)))
    blocks = f"{units.plural(stage.on_disk, 'block')} of these, {units.size(filed)}"
    text = f"; {blocks}, for which its host has no memory, are {FROM_DISK}"
    second_s = disk_s(profile, device, filed)
    if not second_s:
        return f"{text}, whose speed was not measured: the prediction omits it"
    with_s, without_s = (
        pass_s(profile, pipeline, variant, plan.sequence_length) for variant in (stage, replace(stage, on_disk=0))
    )
    waits = units.seconds(pipeline.micro_batches * (with_s - without_s))
    return f"{text} at {units.bandwidth(filed / second_s)}: a step waits {waits} for it"


def _least_busy(
    decision: Decision, profile: ClusterProfile, request: PlanRequest, step: SimulatedStep
) -> Iterator[str]:
    """On small clusters, compare with the best plan without the least busy rank (two ranks: see ``PlanReport.alone``)."""
    plan, used = decision.plan, sorted(step.busy_s)
    if len(profile.devices) == 2 or not 2 <= len(used) <= MAX_RANKS_TO_EXPLAIN_LEAST or not request.allow_idle:
        return
    rank = min(used, key=lambda r: (step.busy_s[r], r))
    outcome = without_rank(rank, (plan, *decision.similar), profile, request).plan_again()
    part = "the whole model" if plan.undivided else f"{_layers_text(plan, rank)} ({_stages_text(plan, rank)})"
    text = outcome.problem
    if outcome.step_s is not None:
        change = round(units.ratio(outcome.step_s, step.step_s) - 1, 3)
        # The search is a heuristic: the plan without the rank may be slightly faster.
        comparison = f"{units.percent(abs(change))} {'longer' if change > 0 else 'shorter'}"
        text = f"the step is {comparison if abs(change) >= MIN_NAMED_CHANGE_RATIO else 'about equally long'}"
    yield f"rank {rank} ({profile.devices[rank].name}) holds {part}: planned without it, {text}"


def _stages_text(plan: Plan, rank: int) -> str:
    numbers = plan.of_rank(rank)
    return f"stage{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _layers_text(plan: Plan, rank: int) -> str:
    rank_stages = (plan.numbered[number][2] for number in plan.of_rank(rank))
    return "; ".join(units.layers(stage.first, stage.last, plan.layers, plan.sequence_length) for stage in rank_stages)


def _counts_sentence(plan: Plan, profile: ClusterProfile) -> str:
    used = sum(len(pipeline.stages_of) for pipeline in plan.pipelines)
    shares = units.join_with_counts(
        (f"{units.plural(p.micro_batches, 'micro-batch')} of {p.micro_batch}" for p in plan.pipelines), " + "
    )
    pipelines_text = f", {plan.replicas}" if len(plan.pipelines) > 1 else ""
    return f"{used} of {units.plural(len(profile.devices), 'rank')}{pipelines_text}, {shares} = global batch {plan.global_batch}"


def busiest_text(plan: Plan, profile: ClusterProfile, simulation: SimulatedStep) -> str:
    """Describe the busiest rank, and the busiest link if it is busier."""
    rank = max(sorted(simulation.busy_s), key=lambda r: simulation.busy_s[r])
    share = units.ratio(simulation.busy_s[rank], simulation.step_s)
    part = f"rank {rank}" if plan.undivided else f"{_stages_text(plan, rank)} (rank {rank}: {_layers_text(plan, rank)})"
    text = f"busiest: {part} computes {units.percent(share)} of the step"
    costs, links = Durations(plan, profile), dict[tuple[int, int], float]()
    for (number, index, stage), (_, next_index, behind) in pairwise(plan.numbered):
        if index != next_index or stage.ranks == behind.ranks:
            continue
        last = plan.pipelines[index].micro_batches - 1
        for op, sender, ends in ((Op.SEND_F, number, (stage, behind)), (Op.SEND_B, number + 1, (behind, stage))):
            seconds = last * costs.cost_of(Action(op, sender, 0))[0] + costs.cost_of(Action(op, sender, last))[0]
            pair = ends[0].ranks[0], ends[1].ranks[0]
            links[pair] = links.get(pair, 0.0) + seconds
    link = max(sorted(links), key=lambda pair_of_ranks: links[pair_of_ranks], default=None)
    if link is not None and links[link] > simulation.busy_s[rank]:
        text += f"; the link {link[0]} -> {link[1]} is busy {units.percent(units.ratio(links[link], simulation.step_s))} of it"
    return text


def idle_ranks(decision: Decision, profile: ClusterProfile, request: PlanRequest) -> tuple[IdleRank, ...]:
    """List the idle ranks and why each is idle."""
    layers, used = len(profile.model.layers), set(decision.plan.ranks)
    max_ranks = min(len(usable_devices(profile)), layers * min(request.max_pipelines, request.global_batch))
    spare = f"{units.plural(layers, 'layer')} of work, {units.plural(len(profile.devices), 'rank')}"
    reason = spare if len(used) >= max_ranks else _without_idle(decision, max_ranks, profile, request)
    dtype = profile.model.dtype
    return tuple(
        IdleRank(
            device.rank,
            reason if dtype in device.dtypes else f"its device does not support {dtype} (it supports {offers})",
        )
        for device in profile.devices
        if device.rank not in used
        for offers in ["/".join(device.dtypes) or "nothing"]
    )


def _without_idle(decision: Decision, ranks: int, profile: ClusterProfile, request: PlanRequest) -> str:
    """Explain what it would cost to give work to ``ranks`` ranks, the largest possible number."""
    if decision.at_work_s is None:
        return NO_FASTER_PLAN
    if decision.at_work_s < math.inf:
        best, at_work = (units.seconds(seconds) for seconds in (decision.step_s, decision.at_work_s))
        if best == at_work or decision.at_work_s < decision.step_s:
            return f"using {units.plural(ranks, 'rank')} would not shorten the step ({best} either way)"
        return f"the best plan found with {units.plural(ranks, 'rank')} takes {at_work} per step instead of {best}"
    text = f"no plan that uses {units.plural(ranks, 'rank')} was found to fit in memory"
    if True in request.recompute_choices:
        return text
    with_recompute = decide(profile, replace(request, recompute_choices=(False, True)))
    if with_recompute is None or with_recompute.at_work_s in (None, math.inf):
        return text + ", nor with recompute"
    return text + f'; with train.recompute = "auto" it fits: {units.seconds(with_recompute.at_work_s)} per step'
