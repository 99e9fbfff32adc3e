"""The generated suite of clusters that the planner's benchmarks are run on: any number of devices, any seed.

* Hosts of 1 to 8 like devices. Four types: speeds 1 : 2 : 4 : 10 with 12, 16, 24 and 80 GB.
* Each host has a network card of 1, 10 or 25 Gbit/s; two hosts are linked at the slower one's speed. Devices of one host
  exchange 8 to 64 GB/s.
* Llama shapes of 7B, 13B, 30B and 70B parameters, sequences of 2048, a global batch of 4 sequences per device and at least 64,
  micro-batches of 1, 2 or 4 sequences, recompute where the planner likes.
* Full training in bf16 where that fits into the memory of all devices together, else LoRA over NF4, else the same of the next
  smaller shape.

Plans of these clusters are frozen, and so are the rules for times and memory: a pass of a block takes ``CALL_S`` + operations /
(``PEAK_SHARE`` of the peak). ``noise`` multiplies every curve and every link by a factor of its own, drawn between 1 - noise and
1 + noise: devices that are equal, as a measurement sees them.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from profile_parts import GIB, SIZES, Card, Shape, device, ends_like, model_of

from hetero_mpi.planning.memory import StageMode, stage_memory, usable_bytes
from hetero_mpi.planning.types.profile import ClusterProfile, Curve, DeviceProfile, HostLinkProfile, LayerTimes
from hetero_mpi.planning.types.request import PlanRequest

SEQUENCE = 2048
CALL_S, PEAK_SHARE, USABLE = 50e-6, 0.4, 0.94
SLOWEST_FLOPS = 30e12
"""Data-sheet peak of a device of speed 1."""
TYPES = tuple(
    Card(f"speed {speed}, {gb} GB", "cuda", gb * 1e9 / 2**30, 200e9 * speed, speed * SLOWEST_FLOPS, 12e9)
    for speed, gb in ((1, 12), (2, 16), (4, 24), (10, 80))
)
SHAPES = {
    "7B": Shape(4096, 32, 11008, 32000, 4096),
    "13B": Shape(5120, 40, 13824, 32000, 5120),
    "30B": Shape(6656, 60, 17920, 32000, 6656),
    "70B": Shape(8192, 80, 28672, 32000, 1024),
}
NETWORKS_GBIT = (1, 10, 25)
ETHERNET_SHARE = 0.94
"""Payload of Ethernet's nominal speed."""
ETHERNET_LATENCY_S = 50e-6
INSIDE_LATENCY_S = 5e-6
PAIRWISE = 128
"""Up to so many devices every pair has a link of its own in the profile; beyond, every pair of hosts."""


@dataclass(frozen=True)
class Case:
    """One cluster of the suite and the job to plan for it."""

    name: str
    job: str
    """Shape and way of training, such as ``13B full``."""
    profile: ClusterProfile
    request: PlanRequest


@dataclass(frozen=True)
class _Host:
    card: Card
    network_bytes_per_s: float
    inside_bytes_per_s: float


def generate(devices: int, seed: int, noise: float = 0.0) -> Case:
    """The suite's cluster of ``devices`` devices and ``seed``; the same every time."""
    draw = random.Random(f"{devices} devices, seed {seed}")
    places: list[tuple[int, _Host]] = []
    while len(places) < devices:
        nic = draw.choice(NETWORKS_GBIT) * 1e9 / 8 * ETHERNET_SHARE
        host = _Host(draw.choice(TYPES), nic, draw.uniform(8e9, 64e9))
        number = places[-1][0] + 1 if places else 0
        places += [(number, host)] * min(draw.randint(1, 8), devices - len(places))
    wanted = draw.choice(list(SHAPES))
    request = _request(devices)
    for shape, adapters in _jobs(wanted):
        profile = _profile(f"{devices}-{seed}", places, SHAPES[shape], adapters)
        if _fits(profile, request):
            break
    if noise:
        profile = with_noise(profile, noise, seed)
    return Case(f"{devices} devices, seed {seed}", f"{shape} {'LoRA' if adapters else 'full'}", profile, request)


