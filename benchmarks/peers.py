"""How fast are we beside what people would otherwise pick? One process, and every schedule of torch.distributed.pipelining (gloo).

    python benchmarks/peers.py [--micro-batch 1 4] [--unlike 4] [--rounds 3] [--json FILE] [--check]

The same Llama (hidden 256, 8 blocks, vocabulary 2048, sequences of 128), start weights, data, fused fp32 AdamW and 8
micro-batches per step for all; 2 ranks with one thread each. Contenders take turns, ``--rounds`` times, so that a machine
that changes its speed hits all alike; a contender's figure is the median over its rounds of its median step. Losses must
agree to 1e-5. Torch's schedules split the blocks evenly; ours is what our planner makes of the measured profile. Printed
beside: ideal, one process / 2 ranks.

Unlike ranks: once more, with ``--unlike`` sequences per micro-batch, while rank 1 gets a third of a core's time (``slow_rank``;
needs root). The ideal is then one process at the speed of both, 4/3 of a core.
``--check`` exits 1 where our throughput is under 0.97 of the fastest other schedule, or, with unlike ranks, under 1.3 times it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from slow_rank import slowed, why_not  # noqa: E402

WORKER = ROOT / "benchmarks" / "peers_worker.py"
SCHEDULES = (
    "Schedule1F1B",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
    "ScheduleDualPipeV",
)
STEPS, WARM = 8, 2
BAR, UNLIKE_BAR = 0.97, 1.3
SLOWER = 3.0
"""So many times slower rank 1 is where ranks are unlike."""
OURS, PLAIN = "hetero_mpi", "plain"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def main() -> int:
    arguments = _arguments()
    results, missed = {}, False
    with tempfile.TemporaryDirectory() as folder:
        for micro_batch in arguments.micro_batch:
            rows = _compare(Path(folder), micro_batch, arguments.rounds, [])
            results[f"micro-batch {micro_batch}"] = rows
            _print(f"micro-batch {micro_batch}", rows, 2.0)
        if results:
            worst = min(_ratio(rows) for rows in results.values())
            missed = worst < BAR
            print(f"\nthroughput against the fastest other schedule: {worst:.3f} (bar {BAR})")
        obstacle = why_not()
        if obstacle is not None:
            print(f"\nunlike ranks: skipped, {obstacle}")
        for micro_batch in arguments.unlike if obstacle is None else ():
            with slowed(1, SLOWER) as before:
                rows = _compare(Path(folder), micro_batch, arguments.rounds, before)
            name = f"micro-batch {micro_batch}, rank 1 {SLOWER:g} times slower"
            results[name] = rows
            _print(name, rows, 1 + 1 / SLOWER)
            missed = missed or _ratio(rows) < UNLIKE_BAR
            print(f"\nunlike ranks: throughput against the best even split: {_ratio(rows):.3f} (bar {UNLIKE_BAR})")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    return int(arguments.check and missed)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument(
        "--micro-batch", type=int, nargs="*", default=[1, 4], metavar="N", help="sequences per micro-batch"
    )
    parser.add_argument("--unlike", type=int, nargs="*", default=[4], metavar="N", help="the same with unlike ranks")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="turns of every contender")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the raw figures there")
    parser.add_argument("--check", action="store_true", help="exit 1 where the bar is missed")
    return parser.parse_args()


def _compare(folder: Path, micro_batch: int, rounds: int, before: list[str]) -> dict[str, dict[str, Any]]:
    """contender -> median step (s), all medians, losses, or the error it ended with. ``before``: words before commands."""
    job = _job(folder, micro_batch)
    rows: dict[str, dict[str, Any]] = {name: {"medians_s": []} for name in (OURS, PLAIN, *SCHEDULES)}
    for turn in range(rounds):
        for name, row in rows.items():
            if "error" in row:
                continue
            outcome = _ours(job, folder, turn, before) if name == OURS else _other(name, job, before)
            if isinstance(outcome, str):
                row["error"] = outcome
            else:
                row["medians_s"].append(statistics.median(outcome["seconds"][WARM:]))
                row["losses"] = outcome["losses"]
            told = outcome if isinstance(outcome, str) else f"{row['medians_s'][-1] * 1e3:.0f} ms per step"
            print(f"round {turn + 1} of {rounds}: {name}: {told}", flush=True)
    for row in rows.values():
        if row["medians_s"]:
            row["step_s"] = statistics.median(row["medians_s"])
    expected = rows[PLAIN]["losses"]
    for name, row in rows.items():
        same = "losses" in row and all(abs(a - b) <= 1e-5 * b for a, b in zip(row["losses"], expected, strict=True))
        if "step_s" in row and not same:
            row["error"] = f"other losses than {PLAIN}: {row['losses'][-1]} instead of {expected[-1]} at the end"
            assert name != OURS, row["error"]
    return rows


def _job(folder: Path, micro_batch: int) -> Path:
    model = folder / "model"
    if not model.exists():
        code = (
            "import sys, torch; from transformers import AutoConfig, AutoModelForCausalLM; torch.manual_seed(0)\n"
            "config = AutoConfig.for_model('llama', hidden_size=256, intermediate_size=688, num_hidden_layers=8,"
            " num_attention_heads=8, num_key_value_heads=8, vocab_size=2048, bos_token_id=0, eos_token_id=0)\n"
            "AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(sys.argv[1])"
        )
        subprocess.run([sys.executable, "-c", code, str(model)], check=True, capture_output=True)
    path = folder / f"peers-{micro_batch}.toml"
    path.write_text(
        f"""
