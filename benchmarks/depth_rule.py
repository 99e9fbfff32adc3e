"""HARP's rule of depths beside the depths that our search finds, in the same stages: the shipped profiles over slower links.

    python benchmarks/depth_rule.py [--gbit 1 2.5 10] [--most 12] [--json FILE] [--check]

A stage begins with one forward more than the stage after it (1F1B). HARP's scheduler does so inside a cluster. Between clusters it
begins with 1 more where the link takes less than a tenth of the slowest stage's time for a micro-batch, 2 where it takes less than
half, else 3 (Liang et al., arXiv 2509.24859v2, 2026).

Each profile of at most ``--most`` devices is planned as one pipeline of all ranks. Every link between hosts has the given speed;
where the profile has one host, every rank counts as a host. Then that plan's depths are replaced by the rule's, and by classic
1F1B's. Printed is the simulated step time over that of our plan, or that the depths do not fit in memory. Which cuts HARP's own
planner would choose is not compared.

``--check``: no rule's depths are faster than ours.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from harness import parser_of  # noqa: E402
from planner_quality import cases  # noqa: E402

from hetero_mpi.planning.decision.decide import decide  # noqa: E402
from hetero_mpi.planning.device_times import compute_s  # noqa: E402
from hetero_mpi.planning.memory_model import predict_memory  # noqa: E402
from hetero_mpi.planning.orders.warm_up import with_classic_depths  # noqa: E402
from hetero_mpi.planning.schedule import Op  # noqa: E402
from hetero_mpi.planning.simulator import simulate  # noqa: E402
from hetero_mpi.planning.types.plan import Plan  # noqa: E402
from hetero_mpi.planning.types.profile import ClusterProfile  # noqa: E402
from hetero_mpi.planning.types.request import PlanRequest  # noqa: E402

MOST = 12


def main() -> int:
    parser = parser_of(__doc__, gbit=[1.0], most=2)
    parser.add_argument("--gbit", type=float, nargs="+", default=[1.0, 2.5, 10.0], help="speeds of the links")
    parser.add_argument("--most", type=int, default=MOST, metavar="N", help="only profiles of at most N devices")
    arguments = parser.parse_args()
    least, rows = 2.0, []
    print(f"{'profile':<38}{'Gbit/s':>7}{'stages':>7}{'ours':>10}{'HARP':>8}{'1F1B':>8}  depths: ours, HARP's")
    for case in cases([], 0, arguments.most):
        request = replace(case.request, max_pipelines=1, allow_idle=False, split_choices=(False,), schedule="auto")
        for gbit in arguments.gbit:
            profile = linked(case.profile, gbit * 1e9 / 8)
            found = decide(profile, request)
            if found is None or len(found.plan.pipelines[0].stages) < 2:
                continue
            ours = simulate(found.plan, profile).step_s
            ruled, classic = harp(found.plan, profile), with_classic_depths(found.plan)
            ratios = [relative(plan, profile, request, ours) for plan in (ruled, classic)]
            least = min(least, *(ratio for ratio in ratios if ratio is not None))
            rows.append([case.name, gbit, ours, *ratios])
            cells = "".join(f"{'no room' if ratio is None else f'{ratio:.3f}':>8}" for ratio in ratios)
            stages = len(found.plan.pipelines[0].stages)
            print(
                f"{case.name[:37]:<38}{gbit:>7g}{stages:>7}{ours:>8.3g} s{cells}  {depths(found.plan)}, {depths(ruled)}",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(f"least: {least:.4f} (a rule's step time over ours; bar: at least 1)")
    return 1 if arguments.check and least < 1 - 1e-9 else 0


def linked(profile: ClusterProfile, bytes_per_s: float) -> ClusterProfile:
    """The profile with its links between hosts at this speed; of one host, all of its links."""
    alone = len({device.host for device in profile.devices}) == 1
    links = tuple(
        replace(link, bytes_per_s=bytes_per_s, same_host=False, sample_bytes=(), sample_s=())
        if alone or not link.same_host
        else link
        for link in profile.links
    )
    return replace(profile, links=links)


def harp(plan: Plan, profile: ClusterProfile) -> Plan:
    """The plan with the rule's depths."""
    (pipeline,) = plan.pipelines
    tokens, stages = pipeline.micro_batch * plan.sequence_length, list(pipeline.stages)
    slowest = max(
        sum(compute_s(profile, profile.devices[s.ranks[0]], s.first, s.last, tokens, op) for op in (Op.F, Op.B))
        for s in stages
    )
    depth = stages[-1].warm_up
    for place in reversed(range(len(stages) - 1)):
        own, after = stages[place], stages[place + 1]
        size = profile.model.layers[own.last - 1].boundary_bytes_per_token * tokens
        link_s = profile.transfer_s(own.ranks[0], after.ranks[0], size)
        inside = profile.link(own.ranks[0], after.ranks[0]).same_host
        depth += 1 if inside or link_s < 0.1 * slowest else 2 if link_s < 0.5 * slowest else 3
        stages[place] = replace(own, warm_up=min(depth, pipeline.micro_batches - 1))
    return replace(plan, pipelines=(replace(pipeline, stages=tuple(stages)),))


def relative(plan: Plan, profile: ClusterProfile, request: PlanRequest, ours: float) -> float | None:
    """The plan's step time over ours; None where it does not fit in memory."""
    filled = predict_memory(plan, profile, request.memory_reserve)
    return simulate(plan, profile).step_s / ours if all(one.peak_bytes <= one.usable_bytes for one in filled) else None


def depths(plan: Plan) -> str:
    return "-".join(str(stage.warm_up) for stage in plan.pipelines[0].stages)


if __name__ == "__main__":
    sys.exit(main())
