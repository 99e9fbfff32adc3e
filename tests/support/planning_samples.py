"""Small made-up clusters for the planning tests: round numbers, so that results can be checked by hand."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

from hetero_mpi.planning.dry_run import awaited
from hetero_mpi.planning.schedule import COMPUTE, WHOLE_STEP, Action, Schedule
from hetero_mpi.planning.types.cost import LayerCost, ModelCost
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, PlanReport, StagePlan
from hetero_mpi.planning.types.profile import ClusterProfile, Curve, DeviceProfile, HostProfile, LayerTimes, LinkProfile
from hetero_mpi.planning.types.request import PlanRequest
from hetero_mpi.planning.types.sizes import EMBEDDING, HEAD

SEQUENCE = 10
JOB_TOML = """
[model.config]
model_type = "llama"
num_hidden_layers = 6
[tokenizer]
train_vocab_size = 300
[data]
text = ["*.txt"]
sequence_length = 10
[train]
global_batch = 8
"""
"""A job that a profile of ``make_model(6)`` belongs to."""


def make_model(blocks: int = 2, tied: bool = False, boundary_bytes_per_token: int = 100) -> ModelCost:
    """Embedding and head of 1,000 parameters, blocks of 400, all trainable, fp32; 100 bytes per token sent. A tied head's matrix
    is the embedding's, which trains it; the head keeps a gradient of it."""

    def layer(kind: str, parameters: int, boundary: int) -> LayerCost:
        return LayerCost(
            kind=kind,
            parameters=parameters,
            trainable_parameters=parameters,
            parameter_bytes=4 * parameters,
            activation_bytes_per_token=300.0,
            workspace_bytes_per_token=50.0,
            boundary_bytes_per_token=boundary,
        )

    chain = [layer(EMBEDDING, 1000, boundary_bytes_per_token)]
    chain += [layer("block", 400, boundary_bytes_per_token) for _ in range(blocks)]
    head = layer(HEAD, 1000, 0)
    chain += [replace(head, trainable_parameters=0, parameter_bytes=8000) if tied else head]
    return ModelCost("llama", "fp32", SEQUENCE, tied, 12.0, tuple(chain), tied_bytes=4000 if tied else 0)


def make_device(rank: int, slowness: float = 1.0, memory_bytes: int = 10_000_000, **other: object) -> DeviceProfile:
    """Per sequence of 10 tokens: embedding 0.1, block 1, head 0.5 s forward, times ``slowness``; backward doubles."""

    def times(seconds: float) -> LayerTimes:
        return LayerTimes(Curve((SEQUENCE,), (seconds * slowness,)), Curve((SEQUENCE,), (2 * seconds * slowness,)))

    device = DeviceProfile(
        rank=rank,
        host=f"host{rank}",
        backend="cpu",
        name=f"x{slowness:g}",
        memory_bytes=memory_bytes,
        memory_reason="made up",
        dtypes=("fp32",),
        layers={EMBEDDING: times(0.1), "block": times(1.0), HEAD: times(0.5)},
        optimizer_fixed_s=0.0,
        optimizer_s_per_parameter=0.0,
    )
    return replace(device, **other)  # type: ignore[arg-type]


def with_spread(curve: Curve, *spread: float) -> Curve:
    """With three repetitions at every knot, whose quartiles are so far apart: relative, one for all knots or one for each."""
    each = spread * len(curve.tokens) if len(spread) == 1 else spread
    low = [middle * (1 - min(width, 1.9) / 2) for middle, width in zip(curve.seconds, each, strict=True)]
    timed = tuple((a, m, a + width * m) for a, m, width in zip(low, curve.seconds, each, strict=True))
    return replace(curve, sample_tokens=curve.tokens, samples=timed)


def make_profile(
    slowness: Sequence[float] = (1.0, 1.0),
    model: ModelCost | None = None,
    memory_bytes: int | Sequence[int] = 10_000_000,
    latency_s: float = 0.0,
    bytes_per_s: float = float("inf"),
) -> ClusterProfile:
    """One rank per entry of ``slowness``, every link alike."""
    memory = [memory_bytes] * len(slowness) if isinstance(memory_bytes, int) else list(memory_bytes)
    ranks = range(len(slowness))
    return ClusterProfile(
        source="made up",
        date="2026-01-01",
        key="sample",
        mpi_library="none",
        versions={"hetero_mpi": "0.1.0"},
        model=model or make_model(),
        devices=tuple(make_device(rank, slowness[rank], memory[rank]) for rank in ranks),
        links=tuple(LinkProfile(a, b, latency_s, bytes_per_s, False) for a in ranks for b in ranks if a != b),
    )


