"""Which plan it is: the exact search where the instance is small, else the best that several searches find.

``planner.make_plan`` adds figures and reasons to the answer; whoever only wants to know how long a step would take on a
changed cluster asks here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hetero_mpi.errors import UserError
from hetero_mpi.planning.annealing.anneal import annealed
from hetero_mpi.planning.exact.joint import Exact
from hetero_mpi.planning.exact.variants import depths_of
from hetero_mpi.planning.several import few, layouts
from hetero_mpi.planning.several.abreast import abreast
from hetero_mpi.planning.several.polish import Polisher
from hetero_mpi.planning.single.natural import in_natural_order, preferred
from hetero_mpi.planning.single.optimum import Optimum, check, optimise, space_of
from hetero_mpi.planning.single.room import closest, few_classes, rescued, with_hosts_divided
from hetero_mpi.planning.tables import may_split, rank_classes
from hetero_mpi.planning.types.plan import Plan
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.request import PlanRequest

POLISH_EFFORT = 150_000
"""Simulated actions that may be spent on making a plan better as a whole."""
ABREAST_EFFORT = 400_000
"""The same, for changes of all pipelines at once."""
LARGE = 32
"""With more ranks than this, and several pipelines allowed, ``several.layouts`` is asked alone, and nothing is annealed."""
MANY_RANKS = 12
"""With more ranks than this a plan is not polished."""
MUCH_SLOWER = 1.05
"""Where the request is thorough, plans of other numbers of pipelines are annealed too, unless they take so many times as long."""


@dataclass(frozen=True)
class Decision:
    """A plan without figures."""

    plan: Plan
    step_s: float
    """Simulated."""
    proven: bool
    """No plan of the finite set that ``exact.joint`` describes is faster (but for the request's indifference)."""
    optimum: Optimum | None = None
    """What the search over single pipelines found, where the plan came of it."""


def decide(profile: ClusterProfile, request: PlanRequest) -> Decision | None:
    """The fastest plan that fits, by simulated step time; None: nothing fits. Deterministic.

    Raises ``UserError`` when the request cannot be planned for at all.
    """
    check(profile, request)
    if request.schedule == "split" and not any(may_split(profile, device.rank) for device in profile.devices):
        raise UserError(
            'schedule = "split": the profile has no times of a backward in two parts (input_s and weight_s of every kind '
            "of layer), which are measured where all weights are trained; profile again, or use another schedule"
        )
    if len(profile.devices) > LARGE and request.max_pipelines > 1 and request.schedule == "auto":
        found = layouts.several(profile, request, fewest=1)
        if found is None:
            return _searched(profile, request)
        return _with_starts(Decision(found, found.predicted_step_s, False), profile, request)
    exact = Exact(profile, request, rank_classes(profile), request.indifference)
    if not exact.is_small():
        return _searched(profile, request)
    best = exact.solve()
    if exact.is_proven and not best:
        return None
    proven = Decision(*preferred(exact, best), exact.is_proven) if best else None
    if exact.is_proven:
        return proven
    other = _searched(profile, request)
    return min((one for one in (proven, other) if one is not None), key=lambda one: one.step_s, default=None)


def fits(profile: ClusterProfile, request: PlanRequest) -> bool:
    """Is there a plan? Quicker to answer than which."""
    if not any(profile.model.dtype in device.dtypes for device in profile.devices):
        return False
    smallest = (min(request.micro_batch_choices),)
    request = replace(request, max_pipelines=1, micro_batch_choices=smallest)  # whatever fits, fits so
    exact = Exact(profile, request, rank_classes(profile))
    if exact.is_small():
        return bool(exact.solve())
    spaces = (few_classes(space_of(divided, request)) for divided in with_hosts_divided(profile))
    return any(closest(space).shortage_bytes <= 0 for space in spaces)


def _searched(profile: ClusterProfile, request: PlanRequest) -> Decision | None:
    """The best that several searches find, made better as a whole."""
    found: list[Decision] = []
    polisher = Polisher(profile, request, POLISH_EFFORT)
    for plan, optimum in _candidates(profile, request):
        fitting = polisher.fitted(plan)
        if fitting is not None:
            found.append(Decision(fitting, polisher.step_s(fitting), False, optimum))
    if not found:
        return None
    best = found[0]
    for other in found[1:]:
        best = other if other.step_s < best.step_s * (1 - request.indifference) else best
    return _with_starts(best, profile, request)


def _with_starts(best: Decision, profile: ClusterProfile, request: PlanRequest) -> Decision:
    """``best``, made better as a whole; with backward split where that is faster."""
    best = _improved(best, profile, request)
    many = len(profile.devices) > MANY_RANKS
    for start in _otherwise_split(best.plan, profile, request):
        polisher = Polisher(profile, request, POLISH_EFFORT)
        fitting = polisher.fitted(start)
        if fitting is not None:
            begun = fitting, polisher.step_s(fitting)
            plan, step_s = begun if many else polisher.polished(*begun)
            best = replace(best, plan=plan, step_s=step_s) if step_s < best.step_s else best
    return best


def _improved(best: Decision, profile: ClusterProfile, request: PlanRequest) -> Decision:
    """``best`` after changes of the whole plan: better ones only, where ranks are few; then also through worse ones."""
    found = best.plan, best.step_s
    few_ranks = len(profile.devices) <= MANY_RANKS
    if few_ranks:
        found = abreast(*found, profile, Polisher(profile, request, ABREAST_EFFORT))
        found = Polisher(profile, request, POLISH_EFFORT).polished(*found)
    if len(profile.devices) <= LARGE and request.schedule == "auto" and request.allow_idle:
        others = list(_other_numbers(found, profile, request)) if few_ranks and request.thorough else []
        found = annealed(*found, profile, request, others)
    # What a further rank would do is asked of the single pipeline that was found: of other ranks it says nothing.
    optimum = best.optimum if _used(found[0]) == _used(best.plan) else None
    return Decision(found[0], found[1], best.proven, optimum)


def _used(plan: Plan) -> set[int]:
    return {rank for pipeline in plan.pipelines for stage in pipeline.stages for rank in stage.ranks}


def _other_numbers(
    found: tuple[Plan, float], profile: ClusterProfile, request: PlanRequest
) -> Iterator[tuple[Plan, float]]:
    """Plans of a pipeline fewer and of one or two more, if not much slower: which number is best, annealing may decide."""
    now, polisher = len(found[0].pipelines), Polisher(profile, request, 0)
    for number in (now - 1, now + 1, now + 2):
        if 1 <= number <= min(request.max_pipelines, len(profile.devices), request.global_batch):
            plan = layouts.several(profile, replace(request, max_pipelines=number), fewest=number)
            fitting = None if plan is None else polisher.fitted(plan)
            if fitting is not None and (step_s := polisher.step_s(fitting)) < found[1] * MUCH_SLOWER:
                yield fitting, step_s


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
        (warm_up,) = depths_of("1f1b", len(pipeline.stages), pipeline.micro_batches - 1)
        stages = tuple(replace(stage, warm_up=depth) for stage, depth in zip(pipeline.stages, warm_up, strict=True))
        pipelines_.append(replace(pipeline, stages=stages))
    return replace(plan, pipelines=tuple(pipelines_))


def _candidates(profile: ClusterProfile, request: PlanRequest) -> Iterator[tuple[Plan, Optimum | None]]:
    space = space_of(profile, request)
    if request.allow_idle or sum(space.sizes) <= len(profile.model.layers):
        for divided in with_hosts_divided(profile):
            found = _one_pipeline(divided, request)
            if found.best is not None:
                found = in_natural_order(found, request.indifference)
                assert found.best is not None
                yield _scheduled(found.best.plan(), request), found
    if request.max_pipelines > 1:
        together = few.several(space, Polisher(profile, request, POLISH_EFFORT))
        if together is not None:
            yield _scheduled(together[0], request), None
        plan = layouts.several(profile, request)
        if plan is not None:
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
            (warm_up,) = depths_of(request.schedule, len(stages), pipeline.micro_batches)
            stages = tuple(replace(stage, warm_up=depth) for stage, depth in zip(stages, warm_up, strict=True))
        always = request.schedule == "split" or (request.schedule == "auto" and False not in request.split_choices)
        changed.append(replace(pipeline, stages=stages, split_backward=always and len(stages) > 1))
    return replace(plan, pipelines=tuple(changed))
