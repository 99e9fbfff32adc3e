"""True clusters as users have them, and noisy measurements of them: what ``noise.py`` plans with.

``generated``: two to six GPUs on one to three hosts, or CPU ranks, for 1B to 8B parameters, LoRA or whole training, 4 to 32
sequences a step. Times per token fall with size as a power law; a fast device takes as long for one short sequence as for two.
Half of the heads take their own share of a layer's time in each kind. Like ranks differ by 1 %; one in ten is 1.3 times as slow.

``measured``: the same cluster as a profiler would see it, with all repetitions. What a noise of 10 % means: every point is off by
some 8 % that its repetitions have in common, and each of these by 10 % of its own.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from statistics import median

from profile_parts import Shape, model_of

from hetero_mpi.planning.fit import POOLED_FIGURES
from hetero_mpi.planning.types.cost import ModelCost
from hetero_mpi.planning.types.profile import (
    MEASURED,
    TABLES,
    ClusterProfile,
    Curve,
    DeviceProfile,
    HostProfile,
    LayerTimes,
    LinkProfile,
)
from hetero_mpi.planning.types.request import PlanRequest
from hetero_mpi.planning.types.sizes import EMBEDDING, HEAD

SHAPES = {
    "1B": Shape(2048, 16, 8192, 32000, 2048),
    "3B": Shape(3072, 28, 8192, 32000, 1024),
    "8B": Shape(4096, 32, 14336, 128256, 1024),
}
SMALL = Shape(192, 6, 512, 2048, 192)
"""What is trained on CPU ranks."""
GPUS = (
    ("RTX 5090", 31.0, 105e12, 1.7e12),
    ("RTX 4090", 23.0, 66e12, 1.0e12),
    ("RTX 3090", 23.0, 28e12, 0.9e12),
    ("RTX 3060", 11.0, 12e12, 0.36e12),
    ("Strix Halo", 90.0, 14e12, 0.2e12),
    ("P40", 23.0, 5e12, 0.34e12),
)
"""Name, GiB that may be used, operations per second that are reached, bytes per second of memory."""
FAST, BENDS = 28e12, (0, 600, 1000)
"""So many tokens take as long as fewer on a device that reaches so many operations."""
COMMON = 0.85
"""Of a point's noise so much is in all of its repetitions."""
REPETITIONS = {"forward_s": 5, "backward_s": 5}
"""Of other parts, and of tables other than the whole layers', 2."""
SLOW_RANK, SLOW_SHARE = 1.3, 0.1
UNLIKE = 0.01


@dataclass(frozen=True)
class Case:
    """A true cluster and what is trained there."""

    name: str
    profile: ClusterProfile
    request: PlanRequest


def generated(seed: int) -> Case:
    """The cluster of a seed; every fourth is of CPU ranks."""
    draw = random.Random(f"noise, {seed}")
    return _of_cpus(draw, seed) if seed % 4 == 3 else _of_gpus(draw, seed)


def _of_gpus(draw: random.Random, seed: int) -> Case:
    places: list[tuple[str, tuple[str, float, float, float]]] = []
    for number in range(draw.randint(1, 3)):
        places += [(f"host{number}", draw.choice(GPUS))] * draw.choice([1, 1, 2, 2, 3, 4])
    places = (places * 2)[:2] if len(places) < 2 else places[:6]
    name = draw.choice([*SHAPES])
    lora, length, batch = (
        name == "8B" or draw.random() < 0.6,
        draw.choice([512, 1024, 2048]),
        draw.choice([4, 8, 16, 32]),
    )
    model = _divisible(model_of(SHAPES[name], "bf16", length, lora), 8)
    devices = [
        _device(draw, seed, rank, host, "cuda", card, SHAPES[name], lora, length, batch)
        for rank, (host, card) in enumerate(places)
    ]
    network = (1e-4, draw.choice([0.117e9, 0.3e9, 1.17e9, 2.9e9]))
    job = f"{len(places)} GPUs, {name} {'LoRA' if lora else 'whole'}, batch {batch}"
    return _case(draw, f"{seed}: {job}", model, devices, network, draw.choice([3e9, 6e9, 12e9]), batch, lora)


