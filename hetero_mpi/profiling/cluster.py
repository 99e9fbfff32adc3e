"""The collective benchmark: every rank times itself, every pair its link; rank 0 receives a ``ClusterProfile``."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hetero_mpi.comm.links import fit_line, measure_links
from hetero_mpi.comm.transport import Transport
from hetero_mpi.comm.versions import own_versions
from hetero_mpi.comm.world import World
from hetero_mpi.device.backend import Backend
from hetero_mpi.job import ProfileTable, TrainTable
from hetero_mpi.model.chain import Chain
from hetero_mpi.model.cost import model_cost
from hetero_mpi.model.tuning import Tuning
from hetero_mpi.planning.codec import decode, encode
from hetero_mpi.planning.profile import ClusterProfile, DeviceProfile, LinkProfile
from hetero_mpi.planning.request import MEMORY_GIVEN
from hetero_mpi.profiling.device import DeviceBenchmark, DeviceTimes

_SMALLEST_MESSAGE = 1024


@dataclass(frozen=True)
class Subject:
    """What is profiled: the model and how it will run."""

    chain: Chain
    tuning: Tuning
    train: TrainTable
    sequence_length: int
    micro_batches: tuple[int, ...]
    """Sequences per micro-batch the planner may choose from, increasing."""
    cores: float
    """CPU cores this rank can count on."""
    threads: int
    """CPU threads of this rank."""
    memory_bytes: int | None
    """Usable memory given by the user instead of the measured one."""


def sampled_micro_batches(choices: Sequence[int]) -> tuple[int, ...]:
    """At most four of the choices, smallest and largest included: between them times are interpolated."""
    ordered = sorted(set(choices))
    if len(ordered) <= 4:
        return tuple(ordered)
    return tuple(ordered[round(i * (len(ordered) - 1) / 3)] for i in range(4))


def profile_key(world: World, backend: Backend, subject: Subject) -> str:
    """Equal keys mean equal devices, model shape, dtype, sequence length, micro-batches, given memory and versions. Collective."""
    devices = world.all_gather_json([world.host, backend.name, backend.description(), subject.threads])
    model = {name: list(spec.shape) for name, spec in subject.chain.parameters.items()}
    trained = [sorted(subject.tuning.trainable), subject.tuning.nf4, subject.tuning.double]
    content = [
        devices,
        model,
        trained,
        subject.train.dtype,
        subject.sequence_length,
        subject.micro_batches,
        subject.memory_bytes,
        own_versions(world.library),
    ]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def profile_cluster(
    world: World,
    transport: Transport,
    backend: Backend,
    subject: Subject,
    settings: ProfileTable,
    say: Callable[[str], None],
) -> ClusterProfile:
    """Measure all ranks and links at once and in rounds. Collective; every rank gets the same profile."""
    key = profile_key(world, backend, subject)
    world.doing = "timing layers"
    say(
        f"Profiling {world.size} rank{'s' if world.size > 1 else ''}: layers at {len(subject.micro_batches)} micro-batch sizes ..."
    )
    memory = backend.memory(_sharing(world, backend))
    benchmark = DeviceBenchmark(
        subject.chain,
        subject.tuning,
        backend,
        subject.train,
        subject.sequence_length,
        sampled_micro_batches(subject.micro_batches),
        settings.repeats,
        world.barrier,
    )
    times = benchmark.run()
    own = _device_profile(world, backend, subject, times, memory.usable_bytes, memory.reason)
    world.doing = "timing links"
    if world.size > 1:
        say("Profiling links ...")
    links = _links(world, transport, settings)
    gathered = world.all_gather_json([encode(own, infinity_as_text=True), times.activation_bytes])
    devices = tuple(decode(DeviceProfile, device, "profile") for device, _ in gathered)
    activations = {kind: max(each[kind] for _, each in gathered) for kind in times.activation_bytes}
    return ClusterProfile(
        source="measured",
        date=world.broadcast_json(datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")),
        key=key,
        mpi_library=world.library,
        versions=own_versions(world.library) if world.size == 1 else world.broadcast_json(own_versions(world.library)),
        model=model_cost(subject.chain, subject.tuning, subject.train.dtype, subject.sequence_length, activations),
        devices=devices,
        links=links,
        notes=_notes(devices),
    )


def _sharing(world: World, backend: Backend) -> int:
    """Ranks of this host that share its memory with this one (CPU ranks; Apple GPUs use the host's memory too). Collective."""
    names = world.all_gather_json([world.host, backend.name])
    return sum(1 for host, name in names if host == world.host and name in ("cpu", "mps"))


def _device_profile(
    world: World, backend: Backend, subject: Subject, times: DeviceTimes, usable_bytes: int, reason: str
) -> DeviceProfile:
    if subject.memory_bytes is not None:
        usable_bytes, reason = subject.memory_bytes, MEMORY_GIVEN
    return DeviceProfile(
        rank=world.rank,
        host=world.host,
        backend=backend.name,
        name=backend.description(),
        memory_bytes=usable_bytes,
        memory_reason=reason,
        dtypes=backend.dtypes(),
        layers=times.layers,
        optimizer_fixed_s=times.optimizer_fixed_s,
        optimizer_s_per_parameter=times.optimizer_s_per_parameter,
        copy_latency_s=times.copy_latency_s,
        device_to_host_bytes_per_s=times.device_to_host_bytes_per_s,
        host_to_device_bytes_per_s=times.host_to_device_bytes_per_s,
        cores=subject.cores,
        forward_overhead_s=times.forward_overhead_s,
        backward_overhead_s=times.backward_overhead_s,
    )


def _links(world: World, transport: Transport, settings: ProfileTable) -> tuple[LinkProfile, ...]:
    sizes = [_SMALLEST_MESSAGE]
    while sizes[-1] * 8 <= settings.largest_message_bytes:
        sizes.append(sizes[-1] * 8)
    links = []
    for samples in measure_links(world, transport, sizes, settings.repeats):
        latency_s, bytes_per_s = fit_line(samples.sample_bytes, samples.sample_s)
        links.append(LinkProfile(latency_s=latency_s, bytes_per_s=bytes_per_s, **_plain(asdict(samples))))
    return tuple(links)


def _plain(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


def _notes(devices: Sequence[DeviceProfile]) -> tuple[str, ...]:
    notes = ["layers were timed on all ranks at once"]
    crowded = sorted({device.host for device in devices if device.cores < 1})
    for host in crowded:
        ranks = [device.rank for device in devices if device.host == host]
        cores = round(devices[ranks[0]].cores * len(ranks))
        notes.append(f"{len(ranks)} ranks share {cores} cores on {host}: times depend on who else computes")
    return tuple(notes)
