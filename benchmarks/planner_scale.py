"""How long planning takes and how far its plans are from the bound, for more and more devices; one core.

    python benchmarks/planner_scale.py [--devices 16 64 1024] [--seeds 20] [--profiles NAME ...] [--noise 0.05] [--thorough]
                                       [--json FILE] [--check]

The clusters are those of ``clusters.py``; of more than 128 devices only the first ``--large`` seeds are run. Then the shipped
profiles (``--profiles``: these; without a name: none), asked as ``plan --profile NAME`` asks without a job. Seconds are processor
seconds of ``make_plan``, explanations included. The bound: all devices always busy with nothing to wait for, layers divisible at
will. It knows neither links nor sums.

``--check``: planning takes at most 1.5 s on average for 4, 6 and 8 generated devices and 10 s for 64 and for 1,024, and no plan is
under the bound.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean

for _threads in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_threads, "1")

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from clusters import PAIRWISE, Case, generate  # noqa: E402
from frozen_plans import case_of  # noqa: E402
from harness import parser_of  # noqa: E402

from hetero_mpi.job.plan_request import INDIFFERENCE_RATIO  # noqa: E402
from hetero_mpi.planning.decision.planner import make_plan  # noqa: E402

PROFILES = tuple(sorted(file.stem for file in (ROOT / "profiles").glob("*.toml")))
MOST_S = {4: 1.5, 6: 1.5, 8: 1.5, 64: 10.0, 1024: 10.0}


@dataclass(frozen=True)
class Run:
    name: str
    """Of a shipped profile; of a generated cluster its seed."""
    devices: int
    noise: float
    job: str
    seconds: float
    pipelines: int
    used: int
    step_s: float
    bound_s: float

    @property
    def over_bound(self) -> float:
        return self.step_s / self.bound_s - 1


def main() -> int:
    parser = parser_of(__doc__, devices=[4], seeds=1, profiles=["homelab-5090-strix-halo"])
    parser.add_argument("--devices", type=int, nargs="*", default=[16, 64, 1024])
    parser.add_argument("--seeds", type=int, default=20, help="seeds 0 to this, exclusive")
    parser.add_argument("--large", type=int, default=3, help=f"as many seeds of more than {PAIRWISE} devices")
    parser.add_argument("--noise", type=float, default=0.0, help="of times and links, either way")
    parser.add_argument(
        "--profiles", nargs="*", choices=PROFILES, default=PROFILES, metavar="NAME", help="shipped ones"
    )
    parser.add_argument("--thorough", action="store_true", help="plan as [plan] thorough does")
    arguments = parser.parse_args()
    runs: list[Run] = []
    print(f"{'':<55} pipe-        processor s             step over")
    print(f"{'cluster':<30} devices  {'job':<14}   lines  used  of planning    step s     bound")
    for devices in arguments.devices:
        seeds = arguments.seeds if devices <= PAIRWISE else min(arguments.large, arguments.seeds)
        generated = (generate(devices, seed, arguments.noise) for seed in range(seeds))
        rows = [run(asked(case, arguments), str(seed), arguments.noise) for seed, case in enumerate(generated)]
        runs += rows
        print_means(rows)
    shipped = [run(asked(case_of(name), arguments), name, 0.0) for name in arguments.profiles]
    print_means(shipped)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(one) for one in runs + shipped], indent=1))
    return exit_code(runs, shipped, arguments.check)


def asked(case: Case, arguments: argparse.Namespace) -> Case:
    request = replace(case.request, thorough=arguments.thorough)
    if arguments.noise:
        request = replace(request, indifference=INDIFFERENCE_RATIO)
    return replace(case, request=request)


def run(case: Case, name: str, noise: float) -> Run:
    profile, request, devices = case.profile, case.request, len(case.profile.devices)
    begin = time.process_time()
    report = make_plan(profile, request)
    seconds = time.process_time() - begin
    step_s = report.predicted_step_s
    pipelines, used = len(report.plan.pipelines), len(report.plan.numbered)
    one = Run(name, devices, noise, case.job, seconds, pipelines, used, step_s, report.bound_step_s)
    print_row(one)
    return one


def print_row(one: Run) -> None:
    print(
        f"{one.name:<30} {one.devices:>7}  {one.job:<14} {one.pipelines:>7} {one.used:>5} {one.seconds:>10.2f} s "
        f"{one.step_s:>9.4g}{100 * one.over_bound:>8.1f} %",
        flush=True,
    )


def print_means(rows: Sequence[Run]) -> None:
    if rows:
        seconds, over = mean(one.seconds for one in rows), mean(one.over_bound for one in rows)
        print(f"{'mean':<30}{'':>39}{seconds:>10.2f} s {'':>9}{100 * over:>8.1f} %")


def exit_code(runs: Sequence[Run], shipped: Sequence[Run], check: bool) -> int:
    """Prints the last line; 1 where a bar is missed and ``check``."""
    sound = all(one.step_s >= one.bound_s * (1 - 1e-9) for one in (*runs, *shipped))
    met, parts = sound, []
    for devices, most_s in MOST_S.items():
        rows = [one.seconds for one in runs if one.devices == devices]
        if rows:
            seconds = mean(rows)
            met = met and seconds <= most_s
            parts.append(f"{devices} devices {seconds:.2f} s (bar: {most_s:g} s)")
    print(f"planning: {', '.join(parts) or 'no bar for these sizes'}{'' if sound else '; A PLAN IS UNDER THE BOUND'}")
    return 1 if check and not met else 0


if __name__ == "__main__":
    sys.exit(main())
