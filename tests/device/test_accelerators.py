"""GPUs and a processor in one job: on the GPUs that torch offers here, else on two stand-ins made of host memory.

One mpirun, with a rank for every GPU and one on the processor, goes through most of the jobs.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero_mpi.device.accelerators import available, open_backend, usable
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan
from hetero_mpi.planning.types.toml_files import load_profile, save_plan
from hetero_mpi.report.past_run import read_run
from hetero_mpi.rundir.metrics import Metrics, read_metrics
from hetero_mpi.state.directory import checkpoint_path
from hetero_mpi.state.reader import CheckpointReader
from tests.runtime.test_recovery import outliving_or_skip
from tests.stand_in_gpu import COUNTERS, THROUGH, build
from tests.support.device_copies import copies_there_and_back
from tests.support.jobs import GLOBAL_BATCH, SEQUENCE, Outcome, Workshop
from tests.support.long_run import LongRun
from tests.support.mpi import ROOT, run_bounded

GPUS = [(name, index) for name in available() for index in usable(name) if name != "cpu"]
REAL = bool(GPUS)
GPUS = GPUS or [("cuda", 0), ("cuda", 1)]
FIRST, LAST, CPU = 0, len(GPUS) - 1, len(GPUS)
"""Ranks of two GPUs (or the one there is) and of the processor."""
STEPS, BLOCKS = 4, 4
LAYERS = BLOCKS + 2
ADAPTER = {"method": "lora", "rank": 4, "dropout": 0.2}
TOLERANCE = 1e-4
"""Between processors of unlike make: they add in other orders."""
MISSING = None if REAL else build.missing()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(MISSING is not None, reason=f"torch offers no GPU here (CUDA, ROCm, XPU, MPS), and {MISSING}"),
]


def pipeline(ranks: tuple[int, ...], edges: tuple[int, ...], micro_batch: int, sequences: int) -> PipelinePlan:
    stages = tuple(StagePlan((rank,), *edges[i : i + 2], len(ranks) - 1 - i) for i, rank in enumerate(ranks))
    return PipelinePlan(stages, micro_batch, sequences)


def plan(*pipelines: PipelinePlan) -> Plan:
    return Plan(pipelines, GLOBAL_BATCH, SEQUENCE, LAYERS)


PLANS = {
    "alone": plan(pipeline((CPU,), (0, LAYERS), 1, 4)),
    "cards": plan(pipeline((FIRST, LAST), (0, 3, LAYERS), 1, 4) if LAST else pipeline((FIRST,), (0, LAYERS), 1, 4)),
    "all": plan(pipeline((FIRST, LAST, CPU) if LAST else (FIRST, CPU), (0, 2, 4, LAYERS) if LAST else (0, 3, LAYERS), 1, 4)),
    "two": plan(
        pipeline((FIRST, CPU) if LAST else (FIRST,), (0, 4, LAYERS) if LAST else (0, LAYERS), 1, 3),
        pipeline((LAST or CPU,), (0, LAYERS), 1, 1),
    ),
}  # fmt: skip
STREAMED = {"resident": (), "first": (FIRST,), "others": (LAST, CPU)}
"""Which ranks of a pipeline of all of them stream, of micro-batches of 2 in slices of one; the resident ones repeat forwards."""


WEIGHTS = ("adapter", "packed", "whole")
"""What is trained there: adapters over plain or packed weights, or all weights."""
RESUMED = {"whole-resumed": ("first", "whole-resident"), "whole-back": ("resident", "whole-first")}
"""By whom a run goes on, and of which run."""


def streamed_plan(ranks: tuple[int, ...]) -> Plan:
    whole = pipeline(*((FIRST, LAST, CPU), (0, 2, 4, LAYERS)) if LAST else ((FIRST, CPU), (0, 3, LAYERS)), 2, 4)
    stages = []
    for stage in whole.stages:
        streams = stage.ranks[0] in ranks
        stages.append(replace(stage, streamed=streams, recompute=not streams, slice_sequences=1))
    return plan(replace(whole, stages=tuple(stages)))


@dataclass(frozen=True)
class Runs:
    directory: Path
    outcomes: dict[str, Outcome]
    counters: dict[int, dict[str, Any]]
    """rank -> what the stand-in's process saw; empty on real GPUs."""

    def metrics(self, name: str) -> Metrics:
        assert set(self.outcomes[name].raised) == {""}, self.outcomes[name].texts
        return read_metrics(self.directory / name / "metrics.jsonl")

    def losses(self, name: str) -> list[float]:
        return [step.loss for step in self.metrics(name).steps]

    def state(self, name: str) -> dict[tuple[str, str], np.ndarray]:
        """(kind, name) -> array of everything in the last checkpoint."""
        self.metrics(name)
        with CheckpointReader(checkpoint_path(self.directory / name / "checkpoints", STEPS)) as reader:
            kinds = ("parameters", "moments1", "moments2")
            return {(kind, tensor): reader.read(kind, tensor)[0] for kind in kinds for tensor in reader.names(kind)}

    def check_equal(self, ours: str, theirs: str) -> None:
        """To the last bit; on real GPUs, whose libraries may add in changing order, nearly."""
        rel = 1e-5 if REAL else 0.0
        count = len(self.losses(ours))
        assert self.losses(ours) == pytest.approx(self.losses(theirs)[-count:], rel=rel, abs=0.0)
        expected, found = self.state(theirs), self.state(ours)
        assert found.keys() == expected.keys()
        for key, array in found.items():
            np.testing.assert_allclose(array, expected[key], rtol=rel, atol=rel, err_msg=str(key))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """One mpirun: tied ends on GPUs and a processor, and a checkpoint."""
    return run_all(tmp_path_factory.mktemp("accelerators"), {"alone", "all", "resumed"})


