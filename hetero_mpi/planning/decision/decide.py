"""Choose a plan by comparing search results, and time single ranks. ``planner.make_plan`` adds figures and reasons."""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from hetero_mpi.planning.contention import slowness, spread_out, while_computing, with_copying
from hetero_mpi.planning.decision.groups import with_groups
from hetero_mpi.planning.decision.several_stages import VirtualStageSearch, in_requested_order, nearest_searched
from hetero_mpi.planning.decision.shortage import closest_split, with_hosts_divided
from hetero_mpi.planning.device_times import optimizer_s, whole_model_s
from hetero_mpi.planning.memory_model import MemoryModel, predict_memory
from hetero_mpi.planning.orders import INTERLEAVINGS, OTHER_ORDERS
from hetero_mpi.planning.orders.warm_up import scheduled_depths, with_classic_depths
from hetero_mpi.planning.outline import outlined
from hetero_mpi.planning.search import layouts
from hetero_mpi.planning.search.memory_fit import Fitter, cut_otherwise
from hetero_mpi.planning.search.rounds import always_split
from hetero_mpi.planning.search.search import (
    MAX_ALL_COUNTS_RANKS,
    MAX_RANKS_WITHOUT_LAYOUTS,
    MAX_SEARCH_RANKS,
    Decision,
    Search,
)
from hetero_mpi.planning.tables import may_split, rank_contents
from hetero_mpi.planning.types.cluster_changes import renumbered, restricted, with_copies
from hetero_mpi.planning.types.plan import Alone, Plan
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.request import PlanRequest
from hetero_mpi.util import units
from hetero_mpi.util.errors import UserError
from hetero_mpi.util.grouping import grouped

MIN_OFFLOAD_GAIN_RATIO = 0.02
"""Minimum relative gain over a resident plan for offloading to be chosen, unless the job requires offloading."""
MIN_FULL_RATIO = 0.8
"""Memory is considered to limit a plan if some rank uses more than this fraction of its memory."""


def decide(profile: ClusterProfile, request: PlanRequest) -> Decision | None:
    """Find the plan with the shortest simulated step time that fits in memory; None if none fits. Deterministic.

    Raises:
        UserError: no plan can meet the request.
    """
    if request.schedule in OTHER_ORDERS:
        plan = in_requested_order(convertible(profile, request), profile, request)
        return None if plan is None else Decision(plan, outlined(plan, profile).step_s)
    check_request(profile, request)
    all_ranks, spread_ranks = _decide_for_ranks(profile, request), spread_out(profile)
    if len(spread_ranks) == len(profile.devices) or not request.allow_idle:
        return all_ranks
    spread = _decide_for_ranks(restricted(profile, spread_ranks), request)
    if spread is None or (all_ranks is not None and all_ranks.step_s < (1 - request.indifference) * spread.step_s):
        return all_ranks
    at_work_s = math.inf if all_ranks is None else all_ranks.at_work_s
    similar = tuple(renumbered(plan, spread_ranks) for plan in spread.similar)
    return replace(spread, plan=renumbered(spread.plan, spread_ranks), at_work_s=at_work_s, similar=similar)


def _decide_for_ranks(profile: ClusterProfile, request: PlanRequest) -> Decision | None:
    """Search with the device times of all ranks computing at once, then time the plan with only its own ranks computing."""
    everyone = range(len(profile.devices))
    busy = while_computing(profile, everyone)
    resident = _with_groups(busy, request, _resident(busy, request), slowness(profile, everyone))
    faster, streamed = resident, _offloaded(busy, request, resident)
    max_ratio = 1 - MIN_OFFLOAD_GAIN_RATIO * (request.streaming == "auto")
    if streamed is not None and (resident is None or streamed.step_s < resident.step_s * max_ratio):
        faster = streamed
    elif streamed is not None and resident is not None and resident.without_groups_s is not None:
        faster = replace(resident, without_groups_s=min(resident.without_groups_s, streamed.step_s))
    if faster is None or busy is profile:
        return faster
    return replace(faster, step_s=outlined(faster.plan, profile).step_s)


