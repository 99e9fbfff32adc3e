"""Which mixtures of experts fit on which two cards at home, and how fast are they fine-tuned? By prediction, from data sheets.

    python benchmarks/moe_machines.py [--only NAME] [--ways NAME ...] [--json FILE] [--check]

Qwen3-30B-A3B and gpt-oss-20b on the three ``moe-*`` clusters of ``profiles/``: in 4 bits with adapters on attention, or on the
experts too, and in 16 bits. 16 sequences of 512 tokens per step. For the fastest card alone, without streaming, and for both
as planned: tokens per second, and how many cards the plan uses. ``-``: it does not fit.

Last come two measurements of others on an RTX 4090, beside the rule by which the times are derived (``moe_parts``): they are not
fitted. ``--check`` exits 1 where no plan for both cards fits in 4 bits with adapters on attention, or one is slower than a card
alone.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from harness import parser_of  # noqa: E402
from make_profiles import HOMES, RTX_4090, Home  # noqa: E402
from moe_parts import MODELS, SEQUENCE, Mixture, Way, times_of  # noqa: E402

from hetero_mpi.planning.decision.planner import make_plan  # noqa: E402
from hetero_mpi.planning.types.plan import PlanReport  # noqa: E402
from hetero_mpi.planning.types.profile import ClusterProfile  # noqa: E402
from hetero_mpi.planning.types.request import PlanRequest  # noqa: E402
from hetero_mpi.util.errors import UserError  # noqa: E402

BATCH, BLOCK = 16, "block"
SMALLEST = Way(nf4=True, adapted_experts=False)
WAYS = {
    "4 bits": SMALLEST,
    "4 bits, experts adapted": Way(nf4=True, adapted_experts=True),
    "16 bits": Way(nf4=False, adapted_experts=False),
}
OLMOE = Mixture("olmoe", 2048, 16, 16, 16, 128, 64, 8, 1024, 50304, {"num_experts": 64, "intermediate_size": 1024})


@dataclass(frozen=True)
class Cell:
    alone: PlanReport | None
    planned: PlanReport | None
    """On both, with streaming left to the planner."""

    @property
    def text(self) -> str:
        stages = [] if self.planned is None else [stage for _, _, stage in self.planned.plan.numbered]
        offloaded = ", offloaded" * any(stage.streamed for stage in stages)
        used = f" ({len(self.planned.plan.ranks)}{offloaded})" if self.planned is not None else ""
        return f"{_speed(self.alone)} | {_speed(self.planned)}{used}"

    @property
    def gain(self) -> float | None:
        """Speed of both as a multiple of the best card alone, where it fits on one."""
        if self.alone is None or self.planned is None:
            return None
        return self.alone.predicted_step_s / self.planned.predicted_step_s


def main() -> int:
    parser = parser_of(__doc__, only="gpt-oss-20b on two-old-boxes", ways=["4 bits"])
    parser.add_argument("--only", default="", metavar="NAME", help="only rows whose name contains this")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="NAME", help="to hold the model")
    arguments = parser.parse_args()
    ways = {name: WAYS[name] for name in arguments.ways}
    found: dict[str, dict[str, str]] = {}
    unsound, gains = [], []
    print("| tokens/s by prediction: best GPU alone, both |" + "".join(f" {way} | |" for way in ways))
    print("| --- |" + " --- | --- |" * len(ways))
    for model in MODELS:
        for name, home in HOMES.items():
            row = f"{model} on {name.removeprefix('moe-')}"
            if arguments.only not in row:
                continue
            cells = {way: cell(home, model, given) for way, given in ways.items()}
            found[row] = {way: one.text for way, one in cells.items()}
            gains += [one.gain for way, one in cells.items() if one.gain is not None and WAYS[way].nf4]
            print(f"| {row} | " + " | ".join(found[row].values()) + " |", flush=True)
            small = cells.get("4 bits")
            if small is None:
                continue
            if small.planned is None or (small.alone and small.planned.predicted_step_s > small.alone.predicted_step_s):
                unsound.append(row)
    if gains:
        print(
            f"in 4 bits, plans are {100 * min(gains) - 100:.0f} to {100 * max(gains) - 100:.0f} % faster than the best GPU alone"
        )
    _others()
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    print(f"not sound: {', '.join(unsound) or 'none'}")
    return int(arguments.check and bool(unsound))


def cell(home: Home, model: str, way: Way) -> Cell:
    dtype = "bf16" if all("bf16" in card.dtypes for _, card in home.places) else "fp16"
    profile = home.profile(model, MODELS[model], replace(way, dtype=dtype))
    alone = [
        report
        for device in profile.devices
        if (report := _plan(replace(profile, devices=(replace(device, rank=0),), links=()), "never")) is not None
    ]
    best = min(alone, key=lambda report: report.predicted_step_s, default=None)
    return Cell(best, _plan(profile, "auto"))


def _plan(profile: ClusterProfile, streaming: str) -> PlanReport | None:
    request = PlanRequest(
        BATCH,
        SEQUENCE,
        (1, 2, 4, 8),
        max_pipelines=len(profile.devices),
        recompute_choices=(False, True),
        streaming=streaming,
    )
    try:
        return make_plan(profile, request)
    except UserError:
        return None


def _speed(report: PlanReport | None) -> str:
    return "-" if report is None else f"{BATCH * SEQUENCE / report.predicted_step_s:,.0f}"


def _others() -> None:
    """A layer and a step that others measured on an RTX 4090, beside the rule."""
    times = times_of(RTX_4090, MODELS["gpt-oss-20b"], Way(nf4=False, adapted_experts=False), [BLOCK])
    print(
        f"a block of gpt-oss-20b in bf16, 8,192 tokens, forward: {1e3 * times[BLOCK].forward_s.at(8192):.1f} ms by the rule, "
        f"21.6 ms measured (RoundPipe, arXiv:2604.27085)"
    )
    times = times_of(RTX_4090, OLMOE, SMALLEST, [BLOCK])
    seconds = {kind: one.forward_s.at(2048) + one.backward_s.at(2048) for kind, one in times.items()}
    step_s = sum(seconds.values()) + (OLMOE.blocks - 1) * seconds[BLOCK]
    print(
        f"a step of OLMoE-1B-7B in 4 bits, 2,048 tokens: {step_s:.2f} s by the rule, 1.62 s measured of another program "
        f"(experts4bit-qlora)"
    )


if __name__ == "__main__":
    sys.exit(main())