def _request(devices: int) -> PlanRequest:
    batch = max(64, 4 * devices)
    return PlanRequest(batch, SEQUENCE, (1, 2, 4), max_pipelines=devices, recompute_choices=(False, True))


def _jobs(wanted: str) -> Iterator[tuple[str, bool]]:
    """What is tried in turn until it fits: (shape, LoRA over NF4?)."""
    yield wanted, False
    names = list(SHAPES)
    for name in reversed(names[: names.index(wanted) + 1]):
        yield name, True


def _fits(profile: ClusterProfile, request: PlanRequest) -> bool:
    """Can the devices hold all layers, each as deep in flight as a pipeline of all of them would ask of its first stage?"""
    model, room = profile.model, 0
    deepest = min(len(profile.devices), len(model.layers))
    for one in profile.devices:
        usable = usable_bytes(one.memory_bytes, request.memory_reserve)
        room += sum(
            stage_memory(model, 1, last, SEQUENCE, deepest, StageMode(recompute=True)).total <= usable
            for last in range(2, len(model.layers))
        )
    return room >= len(model.layers) + 2


def _profile(name: str, places: list[tuple[int, _Host]], shape: Shape, adapters: bool) -> ClusterProfile:
    times = {card.name: _times(card, shape, 1.0 if adapters else 2.0) for card in TYPES}
    devices = tuple(
        replace(
            device(rank, f"host{number}", host.card, times[host.card.name]),
            memory_bytes=int(host.card.gib * GIB * USABLE),
            memory_reason="assumed",
            optimizer_fixed_s=CALL_S,
        )
        for rank, (number, host) in enumerate(places)
    )
    hosts = dict(places)
    between = [
        HostLinkProfile(f"host{a}", f"host{b}", *_link(host_a, host_b, a == b))
        for (a, host_a), (b, host_b) in itertools.product(hosts.items(), repeat=2)
    ]
    model = model_of(shape, "bf16", SEQUENCE, adapters)
    profile = ClusterProfile("generated", "2026-11-20", name, "none", {}, model, devices, (), host_links=tuple(between))
    if len(places) > PAIRWISE:
        return profile
    pairs = itertools.permutations(range(len(places)), 2)
    return replace(profile, links=tuple(profile.link(a, b) for a, b in pairs), host_links=())


def _times(card: Card, shape: Shape, backward: float) -> dict[str, LayerTimes]:
    tokens = tuple(n * SEQUENCE for n in SIZES)
    token_s = shape.block_operations(SEQUENCE) / (card.peak * PEAK_SHARE)
    curves = (Curve(tokens, tuple(round(CALL_S + times * token_s * t, 8) for t in tokens)) for times in (1.0, backward))
    return ends_like(LayerTimes(*curves), shape, SEQUENCE)


def _link(a: _Host, b: _Host, same: bool) -> tuple[float, float]:
    """(latency, speed)"""
    if same:
        return INSIDE_LATENCY_S, a.inside_bytes_per_s
    return ETHERNET_LATENCY_S, min(a.network_bytes_per_s, b.network_bytes_per_s)


def with_noise(profile: ClusterProfile, noise: float, seed: int) -> ClusterProfile:
    """Every curve and link of ``profile`` times a factor of its own."""
    draw = random.Random(f"noise, seed {seed}")

    def factor() -> float:
        return draw.uniform(1 - noise, 1 + noise)

    def noisy(curve: Curve) -> Curve:
        by = factor()
        return replace(curve, seconds=tuple(s * by for s in curve.seconds))

    def measured(one: DeviceProfile) -> DeviceProfile:
        layers = {kind: LayerTimes(noisy(t.forward_s), noisy(t.backward_s)) for kind, t in one.layers.items()}
        return replace(one, layers=layers)

    devices = tuple(measured(one) for one in profile.devices)
    links = tuple(replace(link, bytes_per_s=link.bytes_per_s * factor()) for link in profile.links)
    between = tuple(replace(link, bytes_per_s=link.bytes_per_s * factor()) for link in profile.host_links)
    return replace(profile, devices=devices, links=links, host_links=between)