def on_cores(cores: float, slowness: Sequence[float], **other: object) -> ClusterProfile:
    """The same with all ranks on one host, whose cores they share."""
    profile = make_profile(slowness)
    devices = tuple(replace(device, host="box", **other) for device in profile.devices)  # type: ignore[arg-type]
    links = tuple(replace(link, same_host=True) for link in profile.links)
    host = HostProfile("box", 10_000_000 * len(slowness), "made up", cores=cores)
    return replace(profile, devices=devices, links=links, hosts=(host,))


def make_plan_of(
    cuts: Sequence[int], ranks: Sequence[int], micro_batches: int, warm_up: Sequence[int] | None = None
) -> Plan:
    """Stages between consecutive ``cuts`` (first 0, last the chain's length), micro-batches of one sequence."""
    count = len(ranks)
    depths = warm_up if warm_up is not None else [count - 1 - i for i in range(count)]
    stages = tuple(StagePlan((ranks[i],), cuts[i], cuts[i + 1], depths[i]) for i in range(count))
    return Plan((PipelinePlan(stages, 1, micro_batches),), micro_batches, SEQUENCE, cuts[-1])


def reported(plan: Plan, step_s: float = 1.0) -> PlanReport:
    """``plan`` as if it took ``step_s``, with a bound of half of it."""
    return PlanReport(plan, step_s, step_s / 2)


def random_instance(seed: int, ranks: int, layers: int) -> tuple[ClusterProfile, PlanRequest]:
    """A cluster of unlike devices, curves with an offset, uneven links, sometimes short memory; and a request."""
    draw = random.Random(seed)
    model = make_model(layers - 2, tied=draw.random() < 0.3)
    batch = draw.choice((2, 4, 6))
    devices, links = [], []
    for rank in range(ranks):
        slowness = draw.choice((0.5, 1.0, 1.0, 3.0))
        times = {}
        for kind, seconds in ((EMBEDDING, 0.1), ("block", 1.0), (HEAD, draw.uniform(0.2, 3))):
            offset, slope = draw.uniform(0, 0.5) * slowness, seconds * slowness
            forward = Curve((SEQUENCE, 2 * SEQUENCE), (offset + slope, offset + 2 * slope))
            backward = Curve((SEQUENCE, 2 * SEQUENCE), (offset + 2 * slope, offset + 4 * slope))
            times[kind] = LayerTimes(forward, backward)
        memory = draw.choice((10_000_000, 10_000_000, 45_000, 60_000))
        optimizer = draw.choice((0.0, 1e-4))
        devices.append(replace(make_device(rank, slowness, memory), layers=times, optimizer_s_per_parameter=optimizer))
    for a in range(ranks):
        for b in range(ranks):
            if a != b:
                links.append(LinkProfile(a, b, draw.uniform(0, 0.2), draw.choice((2e3, 1e4, 1e9)), False))
    profile = replace(make_profile([1.0] * ranks, model), devices=tuple(devices), links=tuple(links))
    choices = tuple(size for size in (1, 2, 3, 4) if batch % size == 0)
    return profile, PlanRequest(batch, SEQUENCE, choices)


def with_split(profile: ClusterProfile, share: float = 0.5) -> ClusterProfile:
    """Backward measured in two parts: the input's gradient takes ``share`` of it, those of the weights the rest."""

    def part(curve: Curve, factor: float) -> Curve:
        return replace(curve, seconds=tuple(seconds * factor for seconds in curve.seconds))

    def split(times: LayerTimes) -> LayerTimes:
        return replace(times, input_s=part(times.backward_s, share), weight_s=part(times.backward_s, 1 - share))

    devices = tuple(
        replace(device, layers={kind: split(times) for kind, times in device.layers.items()})
        for device in profile.devices
    )
    return replace(profile, devices=devices)


