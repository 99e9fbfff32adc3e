"""Which plan it is: the best that several searches find. And how fast one rank is by itself, with the same tokens per step.

``planner.make_plan`` adds figures and reasons to the answer; whoever only wants to know how long a step would take on a
changed cluster asks here.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from hetero_mpi.planning.contention import slowness, spread_out, while_computing, with_copying
from hetero_mpi.planning.decision.groups import with_groups
from hetero_mpi.planning.decision.several_stages import SeveralStages
from hetero_mpi.planning.decision.shortage import closest, with_hosts_divided
from hetero_mpi.planning.device_times import optimizer_s, whole_model_s
from hetero_mpi.planning.memory_model import MemoryModel, predict_memory
from hetero_mpi.planning.orders import INTERLEAVINGS, OTHER_ORDERS
from hetero_mpi.planning.orders.warm_up import scheduled_depths, with_classic_depths
from hetero_mpi.planning.outline import outlined
from hetero_mpi.planning.search import layouts
from hetero_mpi.planning.search.memory_fit import Fitter, cut_otherwise
from hetero_mpi.planning.search.rounds import always_split
from hetero_mpi.planning.search.search import MAX_RANKS_WITHOUT_LAYOUTS, MAX_SEARCH_RANKS, Search
from hetero_mpi.planning.tables import may_split, rank_contents
from hetero_mpi.planning.types.cluster_changes import renumbered, restricted, with_copies
from hetero_mpi.planning.types.plan import Alone, Plan
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.request import PlanRequest
from hetero_mpi.util import units
from hetero_mpi.util.errors import UserError

WORTHWHILE = 0.02
"""A plan with streamed stages must be shorter by this share than one without, unless the job asks for streaming."""
FULL = 0.8
"""Memory stands in the way where a rank uses more than this share of it."""


@dataclass(frozen=True)
class Decision:
    """A plan, and what the search knows of it."""

    plan: Plan
    step_s: float
    """Simulated."""
    one_pipeline_s: float | None = None
    """The best plan found of one pipeline. Infinite: none fits; None: not asked."""
    at_work_s: float | None = None
    """The same where no rank idles that can be given something."""
    one_stage_s: float | None = None
    """Where ranks hold several stages each: the best plan found in which they hold one."""
    without_groups_s: float | None = None
    """Where ranks hold a stage together: the best plan found in which none do. Infinite: none fits."""


def decide(profile: ClusterProfile, request: PlanRequest) -> Decision | None:
    """The fastest plan found that fits, by simulated step time; None: nothing fits. Deterministic.

    Raises ``UserError`` when the request cannot be planned for at all.
    """
    if request.schedule in OTHER_ORDERS:
        nearest = decide(profile, nearest_searched(request))
        plan = None if nearest is None else in_order(nearest.plan, profile, request)
        return None if plan is None else Decision(plan, outlined(plan, profile).step_s)
    check(profile, request)
    together, few = _decided(profile, request), spread_out(profile)
    if len(few) == len(profile.devices) or not request.allow_idle:
        return together
    apart = _decided(restricted(profile, few), request)
    if apart is None or (together is not None and together.step_s < (1 - request.indifference) * apart.step_s):
        return together
    at_work_s = math.inf if together is None else together.at_work_s
    return replace(apart, plan=renumbered(apart.plan, few), at_work_s=at_work_s)


def _decided(profile: ClusterProfile, request: PlanRequest) -> Decision | None:
    """The same, searched for with the times that ranks take while all of them compute, and timed with those of its own ranks."""
    everyone = range(len(profile.devices))
    busy = while_computing(profile, everyone)
    resident = _with_groups(busy, request, _resident(busy, request), slowness(profile, everyone))
    chosen, streamed = resident, _streamed(busy, request, resident)
    worthwhile = 1 - WORTHWHILE * (request.streaming == "auto")
    if streamed is not None and (resident is None or streamed.step_s < resident.step_s * worthwhile):
        chosen = streamed
    elif streamed is not None and resident is not None and resident.without_groups_s is not None:
        chosen = replace(resident, without_groups_s=min(resident.without_groups_s, streamed.step_s))
    if chosen is None or busy is profile:
        return chosen
    return replace(chosen, step_s=outlined(chosen.plan, profile).step_s)


def _with_groups(
    profile: ClusterProfile, request: PlanRequest, best: Decision | None, crowded: Collection[int]
) -> Decision | None:
    """``best``, or a clearly shorter plan in which ranks of a host hold a stage together, which ``crowded`` ones do not."""
    grouped = with_groups(profile, request, None if best is None else best.step_s, _searched, crowded)
    if grouped is None:
        return best
    one_pipeline_s, without_s = (None, math.inf) if best is None else (best.one_pipeline_s, best.step_s)
    return Decision(*grouped, one_pipeline_s, without_groups_s=without_s)


def _searched(profile: ClusterProfile, request: PlanRequest) -> Plan | None:
    decision = decide(profile, request)
    return None if decision is None else decision.plan


def _streamed(profile: ClusterProfile, request: PlanRequest, resident: Decision | None) -> Decision | None:
    """The fastest plan with streamed stages that is found; None: nothing fits even so, or none was looked for.

    To stream a stage is one of the ways in which the search may hold it (``tables.StageMode``). Where that is left to the planner,
    it is looked at only where memory may stand in the way of ``resident``.
    """
    if request.streaming == "never" or not streamable(profile):
        return None
    left = request.streaming == "auto"
    if left and resident is not None and not _memory_binds(resident.plan, profile, request):
        return None
    sizes = sorted(set(request.micro_batch_choices))
    larger = list(sizes)
    while len(sizes) > 1 and request.global_batch % (2 * larger[-1]) == 0:
        larger.append(2 * larger[-1])
    asked = replace(
        request,
        micro_batch_choices=tuple(larger),
        split_choices=(False,),
        stages_per_rank=1,  # a rank with a streamed stage holds no other one
    )
    slices = sorted({sizes[place] for place in (0, len(sizes) // 2, -1)})
    found = _with_files(profile, request, asked, slices)
    if profile.model.trained_whole or (found is not None and not any(one.on_disk for _, _, one in found.plan.numbered)):
        return found
    within = _with_files(profile, request, replace(asked, without_files=True), slices) if profile.hosts else None
    return min(filter(None, (found, within)), key=lambda one: one.step_s, default=None)


def _with_files(
    profile: ClusterProfile, request: PlanRequest, asked: PlanRequest, slices: Sequence[int]
) -> Decision | None:
    """The best plan with streamed stages for what is ``asked``, with blocks on disk where hosts have no memory for them; None: it
    does not fit even so."""
    found = _resident(with_copying(profile, range(len(profile.devices))), asked, slices)
    fitter = Fitter(profile, request)
    plan = None if found is None else fitter.fitted(found.plan)
    plan = plan and fitter.with_files(plan)
    if plan is None or not fitter.holds(plan):
        return None
    plan = fitter.with_files(fitter.keeping(plan, slices))
    if not any(stage.on_disk for _, _, stage in plan.numbered):
        return Decision(plan, fitter.step_s(plan))
    return Decision(
        *fitter.descended(plan, fitter.step_s(plan), lambda one: map(fitter.with_files, cut_otherwise(one)))
    )


def streamable(profile: ClusterProfile) -> bool:
    """Whether there is anything to stream. What is trained whole is kept in host memory, which spares some devices theirs, where
    that of some host is known."""
    model = profile.model
    if model.trained_whole:
        hosts = [profile.host(device.rank) for device in profile.devices if not device.shares_host_memory]
        return any(host is None or host.memory_bytes > 0 for host in hosts)
    return any(map(model.streamed_bytes, range(len(model.layers))))


def _memory_binds(plan: Plan, profile: ClusterProfile, request: PlanRequest) -> bool:
    """Whether some rank's memory is nearly full, or a stage is streamed or repeats forwards to spare it."""
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    memory = predict_memory(plan, profile, request.memory_reserve)
    spared = any(stage.recompute or stage.streamed for stage in stages)
    return spared or any(one.peak_bytes > FULL * one.usable_bytes for one in memory)


