"""Does the quickstart's plan hold on a quiet machine, and beside other programs?

    python benchmarks/quickstart.py [--runs N] [--busy N ...] [--steps N] [--ranks 3] [--json FILE] [--check]

Three ranks, launched as README says, with empty caches. Each run is followed by fewer steps under plans given by hand: one rank,
two data-parallel ranks, three of them, one pipeline of three. Printed of each run: step time predicted, tried and measured
(median), the best of those by hand in the same minutes, seconds from the start to the first step, and lines of output.
``--busy``: processes that compute beside it. ``--ranks``: so many are launched, and plans for more are left out.

Bar: quiet, in nine of ten runs measured within 10 % of what was expected (tried, else predicted), beside others within 25 %;
never slower than 1.1 times the best by hand; the first step within 20 s where it is quiet; at most 60 lines. A run takes about
two minutes on two cores; the machine must do nothing else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import psutil  # noqa: E402
from harness import MAX_RUN_S, busy, parser_of  # noqa: E402

from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan  # noqa: E402
from hetero_mpi.planning.types.toml_files import load_report, save_plan  # noqa: E402
from hetero_mpi.rundir.metrics import measured_step_s, read_metrics  # noqa: E402
from tests.support.processes import end_tree  # noqa: E402

LAYERS, BATCH, LENGTH = 8, 16, 128
JOB = ROOT / "jobs" / "quickstart.toml"


def pipeline(ranks: tuple[int, ...], sequences: int, micro_batch: int) -> PipelinePlan:
    cuts = [round(place * LAYERS / len(ranks)) for place in range(len(ranks) + 1)]
    stages = [
        StagePlan((rank,), first, last, len(ranks) - 1 - place)
        for place, (rank, first, last) in enumerate(zip(ranks, cuts, cuts[1:], strict=False))
    ]
    return PipelinePlan(tuple(stages), micro_batch, sequences)


BY_HAND = {
    "one rank": Plan((pipeline((0,), 16, 4),), BATCH, LENGTH, LAYERS),
    "two, data parallel": Plan((pipeline((0,), 8, 4), pipeline((1,), 8, 4)), BATCH, LENGTH, LAYERS),
    "three, data parallel": Plan(
        (pipeline((0,), 6, 3), pipeline((1,), 5, 5), pipeline((2,), 5, 5)), BATCH, LENGTH, LAYERS
    ),
    "pipeline of three": Plan((pipeline((0, 1, 2), 16, 2),), BATCH, LENGTH, LAYERS),
}


@dataclass(frozen=True)
class Run:
    measured_s: float
    predicted_s: float
    tried_s: float | None
    until_first_step_s: float
    lines: int

    @property
    def expected_s(self) -> float:
        return self.predicted_s if self.tried_s is None else self.tried_s


def run(folder: Path, ranks: int, steps: int, *arguments: str) -> Run:
    """One launch, in a directory and with caches of its own."""
    directory = folder / "run"
    command = [sys.executable, "-u", "-m", "hetero_mpi", "launch", "-np", str(ranks), "--", "train", str(JOB)]
    command += ["--run-dir", str(directory), "--set", f"train.steps={steps}", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder / "cache")}
    environment.pop("OMP_NUM_THREADS", None)
    begin, first_s, lines = time.perf_counter(), 0.0, 0
    launched = psutil.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, text=True)
    limit = threading.Timer(MAX_RUN_S, end_tree, [launched])
    limit.start()
    try:
        for line in launched.stdout:
            lines += 1
            if line.startswith("step ") and not first_s:
                first_s = time.perf_counter() - begin
        launched.wait()
    finally:
        limit.cancel()
        end_tree(launched)
    if launched.returncode != 0:
        sys.exit(f"exit code {launched.returncode}: {' '.join(command)}")
    report, metrics = load_report(directory / "plan.toml"), read_metrics(directory / "metrics.jsonl")
    measured_s = measured_step_s(metrics.steps)
    assert measured_s is not None
    return Run(measured_s, report.predicted_step_s, report.tried_step_s, first_s, lines)


def main() -> int:
    parser = parser_of(__doc__, runs=1, steps=12, ranks=1)
    parser.add_argument("--runs", type=int, default=10, help="launches under the planner's plan")
    parser.add_argument("--busy", type=int, nargs="+", default=[0], help="processes beside each, in turn")
    parser.add_argument("--steps", type=int, default=100, help="of a run")
    parser.add_argument("--ranks", type=int, default=3, help="that are launched")
    arguments = parser.parse_args()
    plans = {name: plan for name, plan in BY_HAND.items() if max(plan.ranks) < arguments.ranks}
    found, within = [], dict.fromkeys(arguments.busy, 0)
    missed = []
    for number in range(arguments.runs):
        count = arguments.busy[number % len(arguments.busy)]
        with busy(count), tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            own = run(folder, arguments.ranks, arguments.steps)
            by_hand = {}
            for name, plan in plans.items():
                save_plan(plan, folder / "plan.toml")
                given = (
                    "--plan",
                    str(folder / "plan.toml"),
                    "--set",
                    "profile.calibrate=false",
                    "--set",
                    "profile.reuse=true",
                )
                by_hand[name] = run(folder, arguments.ranks, max(12, arguments.steps // 6), *given).measured_s
        best = min(by_hand, key=by_hand.__getitem__)
        off, slower = own.measured_s / own.expected_s - 1, own.measured_s / by_hand[best]
        within[count] += abs(off) <= (0.25 if count else 0.10)
        tried = "not tried" if own.tried_s is None else f"tried {own.tried_s * 1e3:.0f}"
        print(
            f"beside {count}: predicted {own.predicted_s * 1e3:.0f} ms, {tried}, measured {own.measured_s * 1e3:.0f} ({off:+.1%}); "
            f"best by hand {best} {by_hand[best] * 1e3:.0f} ({slower:.2f} times); first step after {own.until_first_step_s:.1f} s; "
            f"{own.lines} lines",
            flush=True,
        )
        late = count == 0 and own.until_first_step_s > 20
        missed += ["slow"] * (slower > 1.1) + ["late"] * late + ["lines"] * (own.lines > 60)
        found.append({"busy": count, **asdict(own), "by_hand": by_hand})
    for count, good in within.items():
        runs = sum(one["busy"] == count for one in found)
        print(f"beside {count}: {good} of {runs} runs within {'25' if count else '10'} % of what was expected")
        missed += ["prediction"] * (good < 0.9 * runs)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))
    print(f"missed: {', '.join(missed) or 'nothing'}")
    return int(arguments.check and bool(missed))


if __name__ == "__main__":
    sys.exit(main())
