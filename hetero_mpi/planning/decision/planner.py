"""``make_plan``: from a profile and a request to a plan, with a report of its prediction, bound, memory and reasons.

``complete_plan`` checks a plan that was written or edited by hand and works out the same for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import accumulate

from hetero_mpi.planning.bounds import fluid_bound_s
from hetero_mpi.planning.decision.alternatives import Alternative
from hetero_mpi.planning.decision.decide import (
    best_alone,
    decide,
    fits,
    in_order,
    nearest_searched,
    or_alone,
    streamable,
)
from hetero_mpi.planning.decision.explain import busiest, grouped, idle_ranks, reasons, streamed_texts
from hetero_mpi.planning.decision.rules import batch_problems, plan_problems
from hetero_mpi.planning.decision.shortage import closest, with_hosts_divided
from hetero_mpi.planning.device_times import host_optimizer_s
from hetero_mpi.planning.dry_run import validate
from hetero_mpi.planning.memory import (
    host_state_bytes,
    memory_of,
    rank_usable_bytes,
    shared_memories,
    slices_head,
    usable_bytes,
)
from hetero_mpi.planning.memory_model import predict_hosts, predict_memory
from hetero_mpi.planning.orders import INTERLEAVINGS, OTHER_ORDERS, SCHEDULES
from hetero_mpi.planning.outline import outlined
from hetero_mpi.planning.schedule import schedule_of
from hetero_mpi.planning.simulator import SimulatedStep
from hetero_mpi.planning.types.cluster_changes import (
    in_bf16,
    is_packed,
    with_adapters,
    with_copies,
    with_copy_of,
    with_optimizer,
)
from hetero_mpi.planning.types.plan import HostMemory, IdleRank, PipelinePlan, Plan, PlanReport, RankMemory
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.request import PlanRequest
from hetero_mpi.planning.types.sizes import COPY_BYTES, HEAD_TOKENS, STREAMED_LAYERS
from hetero_mpi.util import units
from hetero_mpi.util.errors import UserError


def make_plan(profile: ClusterProfile, request: PlanRequest) -> PlanReport:
    """The fastest plan that fits in memory, by simulated step time, with figures and reasons; deterministic.

    Decides which ranks take part in which pipelines and in which order, shares of the batch,
    the layers of every stage, micro-batches, warm-up depths, splitting and where to recompute. How ranks are numbered changes
    nothing, unless the request is indifferent to small differences: then ranks stand in their own order where that costs no
    more. Of equally fast plans, the one with fewer ranks is taken. Copies of the trained state are
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
        raise UserError("memory.exceeded", explain_shortage(profile, request))
    single = best_alone(plain, request)
    decision = or_alone(decision, single, plain, request, profile)
    if single is not None and single.step_s is not None and single.step_s < decision.step_s:
        why = "it has no room for copies of the trained state" if request.allow_idle else "plan.allow_idle = false"
        single = replace(single, problem=why)
    plan = decision.plan
    assert not (problems := [*plan_problems(plan, profile)]), problems
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
            "plan.schedule_impossible",
            f"schedule = {name!r}: the {most} ranks of a pipeline cannot hold two stages each of the chain's "
            f"{found.plan.layers} layers in that order and in their memory (streamed stages are not tried); "
            f"take another schedule, or fewer ranks",
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
    problems = [*plan_problems(plan, profile), *batch_problems(plan, request)]
    if problems:
        raise UserError("plan.invalid", "\n".join(f"plan: {problem}" for problem in problems))
    validate(schedule_of(plan, profile.model), plan, profile.model)
    simulation = outlined(plan, profile)
    full = _figures(plan, profile, request, simulation)
    short = [
        *(_short(f"rank {one.rank} needs", one) for one in full.memory),
        *(_short(f"the ranks of host {one.host} need", one) for one in full.hosts),
    ]
    if any(short):
        raise UserError("memory.exceeded", "\n".join(filter(None, short)))
    idle = (device.rank for device in profile.devices if not plan.of_rank(device.rank))
    together = grouped(plan, profile, simulation.step_s, None)
    told = ("given by hand", *together, busiest(plan, profile, simulation), *streamed_texts(plan, profile))
    return replace(
        full,
        alone=best_alone(profile, request),
        idle=tuple(IdleRank(rank, "not named in the given plan") for rank in idle),
        reasons=(*told, *_given_up(plan, profile)),
    )


def _short(who: str, one: RankMemory | HostMemory) -> str:
    """How much memory is lacking; empty: none is."""
    lacking = one.peak_bytes - one.usable_bytes
    if lacking <= 0:
        return ""
    needs = f"{units.size(one.peak_bytes)}, and {units.size(one.usable_bytes)} are usable"
    return f"plan: {who} {needs}: short by {lacking} bytes; take fewer layers or less warm_up there"


