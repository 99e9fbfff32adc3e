"""The collective benchmark: every rank times itself, every pair times its link, and rank 0 builds a ``ClusterProfile``."""

import datetime
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace

from hetero_mpi.comm.links import HostFlows, LinkSamples, fit_line, measure_flows, measure_links
from hetero_mpi.comm.ranks.versions import own_versions
from hetero_mpi.comm.ranks.world import World
from hetero_mpi.comm.transport import Transport
from hetero_mpi.device.backend import Backend
from hetero_mpi.job.plan_request import with_memory_budget
from hetero_mpi.job.schema import ProfileTable
from hetero_mpi.model.model_cost import model_cost
from hetero_mpi.model.optimizer import StepDecider
from hetero_mpi.planning.fit import pooled
from hetero_mpi.planning.types.codec import decode, encode
from hetero_mpi.planning.types.cost import ModelCost
from hetero_mpi.planning.types.profile import MEASURED, ClusterProfile, DeviceProfile, HostProfile, LinkProfile
from hetero_mpi.planning.types.sizes import DTYPE_BYTES
from hetero_mpi.planning.types.toml_files import profile_from_dict, profile_to_dict
from hetero_mpi.profiling.benchmark_spec import (
    BenchmarkSpec,
    DeviceTimes,
    device_key,
    key_of,
    load_times,
    sampled_rows,
    store_cached,
    subject_content,
)
from hetero_mpi.profiling.device import DeviceBenchmark
from hetero_mpi.profiling.host_profiles import (
    MeasuredMemory,
    host_profiles,
    measure_copies,
    measure_disks,
    measure_memory,
    measure_sums,
)
from hetero_mpi.util import units

_MIN_MESSAGE_BYTES = 1024
_SIZE_FACTOR = 4
Say = Callable[[str], None]


def profile_key(world: World, backend: Backend, subject: BenchmarkSpec) -> str:
    """Hash of devices, model shape, dtype, sequence length, micro-batches, memory budget and versions. Collective."""
    products = backend.products(subject.train.dtype)
    device = [world.host, backend.name, backend.description(), products, subject.threads, subject.compiled]
    devices = world.all_gather_json(device)
    content = [devices, subject.micro_batches, subject.memory_bytes, *subject_content(subject, world.library)]
    return key_of(content)


def profile_cluster(
    world: World,
    transport: Transport,
    backend: Backend,
    subject: BenchmarkSpec,
    settings: ProfileTable,
    say: Say,
    fresh: bool = False,
) -> ClusterProfile:
    """Measure all ranks and links and return the profile on every rank; ``fresh`` ignores cached times. Collective.

    Raises:
        UserError: if a device is out of memory for a single layer.
    """
    key = profile_key(world, backend, subject)
    memories = measure_memory(world, backend)
    times = _device_times(world, backend, subject, settings, say, settings.cache and not fresh)
    decision_s = _decision_s(world, subject)
    samples, flows = _messages(world, transport, settings, say)
    sums = measure_sums(world, settings.largest_message_bytes) if subject.groups and world.size > 1 else {}
    copies = measure_copies(world, backend) if world.size > 1 else {}
    folder = subject.stream_folder
    disks = measure_disks(world, folder) if folder is not None and _exceeds_memory(subject, memories) else {}
    memory = memories[world.rank]
    names = {field.name for field in fields(DeviceProfile)}
    device = DeviceProfile(
        rank=world.rank,
        host=world.host,
        backend=backend.name,
        name=backend.description(),
        memory_bytes=memory.usable_bytes,
        memory_reason=memory.reason,
        dtypes=backend.dtypes(),
        optimizer_fixed_s=decision_s,
        threads=subject.threads,
        compiled=subject.compiled,
        shares_host_memory=memory.shares_host_memory,
        **{name: value for name, value in vars(times).items() if name in names},
    )
    gathered = world.all_gather_json([encode(device, infinity_as_text=True), encode(times, infinity_as_text=True)])
    cores = world.all_gather_json(subject.cores if backend.name == "cpu" else 0.0)
    profile_fields = None
    with world.on_leader("fitting the profile"):
        if world.rank == 0:  # unlike processors fit lines to other last bits
            tables = [decode(DeviceTimes, times_fields, "profile") for _, times_fields in gathered]
            model, ratios = _model_cost(subject, tables)
            devices = tuple(
                replace(decode(DeviceProfile, fields_of_rank, "profile"), activation_ratio=ratio)
                for (fields_of_rank, _), ratio in zip(gathered, ratios, strict=True)
            )
            hosts = host_profiles(world.hosts, memories, cores, flows, sums, copies, disks)
            profile = ClusterProfile(
                source=MEASURED,
                date=_now(),
                key=key,
                mpi_library=world.library,
                versions=own_versions(world.library),
                model=model,
                devices=devices,
                links=tuple(map(_link, samples)),
                hosts=hosts,
                notes=_notes(devices, hosts, tables, subject),
            )
            profile_fields = profile_to_dict(pooled(with_memory_budget(profile, subject.memory_bytes)))
    return profile_from_dict(world.broadcast_json(profile_fields))


