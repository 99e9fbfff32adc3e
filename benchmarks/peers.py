"""How fast are we beside what people would otherwise pick? Pipelines against pipelines, data parallelism against data parallelism.

    python benchmarks/peers.py [--micro-batch 1 4] [--unlike 4] [--rounds 3] [--contenders NAME ...] [--json FILE] [--check]

The same Llama (hidden 256, 8 blocks, vocabulary 2048, sequences of 128), start weights, data, fused fp32 AdamW and 8
micro-batches per step for all; 2 ranks with one thread each. Contenders:

* pipelines of 2: ours as classic 1F1B, with two stages per rank (``zbv``, ``interleaved``), as the planner chooses among pipelines
  (``plan.pipelines = 1``), and every schedule of torch.distributed.pipelining over gloo, which split the blocks evenly;
* data parallel: DistributedDataParallel over gloo; and ours left to choose freely, which takes two pipelines of one rank where
  ranks are alike on a quiet machine. What ours was, is read from the plan it ran and printed;
* one process.

Contenders take turns, ``--rounds`` times, so that a machine that changes its speed hits all alike; a contender's figure is the
median over its rounds of its median step, a ratio the median of the ratios within a round. Losses must agree to 1e-5. Printed
beside: ideal, one process / 2 ranks.

Unlike ranks: once more, with ``--unlike`` sequences per micro-batch, while rank 1 gets a third of a core's time (``slow_rank``;
needs root). The ideal is then one process at the speed of both, 4/3 of a core.
``--check`` exits 1 where our throughput is under 0.97 of that of the like it is compared with, or, with unlike ranks, our free
choice is under 1.3 times the fastest other one of two ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
for place in (ROOT, ROOT / "benchmarks"):
    sys.path.insert(0, str(place))

from harness import parser_of  # noqa: E402
from slow_rank import slowed, why_not  # noqa: E402

from hetero_mpi.launch.launcher.command_line import build_command  # noqa: E402
from hetero_mpi.launch.launcher.launcher import find_launcher  # noqa: E402
from hetero_mpi.planning.types.plan import Plan  # noqa: E402
from hetero_mpi.planning.types.toml_files import load_plan  # noqa: E402
from tests.support.processes import run_within  # noqa: E402

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
PATIENCE_S = 300.0
"""A contender that takes longer is ended, with all its processes: torch's have hung at their exit."""
TIMED_OUT = -1
"""Exit code of a contender that was ended."""
BAR, UNLIKE_BAR = 0.97, 1.3
SLOWER = 3.0
"""So many times slower rank 1 is where ranks are unlike."""
OUR_1F1B, OUR_PIPELINE, OUR_CHOICE = "ours, 1F1B", "ours, planner's pipeline", "ours, free choice"
OUR_V, OUR_LOOP = "ours, zbv", "ours, interleaved"
OURS = {
    OUR_1F1B: ("plan.pipelines=1", "plan.schedule=1f1b"),
    OUR_V: ("plan.pipelines=1", "plan.schedule=zbv"),
    OUR_LOOP: ("plan.pipelines=1", "plan.schedule=interleaved"),
    OUR_PIPELINE: ("plan.pipelines=1",),
    OUR_CHOICE: (),
}
"""What the job is told with ``--set``."""
DATA_PARALLEL, PLAIN = "DistributedDataParallel", "plain"
CONTENDERS = (*OURS, DATA_PARALLEL, *SCHEDULES, PLAIN)
PIPELINE_OF_2, DATA_PARALLEL_2, ONE_PROCESS = "pipeline of 2", "data parallel 2", "one process"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


@dataclass
class Row:
    """What a contender did."""

    kind: str
    """How the ranks share the work; of ours, as its plan says."""
    medians_s: list[float] = field(default_factory=list)
    """The median step of every round."""
    losses: list[float] = field(default_factory=list)
    error: str | None = None
    """Why it has no figures, or none that count."""

    @property
    def step_s(self) -> float:
        return statistics.median(self.medians_s) if self.error is None else float("inf")


Rows = dict[str, Row]


