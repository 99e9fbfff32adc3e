"""What noise in a profile costs: plans from noisy measurements, timed on the cluster as it is.

    python benchmarks/noise.py [--clusters 6] [--seed 500] [--shipped 3] [--stages 1] [--counts 3]
        [--only "point 30 %"] [--json FILE] [--check]

Each true cluster (``noisy_clusters``: generated ones, and shipped profiles) is measured with noise of several kinds. *Before*: the
medians are planned with. *After*, as the program does: lines are fitted, like ranks share theirs, the plan is tried for ``STEPS``
steps of the true cluster, the profile is corrected by them and planned with once more; of both plans the one runs that was measured
to be faster. Regret: the true step of the plan over that of the plan made with the truth. Off: true over predicted step, 1.2 or 0.8
are 20 % off.

``--check``: mean regret of at most 1.01 and worst of at most 1.05 where noise is 10 %, mean of at most 1.03 elsewhere, and the plan
that runs predicted within 3 % on average.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from harness import parser_of  # noqa: E402
from noisy_clusters import Case, Noise, generated, measured, request_of, with_few_counts  # noqa: E402

from hetero_mpi.planning.analysis.calibration import GroupSums, LinkBetween, Part, calibrated_profile  # noqa: E402
from hetero_mpi.planning.decision.decide import decide  # noqa: E402
from hetero_mpi.planning.device_times import compute_s, recompute_s  # noqa: E402
from hetero_mpi.planning.durations import exchange_s  # noqa: E402
from hetero_mpi.planning.fit import pooled  # noqa: E402
from hetero_mpi.planning.group_costs import member_times, sum_s  # noqa: E402
from hetero_mpi.planning.outline import outlined  # noqa: E402
from hetero_mpi.planning.schedule import Op  # noqa: E402
from hetero_mpi.planning.types.plan import Plan, StagePlan  # noqa: E402
from hetero_mpi.planning.types.profile import ClusterProfile, DeviceProfile  # noqa: E402
from hetero_mpi.planning.types.toml_files import load_profile  # noqa: E402

KINDS = {
    "point 10 %": Noise(point=0.10),
    "point 30 %": Noise(point=0.30),
    "curve 30 %": Noise(curve=0.30),
    "table 30 %": Noise(table=0.30),
    "rank 30 %": Noise(rank=0.30),
    "3 %, 5 % of points twice": Noise(far=0.05),
    "rank 30 %, steps 5 %": Noise(rank=0.30, steps=0.05),
}
SHIPPED = (
    "homelab-m4max-2titanx",
    "zorse-2xl4-a6000-p40",
    "homelab-5090-strix-halo",
    "zorse-2xa6000-2xw6800",
    "sailor-6-nodes",
)
STEPS = 5
TEN, MEAN, WORST, MEAN_AT_30, OFF = "10 %", 1.01, 1.05, 1.03, 0.03


@dataclass(frozen=True)
class Outcome:
    """Of one noisy copy: regrets and true over predicted seconds, before and after."""

    case: str
    before: float
    before_off: float
    after: float
    after_off: float


def main() -> int:
    parser = parser_of(__doc__, clusters=1, shipped=0, only=["point 10 %"])
    parser.add_argument("--clusters", type=int, default=6, help="generated clusters")
    parser.add_argument("--seed", type=int, default=500, help="of the first of them")
    parser.add_argument("--shipped", type=int, default=3, help="shipped profiles")
    parser.add_argument("--stages", type=int, default=1, help="per rank, at most; the program's default is 4")
    parser.add_argument("--counts", type=int, default=6, help="token counts that are measured of a curve, at most")
    parser.add_argument("--only", choices=KINDS, action="append", help="a kind of noise; may be repeated")
    arguments = parser.parse_args()
    kinds = {name: KINDS[name] for name in arguments.only or KINDS}
    found: dict[str, list[Outcome]] = {name: [] for name in kinds}
    for case in cases(arguments.seed, arguments.clusters, arguments.shipped):
        begin, case = time.monotonic(), replace(case, request=replace(case.request, stages_per_rank=arguments.stages))
        best = decide(case.profile, case.request)
        if best is None:
            print(f"{case.name}: nothing fits", flush=True)
            continue
        for name, noise in kinds.items():
            found[name].append(outcome(case, noise, f"{name} {case.name}", best.step_s, arguments.counts))
        told = ", ".join(f"{own[-1].before:.3f}>{own[-1].after:.3f}" for own in found.values())
        print(f"{case.name}: {told} ({time.monotonic() - begin:.0f} s)", flush=True)
    print(f"\n{'noise':<26}{'regret before':>16}{'off':>8}{'regret after':>16}{'off':>8}  (mean / worst, mean)")
    missed = []
    for name, own in found.items():
        before, after = [one.before for one in own], [one.after for one in own]
        offs = [
            fmean(abs(math.log(off)) for off in both)
            for both in zip(*((o.before_off, o.after_off) for o in own), strict=True)
        ]
        columns = [f"{fmean(regrets):.3f} / {max(regrets):.2f}" for regrets in (before, after)]
        print(f"{name:<26}{columns[0]:>16}{offs[0]:>8.1%}{columns[1]:>16}{offs[1]:>8.1%}")
        ten = name.endswith(TEN)
        if fmean(after) > (MEAN if ten else MEAN_AT_30) or (ten and max(after) > WORST) or offs[1] > OFF:
            missed.append(name)
    if arguments.json:
        arguments.json.write_text(json.dumps({name: [vars(one) for one in own] for name, own in found.items()}))
    print(f"missed: {', '.join(missed)}" if missed else "all bars held")
    return int(bool(missed) and arguments.check)


def cases(seed: int, clusters: int, shipped: int) -> Iterator[Case]:
    yield from map(generated, range(seed, seed + clusters))
    for name in SHIPPED[:shipped]:
        profile = load_profile(ROOT / "profiles" / f"{name}.toml")
        lora = any(layer.trainable_parameters < layer.parameters for layer in profile.model.layers)
        yield Case(name, profile, request_of(32, profile.model, len(profile.devices), lora))


def outcome(case: Case, noise: Noise, seed: str, best_s: float, counts: int) -> Outcome:
    seen = measured(with_few_counts(case.profile, counts), noise, seed)
    before = decide(seen, case.request)
    assert before is not None
    before_s = outlined(before.plan, case.profile).step_s
    draw, profile = random.Random(f"steps {seed}"), pooled(seen)
    tried: list[tuple[float, float, Plan]] = []
    for _ in range(2):
        decision = decide(profile, case.request)
        assert decision is not None
        if any(decision.plan == plan for _, _, plan in tried):
            break
        true_s = outlined(decision.plan, case.profile).step_s
        step_s = median(true_s * _factor(draw, noise.steps) for _ in range(STEPS))
        ratios = steps_of(decision.plan, case.profile, profile, noise.steps, draw)
        profile = calibrated_profile(profile, decision.plan, ratios)
        tried.append((step_s, true_s / outlined(decision.plan, profile).step_s, decision.plan))
    _, off, plan = min(tried, key=lambda one: one[0])
    after_s = outlined(plan, case.profile).step_s
    return Outcome(case.name, before_s / best_s, before_s / before.step_s, after_s / best_s, off)


def _factor(draw: random.Random, size: float) -> float:
    return math.exp(draw.gauss(0, size)) if size else 1.0


def steps_of(
    plan: Plan, true: ClusterProfile, guess: ClusterProfile, noise: float, draw: random.Random
) -> dict[Part, list[float]]:
    """What ``STEPS`` steps of ``plan`` show of the true cluster beside what was predicted."""

    def ratios(real_s: float, predicted_s: float) -> list[float]:
        return [real_s / predicted_s * _factor(draw, noise) for _ in range(STEPS)] if predicted_s > 0 else []

    found: dict[Part, list[float]] = {}
    for rank in plan.ranks:
        found[rank] = ratios(*(computed_s(plan, profile, rank) for profile in (true, guess)))
    for _, index, stage in plan.numbered:
        if stage.grouped:
            tokens = plan.pipelines[index].micro_batch * plan.sequence_length
            size = tokens * true.model.layers[0].boundary_bytes_per_token
            found[GroupSums(stage.ranks)] = ratios(*(sum_s(profile, stage.ranks, size) for profile in (true, guess)))
    for pipeline in plan.pipelines:
        for a, b in itertools.pairwise(pipeline.stages):
            size = pipeline.micro_batch * plan.sequence_length * true.model.sent_bytes_per_token(a.last - 1)
            for pair in itertools.permutations((a.ranks[0], b.ranks[0])):
                if pair[0] != pair[1]:
                    found[LinkBetween(pair)] = ratios(*(profile.transfer_s(*pair, size) for profile in (true, guess)))
    for holders in set(plan.holders):
        if len(holders) > 1:
            for pair in itertools.permutations(holders, 2):
                found.setdefault(
                    LinkBetween(pair), ratios(*(exchange_s(profile, holders, 1e8) for profile in (true, guess)))
                )
    return found


def computed_s(plan: Plan, profile: ClusterProfile, rank: int) -> float:
    """Seconds of forward and backward of a micro-batch through the stages of a rank, without what a group exchanges."""
    seconds = 0.0
    for number in plan.of_rank(rank):
        _, index, stage = plan.numbered[number]
        tokens = plan.pipelines[index].micro_batch * plan.sequence_length
        device, ends = _member(profile, stage, rank), (stage.first, stage.last)
        seconds += sum(compute_s(profile, device, *ends, tokens, op) for op in (Op.F, Op.B))
        seconds += recompute_s(profile, device, *ends, tokens) if stage.recompute else 0.0
    return seconds


def _member(profile: ClusterProfile, stage: StagePlan, rank: int) -> DeviceProfile:
    """The device of a rank, as fast as its share of a stage makes it."""
    device = profile.devices[rank]
    if not stage.grouped:
        return device
    share = stage.share(stage.ranks.index(rank))
    return replace(
        device, layers={kind: member_times(profile, device, kind, share, 1.0).rest for kind in device.layers}
    )


if __name__ == "__main__":
    sys.exit(main())
