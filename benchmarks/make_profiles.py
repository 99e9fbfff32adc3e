"""Writes the clusters of ``profiles/`` from published figures and data sheets.

    python benchmarks/make_profiles.py [--to DIRECTORY]

Measured figures come from ``benchmarks/data``; what has not been measured is derived by the rules of ``profile_parts``. Every
assumption stands here or there as a constant, and in the file's ``source`` and ``notes`` in words.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import moe_parts  # noqa: E402
import published_runs  # noqa: E402
from harness import add_smallest  # noqa: E402
from profile_parts import (  # noqa: E402
    GIB,
    GIGABIT,
    HALF_RATE_SHARE,
    HUNDRED_GIGABIT,
    MEMORY_STATED,
    STATED,
    TEN_GIGABIT,
    USABLE,
    Card,
    Link,
    Shape,
    cluster,
    device,
    ends_like,
    model_of,
    sheet_cluster,
)

from hetero_mpi.planning.types.profile import ClusterProfile, Curve, DeviceProfile, HostProfile, LayerTimes  # noqa: E402
from hetero_mpi.planning.types.toml_files import save_profile  # noqa: E402

LLAMA_1B = Shape(2048, 16, 8192, 128256, 512)
LLAMA_3B = Shape(3200, 26, 8640, 32000, 3200)
LLAMA_7B = Shape(4096, 32, 11008, 32000, 4096)
LLAMA_8B = Shape(4096, 32, 14336, 128256, 1024)
LLAMA_13B = Shape(5120, 40, 13824, 32000, 5120)
LLAMA_30B = Shape(6656, 60, 17920, 32000, 6656)
LLAMA_70B = Shape(8192, 80, 28672, 32000, 1024)


half_rate_card = partial(Card, peak_share=HALF_RATE_SHARE)
RTX_5090 = half_rate_card("NVIDIA RTX 5090", "cuda", 32, 1792e9, 209.5e12, 48e9)
STRIX_HALO = Card("AMD Strix Halo (Radeon 8060S)", "rocm", 128, 256e9, 25.02e12, 50e9, offered=0.75, integrated=True)
"""Its peak makes a pass of Llama 8B's block, LoRA, 3243 / 289 times as long as on the RTX 5090."""
M4_MAX = Card("Apple M4 Max (40 GPU cores)", "mps", 64, 546e9, 18.4e12, 50e9, offered=0.75, integrated=True)
TITAN_X = Card("NVIDIA TITAN X (Pascal)", "cuda", 12, 480e9, 11e12, 12e9, ("fp32",))
A800 = Card("NVIDIA A800 80GB", "cuda", 80, 2039e9, 312e12, 24e9)
A100 = Card("NVIDIA A100 80GB", "cuda", 80, 2039e9, 312e12, 24e9)
RTX_4090 = half_rate_card("NVIDIA RTX 4090", "cuda", 24, 1008e9, 165.2e12, 24e9)
RTX_3090 = half_rate_card("NVIDIA RTX 3090", "cuda", 24, 936e9, 71e12, 24e9)
RTX_3080_TI = half_rate_card("NVIDIA RTX 3080 Ti", "cuda", 12, 912e9, 68e12, 24e9)
RTX_3060 = half_rate_card("NVIDIA RTX 3060 12GB", "cuda", 12, 360e9, 25.4e12, 6e9)
RTX_2080_TI = half_rate_card("NVIDIA RTX 2080 Ti", "cuda", 11, 616e9, 56.9e12, 12e9, ("fp32", "fp16"))
RTX_2060_12 = half_rate_card("NVIDIA RTX 2060 12GB", "cuda", 12, 336e9, 28.7e12, 12e9, ("fp32", "fp16"))
TYPE_A = Card("type A (made up)", "cuda", 64, 1600e9, 200e12, 24e9)
TYPE_B = Card("type B (made up)", "rocm", 64, 1200e9, 120e12, 24e9)
ZORSE_CARDS = {
    "l4": Card("NVIDIA L4", "cuda", 24, 300e9, 121e12),
    "a6000": Card("NVIDIA RTX A6000", "cuda", 48, 768e9, 154.8e12),
    "p40": Card("NVIDIA P40", "cuda", 24, 346e9, dtypes=("fp32", "fp16")),
    "w6800": Card("AMD Radeon Pro W6800", "rocm", 32, 512e9, dtypes=("fp32", "fp16")),
    "a10g": half_rate_card("NVIDIA A10G", "cuda", 24, 600e9, 70e12),
    "t4": Card("NVIDIA T4", "cuda", 16, 320e9, 65e12, dtypes=("fp32", "fp16")),
    "v100x16": Card("NVIDIA V100 16GB", "cuda", 16, 900e9, 125e12, dtypes=("fp32", "fp16")),
}
SAILOR_LIKE_BYTES_PER_S, SAILOR_UNLIKE_BYTES_PER_S = 2.8e9, 0.115e9
"""Rounded: every pair of like nodes is taken to have what the publication measured between Titan RTX nodes."""
SAILOR_GIB = {"RTX-3090": 24.0, "RTX-2080": 11.0, "Titan-RTX": 24.0}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_smallest(parser)
    parser.add_argument("--to", type=Path, default=ROOT / "profiles", metavar="DIRECTORY", help="where to write them")
    to = parser.parse_args().to
    for name, make in CLUSTERS.items():
        save_profile(make(), to / f"{name}.toml")
        print(to / f"{name}.toml")
    return 0


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
            "Only the ratio of the two cards (11.2) is published; the absolute speed follows from the RTX 5090's data sheet (209.5 "
            "TFLOPS bf16).",
            "Job: LoRA of rank 16 over NF4, Llama 3.1 8B shape, sequences of 1024; Strix Halo offers its GPU 96 of 128 GiB; "
            "Gigabit Ethernet.",
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
            "A mix of cards on which HexiScale was tried; one host per kind of card and 10 Gigabit Ethernet are assumed.",
            "Job: full training, Llama 2 7B shape, sequences of 2048.",
        ),
    )