def main() -> int:
    arguments = _arguments()
    chosen = {PLAIN, *arguments.contenders}
    results: dict[str, Rows] = {}
    missed = False
    with tempfile.TemporaryDirectory() as folder:
        for micro_batch in arguments.micro_batch:
            name = f"micro-batch {micro_batch}"
            rows = results[name] = _compare(Path(folder), micro_batch, arguments.rounds, [], chosen)
            _print(name, rows, 2.0)
            missed |= _print_ratios(rows, unlike=False)
        obstacle = why_not()
        if obstacle is not None and arguments.unlike:
            print(f"\nunlike ranks: skipped, {obstacle}")
        for micro_batch in arguments.unlike if obstacle is None else ():
            name = f"micro-batch {micro_batch}, rank 1 {SLOWER:g} times slower"
            with slowed(1, SLOWER) as before:
                rows = results[name] = _compare(Path(folder), micro_batch, arguments.rounds, before, chosen)
            _print(name, rows, 1 + 1 / SLOWER)
            missed |= _print_ratios(rows, unlike=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1, default=vars) + "\n")
    return int(arguments.check and missed)


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, micro_batch=[1], unlike=[], rounds=1, contenders=[])
    parser.add_argument(
        "--micro-batch", type=int, nargs="*", default=[1, 4], metavar="N", help="sequences per micro-batch"
    )
    parser.add_argument("--unlike", type=int, nargs="*", default=[4], metavar="N", help="the same with unlike ranks")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="turns of every contender")
    parser.add_argument(
        "--contenders",
        nargs="*",
        choices=CONTENDERS,
        default=CONTENDERS,
        metavar="NAME",
        help=f"all unless named, beside the plain loop: {', '.join(CONTENDERS)}",
    )
    return parser.parse_args()


def _compare(folder: Path, micro_batch: int, rounds: int, before: list[str], chosen: Collection[str]) -> Rows:
    """The rows of the contenders chosen. ``before``: words before the command of every rank."""
    job = _job(folder, micro_batch)
    kinds = {PLAIN: ONE_PROCESS, DATA_PARALLEL: DATA_PARALLEL_2, **dict.fromkeys(SCHEDULES, PIPELINE_OF_2)}
    rows = {name: Row(kinds.get(name, "")) for name in CONTENDERS if name in chosen}
    for turn in range(rounds):
        for name, row in rows.items():
            if row.error is not None:
                continue
            outcome = _ours(name, row, job, folder, before) if name in OURS else _other(name, job, before)
            if isinstance(outcome, str):
                row.error = outcome
            else:
                row.medians_s.append(statistics.median(outcome["seconds"][WARM:]))
                row.losses = outcome["losses"]
            told = outcome if isinstance(outcome, str) else f"{row.medians_s[-1] * 1e3:.0f} ms per step"
            print(f"round {turn + 1} of {rounds}: {name} ({row.kind}): {told}", flush=True)
    expected = rows[PLAIN].losses
    for name, row in rows.items():
        same = all(abs(a - b) <= 1e-5 * b for a, b in zip(row.losses, expected, strict=True)) if row.losses else False
        if row.error is None and not same:
            row.error = f"other losses than {PLAIN}: {row.losses[-1]} instead of {expected[-1]} at the end"
            assert name not in OURS, row.error
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
evaluation_fraction = 0
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


def _ours(name: str, row: Row, job: Path, folder: Path, before: list[str]) -> dict[str, list[float]] | str:
    run = folder / f"run-{job.stem}-{len(before)}-{len(row.medians_s)}-{list(OURS).index(name)}"
    program = [*before, sys.executable, "-m", "hetero_mpi", "train", str(job), "--run-dir", str(run), "--reprofile"]
    program += [word for key in OURS[name] for word in ("--set", key)]
    command = build_command(find_launcher(), 2, None, program)
    done = _run(command.arguments, **command.environment)
    if done.returncode != 0:
        return done.stderr[-500:]
    kind = kind_of(load_plan(run / "plan.toml"))
    row.kind = kind if row.kind in ("", kind) else f"{row.kind}, then {kind}"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {"seconds": [line["step_s"] for line in lines], "losses": [line["loss"] for line in lines]}