def _resident(profile: ClusterProfile, request: PlanRequest, slices: Sequence[int] = ()) -> Decision | None:
    """The best plan in which every rank holds one stage, or several; without ``slices`` none is streamed."""
    few = len(profile.devices) <= MAX_RANKS_WITHOUT_LAYOUTS
    starts = [] if few else list(_starts(profile, request, slices))
    if len(profile.devices) > MAX_SEARCH_RANKS:
        return Decision(*min(starts, key=lambda one: one[1])) if starts else None
    search = Search(profile, request, slices)
    best = search.best(starts)
    if best is None and few and not slices:
        best = search.best(list(_roomiest(profile, request)))
    if best is None:
        return None
    plan, step_s = search.in_natural_order(best.plan, best.step_s)
    if request.schedule != "auto":
        return Decision(_scheduled(plan, request), step_s, best.one_pipeline_s, best.at_work_s)
    if request.stages_per_rank > 1 and not request.brief:
        several = SeveralStages(profile, request).better([(plan, step_s), *best.good_plans], step_s)
        if several is not None:
            return Decision(*several, best.one_pipeline_s, best.at_work_s, step_s)
    return Decision(plan, step_s, best.one_pipeline_s, best.at_work_s)


def check(profile: ClusterProfile, request: PlanRequest) -> None:
    """Raises ``UserError`` unless the request can be planned for, memory apart."""
    bad = [b for b in request.micro_batch_choices if b < 1 or request.global_batch % b]
    if bad or not request.micro_batch_choices:
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
            f"no rank's device offers the job's dtype {profile.model.dtype} ({offers}); change train.dtype",
        )
    most = len(profile.model.layers) * min(request.max_pipelines, request.global_batch)
    if not request.allow_idle and len(profile.devices) > min(len(usable), most):
        raise UserError(
            "plan.idle_ranks",
            f"plan.allow_idle = false asks for work on all {len(profile.devices)} ranks, but {len(usable)} offer "
            f"{profile.model.dtype} and {most} can be given something: a stage holds one of {len(profile.model.layers)} "
            f"layers of the model; start fewer ranks",
        )
    if request.schedule == "split" and not any(may_split(profile, device.rank) for device in profile.devices):
        raise UserError(
            "plan.split_times",
            'schedule = "split": the profile has no times of a backward in two parts (input_s and weight_s of blocks '
            "and head), which are measured where all weights are trained; profile again, or use another schedule",
        )