def _with_groups(
    profile: ClusterProfile, request: PlanRequest, best: Decision | None, crowded: Collection[int]
) -> Decision | None:
    """``best``, or a clearly faster plan with tensor-parallel groups that include no ``crowded`` ranks."""

    def search(profile: ClusterProfile, request: PlanRequest) -> Plan | None:
        return None if (decision := decide(profile, request)) is None else decision.plan

    grouped = with_groups(profile, request, None if best is None else best.step_s, search, crowded)
    if grouped is None:
        return best
    one_pipeline_s, without_s = (None, math.inf) if best is None else (best.one_pipeline_s, best.step_s)
    return Decision(*grouped, one_pipeline_s, without_groups_s=without_s)


def _offloaded(profile: ClusterProfile, request: PlanRequest, resident: Decision | None) -> Decision | None:
    """Fastest plan with offloaded stages; None if none fits, or if offloading is disabled or would not help."""
    if request.streaming == "never" or not can_offload(profile):
        return None
    is_automatic = request.streaming == "auto"
    if is_automatic and resident is not None and not _memory_binds(resident.plan, profile, request):
        return None
    sizes = sorted(set(request.micro_batch_choices))
    larger = list(sizes)
    while len(sizes) > 1 and request.global_batch % (2 * larger[-1]) == 0:
        larger.append(2 * larger[-1])
    changed = replace(
        request,
        micro_batch_choices=tuple(larger),
        split_choices=(False,),
        stages_per_rank=1,  # a rank with an offloaded stage holds no other
    )
    slices = sorted({sizes[index] for index in (0, len(sizes) // 2, -1)})
    best = _with_files(profile, request, changed, slices)
    if profile.model.trained_whole or (best is not None and not any(s.on_disk for _, _, s in best.plan.numbered)):
        return best
    diskless = _with_files(profile, request, replace(changed, without_files=True), slices) if profile.hosts else None
    return min(filter(None, (best, diskless)), key=lambda stage: stage.step_s, default=None)


def _with_files(
    profile: ClusterProfile, request: PlanRequest, search_request: PlanRequest, slices: Sequence[int]
) -> Decision | None:
    """Best plan for ``search_request`` with offloaded stages, and with blocks on disk where host memory is short."""
    decision = _resident(with_copying(profile, range(len(profile.devices))), search_request, slices)
    fitter = Fitter(profile, request)
    plan = None if decision is None else fitter.fitted(decision.plan)
    plan = plan and fitter.with_files(plan)
    if plan is None or not fitter.holds(plan):
        return None
    plan = fitter.with_files(fitter.keeping(plan, slices))
    if not any(stage.on_disk for _, _, stage in plan.numbered):
        return Decision(plan, fitter.step_s(plan))
    return Decision(*fitter.descended(plan, fitter.step_s(plan), lambda p: map(fitter.with_files, cut_otherwise(p))))


def can_offload(profile: ClusterProfile) -> bool:
    """Whether weights can be offloaded; full fine-tuning needs a device whose memory is separate from its host's."""
    model = profile.model
    if model.trained_whole:
        hosts = [profile.host(device.rank) for device in profile.devices if not device.shares_host_memory]
        return any(host is None or host.memory_bytes > 0 for host in hosts)
    return any(map(model.streamed_bytes, range(len(model.layers))))


def _memory_binds(plan: Plan, profile: ClusterProfile, request: PlanRequest) -> bool:
    """Whether some rank's memory is nearly full, or a stage is offloaded or recomputes to save memory."""
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    memory = predict_memory(plan, profile, request.memory_reserve)
    saves_memory = any(stage.recompute or stage.streamed for stage in stages)
    return saves_memory or any(predicted.peak_bytes > MIN_FULL_RATIO * predicted.usable_bytes for predicted in memory)


def _resident(profile: ClusterProfile, request: PlanRequest, slices: Sequence[int] = ()) -> Decision | None:
    """Find the best plan with one or more stages per rank; stages are offloaded only if ``slices`` are given."""
    is_searched = len(profile.devices) <= MAX_SEARCH_RANKS
    without_layouts = is_searched and (len(profile.devices) <= MAX_RANKS_WITHOUT_LAYOUTS or bool(request.near))
    starts = [] if without_layouts else list(_starts(profile, request, slices))
    if not is_searched:
        return Decision(*min(starts, key=lambda start: start[1])) if starts else None
    search = Search(profile, request, slices)
    best = search.best(starts)
    if best is None and without_layouts and not slices:
        best = search.best(list(_roomiest(profile, request)))
    if best is None:
        return None
    if request.near:
        return best
    plan, step_s = search.in_natural_order(best.plan, best.step_s)
    by_count = grouped((similar for similar, _ in search.good_plans()), lambda similar: len(similar.pipelines))
    best = replace(best, similar=tuple(plans[0] for plans in by_count.values()))
    if request.schedule != "auto":
        return replace(best, plan=_scheduled(plan, request), step_s=step_s)
    if request.stages_per_rank > 1 and not request.near_counts:
        several = VirtualStageSearch(profile, request).better([(plan, step_s), *search.good_plans()], step_s)
        if several is not None:
            return replace(best, plan=several[0], step_s=several[1], one_stage_s=step_s)
    return replace(best, plan=plan, step_s=step_s)


def check_request(profile: ClusterProfile, request: PlanRequest) -> None:
    """Check every aspect of the request except memory.

    Raises:
        UserError: no plan can meet the request.
    """
    invalid_sizes = [b for b in request.micro_batch_choices if b < 1 or request.global_batch % b]
    if invalid_sizes or not request.micro_batch_choices:
        raise UserError(
            "plan.micro_batch",
            f"each micro-batch size must divide the global batch (global_batch: {request.global_batch}, "
            f"micro-batch sizes: {list(request.micro_batch_choices)}); change train.micro_batch or train.global_batch",
        )
    usable = [device.rank for device in profile.devices if profile.model.dtype in device.dtypes]
    if not usable:
        offers = ", ".join(f"rank {device.rank}: {'/'.join(device.dtypes)}" for device in profile.devices)
        raise UserError(
            "plan.dtype",
            f"no rank's device supports the job's dtype {profile.model.dtype} ({offers}); change train.dtype",
        )
    max_ranks = len(profile.model.layers) * min(request.max_pipelines, request.global_batch)
    if not request.allow_idle and len(profile.devices) > min(len(usable), max_ranks):
        raise UserError(
            "plan.idle_ranks",
            f"plan.allow_idle = false requires work on all {units.plural(len(profile.devices), 'rank')}, but {len(usable)} support "
            f"{profile.model.dtype} and at most {max_ranks} can work: a stage holds at least one of the model's "
            f"{len(profile.model.layers)} layers; start fewer ranks",
        )
    require_split_times(profile, request, request.schedule)


def require_split_times(profile: ClusterProfile, request: PlanRequest, schedule: str) -> None:
    """Raise UserError, which names ``schedule``, if the request splits every backward and a rank has no times for that."""
    usable = [device.rank for device in profile.devices if profile.model.dtype in device.dtypes]
    if request.schedule == "split" and not all(may_split(profile, rank) for rank in usable):
        text = f'schedule = "{schedule}": backward cannot be split: {unsplit_reason(profile)}; or use another schedule'
        raise UserError("plan.split_times", text)


def unsplit_reason(profile: ClusterProfile) -> str:
    """Say why the profile has no times of a split backward, and what would change that."""
    lack = f"the profile ({profile.source}) lacks input_s and weight_s of blocks and head; measure one (`profile JOB -o FILE`)"
    return lack if profile.model.trained_whole else "frozen weights have no gradients to defer; train all weights"


def convertible(profile: ClusterProfile, request: PlanRequest) -> list[Plan]:
    """Good plans of schedules that the search supports, best first, with every micro-batch size that their shares allow."""
    nearest = nearest_searched(request)
    if (first := decide(profile, nearest)) is None:
        return []
    decisions, is_brief = [first], bool(request.near) or len(profile.devices) > MAX_ALL_COUNTS_RANKS
    several = request.schedule in INTERLEAVINGS and any(len(pipeline.stages) > 1 for pipeline in first.plan.pipelines)
    if several and (not is_brief or any(stage.streamed for _, _, stage in first.plan.numbered)):
        decisions += filter(None, [decide(profile, replace(nearest, schedule="1f1b", streaming="never"))])
    plans = [decision.plan for decision in decisions] + [plan for decision in decisions for plan in decision.similar]
    resized = (
        replace(plan, pipelines=tuple(replace(pipeline, micro_batch=size) for pipeline in plan.pipelines))
        for plan in plans
        for size in (plan.pipelines[0].micro_batch, *(() if request.near else request.micro_batch_choices))
        if len(plan.ranks) > 1 and not any(pipeline.sequences % size for pipeline in plan.pipelines)
    )
    return list(dict.fromkeys((*plans[: len(decisions)], *resized)))


def has_fitting_plan(profile: ClusterProfile, request: PlanRequest) -> bool:
    """Whether any plan fits; faster than planning."""
    if not any(profile.model.dtype in device.dtypes for device in profile.devices):
        return False
    request = replace(request, micro_batch_choices=(min(request.micro_batch_choices),))  # the least memory
    if any(closest_split(divided, request).shortage_bytes <= 0 for divided in with_hosts_divided(profile)):
        return True  # as one pipeline; sharded optimizer state may make several pipelines fit where one does not
    return profile.model.trained_whole and request.max_pipelines > 1 and any(_starts(profile, request))


def _starts(profile: ClusterProfile, request: PlanRequest, slices: Sequence[int] = ()) -> Iterator[tuple[Plan, float]]:
    """Yield plans of promising layouts that fit, and their variants with split backward toggled, each with its step time.

    With too many ranks to search, use only the best layout that fits; if no layout fits, use plans with the most free memory.
    """
    fitter, has_fitting_layout = Fitter(profile, request), False
    for _, layout in layouts.best_layouts(profile, request, slices):
        plan = fitter.fitted(_scheduled(layout, request))
        if plan is not None:
            toggled = map(fitter.fitted, _split_toggled(plan, profile, request))
            yield from ((start, fitter.step_s(start)) for start in (plan, *toggled) if start is not None)
            has_fitting_layout = True
            if len(profile.devices) > MAX_SEARCH_RANKS:
                return
    if not has_fitting_layout and not slices:
        yield from _roomiest(profile, request)


def _roomiest(profile: ClusterProfile, request: PlanRequest) -> Iterator[tuple[Plan, float]]:
    """Yield the single-pipeline plans with the most free memory that fit, with their step times."""
    fitter = Fitter(profile, request)
    for plan in (closest_split(divided, request).plan for divided in with_hosts_divided(profile)):
        fitted = fitter.fitted(_scheduled(plan, request) if request.schedule != "auto" else plan)
        if fitted is not None:
            yield fitted, fitter.step_s(fitted)


def _split_toggled(plan: Plan, profile: ClusterProfile, request: PlanRequest) -> Iterator[Plan]:
    """Yield ``plan`` with split backward toggled, at its own depths and at those of 1F1B."""
    if len(set(request.split_choices)) < 2 or request.schedule != "auto":
        return
    pipelines = [
        replace(pipeline, split_backward=not pipeline.split_backward)
        if len(pipeline.stages) > 1 and all(may_split(profile, stage.ranks[0]) for stage in pipeline.stages)
        else pipeline
        for pipeline in plan.pipelines
    ]
    if tuple(pipelines) != plan.pipelines:
        toggled = replace(plan, pipelines=tuple(pipelines))
        yield toggled
        yield with_classic_depths(toggled)


def _scheduled(plan: Plan, request: PlanRequest) -> Plan:
    """``plan`` with the depths and the split backward that the request prescribes."""
    changed = []
    for pipeline in plan.pipelines:
        stages = pipeline.stages
        if request.schedule != "auto":
            warm_up = scheduled_depths(request.schedule, len(stages), pipeline.micro_batches)
            stages = tuple(replace(stage, warm_up=depth) for stage, depth in zip(stages, warm_up, strict=True))
        split = always_split(request) and len(stages) > 1
        changed.append(replace(pipeline, stages=stages, split_backward=split))
    return replace(plan, pipelines=tuple(changed))


def time_alone(profile: ClusterProfile, request: PlanRequest, rank: int) -> Alone:
    """Time ``rank`` alone at its best micro-batch size and recompute choice, with copies of state as in ``make_plan``."""
    try:
        decision = _decide_alone(profile, request, rank)
    except UserError as error:
        return Alone(rank, problem=str(error).splitlines()[0])
    if decision is None:
        return Alone(rank, problem=f"does not fit into its {units.size(profile.devices[rank].memory_bytes)}")
    return Alone(rank, decision.step_s)


def _decide_alone(profile: ClusterProfile, request: PlanRequest, rank: int) -> Decision | None:
    """Plan for ``rank`` alone; None if the model does not fit."""
    single = restricted(profile, [rank])
    request = replace(
        request,
        micro_batch_choices=_sizes(request),
        max_pipelines=1,
        schedule="auto",
        indifference=0.0,
        thorough=False,
        near_counts=(1,),
        near=(),
    )
    decision = decide(with_copies(single, request), request) or decide(single, request)
    return None if decision is None else replace(decision, plan=renumbered(decision.plan, [rank]))


def best_alone(profile: ClusterProfile, request: PlanRequest) -> Alone | None:
    """The fastest single rank, or the one with the fastest device if none can hold the model; None if no rank has the dtype."""
    rank_by_content = {content: rank for rank, content in reversed(rank_contents(profile).items())}
    best: Alone | None = None
    for least_s, rank in sorted((_bound_s(profile, request, rank), rank) for rank in rank_by_content.values()):
        if best is not None and best.step_s is not None and least_s >= best.step_s:
            break
        candidate = time_alone(profile, request, rank)
        if best is None or (candidate.step_s is not None and (best.step_s is None or candidate.step_s < best.step_s)):
            best = candidate
    return best


def fastest(profile: ClusterProfile, request: PlanRequest) -> Decision | None:
    """The plan of ``decide``, or a single rank if one is faster on its own; None if nothing fits."""
    decision = decide(profile, request)
    if decision is None or decision.step_s <= min(_bound_s(profile, request, rank) for rank in rank_contents(profile)):
        return decision
    return faster_single_rank(decision, best_alone(profile, request), profile, request, profile)


def faster_single_rank(
    decision: Decision, best: Alone | None, profile: ClusterProfile, request: PlanRequest, counted: ClusterProfile
) -> Decision:
    """``decision``, or the ``best`` rank alone if it is faster and ranks may idle.

    Args:
        counted: profile that includes the copies of trained state for which ``decision`` leaves memory.
    """
    if best is None or best.step_s is None or best.step_s >= decision.step_s or not request.allow_idle:
        return decision
    single = _decide_alone(profile, request, best.rank)
    if single is None or not MemoryModel(counted, request).check(single.plan):
        return decision
    all_work = len(decision.plan.ranks) == len(profile.devices)
    return replace(single, at_work_s=decision.step_s if all_work else decision.at_work_s)


def _sizes(request: PlanRequest) -> tuple[int, ...]:
    return request.alone_micro_batch_choices or request.micro_batch_choices


def _bound_s(profile: ClusterProfile, request: PlanRequest, rank: int) -> float:
    """Lower bound of the step time on ``rank`` alone, in seconds: its compute time with unlimited memory."""
    device = profile.devices[rank]
    sequence_s = min(whole_model_s(profile, device, n * request.sequence_length) / n for n in _sizes(request))
    trained = sum(layer.trainable_parameters for layer in profile.model.layers)
    stepping_s = optimizer_s(profile, device, trained)
    return request.global_batch * sequence_s + stepping_s