def _run(command: Sequence[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """What a contender printed."""
    try:
        return run_within(PATIENCE_S, command, {**os.environ, **environment, **ENVIRONMENT}, Path.cwd())
    except subprocess.TimeoutExpired as late:
        words, told = list(command), f"did not end within {PATIENCE_S:g} s"
        return subprocess.CompletedProcess(words, TIMED_OUT, str(late.stdout), f"{late.stderr}\n{told}")


def kind_of(plan: Plan) -> str:
    """How the ranks of a plan share the work, in the words of the tables."""
    stages = [len(pipeline.stages_of) for pipeline in plan.pipelines]
    if len(stages) == 1:
        return f"pipeline of {stages[0]}" if stages[0] > 1 else ONE_PROCESS
    alone = max(stages) == 1
    return f"data parallel {len(stages)}" if alone else f"{len(stages)} pipelines of {', '.join(map(str, stages))}"


def _other(name: str, job: Path, before: list[str]) -> dict[str, list[float]] | str:
    command = [sys.executable, str(WORKER), str(job), name, str(STEPS)]
    if name != PLAIN:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
        command = [*torchrun, *before, *command]
    done = _run(command)
    found = [line for line in done.stdout.splitlines() if line.startswith('{"seconds"')]
    if done.returncode not in (0, TIMED_OUT) or not found:  # with figures it hung at its exit, and they are whole
        return (done.stderr.strip().splitlines() or ["no output"])[-1][:200]
    return dict(json.loads(found[0]))


def _print(name: str, rows: Rows, cores: float) -> None:
    ideal = rows[PLAIN].step_s / cores
    print(f"\n{name}: 8 micro-batches per step; ideal (one process / {cores:.3g}) {ideal * 1e3:.0f} ms")
    print(f"{'':<16} {'contender':<29} {'ms per step':>11} {'over ideal':>10}   rounds")
    for contender, row in sorted(rows.items(), key=lambda item: (item[1].kind, item[1].step_s)):
        if row.error is not None:
            print(f"{row.kind:<16} {contender:<29} {row.error}")
            continue
        rounds = " ".join(f"{seconds * 1e3:.0f}" for seconds in row.medians_s)
        print(f"{row.kind:<16} {contender:<29} {row.step_s * 1e3:>11.0f} {row.step_s / ideal - 1:>9.0%}   {rounds}")


def _print_ratios(rows: Rows, unlike: bool) -> bool:
    """Like beside like, and what our free choice is worth; True: a bar is missed. Contenders that were not chosen are left out."""
    like, others = (None, UNLIKE_BAR) if unlike else (BAR, None)
    compared: list[tuple[str, tuple[str, ...], float | None]] = [
        (OUR_1F1B, ("Schedule1F1B",), like),
        (OUR_PIPELINE, SCHEDULES, like),
        (OUR_CHOICE, (DATA_PARALLEL,), like),
        (OUR_V, SCHEDULES, None),
        (OUR_LOOP, ("ScheduleInterleaved1F1B",), None),
        *([(OUR_CHOICE, (DATA_PARALLEL, *SCHEDULES), others)] if unlike else []),
    ]
    missed = False
    print("\nthroughput, ours against theirs")
    for ours, candidates, bar in compared:
        present = [name for name in candidates if name in rows]
        if ours not in rows or not present:
            continue
        theirs = min(present, key=lambda name: rows[name].step_s)
        text = f"{ours} ({rows[ours].kind}) against {theirs} ({rows[theirs].kind})"
        if rows[ours].error is not None or rows[theirs].error is not None:
            print(f"  {text}: no figure, {rows[ours].error or rows[theirs].error}")
            missed |= bar is not None
            continue
        both = zip(rows[theirs].medians_s, rows[ours].medians_s, strict=True)
        ratio = statistics.median(other / own for other, own in both)
        below = bar is not None and ratio < bar
        missed |= below
        print(f"  {text}: {ratio:.3f}" + (f" (bar {bar}{', missed' if below else ''})" if bar is not None else ""))
    return missed


if __name__ == "__main__":
    sys.exit(main())
