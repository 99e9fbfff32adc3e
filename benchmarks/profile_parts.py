"""What ``make_profiles`` derives clusters from: model shapes, data sheets, and the rules for whatever was not measured.

* Time of a block from a data sheet: floating-point operations / (the sheet's dense peak * ``EFFICIENCY``) + ``CALL_S``.
  Forward does ``2 * weights + 2 * sequence * hidden`` operations per token (causal attention), backward twice that, or once
  where weights are frozen.
* The head by its share of a block's operations, the embedding as ``EMBEDDING_SHARE`` of a block.
* Optimizer: ``ADAM_TRAFFIC`` bytes per trainable parameter over the memory's speed.
* Usable memory: ``USABLE`` of what is built in.
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
EFFICIENCY = 0.4
CALL_S = 50e-6
EMBEDDING_SHARE = 0.01
ADAM_TRAFFIC = 28
USABLE = 0.94
GIB = 2**30
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
NF4_BYTES = 0.516
"""Per packed weight: half a byte, and its share of doubly quantised scales."""
LORA_RANK = 16
SIZES = (1, 2, 4, 8)
"""Sequences per micro-batch at which derived times are written down (they lie on a line)."""

Link = tuple[float, float]
"""(latency in seconds, bytes per second), host buffer to host buffer."""
SHARED_MEMORY: Link = (5e-6, 8e9)
GIGABIT: Link = (100e-6, 0.117e9)
TEN_GIGABIT: Link = (50e-6, 1.17e9)
HUNDRED_GIGABIT: Link = (10e-6, 11.5e9)
STATED = (
    "Times without a measurement: operations / (data-sheet dense peak * 0.4) + 50 us per layer; backward twice forward, once "
    "where weights are frozen; an embedding is 1 % of a block, a head its share of a block's operations.",
    "Optimizer: 28 bytes of memory traffic per trainable parameter. Usable memory: 94 % of what is built in, or as said of the "
    "device.",
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
    usable: float = USABLE
    integrated: bool = False
    """Does it compute in the host's own memory?"""


def model_of(shape: Shape, dtype: str, sequence: int, adapters: bool = False) -> ModelCost:
    """Full training, or LoRA over blocks packed in NF4 with embedding and head frozen.

    A block keeps ``6 h + 2 kv + 4 i`` values per token until backward (inputs and outputs of its norms, queries, keys,
    values, attention's output, and four of the gated MLP); attention itself is taken to be recomputed in its kernel.
    """
    size = BYTES[dtype]
    kept = float(size * (6 * shape.hidden + 2 * shape.kv_width + 4 * shape.intermediate))
    ends = shape.hidden * shape.vocabulary
    extra = shape.adapter_weights if adapters else 0
    block_bytes = int(NF4_BYTES * shape.block_weights) + 4 * extra if adapters else size * shape.block_weights
    trained, unpacked = (extra, size * shape.hidden * shape.intermediate) if adapters else (shape.block_weights, 0)
    boundary = size * shape.hidden
    block = LayerCost(
        "block", shape.block_weights + extra, trained, block_bytes, kept, kept, boundary, workspace_bytes=unpacked
    )
    embedding = LayerCost(EMBEDDING, ends, 0 if adapters else ends, size * ends, boundary, 0.0, boundary)
    logits = 8.0 * shape.vocabulary  # fp32 logits and their gradient
    head = LayerCost(HEAD, ends, 0 if adapters else ends, size * ends, 2.0 * boundary, logits, 0)
    state = 12.0 if dtype == "fp32" or adapters else 16.0
    return ModelCost("llama", dtype, sequence, False, state, (embedding, *([block] * shape.blocks), head))


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


def sheet_times(card: Card, shape: Shape, sequence: int, backward: float) -> dict[str, LayerTimes]:
    tokens = tuple(n * sequence for n in SIZES)
    per_token = shape.block_operations(sequence) / (card.peak * EFFICIENCY)
    forward = Curve(tokens, _rounded(CALL_S + per_token * t for t in tokens))
    back = Curve(tokens, _rounded(CALL_S + backward * per_token * t for t in tokens))
    return ends_like(LayerTimes(forward, back), shape, sequence)


def device(rank: int, host: str, card: Card, layers: dict[str, LayerTimes]) -> DeviceProfile:
    return DeviceProfile(
        rank=rank,
        host=host,
        backend=card.backend,
        name=card.name,
        memory_bytes=int(card.gib * GIB * card.usable),
        memory_reason=f"{100 * card.usable:.0f} % of {card.gib:g} GiB (assumed)",
        dtypes=card.dtypes,
        layers=layers,
        optimizer_fixed_s=CALL_S,
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
        model=model,
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
    backward = 1.0 if adapters else 2.0
    devices = [device(r, h, c, sheet_times(c, shape, sequence, backward)) for r, (h, c) in enumerate(places)]
    return cluster(name, source, model_of(shape, dtype, sequence, adapters), devices, between, [*notes, *STATED])
