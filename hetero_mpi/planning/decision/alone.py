"""How fast is one rank by itself, with the same tokens per step? The one answer, for plans, what-if questions and ``baseline``."""

from __future__ import annotations

from dataclasses import replace

from hetero_mpi import units
from hetero_mpi.errors import UserError
from hetero_mpi.planning.decision.decide import Decision, decide
from hetero_mpi.planning.durations import optimizer_s, whole_model_s
from hetero_mpi.planning.memory import fits_memory, stage_trainable, with_copies
from hetero_mpi.planning.tables import rank_contents
from hetero_mpi.planning.types.cluster_changes import renumbered, restricted
from hetero_mpi.planning.types.plan import Alone
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.request import PlanRequest


def alone(profile: ClusterProfile, request: PlanRequest, rank: int) -> Alone:
    """``rank`` by itself: the fastest of all its micro-batches and of the request's choices of recompute, in any order of actions.
    Copies of the trained state are counted as ``planner.make_plan`` counts them."""
    try:
        decision = _decided(profile, request, rank)
    except UserError as error:
        return Alone(rank, problem=str(error).splitlines()[0])
    if decision is None:
        return Alone(rank, problem=f"does not fit into its {units.size(profile.devices[rank].memory_bytes)}")
    return Alone(rank, decision.step_s)


def _decided(profile: ClusterProfile, request: PlanRequest, rank: int) -> Decision | None:
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
    single = _decided(profile, request, best.rank)
    if single is None or not fits_memory(single.plan, counted, request.memory_reserve):
        return decision
    all_work = len(decision.plan.ranks) == len(profile.devices)
    return replace(single, at_work_s=decision.step_s if all_work else decision.at_work_s)


def _sizes(request: PlanRequest) -> tuple[int, ...]:
    return request.alone_micro_batch_choices or request.micro_batch_choices


def _least_s(profile: ClusterProfile, request: PlanRequest, rank: int) -> float:
    """Least seconds that ``rank`` computes by itself, had it memory enough."""
    device = profile.devices[rank]
    sequence_s = min(whole_model_s(profile, device, n * request.sequence_length) / n for n in _sizes(request))
    stepping_s = optimizer_s(profile, device, stage_trainable(profile.model, 0, len(profile.model.layers)))
    return request.global_batch * sequence_s + stepping_s