@pytest.fixture(scope="module")
def more_runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Two pipelines, an adapter with dropout over packed weights, a scaled loss, and a run that goes on without GPUs."""
    return run_all(tmp_path_factory.mktemp("accelerators"))


@pytest.fixture(scope="module")
def streamed_runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Adapters over plain and over packed weights, and all weights trained, where none of the ranks streams, or some do; and a run
    of these that is resumed under the other kind of plan."""
    names = {*(f"{weights}-{by}" for weights in WEIGHTS for by in STREAMED), *RESUMED}
    return run_all(tmp_path_factory.mktemp("accelerators"), names)


def run_all(directory: Path, names: set[str] | None = None) -> Runs:
    """``names``: of the jobs; None: all but those of ``streamed_runs``."""
    shop = Workshop(directory, () if REAL else THROUGH)
    for name, one in (PLANS | {name: streamed_plan(ranks) for name, ranks in STREAMED.items()}).items():
        save_plan(one, directory / f"{name}.toml")
    values = shop.values(shop.model("tied", BLOCKS, tied=True))

    def job(
        name: str,
        model: dict[str, Any] | None = None,
        adapter: dict[str, Any] | None = None,
        dtype: str = "fp32",
        micro_batch: int = 1,
    ) -> Path:
        return shop.job(
            name,
            values,
            model=model or {},
            adapter=adapter or {},
            train={
                "steps": STEPS,
                "dtype": dtype,
                "micro_batch": micro_batch,
                "evaluate_every": 2,
                "evaluate_sequences": 4,
            },
            checkpoint={"every": 2},
            sample={"prompt": "the", "max_new_tokens": 12},
        )

    jobs = {
        "full": job("full"),
        "lora": job("lora", {"quantization": "nf4"}, ADAPTER),
        "fp16": job("fp16", dtype="fp16"),
        "adapter": job("adapter", {}, ADAPTER, "bf16", 2),
        "packed": job("packed", {"quantization": "nf4"}, ADAPTER, "bf16", 2),
        "whole": job("whole", {}, {}, "bf16", 2),
    }
    entries: dict[str, dict[str, Any]] = {}

    def entry(name: str, job: str, by: str, resume: str | None = None) -> None:
        entries[name] = {"job": jobs[job], "run_dir": directory / name, "plan": directory / f"{by}.toml"}
        if resume is not None:
            entries[name]["resume"] = checkpoint_path(directory / resume / "checkpoints", 2)

    entry("alone", "full", "alone")
    entry("all", "full", "all")
    entry("two", "full", "two")
    entry("resumed", "full", "all", "all")
    entry("resumed-alone", "full", "alone", "all")
    entry("lora", "lora", "cards")
    entry("lora-again", "lora", "cards")
    entry("fp16", "fp16", "all")
    for name in WEIGHTS:
        for by in STREAMED:
            entry(f"{name}-{by}", name, by)
    for name, (by, before) in RESUMED.items():
        entry(name, "whole", by, before)
    chosen = names or {name for name in entries if not name.startswith(WEIGHTS)}
    entries = {name: one for name, one in entries.items() if name in chosen}
    outcomes = shop.run_entries(CPU + 1, entries, timeout_s=400)
    return Runs(directory, outcomes, counters_in(shop.printed_errors))