def _of_cpus(draw: random.Random, seed: int) -> Case:
    places: list[tuple[str, tuple[str, float, float, float]]] = []
    for number in range(draw.randint(1, 2)):
        card = (f"cpu {number}", 8.0, draw.choice([3e10, 6e10, 1.2e11]), 2e10)
        places += [(f"host{number}", card)] * draw.choice([1, 2, 3])
    places = (places * 2)[:2] if len(places) < 2 else places
    model = _divisible(model_of(SMALL, "fp32", 128), 6)
    devices = [
        _device(draw, seed, rank, host, "cpu", card, SMALL, False, 128, 16) for rank, (host, card) in enumerate(places)
    ]
    network = (5e-5, draw.choice([0.117e9, 1.17e9]))
    name = f"{seed}: {len(places)} CPU ranks, batch 16"
    return _case(draw, name, model, devices, network, draw.choice([2e9, 5e9]), 16, False)


def _divisible(model: ModelCost, heads: int) -> ModelCost:
    """With parts that ranks of a group may share."""
    layers = []
    for layer in model.layers:
        part = 1.0 if layer.kind == EMBEDDING else 0.97
        layers.append(
            replace(
                layer,
                divided_parameters=int(part * layer.parameters),
                divided_trainable=int(part * layer.trainable_parameters),
                divided_activations=0.6 if layer.kind == "block" else 0.0,
                divided_workspace=0.9 if layer.kind == HEAD else 0.0,
                group_sums=2 if layer.kind == "block" else 1,
            )
        )
    return replace(model, layers=tuple(layers), heads=heads)


def _rows(batch: int) -> tuple[int, ...]:
    """Sequences per micro-batch that are timed: up to the largest that may be chosen."""
    return tuple(sorted({1, 2, 3, 4} | {rows for rows in (8, 16) if batch % rows == 0}))


def _device(
    draw: random.Random, seed: int, rank: int, host: str, backend: str, card: tuple[str, float, float, float], shape: Shape,
    lora: bool, length: int, batch: int,
) -> DeviceProfile:  # fmt: skip
    name, gib, flops, bytes_per_s = card
    own = random.Random(f"noise, {seed}, {name}")  # like ranks have like curves
    power, bend = own.uniform(0.94, 1.0), own.choice(BENDS) * (flops >= FAST) / length
    overhead_s, back = own.uniform(1e-5, 2e-4), (1.1 if lora else 2.0) * own.uniform(0.9, 1.15)
    slow = (SLOW_RANK if draw.random() < SLOW_SHARE else 1.0) * math.exp(draw.gauss(0, UNLIKE))
    rows = _rows(batch)

    def curve(operations: float, share: float = 1.0) -> Curve:
        """``bend``: so many sequences take as long as one."""
        seconds = (overhead_s + share * operations * max(count, bend) ** power / flops for count in rows)
        return Curve(tuple(count * length for count in rows), tuple(slow * one for one in seconds))

    block = shape.block_operations(length) * length
    sizes = {EMBEDDING: 0.01 * block, "block": block, HEAD: block * shape.head_share(length)}
    layers, halved = {}, {}
    for kind, size in sizes.items():
        whole = LayerTimes(curve(size), curve(size, back))
        if kind == "block" and not lora:
            whole = replace(whole, recompute_s=curve(size, back + 1))
        if kind != EMBEDDING and not lora:
            whole = replace(whole, input_s=curve(size, 0.55 * back), weight_s=curve(size, 0.47 * back))
        if kind == EMBEDDING and not lora:
            whole = replace(
                whole, input_s=curve(size, back), weight_s=Curve(whole.forward_s.tokens, (0.0,) * len(rows))
            )
        half = own.uniform(0.5, 0.62)
        layers[kind], halved[kind] = whole, LayerTimes(curve(size, half), curve(size, half * back))
    cpu = backend == "cpu"
    copies = math.inf if cpu else 12e9
    return DeviceProfile(
        rank, host, backend, name, int(gib * 2**30), "made up", ("fp32", "bf16"), layers, 5e-5, 28 / bytes_per_s,
        copy_latency_s=0.0 if cpu else 2e-5, device_to_host_bytes_per_s=copies, host_to_device_bytes_per_s=copies,
        forward_overhead_s=overhead_s, backward_overhead_s=overhead_s, shares_host_memory=cpu, halved=halved,
    )  # fmt: skip


def _case(
    draw: random.Random, name: str, model: ModelCost, devices: list[DeviceProfile], network: tuple[float, float],
    inside_bytes_per_s: float, batch: int, lora: bool,
) -> Case:  # fmt: skip
    ways = {True: (5e-6, inside_bytes_per_s), False: network}
    links = tuple(
        LinkProfile(a.rank, b.rank, *ways[a.host == b.host], a.host == b.host)
        for a in devices
        for b in devices
        if a.rank != b.rank
    )
    ranks = [device.host for device in devices]
    hosts = tuple(
        HostProfile(host, int(64e9), "made up", ranks.count(host) > 1, network[1], 2e-5, inside_bytes_per_s / 2)
        for host in dict.fromkeys(ranks)
    )
    profile = ClusterProfile(MEASURED, "2026-11-26", name, "none", {}, model, tuple(devices), links, hosts=hosts)
    return Case(name, profile, request_of(batch, model, len(devices), lora))