def nearest_searched(request: PlanRequest) -> PlanRequest:
    """``request``; for an order of its own what is searched instead, with as many micro-batches in flight if backward is whole."""
    if request.schedule not in OTHER_ORDERS:
        return request
    if request.schedule in INTERLEAVINGS:
        return replace(request, schedule="1f1b")
    return replace(request, schedule="split" if OTHER_ORDERS[request.schedule].SPLITS else "gpipe")


def in_order(plan: Plan, profile: ClusterProfile, request: PlanRequest) -> Plan | None:
    """``plan``; where the request's schedule is an order of its own, with pipelines of several stages computed in that order. None:
    its ranks cannot hold several stages each."""
    schedule = request.schedule
    if schedule not in OTHER_ORDERS:
        return plan
    if schedule in INTERLEAVINGS:
        return SeveralStages(profile, request).in_order(plan, schedule)
    pipelines = (
        replace(pipeline, order=schedule, split_backward=OTHER_ORDERS[schedule].SPLITS)
        if len(pipeline.stages) > 1
        else pipeline
        for pipeline in plan.pipelines
    )
    return replace(plan, pipelines=tuple(pipelines))


def fits(profile: ClusterProfile, request: PlanRequest) -> bool:
    """Whether there is a plan: quicker to answer than which."""
    if not any(profile.model.dtype in device.dtypes for device in profile.devices):
        return False
    request = replace(request, micro_batch_choices=(min(request.micro_batch_choices),))  # whatever fits, fits so
    if any(closest(divided, request).shortage_bytes <= 0 for divided in with_hosts_divided(profile)):
        return True  # as one pipeline; several take less where they share what is trained, and a layer is large
    return profile.model.trained_whole and request.max_pipelines > 1 and any(_starts(profile, request))


def _starts(profile: ClusterProfile, request: PlanRequest, slices: Sequence[int] = ()) -> Iterator[tuple[Plan, float]]:
    """Plans that fit, and their step times: of every promising number of pipelines, or of more ranks than are searched the most
    promising one; where there is none, the one that leaves most memory free. With their backward split otherwise too."""
    fitter, some = Fitter(profile, request), False
    for _, laid in layouts.promising_layouts(profile, request, slices):
        plan = fitter.fitted(_scheduled(laid, request))
        if plan is not None:
            otherwise = map(fitter.fitted, _otherwise_split(plan, profile, request))
            yield from ((one, fitter.step_s(one)) for one in (plan, *otherwise) if one is not None)
            some = True
            if len(profile.devices) > MAX_SEARCH_RANKS:
                return
    if not some and not slices:
        yield from _roomiest(profile, request)


def _roomiest(profile: ClusterProfile, request: PlanRequest) -> Iterator[tuple[Plan, float]]:
    """The plan of one pipeline that leaves most memory free, where it fits."""
    fitter = Fitter(profile, request)
    for plan in (closest(divided, request).plan for divided in with_hosts_divided(profile)):
        fitted = fitter.fitted(_scheduled(plan, request) if request.schedule != "auto" else plan)
        if fitted is not None:
            yield fitted, fitter.step_s(fitted)