def counters_in(text: str) -> dict[int, dict[str, Any]]:
    """rank -> what the stand-in's process saw, in the order of the ranks."""
    told = [line for line in text.splitlines() if line.startswith(COUNTERS)]
    found = {one["rank"]: one for one in (json.loads(line.removeprefix(COUNTERS)) for line in told)}
    return dict(sorted(found.items()))


def test_gpus_and_a_processor_compute_what_one_process_does(runs: Runs) -> None:
    check_as_alone(runs, "all")


@pytest.mark.long
def test_two_pipelines_of_gpus_and_a_processor_compute_what_one_process_does(more_runs: Runs) -> None:
    check_as_alone(more_runs, "two")


def check_as_alone(runs: Runs, name: str) -> None:
    """Both ends of the model share a matrix."""
    assert runs.losses(name) == pytest.approx(runs.losses("alone"), rel=TOLERANCE)
    ours, theirs = runs.metrics(name).evaluations, runs.metrics("alone").evaluations
    assert [one.step for one in ours] == [2, 4]
    assert [one.loss for one in ours] == pytest.approx([one.loss for one in theirs], rel=TOLERANCE)
    backends = [device.backend for device in load_profile(runs.directory / name / "profile.toml").devices]
    assert backends == [*(gpu[0] for gpu in GPUS), "cpu"]
    texts = {(runs.directory / one / "sample.txt").read_text() for one in (name, "alone")}
    assert len(texts) == 1, texts


def test_what_the_gpus_of_a_host_receive_all_at_once_is_measured(runs: Runs) -> None:
    (host,) = load_profile(runs.directory / "all" / "profile.toml").hosts
    assert math.isfinite(host.copies_bytes_per_s) == (len(GPUS) > 1), "the processor copies nothing"


def test_a_run_that_is_resumed_goes_on_with_the_same_bits(runs: Runs) -> None:
    assert len(runs.losses("resumed")) == STEPS - 2
    runs.check_equal("resumed", "all")


@pytest.mark.long
def test_a_run_of_gpus_goes_on_without_them(more_runs: Runs) -> None:
    assert more_runs.losses("resumed-alone") == pytest.approx(more_runs.losses("alone")[2:], rel=TOLERANCE)


@pytest.mark.long
def test_dropout_over_packed_weights_is_the_same_every_time(more_runs: Runs) -> None:
    assert more_runs.losses("lora") != pytest.approx(more_runs.losses("alone"), rel=TOLERANCE)
    more_runs.check_equal("lora-again", "lora")


@pytest.mark.long
@pytest.mark.parametrize("by", ["first", "others"])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_streamed_stages_beside_resident_ones_give_their_bits(streamed_runs: Runs, weights: str, by: str) -> None:
    streamed_runs.check_equal(f"{weights}-{by}", f"{weights}-resident")
    own, theirs = (streamed_runs.metrics(f"{weights}-{one}").evaluations for one in (by, "resident"))
    # One value of a bf16 model that is rounded the other way shows in the mean over so few tokens.
    assert [one.loss for one in own] == pytest.approx([one.loss for one in theirs], rel=1e-3 if REAL else 0.0, abs=0.0)
    assert own
    check_memory(streamed_runs, f"{weights}-{by}")


@pytest.mark.long
@pytest.mark.parametrize("name", RESUMED)
def test_a_run_goes_on_streamed_or_not_with_the_same_bits(streamed_runs: Runs, name: str) -> None:
    streamed_runs.check_equal(name, "whole-resident")


@pytest.mark.long
def test_fp16_with_a_scaled_loss(more_runs: Runs) -> None:
    assert more_runs.losses("fp16") == pytest.approx(more_runs.losses("alone"), rel=1e-2)
    ours, theirs = ([step.grad_norm for step in more_runs.metrics(name).steps] for name in ("fp16", "alone"))
    assert ours == pytest.approx(theirs, rel=2e-2), "the norm is of the gradients of the loss itself"


def test_predicted_memory_is_what_a_gpu_takes(runs: Runs) -> None:
    check_memory(runs, "all")


