"""What ``make_profiles`` derives clusters from: model shapes, data sheets, and the rules for whatever was not measured.

* Time of a pass through a block or a head: floating-point operations / (the sheet's dense peak * ``Card.peak_share``) + bytes of
  activations * ``TRAFFIC`` / the memory's speed; at least ``LAUNCH_S``, in which the host launches the kernels.
  Forward does ``2 * weights + 2 * sequence * hidden`` operations per token (causal attention). Backward takes twice as long, or
  once where weights are frozen; gradients of weights add ``GRADIENT_TRAFFIC`` bytes per weight.
* An embedding takes ``EMBEDDING_SHARE`` of a block. Where the block was measured, the head takes its share of a block's operations.
* Optimizer: ``ADAM_TRAFFIC`` bytes per trainable parameter over the memory's speed.
* Activations and workspace: ``ALLOCATOR_SHARE`` more than the tensors, as the allocator's blocks do not fit each other.
* Usable memory: what is built in less ``FRAMEWORK_BYTES``, times ``USABLE``.

``published_sheets.py`` prints the error of these rules by kind of measurement, of rows that decided a constant and of others.
* A host has one network card, which its ranks share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

from hetero_mpi.planning.types.cost import LayerCost, ModelCost
from hetero_mpi.planning.types.profile import (
    ANY_HOST,
    ITSELF,
    ClusterProfile,
    Curve,
    DeviceProfile,
    HostLinkProfile,
    HostProfile,
    LayerTimes,
    LinkProfile,
)
from hetero_mpi.planning.types.sizes import EMBEDDING, HEAD

DATE = "2026-11-20"
PEAK_SHARE, HALF_RATE_SHARE = 0.6, 0.95
"""Of the sheet's dense peak with sums in fp32, reached by matrix products; by cards (GeForce, A10G) that add at half the rate."""
LAUNCH_S, LORA_LAUNCH_S = 0.5e-3, 1.65e-3
"""Least seconds of a pass through a layer, in which the host launches its kernels."""
TRAFFIC, LORA_TRAFFIC = 2.0, 11.5
"""Times that the bytes of activations pass the card's memory."""
GRADIENT_TRAFFIC = 24
"""Bytes per weight and backward: a gradient is written, read, and added to the sum in fp32."""
EMBEDDING_SHARE = 0.01
ADAM_TRAFFIC = 28
FRAMEWORK_BYTES = 1.75e9
"""Context, libraries and their workspaces, on each card."""
ALLOCATOR_SHARE = 0.45
USABLE = 0.94
"""With the 5 % that a plan keeps free, this covers the largest shortfall of the memory that is predicted for a fitted row."""
GIB = 2**30
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
NF4_BYTES = 0.516
"""Per packed weight: half a byte, and its share of doubly quantised scales."""
LORA_RANK = 16
LOGITS_BYTES = 8.0
"""Per word of the vocabulary and token: fp32 logits and their gradient."""
SIZES = (1, 2, 4, 8)
"""Sequences per micro-batch at which derived times are written down (they lie on a line)."""

Link = tuple[float, float]
"""(latency in seconds, bytes per second), host buffer to host buffer."""
SHARED_MEMORY: Link = (5e-6, 8e9)
GIGABIT: Link = (100e-6, 0.117e9)
TEN_GIGABIT: Link = (50e-6, 1.17e9)
HUNDRED_GIGABIT: Link = (10e-6, 11.5e9)
MEMORY_STATED = (
    "Optimizer: 28 bytes of memory traffic per trainable parameter. Usable memory: 94 % of what is left of the memory, or of the "
    "share that the device says, beside 1.75 GB for the framework; activations take 45 % more than their tensors (allocator)."
)
STATED = (
    "Times without a measurement: operations / (60 % of the data-sheet dense peak, 95 % of GeForce cards') + memory traffic of 2 "
    "times the activations, with LoRA 11.5 times, at least 0.5 ms per layer and pass for launches, with LoRA 1.65 ms; backward "
    "twice forward and 24 bytes of traffic per weight, once forward where weights are frozen; an embedding is 1 % of a block.",
    MEMORY_STATED,
)

PAIRWISE = 12
"""Ranks up to which a file lists every pair, to be edited one by one."""
ONE_CARD = "The ranks of a host share its network card: their messages to other hosts wait for each other (assumed)."


