"""How long planning takes and how far its plans are from the bounds, for more and more devices; one core.

    python benchmarks/planner_scale.py [--devices 16 64 1024] [--seeds 20] [--noise 0.05] [--bounds] [--json FILE] [--check]

The clusters are those of ``clusters.py``; of more than 128 devices only the first ``--large`` seeds are run. Seconds are CPU
seconds of planning: ``make_plan``, explanations included; above 128 devices ``several.layouts``, since simulating every
action of thousands of sequences takes longer than planning (what it predicts is simulated for the first seed, and must agree).
Three bounds:

* *fluid*: all devices always busy with nothing to wait for, items divisible at will. It knows neither links nor sums;
* *unlinked* (with ``--bounds``): whole blocks, whole sequences, filling and draining, with links and sums that cost nothing.
  What it lies over the fluid bound is what granularity forces;
* *packing* (with ``--bounds``): these, and links and sums (``planning/packing/bound.py``). Minutes per cluster.

``--check``: planning takes at most 1 s on average for 64 devices and 10 s for 1,024; no plan is under a bound; and with
``--bounds`` the mean gap to the packing bound is at most 5 %.
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

from hetero_mpi.planning.bounds import fluid_bound_s  # noqa: E402
from hetero_mpi.planning.packing.bound import packing_bound_s  # noqa: E402
from hetero_mpi.planning.plan import Plan  # noqa: E402
from hetero_mpi.planning.planner import make_plan  # noqa: E402
from hetero_mpi.planning.profile import ClusterProfile  # noqa: E402
from hetero_mpi.planning.several.layouts import several  # noqa: E402
from hetero_mpi.planning.simulator import simulate  # noqa: E402
from hetero_mpi.training.request import INDIFFERENCE  # noqa: E402

MOST_S = {64: 1.0, 1024: 10.0}
MOST_GAP = 0.05
EXACT = 1e-6


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
    unlinked_s: float | None
    packing_s: float | None
    simulated: bool
    """Was ``step_s`` simulated action by action?"""

    def over(self, bound_s: float | None) -> float | None:
        return None if bound_s is None else self.step_s / bound_s - 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", type=int, nargs="+", default=[16, 64, 1024])
    parser.add_argument("--seeds", type=int, default=20, help="seeds 0 to this, exclusive")
    parser.add_argument("--large", type=int, default=3, help=f"as many seeds of more than {PAIRWISE} devices")
    parser.add_argument("--noise", type=float, default=0.0, help="of times and links, either way")
    parser.add_argument("--bounds", action="store_true", help="the slow bounds too")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    runs: list[Run] = []
    print("                               pipe-        seconds of              step time over bound")
    print("devices  seed  job             lines  used  planning    step s     fluid  unlinked   packing")
    for devices in arguments.devices:
        seeds = arguments.seeds if devices <= PAIRWISE else min(arguments.large, arguments.seeds)
        rows = [
            run(generate(devices, seed, arguments.noise), seed, arguments.noise, arguments.bounds)
            for seed in range(seeds)
        ]
        runs += rows
        print_means(rows)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(one) for one in runs], indent=1))
    return verdict(runs, arguments.check)


def run(case: Case, seed: int, noise: float, slow_bounds: bool) -> Run:
    profile, devices = case.profile, len(case.profile.devices)
    request = replace(case.request, indifference=INDIFFERENCE if noise else 0.0)
    begin = time.process_time()
    plan: Plan | None = make_plan(profile, request) if devices <= PAIRWISE else several(profile, request, fewest=1)
    seconds = time.process_time() - begin
    assert plan is not None, f"{case.name}: nothing fits"
    step_s, simulated = plan.predicted_step_s, devices <= PAIRWISE
    if not simulated and seed == 0:
        exact_s = simulate(plan, profile).step_s
        assert exact_s <= step_s * (1 + EXACT), f"{case.name}: simulated {exact_s} s, planned with {step_s} s"
        step_s, simulated = exact_s, True
    unlinked_s = packing_bound_s(without_links(profile), request, step_s) if slow_bounds else None
    packing_s = packing_bound_s(profile, request, step_s) if slow_bounds else None
    used = sum(len(pipeline.stages) for pipeline in plan.pipelines)
    one = Run(
        devices, seed, noise, case.job, seconds, len(plan.pipelines), used, step_s, fluid_bound_s(profile, request),
        unlinked_s, packing_s, simulated,
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
    gaps = "".join(f"{percent(one.over(bound)):>10}" for bound in (one.fluid_s, one.unlinked_s, one.packing_s))
    print(
        f"{one.devices:>7} {one.seed:>5}  {one.job:<14} {one.pipelines:>6} {one.used:>5} {one.seconds:>8.2f} s "
        f"{one.step_s:>9.4g}{gaps}",
        flush=True,
    )


def mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def print_means(rows: Sequence[Run]) -> None:
    gaps = [mean([one.over(bound(one)) for one in rows]) for bound in (_fluid, _unlinked, _packing)]
    forced = mean([None if one.unlinked_s is None else one.unlinked_s / one.fluid_s - 1 for one in rows])
    seconds = mean([one.seconds for one in rows]) or 0.0
    print(
        f"{rows[0].devices:>7}  mean{'':>30}{seconds:>8.2f} s {'':>9}" + "".join(f"{percent(gap):>10}" for gap in gaps)
    )
    if forced is not None:
        print(
            f"{'':>7}  granularity (whole blocks and sequences, filling) forces {percent(forced)} over the fluid bound"
        )


def _fluid(one: Run) -> float | None:
    return one.fluid_s


def _unlinked(one: Run) -> float | None:
    return one.unlinked_s


def _packing(one: Run) -> float | None:
    return one.packing_s


def verdict(runs: Sequence[Run], check: bool) -> int:
    """Prints the last line; 1 where a bar is missed and ``check``."""
    bounds = [
        (one, bound) for one in runs for bound in (one.fluid_s, one.unlinked_s, one.packing_s) if bound is not None
    ]
    sound = all(one.step_s >= bound * (1 - 1e-9) for one, bound in bounds)
    met, parts = sound, []
    for devices, most_s in MOST_S.items():
        seconds = mean([one.seconds for one in runs if one.devices == devices])
        if seconds is not None:
            met = met and seconds <= most_s
            parts.append(f"{devices} devices {seconds:.2f} s (bar: {most_s:g} s)")
    gap = mean([one.over(one.packing_s) for one in runs])
    if gap is not None:
        met = met and gap <= MOST_GAP
        parts.append(f"mean gap {percent(gap)} (bar: {percent(MOST_GAP)})")
    print(f"planning: {', '.join(parts)}{'' if sound else '; A PLAN IS UNDER A BOUND'}")
    return 1 if check and not met else 0


if __name__ == "__main__":
    sys.exit(main())
