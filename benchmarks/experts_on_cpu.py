"""Does a processor beside a card hold the experts of a mixture, and how much faster is that than streaming them? By prediction.

    python benchmarks/experts_on_cpu.py [--only NAME] [--processors NAME ...] [--json FILE] [--check]

Qwen3's mixtures on an RTX 4090 and the processor of its host, in 4 bits and in 16, LoRA on attention, or on the experts too;
sequences of 512 tokens. Each row is planned for three processors, and without any: the card by itself, streaming from the host's
memory with slices kept as the planner likes. ``experts``: so many of each layer are computed by the processor; then the plan's own
reasons are printed.

The processors' operations per second:

* AMX: experts in bf16 as KTransformers measured them on a Xeon Platinum 8488C (``published_offload``), reading included, and all
  else at a quarter of that, as its doc/en/AMX.md has the rate of PyTorch's general AMX kernel beside its own;
* PyTorch's AMX: experts at a quarter, too, which is nearer to what this program's own products reach;
* AVX-512: an eighth of AMX, by the same page, for everything;
* AVX2: a desktop's AMD Ryzen 9 5950X, 16 cores of 32 fp32 operations a cycle at 3.4 GHz (data sheet), times ``PROCESSOR_SHARE``.

What the card and the links take follows from data sheets as ``moe_parts`` has it. Nothing here is measured on such a machine.
``--check`` exits 1 where the processor with AMX has no
experts in any row, the one with AVX2 has some, or a plan is slower than the card's own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from harness import parser_of  # noqa: E402
from make_profiles import RTX_4090  # noqa: E402
from moe_parts import QWEN3_30B, QWEN3_235B, SEQUENCE, SOURCE, Mixture, Way, cost_of, times_of  # noqa: E402
from profile_parts import GIB, GIGABIT, Card, cluster, device  # noqa: E402
from published_offload import BACKWARD_PER_S, FORWARD_PER_S  # noqa: E402

from hetero_mpi.planning.decision.planner import make_plan  # noqa: E402
from hetero_mpi.planning.types.plan import PlanReport  # noqa: E402
from hetero_mpi.planning.types.profile import ClusterProfile, HostProfile  # noqa: E402
from hetero_mpi.planning.types.request import PlanRequest  # noqa: E402
from hetero_mpi.util.errors import UserError  # noqa: E402

HOST_GIB = 512.0
"""Eight channels of memory modules."""
AMX_PER_S = (FORWARD_PER_S + 2 * BACKWARD_PER_S) / 3
PYTORCH_SHARE = 1 / 4
AVX512_SHARE = 1 / 8
PROCESSOR_SHARE = 0.4
"""Of a data sheet's peak, on a processor (assumed)."""
RYZEN_PEAK = 16 * 32 * 3.4e9
XEON = Card(
    "Intel Xeon Platinum 8488C with AMX", "cpu", HOST_GIB, 307e9, AMX_PER_S / PROCESSOR_SHARE, 0.0, integrated=True
)
XEON = replace(XEON, peak_share=PROCESSOR_SHARE)
"""Eight channels of DDR5-4800 (data sheet)."""
PROCESSORS = {
    "AMX": XEON,
    "PyTorch's AMX": replace(XEON, peak=PYTORCH_SHARE * XEON.peak),
    "AVX-512": replace(XEON, name="Intel Xeon Platinum 8488C without AMX", peak=AVX512_SHARE * XEON.peak),
    "AVX2": replace(XEON, name="AMD Ryzen 9 5950X", peak=RYZEN_PEAK, memory_bytes_per_s=51.2e9),
}
PACKED, WIDE, ADAPTED = Way(True, False), Way(False, False), Way(False, True)
JOBS = {
    "30B-A3B, 4 bits, 16 sequences": (QWEN3_30B, PACKED, 16),
    "30B-A3B, 16 bits, 16 sequences": (QWEN3_30B, WIDE, 16),
    "30B-A3B, 16 bits, 2 sequences": (QWEN3_30B, WIDE, 2),
    "30B-A3B, 16 bits, experts adapted, 2 sequences": (QWEN3_30B, ADAPTED, 2),
    "235B-A22B, 16 bits, 16 sequences": (QWEN3_235B, WIDE, 16),
}
"""Name -> (model, way, sequences a step)."""


@dataclass(frozen=True)
class Row:
    alone: PlanReport | None
    """On the card by itself."""
    beside: dict[str, PlanReport | None]
    """Processor -> on both."""

    @property
    def cells(self) -> list[str]:
        return [told(self.alone), *map(told, self.beside.values())]