def _exceeds_memory(subject: BenchmarkSpec, memories: Sequence[MeasuredMemory]) -> bool:
    """Whether the frozen weights may exceed the memory of a host."""
    bytes_per_parameter = 0.5 if subject.tuning.nf4 else DTYPE_BYTES[subject.train.dtype]
    count = sum(spec.count for spec in subject.chain.specs(0, subject.chain.layer_count))
    return 2 * count * bytes_per_parameter > min(memory.host_bytes for memory in memories)


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def _device_times(
    world: World, backend: Backend, subject: BenchmarkSpec, settings: ProfileTable, say: Say, use_cache: bool
) -> DeviceTimes:
    """Return this rank's times, cached or measured at the same time as all other ranks of its host. Collective."""
    world.current_action = "timing layers"
    key = device_key(world, backend, subject, settings.repeats)
    damaged: list[str] = []
    cached_times = load_times(key, damaged.append) if use_cache else None
    gathered = world.all_gather_json([world.host, cached_times is not None, damaged])
    hosts_to_time = {host for host, has, _ in gathered if not has}
    for host, _, lines in gathered:
        for line in lines:
            say(f"{host}: {line}")
    ranks = [rank for rank, host in enumerate(world.hosts) if host in hosts_to_time]
    cached_count = world.size - len(ranks)
    if cached_count:
        say(f"Device times of {units.plural(cached_count, 'rank')} were measured before (--reprofile measures again)")
    if not ranks:
        assert cached_times is not None
        return replace(cached_times, from_cache=True)
    measuring = world.subset(ranks)
    counts = f"{', '.join(map(str, sampled_rows(subject.micro_batches)))} {units.row(subject.sequence_length)}s"
    say(f"Profiling {units.plural(len(ranks), 'rank')}: layers with {counts}, all ranks at once ...")
    times = cached_times
    if measuring is not None:
        begin = time.perf_counter()
        measuring.sleeping_barrier()
        with measuring.collective_errors("timing layers"):
            benchmark = DeviceBenchmark(subject, backend, settings.repeats)
            times = benchmark.run(_now(), members=measuring.local_size > 1)
        measuring.sleeping_barrier()
        say(f"  layers took {time.perf_counter() - begin:.1f} s")
        if settings.cache:
            store_cached(key, encode(times, infinity_as_text=True))
    world.sleeping_barrier()
    assert times is not None
    return replace(times, from_cache=measuring is None)


