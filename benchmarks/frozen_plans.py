"""Does the planner still find plans as fast as those it found when they were frozen?

    python benchmarks/frozen_plans.py [--most 1024] [--only NAME] [--freeze] [--json FILE] [--check]

``data/frozen_plans.jsonl`` holds one plan a line, of the planner as it was on the day of ``frozen``: of the profiles that were
shipped then (``data/frozen_profiles``), asked as ``plan`` asks without a job, and of generated clusters (``clusters.py``): five of
each size from 3 to 64 devices, three of them with LoRA over NF4 and two with full training, and six of 128 to 1,024 devices.
Clusters of odd seeds have 5 % measurement noise.
A plan is reduced to what is decided: micro-batch, share of the batch, whether backward is split, and of every stage its rank, its
last layer (exclusive), warm-up and recompute.

Each cluster is planned anew. Both plans are timed by the present simulator: the ratio is the new plan's step time over the frozen
one's, exactly 1 where the planner decides the same. What the frozen plan took by the simulator of its day is compared as well.

``--most N``: only clusters of at most N devices (all: some four minutes of one idle core). ``--freeze``: plans the clusters
that the file lacks and appends them; nothing else. ``--check``: plans are at most 0.5 % slower on average, and none more than 5 %.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

for _threads in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_threads, "1")

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from clusters import Case, generate  # noqa: E402
from harness import parser_of  # noqa: E402

from hetero_mpi.commands.plan_commands import ask  # noqa: E402
from hetero_mpi.planning.decision.decide import decide  # noqa: E402
from hetero_mpi.planning.memory_model import predict_hosts, predict_memory  # noqa: E402
from hetero_mpi.planning.outline import outlined  # noqa: E402
from hetero_mpi.planning.types.cluster_changes import with_copies  # noqa: E402
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan  # noqa: E402

FILE = ROOT / "benchmarks" / "data" / "frozen_plans.jsonl"
PROFILES = FILE.with_name("frozen_profiles")
SIZES = (3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)
JOBS = {"LoRA": 3, "full": 2}
"""Clusters of every size, by the way of training."""
SEEDS = 200
"""So many seeds of a size are looked through for these."""
LARGE = ((128, 0), (128, 1), (256, 0), (256, 1), (512, 1), (1024, 0))
"""(devices, seed)"""
NOISE = 0.05
MEAN_SLOWER, MOST_SLOWER = 1.005, 1.05


@dataclass(frozen=True)
class Row:
    name: str
    job: str
    devices: int
    frozen_s: float
    """By the present simulator."""
    new_s: float
    simulator: float
    """What the present simulator says of the frozen plan, over what that of its day said."""
    seconds: float
    """Of planning, processor time."""

    @property
    def ratio(self) -> float:
        return 1.0 if self.new_s == self.frozen_s else self.new_s / self.frozen_s


def main(given: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, most=3, only="3-")
    parser.add_argument("--most", type=int, default=1024, metavar="N", help="only clusters of at most N devices")
    parser.add_argument("--only", default="", metavar="NAME", help="only clusters whose name contains this")
    parser.add_argument("--freeze", action="store_true", help="plan what the file lacks, and append it")
    arguments = parser.parse_args(given)
    if arguments.freeze:
        freeze(FILE, arguments.most)
        return 0
    entries = [one for one in read(FILE) if arguments.only in one["name"] and one["devices"] <= arguments.most]
    if not entries:
        parser.error(f"no cluster of at most {arguments.most} devices has {arguments.only!r} in its name, such as 16-0")
    print(f"{'cluster':<32}{'job':<10}{'frozen s':>10}{'new s':>10}{'ratio':>10}{'simulator':>11}{'planning':>11}")
    rows = []
    for entry in entries:
        rows.append(compared(entry))
        print(line(rows[-1]), flush=True)
    if arguments.json:
        content = [{**vars(row), "ratio": row.ratio} for row in rows]
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")
    mean, worst = sum(row.ratio for row in rows) / len(rows), max(row.ratio for row in rows)
    bars = f"(bars {MEAN_SLOWER:g}, {MOST_SLOWER:g})"
    print(f"{len(rows)} clusters: step time over the frozen plan's, mean {mean:.6g}, worst {worst:.6g} {bars}")
    return int(arguments.check and (worst > MOST_SLOWER or mean > MEAN_SLOWER))


def line(row: Row) -> str:
    return (
        f"{row.name[:31]:<32}{row.job:<10}{row.frozen_s:>10.4g}{row.new_s:>10.4g}{row.ratio:>10.6g}{row.simulator:>11.6g}"
        f"{row.seconds:>9.1f} s"
    )


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]


def names(most: int) -> Iterator[str]:
    """Of all clusters of at most so many devices: a frozen profile, or ``devices-seed``."""
    yield from (file.stem for file in sorted(PROFILES.glob("*.toml")))
    for devices in (size for size in SIZES if size <= most):
        left = dict(JOBS)
        for seed in range(SEEDS):
            way = generate(devices, seed).job.split()[1]
            if left[way]:
                left[way] -= 1
                yield f"{devices}-{seed}"
            if not any(left.values()):
                break
    yield from (f"{devices}-{seed}" for devices, seed in LARGE if devices <= most)


def case_of(name: str) -> Case:
    devices, _, seed = name.partition("-")
    if devices.isdigit():
        return generate(int(devices), int(seed), NOISE * (int(seed) % 2))
    frozen = PROFILES / f"{name}.toml"
    asked = ask(None, (), frozen if frozen.exists() else Path(name))  # a profile that is shipped since
    way = "full" if all(x.trainable_parameters for x in asked.profile.model.layers) else "LoRA"
    return Case(name, way, asked.profile, asked.request)


def planned(case: Case) -> Plan:
    """What the planner decides, as ``make_plan`` asks it, without figures and reasons."""
    found = decide(with_copies(case.profile, case.request), case.request) or decide(case.profile, case.request)
    assert found is not None, f"{case.name}: nothing fits"
    return found.plan


def freeze(path: Path, most: int) -> None:
    known = {one["name"] for one in read(path)} if path.exists() else set()
    for name in names(most):
        if name in known:
            continue
        case = case_of(name)
        if len(case.profile.devices) > most:
            continue
        plan = planned(case)
        entry = {
            "name": name,
            "job": case.job,
            "devices": len(case.profile.devices),
            "frozen": time.strftime("%Y-%m-%d"),
            "step_s": outlined(plan, case.profile).step_s,
            "pipelines": [reduced(pipeline) for pipeline in plan.pipelines],
        }
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, separators=(",", ":")) + "\n")
        print(f"{name}: {entry['step_s']:.4g} s", flush=True)


def reduced(pipeline: PipelinePlan) -> list[Any]:
    """[sequences of a micro-batch, of the step, is backward split?, stages "rank:last:warm-up", with "r" if they recompute]"""
    stages = (f"{s.ranks[0]}:{s.last}:{s.warm_up}{'r' * s.recompute}" for s in pipeline.stages)
    return [pipeline.micro_batch, pipeline.sequences, pipeline.split_backward, " ".join(stages)]


def plan_of(entry: dict[str, Any], case: Case) -> Plan:
    """The frozen plan."""
    pipelines = []
    for micro_batch, sequences, split, text in entry["pipelines"]:
        stages, first = [], 0
        for stage in text.split():
            rank, last, warm_up = map(int, stage.removesuffix("r").split(":"))
            stages.append(StagePlan((rank,), first, last, warm_up, stage.endswith("r")))
            first = last
        pipelines.append(PipelinePlan(tuple(stages), micro_batch, sequences, split))
    request = case.request
    return Plan(tuple(pipelines), request.global_batch, request.sequence_length, len(case.profile.model.layers))


def compared(entry: dict[str, Any]) -> Row:
    """The frozen plan and a new one, timed alike."""
    case = case_of(entry["name"])
    frozen_s = outlined(plan_of(entry, case), case.profile).step_s
    begin = time.process_time()
    new = planned(case)
    seconds = time.process_time() - begin
    short = [
        one
        for one in predict_memory(new, case.profile, case.request.memory_reserve)
        if one.peak_bytes > one.usable_bytes
    ]
    hosts = predict_hosts(new, case.profile, case.request.memory_reserve)
    assert not short and all(one.peak_bytes <= one.usable_bytes for one in hosts), (
        f"{case.name}: the new plan does not fit"
    )
    new_s = outlined(new, case.profile).step_s
    return Row(case.name, entry["job"], entry["devices"], frozen_s, new_s, frozen_s / entry["step_s"], seconds)


if __name__ == "__main__":
    sys.exit(main())
