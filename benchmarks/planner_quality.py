"""By how much the planner's plans beat simple rules: simulated step time of each rule's plan over the planner's.

    python benchmarks/planner_quality.py [--devices 4 8 16 64] [--seeds 20] [--most N] [--json FILE] [--check]
    python benchmarks/planner_quality.py --devices 3 4 5 --looks 6000 --check

Most rules make one pipeline of all ranks in their own order and split the blocks in proportion to a figure per rank:

    even       all alike
    FLOPS      data-sheet peak (left out where a profile's devices are not in the table below)
    memory     usable memory (HexiScale's rule)
    speed      measured time of the whole model
    single     the best single device holds everything
    data       no pipelines: every rank that can hold the whole model does, and takes a share of the batch by its measured speed

The rules get the best of the micro-batch sizes, recompute where memory asks for it, and 1F1B's own warm-up depths; with more
ranks than layers they take those with the largest figures. A rule whose plan does not fit in memory is counted as such and left
out of the means. Clusters: the generated suite with 5 % measurement noise, and the profiles of ``profiles/`` (``--most``: those of
no more devices).

The planner may use any number of pipelines. Of Zorse's 2 x L4 + A6000 + P40 it is also told what the plan does with the P40.

``--looks``: not rules, but a random search over so many plans (``random_plans.py``), and clusters of other seeds (``FRESH``), which
nothing was tuned by.

``--check``: no rule is faster than the planner anywhere; the random search by more than half a per cent in one of thirty at most.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

for _threads in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_threads, "1")

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from clusters import TYPES, Case, generate  # noqa: E402
from harness import parser_of  # noqa: E402
from random_plans import random_search_s  # noqa: E402

from hetero_mpi.planning.decision.decide import decide  # noqa: E402
from hetero_mpi.planning.decision.planner import make_plan  # noqa: E402
from hetero_mpi.planning.device_times import whole_model_s  # noqa: E402
from hetero_mpi.planning.memory import StageMode, stage_memory, usable_bytes  # noqa: E402
from hetero_mpi.planning.orders.warm_up import classic_depths  # noqa: E402
from hetero_mpi.planning.outline import outlined  # noqa: E402
from hetero_mpi.planning.search.memory_fit import Fitter  # noqa: E402
from hetero_mpi.planning.types.plan import (  # noqa: E402
    PipelinePlan,
    Plan,
    PlanReport,
    StagePlan,
)
from hetero_mpi.planning.types.profile import ClusterProfile, DeviceProfile  # noqa: E402
from hetero_mpi.planning.types.request import PlanRequest  # noqa: E402
from hetero_mpi.planning.types.toml_files import load_profile  # noqa: E402
from hetero_mpi.util.errors import UserError  # noqa: E402

PEAK_FLOPS = {
    **{card.name: card.peak for card in TYPES},
    "NVIDIA RTX 5090": 209.5e12,
    "AMD Strix Halo (Radeon 8060S)": 59.4e12,
    "Apple M4 Max (40 GPU cores)": 18.4e12,
    "NVIDIA TITAN X (Pascal)": 11e12,
    "NVIDIA A800 80GB": 312e12,
    "NVIDIA RTX 4090": 165.2e12,
    "NVIDIA RTX 3090": 71e12,
    "NVIDIA L4": 121e12,
    "NVIDIA RTX A6000": 154.8e12,
    "NVIDIA P40": 11.8e12,
    "AMD Radeon Pro W6800": 35.7e12,
    "NVIDIA A10G": 125e12,
    "NVIDIA T4": 65e12,
    "NVIDIA V100 16GB": 125e12,
}
"""Dense peaks as in data sheets, in the dtype in which the card is fastest (P40: fp32)."""
DOUBTFUL = "NVIDIA P40"
"""A device that a plan may be better without."""
FRESH, NEAR = 5000, 0.005
"""The first seed of clusters for the random search, and by how much it may beat a plan that counts as good."""
RULES = ("even", "FLOPS", "memory", "speed", "single", "data")


def main() -> int:
    parser = parser_of(__doc__, devices=[3], seeds=1, most=2)
    parser.add_argument("--devices", type=int, nargs="+", default=[4, 8, 16, 64])
    parser.add_argument("--seeds", type=int, default=20, help="seeds 0 to this, exclusive")
    parser.add_argument("--most", type=int, metavar="N", help="only shipped profiles of at most N devices")
    parser.add_argument("--looks", type=int, default=0, help="compare with a random search over so many plans")
    arguments = parser.parse_args()
    if arguments.looks:
        return against_search(arguments.devices, arguments.seeds, arguments.looks, arguments.check)
    results: list[dict[str, object]] = []
    print(f"{'cluster':<46}{'planner':>10}" + "".join(f"{rule:>10}" for rule in RULES))
    ratios: dict[str, list[float]] = {rule: [] for rule in RULES}
    misfits = dict.fromkeys(RULES, 0)
    for case in cases(arguments.devices, arguments.seeds, arguments.most):
        try:
            report = make_plan(case.profile, case.request)
        except UserError as error:
            print(f"{case.name[:45]:<46}{str(error).splitlines()[0]}")
            continue
        planned = report.predicted_step_s
        row: dict[str, float | None] = {}
        for rule in RULES:
            seconds = rule_step_s(rule, case.profile, case.request)
            row[rule] = None if seconds is None or seconds == math.inf else seconds / planned
            misfits[rule] += seconds == math.inf
            ratios[rule] += [seconds / planned] if seconds is not None and seconds < math.inf else []
        results.append(
            {
                "cluster": case.name,
                "job": case.job,
                "planner_s": planned,
                "pipelines": len(report.plan.pipelines),
                **row,
            }
        )
        cells = "".join(f"{'-' if row[rule] is None else f'{row[rule]:.2f}x':>10}" for rule in RULES)
        print(f"{f'{case.name}, {case.job}'[:45]:<46}{planned:>8.3g} s{cells}", flush=True)
        print_doubtful(case, report)
    print_summary(ratios, misfits)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    everything = [ratio for values in ratios.values() for ratio in values]
    least = min(everything, default=math.inf)
    print(f"slowest plan against any rule: {least:.4f}x (the rule's step time over the planner's; bar: at least 1)")
    return 1 if arguments.check and not (everything and least >= 1 - 1e-9) else 0


def against_search(sizes: Sequence[int], seeds: int, looks: int, check: bool) -> int:
    """Prints the random search's step time over the planner's, of every cluster and in short."""
    ratios = []
    for devices, seed in itertools.product(sizes, range(FRESH, FRESH + seeds)):
        case = generate(devices, seed, noise=0.05)
        found = decide(case.profile, case.request)
        assert found is not None, f"{case.name}: nothing fits"
        planned = found.step_s
        ratios.append(random_search_s(case.profile, case.request, looks, seed) / planned)
        print(f"{f'{case.name}, {case.job}'[:45]:<46}{planned:>8.4g} s{ratios[-1]:>10.4f}x", flush=True)
    near = sum(ratio >= 1 - NEAR for ratio in ratios)
    bar = len(ratios) - len(ratios) // 30
    print(
        f"{near} of {len(ratios)} plans are at most {NEAR:.1%} slower than the best of {looks:,} random ones (bar: {bar}); "
        f"the random ones: least {min(ratios):.4f}x, median {statistics.median(ratios):.4f}x, most {max(ratios):.4f}x"
    )
    return int(check and near < bar)


def print_doubtful(case: Case, report: PlanReport) -> None:
    """Whether a device of doubtful use is left idle, and what the plan without it would take."""
    for rank in (device.rank for device in case.profile.devices if device.name == DOUBTFUL):
        idle = next((one.reason for one in report.idle if one.rank == rank), None)
        if idle is not None:
            print(f"    the {DOUBTFUL} is left idle: {idle}")
            continue
        devices = tuple(replace(one, dtypes=()) if one.rank == rank else one for one in case.profile.devices)
        without = make_plan(replace(case.profile, devices=devices), case.request).predicted_step_s
        print(f"    the {DOUBTFUL} is used: without it {without:.3g} s, {without / report.predicted_step_s:.2f}x")


def cases(sizes: Sequence[int], seeds: int, most: int | None = None) -> Iterator[Case]:
    """The profiles of ``profiles/`` (those of at most ``most`` devices), then the generated suite."""
    for file in sorted((ROOT / "profiles").glob("*.toml")):
        try:
            profile = load_profile(file)
        except UserError as error:
            print(f"{file.stem[:45]:<46}{str(error).splitlines()[0]}")
            continue
        if most is not None and len(profile.devices) > most:
            continue
        batch = max(64, 4 * len(profile.devices))
        request = PlanRequest(
            batch,
            profile.model.sequence_length,
            (1, 2, 4),
            max_pipelines=len(profile.devices),
            recompute_choices=(False, True),
        )
        yield Case(file.stem, profile.model.dtype, profile, request)
    for devices in sizes:
        for seed in range(seeds):
            yield generate(devices, seed, noise=0.05)


def rule_step_s(rule: str, profile: ClusterProfile, request: PlanRequest) -> float | None:
    """Step time of the rule's plan; infinite: it does not fit; None: the rule cannot be applied."""
    able = [device for device in profile.devices if profile.model.dtype in device.dtypes]
    if rule == "data":
        return min(data_parallel_s(profile, request, able, size) for size in request.micro_batch_choices)
    layers = len(profile.model.layers)
    if rule == "single":
        return min(one_pipeline_s(profile, request, [device], (0, layers)) for device in able)
    figures = figures_of(rule, profile, able)
    if figures is None:
        return None
    largest = sorted(range(len(able)), key=lambda index: (-figures[index], index))[:layers]
    order = sorted(largest)
    cuts = proportional([figures[index] for index in order], layers)
    return one_pipeline_s(profile, request, [able[index] for index in order], cuts)