def _decision_s(world: World, subject: BenchmarkSpec) -> float:
    """Seconds of the all-reduce that decides a step, part of every optimizer step; waiting is excluded. Collective."""
    decider = StepDecider(list(subject.tuning.trainable), subject.train.clip_norm)
    seconds = []
    for _ in range(7):
        world.barrier()
        begin = time.perf_counter()
        decider.decide(world.all_reduce_sum(decider.fill({}, {})))
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def _messages(
    world: World, transport: Transport, settings: ProfileTable, say: Say
) -> tuple[list[LinkSamples], list[HostFlows]]:
    """Measure each link alone, then concurrent traffic of hosts that have several ranks. Collective."""
    if world.size == 1:
        return [], []
    world.current_action = "timing links"
    sizes = [_MIN_MESSAGE_BYTES]
    while sizes[-1] * _SIZE_FACTOR <= settings.largest_message_bytes:
        sizes.append(sizes[-1] * _SIZE_FACTOR)
    pairs = world.size * (world.size - 1)
    say(f"  {pairs} links, messages of {units.size(sizes[0])} to {units.size(sizes[-1])} ...")
    begin = time.perf_counter()
    links = measure_links(world, transport, sizes, settings.repeats)
    flows = measure_flows(world, transport, links, settings.largest_message_bytes)
    say(f"  links took {time.perf_counter() - begin:.1f} s")
    return links, flows


def _model_cost(subject: BenchmarkSpec, tables: Sequence[DeviceTimes]) -> tuple[ModelCost, list[float]]:
    """Return the model's costs with the smallest block activations of any rank, and each rank's ratio to these."""
    kinds, blocks = dict.fromkeys(subject.chain.kinds), dict.fromkeys(subject.chain.kinds[1:-1])
    largest = {kind: max(times.activation_bytes[kind] for times in tables) for kind in kinds}
    least = {kind: min(times.activation_bytes[kind] for times in tables) for kind in blocks}
    deferred = {kind: max(times.deferred_bytes[kind] for times in tables) for kind in kinds}
    cost = model_cost(subject.chain, subject.tuning, subject.train.dtype, subject.sequence_length, {**largest, **least})
    layers = tuple(replace(layer, deferred_bytes_per_token=deferred[layer.kind]) for layer in cost.layers)
    ratios = [
        max((times.activation_bytes[kind] / least[kind] for kind in blocks if least[kind] > 0), default=1.0)
        for times in tables
    ]
    return replace(cost, layers=layers), ratios


def _link(samples: LinkSamples) -> LinkProfile:
    latency_s, bytes_per_s = fit_line(samples.sample_bytes, samples.sample_s)
    return LinkProfile(latency_s=latency_s, bytes_per_s=bytes_per_s, **asdict(samples))


def _notes(
    devices: Sequence[DeviceProfile],
    hosts: Sequence[HostProfile],
    tables: Sequence[DeviceTimes],
    subject: BenchmarkSpec,
) -> tuple[str, ...]:
    rows = sorted({count for table in tables for count in table.rows})
    notes = [f"layers were timed with {', '.join(map(str, rows))} {units.rows_of(subject.sequence_length)}"]
    for host in hosts:
        sharing = [device.rank for device in devices if device.host == host.name and device.backend == "cpu"]
        threads = sum(devices[rank].threads for rank in sharing)
        if host.cores is not None and threads > host.cores:
            notes.append(
                f"{host.name}: {units.plural(threads, 'thread')} of {units.plural(len(sharing), 'rank')} have {host.cores:g} "
                f"cores; times are those of threads with cores of their own"
            )
    for date in sorted({table.measured for table in tables if table.from_cache}):
        ranks = [rank for rank, table in enumerate(tables) if table.from_cache and table.measured == date]
        notes.append(
            f"device times of rank {', '.join(map(str, ranks))} were measured {date}; links and memory were measured now"
        )
    for rank, table in enumerate(tables):
        if table.slow_s:
            notes.append(
                f"rank {rank}: the smallest micro-batch took {units.seconds(table.slow_s)}, so only it was timed, once; give the "
                f"rank more cores, lower [data] sequence_length, or exclude the rank"
            )
    short = [rank for rank, table in enumerate(tables) if len(table.rows) < len(rows) and not table.slow_s]
    if short:
        notes.append(f"rank {', '.join(map(str, short))}: larger micro-batches took too long or too much memory")
    return tuple(notes)
