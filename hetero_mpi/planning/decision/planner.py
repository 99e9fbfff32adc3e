"""Make a plan for a profile and a request, or check a hand-written plan, and report its figures and reasons."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import accumulate

from hetero_mpi.planning.bounds import fluid_bound_s
from hetero_mpi.planning.decision.alternatives import Alternative
from hetero_mpi.planning.decision.decide import (
    best_alone,
    can_offload,
    convertible,
    decide,
    faster_single_rank,
    fastest,
    has_fitting_plan,
    require_split_times,
    unsplit_reason,
)
from hetero_mpi.planning.decision.explain import busiest_text, group_texts, idle_ranks, offload_texts, reasons
from hetero_mpi.planning.decision.rules import batch_problems, micro_batch_sizes, plan_problems
from hetero_mpi.planning.decision.several_stages import in_requested_order, nearest_searched
from hetero_mpi.planning.decision.shortage import closest_split, edits_that_help, short_places, with_hosts_divided
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
from hetero_mpi.planning.orders import OTHER_ORDERS, SCHEDULES
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
from hetero_mpi.planning.types.plan import (
    ALL_RANKS_WORK,
    Alone,
    IdleRank,
    PipelinePlan,
    Plan,
    PlanReport,
)
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.request import PlanRequest
from hetero_mpi.planning.types.sizes import COPY_BYTES, HEAD_TOKENS, OFFLOADED_LAYER_COUNT
from hetero_mpi.util import units
from hetero_mpi.util.errors import UserError


def make_plan(profile: ClusterProfile, request: PlanRequest) -> PlanReport:
    """Make the plan with the shortest simulated step time that fits in memory. Deterministic.

    Rank numbering only breaks ties within ``request.indifference``, in favour of ascending ranks. Of equally fast plans, the
    one with fewer ranks wins. Ranks that compute in host memory also need memory for copies of the trained state, unless no
    plan would fit then.

    Raises:
        UserError: no plan fits; the message names each shortage and the changes that would help.
    """
    if request.schedule in OTHER_ORDERS:
        return _make_ordered_plan(profile, request)
    base, profile = profile, with_copies(profile, request)
    decision = decide(profile, request)
    if decision is None and profile is not base:
        profile, decision = base, decide(base, request)
    if decision is None:
        raise UserError("memory.exceeded", explain_shortage(profile, request))
    single = best_alone(base, request)
    decision = faster_single_rank(decision, single, base, request, profile)
    single = _passed_over(single, decision.step_s, request, "it has no memory for copies of the trained state")
    plan = decision.plan
    assert not (problems := [*plan_problems(plan, profile)]), problems
    simulation = outlined(plan, profile)
    idle = idle_ranks(decision, profile, request)
    remarks = _copies_remark(base, request, profile)
    sentences = (*reasons(decision, profile, request, simulation), *offload_texts(plan, profile), *remarks)
    full = _figures(plan, profile, request, simulation)
    sentences = (*sentences, *_tradeoff_sentences(plan, base))
    return replace(full, alone=single, idle=idle, reasons=sentences, similar=decision.similar)


def _make_ordered_plan(profile: ClusterProfile, request: PlanRequest) -> PlanReport:
    """Convert plans of the closest schedule that the search supports to the requested one, and report on the fastest."""
    nearest, name, counted = nearest_searched(request), request.schedule, with_copies(profile, request)
    require_split_times(profile, nearest, name)
    decision = fastest(counted, request)
    if decision is None and counted is not profile:
        decision = fastest(profile, request)
    if decision is None:
        raise _order_refusal(profile, request)
    full = complete_plan(decision.plan, profile, nearest, f"plan.schedule = {name!r}")
    unsplit = OTHER_ORDERS[name].SPLITS and any(p.interleaved and not p.split_backward for p in decision.plan.pipelines)
    remark = (f"no backward can be split here: {unsplit_reason(profile)}",) * unsplit
    idle = idle_ranks(decision, profile, nearest)
    return replace(full, idle=idle, reasons=(f"{name}: {SCHEDULES[name]}", *remark, *full.reasons[1:]))


def _order_refusal(profile: ClusterProfile, request: PlanRequest) -> UserError:
    """Say what plans in the requested order lack, and what would help."""
    nearest, plans = nearest_searched(request), convertible(profile, request)
    if not plans:
        return UserError("memory.exceeded", explain_shortage(profile, nearest))
    kind = "plan.schedule_impossible"
    lacks: Iterable[str] = [f"a pipeline's ranks need two stages each, and the model has {plans[0].layers} layers"]
    if (closest := in_requested_order(plans, profile, request, fits=False)) is not None:
        kind, lacks = "memory.exceeded", _shortages(_figures(closest, profile, nearest, outlined(closest, profile)))
    now = Alternative("", profile, replace(request, near_counts=(1,)))
    changes = _changes(now) | {"idle": [now.changing("idle ranks", "plan.allow_idle = true", allow_idle=True)]}
    tried = (change for name in ("recompute", "micro-batch", "reserve", "idle") for change in changes[name])
    helps = [change.text for change in tried if decide(change.profile, change.request) is not None]
    helps.append(f'another schedule: plan.schedule = "{nearest.schedule}"')
    first = f"schedule = {request.schedule!r}: found no plan in this order that fits; the one that comes closest:"
    return UserError(kind, "\n  ".join([first, *lacks, *(f"it would fit with {text}" for text in helps)]))


def _passed_over(alone: Alone | None, step_s: float, request: PlanRequest, problem: str) -> Alone | None:
    """Add the reason why the plan uses other ranks although the best single rank would be faster."""
    if alone is None or alone.step_s is None or alone.step_s >= step_s:
        return alone
    return replace(alone, problem=problem if request.allow_idle else ALL_RANKS_WORK)


def _copies_remark(base: ClusterProfile, request: PlanRequest, profile: ClusterProfile) -> tuple[str, ...]:
    """Say whether the memory in ``profile``, derived from ``base``, has room for copies of the trained state."""
    if with_copies(base, request) is base:
        return ()
    copies = request.copy_bytes_per_trainable_parameter / COPY_BYTES
    each = copies * base.model.copy_bytes_per_trainable_parameter
    text = f"copies of the trained state ({each:.3g} bytes per trained parameter)"
    if profile is base:
        return (f"memory: no plan leaves memory for {text}; the run logs the copies that it omits",)
    return (f"memory: the prediction includes {text}",)


def complete_plan(
    plan: Plan, profile: ClusterProfile, request: PlanRequest, why: str = "the plan was given"
) -> PlanReport:
    """Check a plan that the search did not make, and report its figures and reasons.

    Args:
        why: first reason, and the reason why a faster single rank is not used.

    Raises:
        UserError: the plan is invalid: layers not covered exactly once, unknown or repeated ranks, unsupported dtypes, wrong
            batch sums, a deadlocking schedule, or memory shortages. The message lists all problems of a kind.
    """
    problems = [*plan_problems(plan, profile), *batch_problems(plan, request)]
    if problems:
        raise UserError("plan.invalid", "\n".join(f"plan: {problem}" for problem in problems))
    validate(schedule_of(plan, profile.model), plan, profile.model)
    simulation = outlined(plan, profile)
    counted = with_copies(profile, request)
    full = _figures(plan, counted, request, simulation)
    if counted is not profile and any(_shortages(full)):
        counted, full = profile, _figures(plan, profile, request, simulation)
    if short := [*_shortages(full)]:
        lines = [*(f"plan: {shortage}" for shortage in short), edits_that_help(full, counted, request)]
        raise UserError("memory.exceeded", "\n".join(lines))
    idle = (device.rank for device in profile.devices if not plan.of_rank(device.rank))
    groups = group_texts(plan, profile, simulation.step_s, None)
    remarks = (*offload_texts(plan, profile), *_copies_remark(profile, request, counted))
    sentences = (why, *groups, busiest_text(plan, profile, simulation), *remarks)
    return replace(
        full,
        alone=_passed_over(best_alone(profile, request), simulation.step_s, request, why),
        idle=tuple(IdleRank(rank, "not used by the given plan") for rank in idle),
        reasons=(*sentences, *_tradeoff_sentences(plan, profile)),
    )


def _shortages(report: PlanReport) -> Iterator[str]:
    """Describe each memory shortage of a rank or host."""
    for name, memory in short_places(report).items():
        who = f"rank {name} needs" if isinstance(name, int) else f"the ranks of host {name} need"
        sizes = f"{units.size(memory.peak_bytes)}, and {units.size(memory.usable_bytes)} is usable"
        yield f"{who} {sizes}: short by {units.size(memory.peak_bytes - memory.usable_bytes)}"


def _tradeoff_sentences(plan: Plan, profile: ClusterProfile) -> Iterator[str]:
    """Describe where the plan trades accuracy or time for speed or memory."""
    model = profile.model
    if model.wire is not None and any(len(pipeline.stages_of) > 1 for pipeline in plan.pipelines):
        yield f"activations and gradients are sent as {model.wire} (train.wire): the loss differs from that of one process"
    sliced = [
        rank
        for _, index, stage in plan.numbered
        if slices_head(model, plan.pipelines[index], stage, plan.sequence_length)
        for rank in stage.ranks
    ]
    if sliced:
        slices_text = f"{HEAD_TOKENS:,} tokens at a time, and again in backward ({units.ranks(sliced)})"
        yield f"memory: logits and losses are computed {slices_text}"
    saved = math.floor(sum(layer.moments_saving_bytes for layer in model.layers))
    if saved:
        yield f"memory: the states of {model.optimizer} take {units.size(saved)} less than AdamW's moments in fp32, over all ranks"


def _figures(plan: Plan, profile: ClusterProfile, request: PlanRequest, simulation: SimulatedStep) -> PlanReport:
    return PlanReport(
        plan,
        predicted_step_s=simulation.step_s,
        bound_step_s=_bound_s(plan, profile, request),
        memory=predict_memory(plan, profile, request.memory_reserve),
        hosts=predict_hosts(plan, profile, request.memory_reserve),
    )


def _bound_s(plan: Plan, profile: ClusterProfile, request: PlanRequest) -> float:
    """Fluid bound for the allowed micro-batch sizes; with offloaded stages, for the faster optimizer of device and host."""
    if any(stage.streamed for _, _, stage in plan.numbered):
        quickest = tuple(
            replace(d, optimizer_s_per_parameter=min(d.optimizer_s_per_parameter, host_optimizer_s(d)))
            for d in profile.devices
        )
        return fluid_bound_s(replace(profile, devices=quickest), request)
    return fluid_bound_s(profile, replace(request, micro_batch_choices=tuple(micro_batch_sizes(plan, request))))


MAX_NAMED_RANKS = 6
"""Maximum number of ranks named in the message, largest shortages first."""
MAX_ADDED_RANKS = 8
COMBINED_PREFIX = "together"
"""First word of a line that combines changes."""
MIN_SEQUENCE_LENGTH = 32
LORA = 'adapter.method = "lora"'
NOTHING_HELPS = (
    "None of these changes makes it fit, not even all together: recompute, the smallest micro-batch, shorter "
    f"sequences, bf16 where supported, LoRA over NF4, no memory reserve, and {MAX_ADDED_RANKS} more ranks like the largest. "
    f"Use a smaller model, or ranks with more memory."
)


def explain_shortage(profile: ClusterProfile, request: PlanRequest) -> str:
    """Explain why no plan fits in memory and what would help."""
    divided = next(with_hosts_divided(profile))
    (pipeline,) = closest_split(divided, request).plan.pipelines
    count = len(pipeline.stages)
    lines = [
        "the model does not fit in memory on these ranks "
        f"({units.rows_of(request.sequence_length)}, {profile.model.dtype}). "
        f"The one pipeline that comes closest has {count} stage{'s' if count > 1 else ''} "
        f"and micro-batches of {pipeline.micro_batch}:"
    ]
    short = _short_ranks(pipeline, divided, request)
    named_ranks = sorted(short, reverse=True)[:MAX_NAMED_RANKS]
    lines += [text for shortage_bytes, text in short if (shortage_bytes, text) in named_ranks]
    if len(short) > len(named_ranks):
        rest = len(short) - len(named_ranks)
        lines.append(f"  and {rest} more rank{'s' if rest > 1 else ''}, short by less")
    for host, ranks in shared_memories(profile):
        listed = ", ".join(map(str, ranks))
        lines.append(f"  ranks {listed} share the memory of host {host.name}, {units.size(host.memory_bytes)}, evenly")
    if request.streaming != "never" and can_offload(profile):
        lines += _host_shortage(profile, request)
    helps = list(remedies(profile, request))
    is_combined = any(text.startswith(COMBINED_PREFIX) for text in helps)
    heading = "What would make it fit:" if is_combined else "What would make it fit, each by itself:"
    lines.append(heading if helps else NOTHING_HELPS)
    return "\n".join([*lines, *(f"  {text}" for text in helps)])


def _host_shortage(profile: ClusterProfile, request: PlanRequest) -> Iterator[str]:
    """Explain why weights are not offloaded to host memory."""
    model, full = profile.model, profile.model.trained_whole
    if not full and all(device.shares_host_memory for device in profile.devices):
        return  # mapped files need no host memory
    needed_bytes = int(host_state_bytes(model, 0, len(model.layers)))
    names = sorted({device.host for device in profile.devices})
    usable_by_host = {host.name: usable_bytes(host.memory_bytes, request.memory_reserve) for host in profile.hosts}
    state_text = "weights, gradients and optimizer state" if full else "frozen weights"
    text = f"  Streamed, {state_text} take {units.size(needed_bytes)} of the hosts' memory"
    available_bytes = sum(usable_by_host.get(name, needed_bytes) for name in names)
    if needed_bytes > available_bytes:
        remedy = "would make it fit (trained state is not kept on disk, because every step writes all of it)"
        if not full:
            remedy = "would make it fit, as would [model] shard_cache or TMPDIR on a disk whose speed is measured"
        yield (
            f"{text}, of which {units.size(available_bytes)} is usable ([[hosts]] memory_bytes): short by "
            f"{units.size(needed_bytes - available_bytes)}; that much more host memory {remedy}"
        )
    elif full:
        yield f"{text}, but device memory is too small for {OFFLOADED_LAYER_COUNT} layers at a time, or no split was found"


def _short_ranks(pipeline: PipelinePlan, profile: ClusterProfile, request: PlanRequest) -> list[tuple[int, str]]:
    """(missing bytes, line of text) for each rank of the closest split that is short of memory, in stage order."""
    result = []
    for stage in pipeline.stages:
        (rank,), holding = stage.ranks, (stage.warm_up + 1, 0)
        variants = (replace(stage, recompute=again) for again in request.recompute_choices)
        needs = (memory_of(profile, pipeline, variant, request.sequence_length, holding) for variant in variants)
        parts, usable = min(needs, key=lambda n: n.total), rank_usable_bytes(profile, rank, request.memory_reserve)
        if parts.total > usable:
            text = (
                f"  rank {rank} ({profile.devices[rank].name}) with "
                f"{units.layers(stage.first, stage.last, len(profile.model.layers), request.sequence_length)} is short by "
                f"{units.size(parts.total - usable)}: it needs {units.size(parts.total)} (parameters "
                f"{units.size(parts.parameters)}, optimizer state and gradients {units.size(parts.state)}, activations "
                f"{units.size(parts.activations)}, workspace {units.size(parts.workspace)}, buffers {units.size(parts.staging)}), "
                f"and {units.size(usable)} is usable"
            )
            result.append((parts.total - usable, text))
    return result


def remedies(profile: ClusterProfile, request: PlanRequest) -> Iterator[str]:
    """Yield single changes that make the model fit; if none does, a combination of changes."""
    unchanged, helped = Alternative("", profile, request), False
    for changes in _changes(unchanged).values():
        change = next((candidate for candidate in changes if _fits(candidate, unchanged)), None)
        if change is not None:
            helped = True
            yield change.text
    if not helped:
        yield from _combined_changes(unchanged)


def _fits(change: Alternative, now: Alternative) -> bool:
    if change.request.streaming != now.request.streaming:
        return decide(change.profile, change.request) is not None
    return has_fitting_plan(change.profile, change.request)


def _changes(now: Alternative) -> dict[str, Iterable[Alternative]]:
    """Map each kind of change to possible changes, smallest first."""
    profile, request, model = now.profile, now.request, now.profile.model
    full, half = model.trained_whole, request.sequence_length // 2
    sizes = [n for n in range(min(request.micro_batch_choices) - 1, 0, -1) if request.global_batch % n == 0]
    lengths = [half >> n for n in range(half.bit_length()) if half >> n >= min(MIN_SEQUENCE_LENGTH, half)]
    streamed = "weights and their state kept in host memory, and streamed" if full else "frozen weights streamed"
    text, choices = "activation checkpointing (recompute)", (False, True)
    eight_bits = full and model.optimizer == "adamw" and all(device.backend != "mps" for device in profile.devices)
    packed, lora = ("adapters on 4-bit weights", [LORA]) if full else ("4-bit weights", [])
    largest = max(profile.devices, key=lambda device: (device.memory_bytes, -device.rank))
    larger = enumerate(accumulate([largest.rank] * MAX_ADDED_RANKS, with_copy_of, initial=profile))
    like = f"like rank {largest.rank} ({largest.name})"
    return {
        "streaming": [now.changing(f"{streamed} from host memory", 'plan.offload = "auto"', streaming="auto")]
        * (request.streaming == "never"),
        "recompute": [now.changing(text, 'train.recompute = "auto"', recompute_choices=choices)]
        * (True not in request.recompute_choices),
        "micro-batch": [
            now.changing("smaller micro-batches", f"train.micro_batch = {n}", micro_batch_choices=(n,)) for n in sizes
        ],
        "length": [
            now.changing("shorter sequences", f"data.sequence_length = {n}", sequence_length=n) for n in lengths
        ],
        "reserve": [now.changing("no memory reserve", "plan.memory_reserve = 0.0", memory_reserve=0.0)]
        * (request.memory_reserve > 0),
        "bf16": [now.costing("half the bytes per value", ['train.dtype = "bf16"'], in_bf16(model), "the fp32 figures")]
        * (model.dtype == "fp32"),
        "8 bits": [
            now.costing(
                "8-bit optimizer states", ['train.optimizer = "adamw_8bit"'], with_optimizer(model, "adamw_8bit")
            )
        ]
        * eight_bits,
        "adapters": [now.costing("adapters only", [LORA], with_adapters(model, packed=False))] * full,
        "4 bits": [now.costing(packed, ['model.quantization = "nf4"', *lora], with_adapters(model, packed=True))]
        * (full or not is_packed(model)),
        "ranks": (
            replace(now, name=f"{units.plural(count, 'more rank')} {like}", profile=copied)
            for count, copied in larger
            if count
        ),
    }


def _combined_changes(now: Alternative) -> Iterator[str]:
    """Combine recompute, the smallest micro-batch, LoRA over NF4 and shorter sequences until the model fits."""
    for kind in ("recompute", "micro-batch", "4 bits", "length"):
        changes, last = [*_changes(now)[kind]], kind == "length"
        for change in changes if last else changes[-1:]:
            if len(change.settings) > 1 and has_fitting_plan(change.profile, change.request):
                yield f"{COMBINED_PREFIX}: {', '.join(change.settings)}{change.estimated}"
                return
            now = now if last else change
