"""Variants of a measured cluster (ranks, links, memory) and of its model's costs (dtype, adapters, optimizer)."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

from hetero_mpi.planning.types.cost import LayerCost, ModelCost
from hetero_mpi.planning.types.plan import Plan, StagePlan
from hetero_mpi.planning.types.profile import (
    ANY_HOST,
    ITSELF,
    TABLES,
    ClusterProfile,
    DeviceProfile,
    HostLinkProfile,
    LayerTimes,
    LinkProfile,
)
from hetero_mpi.planning.types.request import PlanRequest
from hetero_mpi.planning.types.sizes import COPY_BYTES, DTYPE_BYTES, INT8, MOMENT_BLOCK_SIZE

AnyLink = TypeVar("AnyLink", LinkProfile, HostLinkProfile)

SECONDS = "forward_overhead_s", "backward_overhead_s"
STEP_SECONDS = "optimizer_fixed_s", "optimizer_s_per_parameter"
"""Device fields in seconds per micro-batch, and in seconds per step."""
UNLIMITED_BYTES = 2**50
NF4_BYTES = 0.5625
"""Bytes per packed weight, including its share of the scales, which are not double-quantised."""
ADAPTER_PARAMETER_RATIO = 0.01
"""Size of rank-16 adapters on all matrices of a block, relative to the block (0.3 to 1 % in models of 1B or more)."""
SAVED_BYTES = {"adamw_8bit": 8 - 2 - 8 / MOMENT_BLOCK_SIZE, "adafactor": 8.0, "muon": 4.0}
"""Bytes per parameter of optimizer state saved relative to AdamW."""


def with_faster_links(
    profile: ClusterProfile,
    pairs: Collection[tuple[int, int]] | None = None,
    times: float = 10,
    latency: bool = True,
    where: Callable[[LinkProfile | HostLinkProfile], bool] = lambda link: True,
) -> ClusterProfile:
    """Make links ``times`` times as fast: those of ``pairs``, in both directions (default: all), that satisfy ``where``.

    ``latency`` tells whether latencies are divided too.
    """

    def faster(link: AnyLink) -> AnyLink:
        if not where(link):
            return link
        shorter = link.latency_s / times if latency else link.latency_s
        return replace(link, latency_s=shorter, bytes_per_s=link.bytes_per_s * times)

    if pairs is None:
        between = tuple(faster(link) for link in profile.host_links)
        return replace(profile, links=tuple(faster(link) for link in profile.links), host_links=between)
    # Pairs of ranks that only have host links get a separate link.
    listed = {(link.source, link.destination): link for link in profile.links}
    for pair in ((a, b) for ends in pairs for a, b in (ends, ends[::-1])):
        listed[pair] = faster(profile.link(*pair))
    return replace(profile, links=tuple(listed.values()))


def with_wire(profile: ClusterProfile, wire: str | None) -> ClusterProfile:
    """Send messages between stages in ``int8`` if that is ``wire``, else in the compute dtype."""
    return replace(profile, model=replace(profile.model, wire=wire if wire == INT8 else None))


def with_free_links(profile: ClusterProfile) -> ClusterProfile:
    """Return the cluster with messages that take no time on links, on NICs, or between devices and hosts."""
    devices = tuple(
        replace(device, copy_latency_s=0.0, device_to_host_bytes_per_s=math.inf, host_to_device_bytes_per_s=math.inf)
        for device in profile.devices
    )
    at_once = {"sum_latency_s": 0.0, "sum_bytes_per_s": math.inf, "copies_bytes_per_s": math.inf}
    hosts = tuple(replace(host, shared_nic=False, **at_once) for host in profile.hosts)  # type: ignore[arg-type]
    return replace(with_faster_links(profile, times=math.inf), devices=devices, hosts=hosts)


def with_plenty_of_memory(profile: ClusterProfile) -> ClusterProfile:
    devices = tuple(replace(device, memory_bytes=UNLIMITED_BYTES) for device in profile.devices)
    hosts = tuple(replace(host, memory_bytes=UNLIMITED_BYTES) for host in profile.hosts)
    return replace(profile, devices=devices, hosts=hosts)


def restricted(profile: ClusterProfile, ranks: Sequence[int]) -> ClusterProfile:
    """Return the cluster of ``ranks`` alone, renumbered in this order."""
    new = {rank: number for number, rank in enumerate(ranks)}
    devices = tuple(replace(profile.devices[rank], rank=new[rank]) for rank in ranks)
    links = tuple(
        replace(link, source=new[link.source], destination=new[link.destination])
        for link in profile.links
        if link.source in new and link.destination in new
    )
    host_names = {device.host for device in devices}
    hosts = tuple(host for host in profile.hosts if host.name in host_names)
    names = host_names | {ANY_HOST, ITSELF}
    between = tuple(pair for pair in profile.host_links if pair.source in names and pair.destination in names)
    return replace(profile, devices=devices, links=links, host_links=between, hosts=hosts)


def renumbered(plan: Plan, ranks: Sequence[int]) -> Plan:
    """Convert a plan for the cluster ``restricted`` to ``ranks`` back to the rank numbers of the full cluster."""

    def changed(stage: StagePlan) -> StagePlan:
        return replace(stage, ranks=tuple(ranks[rank] for rank in stage.ranks))

    return plan.with_stages(changed(stage) for _, _, stage in plan.numbered)


def with_copy_of(profile: ClusterProfile, rank: int) -> ClusterProfile:
    """Add a copy of ``rank`` with the same links; the link between the two is as fast as the fastest of these."""
    new, host = len(profile.devices), profile.devices[rank].host
    more = replace(profile, devices=(*profile.devices, replace(profile.devices[rank], rank=new)))
    other_ranks = [peer for peer in range(new) if peer != rank]
    fastest = max(
        (profile.link(rank, peer) for peer in other_ranks), key=lambda k: (k.bytes_per_s, -k.latency_s), default=None
    )
    speed = (0.0, math.inf) if fastest is None else (fastest.latency_s, fastest.bytes_per_s)
    if not profile.links:  # host links describe everything except links within a host
        own_link = () if profile.host_link(host, host) else (HostLinkProfile(host, host, *speed),)
        return replace(more, host_links=(*profile.host_links, *own_link))
    links = [*profile.links, LinkProfile(new, rank, *speed, True), LinkProfile(rank, new, *speed, True)]
    for peer in other_ranks:
        links.append(replace(profile.link(rank, peer), source=new))
        links.append(replace(profile.link(peer, rank), destination=new))
    return replace(more, links=tuple(links))


def with_slowness(
    profile: ClusterProfile, ratios: Mapping[int, float], of_optimizer: Mapping[int, float] | None = None
) -> ClusterProfile:
    """Slow ranks down by ``ratios``, or in optimizer steps by ``of_optimizer`` (default: ``ratios``)."""
    optimizer = of_optimizer or {}

    def slower(device: DeviceProfile) -> DeviceProfile:
        ratio = ratios.get(device.rank, 1.0)

        def longer(times: LayerTimes) -> LayerTimes:
            curves: list[Any] = [getattr(times, field.name) for field in fields(times)]
            return LayerTimes(*(x and replace(x, seconds=tuple(s * ratio for s in x.seconds)) for x in curves))

        changed: dict[str, Any] = {
            name: {kind: longer(times) for kind, times in getattr(device, name).items()} for name in TABLES
        }
        changed |= {name: getattr(device, name) * ratio for name in SECONDS}
        changed |= {name: getattr(device, name) * optimizer.get(device.rank, ratio) for name in STEP_SECONDS}
        return replace(device, **changed)

    return replace(profile, devices=tuple(slower(device) for device in profile.devices))


def with_copies(profile: ClusterProfile, request: PlanRequest) -> ClusterProfile:
    """Reserve host memory for copies of the trained parameters where ranks compute in host memory.

    A rank keeps its own copies and those of a peer, counted as equally large. If any rank has a GPU, its copies are in host
    memory too; they are then subtracted from the memory of hosts where ranks compute or may offload trained parameters.
    """
    copy_bytes = request.copy_bytes_per_trainable_parameter
    computing = [device.shares_host_memory for device in profile.devices]
    streams = request.streaming != "never" and profile.model.trained_whole
    if not copy_bytes or not (any(computing) or streams):
        return profile
    model, copies = profile.model, copy_bytes / COPY_BYTES
    if not all(computing):
        return _without_copy_memory(profile, copies * model.copy_bytes_per_trainable_parameter, streams)
    saving = [layer.moments_saving_bytes * (1 + copies) for layer in model.layers]
    layers = (replace(x, moments_saving_bytes=s) if s else x for x, s in zip(model.layers, saving, strict=True))
    state = model.state_bytes_per_trainable_parameter + copy_bytes
    return replace(profile, model=replace(model, state_bytes_per_trainable_parameter=state, layers=tuple(layers)))


def _without_copy_memory(profile: ClusterProfile, copy_bytes: float, everywhere: bool) -> ClusterProfile:
    """Reduce the memory of hosts with CPU ranks (``everywhere``: all hosts) by ``copy_bytes`` per trainable parameter."""
    model = profile.model
    trained = sum(layer.trainable_parameters for layer in model.layers)
    model_bytes = sum(layer.parameter_bytes for layer in model.layers) + model.state_bytes(0, len(model.layers))
    ratio = model_bytes / max(1, trained)
    limits, reserved = {host.name: host.memory_bytes for host in profile.hosts}, {}
    for name in {device.host for device in profile.devices if device.shares_host_memory or everywhere}:
        local = [device for device in profile.devices if device.host == name]
        memory = limits.get(name, max((d.memory_bytes for d in local if d.shares_host_memory), default=0))
        fitting = sum(d.memory_bytes for d in local if not d.shares_host_memory) / ratio + memory / (ratio + copy_bytes)
        reserved[name] = math.ceil(copy_bytes * min(trained, fitting))
    devices = tuple(
        replace(device, memory_bytes=max(0, device.memory_bytes - reserved[device.host]))
        if device.shares_host_memory
        else device
        for device in profile.devices
    )
    hosts = tuple(
        replace(host, memory_bytes=max(0, host.memory_bytes - reserved.get(host.name, 0))) for host in profile.hosts
    )
    return replace(profile, devices=devices, hosts=hosts)


def is_packed(model: ModelCost) -> bool:
    return any(layer.parameter_bytes < 1.5 * layer.parameters for layer in model.layers[1:-1])


def with_adapters(model: ModelCost, packed: bool) -> ModelCost:
    """Estimate the costs with LoRA on all blocks, packed in NF4 if ``packed``; embedding and head are frozen."""
    size = DTYPE_BYTES[model.dtype]

    def frozen(index: int, layer: LayerCost) -> LayerCost:
        if not 0 < index < len(model.layers) - 1:
            return replace(layer, trainable_parameters=0, moments_saving_bytes=0.0)
        base = layer.parameters - (0 if model.trained_whole else layer.trainable_parameters)
        adapters = math.ceil(ADAPTER_PARAMETER_RATIO * base) if model.trained_whole else layer.trainable_parameters
        parameter_bytes = math.ceil(base * (NF4_BYTES if packed else size)) + size * adapters
        # One matrix at a time is unpacked: a third of a block at most.
        unpacked = math.ceil(size * base / 3) if packed else layer.workspace_bytes
        return replace(
            layer,
            parameters=base + adapters,
            trainable_parameters=adapters,
            moments_saving_bytes=0.0,
            parameter_bytes=parameter_bytes,
            workspace_bytes=max(layer.workspace_bytes, unpacked),
        )

    layers = tuple(frozen(index, layer) for index, layer in enumerate(model.layers))
    return replace(model, layers=layers, tied=False, tied_bytes=0)


def in_bf16(model: ModelCost) -> ModelCost:
    """Convert an fp32 model's costs to bf16 with fp32 master weights; workspaces (fp32 logits) stay the same."""
    layers = tuple(
        replace(
            layer,
            parameter_bytes=math.ceil(layer.parameter_bytes / 2),
            activation_bytes_per_token=layer.activation_bytes_per_token / 2,
            logits_bytes_per_token=layer.logits_bytes_per_token / 2,
            boundary_bytes_per_token=math.ceil(layer.boundary_bytes_per_token / 2),
        )
        for layer in model.layers
    )
    state = model.state_bytes_per_trainable_parameter + 4
    return replace(model, dtype="bf16", layers=layers, state_bytes_per_trainable_parameter=state)


def with_optimizer(model: ModelCost, optimizer: str) -> ModelCost:
    """Return the costs with another optimizer, as if it kept the same state for every parameter after the embedding."""
    embedding, *later_layers = model.layers
    saving = (replace(x, moments_saving_bytes=SAVED_BYTES[optimizer] * x.trainable_parameters) for x in later_layers)
    return replace(model, layers=(embedding, *saving), optimizer=optimizer)