@dataclass(frozen=True)
class Shape:
    """A Llama-like model. ``kv_width``: key heads times head size."""

    hidden: int
    blocks: int
    intermediate: int
    vocabulary: int
    kv_width: int

    @property
    def block_weights(self) -> int:
        return 2 * self.hidden * (self.hidden + self.kv_width) + 3 * self.hidden * self.intermediate

    @property
    def adapter_weights(self) -> int:
        """LoRA on all seven matrices of a block."""
        attention = 2 * 2 * self.hidden + 2 * (self.hidden + self.kv_width)
        return LORA_RANK * (attention + 3 * (self.hidden + self.intermediate))

    @property
    def block_values(self) -> int:
        """Values per token that a block keeps until backward (inputs and outputs of its norms, queries, keys, values, attention's
        output, and four of the gated MLP); attention itself is taken to be recomputed in its kernel."""
        return 6 * self.hidden + 2 * self.kv_width + 4 * self.intermediate

    def block_operations(self, sequence: int) -> float:
        return 2.0 * self.block_weights + 2.0 * sequence * self.hidden

    def head_share(self, sequence: int) -> float:
        return 2.0 * self.hidden * self.vocabulary / self.block_operations(sequence)


@dataclass(frozen=True)
class Card:
    """A device by its data sheet. ``peak``: dense operations per second in the job's dtype, fp32 accumulation."""

    name: str
    backend: str
    gib: float
    memory_bytes_per_s: float
    peak: float = 0.0
    copy_bytes_per_s: float = 12e9
    dtypes: tuple[str, ...] = ("fp32", "bf16", "fp16")
    offered: float = 1.0
    """Share of the memory that the operating system lets it use."""
    integrated: bool = False
    """Does it compute in the host's own memory?"""
    peak_share: float = PEAK_SHARE

    def memory_bytes(self, cards: int = 1) -> int:
        """Usable bytes of so many."""
        return int(USABLE * cards * (self.gib * GIB * self.offered - FRAMEWORK_BYTES))


def model_of(shape: Shape, dtype: str, sequence: int, adapters: bool = False) -> ModelCost:
    """Full training, or LoRA over blocks packed in NF4 with embedding and head frozen. Bytes are those of the tensors."""
    size = BYTES[dtype]
    kept = float(size * shape.block_values)
    ends = shape.hidden * shape.vocabulary
    extra = shape.adapter_weights if adapters else 0
    block_bytes = int(NF4_BYTES * shape.block_weights) + 4 * extra if adapters else size * shape.block_weights
    trained, unpacked = (extra, size * shape.hidden * shape.intermediate) if adapters else (shape.block_weights, 0)
    boundary = size * shape.hidden
    block = LayerCost(
        "block", shape.block_weights + extra, trained, block_bytes, kept, kept, boundary, workspace_bytes=unpacked
    )
    embedding = LayerCost(EMBEDDING, ends, 0 if adapters else ends, size * ends, boundary, 0.0, boundary)
    logits = LOGITS_BYTES * shape.vocabulary
    head = LayerCost(HEAD, ends, 0 if adapters else ends, size * ends, 2.0 * boundary, logits, 0)
    state = 12.0 if dtype == "fp32" or adapters else 16.0
    return ModelCost("llama", dtype, sequence, False, state, (embedding, *([block] * shape.blocks), head))


def with_allocator(model: ModelCost) -> ModelCost:
    """The model with ``ALLOCATOR_SHARE`` more bytes of activations and workspace."""
    grown = ("activation_bytes_per_token", "workspace_bytes_per_token", "logits_bytes_per_token")

    def taken(layer: LayerCost) -> LayerCost:
        return replace(layer, **{name: round((1 + ALLOCATOR_SHARE) * getattr(layer, name), 3) for name in grown})

    by_layer = {layer: taken(layer) for layer in model.layers}
    return replace(model, layers=tuple(by_layer[layer] for layer in model.layers))


def ends_like(block: LayerTimes, shape: Shape, sequence: int) -> dict[str, LayerTimes]:
    """Times of all kinds of layer from a block's."""

    def scaled(share: float) -> LayerTimes:
        curves = (
            replace(c, seconds=_rounded(s * share for s in c.seconds)) for c in (block.forward_s, block.backward_s)
        )
        return LayerTimes(*curves)

    return {EMBEDDING: scaled(EMBEDDING_SHARE), "block": block, HEAD: scaled(shape.head_share(sequence))}


def _rounded(seconds: Iterable[float]) -> tuple[float, ...]:
    return tuple(round(s, 8) for s in seconds)