def request_of(batch: int, model: ModelCost, ranks: int, lora: bool) -> PlanRequest:
    """All freedom that the program has by default."""
    most = max(1, batch // ranks)
    few, alone = (
        [rows for rows in (1, 2, 4, 8, 16) if batch % rows == 0 and rows <= most_of] for most_of in (min(8, most), 16)
    )
    return PlanRequest(
        batch, model.sequence_length, tuple(few), tuple(alone), max_pipelines=batch, recompute_choices=(False, True),
        split_choices=(False,) if lora else (False, True), stages_per_rank=4, groups=True, indifference=0.005,
    )  # fmt: skip


def with_few_counts(profile: ClusterProfile, most: int) -> ClusterProfile:
    """``profile`` with at most ``most`` token counts per curve, the smallest and the largest included."""

    def fewer(curve: Curve) -> Curve:
        last = len(curve.tokens) - 1
        tokens = sorted({curve.tokens[round(place * last / (most - 1))] for place in range(most)})
        return curve if last < most else Curve(tuple(tokens), tuple(map(curve.at, tokens)))

    def table(times_by_kind: Mapping[str, LayerTimes]) -> dict[str, LayerTimes]:
        curves = {kind: [getattr(times, part.name) for part in fields(times)] for kind, times in times_by_kind.items()}
        return {kind: LayerTimes(*(one and fewer(one) for one in own)) for kind, own in curves.items()}

    def device(one: DeviceProfile) -> DeviceProfile:
        return replace(one, **{name: table(getattr(one, name)) for name in TABLES})  # type: ignore[arg-type]

    return replace(profile, devices=tuple(map(device, profile.devices)))


@dataclass(frozen=True)
class Noise:
    """Of a measurement: relative, one standard deviation, at each of these levels by itself."""

    point: float = 0.03
    curve: float = 0.0
    table: float = 0.0
    rank: float = 0.0
    far: float = 0.0
    """This share of points takes twice as long."""
    steps: float = 0.0
    """Of every rank's computing, and of the whole step, in each step that is measured later."""


def measured(profile: ClusterProfile, noise: Noise, seed: str) -> ClusterProfile:
    """``profile`` as noise lets it look: medians of repetitions, which the curves keep as their samples."""
    draw = random.Random(f"measured {seed}")

    def factor(size: float) -> float:
        return math.exp(draw.gauss(0, size)) if size else 1.0

    def curve(true: Curve, by: float, repetitions: int) -> Curve:
        if max(true.seconds) <= 0:
            return true
        by *= factor(noise.curve)
        samples = []
        for seconds in true.seconds:
            middle = seconds * by * factor(COMMON * noise.point) * (2.0 if draw.random() < noise.far else 1.0)
            samples.append(tuple(middle * factor(noise.point) for _ in range(repetitions)))
        return Curve(true.tokens, tuple(map(median, samples)), true.tokens, tuple(samples))

    def table(name: str, true: Mapping[str, LayerTimes], by: float) -> dict[str, LayerTimes]:
        by *= factor(noise.table)
        found = {}
        for kind, times in true.items():
            parts = {field.name: getattr(times, field.name) for field in fields(LayerTimes)}
            timed: Callable[[str], int] = lambda part: REPETITIONS.get(part, 2) if name == "layers" else 2  # noqa: E731
            found[kind] = LayerTimes(
                **{part: one if one is None else curve(one, by, timed(part)) for part, one in parts.items()}
            )
        return found

    def device(true: DeviceProfile) -> DeviceProfile:
        by = factor(noise.rank)
        tables = {name: table(name, getattr(true, name), by) for name in TABLES}
        known = {name: getattr(true, name) for name in POOLED_FIGURES if getattr(true, name) is not None}
        return replace(true, **tables, **{name: one * factor(noise.point) for name, one in known.items()})  # type: ignore[arg-type]

    size = max(noise.point, noise.curve, noise.table, noise.rank) / 3
    links = tuple(replace(link, bytes_per_s=link.bytes_per_s * factor(min(0.1, size))) for link in profile.links)
    hosts = tuple(
        replace(host, sum_bytes_per_s=host.sum_bytes_per_s and host.sum_bytes_per_s * factor(min(0.1, size)))
        for host in profile.hosts
    )
    return replace(profile, devices=tuple(map(device, profile.devices)), links=links, hosts=hosts)
