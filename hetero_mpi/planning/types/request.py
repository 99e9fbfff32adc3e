"""The planner's view of a job as plain values (planning never sees ``Job``), and the resources that messages occupy."""

from dataclasses import dataclass, replace

from hetero_mpi.planning.types.plan import Plan
from hetero_mpi.planning.types.profile import ClusterProfile, HostProfile


@dataclass(frozen=True)
class PlanRequest:
    """Choices left to the planner, as finite sets, and the values that the job fixes."""

    global_batch: int
    sequence_length: int
    """Tokens per sequence."""
    micro_batch_choices: tuple[int, ...]
    """Sequences per micro-batch that the planner may choose from; each divides ``global_batch``."""
    alone_micro_batch_choices: tuple[int, ...] = ()
    """Choices for a rank that trains alone and may use larger micro-batches; if empty, ``micro_batch_choices``."""
    mask_sequences: int | None = None
    """Number of sequences that share one draw of dropout masks, kept from a given plan; None if there is no dropout."""
    max_pipelines: int = 1
    """Maximum number of data-parallel replicas."""
    recompute_choices: tuple[bool, ...] = (False,)
    split_choices: tuple[bool, ...] = (False,)
    """Choices for split backward; full fine-tuning only."""
    streaming: str = "never"
    """When to offload: ``never``; ``auto``: if nothing else fits or the step gets clearly shorter; ``shorter``: if the step
    gets shorter at all."""
    without_files: bool = False
    """Keep offloaded frozen weights in host memory, divided among the host's devices, and never on disk."""
    schedule: str = "auto"
    """``auto`` leaves depth and splitting to the planner; a name in ``orders.SCHEDULES`` fixes them."""
    stages_per_rank: int = 1
    """Maximum number of stages per rank."""
    groups: bool = False
    """Allow tensor parallelism among ranks of one host."""
    allow_idle: bool = True
    """Allow idle ranks when that is faster (or when there are more ranks than layers)."""
    indifference: float = 0.0
    """Plans within this fraction of the fastest count as equal; among them the planner prefers consecutive ranks."""
    thorough: bool = False
    """Search several times as long (see ``search``)."""
    near_counts: tuple[int, ...] = ()
    """Search these pipeline counts briefly, without annealing or interleaved stages; for comparisons, not for plans that run."""
    near: tuple[Plan, ...] = ()
    """Then search only plans like these, the first above all, which may name ranks that the cluster lacks."""
    memory_reserve: float = 0.05
    """Fraction of every device's usable memory that is kept free."""
    copy_bytes_per_trainable_parameter: float = 0.0
    """Bytes of host memory for copies of the trained state (checkpoint snapshots, peer copies)."""


Resource = tuple[str, str | int, int]
"""A resource that carries one message at a time: ``("link", source, destination)``, ``("out", host, 0)`` or ``("in", host,
0)``."""


def with_shared_nics(profile: ClusterProfile) -> ClusterProfile:
    """Return the cluster with one NIC per host for messages between hosts."""
    listed = {host.name: host for host in profile.hosts}
    used_bytes = dict.fromkeys(listed, 0)
    for device in profile.devices:
        used_bytes[device.host] = used_bytes.get(device.host, 0) + device.memory_bytes
    hosts = [listed.get(name, HostProfile(name, n, "sum over its ranks")) for name, n in used_bytes.items()]
    return replace(profile, hosts=tuple(replace(host, shared_nic=True) for host in hosts))


def shares_nics(profile: ClusterProfile) -> bool:
    names = {device.host for device in profile.devices}
    return len(names) > 1 and any(host.shared_nic and host.name in names for host in profile.hosts)


def resources(profile: ClusterProfile, source: int, destination: int) -> tuple[Resource, ...]:
    """Return the resources that a message from rank ``source`` to rank ``destination`` occupies."""
    occupied: list[Resource] = [("link", source, destination)]
    if profile.devices[source].host != profile.devices[destination].host:
        for rank, direction in ((source, "out"), (destination, "in")):
            host = profile.host(rank)
            if host is not None and host.shared_nic:
                occupied.append((direction, host.name, 0))
    return tuple(occupied)