def main() -> int:
    parser = parser_of(__doc__, only="16 bits, 2 sequences", processors=["AVX2"])
    parser.add_argument("--only", default="", metavar="NAME", help="only rows whose name contains this")
    parser.add_argument("--processors", nargs="+", choices=PROCESSORS, default=list(PROCESSORS), metavar="NAME")
    arguments = parser.parse_args()
    cards, unsound = {name: PROCESSORS[name] for name in arguments.processors}, []
    rows = {name: row_of(*job, cards) for name, job in JOBS.items() if arguments.only in name}
    print("| Qwen3, tokens/s by prediction | RTX 4090 alone |" + "".join(f" and {name} |" for name in cards))
    print("| --- |" + " --- |" * (1 + len(cards)))
    for name, row in rows.items():
        cells = row.cells
        print(f"| {name} | " + " | ".join(cells) + " |")
        for processor, report in row.beside.items():
            if report is not None and row.alone is not None:
                worse = report.predicted_step_s > row.alone.predicted_step_s
                unsound += [f"{name}, {processor}"] * worse
    for name, row in rows.items():
        for processor, report in row.beside.items():
            for reason in report.reasons if report is not None and grouped(report) else ():
                print(f"{name}, {processor}: {reason}")
    with_experts = {name for row in rows.values() for name, report in row.beside.items() if grouped(report)}
    if "AMX" not in with_experts or "AVX2" in with_experts:
        unsound.append(f"experts on {', '.join(sorted(with_experts)) or 'none'}")
    if arguments.json:
        found = {name: row.cells for name, row in rows.items()}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    print(f"not sound: {', '.join(unsound) or 'none'}")
    return int(arguments.check and bool(unsound))


def row_of(model: Mixture, way: Way, sequences: int, cards: Mapping[str, Card]) -> Row:
    alone = planned(profile_of(model, way, None), sequences)
    return Row(alone, {name: planned(profile_of(model, way, card), sequences) for name, card in cards.items()})


def profile_of(model: Mixture, way: Way, processor: Card | None) -> ClusterProfile:
    """A host with the card, and with its processor as a second rank."""
    cost = cost_of(model, way)
    kinds = {layer.kind for layer in cost.layers}
    devices = []
    for rank, card in enumerate([RTX_4090] if processor is None else [RTX_4090, processor]):
        rest = PYTORCH_SHARE if card is XEON else 1.0
        whole, half, without = (
            times_of(card, model, way, kinds, heads, experts, rest)
            for heads, experts in ((1.0, 1.0), (0.5, 0.5), (0.5, 0.0))
        )
        one = device(rank, "box", card, whole)
        one = replace(one, halved=half, without_experts=without)
        if card.backend == "cpu":
            free = {"device_to_host_bytes_per_s": float("inf"), "host_to_device_bytes_per_s": float("inf")}
            one = replace(one, copy_latency_s=0.0, **free)
        devices.append(one)
    host = HostProfile("box", int(0.94 * HOST_GIB * GIB), f"94 % of {HOST_GIB:g} GiB (assumed)")
    return replace(cluster("experts-on-cpu", SOURCE, cost, devices, GIGABIT, ()), hosts=(host,))


def planned(profile: ClusterProfile, sequences: int) -> PlanReport | None:
    sizes = tuple(size for size in (1, 2, 4, 8) if size <= sequences)
    request = PlanRequest(
        sequences,
        SEQUENCE,
        sizes,
        max_pipelines=len(profile.devices),
        recompute_choices=(False, True),
        streaming="auto",
        groups=True,
    )
    try:
        return make_plan(profile, request)
    except UserError:
        return None


def grouped(report: PlanReport | None) -> bool:
    """Has the processor experts of the card's layers?"""
    return report is not None and any(stage.grouped for _, _, stage in report.plan.numbered)


def told(report: PlanReport | None) -> str:
    if report is None:
        return "-"
    stages = [stage for _, _, stage in report.plan.numbered]
    streams = " streams" * any(stage.streamed for stage in stages)
    shared = "".join(f" ({stage.experts[1]} experts)" for stage in stages if stage.grouped and stage.experts)
    return f"{report.plan.global_batch * SEQUENCE / report.predicted_step_s:,.0f}{streams}{shared}"


if __name__ == "__main__":
    sys.exit(main())