def hexiscale_setting(number: int, hosts: Sequence[tuple[int, Card]], shape: Shape, model: str) -> ClusterProfile:
    """``hosts``: (cards, their kind) of every machine."""
    places = [(f"host{h}", card) for h, (count, card) in enumerate(hosts) for _ in range(count)]
    peaks = ", ".join(
        f"{card.name.removeprefix('NVIDIA ')} {card.peak / 1e12:g}" for card in dict.fromkeys(c for _, c in hosts)
    )
    return sheet_cluster(
        f"hexiscale-setting-{number}",
        f"derived from data sheets (dense bf16 TFLOPS with fp32 accumulation: {peaks})",
        places,
        shape,
        "bf16",
        4096,
        TEN_GIGABIT,
        (
            f"Setting {number} of the three on which HexiScale was compared with A100s of as many FLOPS in all: machines and cards "
            f"from the README of Relaxed-System-Lab/FlashFlex, as the project was first called.",
            "10 Gigabit Ethernet between machines is assumed: published is that they were connected by TCP.",
            f"Job: full training, Llama 2 {model} shape, sequences of 4096 (its scheduler's). HexiScale also divides layers "
            "among the GPUs of a machine (tensor parallelism); this program can, but not by this profile, which lacks the number "
            "of heads.",
        ),
    )


HEXISCALE_SETTINGS = {
    1: ([(8, RTX_3080_TI), (8, RTX_3090), *([(8, RTX_4090)] * 3)], LLAMA_13B, "13B"),
    2: ([(8, RTX_3080_TI), (8, RTX_3090), (8, RTX_4090), (8, A100)], LLAMA_13B, "13B"),
    3: ([(8, RTX_3090), *([(4, RTX_4090)] * 2), *([(8, RTX_4090)] * 4), (8, A100)], LLAMA_30B, "30B"),
}