def random_plan(seed: int, most_pipelines: int = 3) -> tuple[Plan, ClusterProfile]:
    """Any plan that can run, fast or not, on a random cluster: pipelines of unlike cuts, sizes and shares, some with split
    backward, recompute, deep warm-up and a short last micro-batch; some links slow, some hosts with several ranks."""
    draw = random.Random(seed)
    layers, count = draw.randint(3, 7), draw.randint(1, most_pipelines)
    lengths = [draw.randint(1, min(layers, 4)) for _ in range(count)]
    profile = with_split(random_instance(seed, sum(lengths), layers)[0], draw.uniform(0.3, 0.7))
    hosts = [f"host{draw.randrange(sum(lengths))}" for _ in profile.devices]
    deferred = tuple(
        replace(layer, deferred_bytes_per_token=draw.choice((0.0, 100.0, 700.0))) for layer in profile.model.layers
    )
    profile = replace(
        profile,
        devices=tuple(
            replace(device, host=host, forward_overhead_s=0.01, backward_overhead_s=0.02, shares_host_memory=draw.random() < 0.5)
            for device, host in zip(profile.devices, hosts, strict=True)
        ),
        hosts=tuple(HostProfile(host, 200_000, "made up", draw.random() < 0.3) for host in sorted(set(hosts))),
        model=replace(profile.model, layers=deferred, dtype=draw.choice(("fp32", "bf16"))),
    )  # fmt: skip
    if draw.random() < 0.5:
        profile = replace(profile, hosts=tuple(replace(host, shared_nic=False) for host in profile.hosts))
    ranks = draw.sample(range(sum(lengths)), sum(lengths))
    pipelines = []
    for length in lengths:
        own, ranks = ranks[:length], ranks[length:]
        sequences = draw.randint(1, 9)
        cuts = [0, *sorted(draw.sample(range(1, layers), length - 1)), layers]
        depths = sorted((draw.randint(0, sequences + 1) for _ in own), reverse=True)
        held = tuple(
            StagePlan((rank,), cuts[i], cuts[i + 1], depths[i], draw.random() < 0.3) for i, rank in enumerate(own)
        )
        pipelines.append(PipelinePlan(held, draw.randint(1, 3), sequences, draw.random() < 0.5))
    total = sum(pipeline.sequences for pipeline in pipelines)
    return Plan(tuple(pipelines), total, SEQUENCE, layers), profile


def noisy_profile(hosts: int, per_host: int = 8, seed: int = 0) -> ClusterProfile:
    """As it is measured: hosts of one of three kinds of cards each, no two ranks quite alike, every link measured for itself."""
    draw = random.Random(seed)
    names = ("NVIDIA GeForce RTX 4090", "NVIDIA A100-SXM4-80GB", "AMD Instinct MI210")
    devices: list[DeviceProfile] = []
    for rank in range(hosts * per_host):
        kind = rank // per_host % 3
        memory, name = (24, 80, 64)[kind] * 10**9 + draw.randrange(10**8), names[kind]
        device = make_device(rank, (1.5, 1.0, 1.2)[kind] * draw.uniform(0.98, 1.02), memory, name=name)
        backend = "rocm" if kind == 2 else "cuda"
        devices.append(replace(device, host=f"node{rank // per_host:02}", backend=backend, memory_reason="free"))
    links = []
    for a, b in itertools.permutations(devices, 2):
        speed = (2e10 if a.host == b.host else 1.2e9) * draw.uniform(0.9, 1.1)
        samples = ((1000, 10**6), (1000 / speed + 1e-5, 1.01e6 / speed))
        links.append(LinkProfile(a.rank, b.rank, draw.uniform(1e-5, 2e-5), speed, a.host == b.host, *samples))
    limits = tuple(HostProfile(f"node{i:02}", 256 * 10**9, "free", True, 2.4e9) for i in range(hosts))
    return replace(make_profile((1.0,), make_model(40)), devices=tuple(devices), links=tuple(links), hosts=limits)


def grid(schedule: Schedule) -> str:
    """A table of clocks and ranks, as drawn in ``schedule.schedule_of``: who computes what, one clock each."""
    computed = _clocks(schedule)
    clocks = 1 + max((clock for cells in computed.values() for clock, _ in cells), default=-1)
    rows = [["clock", *(str(clock) for clock in range(clocks))]]
    for rank in sorted(schedule):
        cells = {clock: str(action) for clock, action in computed[rank]}
        rows.append([f"rank {rank}", *(cells.get(clock, ".") for clock in range(clocks))])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows)
    return "\n".join("  ".join(line) for line in lines)


def _clocks(schedule: Schedule) -> dict[int, list[tuple[int, Action]]]:
    """Rank -> (clock, what it computes then), every forward and every part of a backward one clock long and all else none."""
    clock, sent = dict.fromkeys(schedule, 0), dict[Action, int]()
    left = {rank: [action for action in actions if action.op not in WHOLE_STEP] for rank, actions in schedule.items()}
    computed: dict[int, list[tuple[int, Action]]] = {rank: [] for rank in schedule}
    while any(left.values()):
        for rank, own in left.items():
            while own and ((message := awaited(own[0])) is None or message in sent):
                action = own.pop(0)
                if message is not None:
                    clock[rank] = max(clock[rank], sent[message])
                elif action.op in COMPUTE:
                    computed[rank].append((clock[rank], action))
                    clock[rank] += 1
                else:
                    sent[action] = clock[rank]
    return computed


def renumbered(profile: ClusterProfile, order: list[int]) -> ClusterProfile:
    """Old rank ``order[i]`` becomes rank i."""
    new = {old: i for i, old in enumerate(order)}
    links = [replace(link, source=new[link.source], destination=new[link.destination]) for link in profile.links]
    random.Random(0).shuffle(links)
    devices = tuple(replace(profile.devices[old], rank=i) for i, old in enumerate(order))
    return replace(profile, devices=devices, links=tuple(links))
