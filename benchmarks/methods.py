"""Every way to train under every kind of plan: by how much do the losses of three steps differ from one plain process?

    python benchmarks/methods.py [--only NAME ...] [--plans NAME ...] [--json FILE] [--check]

Three CPU ranks, fp32, a Llama of four blocks; the other side is the loop of ``tests/support/plain_training.py``: transformers,
peft, bitsandbytes and torch in one process. Printed is the largest relative difference of a loss; ``refused``: the program says by
name that it does not do this. ``--check`` exits 1 at 1e-6 and more.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from harness import parser_of  # noqa: E402

from tests.support.equality import Bench, losses  # noqa: E402
from tests.support.training_cases import Case  # noqa: E402

RANKS, BAR = 3, 1e-6
METHODS: dict[str, Mapping[str, Any]] = {
    "full fine-tuning": {},
    "full, 8-bit optimizer states": {"optimizer": "adamw_8bit"},
    "full, Adafactor": {"optimizer": "adafactor"},
    "full, Muon": {"optimizer": "muon"},
    "full, some layers frozen": {"further": ("frozen",)},
    "full, learning rates by name": {"further": ("rates",)},
    "NEFTune": {"further": ("noise",)},
    "LoRA": {"tuning": "lora"},
    "LoRA+": {"tuning": "lora", "further": ("plus",)},
    "rsLoRA, patterns": {"tuning": "patterns"},
    "DoRA": {"tuning": "dora"},
    "PiSSA": {"tuning": "pissa"},
    "OLoRA": {"tuning": "olora"},
    "LoRA, embedding and head trained": {"tuning": "lora-saved"},
    "LoRA, token rows": {"tuning": "lora-tokens"},
    "LoRA, Muon": {"tuning": "lora", "optimizer": "muon"},
    "LoRA over NF4": {"tuning": "nf4"},
    "PiSSA over NF4": {"tuning": "nf4-pissa"},
}
PLANS: dict[str, Mapping[str, Any]] = {
    "pipeline": {"split": "uneven"},
    "V-shaped": {"split": "V", "schedule": "zbv"},
    "data parallel": {"split": "even", "pipelines": "two"},
    "tensor parallel": {"split": "even", "pipelines": "groups"},
    "offloaded": {"split": "even", "streamed": True, "slice_sequences": 1},
}


def main() -> int:
    parser = parser_of(__doc__, only=["LoRA"], plans=["pipeline"])
    parser.add_argument(
        "--only", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME", help="ways to train"
    )
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=list(PLANS), metavar="NAME", help="kinds of plans")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, dict[str, float | None]] = {}
    print(f"| | {' | '.join(arguments.plans)} |\n| --- |{' --- |' * len(arguments.plans)}")
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        for method in arguments.only:
            found[method] = {plan: difference(bench, method, plan) for plan in arguments.plans}
            row = (_text(one) for one in found[method].values())
            print(f"| {method} | {' | '.join(row)} |", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    worst = max(one for row in found.values() for one in row.values() if one is not None)
    print(f"largest: {worst:.1e} (bar {BAR:.0e})")
    return int(arguments.check and worst >= BAR)


def difference(bench: Bench, method: str, plan: str) -> float | None:
    """None: refused."""
    given = {**PLANS[plan], **METHODS[method]}
    name = f"{method} {plan}".replace(" ", "-").replace(",", "").replace("+", "-plus")
    case = Case(name, "llama", False, 0.0, True, 2, **given)
    try:
        run = bench.run(RANKS, case)
    except AssertionError as error:
        if "hetero_mpi.util.errors.UserError" in str(error) or "UserError" in str(error) or "refuse" in str(error):
            return None
        raise
    reference = bench.reference(case).losses
    return float(np.max(np.abs(np.array(losses(run)) / np.array(reference) - 1)))


def _text(found: float | None) -> str:
    return "refused" if found is None else "0" if found == 0 else f"{found:.0e}".replace("e-0", "e-")


if __name__ == "__main__":
    sys.exit(main())
