"""Plans with streamed stages, for models that fit into the devices' memory in no other way.

The searches know nothing of streaming. They are given a cluster whose layers cost what streamed ones do (``streamed_view``): no
frozen weights on the device, of every layer its input, forward and backward in slices, never faster than the weights are copied.
Where all weights are trained, a device with memory of its own has its part of the host's instead, in which the model's state is.
What they find is then written with streamed stages, of which those that fit without go back to holding their weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from hetero_mpi.planning.contention import with_copying
from hetero_mpi.planning.durations import (
    host_optimizer_s,
    layer_s,
    offload_s,
    optimizer_s,
    pass_s,
    repeated_s,
    weights_s,
)
from hetero_mpi.planning.memory import (
    hosts_suffice,
    predict_memory,
    stage_trainable,
    streamed_memory,
    usable_bytes,
)
from hetero_mpi.planning.orders.warm_up import with_classic_depths
from hetero_mpi.planning.schedule import Op
from hetero_mpi.planning.search.memory_fit import Fitter
from hetero_mpi.planning.types.cost import STREAMED_LAYERS, LayerCost, ModelCost
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan
from hetero_mpi.planning.types.profile import ClusterProfile, Curve, DeviceProfile, LayerTimes
from hetero_mpi.planning.types.request import PlanRequest

WORTHWHILE = 0.02
"""A plan with streamed stages must be shorter by this share than one without, unless the job asks for streaming."""
FULL = 0.8
"""Memory stands in the way where a rank uses more than this share of it."""
FEW = 8
"""Up to so many ranks three sizes of slices are looked at: the smallest and the largest micro-batch of the request, and the one
between. Beyond, that one alone."""
NEAR, HOPELESS = 1.1, 1.5
"""A size is searched that begins at most so many times as slow as the best one, and as what is known without streaming; for a brief
answer the best one alone."""

_ENDLESS_BYTES = 1 << 60
"""Memory of a host of which nothing is known."""

Timed = tuple[Plan, float]
"""A plan and the seconds of a step."""
Starts = Callable[[ClusterProfile, PlanRequest], Iterable[Timed]]
"""Plans to begin with, quickly found."""
Search = Callable[[ClusterProfile, PlanRequest], Plan | None]


def with_streamed_stages(
    profile: ClusterProfile, request: PlanRequest, resident: Timed | None, starts: Starts, search: Search
) -> Timed | None:
    """The fastest plan with streamed stages that ``search`` finds, in slices of the sizes with which ``starts`` are nearly the
    fastest; None: nothing fits even so, or ``resident`` is as good.

    Where streaming is left to the planner, it is looked at only where memory may stand in the way of ``resident``, which must be
    slower by ``WORTHWHILE``.
    """
    if request.streaming == "never" or not streamable(profile):
        return None
    left = request.streaming == "auto"
    if left and resident is not None and not _memory_binds(resident[0], profile, request):
        return None
    best = _fastest(profile, request, math.inf if resident is None else resident[1], starts, search)
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


def _fastest(
    profile: ClusterProfile, request: PlanRequest, known_s: float, starts: Starts, search: Search
) -> Timed | None:
    fitter = Fitter(profile, request)
    crowded = with_copying(profile, range(len(profile.devices)))
    sizes = sorted(set(request.micro_batch_choices))
    larger = list(sizes)
    while len(sizes) > 1 and request.global_batch % (2 * larger[-1]) == 0:
        larger.append(2 * larger[-1])
    places = {0, len(sizes) // 2, len(sizes) - 1} if len(profile.devices) <= FEW else {len(sizes) // 2}

    def asked(size: int) -> tuple[ClusterProfile, PlanRequest]:
        """The request that is searched instead, where slices have so many sequences."""
        return streamed_view(crowded, size, request), replace(
            request,
            micro_batch_choices=tuple(one for one in larger if one >= size),
            recompute_choices=(False,),
            split_choices=(False,),
            streaming="never",
            stages_per_rank=1,  # a rank with a streamed stage holds no other one
            groups=False,
        )

    def timed(plan: Plan, size: int) -> Iterator[Timed]:
        """A plan for the cluster that was searched, with streamed stages, as far as it fits."""
        streamed = _streamed(plan, fitter, crowded, size)
        # The view takes a little more memory than streamed stages do, and may have found too shallow depths.
        deep = [with_classic_depths(streamed)] if request.schedule == "auto" else []
        for fitting in map(fitter.fitted, (streamed, *deep)):
            if fitting is not None and hosts_suffice(fitting, profile, request.memory_reserve):
                yield fitting, fitter.step_s(fitting)

    begun: list[tuple[float, int]] = []
    found: list[Timed] = []
    for size in sorted(sizes[place] for place in places):
        fitting = [one for start, _ in starts(*asked(size)) for one in timed(start, size)]
        begun.append((min((step_s for _, step_s in fitting), default=math.inf), size))
        found += fitting
    if not found and len(profile.devices) == 1:
        return None  # of several ranks a search may find what no start was
    begun.sort()
    limit_s = min(NEAR * begun[0][0], HOPELESS * known_s)
    for begun_s, size in begun[: 1 if request.brief and found else None]:
        searched = search(*asked(size)) if begun_s <= limit_s else None
        found += timed(searched, size) if searched is not None else ()
    return min(found, key=lambda one: one[1], default=None)


def streamed_view(profile: ClusterProfile, slice_sequences: int, request: PlanRequest) -> ClusterProfile:
    """The cluster as it looks where all stages are streamed in such slices: layers' bytes and times are those of streamed ones."""
    tokens = slice_sequences * request.sequence_length
    model = profile.model
    streamed = [model.streamed_bytes(index) for index in range(len(model.layers))]
    kinds = {layer.kind: index for index, layer in enumerate(model.layers)}
    counts = [1 << power for power in range(max(1, math.ceil(math.log2(request.global_batch / slice_sequences))) + 1)]

    def seen(device: DeviceProfile) -> DeviceProfile:
        inner = max((layer.activation_bytes_per_token for layer in model.layers), default=0.0)
        taken = (device.activation_ratio - 1) * inner * tokens
        taken += 0 if model.trained_whole else STREAMED_LAYERS * max(streamed)
        layers = {
            kind: _times(device, times, _copies_s(device, model, kinds[kind]), tokens, counts)
            for kind, times in device.layers.items()
            if kind in kinds
        }
        elsewhere = model.trained_whole and not device.shares_host_memory
        own_bytes = max(0, int(device.memory_bytes - taken / (1 - request.memory_reserve)))
        return replace(
            device,
            layers=layers,
            memory_bytes=_part_of_host(profile, device, tokens, request) if elsewhere else own_bytes,
            forward_overhead_s=0.0,
            backward_overhead_s=0.0,
            optimizer_s_per_parameter=host_optimizer_s(device) if elsewhere else device.optimizer_s_per_parameter,
            activation_ratio=1.0,
        )

    return replace(profile, model=_costs(model, tokens), devices=tuple(map(seen, profile.devices)))


