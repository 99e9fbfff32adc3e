"""How fast is a streamed stage beside a resident one, and one that keeps slices? The same LoRA job under four plans, on real ranks.

    python benchmarks/streaming.py [--rounds 3] [--quantization none|nf4] [--json FILE] [--check]

Two CPU ranks hold half of a Llama of 74 M parameters each (fp32, or NF4), one thread per rank. All plans compute micro-batches of
4 sequences of 128 tokens in slices of one. *resident* and *streamed* repeat forwards; *2 kept* and *4 kept* are streamed, too, and
keep the activations of so many slices. Streamed weights come from mapped files, which are in the page cache. The runs alternate;
the time of a step is the median of each, without the first two. ``--check``: the streamed step is no longer than 1 / 0.9 of the
resident one, the one that keeps all is 1.15 times as fast, and predictions are within 15 %.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from harness import output_of_ranks, parser_of  # noqa: E402

from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan  # noqa: E402
from hetero_mpi.planning.types.toml_files import load_report, save_plan  # noqa: E402
from hetero_mpi.rundir.metrics import read_metrics  # noqa: E402

BLOCKS, STEPS = 10, 8
JOB = """
[model]
quantization = "{quantization}"
[model.config]
model_type = "llama"
vocab_size = 2048
hidden_size = 768
intermediate_size = 2048
num_hidden_layers = 10
num_attention_heads = 12
[tokenizer]
train_vocab_size = 300
[adapter]
method = "lora"
rank = 4
[data]
text = ["text.txt"]
sequence_length = 128
evaluation_fraction = 0.0
[train]
steps = 8
global_batch = 8
micro_batch = 4
[cluster]
threads = 1
[plan]
rebalance = false
[report]
write = false
"""
LEAST_SPEED, LEAST_GAIN, MOST_OFF = 0.9, 1.15, 0.15
KEPT = {"resident": None, "streamed": 0, "2 kept": 2, "4 kept": 4}
"""Plan -> slices that a streamed stage keeps; None: it is not streamed."""


def main() -> int:
    parser = parser_of(__doc__, rounds=1)
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="runs of each plan")
    parser.add_argument("--quantization", choices=("none", "nf4"), default="none")
    arguments = parser.parse_args()
    seconds: dict[str, list[float]] = {way: [] for way in KEPT}
    predicted: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text.txt").write_text("\n".join(f"line {i} of a text that nobody reads" for i in range(4000)))
        (folder / "job.toml").write_text(JOB.format(quantization=arguments.quantization))
        _run(["profile", str(folder / "job.toml"), "-o", str(folder / "profile.toml")])
        for way in seconds:
            save_plan(_plan(KEPT[way]), folder / f"{way}.toml")
        for number in range(arguments.rounds):
            for way, found in seconds.items():
                run = folder / f"{way}-{number}"
                plans = ["--profile", str(folder / "profile.toml"), "--plan", str(folder / f"{way}.toml")]
                _run(["train", str(folder / "job.toml"), "--run-dir", str(run), *plans])
                steps = [step.step_s for step in read_metrics(run / "metrics.jsonl").steps][2:]
                found.append(median(steps))
                predicted[way] = load_report(run / "plan.toml").predicted_step_s
    times = {way: median(found) for way, found in seconds.items()}
    for way, step_s in times.items():
        print(f"{way:>9}: {step_s:.3f} s per step measured ({json.dumps([round(s, 3) for s in seconds[way]])}), "
              f"{predicted[way]:.3f} s predicted")  # fmt: skip
    speed, gain = times["resident"] / times["streamed"], times["streamed"] / times["4 kept"]
    off = {way: times[way] / predicted[way] - 1 for way in KEPT if way != "resident"}
    print(
        f"streamed: {speed:.3f} of the resident speed (bar {LEAST_SPEED}); with all slices kept {gain:.3f} times as fast (bar "
        f"{LEAST_GAIN})"
    )
    print(f"beside predictions: {', '.join(f'{way} {share:+.1%}' for way, share in off.items())} (bar {MOST_OFF:.0%})")
    missed = speed < LEAST_SPEED or gain < LEAST_GAIN or max(map(abs, off.values())) > MOST_OFF
    if arguments.json:
        arguments.json.write_text(json.dumps({"measured_s": seconds, "predicted_s": predicted}, indent=1) + "\n")
    return int(arguments.check and missed)


def _plan(kept: int | None) -> Plan:
    middle, resident = 1 + BLOCKS // 2, kept is None
    first = StagePlan((0,), 0, middle, 1, resident, not resident, slice_sequences=1, kept_slices=kept or 0)
    second = replace(first, ranks=(1,), first=middle, last=BLOCKS + 2, warm_up=0)
    return Plan((PipelinePlan((first, second), 4, 8),), 8, 128, BLOCKS + 2)


def _run(arguments: list[str]) -> None:
    output_of_ranks(2, ["-m", "hetero_mpi", *arguments])


if __name__ == "__main__":
    sys.exit(main())