def _given_up(plan: Plan, profile: ClusterProfile) -> Iterator[str]:
    """Sentences on what the user has given up for shorter steps and for memory."""
    model = profile.model
    if model.wire is not None and any(len(pipeline.held) > 1 for pipeline in plan.pipelines):
        yield f"boundaries travel as {model.wire} (train.wire): the loss is no longer equal to that of one process"
    sliced = [
        str(rank)
        for _, index, stage in plan.numbered
        if slices_head(model, plan.pipelines[index], stage, plan.sequence_length)
        for rank in stage.ranks
    ]
    if sliced:
        how = f"{HEAD_TOKENS:,} tokens at a time, and again in backward (ranks {', '.join(sliced)})"
        yield f"memory: logits and losses are computed {how}"
    saved = math.floor(sum(layer.moments_saving_bytes for layer in model.layers))
    if saved:
        what = "moments in 8 bits take" if model.optimizer == "adamw_8bit" else f"what {model.optimizer} keeps takes"
        yield f"memory: {what} {units.size(saved)} less than AdamW's moments in fp32, all owners together"


def differences(plan: Plan, request: PlanRequest) -> list[str]:
    """Sentences on what a given plan does otherwise than the request would have it; none of it keeps it from being run."""
    found = []
    if len(plan.pipelines) > request.max_pipelines:
        found.append(f"{len(plan.pipelines)} pipelines: the planner was to make {request.max_pipelines} at most")
    stages = [stage for _, _, stage in plan.numbered]
    if request.streaming == "never" and any(stage.streamed for stage in stages):
        found.append("stages are streamed: plan.offload of the job is false")
    if not request.groups and plan.leader_of:
        found.append("ranks hold stages together: plan.tensor_parallel of the job is false")
    most = max(len(plan.of_rank(rank)) for rank in plan.ranks)
    if most > request.stages_per_rank:
        found.append(f"{most} stages on a rank: the planner was to give it {request.stages_per_rank} at most")
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


MOST_RANKS = 6
"""The message names no more ranks than these, those that lack most."""
MORE_RANKS = 8
TOGETHER = "together"
"""How a row of changes begins."""
SHORTEST_SEQUENCE = 32
LORA = 'adapter.method = "lora"'
NOTHING_HELPS = (
    "None of these alone makes it fit, nor all that the job can change together: recompute, the smallest micro-batch, shorter "
    f"sequences, bf16 where it is offered, LoRA over NF4, no memory reserve, {MORE_RANKS} more ranks like the largest. Use a "
    "smaller model, or ranks with more memory."
)


def explain_shortage(profile: ClusterProfile, request: PlanRequest) -> str:
    """The message for a model that fits nowhere."""
    divided = next(with_hosts_divided(profile))
    (pipeline,) = closest(divided, request).plan.pipelines
    count = len(pipeline.stages)
    lines = [
        "the model does not fit in memory on these ranks "
        f"({units.rows_of(request.sequence_length)}, {profile.model.dtype}). "
        f"The one pipeline that comes closest has {count} stage{'s' if count > 1 else ''} "
        f"and micro-batches of {pipeline.micro_batch}:"
    ]
    short = _short_ranks(pipeline, divided, request)
    told = sorted(short, reverse=True)[:MOST_RANKS]
    lines += [text for lacking, text in short if (lacking, text) in told]
    if len(short) > len(told):
        rest = len(short) - len(told)
        lines.append(f"  and {rest} more rank{'s' if rest > 1 else ''}, short by less")
    for host, ranks in shared_memories(profile):
        listed = ", ".join(map(str, ranks))
        lines.append(
            f"  ranks {listed} share the memory of host {host.name}, {units.size(host.memory_bytes)}, here divided evenly"
        )
    if request.streaming != "never" and streamable(profile):
        lines += _host_shortage(profile, request)
    helps = list(remedies(profile, request))
    together = any(text.startswith(TOGETHER) for text in helps)
    heading = "What would make it fit:" if together else "What would make it fit, each by itself:"
    lines.append(heading if helps else NOTHING_HELPS)
    return "\n".join([*lines, *(f"  {text}" for text in helps)])


def _host_shortage(profile: ClusterProfile, request: PlanRequest) -> Iterator[str]:
    """The reason why weights are not streamed, with all that is trained in the memory of the hosts."""
    model, whole = profile.model, profile.model.trained_whole
    if not whole and all(device.shares_host_memory for device in profile.devices):
        return  # mapped files take no memory that must be there
    needed = int(host_state_bytes(model, 0, len(model.layers)))
    names = sorted({device.host for device in profile.devices})
    known = {host.name: usable_bytes(host.memory_bytes, request.memory_reserve) for host in profile.hosts}
    what = "weights, gradients and optimizer state" if whole else "frozen weights"
    text = f"  Streamed, {what} take {units.size(needed)} of the hosts' memory"
    there = sum(known.get(name, needed) for name in names)
    if needed > there:
        other = "would make it fit (what is trained is not kept on disks, since each step writes all of it)"
        if not whole:
            other = "would make it fit, or a disk whose speed is measured: [model] shard_cache, or TMPDIR, on one"
        yield (
            f"{text}, of which {units.size(there)} are usable ([[hosts]] memory_bytes): short by {needed - there} bytes; so "
            f"much more memory of hosts {other}"
        )
    elif whole:
        yield f"{text}, and the devices' is too small for {STREAMED_LAYERS} layers at a time, or no way was found to divide it"


