"""All that planning needs to know of a job, as plain values (planning never sees ``Job``), and options of simulation."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hetero_mpi.planning.types.profile import ClusterProfile, HostProfile

MEMORY_GIVEN = "given as [cluster] memory_bytes"
"""Why a device may use so much memory, when the job says so."""


@dataclass(frozen=True)
class PlanRequest:
    """The decisions left to the planner, as finite sets, and what the job fixes."""

    global_batch: int
    """Sequences per optimizer step."""
    sequence_length: int
    """Tokens per sequence."""
    micro_batch_choices: tuple[int, ...]
    """Sequences per micro-batch the planner may choose from; each divides ``global_batch``."""
    alone_micro_batch_choices: tuple[int, ...] = ()
    """The same for a rank by itself, which may take larger ones than a rank of many; empty: ``micro_batch_choices``."""
    mask_sequences: int | None = None
    """Sequences whose dropout masks are drawn together, which a given plan keeps; None: there is no dropout."""
    max_pipelines: int = 1
    """How many pipelines may hold the model side by side."""
    recompute_choices: tuple[bool, ...] = (False,)
    split_choices: tuple[bool, ...] = (False,)
    """Choices for splitting a pipeline's backward; full training only."""
    streaming: str = "never"
    """Where stages may be streamed: ``never``, where nothing fits otherwise or a step gets clearly shorter (``auto``), or wherever
    it gets ``shorter``?"""
    without_files: bool = False
    """Frozen weights that are streamed stay in the memory of hosts, for each device in its part of it, and none on their disks."""
    schedule: str = "auto"
    """``auto`` leaves depth and splitting to the planner; a name of ``orders.SCHEDULES`` fixes them."""
    stages_per_rank: int = 1
    """Stages of its pipeline that a rank may hold, at most."""
    groups: bool = False
    """Ranks of one host may hold a stage together, each a share of its layers."""
    allow_idle: bool = True
    """Ranks may be left out when that is faster (or when there are more ranks than layers)."""
    indifference: float = 0.0
    """Plans within this share of the fastest are as good: of these, the one whose ranks follow one another is taken."""
    thorough: bool = False
    """Look longer for the fastest plan: several times as long (``search``)."""
    brief: bool = False
    """Look at few numbers of pipelines, and neither anneal nor give ranks several stages: for what is told beside a plan, not for a
    plan to be run."""
    memory_reserve: float = 0.05
    """Share of every device's usable memory that is kept free."""
    copy_bytes_per_trainable_parameter: float = 0.0
    """Host memory for copies of the trained state (snapshots of checkpoints, copies for and of peers) that the run makes where
    there is room."""


Resource = tuple[str, str | int, int]
"""A resource that carries one message at a time: ``("link", source, destination)``, ``("out", host, 0)`` or ``("in", host, 0)``."""


def with_shared_nics(profile: ClusterProfile) -> ClusterProfile:
    """The same cluster, its messages between hosts passing through one NIC per host."""
    listed = {host.name: host for host in profile.hosts}
    used_bytes = dict.fromkeys(listed, 0)
    for device in profile.devices:
        used_bytes[device.host] = used_bytes.get(device.host, 0) + device.memory_bytes
    hosts = [listed.get(name, HostProfile(name, n, "not known: that of its ranks")) for name, n in used_bytes.items()]
    return replace(profile, hosts=tuple(replace(host, shared_nic=True) for host in hosts))


def shares_nics(profile: ClusterProfile) -> bool:
    """True where messages between hosts may queue for a NIC."""
    names = {device.host for device in profile.devices}
    return len(names) > 1 and any(host.shared_nic and host.name in names for host in profile.hosts)


def resources(profile: ClusterProfile, source: int, destination: int) -> tuple[Resource, ...]:
    """The resources that a message from rank ``source`` to rank ``destination`` occupies from its start to its end."""
    occupied: list[Resource] = [("link", source, destination)]
    if profile.devices[source].host != profile.devices[destination].host:
        for rank, direction in ((source, "out"), (destination, "in")):
            host = profile.host(rank)
            if host is not None and host.shared_nic:
                occupied.append((direction, host.name, 0))
    return tuple(occupied)