def _otherwise_split(plan: Plan, profile: ClusterProfile, request: PlanRequest) -> Iterator[Plan]:
    """``plan`` with backward split (or not), since the cuts that suit one do not suit the other."""
    if len(set(request.split_choices)) < 2 or request.schedule != "auto":
        return
    pipelines_ = [
        replace(pipeline, split_backward=not pipeline.split_backward)
        if len(pipeline.stages) > 1 and all(may_split(profile, stage.ranks[0]) for stage in pipeline.stages)
        else pipeline
        for pipeline in plan.pipelines
    ]
    if tuple(pipelines_) != plan.pipelines:
        toggled = replace(plan, pipelines=tuple(pipelines_))
        yield toggled
        yield with_classic_depths(toggled)


def _scheduled(plan: Plan, request: PlanRequest) -> Plan:
    """``plan`` with the depths and the splitting that the request leaves no choice about."""
    changed = []
    for pipeline in plan.pipelines:
        stages = pipeline.stages
        if request.schedule != "auto":
            warm_up = scheduled_depths(request.schedule, len(stages), pipeline.micro_batches)
            stages = tuple(replace(stage, warm_up=depth) for stage, depth in zip(stages, warm_up, strict=True))
        split = always_split(request) and len(stages) > 1
        changed.append(replace(pipeline, stages=stages, split_backward=split))
    return replace(plan, pipelines=tuple(changed))


def alone(profile: ClusterProfile, request: PlanRequest, rank: int) -> Alone:
    """``rank`` by itself: the fastest of all its micro-batches and of the request's choices of recompute, in any order of actions.
    Copies of the trained state are counted as ``planner.make_plan`` counts them."""
    try:
        decision = _decided_alone(profile, request, rank)
    except UserError as error:
        return Alone(rank, problem=str(error).splitlines()[0])
    if decision is None:
        return Alone(rank, problem=f"does not fit into its {units.size(profile.devices[rank].memory_bytes)}")
    return Alone(rank, decision.step_s)


def _decided_alone(profile: ClusterProfile, request: PlanRequest, rank: int) -> Decision | None:
    """The plan of ``alone``; None: it does not fit. Raises UserError: as ``decide``."""
    single = restricted(profile, [rank])
    request = replace(
        request,
        micro_batch_choices=_sizes(request),
        max_pipelines=1,
        schedule="auto",
        indifference=0.0,
        thorough=False,
        brief=True,  # there is one number of pipelines
    )
    found = decide(with_copies(single, request), request) or decide(single, request)
    return None if found is None else replace(found, plan=renumbered(found.plan, [rank]))


def best_alone(profile: ClusterProfile, request: PlanRequest) -> Alone | None:
    """The rank that is fastest by itself; where none can hold the model, the one that computes fastest. None: no rank has the
    model's dtype."""
    unlike = {content: rank for rank, content in reversed(rank_contents(profile).items())}
    best: Alone | None = None
    for least_s, rank in sorted((_least_s(profile, request, rank), rank) for rank in unlike.values()):
        if best is not None and best.step_s is not None and least_s >= best.step_s:
            break
        other = alone(profile, request, rank)
        if best is None or (other.step_s is not None and (best.step_s is None or other.step_s < best.step_s)):
            best = other
    return best


def fastest(profile: ClusterProfile, request: PlanRequest) -> Decision | None:
    """The fastest plan of any ranks, or of one by itself; None: nothing fits. Raises UserError: as ``decide``."""
    decision = decide(profile, request)
    if decision is None or decision.step_s <= min(_least_s(profile, request, rank) for rank in rank_contents(profile)):
        return decision
    return or_alone(decision, best_alone(profile, request), profile, request, profile)


def or_alone(
    decision: Decision, best: Alone | None, profile: ClusterProfile, request: PlanRequest, counted: ClusterProfile
) -> Decision:
    """``decision``, or the ``best`` rank by itself where that is faster and ranks may idle.

    ``counted``: the profile with the copies of the trained state for which ``decision`` leaves room.
    """
    if best is None or best.step_s is None or best.step_s >= decision.step_s or not request.allow_idle:
        return decision
    single = _decided_alone(profile, request, best.rank)
    if single is None or not MemoryModel(counted, request).check(single.plan):
        return decision
    all_work = len(decision.plan.ranks) == len(profile.devices)
    return replace(single, at_work_s=decision.step_s if all_work else decision.at_work_s)


def _sizes(request: PlanRequest) -> tuple[int, ...]:
    return request.alone_micro_batch_choices or request.micro_batch_choices


def _least_s(profile: ClusterProfile, request: PlanRequest, rank: int) -> float:
    """Least seconds that ``rank`` computes by itself, had it memory enough."""
    device = profile.devices[rank]
    sequence_s = min(whole_model_s(profile, device, n * request.sequence_length) / n for n in _sizes(request))
    trained = sum(layer.trainable_parameters for layer in profile.model.layers)
    stepping_s = optimizer_s(profile, device, trained)
    return request.global_batch * sequence_s + stepping_s