def sheet_times(card: Card, shape: Shape, sequence: int, dtype: str, adapters: bool) -> dict[str, LayerTimes]:
    launch_s, traffic = (LORA_LAUNCH_S, LORA_TRAFFIC) if adapters else (LAUNCH_S, TRAFFIC)
    rate = card.peak * card.peak_share
    bytes_per_s, tokens = card.memory_bytes_per_s, tuple(n * sequence for n in SIZES)

    def passes(operations: float, kept: float, least_s: float, weights: int) -> LayerTimes:
        token_s = operations / rate + traffic * kept / bytes_per_s
        backward, fixed_s = (1, 0.0) if adapters else (2, GRADIENT_TRAFFIC * weights / bytes_per_s)
        forward = Curve(tokens, _rounded(max(least_s, token_s * t) for t in tokens))
        return LayerTimes(
            forward, Curve(tokens, _rounded(max(least_s, backward * token_s * t) + fixed_s for t in tokens))
        )

    operations, kept = shape.block_operations(sequence), BYTES[dtype] * shape.block_values
    ends = shape.hidden * shape.vocabulary
    return {
        EMBEDDING: passes(EMBEDDING_SHARE * operations, EMBEDDING_SHARE * kept, 0.0, 0),
        "block": passes(operations, kept, launch_s, shape.block_weights),
        HEAD: passes(2.0 * ends, LOGITS_BYTES * shape.vocabulary, launch_s, ends),
    }


def device(rank: int, host: str, card: Card, layers: dict[str, LayerTimes]) -> DeviceProfile:
    return DeviceProfile(
        rank=rank,
        host=host,
        backend=card.backend,
        name=card.name,
        memory_bytes=card.memory_bytes(),
        memory_reason=f"{100 * USABLE:.0f} % of {card.offered * card.gib:g} GiB less 1.75 GB (assumed)",
        dtypes=card.dtypes,
        layers=layers,
        optimizer_fixed_s=LAUNCH_S,
        optimizer_s_per_parameter=float(f"{ADAM_TRAFFIC / card.memory_bytes_per_s:.4g}"),
        copy_latency_s=2e-5,
        device_to_host_bytes_per_s=card.copy_bytes_per_s,
        host_to_device_bytes_per_s=card.copy_bytes_per_s,
        shares_host_memory=card.integrated,
    )


def hosts_of(devices: Sequence[DeviceProfile]) -> tuple[HostProfile, ...]:
    """Hosts whose ranks have something in common: a network card, or memory with the host. Others need no table."""
    found = []
    for name in dict.fromkeys(device.host for device in devices):
        here = [device for device in devices if device.host == name]
        own = next((device for device in here if device.shares_host_memory), None)
        size, reason = (own.memory_bytes, own.memory_reason) if own is not None else (0, "not known, not needed")
        if len(here) > 1 or own is not None:
            found.append(HostProfile(name, size, reason, shared_nic=len(here) > 1))
    return tuple(found)


def cluster(
    name: str,
    source: str,
    model: ModelCost,
    devices: Sequence[DeviceProfile],
    between: Link | Callable[[DeviceProfile, DeviceProfile], Link],
    notes: Sequence[str],
) -> ClusterProfile:
    links, told = [], ()
    if len(devices) > PAIRWISE and not callable(between):
        told = HostLinkProfile(ANY_HOST, ITSELF, *SHARED_MEMORY), HostLinkProfile(ANY_HOST, ANY_HOST, *between)
    for a, b in [] if told else permutations(devices, 2):
        same = a.host == b.host
        latency, speed = SHARED_MEMORY if same else between(a, b) if callable(between) else between
        links.append(LinkProfile(a.rank, b.rank, latency, speed, same))
    hosts = hosts_of(devices)
    if any(host.shared_nic for host in hosts):
        notes = [*notes, ONE_CARD]
    return ClusterProfile(
        source=source,
        date=DATE,
        key=f"published-{name}",
        mpi_library="none",
        versions={},
        model=with_allocator(model),
        devices=tuple(devices),
        links=tuple(links),
        hosts=hosts,
        host_links=told,
        notes=tuple(notes),
    )


def sheet_cluster(
    name: str,
    source: str,
    places: Sequence[tuple[str, Card]],
    shape: Shape,
    dtype: str,
    sequence: int,
    between: Link,
    notes: Sequence[str],
    adapters: bool = False,
) -> ClusterProfile:
    """``places``: (host, card) of every rank."""
    devices = [device(r, h, c, sheet_times(c, shape, sequence, dtype, adapters)) for r, (h, c) in enumerate(places)]
    return cluster(name, source, model_of(shape, dtype, sequence, adapters), devices, between, [*notes, *STATED])
