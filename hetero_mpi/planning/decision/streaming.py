"""Plans with streamed stages, for models that fit into the devices' memory in no other way.

To stream a stage is one of the ways in which the search may hold it (``tables.Way``): no frozen weights on the device, of every
layer its input, forward and backward in slices, never faster than the weights are copied. Where all weights are trained, a device
with memory of its own has its part of the host's, in which the model's state is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from hetero_mpi.planning.contention import with_copying
from hetero_mpi.planning.memory import (
    predict_memory,
)
from hetero_mpi.planning.search.memory_fit import Fitter
from hetero_mpi.planning.types.plan import Plan
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.request import PlanRequest

WORTHWHILE = 0.02
"""A plan with streamed stages must be shorter by this share than one without, unless the job asks for streaming."""
FULL = 0.8
"""Memory stands in the way where a rank uses more than this share of it."""

Timed = tuple[Plan, float]
"""A plan and the seconds of a step."""
Search = Callable[[ClusterProfile, PlanRequest, Sequence[int]], Plan | None]
"""The best plan found with stages that may be streamed, in slices of any of so many sequences."""


def with_streamed_stages(
    profile: ClusterProfile, request: PlanRequest, resident: Timed | None, search: Search
) -> Timed | None:
    """The fastest plan with streamed stages that ``search`` finds; None: nothing fits even so, or ``resident`` is as good.

    Where streaming is left to the planner, it is looked at only where memory may stand in the way of ``resident``, which must be
    slower by ``WORTHWHILE``.
    """
    if request.streaming == "never" or not streamable(profile):
        return None
    left = request.streaming == "auto"
    if left and resident is not None and not _memory_binds(resident[0], profile, request):
        return None
    best = _fastest(profile, request, search)
    if best is None or resident is None:
        return best
    return best if best[1] < resident[1] * (1 - WORTHWHILE * left) else None


def streamable(profile: ClusterProfile) -> bool:
    """Whether there is anything to stream. What is trained whole is kept in host memory, which spares some devices theirs."""
    model = profile.model
    if model.trained_whole:
        return not all(device.shares_host_memory for device in profile.devices)
    return any(map(model.streamed_bytes, range(len(model.layers))))


def _memory_binds(plan: Plan, profile: ClusterProfile, request: PlanRequest) -> bool:
    """Whether some rank's memory is nearly full, or a stage repeats forwards to spare it."""
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    memory = predict_memory(plan, profile, request.memory_reserve)
    return any(stage.recompute for stage in stages) or any(one.peak_bytes > FULL * one.usable_bytes for one in memory)


def _fastest(profile: ClusterProfile, request: PlanRequest, search: Search) -> Timed | None:
    fitter, crowded = Fitter(profile, request), with_copying(profile, range(len(profile.devices)))
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
    plan = search(crowded, asked, sorted({sizes[place] for place in (0, len(sizes) // 2, -1)}))
    plan = None if plan is None else fitter.fitted(plan)
    return (plan, fitter.step_s(plan)) if plan is not None and fitter.holds(plan) else None
