"""Writes the clusters of ``profiles/`` from published figures and data sheets.

    python benchmarks/make_profiles.py [--to DIRECTORY]

Every assumption is a constant or an argument here, and stands in the file's ``source`` and ``notes``. Measured figures come from
``benchmarks/data``; what has not been measured is derived:

* time of a block from a data sheet: floating-point operations / (the sheet's dense peak * ``EFFICIENCY``) + ``CALL_S``; forward
  ``2 * weights + 2 * sequence * hidden`` operations per token (causal attention), backward twice that (once where weights are frozen);
* the head by its share of a block's operations, the embedding as ``EMBEDDING_SHARE`` of a block;
* optimizer: ``ADAM_TRAFFIC`` bytes per trainable parameter over the memory's speed; usable memory: ``USABLE`` of what is built in.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import published_runs  # noqa: E402

from hetero_mpi.planning.cost import EMBEDDING, HEAD, LayerCost, ModelCost  # noqa: E402
from hetero_mpi.planning.files import save_profile  # noqa: E402
from hetero_mpi.planning.profile import ClusterProfile, Curve, DeviceProfile, LayerTimes, LinkProfile  # noqa: E402

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
    "Times without a measurement: operations / (data-sheet dense peak * 0.4) + 50 us per layer; backward twice forward, once where "
    "weights are frozen; an embedding is 1 % of a block, a head its share of a block's operations.",
    "Optimizer: 28 bytes of memory traffic per trainable parameter. Usable memory: 94 % of what is built in, unless said otherwise.",
)


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


LLAMA_1B = Shape(2048, 16, 8192, 128256, 512)
LLAMA_3B = Shape(3200, 26, 8640, 32000, 3200)
LLAMA_7B = Shape(4096, 32, 11008, 32000, 4096)
LLAMA_8B = Shape(4096, 32, 14336, 128256, 1024)
LLAMA_70B = Shape(8192, 80, 28672, 32000, 1024)


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


RTX_5090 = Card("NVIDIA RTX 5090", "cuda", 32, 1792e9, 209.5e12, 48e9)
STRIX_HALO = Card("AMD Strix Halo (Radeon 8060S)", "rocm", 128, 256e9, RTX_5090.peak * 289 / 3243, 50e9, usable=0.75)
M4_MAX = Card("Apple M4 Max (40 GPU cores)", "mps", 64, 546e9, 18.4e12, 50e9, usable=0.75)
TITAN_X = Card("NVIDIA TITAN X (Pascal)", "cuda", 12, 480e9, 11e12, 12e9, ("fp32",))
A800 = Card("NVIDIA A800 80GB", "cuda", 80, 2039e9, 312e12, 24e9)
RTX_4090 = Card("NVIDIA RTX 4090", "cuda", 24, 1008e9, 165.2e12, 24e9)
RTX_3090 = Card("NVIDIA RTX 3090", "cuda", 24, 936e9, 71e12, 24e9)
TYPE_A = Card("type A (made up)", "cuda", 64, 1600e9, 200e12, 24e9)
TYPE_B = Card("type B (made up)", "rocm", 64, 1200e9, 120e12, 24e9)
ZORSE_CARDS = {
    "l4": Card("NVIDIA L4", "cuda", 24, 300e9),
    "a6000": Card("NVIDIA RTX A6000", "cuda", 48, 768e9),
    "p40": Card("NVIDIA P40", "cuda", 24, 346e9, dtypes=("fp32", "fp16")),
    "w6800": Card("AMD Radeon Pro W6800", "rocm", 32, 512e9, dtypes=("fp32", "fp16")),
    "a10g": Card("NVIDIA A10G", "cuda", 24, 600e9),
    "t4": Card("NVIDIA T4", "cuda", 16, 320e9, dtypes=("fp32", "fp16")),
    "v100x16": Card("NVIDIA V100 16GB", "cuda", 16, 900e9, dtypes=("fp32", "fp16")),
}
SAILOR_GIB = {"RTX-3090": 24.0, "RTX-2080": 11.0, "Titan-RTX": 24.0}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--to", type=Path, default=ROOT / "profiles", metavar="DIRECTORY", help="where to write them")
    to = parser.parse_args().to
    for name, make in CLUSTERS.items():
        save_profile(make(), to / f"{name}.toml")
        print(to / f"{name}.toml")
    return 0


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
    block = LayerCost("block", shape.block_weights + extra, trained, block_bytes, kept, kept, boundary, unpacked)
    embedding = LayerCost(EMBEDDING, ends, 0 if adapters else ends, size * ends, boundary, 0.0, boundary)
    logits = 8.0 * shape.vocabulary  # fp32 logits and their gradient
    head = LayerCost(HEAD, ends, 0 if adapters else ends, size * ends, 2.0 * boundary, logits, 0)
    state = 12.0 if dtype == "fp32" or adapters else 16.0
    return ModelCost("llama", dtype, sequence, False, state, (embedding, *([block] * shape.blocks), head))


def ends_like(block: LayerTimes, shape: Shape, sequence: int) -> dict[str, LayerTimes]:
    """Times of all kinds of item from a block's."""

    def scaled(share: float) -> LayerTimes:
        curves = (
            replace(c, seconds=_rounded(s * share for s in c.seconds)) for c in (block.forward_s, block.backward_s)
        )
        return LayerTimes(*curves)

    return {EMBEDDING: scaled(EMBEDDING_SHARE), "block": block, HEAD: scaled(shape.head_share(sequence))}


