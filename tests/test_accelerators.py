"""GPUs and a processor in one job: on the GPUs that torch offers here, else on two stand-ins made of host memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hetero_mpi.checkpoint import checkpoint_path
from hetero_mpi.device.accelerators import every_device, open_backend
from hetero_mpi.planning.files import load_plan, load_profile, save_plan
from hetero_mpi.planning.plan import IdleRank, PipelinePlan, StagePlan
from hetero_mpi.report.metrics import read_metrics
from tests.device_copies import copies_there_and_back
from tests.long_run import LongRun
from tests.stand_in_gpu import build

GPUS = [(backend.name, backend.index) for backend in every_device() if backend.name != "cpu"]
REAL = bool(GPUS)
GPUS = GPUS or [("cuda", 0), ("cuda", 1)]
STEPS = 6
TOLERANCE = 1e-4
"""Between processors of unlike make: they add in other orders."""
MISSING = None if REAL else build.missing()
pytestmark = pytest.mark.skipif(
    MISSING is not None, reason=f"torch offers no GPU here (CUDA, ROCm, XPU, MPS), and {MISSING}"
)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> LongRun:
    """A rank for every GPU and one more, which finds none left: the first one and the last one have a stage."""
    job = LongRun(
        tmp_path_factory.mktemp("accelerators"), len(GPUS) + 1, "hetero_mpi" if REAL else "tests.stand_in_gpu"
    )
    plan, last = load_plan(job.plan), job.ranks - 1
    first, second = plan.pipelines[0].stages
    stages = (replace(first, ranks=(0,)), replace(second, ranks=(last,)))
    idle = tuple(IdleRank(rank, "left out by the test") for rank in range(1, last))
    save_plan(replace(plan, pipelines=(replace(plan.pipelines[0], stages=stages),), idle=idle), job.plan)
    return job


def losses(run: Path) -> list[float]:
    return [line.loss for line in read_metrics(run / "metrics.jsonl").steps]


@pytest.fixture(scope="module")
def alone(job: LongRun) -> list[float]:
    """Of one process on the CPU."""
    return losses(finished(job, "alone", StagePlan((0,), 0, 4, 0), "cluster.device=cpu"))


def finished(job: LongRun, name: str, only: StagePlan | None = None, *sets: str) -> Path:
    """A run of the job's plan, or of one rank."""
    run, ranks, plan = job.directory / "runs" / name, job.ranks, job.plan  # deeper than where runs look for a profile
    if only is not None:
        job.ranks, job.plan = 1, job.directory / f"{name}-plan.toml"
        whole = load_plan(plan)
        save_plan(replace(whole, pipelines=(PipelinePlan((only,), 1, whole.global_batch),), idle=()), job.plan)
    words = [word for each in ("train.dtype=fp32", *sets) for word in ("--set", each)]
    try:
        result = job.finish(run, STEPS, *words)
    finally:
        job.ranks, job.plan = ranks, plan
    assert result.returncode == 0, result.stdout + result.stderr
    return run


def test_a_card_and_a_processor_compute_what_one_process_does(job: LongRun, alone: list[float]) -> None:
    run = finished(job, "both", None, "checkpoint.every=3")
    assert losses(run) == pytest.approx(alone, rel=TOLERANCE)
    backends = [device.backend for device in load_profile(run / "profile.toml").devices]
    assert backends[0] == GPUS[0][0] and backends[-1] == "cpu"
    assert checkpoint_path(run / "checkpoints", 3).exists() and (run / "model" / "model.safetensors").exists()


def test_the_card_by_itself(job: LongRun, alone: list[float]) -> None:
    assert losses(finished(job, "card", StagePlan((0,), 0, 4, 0))) == pytest.approx(alone, rel=TOLERANCE)


@pytest.mark.skipif(
    not REAL, reason="the stand-in's copies are checked in a process of their own (test_stand_in_gpu.py)"
)
@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: f"{gpu[0]}:{gpu[1]}")
def test_copies_there_and_back_beside_computation(gpu: tuple[str, int]) -> None:
    """The device computes what is copied right after, and memory that was copied from is written over at once."""
    copies_there_and_back(open_backend(*gpu))