[model]
path = "{model}"
[tokenizer]
train_vocab_size = 2048
[data]
text = ["{{stdlib}}/*.py"]
max_bytes = 1_500_000
sequence_length = 128
held_out = 0
[train]
steps = {STEPS}
global_batch = {8 * micro_batch}
micro_batch = {micro_batch}
clip_norm = ""
[cluster]
threads = 1
"""
    )
    return path


def _ours(job: Path, folder: Path, turn: int, before: list[str]) -> dict[str, list[float]] | str:
    from hetero_mpi.launch.launcher import build_command, find_launcher

    run = folder / f"run-{job.stem}-{len(before)}-{turn}"
    program = [*before, sys.executable, "-m", "hetero_mpi", "train", str(job), "--run-dir", str(run), "--reprofile"]
    command = build_command(find_launcher(), 2, None, program)
    done = subprocess.run(
        command.arguments, capture_output=True, text=True, env={**os.environ, **command.environment, **ENVIRONMENT}
    )
    if done.returncode != 0:
        return done.stderr[-500:]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {"seconds": [line["step_s"] for line in lines], "losses": [line["loss"] for line in lines]}


def _other(name: str, job: Path, before: list[str]) -> dict[str, list[float]] | str:
    command = [sys.executable, str(WORKER), str(job), name, str(STEPS)]
    if name != PLAIN:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
        command = [*torchrun, *before, *command]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **ENVIRONMENT}, timeout=300)
    except subprocess.TimeoutExpired:
        return "did not end within 300 s"
    found = [line for line in done.stdout.splitlines() if line.startswith('{"seconds"')]
    if done.returncode != 0 or not found:
        return (done.stderr.strip().splitlines() or ["no output"])[-1][:200]
    return dict(json.loads(found[0]))


def _print(name: str, rows: dict[str, dict[str, Any]], cores: float) -> None:
    ideal = rows[PLAIN]["step_s"] / cores
    print(f"\n{name}: 8 micro-batches per step; ideal (one process / {cores:.3g}) {ideal * 1e3:.0f} ms")
    print(f"{'contender':<31} {'ms per step':>11} {'all rounds':>24} {'over ideal':>10}")
    for name, row in sorted(rows.items(), key=lambda item: item[1].get("step_s", float("inf"))):
        if "step_s" not in row or "error" in row:
            print(f"{name:<31} {row['error']}")
            continue
        rounds = " ".join(f"{seconds * 1e3:.0f}" for seconds in row["medians_s"])
        print(f"{name:<31} {row['step_s'] * 1e3:>11.0f} {rounds:>24} {row['step_s'] / ideal - 1:>9.0%}")


def _ratio(rows: dict[str, dict[str, Any]]) -> float:
    """Our throughput over the fastest other schedule's: the median over the rounds of the ratio within a round."""
    others = [row for name, row in rows.items() if name in SCHEDULES and "step_s" in row and "error" not in row]
    best = min(others, key=lambda row: row["step_s"])
    pairs = zip(best["medians_s"], rows[OURS]["medians_s"], strict=True)
    return statistics.median(theirs / ours for theirs, ours in pairs)


if __name__ == "__main__":
    sys.exit(main())