def _rounded(seconds: object) -> tuple[float, ...]:
    return tuple(round(float(s), 8) for s in seconds)  # type: ignore[attr-defined]


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
    )


def cluster(
    name: str,
    source: str,
    model: ModelCost,
    devices: Sequence[DeviceProfile],
    between: Link | Callable[[DeviceProfile, DeviceProfile], Link],
    notes: Sequence[str],
) -> ClusterProfile:
    links = []
    for a in devices:
        for b in devices:
            if a.rank != b.rank:
                same = a.host == b.host
                latency, speed = SHARED_MEMORY if same else between(a, b) if callable(between) else between
                links.append(LinkProfile(a.rank, b.rank, latency, speed, same))
    return ClusterProfile(
        source, DATE, f"published-{name}", "none", {}, model, tuple(devices), tuple(links), notes=tuple(notes)
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


def homelab_strix() -> ClusterProfile:
    return sheet_cluster(
        "homelab-5090-strix-halo",
        "derived from the published single-card times of a HeteroShard run (RTX 5090: 289 s, Strix Halo: 3,243 s) "
        "and data sheets",
        [("desktop", RTX_5090), ("mini-pc", STRIX_HALO)],
        LLAMA_8B,
        "bf16",
        1024,
        GIGABIT,
        (
            "Only the ratio of the two cards (11.2) is published; the absolute speed is the RTX 5090's data sheet (209.5 TFLOPS bf16).",
            "Job: LoRA of rank 16 over NF4, Llama 3.1 8B shape, sequences of 1024; Strix Halo offers its GPU 96 of 128 GiB; Gigabit "
            "Ethernet.",
        ),
        adapters=True,
    )


def homelab_m4() -> ClusterProfile:
    return sheet_cluster(
        "homelab-m4max-2titanx",
        "derived from data sheets (M4 Max: 40 cores * 128 lanes * 2 * 1.8 GHz = 18.4 TFLOPS fp32; TITAN X: 11 TFLOPS fp32)",
        [("mac", M4_MAX), ("old-box", TITAN_X), ("old-box", TITAN_X)],
        LLAMA_1B,
        "fp32",
        1024,
        GIGABIT,
        (
            "TITAN X is taken to be the Pascal card (12 GiB); it has no usable fp16 or bf16, so the job is fp32.",
            "Job: full training, Llama 3.2 1B shape with an untied head, sequences of 1024; macOS lets the GPU use 75 % of 64 GiB; "
            "Gigabit Ethernet.",
        ),
    )


def hexiscale() -> ClusterProfile:
    cards = [*([("a800", A800)] * 3), *([("rtx4090", RTX_4090)] * 3), *([("rtx3090", RTX_3090)] * 2)]
    return sheet_cluster(
        "hexiscale-3xa800-3x4090-2x3090",
        "derived from data sheets (dense bf16 TFLOPS with fp32 accumulation: A800 312, RTX 4090 165.2, RTX 3090 71)",
        cards,
        LLAMA_7B,
        "bf16",
        2048,
        TEN_GIGABIT,
        (
            "The mix of cards is the one HexiScale's authors describe; one host per kind of card and 10 Gigabit Ethernet are assumed.",
            "Job: full training, Llama 2 7B shape, sequences of 2048.",
        ),
    )


def hethub() -> ClusterProfile:
    places = [("a0", TYPE_A)] * 4 + [(f"b{i // 4}", TYPE_B) for i in range(20)]
    return sheet_cluster(
        "hethub-4-20",
        "derived from nothing measured: a synthetic cluster of two types in HetHub's proportion (128 + 640 accelerators)",
        places,
        LLAMA_70B,
        "bf16",
        2048,
        HUNDRED_GIGABIT,
        (
            "A thirty-second of the published 128 + 640: 4 of type A and 20 of type B, since a file lists every pair of ranks.",
            "HetHub's accelerators are not named with figures: type A has 200 TFLOPS, type B 120, both 64 GiB, 4 per host, 100 Gbit/s "
            "between hosts; all made up.",
            "Job: full training, Llama 2 70B shape, sequences of 2048.",
        ),
    )


def zorse(
    name: str, model: str, shape: Shape, sequence: int, places: Sequence[tuple[str, str]], notes: Sequence[str]
) -> ClusterProfile:
    """``places``: (host, Zorse's name of the card) of every rank; block times as measured."""
    measured: dict[str, list[tuple[int, float, float]]] = {}
    text = (published_runs.DATA / "zorse_llama_layers.csv").read_text(encoding="utf-8")
    for row in csv.DictReader(line for line in text.splitlines() if not line.startswith("#")):
        if (row["model"], int(row["sequence_length"])) == (model, sequence):
            sample = int(row["sequences"]) * sequence, float(row["forward_s"]), float(row["backward_s"])
            measured.setdefault(row["gpu"], []).append(sample)
    devices = []
    for rank, (host, gpu) in enumerate(places):
        tokens, forward, backward = zip(*measured[gpu], strict=True)
        block = LayerTimes(Curve(tokens, forward), Curve(tokens, backward))
        devices.append(device(rank, host, ZORSE_CARDS[gpu], ends_like(block, shape, sequence)))
    source = f"measured by benson-guo/zorse (MIT): seconds of a {model} block in fp16; everything else derived"
    return cluster(name, source, model_of(shape, "fp16", sequence), devices, TEN_GIGABIT, [*notes, *STATED])


def zorse_p40() -> ClusterProfile:
    places = [("l4", "l4"), ("l4", "l4"), ("a6000", "a6000"), ("p40", "p40")]
    job = f"Full training, Llama 3B shape, sequences of 1024; one host per kind of card, {_TEN}"
    return zorse("zorse-2xl4-a6000-p40", "llama-3b", LLAMA_3B, 1024, places, [job])


def zorse_w6800() -> ClusterProfile:
    places = [("nvidia", "a6000"), ("nvidia", "a6000"), ("amd", "w6800"), ("amd", "w6800")]
    note = "The W6800 was measured with 1 to 4 sequences only, and its first figure is out of line with the others."
    job = f"Full training, Llama 3B shape, sequences of 512; two hosts, {_TEN}"
    return zorse("zorse-2xa6000-2xw6800", "llama-3b", LLAMA_3B, 512, places, [note, job])


def zorse_cloud() -> ClusterProfile:
    cards = [(gpu, gpu) for gpu in ("a10g", "t4", "v100x16") for _ in range(4)]
    job = f"Full training, Llama 7B shape, sequences of 2048; one host of four cards per kind, {_TEN}"
    return zorse("zorse-4xa10g-4xt4-4xv100", "llama-7b", LLAMA_7B, 2048, cards, [job])


_TEN = "10 Gigabit Ethernet: assumed."


def sailor(name: str, nodes: Sequence[published_runs.Node], hosts: Sequence[str], note: str) -> ClusterProfile:
    times = published_runs.read_times(published_runs.DATA / "sailor_opt350m_layers.csv")
    devices = []
    for rank, (node, host) in enumerate(zip(nodes, hosts, strict=True)):
        found = published_runs.device_of(rank, node, times)
        gib = SAILOR_GIB[node.gpu] * node.gpus
        reason = f"{100 * USABLE:.0f} % of {gib:g} GiB (assumed)"
        devices.append(replace(found, host=host, memory_bytes=int(gib * GIB * USABLE), memory_reason=reason))

    def between(a: DeviceProfile, b: DeviceProfile) -> Link:
        like = a.name == b.name
        return 0.0, published_runs.LIKE_BYTES_PER_S if like else published_runs.UNLIKE_BYTES_PER_S

    source = (
        "measured by eth-easl/sailor (MIT): seconds of OPT-350M's layers in fp32, and bytes per second between nodes"
    )
    notes = (
        note,
        "Derived: memory (24, 11 and 24 GiB per GPU from data sheets, the RTX 2080 taken as the Ti), activations from published "
        "formulas, no latency on links (none was published).",
    )
    return cluster(name, source, published_runs.model_cost(), devices, between, notes)


def sailor_nodes() -> ClusterProfile:
    kinds = ("RTX-3090", "RTX-2080", "RTX-2080", "RTX-2080", "Titan-RTX", "Titan-RTX")
    nodes = [published_runs.Node(kind, 8) for kind in kinds]
    note = "A rank is a node: eight GPUs that share every layer (tensor parallel), as they were measured together."
    return sailor("sailor-6-nodes", nodes, [f"node{i}" for i in range(len(nodes))], note)


def sailor_gpus() -> ClusterProfile:
    kinds = [kind for kind in SAILOR_GIB for _ in range(2)]
    note = "A rank is one GPU, two on each of three nodes; 8 GB/s through shared memory inside a node is assumed."
    return sailor("sailor-6-gpus", [published_runs.Node(kind, 1) for kind in kinds], kinds, note)


CLUSTERS: dict[str, Callable[[], ClusterProfile]] = {
    "homelab-5090-strix-halo": homelab_strix,
    "homelab-m4max-2titanx": homelab_m4,
    "sailor-6-nodes": sailor_nodes,
    "sailor-6-gpus": sailor_gpus,
    "zorse-2xl4-a6000-p40": zorse_p40,
    "zorse-2xa6000-2xw6800": zorse_w6800,
    "zorse-4xa10g-4xt4-4xv100": zorse_cloud,
    "hexiscale-3xa800-3x4090-2x3090": hexiscale,
    "hethub-4-20": hethub,
}
"""File name without its ending -> what makes it."""

if __name__ == "__main__":
    sys.exit(main())
