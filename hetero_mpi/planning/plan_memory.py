"""Predicted peak memory of every rank and host under a plan, counted from the schedule that will run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hetero_mpi.planning.memory import (
    STAGING_BUFFERS,
    StageMemory,
    host_state_bytes,
    memory_of,
    shared_bytes,
    stage_holdings,
    stage_trainable,
    state_on_device,
    usable_bytes,
)
from hetero_mpi.planning.orders import computed_by_rank
from hetero_mpi.planning.owners import owned_units
from hetero_mpi.planning.types.cost import COPY_BYTES, GRADIENT_BYTES, ModelCost
from hetero_mpi.planning.types.plan import HostMemory, PipelinePlan, Plan, RankMemory, StagePlan
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.request import PlanRequest

_LEAST_WEIGHT = 0.01
"""Least share of the optimizer's state that a rank owns, against the largest one."""


def with_copies(profile: ClusterProfile, request: PlanRequest) -> ClusterProfile:
    """The profile with a model whose trained parameters take the copies' memory as well, where ranks compute in host memory.

    A rank keeps its own copies and, as a peer, others', which are counted as if they were as large as its own. Where some rank
    has a GPU, whose copies lie in the host's memory too, that memory is planned without what copies may take of it, if ranks
    compute or may keep what they train there.
    """
    more = request.copy_bytes_per_trainable_parameter
    computing = [device.shares_host_memory for device in profile.devices]
    streams = request.streaming != "never" and profile.model.trained_whole
    if not more or not (any(computing) or streams):
        return profile
    model, copies = profile.model, more / COPY_BYTES
    if not all(computing):
        return _without_room_for_copies(profile, copies * model.copy_bytes_per_trainable_parameter, streams)
    saving = [layer.moments_saving_bytes * (1 + copies) for layer in model.layers]
    layers = (replace(x, moments_saving_bytes=s) if s else x for x, s in zip(model.layers, saving, strict=True))
    state = model.state_bytes_per_trainable_parameter + more
    return replace(profile, model=replace(model, state_bytes_per_trainable_parameter=state, layers=tuple(layers)))


def _without_room_for_copies(profile: ClusterProfile, more: float, everywhere: bool) -> ClusterProfile:
    """The profile with less memory of hosts that ranks compute in, or ``everywhere``: without copies of ``more`` bytes for each
    parameter that the host's ranks may train, which are no more than fit into their memory."""
    model = profile.model
    trained = stage_trainable(model, 0, len(model.layers))
    held = sum(layer.parameter_bytes for layer in model.layers) + model.state_bytes(0, len(model.layers))
    each = held / max(1, trained)
    known, taken = {host.name: host.memory_bytes for host in profile.hosts}, {}
    for name in {device.host for device in profile.devices if device.shares_host_memory or everywhere}:
        own = [device for device in profile.devices if device.host == name]
        memory = known.get(name, max((device.memory_bytes for device in own if device.shares_host_memory), default=0))
        fitting = sum(d.memory_bytes for d in own if not d.shares_host_memory) / each + memory / (each + more)
        taken[name] = math.ceil(more * min(trained, fitting))
    devices = tuple(
        replace(device, memory_bytes=max(0, device.memory_bytes - taken[device.host]))
        if device.shares_host_memory
        else device
        for device in profile.devices
    )
    hosts = tuple(
        replace(host, memory_bytes=max(0, host.memory_bytes - taken.get(host.name, 0))) for host in profile.hosts
    )
    return replace(profile, devices=devices, hosts=hosts)


def predict_memory(plan: Plan, profile: ClusterProfile, reserve: float = 0.0) -> tuple[RankMemory, ...]:
    """Peak against usable bytes of every rank that holds a stage, in rank order."""
    peaks: dict[int, int] = {}
    for pipeline in plan.pipelines:
        for rank, places in pipeline.held.items():
            stage = pipeline.stages[places[0]]
            member = stage.ranks.index(rank)
            if len(places) == 1:
                needs = [
                    memory_of(profile, pipeline, stage, plan.sequence_length, holding, member).total
                    for holding in stage_holdings(pipeline, stage, profile.model)
                ]
            else:
                needs = [_together_bytes(profile, pipeline, rank, plan.sequence_length)]
            held = [pipeline.stages[place] for place in places]
            peaks[rank] = max(needs) - _elsewhere(plan, profile, held, member)
            peaks[rank] += sum(_regrouped_bytes(plan, profile.model, one, member) for one in held)
    return tuple(
        RankMemory(rank, peaks[rank], usable_bytes(profile.devices[rank].memory_bytes, reserve))
        for rank in sorted(peaks)
    )


