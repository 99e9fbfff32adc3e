"""How long planning takes and how far its plans are from the bounds, for more and more devices; one core.

    python benchmarks/planner_scale.py [--devices 16 64 1024] [--seeds 20] [--noise 0.05] [--thorough] [--bounds]
                                       [--json FILE] [--check]

The clusters are those of ``clusters.py``; of more than 128 devices only the first ``--large`` seeds are run. Seconds are CPU
seconds of ``make_plan``, explanations included. Two bounds:

* *fluid*: all devices always busy with nothing to wait for, layers divisible at will. It knows neither links nor sums;
* *packing* (with ``--bounds``, up to 8 devices): whole blocks, sequences and pipelines, filling and draining, memory in flight,
  links and sums (``planning/packing/bound.py``). About a second per cluster of 8 devices.

``--check``: planning takes at most 2 s on average for 16 devices, 4 s for 64 and 10 s for 1,024, and no plan is under a bound.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

for _threads in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_threads, "1")

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from clusters import PAIRWISE, Case, generate  # noqa: E402

from hetero_mpi.job.plan_request import INDIFFERENCE  # noqa: E402
from hetero_mpi.planning.bounds import fluid_bound_s  # noqa: E402
from hetero_mpi.planning.decision.planner import CLOSELY_BOUND, make_plan  # noqa: E402
from hetero_mpi.planning.packing.bound import packing_bound_s  # noqa: E402
from hetero_mpi.planning.types.profile import ClusterProfile  # noqa: E402

MOST_S = {16: 2.0, 64: 4.0, 1024: 10.0}


@dataclass(frozen=True)
class Run:
    devices: int
    seed: int
    noise: float
    job: str
    seconds: float
    pipelines: int
    used: int
    step_s: float
    fluid_s: float
    packing_s: float | None
    bound_seconds: float

    @property
    def bounds(self) -> tuple[float | None, ...]:
        return self.fluid_s, self.packing_s

    def over(self, bound_s: float | None) -> float | None:
        return None if bound_s is None else self.step_s / bound_s - 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", type=int, nargs="+", default=[16, 64, 1024])
    parser.add_argument("--seeds", type=int, default=20, help="seeds 0 to this, exclusive")
    parser.add_argument("--large", type=int, default=3, help=f"as many seeds of more than {PAIRWISE} devices")
    parser.add_argument("--noise", type=float, default=0.0, help="of times and links, either way")
    parser.add_argument("--thorough", action="store_true", help="plan as [plan] thorough does")
    parser.add_argument("--bounds", action="store_true", help="the slow bounds too")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    runs: list[Run] = []
    print("                               pipe-        seconds of             step over bound")
    print("devices  seed  job             lines  used  planning    step s     fluid   packing")
    for devices in arguments.devices:
        seeds = arguments.seeds if devices <= PAIRWISE else min(arguments.large, arguments.seeds)
        rows = [
            run(asked(generate(devices, seed, arguments.noise), arguments), seed, arguments) for seed in range(seeds)
        ]
        runs += rows
        print_means(rows)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(one) for one in runs], indent=1))
    return exit_code(runs, arguments.check)


def asked(case: Case, arguments: argparse.Namespace) -> Case:
    indifference = INDIFFERENCE if arguments.noise else 0.0
    return replace(case, request=replace(case.request, indifference=indifference, thorough=arguments.thorough))


def run(case: Case, seed: int, arguments: argparse.Namespace) -> Run:
    profile, request, devices = case.profile, case.request, len(case.profile.devices)
    begin = time.process_time()
    report = make_plan(profile, request)
    seconds = time.process_time() - begin
    step_s = report.predicted_step_s
    pipelines, used = len(report.plan.pipelines), len(report.plan.numbered)
    begin = time.process_time()
    packing_s = packing_bound_s(profile, request, step_s) if arguments.bounds and devices <= CLOSELY_BOUND else None
    bound_seconds = time.process_time() - begin
    one = Run(
        devices, seed, arguments.noise, case.job, seconds, pipelines, used, step_s, fluid_bound_s(profile, request), packing_s,
        bound_seconds,
    )  # fmt: skip
    print_row(one)
    return one


def without_links(profile: ClusterProfile) -> ClusterProfile:
    """Messages and sums that take no time."""
    devices = tuple(
        replace(
            device,
            copy_latency_s=0.0,
            device_to_host_bytes_per_s=math.inf,
            host_to_device_bytes_per_s=math.inf,
        )
        for device in profile.devices
    )
    links = tuple(replace(link, latency_s=0.0, bytes_per_s=math.inf) for link in profile.links)
    between = tuple(replace(link, latency_s=0.0, bytes_per_s=math.inf) for link in profile.host_links)
    return replace(profile, devices=devices, links=links, host_links=between)


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def print_row(one: Run) -> None:
    gaps = "".join(f"{percent(one.over(bound)):>10}" for bound in one.bounds)
    print(
        f"{one.devices:>7} {one.seed:>5}  {one.job:<14} {one.pipelines:>6} {one.used:>5} {one.seconds:>8.2f} s "
        f"{one.step_s:>9.4g}{gaps}" + (f" {one.bound_seconds:>4.0f} s" if one.packing_s is not None else ""),
        flush=True,
    )


def mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def print_means(rows: Sequence[Run]) -> None:
    gaps = [mean([one.over(one.bounds[which]) for one in rows]) for which in range(2)]
    seconds = mean([one.seconds for one in rows]) or 0.0
    print(
        f"{rows[0].devices:>7}  mean{'':>30}{seconds:>8.2f} s {'':>9}" + "".join(f"{percent(gap):>10}" for gap in gaps)
    )


def exit_code(runs: Sequence[Run], check: bool) -> int:
    """Prints the last line; 1 where a bar is missed and ``check``."""
    bounds = [(one, bound) for one in runs for bound in one.bounds if bound is not None]
    sound = all(one.step_s >= bound * (1 - 1e-9) for one, bound in bounds)
    met, parts = sound, []
    for devices, most_s in MOST_S.items():
        seconds = mean([one.seconds for one in runs if one.devices == devices])
        if seconds is not None:
            met = met and seconds <= most_s
            parts.append(f"{devices} devices {seconds:.2f} s (bar: {most_s:g} s)")
    print(f"planning: {', '.join(parts) or 'no bar for these sizes'}{'' if sound else '; A PLAN IS UNDER A BOUND'}")
    return 1 if check and not met else 0


if __name__ == "__main__":
    sys.exit(main())