def hethub() -> ClusterProfile:
    places = [(f"a{i // 8}", TYPE_A) for i in range(128)] + [(f"b{i // 8}", TYPE_B) for i in range(640)]
    return sheet_cluster(
        "hethub-128-640",
        "derived from nothing measured: a synthetic cluster of two types in HetHub's numbers (128 + 640 accelerators)",
        places,
        LLAMA_70B,
        "bf16",
        2048,
        HUNDRED_GIGABIT,
        (
            "Made up: type A has 200 TFLOPS, type B 120, both 64 GiB, 8 per host, 100 Gbit/s between hosts.",
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


@dataclass(frozen=True)
class Home:
    """Machines of one home: (host, card) of every rank, memory of each host in GiB."""

    places: Sequence[tuple[str, Card]]
    memory: dict[str, float]
    note: str

    def profile(self, name: str, model: moe_parts.Mixture, way: moe_parts.Way) -> ClusterProfile:
        cost = moe_parts.cost_of(model, way)
        kinds = {layer.kind for layer in cost.layers}
        devices = [device(r, h, c, moe_parts.times_of(c, model, way, kinds)) for r, (h, c) in enumerate(self.places)]
        notes = [self.note, *moe_parts.STATED, MEMORY_STATED]
        found = cluster(name, moe_parts.SOURCE, cost, devices, GIGABIT, notes)
        hosts = {host.name: host for host in found.hosts}
        told = [
            hosts[host]
            if host in hosts and hosts[host].memory_bytes
            else HostProfile(host, int(gib * GIB), f"{gib:g} GiB (assumed)", host in hosts and hosts[host].shared_nic)
            for host, gib in self.memory.items()
        ]
        return replace(found, hosts=tuple(told))


HOMES = {
    "moe-4090-3060": Home(
        [("desktop", RTX_4090), ("desktop", RTX_3060)],
        {"desktop": 58},
        "One desktop of 64 GiB, the RTX 3060 in a slot of 4 lanes.",
    ),
    "moe-5090-strix-halo": Home(
        [("desktop", RTX_5090), ("mini-pc", STRIX_HALO)],
        {"desktop": 58, "mini-pc": 96},
        "A desktop of 64 GiB and a mini PC of 128 GiB, over Gigabit Ethernet; Strix Halo's speed as in homelab-5090-strix-halo.",
    ),
    "moe-two-old-boxes": Home(
        [("old-a", RTX_2080_TI), ("old-b", RTX_2060_12)],
        {"old-a": 28, "old-b": 28},
        "Two machines of 2019 with 32 GiB each, over Gigabit Ethernet; Turing has no bf16, so the job is fp16.",
    ),
}
"""Where experts in 4 bits are fine-tuned; the files of ``profiles/`` are of Qwen3-30B-A3B."""


def home_moe(name: str) -> ClusterProfile:
    home = HOMES[name]
    dtype = "bf16" if all("bf16" in card.dtypes for _, card in home.places) else "fp16"
    return home.profile(name, moe_parts.QWEN3_30B, moe_parts.Way(nf4=True, adapted_experts=False, dtype=dtype))


_TEN = "10 Gigabit Ethernet: assumed."


def sailor(name: str, nodes: Sequence[published_runs.Node], hosts: Sequence[str], note: str) -> ClusterProfile:
    times = published_runs.read_times(published_runs.DATA / "sailor_opt350m_layers.csv")
    devices = []
    for rank, (node, host) in enumerate(zip(nodes, hosts, strict=True)):
        found = published_runs.device_of(rank, node, times)
        card = Card(node.gpu, "cuda", SAILOR_GIB[node.gpu], 0.0)
        reason = f"{100 * USABLE:.0f} % of {card.gib:g} GiB less 1.75 GB, times {node.gpus} (assumed)"
        devices.append(replace(found, host=host, memory_bytes=card.memory_bytes(node.gpus), memory_reason=reason))

    def between(a: DeviceProfile, b: DeviceProfile) -> Link:
        return 0.0, SAILOR_LIKE_BYTES_PER_S if a.name == b.name else SAILOR_UNLIKE_BYTES_PER_S

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
    **{name: partial(home_moe, name) for name in HOMES},
    "sailor-6-nodes": sailor_nodes,
    "sailor-6-gpus": sailor_gpus,
    "zorse-2xl4-a6000-p40": zorse_p40,
    "zorse-2xa6000-2xw6800": zorse_w6800,
    "zorse-4xa10g-4xt4-4xv100": zorse_cloud,
    "hexiscale-3xa800-3x4090-2x3090": hexiscale,
    **{f"hexiscale-setting-{n}": partial(hexiscale_setting, n, *given) for n, given in HEXISCALE_SETTINGS.items()},
    "hethub-128-640": hethub,
}
"""File name without its ending -> what makes it."""

if __name__ == "__main__":
    sys.exit(main())