def _together_bytes(profile: ClusterProfile, pipeline: PipelinePlan, rank: int, sequence_length: int) -> int:
    """Peak bytes of a rank that holds several stages of a pipeline: activations at the worst place of its list, of all of them;
    the workspace of one. Between two neighbours nothing is staged, and tied ends share their values."""
    places, model = pipeline.held[rank], profile.model_on(rank)

    def of(place: int, in_flight: int, deferred: int) -> StageMemory:
        return memory_of(profile, pipeline, pipeline.stages[place], sequence_length, (in_flight, deferred))

    empty = {place: of(place, 0, 0) for place in places}
    kept = {place: of(place, 1, 0).activations for place in places}
    put_off = {place: of(place, 0, 1).activations for place in places}
    now = most = 0
    for name, place, _ in computed_by_rank(pipeline)[rank]:
        more = {"F": kept[place], "B": -kept[place], "I": put_off[place] - kept[place], "W": -put_off[place]}
        now += more[name]
        most = max(most, now)
    tokens, ends = pipeline.size(0) * sequence_length, {0, len(pipeline.stages) - 1}
    between = sum(
        model.layers[pipeline.stages[place].last - 1].boundary_bytes_per_token * tokens
        for place in places
        if place + 1 in places
    )
    shared = shared_bytes(model, 0, len(model.layers)) if ends <= set(places) else 0
    return (
        sum(one.parameters + one.state + one.staging for one in empty.values())
        + max(one.workspace for one in empty.values())
        + most
        - 4 * STAGING_BUFFERS * between
        - shared
    )


def _elsewhere(plan: Plan, profile: ClusterProfile, held: Sequence[StagePlan], member: int) -> int:
    """Bytes of masters and moments of a rank's stages that other pipelines' ranks own, where they would be in its device's memory.
    What the leader of a group owns, each member keeps for its own part."""
    if len(plan.pipelines) == 1 or not state_on_device(profile, held[0]):
        return 0
    model, leader = profile.model, held[0].ranks[0]
    own = model.part(held[0].share(member), held[0].expert_share(member))
    each = [own.owned_bytes(i, i + 1) / max(1, layer.trainable_parameters) for i, layer in enumerate(model.layers)]
    units = owned_units(plan, model).items()
    owned = sum(count * each[layer] for (layer, _), (rank, count) in units if rank == leader)
    return math.floor(sum(own.owned_bytes(stage.first, stage.last) for stage in held) - owned)


def _regrouped_bytes(plan: Plan, model: ModelCost, stage: StagePlan, member: int) -> int:
    """Bytes of the buffers in which a rank exchanges the gradients of layers that another pipeline divides otherwise."""
    if not plan.leader_of:
        return 0
    others = [other for _, _, other in plan.numbered if (other.shares, other.experts) != (stage.shares, stage.experts)]
    layers = {layer for other in others for layer in range(other.first, other.last)}
    held = model.part(stage.share(member), stage.expert_share(member)).layers
    return GRADIENT_BYTES * sum(held[i].trainable_parameters for i in range(stage.first, stage.last) if i in layers)


def weighted(plan: Plan, free: Mapping[int, float]) -> Plan:
    """The plan with ranks owning optimizer state by the bytes that it leaves ``free`` when they own none."""
    most = max(1.0, *free.values())

    def by_room(stage: StagePlan) -> StagePlan:
        return replace(stage, state_weight=max(_LEAST_WEIGHT, round(free[stage.ranks[0]] / most, 2)))

    return plan.with_stages(by_room(stage) for _, _, stage in plan.numbered)


def predict_hosts(plan: Plan, profile: ClusterProfile, reserve: float = 0.0) -> tuple[HostMemory, ...]:
    """Peak against usable bytes of every host that has a limit, in the profile's order.

    Ranks that compute in the host's own memory (CPU, integrated GPUs) take all they need from it; of the others, what streamed
    stages keep lies there (``host_state_bytes``). Their staging buffers are small enough to leave out.
    """
    if not profile.hosts:
        return ()
    peaks = {memory.rank: memory.peak_bytes for memory in predict_memory(plan, profile, reserve)}
    streams, layers = dict[int, int](), plan.layers
    for stage in (stage for _, _, stage in plan.numbered if stage.streamed):
        streams[stage.ranks[0]] = host_state_bytes(profile.model, stage.first, stage.last, stage.disk_layers(layers))
    takes = {
        device.rank: (peaks if device.shares_host_memory else streams).get(device.rank, 0) for device in profile.devices
    }
    found = []
    for host in profile.hosts:
        peak = sum(takes[device.rank] for device in profile.devices if device.host == host.name)
        if peak:
            found.append(HostMemory(host.name, peak, usable_bytes(host.memory_bytes, reserve)))
    return tuple(found)


def fits_memory(plan: Plan, profile: ClusterProfile, reserve: float) -> bool:
    """True where all ranks have the memory that the plan takes, and all hosts."""
    enough = all(one.peak_bytes <= one.usable_bytes for one in predict_memory(plan, profile, reserve))
    return enough and hosts_suffice(plan, profile, reserve)


def hosts_suffice(plan: Plan, profile: ClusterProfile, reserve: float) -> bool:
    """True where every host holds what the plan asks of its memory. (That each rank's own suffices is another question.)"""
    return all(one.peak_bytes <= one.usable_bytes for one in predict_hosts(plan, profile, reserve))