def _short_ranks(pipeline: PipelinePlan, profile: ClusterProfile, request: PlanRequest) -> list[tuple[int, str]]:
    """(bytes lacking, a line about it) of every rank that the closest split asks too much of, in its order."""
    result = []
    for stage in pipeline.stages:
        (rank,), holding = stage.ranks, (stage.warm_up + 1, 0)
        ways = (replace(stage, recompute=again) for again in request.recompute_choices)
        needs = (memory_of(profile, pipeline, way, request.sequence_length, holding) for way in ways)
        parts, usable = min(needs, key=lambda one: one.total), rank_usable_bytes(profile, rank, request.memory_reserve)
        if parts.total > usable:
            text = (
                f"  rank {rank} ({profile.devices[rank].name}) with "
                f"{units.layers(stage.first, stage.last, len(profile.model.layers))} is short by "
                f"{parts.total - usable} bytes: "
                f"it needs {units.size(parts.total)} (parameters {units.size(parts.parameters)}, "
                f"optimizer state and gradients {units.size(parts.state)}, "
                f"activations {units.size(parts.activations)}, workspace {units.size(parts.workspace)}, "
                f"buffers {units.size(parts.staging)}) and may use {units.size(usable)}"
            )
            result.append((parts.total - usable, text))
    return result


def remedies(profile: ClusterProfile, request: PlanRequest) -> Iterator[str]:
    """Single changes that make it fit; when there are none, the shortest row of changes that does together."""
    now, helped = Alternative("", profile, request), False
    for changes in _changes(now).values():
        change = next((one for one in changes if _fits(one, now)), None)
        if change is not None:
            helped = True
            yield change.text
    if not helped:
        yield from _together(now)


def _fits(change: Alternative, now: Alternative) -> bool:
    if change.request.streaming != now.request.streaming:
        return decide(change.profile, change.request) is not None
    return fits(change.profile, change.request)


def _changes(now: Alternative) -> dict[str, Iterable[Alternative]]:
    """Kind -> the further changes that there may be, the least one first."""
    profile, request, model = now.profile, now.request, now.profile.model
    whole, half = model.trained_whole, request.sequence_length // 2
    sizes = [n for n in range(min(request.micro_batch_choices) - 1, 0, -1) if request.global_batch % n == 0]
    lengths = [half >> n for n in range(half.bit_length()) if half >> n >= min(SHORTEST_SEQUENCE, half)]
    streamed = "weights and their state kept in host memory, and streamed" if whole else "frozen weights streamed"
    kept, again = "repeating forwards instead of keeping activations", (False, True)
    eight_bits = whole and model.optimizer == "adamw" and all(device.backend != "mps" for device in profile.devices)
    packed, lora = ("adapters over weights in 4 bits", [LORA]) if whole else ("weights in 4 bits", [])
    largest = max(profile.devices, key=lambda device: (device.memory_bytes, -device.rank))
    larger = enumerate(accumulate([largest.rank] * MORE_RANKS, with_copy_of, initial=profile))
    like = f"like rank {largest.rank} ({largest.name})"
    return {
        "streaming": [now.asking(f"{streamed} from host memory", 'plan.offload = "auto"', streaming="auto")]
        * (request.streaming == "never"),
        "recompute": [now.asking(kept, 'train.recompute = "auto"', recompute_choices=again)]
        * (True not in request.recompute_choices),
        "micro-batch": [
            now.asking("smaller micro-batches", f"train.micro_batch = {n}", micro_batch_choices=(n,)) for n in sizes
        ],
        "length": [now.asking("shorter sequences", f"data.sequence_length = {n}", sequence_length=n) for n in lengths],
        "reserve": [now.asking("keeping no memory free", "plan.memory_reserve = 0.0", memory_reserve=0.0)]
        * (request.memory_reserve > 0),
        "bf16": [now.costing("half the bytes per value", ['train.dtype = "bf16"'], in_bf16(model), "the fp32 figures")]
        * (model.dtype == "fp32"),
        "8 bits": [
            now.costing("moments in 8 bits", ['train.optimizer = "adamw_8bit"'], with_optimizer(model, "adamw_8bit"))
        ]
        * eight_bits,
        "adapters": [now.costing("adapters only", [LORA], with_adapters(model, packed=False))] * whole,
        "4 bits": [now.costing(packed, ['model.quantization = "nf4"', *lora], with_adapters(model, packed=True))]
        * (whole or not is_packed(model)),
        "ranks": (
            replace(now, name=f"{units.plural(count, 'more rank')} {like}", profile=copied)
            for count, copied in larger
            if count
        ),
    }


def _together(now: Alternative) -> Iterator[str]:
    """Recompute, the smallest micro-batch, LoRA over NF4 and shorter sequences, one after the other until it fits."""
    for kind in ("recompute", "micro-batch", "4 bits", "length"):
        changes, last = [*_changes(now)[kind]], kind == "length"
        for change in changes if last else changes[-1:]:
            if len(change.settings) > 1 and fits(change.profile, change.request):
                yield f"{TOGETHER}: {', '.join(change.settings)}{change.estimated}"
                return
            now = now if last else change
