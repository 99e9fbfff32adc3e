"""How a run ends when everything around it goes away: all ranks, the launcher, ``launch`` itself, the reader of its output."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from hetero_mpi.planning.types.toml_files import load_profile, save_profile
from hetero_mpi.rundir.metrics import read_metrics
from hetero_mpi.state.directory import checkpoint_path
from hetero_mpi.util.errors import ExitCode
from tests.runtime.test_signals import stopped
from tests.support.long_run import LongRun, Running, rank_of
from tests.support.mpi import ROOT, outliving_or_skip

pytestmark = pytest.mark.slow


def launched(job: LongRun, run: Path, *more: str, recover: bool = True) -> list[str]:
    options = ["--recover"] if recover else []
    return [
        sys.executable,
        "-m",
        "hetero_mpi",
        "launch",
        "-np",
        str(job.ranks),
        *options,
        "--",
        *job.arguments(run, *more),
    ]


def last_lines(running: Running) -> list[str]:
    assert "\0" not in running.text()
    return [line for line in running.text().splitlines() if line.strip()][-2:]


@pytest.mark.parametrize("victim", ["ranks", "launcher"])
def test_a_run_that_did_not_reach_its_end_says_what_to_type_np2(tmp_path: Path, victim: str) -> None:
    outliving_or_skip()
    job, run = LongRun(tmp_path, 2), tmp_path / "run"
    with job.started(launched(job, run, "--resume"), job.environment(), run) as running:
        assert running.process.wait(60) == ExitCode.USER_ERROR, "nothing to resume from: the user's own mistake"
        assert "has not finished" not in running.text()
    with job.started(launched(job, run), job.environment(), run) as running:
        running.wait_for_steps(3)
        victims = running.ranks.values() if victim == "ranks" else running.process.children()
        for process in list(victims):
            process.kill()
        code = running.end()
        told, command = last_lines(running)
    assert code == (ExitCode.FAILED if victim == "ranks" else 128 + signal.SIGKILL)
    assert f"launch: the run has not finished (exit code {code})" in told
    arguments = " ".join(job.arguments(run))
    assert command == f"launch: python -m hetero_mpi launch -np 2 --recover -- {arguments} --resume any"
    assert not (run / "model").exists()


def test_a_recovery_that_lacks_memory_says_how_to_resume_np2(tmp_path: Path) -> None:
    outliving_or_skip()
    job, run = LongRun(tmp_path, 2), tmp_path / "run"
    arguments = launched(job, run, "--set", "plan.offload=false", "--set", "checkpoint.every=2")
    place = arguments.index("--profile") + 1
    profile = load_profile(arguments[place])
    # Enough for the stage of each rank, not for both.
    devices = tuple(replace(device, memory_bytes=600_000) for device in profile.devices)
    save_profile(replace(profile, devices=devices), Path(arguments[place]))
    with job.started(arguments, job.environment(), run) as running:
        running.wait_for_steps(6)
        running.ranks[1].kill()
        assert running.end() == ExitCode.USER_ERROR, running.text()
    assert last_lines(running)[-1].startswith("`train --resume any` ") and str(run) in last_lines(running)[-1]


def test_a_signal_while_the_run_recovers_is_noted_np2(tmp_path: Path) -> None:
    outliving_or_skip()
    job, run = LongRun(tmp_path, 2), tmp_path / "run"
    arguments = launched(job, run, "--set", "checkpoint.replicate_every=2")
    with job.started(arguments, job.environment(), run) as running:
        running.wait_for_steps(6)
        running.ranks[1].kill()
        running.wait_for("the word of the death", lambda: "Lost rank " in running.text())
        running.process.send_signal(signal.SIGINT)
        step = stopped(running)
    assert "after the last step" not in running.text() and step >= 4


@pytest.mark.parametrize("dies", [False, True], ids=["calm", "outlives a death"])
def test_a_run_that_could_outlive_deaths_ends_with_0_and_no_more_words_np2(tmp_path: Path, dies: bool) -> None:
    outliving_or_skip()
    job, run = LongRun(tmp_path, 2), tmp_path / "run"
    more = ("--set", "train.steps=20", "--set", "checkpoint.replicate_every=2")
    with job.started(launched(job, run, *more), job.environment(), run) as running:
        running.wait_for_steps(4)
        if dies:
            running.ranks[1].kill()
        running.finish()
    assert (run / "model" / "config.json").exists()
    assert last_lines(running)[-1].startswith("  logs "), "the list of what was written"


def test_launch_that_is_killed_alone_takes_the_run_to_an_orderly_end_np2(tmp_path: Path) -> None:
    if not sys.platform.startswith("linux"):
        pytest.skip("only Linux tells a process that its parent has died")
    job, run = LongRun(tmp_path, 2), tmp_path / "run"
    with job.started(launched(job, run, recover=False), job.environment(), run) as running:
        running.wait_for_steps(3)
        running.process.kill()
        _, alive = psutil.wait_procs(list(running.ranks.values()), timeout=60)
        assert not alive, running.text()
    steps = read_metrics(run / "metrics.jsonl").steps
    assert checkpoint_path(run / "checkpoints", steps[-1].step).exists(), "the checkpoint of the last step"


@pytest.mark.parametrize("ranks", [0, 2], ids=["alone", "np2"])
def test_the_reader_of_the_output_goes_away(tmp_path: Path, ranks: int) -> None:
    job, run = LongRun(tmp_path, max(1, ranks)), tmp_path / "run"
    more = ("--set", "train.steps=40")
    if ranks:
        command = launched(job, run, *more, recover=False)
    else:
        command = [sys.executable, "-m", "hetero_mpi", *job.arguments(run, *more, planned=False)]
    process = subprocess.Popen(
        command,
        env=job.environment(),
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(120) == 0
    assert len(read_metrics(run / "metrics.jsonl").steps) == 40 and (run / "model" / "config.json").exists()
    assert "Plan: " in (run / "logs" / "rank-0000.log").read_text()


def test_a_terminal_that_goes_away_np2(tmp_path: Path) -> None:
    """It is nobody's controlling terminal, so that its end sends no signal; nothing can be written there any more."""
    job, run = LongRun(tmp_path, 2), tmp_path / "run"
    ours, theirs = pty.openpty()
    command = launched(job, run, "--set", "train.steps=60", recover=False)
    process = subprocess.Popen(
        command, env=job.environment(), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs,
        start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    deadline = time.monotonic() + 120
    shown = b""
    while not (run / "metrics.jsonl").exists() and time.monotonic() < deadline:
        try:
            shown += os.read(ours, 65536)
        except OSError:
            pytest.fail(f"ended with {process.wait(10)}: {shown.decode(errors='replace')}")
    os.close(ours)
    assert process.wait(120) == 0
    assert len(read_metrics(run / "metrics.jsonl").steps) == 60 and (run / "model" / "config.json").exists()
    assert not [one for one in psutil.Process().children(recursive=True) if rank_of(one) is not None]