@pytest.mark.long
@pytest.mark.parametrize("name", ["lora", "two", "fp16"])
def test_predicted_memory_is_what_a_gpu_takes_in_other_jobs(more_runs: Runs, name: str) -> None:
    check_memory(more_runs, name)


def check_memory(runs: Runs, name: str) -> None:
    """The second GPU of ``two`` has both ends of the model, whose matrix it holds and trains once."""
    past = read_run(runs.directory / name)
    used = {record.rank: record.usage.peak_bytes for record in past.rank_steps}
    assert past.report is not None
    # What the libraries of a real GPU's kernels take for themselves; blocks of 512 bytes for some two hundred small adapters.
    beside = 200_000_000 if REAL else 60_000
    for one in past.report.memory:
        if one.rank != CPU:  # there the whole process counts
            assert 0.85 * one.peak_bytes < used[one.rank] < 1.12 * one.peak_bytes + beside, one


@pytest.mark.skipif(REAL, reason="only the stand-in counts contexts")
def test_a_rank_uses_its_own_gpu_only(runs: Runs) -> None:
    for gpu in (0, 1):
        assert runs.counters[gpu]["contexts"] == [one == gpu for one in (0, 1)]
    assert runs.counters[CPU]["contexts"] == [False, False] and runs.counters[CPU]["seeded"] == []


@pytest.mark.long
@pytest.mark.skipif(REAL, reason="only the stand-in counts seeds")
def test_a_rank_seeds_its_own_gpu_only(more_runs: Runs) -> None:
    for gpu in (0, 1):
        assert more_runs.counters[gpu]["seeded"] == [gpu]
    assert more_runs.counters[CPU]["seeded"] == []


@pytest.mark.long
def test_the_death_of_a_gpus_rank_is_outlived(tmp_path: Path) -> None:
    """By ``launch --recover``: the ranks that are left go on from copies in memory, with the losses of a run on the processor."""
    outliving_or_skip()
    job, run, steps = LongRun(tmp_path, CPU + 1, "hetero_mpi" if REAL else THROUGH[1]), tmp_path / "run", 40
    words = ["--set", f"train.steps={steps}", "--set", "train.dtype=fp32", "--set", "checkpoint.replicate_every=2"]
    launch = [
        sys.executable,
        "-m",
        job.module,
        "launch",
        "-np",
        str(job.ranks),
        "--recover",
        "--",
        *job.arguments(run, *words),
    ]
    with job.started(launch, job.environment(), run) as running:
        running.wait_for_steps(6)
        running.ranks[LAST].send_signal(signal.SIGKILL)
        running.finish()
    assert f"Lost rank {LAST}" in running.text()
    alone = {"job": job.file, "run_dir": tmp_path / "alone", "set": [f"train.steps={steps}", "cluster.device=cpu"]}
    assert job.run_entries(1, {"alone": alone})["alone"].raised == ("",)
    ours, theirs = (read_metrics(tmp_path / name / "metrics.jsonl").steps for name in ("run", "alone"))
    assert [step.step for step in ours] == list(range(1, steps + 1))
    assert [step.loss for step in ours] == pytest.approx([step.loss for step in theirs], rel=10 * TOLERANCE)


@pytest.mark.long
def test_the_benchmark_of_gpus_runs(tmp_path: Path) -> None:
    """Tensors arrive whole, and its job trains; its figures mean something on real GPUs only."""
    found = tmp_path / "found.json"
    program = [*(() if REAL else THROUGH), "benchmarks/cards.py", "--smallest", "--json", str(found)]
    result = run_bounded(
        [sys.executable, *program], {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}, 300
    )
    assert result.returncode == 0 and "hidden" in result.stdout, result.stdout + result.stderr
    figures = json.loads(found.read_text())
    assert list(figures["pieces"]) == ["card to processor", "processor to card"]
    assert all(seconds > 0 for turns in figures["pieces"].values() for turn in turns for seconds in turn)
    assert all(seconds > 0 for seconds in figures["job"])


@pytest.mark.skipif(
    not REAL, reason="the stand-in's copies are checked in a process of their own (test_stand_in_gpu.py)"
)
@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: f"{gpu[0]}:{gpu[1]}")
def test_copies_there_and_back_beside_computation(gpu: tuple[str, int]) -> None:
    """The device computes what is copied right after, and memory that was copied from is written over at once."""
    copies_there_and_back(open_backend(*gpu), 1024)
