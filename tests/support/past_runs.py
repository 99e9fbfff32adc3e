"""Run directories as `train` leaves them, made up: what reports and comparisons are tested with."""

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hetero_mpi.planning.memory_model import predict_memory
from hetero_mpi.planning.schedule import Op
from hetero_mpi.planning.simulator import simulate
from hetero_mpi.planning.types.plan import IdleRank, Plan, PlanReport
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.toml_files import save_plan, save_profile
from hetero_mpi.rundir.line_files import STEPS_NAME, LineFile
from hetero_mpi.rundir.metrics import MetricsWriter, StepMetrics
from hetero_mpi.rundir.rank_steps import MeasuredEvent, RankStep, Usage, rank_step_to_dict
from hetero_mpi.rundir.run_directory import describe_run
from hetero_mpi.util import toml
from tests.support.planning_samples import JOB_TOML, make_model, make_plan_of, make_profile

JOB: dict[str, Any] = {
    "train": {"steps": 60, "global_batch": 8, "learning_rate": 3e-3, "seed": 7},
    "data": {"sequence_length": 128},
    "cluster": {"emulate": None},
}
WHOLE_JOB: dict[str, Any] = toml.loads(JOB_TOML)
"""A job that is all there, as ``train`` writes it into ``run.json``."""


def make_run(
    directory: Path, report: PlanReport, profile: ClusterProfile, steps: int = 60, slower: float = 1.05,
    job: Mapping[str, Any] = JOB,
) -> Path:  # fmt: skip
    """A run of ``steps`` steps that took ``slower`` times the prediction; its last step was recorded, as if predicted."""
    directory.mkdir(parents=True, exist_ok=True)
    plan = report.plan
    save_plan(report, directory / "plan.toml")
    save_profile(profile, directory / "profile.toml")
    describe_run(
        directory, directory.name, f"{directory.name}.toml", job, {"hetero_mpi": "0.1.0"}, len(profile.devices), 0
    )
    step_s = slower * report.predicted_step_s
    tokens = plan.global_batch * plan.sequence_length
    noise = random.Random(1)
    with MetricsWriter(directory / "metrics.jsonl") as writer:
        for step in range(1, steps + 1):
            took, loss = step_s * noise.uniform(0.97, 1.03), 4 + 4 * math.exp(-step / 20) + noise.uniform(-0.1, 0.1)
            rate = 3e-3 * min(1.0, step / 10) * (1 + math.cos(math.pi * step / steps)) / 2
            line = StepMetrics(
                step, loss, 1 + noise.random(), rate, tokens, tokens / took, took, report.predicted_step_s
            )
            writer.step(replace(line, emulated=profile.emulated))
            if step % 20 == 0:
                writer.evaluation(step, loss + 0.2)
    records = measured(plan, profile, steps, slower)
    LineFile(directory / STEPS_NAME).write(*(rank_step_to_dict(one) for one in records))
    event = {"unix_s": 1.7e9, "event": "silent", "text": "no word from host beta for 14 s", "hosts": ["beta"]}
    (directory / "events.jsonl").write_text(json.dumps(event) + "\n")
    (directory / "checkpoints").mkdir(exist_ok=True)
    (directory / "checkpoints" / f"step-{steps:08}.h5").write_bytes(b"\x89HDF")
    return directory


def measured(plan: Plan, profile: ClusterProfile, step: int, slower: float) -> list[RankStep]:
    """The predicted step, ``slower`` times as long, as ranks whose clocks are 1 ms apart would have recorded it.

    Sends are handed over at once; their receives know when the message had arrived.
    """
    predicted = simulate(plan, profile)
    events = predicted.events
    arrivals = {
        (event.action.op, event.action.stage, event.action.micro_batch): event.end_s
        for event in events
        if event.action.op in (Op.SEND_F, Op.SEND_B)
    }
    found = []
    for rank in sorted({event.rank for event in events}):
        later = 0.001 * rank
        own = []
        for event in events:
            if event.rank != rank:
                continue
            start, end, op = slower * event.start_s - later, slower * event.end_s - later, event.action.op
            arrived = None
            if op in (Op.RECV_F, Op.RECV_B):
                sent = Op.SEND_F if op is Op.RECV_F else Op.SEND_B
                sender = event.action.stage + (-1 if op is Op.RECV_F else 1)
                arrived = slower * arrivals[sent, sender, event.action.micro_batch] - later
            end = start if op in (Op.SEND_F, Op.SEND_B) else end
            own.append(MeasuredEvent(rank, step, event.action, start, end, event.bytes, 0.0, arrived))
        usage = Usage(peak_bytes=500_000_000)
        for _ in range(10):
            usage = usage.and_step(own, slower * predicted.step_s)
        found.append(RankStep(rank, step, 100.0 + later, tuple(own), usage))
    return found


def cluster(ranks: int, per_host: int = 2, source: str = "measured") -> ClusterProfile:
    """Ranks on hosts of ``per_host``, whose links are fast inside and slow between them."""
    profile = make_profile(
        [1 + rank % 2 for rank in range(ranks)], make_model(2 * ranks), latency_s=0.1, bytes_per_s=1e4
    )
    devices = tuple(replace(d, host=f"host{d.rank // per_host}", name=f"card {d.rank}") for d in profile.devices)
    links = tuple(
        replace(link, same_host=devices[link.source].host == devices[link.destination].host) for link in profile.links
    )
    return replace(profile, devices=devices, links=links, source=source)


def planned(profile: ClusterProfile, ranks: int | None = None, micro_batches: int = 8) -> PlanReport:
    """One pipeline over the first ``ranks`` ranks; the others idle."""
    used, layers = ranks or len(profile.devices), len(profile.model.layers)
    plan = make_plan_of([round(k * layers / used) for k in range(used + 1)], list(range(used)), micro_batches)
    idle = tuple(
        IdleRank(rank, f"it would slow <everybody> down by {rank} %") for rank in range(used, len(profile.devices))
    )
    step_s = simulate(plan, profile).step_s
    memory = predict_memory(plan, profile, 0.05)
    return PlanReport(plan, step_s, 0.9 * step_s, memory=memory, idle=idle, reasons=("a & b",))


def several_stages(profile: ClusterProfile, ranks: Sequence[int], micro_batches: int = 8) -> Plan:
    """One pipeline with a stage on each of ``ranks``, in which the same rank may occur again."""
    layers, count = len(profile.model.layers), len(ranks)
    plan = make_plan_of([round(k * layers / count) for k in range(count + 1)], ranks, micro_batches)
    return replace(plan, pipelines=(replace(plan.pipelines[0], order="zbv", split_backward=True),))


def metrics(step: int, loss: float = 2.0, step_s: float = 1.0) -> StepMetrics:
    """A line of ``metrics.jsonl`` of a step that was predicted to take 1.1 s."""
    return StepMetrics(step, loss, 1.0, 3e-4, 8192, 8192.0 / step_s, step_s, 1.1)
