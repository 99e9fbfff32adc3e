"""How long planning takes and how far its plans are from the bounds, for more and more devices; one core.

    python benchmarks/planner_scale.py [--devices 8 16 32 64] [--seeds 10] [--noise 0.05] [--json FILE] [--check]

The clusters are those of ``clusters.py``; every row is also run with measurement noise, so that no two devices are equal.
Seconds are CPU seconds of ``make_plan``, explanations included. Two gaps are printed:

* to the *fluid* bound: all devices always busy with nothing to wait for. One pipeline over many devices cannot come near it:
  it has no more stages than the model has items (34 for 7B), each stage holds whole blocks, and it fills and drains;
* to the *pipeline* bound, which knows these three; what is left are links, memory and the search. The difference is what
  granularity forces.

Covered: single pipelines, which is what `train` runs. Not covered: several pipelines side by side, the right answer for many
more devices than the model has blocks; that is why the table ends at 64 devices.

``--check``: at most 1 s on average for the largest size, and no plan under its bound.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

for _threads in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_threads, "1")

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from clusters import generate  # noqa: E402

from hetero_mpi.planning.bounds import pipeline_bound_s  # noqa: E402
from hetero_mpi.planning.planner import make_plan  # noqa: E402
from hetero_mpi.training.request import INDIFFERENCE  # noqa: E402

MOST_S = 1.0


@dataclass(frozen=True)
class Run:
    devices: int
    seed: int
    noise: float
    job: str
    seconds: float
    used: int
    step_s: float
    fluid_s: float
    pipeline_s: float

    @property
    def fluid_gap(self) -> float:
        return self.step_s / self.fluid_s - 1

    @property
    def pipeline_gap(self) -> float:
        return self.step_s / self.pipeline_s - 1

    @property
    def granularity(self) -> float:
        return self.pipeline_s / self.fluid_s - 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--seeds", type=int, default=10, help="seeds 0 to this, exclusive")
    parser.add_argument("--noise", type=float, default=0.05, help="of the second table's times and links, either way")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    runs: list[Run] = []
    print("                     seconds of planning      gap to pipeline bound   to fluid bound   forced by")
    print("devices   noise        mean      worst            mean      worst            mean   granularity   used")
    for noise in (0.0, arguments.noise):
        for devices in arguments.devices:
            rows = [run(devices, seed, noise) for seed in range(arguments.seeds)]
            runs += rows
            print_row(rows)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(one) for one in runs], indent=1))
    largest = [one.seconds for one in runs if one.devices == max(arguments.devices)]
    mean_s = sum(largest) / len(largest)
    sound = all(
        one.step_s >= one.pipeline_s * (1 - 1e-9) and one.pipeline_s >= one.fluid_s * (1 - 1e-9) for one in runs
    )
    print(f"planning for {max(arguments.devices)} devices: {mean_s:.2f} s on average (bar: {MOST_S:g} s)")
    return 1 if arguments.check and (mean_s > MOST_S or not sound) else 0


def run(devices: int, seed: int, noise: float) -> Run:
    case = generate(devices, seed, noise)
    request = replace(case.request, indifference=INDIFFERENCE if noise else 0.0)
    begin = time.process_time()
    plan = make_plan(case.profile, request)
    seconds = time.process_time() - begin
    return Run(
        devices,
        seed,
        noise,
        case.job,
        seconds,
        len(plan.pipelines[0].stages),
        plan.predicted_step_s,
        plan.bound_step_s,
        pipeline_bound_s(case.profile, request),
    )


def print_row(rows: list[Run]) -> None:
    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    seconds, gaps = [one.seconds for one in rows], [one.pipeline_gap for one in rows]
    print(
        f"{rows[0].devices:>7} {100 * rows[0].noise:>5.0f} %  {mean(seconds):>8.2f} s {max(seconds):>8.2f} s "
        f"{100 * mean(gaps):>13.1f} % {100 * max(gaps):>8.1f} % {100 * mean([one.fluid_gap for one in rows]):>13.1f} % "
        f"{100 * mean([one.granularity for one in rows]):>11.1f} % {mean([float(one.used) for one in rows]):>6.1f}"
    )


if __name__ == "__main__":
    sys.exit(main())
