"""Runs that are killed, that fill the disk, that find other data: what is left is whole, and continues to the bit."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from hetero_mpi.rundir.metrics import read_metrics
from hetero_mpi.state.directory import newest_good
from hetero_mpi.state.reader import CheckpointReader
from tests.support.equality import assert_same_run, losses
from tests.support.jobs import write_profile
from tests.support.long_run import LongRun, rank_of
from tests.support.mpi import ROOT, require_success, run_bounded

pytestmark = pytest.mark.slow

WRITING_S = 0.03
"""About what these small files take to be written."""


class Runs(LongRun):
    """One job on two ranks by a fixed plan, saved after every step, in as many run directories as wanted."""

    def __init__(self, directory: Path, steps: int) -> None:
        super().__init__(directory, 2)
        self.steps = steps
        values, checkpoint = self.values(self.model()), {"every": 1, "keep": 3, "keep_best": 0}
        self.file = self.job("job", values, train={"steps": steps}, checkpoint=checkpoint)
        self.profile = self.made_up()

    def run(self, run: Path, *more: str) -> subprocess.CompletedProcess[str]:
        return run_bounded(*self.command(run, *more), 240)

    def kill(self, run: Path, dice: random.Random, rank_0_alone: bool, writing: str, *more: str) -> tuple[bool, bool]:
        """Start (or resume) the run and kill ranks at a random moment after a file or directory ``writing`` (a pattern) has
        appeared; of checkpoints, the first one of each start is left alone, so that the run gets on.

        Returns (whether it was killed before its end, whether that was left unfinished).
        """
        folder, leftovers = run / "checkpoints", set(run.glob(writing))
        before = newest_good(folder)[0]
        arguments, environment = self.command(run, *(["--resume"] if before else []), *more)
        process = psutil.Popen(
            arguments, env=environment, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        victims: list[psutil.Process] = []

        def got_on() -> bool:
            return "step-" not in writing or max(folder.glob("step-*.h5"), default=before) != before

        try:
            deadline = time.monotonic() + 900
            while len(victims) < 2 or not got_on() or not {*run.glob(writing)} - leftovers:
                if process.poll() is not None:
                    return False, False
                assert time.monotonic() < deadline, f"no {writing} within 900 s"
                if len(victims) < 2:  # looking takes longer than writing
                    ranks = {rank_of(child): child for child in process.children(recursive=True)}
                    victims = [child for rank, child in sorted(ranks.items(), key=str) if rank is not None]
                time.sleep(0.001)
            time.sleep(dice.random() * WRITING_S)
            for victim in victims[:1] if rank_0_alone else victims:
                victim.send_signal(signal.SIGKILL)
            process.wait(60)
        finally:
            for left in [*process.children(recursive=True), process] if process.is_running() else []:
                left.kill()
        return process.returncode != 0, bool({*run.glob(writing)} - leftovers)


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.long)])
def test_killed_while_saving_the_newest_is_whole_and_continues_to_the_bit_np2(kills: int, tmp_path: Path) -> None:
    """Until so many kills have come while a checkpoint was being written. Every second time all ranks, else rank 0 alone.
    Each start resumes what the kill before it has left."""
    runs, dice = Runs(tmp_path, steps=20 * kills), random.Random(kills)
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    entry = {"job": runs.file, "run_dir": straight, "plan": runs.plan, "profile": runs.profile}
    runs.finish_entries(2, {"straight": entry})
    died, caught = 0, 0
    while caught < kills:
        whole = newest_good(killed / "checkpoints")[0]
        dead, writing = runs.kill(killed, dice, died % 2 == 1, "checkpoints/.step-*.tmp-*")
        assert dead, f"the run ended after {died} kills, {caught} of them while saving"
        died, caught = died + 1, caught + writing
        newest, damaged = newest_good(killed / "checkpoints")
        assert newest is not None and damaged == [], (died, damaged)
        assert whole is None or newest >= whole, "what was whole is lost"
    result = require_success(runs.run(killed, "--resume"))
    assert f"Resuming from {newest}" in result.stdout
    print(f"killed {died} times, {caught} times while a checkpoint was being written")

    ours, theirs = (newest_good(run / "checkpoints")[0] for run in (killed, straight))
    assert ours is not None and theirs is not None and ours.name == theirs.name == f"step-{runs.steps:08d}.h5"
    assert_same_run(killed, straight)
    assert len(losses(killed)) == runs.steps
    assert not list((killed / "checkpoints").glob(".*")), "leftovers are cleaned up"


def step_of_result(run: Path, kind: str) -> int:
    """The step whose weights a result holds: it loads, and all its tensors are those of one checkpoint."""
    loaded = AutoModelForCausalLM.from_pretrained(run / kind)
    AutoTokenizer.from_pretrained(run / kind)
    held = {name.replace(".default.", "."): tensor.numpy() for name, tensor in loaded.state_dict().items()}
    for path in sorted((run / "checkpoints").glob("step-*.h5"), reverse=True):
        with CheckpointReader(path) as reader:
            if all(
                np.array_equal(held[name], reader.read("parameters", name)[0]) for name in reader.names("parameters")
            ):
                return int(path.stem.removeprefix("step-"))
    raise AssertionError(f"{run / kind} holds the weights of no checkpoint")


@pytest.mark.long
@pytest.mark.parametrize("kind", ["model", "adapter"])
def test_killed_while_the_result_is_written_it_is_the_former_or_the_new_one_np2(kind: str, tmp_path: Path) -> None:
    """Each start takes a step more and is killed while its result is written, until ten were. (tests/model/test_whole.py kills
    writers alone, within seconds.)"""
    runs, run, dice = Runs(tmp_path, steps=2), tmp_path / "straight", random.Random(3)
    lora = ["--set=adapter.method=lora", "--set=adapter.rank=4"] if kind == "adapter" else []
    options = [*lora, "--set=checkpoint.keep=100"]
    require_success(runs.run(run, *options))
    died, caught, outcomes, former = 0, 0, Counter[str](), step_of_result(run, kind)
    while caught < 10 and died < 60:
        steps = former + 1
        dead, writing = runs.kill(run, dice, died % 2 == 1, f".{kind}.tmp-*", *options, f"--set=train.steps={steps}")
        died, caught = died + dead, caught + writing
        if (run / kind).exists():
            found = step_of_result(run, kind)
            outcomes["the former one" if found == former else "the new one"] += 1
        else:
            outcomes["between the two"] += 1
            (run / f".{kind}.former").rename(run / kind)
            found = step_of_result(run, kind)
        assert found in (former, steps)
        former = found
    print(f"killed {died} times, {caught} times while {kind}/ was being written; then there was: {dict(outcomes)}")
    assert caught == 10
    require_success(runs.run(run, "--resume", *options, f"--set=train.steps={former + 2}"))
    assert step_of_result(run, kind) == former + 2
    assert not list(run.glob(".*.tmp-*")) and not (run / f".{kind}.former").exists(), "leftovers are cleaned up"


@pytest.mark.long
def test_a_full_disk_costs_checkpoints_but_not_the_run_np2(tmp_path: Path) -> None:
    """A file system with room for some of the checkpoints. (Other ways to fill a disk: tests/state/test_checkpoint.py.)"""
    runs, run = Runs(tmp_path, steps=5), tmp_path / "run"
    folder = run / "checkpoints"
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=1200k", "none", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"needs root, to mount a small file system: {mounted.stderr.strip()}")
    try:
        result = require_success(runs.run(run, "--set", "checkpoint.keep=9"))
        assert "Training continues, but" in result.stdout and "could not be written" in result.stdout
        assert "Traceback" not in result.stdout + result.stderr
        assert len(read_metrics(run / "metrics.jsonl").steps) == 5
        assert (run / "model" / "model.safetensors").exists()
        newest, damaged = newest_good(folder)
        assert newest is not None and newest.name != "step-00000005.h5" and damaged == []
        assert "step-00000001.h5" in os.listdir(folder) and not list(folder.glob(".*"))
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_result_without_room_tells_whether_there_is_a_checkpoint(tmp_path: Path) -> None:
    runs, disk = Runs(tmp_path, steps=1), tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100k", "none", str(disk)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"needs root, to mount a small file system: {mounted.stderr.decode().strip()}")
    try:
        profile = write_profile(tmp_path / "alone.toml", runs.file, 1)
        words = ["train", str(runs.file), "--run-dir", str(disk / "run"), "--profile", str(profile)]
        result = run_bounded([sys.executable, "-m", "hetero_mpi", *words], runs.environment(), 120)
        assert result.returncode == 2 and "Traceback" not in result.stderr, result.stderr
        assert "model could not be written" in result.stderr and "; there is no checkpoint" in result.stderr
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_other_data_is_refused_unless_allowed_and_the_best_checkpoint_stays_np2(tmp_path: Path) -> None:
    runs = Runs(tmp_path, steps=4)
    other = tmp_path / "other.txt"
    other.write_text("\n".join(reversed(runs.text.read_text().splitlines())) + "\n")
    values = runs.values(runs.model())
    same = {"train": {"steps": 4, "evaluate_every": 1}, "checkpoint": {"every": 1, "keep": 1, "keep_best": 1}}
    changed = {**same, "data": {"text": [str(other)]}}
    changed["train"] = {"steps": 6, "evaluate_every": 2, "learning_rate": 30.0}  # far too large: the loss rises
    first, second = (runs.job(name, values, **tables) for name, tables in (("first", same), ("second", changed)))
    run = {"run_dir": tmp_path / "run", "profile": runs.profile}
    allowed = {"job": second, **run, "resume": "latest", "set": ["checkpoint.allow_other_data=true"]}
    outcomes = runs.run_entries(
        2, {"first": {"job": first, **run}, "refused": {"job": second, **run, "resume": "latest"}, "allowed": allowed}
    )
    assert outcomes["first"].raised == ("", ""), outcomes["first"]
    refused = outcomes["refused"]
    assert refused.raised == ("CollectiveUserError",) * 2
    assert "written with different data" in refused.texts[0] and "checkpoint.allow_other_data=true" in refused.texts[0]
    assert outcomes["allowed"].raised == ("", ""), outcomes["allowed"]
    assert "the run uses the new data" in outcomes["allowed"].printed
    jump = "the learning rate jumps from 0.003 to 30 at step 5, since [train] steps is 6, was 4, learning_rate is 30.0, was 0.003: "
    assert jump in outcomes["allowed"].printed and "jumps" not in outcomes["first"].printed

    evaluations = read_metrics(tmp_path / "run" / "metrics.jsonl").evaluations
    assert [evaluation.step for evaluation in evaluations] == [1, 2, 3, 4, 6]
    best = min(evaluations, key=lambda evaluation: evaluation.loss)
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == sorted({f"step-{best.step:08d}.h5", "step-00000006.h5"})
    assert best.step != 6, "choose data whose best step is not the last, or this test shows nothing"


def test_a_checkpoint_of_one_mpi_library_continues_under_another_np2(tmp_path: Path) -> None:
    """HETERO_MPI_OTHER_PYTHON names a Python like this one whose mpi4py loads another MPI library."""
    other = os.environ.get("HETERO_MPI_OTHER_PYTHON")
    if other is None:
        pytest.skip("set HETERO_MPI_OTHER_PYTHON to a Python with this package's requirements and another MPI library")
    runs = Runs(tmp_path, steps=4)
    straight, moved = tmp_path / "straight", tmp_path / "moved"
    assert runs.run(straight).returncode == 0
    assert runs.run(moved, "--set", "train.steps=2").returncode == 0
    launcher = str(Path(other).with_name("mpiexec"))
    arguments = [launcher, "-n", "2", other, "-m", "hetero_mpi", *runs.arguments(moved, "--resume")]
    require_success(run_bounded(arguments, runs.environment(), 240))
    assert_same_run(moved, straight)
    libraries = set()
    for step in (2, 4):
        with CheckpointReader(moved / "checkpoints" / f"step-{step:08d}.h5") as reader:
            libraries.add(json.dumps(reader.metadata["versions"]))
    assert len(libraries) == 2, "both runs used the same MPI library"