def one_pipeline_s(
    profile: ClusterProfile, request: PlanRequest, devices: Sequence[DeviceProfile], cuts: Sequence[int]
) -> float:
    """Step time of one pipeline at 1F1B's own depths, with the micro-batch that suits it best; infinite: it does not fit."""
    fitter, best = Fitter(profile, replace(request, schedule="1f1b")), math.inf
    for size in request.micro_batch_choices:
        depths = classic_depths(len(devices), request.global_batch // size)
        stages = tuple(StagePlan((device.rank,), cuts[i], cuts[i + 1], depths[i]) for i, device in enumerate(devices))
        pipeline = PipelinePlan(stages, size, request.global_batch)
        plan = fitter.fitted(Plan((pipeline,), request.global_batch, request.sequence_length, cuts[-1]))
        best = min(best, math.inf if plan is None else fitter.step_s(plan))
    return best


def data_parallel_s(
    profile: ClusterProfile, request: PlanRequest, able: Sequence[DeviceProfile], micro_batch: int
) -> float:
    """Step time of the ranks that hold the whole model by themselves, each with a share by its speed."""
    layers, tokens = len(profile.model.layers), micro_batch * request.sequence_length
    fitting = []
    for device in able:
        usable = usable_bytes(device.memory_bytes, request.memory_reserve)
        for recompute in sorted(set(request.recompute_choices)):
            if stage_memory(profile.model, 0, layers, tokens, 1, StageMode(recompute)).total <= usable:
                fitting.append((device, recompute))
                break
    if not fitting:
        return math.inf
    speeds = [1 / whole_model_s(profile, device) for device, _ in fitting]
    edges = [round(request.global_batch * sum(speeds[:n]) / sum(speeds)) for n in range(len(speeds) + 1)]
    pipelines = tuple(
        PipelinePlan((StagePlan((device.rank,), 0, layers, 0, recompute),), micro_batch, last - first)
        for (device, recompute), (first, last) in zip(fitting, itertools.pairwise(edges), strict=True)
        if last - first >= micro_batch
    )
    left_out = request.global_batch - sum(pipeline.sequences for pipeline in pipelines)
    if not pipelines:
        return math.inf
    pipelines = (replace(pipelines[0], sequences=pipelines[0].sequences + left_out), *pipelines[1:])
    return outlined(Plan(pipelines, request.global_batch, request.sequence_length, layers), profile).step_s


def figures_of(rule: str, profile: ClusterProfile, able: Sequence[DeviceProfile]) -> list[float] | None:
    if rule == "FLOPS":
        return [PEAK_FLOPS[one.name] for one in able] if all(one.name in PEAK_FLOPS for one in able) else None
    if rule == "memory":
        return [float(one.memory_bytes) for one in able]
    return [1.0 if rule == "even" else 1 / whole_model_s(profile, one) for one in able]


def proportional(figures: Sequence[float], layers: int) -> tuple[int, ...]:
    """Cuts that give every rank at least one layer and otherwise shares in proportion, rounded to whole layers."""
    cuts, reached = [0], 0.0
    for place, figure in enumerate(figures, 1):
        reached += figure
        wanted = round(layers * reached / sum(figures))
        cuts.append(min(max(wanted, cuts[-1] + 1), layers - (len(figures) - place)))
    return tuple(cuts)


def print_summary(ratios: dict[str, list[float]], misfits: dict[str, int]) -> None:
    rows = {
        "geometric mean": {r: math.exp(sum(map(math.log, v)) / len(v)) if v else math.nan for r, v in ratios.items()},
        "least": {r: min(v, default=math.nan) for r, v in ratios.items()},
        "most": {r: max(v, default=math.nan) for r, v in ratios.items()},
    }
    for name, row in rows.items():
        print(f"{name:<56}" + "".join(f"{row[rule]:>9.2f}x" for rule in RULES))
    print(f"{'does not fit in memory':<56}" + "".join(f"{misfits[rule]:>10}" for rule in RULES))


if __name__ == "__main__":
    sys.exit(main())
