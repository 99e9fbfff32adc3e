"""What does it bring that two CPU ranks of one host hold a stage together? One sequence a step, which pipelines cannot share.

    python benchmarks/groups.py [--hidden 1024] [--length 256] [--rounds 3] [--json FILE] [--check]

Whole runs of ``train`` on 2 ranks of a core each, profile included, which take turns: all layers on rank 0 (rank 1 idles), and both
ranks with half of the key/value heads each. Printed: medians of the predicted and of the measured step, and of their ratio. The
machine must be idle otherwise. ``--check`` exits 1 where the group is not 1.3 times as fast as the rank, or its step not within
15 % of the prediction.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from harness import llama_job, parser_of, predicted_and_measured_s, require_cores  # noqa: E402

from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan  # noqa: E402

GAIN, ERROR = 1.3, 0.15
RANKS, BLOCKS, HEADS, STEPS = 2, 4, 8, 12
STAGES = {
    "one rank": StagePlan((0,), 0, BLOCKS + 2, 0),
    "two ranks, a half each": StagePlan((0, 1), 0, BLOCKS + 2, 0, shares=(HEADS // 2, HEADS // 2)),
}


def main() -> int:
    parser = parser_of(__doc__, hidden=64, length=32, rounds=1)
    parser.add_argument("--hidden", type=int, default=1024, metavar="N", help="width of the model")
    parser.add_argument("--length", type=int, default=256, metavar="N", help="tokens of the sequence")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="runs of both")
    arguments = parser.parse_args()
    require_cores(RANKS)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in STAGES}
    for turn in range(arguments.rounds):
        for name, stage in STAGES.items():
            found[name].append(run(stage, arguments.hidden, arguments.length))
            predicted_s, measured_s = found[name][-1]
            print(
                f"round {turn + 1}, {name}: {1e3 * predicted_s:.0f} ms predicted, {1e3 * measured_s:.0f} ms measured",
                flush=True,
            )
    error = 0.0
    for name, seen in found.items():
        predicted_s, measured_s = (median(one[at] for one in seen) for at in (0, 1))
        error = max(error, abs(median(measured / predicted for predicted, measured in seen) - 1))
        print(f"{name:<24} {1e3 * predicted_s:>7.0f} ms predicted {1e3 * measured_s:>7.0f} ms measured")
    alone, together = found.values()
    gain = median(a[1] / b[1] for a, b in zip(alone, together, strict=True))
    print(
        f"two ranks are {gain:.2f} times as fast as one (bar {GAIN}); worst error of the prediction {100 * error:.0f} %"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps({"gain": gain, "error": error, "runs": found}, indent=1) + "\n")
    return int(arguments.check and (gain < GAIN or error > ERROR))


def run(stage: StagePlan, hidden: int, length: int) -> tuple[float, float]:
    """(predicted, measured) seconds per step of one run that measures its machine first."""
    config = {
        "hidden_size": hidden,
        "intermediate_size": 64 * round(hidden * 2.75 / 64),
        "num_hidden_layers": BLOCKS,
        "num_attention_heads": 16,
        "num_key_value_heads": HEADS,
    }
    others = {"checkpoint": {"every": 0}, "plan": {"rebalance": False}, "report": {"write": False}}
    job = llama_job(config, 2048, ("asyncio", "json"), length, {"steps": STEPS, "global_batch": 1}, **others)
    return predicted_and_measured_s(RANKS, job, Plan((PipelinePlan((stage,), 1, 1),), 1, length, BLOCKS + 2))


if __name__ == "__main__":
    sys.exit(main())