def _copies_s(device: DeviceProfile, model: ModelCost, layer: int) -> tuple[float, float]:
    """Seconds of copies that a layer's forward and its backward cannot be faster than."""
    weight_s, coming = weights_s(device, model.streamed_bytes(layer)), model.trained_whole * model.gradient_bytes(layer)
    return weight_s, max(weight_s, offload_s(device, model, layer) + weights_s(device, coming))


def _part_of_host(profile: ClusterProfile, device: DeviceProfile, tokens: int, request: PlanRequest) -> int:
    """Bytes of its host's memory for a device with memory of its own: as many as for others there. 0: it can compute no layer."""
    model, host = profile.model_on(device.rank), profile.host(device.rank)
    least = min(streamed_memory(model, i, i + 1, tokens, 1, tokens).total for i in range(len(model.layers)))
    if least > usable_bytes(device.memory_bytes, request.memory_reserve):
        return 0
    here = [one for one in profile.devices if one.host == device.host and not one.shares_host_memory]
    return _ENDLESS_BYTES if host is None else host.memory_bytes // len(here)


def _costs(model: ModelCost, tokens: int) -> ModelCost:
    layers = []
    for index, layer in enumerate(model.layers):
        before = model.layers[index - 1].boundary_bytes_per_token if index else 0
        at_once = math.ceil((layer.workspace_bytes_per_token + layer.activation_bytes_per_token) * tokens)
        layers.append(
            LayerCost(
                kind=layer.kind,
                parameters=layer.parameters,
                trainable_parameters=layer.trainable_parameters,
                parameter_bytes=layer.parameter_bytes - (0 if model.trained_whole else model.streamed_bytes(index)),
                activation_bytes_per_token=before,
                workspace_bytes_per_token=2 * max(before, layer.boundary_bytes_per_token),
                boundary_bytes_per_token=layer.boundary_bytes_per_token,
                workspace_bytes=layer.workspace_bytes + at_once,
            )
        )
    return replace(model, layers=tuple(layers))


def _times(
    device: DeviceProfile, times: LayerTimes, copies_s: tuple[float, float], tokens: int, counts: list[int]
) -> LayerTimes:
    forward_s = device.forward_overhead_s + layer_s(times, Op.F, tokens)
    backward_s = device.backward_overhead_s + layer_s(times, Op.B, tokens)
    backward_s += device.forward_overhead_s + repeated_s(times, tokens)
    samples = tuple(count * tokens for count in counts)
    return LayerTimes(
        Curve(samples, tuple(max(copies_s[0], count * forward_s) for count in counts)),
        Curve(samples, tuple(max(copies_s[1], count * backward_s) for count in counts)),
    )


def _streamed(plan: Plan, fitter: Fitter, crowded: ClusterProfile, slice_sequences: int) -> Plan:
    """``plan`` with streamed stages; a stage that fits without, and is faster then, holds its weights. ``crowded``: the cluster
    whose devices all copy at once."""
    request, pipelines = fitter.request, []
    for pipeline in plan.pipelines:
        size = None if slice_sequences >= pipeline.micro_batch else slice_sequences
        stages = tuple(
            min(
                (way for way in _ways(stage, request, size) if way.streamed or fitter.fits(pipeline, way)),
                key=lambda way: _in_step_s(crowded, pipeline, way, request.sequence_length),
            )
            for stage in pipeline.stages
        )
        pipelines.append(replace(pipeline, stages=stages))
    return replace(plan, pipelines=tuple(pipelines))


def _in_step_s(profile: ClusterProfile, pipeline: PipelinePlan, stage: StagePlan, sequence_length: int) -> float:
    """Seconds of a step in which a stage computes."""
    each_s = pass_s(profile, pipeline, stage, sequence_length)
    parameters = stage_trainable(profile.model, stage.first, stage.last)
    update_s = optimizer_s(profile, profile.devices[stage.ranks[0]], parameters, stage.streamed)
    return pipeline.micro_batches * each_s + update_s


def _ways(stage: StagePlan, request: PlanRequest, size: int | None) -> Iterator[StagePlan]:
    yield replace(stage, streamed=True, slice_sequences=size)
    for recompute in sorted(set(request.recompute_choices)):
        for at_once in {None, size}:
            yield replace(stage, recompute=recompute, slice_sequences=at_once)
