"""Do real ranks take the time that was predicted for them? Whole runs of ``train``, profile included, on one core per rank.

    python benchmarks/prediction.py [--only NAME] [--rounds 3] [--json FILE] [--check]

The check of profile, simulator and runtime together: nothing is emulated, and a prediction knows the machine from its own benchmark
alone, made anew in every round. Jobs take turns, so that a machine that changes its speed hits all alike. Printed: the median
over the rounds of predicted and of measured step (each the median of its steps), and of their ratio. About half a minute per
round and job on two cores; the machine must be idle otherwise, and have a core for every rank.
``--check`` exits 1 where the median ratio of a job is not within 15 %.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from harness import llama_job, parser_of, predicted_and_measured_s, require_cores  # noqa: E402

BAR = 0.15
RANKS = 2


@dataclass(frozen=True)
class Trial:
    """A job."""

    name: str
    hidden: int
    intermediate: int
    blocks: int
    vocabulary: int
    batch: int
    micro_batch: int | str = "auto"
    tied: bool = True
    adapter: str = "none"
    steps: int = 12


TRIALS = (
    Trial("quickstart's model", 192, 512, 6, 2048, 32),
    Trial("a wider model, micro-batch 1", 256, 688, 8, 2048, 8, 1, False),
    Trial("LoRA", 384, 1024, 6, 2048, 16, adapter="lora"),
)


@dataclass
class Result:
    """Seconds per step of every round."""

    name: str
    predicted_s: list[float] = field(default_factory=list)
    measured_s: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """measured / predicted within a round, the median over the rounds."""
        pairs = zip(self.measured_s, self.predicted_s, strict=True)
        return statistics.median(measured / predicted for measured, predicted in pairs)


def main() -> int:
    arguments = _arguments()
    require_cores(RANKS)
    chosen = [trial for trial in TRIALS if arguments.only is None or arguments.only in trial.name]
    results = [Result(trial.name) for trial in chosen]
    for turn in range(arguments.rounds):
        for trial, result in zip(chosen, results, strict=True):
            predicted_s, measured_s = run(trial)
            result.predicted_s.append(predicted_s)
            result.measured_s.append(measured_s)
            print(f"round {turn + 1}, {trial.name}: {1e3 * predicted_s:.0f} ms predicted, {1e3 * measured_s:.0f} ms measured "
                  f"({measured_s / predicted_s:.3f})", flush=True)  # fmt: skip
    print(f"{'job, ' + str(RANKS) + ' ranks':<30} {'predicted':>12} {'measured':>12} {'measured / predicted':>22}")
    for result in results:
        predicted_s, measured_s = statistics.median(result.predicted_s), statistics.median(result.measured_s)
        print(f"{result.name:<30} {1e3 * predicted_s:>9.0f} ms {1e3 * measured_s:>9.0f} ms {result.ratio:>22.3f}")
    worst = max(abs(result.ratio - 1) for result in results)
    if arguments.json:
        rows = [{**asdict(result), "ratio": result.ratio} for result in results]
        arguments.json.write_text(json.dumps({"worst_error": worst, "bar": BAR, "rows": rows}, indent=1) + "\n")
    print(f"worst |measured / predicted - 1|: {100 * worst:.1f} % (bar {100 * BAR:.0f} %)")
    return int(arguments.check and worst > BAR)


def run(trial: Trial) -> tuple[float, float]:
    """(predicted, measured) seconds per step of one run that measures its machine first."""
    config = {
        "hidden_size": trial.hidden,
        "intermediate_size": trial.intermediate,
        "num_hidden_layers": trial.blocks,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 512,
        "tie_word_embeddings": trial.tied,
    }
    train = {"steps": trial.steps, "global_batch": trial.batch, "micro_batch": trial.micro_batch}
    sources, adapter = ("asyncio", "json", "unittest"), {"method": trial.adapter}
    return predicted_and_measured_s(RANKS, llama_job(config, trial.vocabulary, sources, 128, train, adapter=adapter))


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, only="quickstart", rounds=1)
    parser.add_argument("--only", metavar="NAME", help="only jobs whose name contains this")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="runs of every job")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
