"""How fast is a streamed stage beside a resident one? The same LoRA job under two plans, on real ranks.

    python benchmarks/streaming.py [--rounds 3] [--quantization none|nf4] [--check]

Two CPU ranks hold half of a Llama of 74 M parameters each (fp32, or NF4), one thread per rank. Both plans compute micro-batches of
4 sequences of 128 tokens in slices of one and repeat forwards; in one of them both stages are streamed from mapped files, which are
in the page cache. The runs alternate; the time of a step is the median of each, without the first two. ``--check``: the streamed
step is no longer than 1 / 0.9 of the resident one, and its prediction within 15 %.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from hetero_mpi.launch.launcher.command_line import build_command  # noqa: E402
from hetero_mpi.launch.launcher.launcher import find_launcher  # noqa: E402
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan  # noqa: E402
from hetero_mpi.planning.types.toml_files import load_report, save_plan  # noqa: E402
from hetero_mpi.report.run_files.metrics import read_metrics  # noqa: E402

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
held_out = 0.0
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
LEAST_SPEED, MOST_OFF = 0.9, 0.15


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="runs of each plan")
    parser.add_argument("--quantization", choices=("none", "nf4"), default="none")
    parser.add_argument("--check", action="store_true", help="exit 1 where a bar is missed")
    arguments = parser.parse_args()
    seconds: dict[str, list[float]] = {"resident": [], "streamed": []}
    predicted: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text.txt").write_text("\n".join(f"line {i} of a text that nobody reads" for i in range(4000)))
        (folder / "job.toml").write_text(JOB.format(quantization=arguments.quantization))
        _run(["profile", str(folder / "job.toml"), "-o", str(folder / "profile.toml")])
        for way in seconds:
            save_plan(_plan(way == "streamed"), folder / f"{way}.toml")
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
    speed = times["resident"] / times["streamed"]
    off = times["streamed"] / predicted["streamed"] - 1
    print(
        f"streamed: {speed:.3f} of the resident speed (bar {LEAST_SPEED}), {off:+.1%} of its prediction (bar {MOST_OFF:.0%})"
    )
    return int(arguments.check and (speed < LEAST_SPEED or abs(off) > MOST_OFF))


def _plan(streamed: bool) -> Plan:
    middle = 1 + BLOCKS // 2
    first = StagePlan((0,), 0, middle, 1, recompute=not streamed, streamed=streamed, slice_sequences=1)
    second = replace(first, ranks=(1,), first=middle, last=BLOCKS + 2, warm_up=0)
    return Plan((PipelinePlan((first, second), 4, 8),), 8, 128, BLOCKS + 2)


def _run(arguments: list[str]) -> None:
    command = build_command(find_launcher(), 2, None, [sys.executable, "-m", "hetero_mpi", *arguments])
    environment = {**os.environ, **command.environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command.arguments, capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        raise SystemExit(f"{command}\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    sys.exit(main())
