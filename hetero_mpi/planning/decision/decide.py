"""Which plan it is: the best that several searches find.

``planner.make_plan`` adds figures and reasons to the answer; whoever only wants to know how long a step would take on a
changed cluster asks here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hetero_mpi.errors import UserError
from hetero_mpi.planning.annealing.anneal import Annealer, always_split
from hetero_mpi.planning.orders import OTHER_ORDERS
from hetero_mpi.planning.outline import outlined
from hetero_mpi.planning.pacing import classic_depths, scheduled_depths
from hetero_mpi.planning.several import layouts
from hetero_mpi.planning.several.fitting import Fitter
from hetero_mpi.planning.single.natural import in_natural_order
from hetero_mpi.planning.single.optimum import Optimum, check, optimise, space_of
from hetero_mpi.planning.single.room import closest, few_classes, rescued, with_hosts_divided
from hetero_mpi.planning.tables import may_split
from hetero_mpi.planning.types.plan import Plan
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.request import PlanRequest

LARGE, ANNEALED = 32, 64
"""With more ranks than the first, and several pipelines allowed, ``several.layouts`` is asked alone; with more than the second
nothing is annealed."""
MUCH_SLOWER = 1.05
"""Plans of other numbers of pipelines are annealed too, unless they take so many times as long."""


@dataclass(frozen=True)
class Decision:
    """A plan, and what the search knows of it."""

    plan: Plan
    step_s: float
    """Simulated."""
    optimum: Optimum | None = None
    """What the search over single pipelines found, where the plan came of it."""


def decide(profile: ClusterProfile, request: PlanRequest) -> Decision | None:
    """The fastest plan that fits, by simulated step time; None: nothing fits. Deterministic.

    Raises ``UserError`` when the request cannot be planned for at all.
    """
    if request.schedule in OTHER_ORDERS:
        nearest = decide(profile, nearest_searched(request))
        plan = None if nearest is None else in_order(nearest.plan, request.schedule)
        return None if plan is None else Decision(plan, outlined(plan, profile).step_s)
    check(profile, request)
    if request.schedule == "split" and not any(may_split(profile, device.rank) for device in profile.devices):
        raise UserError(
            'schedule = "split": the profile has no times of a backward in two parts (input_s and weight_s of blocks '
            "and head), which are measured where all weights are trained; profile again, or use another schedule"
        )
    fitter = Fitter(profile, request)
    found: list[Decision] = []
    for plan, optimum in _candidates(profile, request):
        fitting = fitter.fitted(plan)
        if fitting is not None:
            found.append(Decision(fitting, fitter.step_s(fitting), optimum))
    best = found[0] if found else None
    for other in found[1:]:
        assert best is not None
        best = other if other.step_s < best.step_s * (1 - request.indifference) else best
    return _annealed(best, found, profile, request)


def nearest_searched(request: PlanRequest) -> PlanRequest:
    """``request``; for an order of its own what is searched instead, with as many micro-batches in flight if backward is whole."""
    if request.schedule not in OTHER_ORDERS:
        return request
    return replace(request, schedule="split" if OTHER_ORDERS[request.schedule].SPLITS else "gpipe")


def in_order(plan: Plan, schedule: str) -> Plan:
    """``plan``; where ``schedule`` is an order of its own, with pipelines of several stages computed in that order."""
    if schedule not in OTHER_ORDERS:
        return plan
    pipelines = (
        replace(pipeline, order=schedule, split_backward=OTHER_ORDERS[schedule].SPLITS)
        if len(pipeline.stages) > 1
        else pipeline
        for pipeline in plan.pipelines
    )
    return replace(plan, pipelines=tuple(pipelines))


def fits(profile: ClusterProfile, request: PlanRequest) -> bool:
    """Is there a plan? Quicker to answer than which."""
    if not any(profile.model.dtype in device.dtypes for device in profile.devices):
        return False
    smallest = (min(request.micro_batch_choices),)
    request = replace(request, max_pipelines=1, micro_batch_choices=smallest)  # whatever fits, fits so
    spaces = (few_classes(space_of(divided, request)) for divided in with_hosts_divided(profile))
    return any(closest(space).shortage_bytes <= 0 for space in spaces)


def _annealed(
    best: Decision | None, found: Sequence[Decision], profile: ClusterProfile, request: PlanRequest
) -> Decision | None:
    """``best``, or a better plan annealed from the best plans of all numbers of pipelines."""
    if len(profile.devices) > ANNEALED:
        return best
    starts = [(best.plan, best.step_s)] if best is not None else []
    numbers = {len(plan.pipelines) for plan, _ in starts}
    for other in sorted(found, key=lambda one: one.step_s):
        if len(other.plan.pipelines) not in numbers and best is not None and other.step_s < best.step_s * MUCH_SLOWER:
            numbers.add(len(other.plan.pipelines))
            starts.append((other.plan, other.step_s))
    annealer = Annealer(profile, request)
    fitter = annealer.fitter
    for toggled in _otherwise_split(best.plan, profile, request) if best is not None else ():
        fitting = fitter.fitted(toggled)
        starts += [(fitting, fitter.step_s(fitting))] if fitting is not None else []
    chosen = annealer.best(starts)
    if chosen is None:
        return None
    plan, step_s = chosen
    # What a further rank would do is asked of the single pipeline that was found: of other ranks it says nothing.
    optimum = best.optimum if best is not None and _used(plan) == _used(best.plan) else None
    return Decision(_scheduled(plan, request) if request.schedule != "auto" else plan, step_s, optimum)


def _used(plan: Plan) -> set[int]:
    return {rank for pipeline in plan.pipelines for stage in pipeline.stages for rank in stage.ranks}


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


def with_classic_depths(plan: Plan) -> Plan:
    """Every stage as many micro-batches ahead as stages follow it."""
    pipelines_ = []
    for pipeline in plan.pipelines:
        warm_up = classic_depths(len(pipeline.stages), pipeline.micro_batches - 1)
        stages = tuple(replace(stage, warm_up=depth) for stage, depth in zip(pipeline.stages, warm_up, strict=True))
        pipelines_.append(replace(pipeline, stages=stages))
    return replace(plan, pipelines=tuple(pipelines_))


def _candidates(profile: ClusterProfile, request: PlanRequest) -> Iterator[tuple[Plan, Optimum | None]]:
    usable = sum(profile.model.dtype in device.dtypes for device in profile.devices)
    large = usable > LARGE and request.max_pipelines > 1 and request.schedule == "auto"
    plans = layouts.several(profile, request) if request.max_pipelines > 1 else []
    if not (large and plans) and (request.allow_idle or usable <= len(profile.model.layers)):
        for divided in with_hosts_divided(profile):
            found = _one_pipeline(divided, request)
            if found.best is not None:
                found = in_natural_order(found, request.indifference)
                assert found.best is not None
                yield _scheduled(found.best.plan(), request), found
    for _, plan in plans:
        yield _scheduled(plan, request), None


def _one_pipeline(profile: ClusterProfile, request: PlanRequest) -> Optimum:
    """The best single pipeline found: from classic depths where these fit, else from shallower ones."""
    space = space_of(profile, request)
    found = optimise(space)
    if found.best is None and request.schedule == "auto":
        shallow = [optimise(replace(space, most_in_flight=most)) for most in (1, 2)]
        fitting = [one for one in shallow if one.best is not None]
        found = min(fitting, key=lambda one: one.best.step_s if one.best else 0.0, default=found)
    return found if found.best is not None else rescued(space) or found


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
