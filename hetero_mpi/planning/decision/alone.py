"""How fast is one rank by itself, with the same tokens per step? The one answer, for plans, what-if questions and ``baseline``."""

from __future__ import annotations

from dataclasses import replace

from hetero_mpi.errors import UserError
from hetero_mpi.planning.decision.decide import decide
from hetero_mpi.planning.durations import optimizer_s, whole_model_s
from hetero_mpi.planning.memory import stage_trainable, with_copies
from hetero_mpi.planning.tables import rank_contents
from hetero_mpi.planning.types.cluster_changes import restricted
from hetero_mpi.planning.types.plan_report import Alone
from hetero_mpi.planning.types.profile import ClusterProfile, DeviceProfile, LayerTimes
from hetero_mpi.planning.types.request import PlanRequest
from hetero_mpi.planning.words import describe_bytes


def alone(profile: ClusterProfile, request: PlanRequest, rank: int) -> Alone:
    """``rank`` by itself: the fastest of all its micro-batches and of the request's choices of recompute, in any order of actions.

    Its layers take as long as they took while the other ranks were still, where that was measured. Copies of the trained state are
    counted as ``planner.make_plan`` counts them.
    """
    single = restricted(profile, [rank])
    single = replace(single, devices=(_while_alone(single.devices[0]),))
    request = replace(
        request,
        micro_batch_choices=_sizes(request),
        max_pipelines=1,
        schedule="auto",
        indifference=0.0,
        thorough=False,
    )
    try:
        decision = decide(with_copies(single, request), request) or decide(single, request)
    except UserError as error:
        return Alone(rank, problem=str(error).splitlines()[0])
    if decision is None:
        return Alone(rank, problem=f"does not fit into its {describe_bytes(profile.devices[rank].memory_bytes)}")
    return Alone(rank, decision.step_s)


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


def _sizes(request: PlanRequest) -> tuple[int, ...]:
    return request.alone_micro_batch_choices or request.micro_batch_choices


def _while_alone(device: DeviceProfile) -> DeviceProfile:
    """With its times while the other ranks were still."""
    quiet = {kind: LayerTimes(times.forward_s, times.backward_s) for kind, times in device.alone.items()}
    return replace(device, layers=device.layers | quiet)


def _least_s(profile: ClusterProfile, request: PlanRequest, rank: int) -> float:
    """What ``rank`` computes by itself at least, had it memory enough."""
    device = _while_alone(profile.devices[rank])
    sequence_s = min(whole_model_s(profile, device, n * request.sequence_length) / n for n in _sizes(request))
    stepping_s = optimizer_s(profile, device, stage_trainable(profile.model, 0, len(profile.model.layers)))
    return request.global_batch * sequence_s + stepping_s
