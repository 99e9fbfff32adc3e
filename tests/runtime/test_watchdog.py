"""The watchdog: ranks that are stopped, stuck, asleep or busy; and ranks that die. With real ranks."""

from __future__ import annotations

import signal
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hetero_mpi.training.watchdog import limit_s, report
from hetero_mpi.util.errors import ExitCode
from tests.support.long_run import LongRun
from tests.support.mpi import ROOT, finish_mpi, run_mpi

pytestmark = pytest.mark.slow

PROGRAM = "tests/programs/watched.py"
TRIED = ("--set", "profile.calibrate=true")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> LongRun:
    return LongRun(tmp_path_factory.mktemp("watched"), 2)


def test_the_report_is_the_one_in_the_document() -> None:
    words = {
        0: {"at": "training step 18, 0RECV_B2", "still_s": 61.0, "waits_for": "rank 1 to send"},
        1: {"at": "training step 18, 1F2", "still_s": 0.5},
    }
    heartbeat = SimpleNamespace(rank=0, heard_s={1: 0.0}, words=words, silent_s={0: 0.0, 1: 60.0}.__getitem__)
    world = SimpleNamespace(size=2, hosts=("rtx", "titan"), numbers=())
    assert (
        f"```\n{report(cast(Any, world), 60.0, cast(Any, heartbeat))}\n" in (ROOT / "docs" / "recovery.md").read_text()
    )


@pytest.mark.long
@pytest.mark.parametrize("way", ["busy", "goes-on", "asleep"])
def test_what_is_no_hang_np3(way: str) -> None:
    finish_mpi(3, [PROGRAM, way], timeout_s=120)


def test_a_stuck_rank_ends_the_job_and_everybody_is_named_np3() -> None:
    result = run_mpi(3, [PROGRAM, "stuck"], timeout_s=120)
    assert result.returncode == ExitCode.HUNG, result.stdout + result.stderr
    lines = [line.strip() for line in result.stderr.splitlines() if line.startswith("  rank ")]
    assert [line.split(" on ")[0] for line in lines] == ["rank 0", "rank 1", "rank 2"]
    assert all("training step 7, unchanged for " in line for line in lines)
    assert lines[0].endswith("waits for rank 1 to send")
    assert "waits" not in lines[1]
    assert lines[2].endswith("waits for the others")
    assert result.stderr.count("No rank has made progress for 3.00 s") == 1
    assert "All ranks answer" in result.stderr


@pytest.mark.long
def test_a_defect_of_the_watchdog_is_told_with_its_action_np2() -> None:
    result = run_mpi(2, [PROGRAM, "unwatched"], timeout_s=120)
    assert result.returncode == ExitCode.FAILED, result.stdout + result.stderr
    assert "rank 1/2 on" in result.stderr and "ZeroDivisionError" in result.stderr
    assert sys.version_info < (3, 11) or "while watching for a hang" in result.stderr


@pytest.mark.long
@pytest.mark.parametrize("victim", [1, 0])
def test_a_stopped_rank_is_waited_for_then_named_np2(job: LongRun, victim: int) -> None:
    """Stopped for less than the limit, it is no failure; for good, it is. Whichever rank it is, the other one tells."""
    limit, other = 10, 1 - victim
    run = job.directory / f"stopped-{victim}"
    arguments, environment = job.command(run, "--set", f"cluster.watchdog_s={limit}")
    with job.started(arguments, environment, run) as running:
        running.wait_for_steps(5)
        running.ranks[victim].send_signal(signal.SIGSTOP)
        time.sleep(limit / 2)
        running.ranks[victim].send_signal(signal.SIGCONT)
        running.wait_for_steps(5)
        running.ranks[victim].send_signal(signal.SIGSTOP)
        assert running.end() == ExitCode.HUNG, running.text()
        told = running.text()
    where = {line.strip()[:6]: line for line in told.splitlines() if line.startswith("  rank ")}
    assert "training step" in where[f"rank {other}"] and "silent for" not in where[f"rank {other}"], told
    assert "silent for" in where[f"rank {victim}"], told
    assert told.count("No rank has made progress") == 1
    assert f"Stopped, or disconnected from the other ranks: rank {victim} on" in told
    log = (run / "logs" / f"rank-{other:04d}.log").read_text()
    assert "the main thread is at" in log and "loop.py" in log


@pytest.mark.long
def test_a_trial_that_hangs_ends_the_job_and_everybody_is_named_np2(tmp_path: Path) -> None:
    job, run = LongRun(tmp_path, 2, module="tests.programs.stuck_trial"), tmp_path / "run"
    with job.started(*job.command(run, *TRIED, "--set", "cluster.watchdog_s=10"), run) as running:
        assert running.end() == ExitCode.HUNG, running.text()
        told = running.text()
    where = [line.strip() for line in told.splitlines() if line.startswith("  rank ")]
    assert "calibration run, step 2" in where[0] and " waits for " in where[0], told
    assert "calibration run, step 1" in where[1] and " waits for " not in where[1], told
    assert "Calibration result: " not in told and not (run / "metrics.jsonl").exists()


@pytest.mark.long
def test_a_death_in_a_trial_ends_all_and_leaves_the_run_directory_as_it_was_np2(tmp_path: Path) -> None:
    job, run = LongRun(tmp_path, 2, module="tests.programs.stuck_trial"), tmp_path / "run"
    with job.started(*job.command(run, *TRIED), run) as running:
        running.wait_for("the trial", lambda: "Calibration run of the plan" in running.text())
        running.find_ranks()
        running.ranks[1].send_signal(signal.SIGKILL)
        assert running.end() in (signal.SIGKILL, 128 + signal.SIGKILL), running.text()
        assert f"PID {running.ranks[1].pid} " in running.text(), running.text()
    assert {path.name for path in run.iterdir()} <= {"logs", ".lock"}


def test_a_killed_rank_ends_all_and_is_named_np2(job: LongRun) -> None:
    run = job.directory / "killed"
    arguments, environment = job.command(run)
    with job.started(arguments, environment, run) as running:
        running.wait_for_steps(3)
        running.ranks[1].send_signal(signal.SIGKILL)
        began = time.monotonic()
        code = running.end()
        assert code in (signal.SIGKILL, 128 + signal.SIGKILL), running.text()
        assert time.monotonic() - began < 10 * 3, "10 s on a machine that does nothing else"
        killed = running.ranks[1].pid
        # Open MPI: process rank 1 with PID 123 on node vm; MPICH: PID 123 RUNNING AT vm
        assert f"PID {killed} " in running.text() and socket.gethostname() in running.text(), running.text()
    assert f"process {killed} on " in (run / "logs" / "rank-0001.log").read_text()


def test_limits() -> None:
    assert limit_s("auto", 0.1) == 60
    assert limit_s("auto", 10.0) == 200
    assert limit_s(7, 10.0) == 7
