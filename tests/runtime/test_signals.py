"""Signals: the step is finished, a checkpoint written, and the run goes on from it to the bit; a second one ends at once."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from hetero_mpi.comm.ranks.leave import Interrupted
from hetero_mpi.training import signals
from hetero_mpi.training.signals import REQUESTS, StopRequest
from hetero_mpi.util.errors import ExitCode
from tests.support.equality import assert_same_run
from tests.support.long_run import LongRun, Running
from tests.support.mpi import ROOT, run_bounded

pytestmark = pytest.mark.slow


def stopped(running: Running) -> int:
    """The step after which the job stopped in order; its checkpoint is there."""
    assert running.end() == ExitCode.STOPPED, running.text()
    told = re.search(r"^Stopped after step (\d+) \(requested by a signal\): (\S+) is complete", running.text(), re.M)
    assert told is not None and "Traceback" not in running.text(), running.text()
    assert Path(told.group(2)).is_file()
    assert not (running.run / "model").exists(), "a run that has stopped has no result yet"
    return int(told.group(1))


def assert_equal_to_a_straight_run(job: LongRun, last: int) -> None:
    """Resume ``run`` up to step ``last``, and run as far without a stop: the same bits."""
    common = {"job": job.file, "plan": job.plan, "set": [f"train.steps={last}"], "profile": job.made_up()}
    run, straight = job.directory / "run", job.directory / "straight"
    resumed = {**common, "run_dir": run, "resume": "latest"}
    job.finish_entries(job.ranks, {"run": resumed, "straight": {**common, "run_dir": straight}})
    assert_same_run(run, straight)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)], ids=["np2", "np3"])
def test_a_signal_to_the_launcher_stops_in_order_and_the_run_goes_on_to_the_bit(ranks: int, tmp_path: Path) -> None:
    """Of three ranks one is idle."""
    job, run = LongRun(tmp_path, ranks), tmp_path / "run"
    launch = [sys.executable, "-m", "hetero_mpi", "launch", "-np", str(ranks), "--", *job.arguments(run)]
    with job.started(launch, job.environment(), run) as running:
        running.wait_for_steps(3)
        running.process.send_signal(signal.SIGINT)
        step = stopped(running)
    assert_equal_to_a_straight_run(job, step + 2)


@pytest.mark.long
def test_signals_to_ranks_stop_in_order_one_start_after_the_other_np3(tmp_path: Path) -> None:
    """To a rank with a stage and to an idle one; each start resumes the one before it."""
    job, run = LongRun(tmp_path, 3), tmp_path / "run"
    steps = [0]
    for rank in (1, 2):
        resume = ["--resume"] if steps[-1] else []
        with job.started(*job.command(run, *resume), run) as running:
            running.wait_for_steps(3)
            running.ranks[rank].send_signal(signal.SIGTERM)
            steps.append(stopped(running))
    assert steps == sorted(set(steps)), "every start took steps"
    assert_equal_to_a_straight_run(job, steps[-1] + 2)


@pytest.mark.long
def test_a_second_signal_ends_at_once_np2(tmp_path: Path) -> None:
    """Even where the step cannot end, as the other rank does not answer."""
    job, run = LongRun(tmp_path, 2), tmp_path / "run"
    with job.started(*job.command(run), run) as running:
        running.wait_for_steps(2)
        running.ranks[1].send_signal(signal.SIGSTOP)
        time.sleep(1.0)
        running.ranks[0].send_signal(signal.SIGTERM)
        time.sleep(2 * signals.ECHO_S)
        assert running.process.poll() is None, "the first one is noted only"
        running.ranks[0].send_signal(signal.SIGTERM)
        assert running.end() in (signal.SIGTERM, 128 + signal.SIGTERM), running.text()  # MPICH's launcher, Open MPI's
    assert not list((run / "checkpoints").glob("*.h5"))


@pytest.mark.long
def test_a_second_sigusr1_changes_nothing_np2(tmp_path: Path) -> None:
    """SLURM sends it before the time limit, whatever a user has sent; to the launcher and, as some sites do, to the ranks."""
    job, run = LongRun(tmp_path, 2), tmp_path / "run"
    launch = [sys.executable, "-m", "hetero_mpi", "launch", "-np", "2", "--", *job.arguments(run)]
    with job.started(launch, job.environment(), run) as running:
        running.wait_for_steps(2)
        running.ranks[1].send_signal(signal.SIGSTOP)
        running.process.send_signal(signal.SIGUSR1)
        time.sleep(2 * signals.ECHO_S)
        for process in (running.process, running.ranks[0]):
            process.send_signal(signal.SIGUSR1)
        time.sleep(2 * signals.ECHO_S)
        assert running.process.poll() is None, running.text()
        running.ranks[1].send_signal(signal.SIGCONT)
        stopped(running)
    assert "launch: SIGUSR1: asking the job to end" in running.text()
    assert "non-zero status" not in running.text(), "the end was in order, and has been told"


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "words"), [(signal.SIGUSR1, []), (signal.SIGINT, []), (signal.SIGTERM, ["--dry-run"])]
)
def test_a_signal_while_profiling_says_what_to_do_np2(tmp_path: Path, number: int, words: list[str]) -> None:
    job, run = LongRun(tmp_path, 2), tmp_path / "run"
    launch = [sys.executable, "-m", "hetero_mpi", "launch", "-np", "2", "--", *job.arguments(run, planned=False)]
    with job.started([*launch, "--set", "profile.repeats=1000", *words], job.environment(), run) as running:
        running.wait_for("the profile", lambda: "Profiling 2 ranks" in running.text())
        running.process.send_signal(number)
        assert running.end() == 128 + number, running.text()
    told = running.text()
    assert "before the first step" in told and "SLURM" not in told, "there is none here"
    assert ("SIGUSR1" in told) == (number == signal.SIGUSR1) and ("--resume" in told) == (not words)
    assert "MPI_ABORT" not in told and "prterun" not in told


@pytest.mark.parametrize("number", REQUESTS)
def test_before_the_first_step_nothing_is_saved(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopRequest() as stop, pytest.raises(Interrupted) as caught:
        signal.raise_signal(number)
    assert caught.value.number == number and stop()
    assert signal.getsignal(number) == before, "handlers are put back"


def test_a_python_program_gets_a_user_error_before_the_first_step() -> None:
    program = "import signal; from hetero_mpi import api; from hetero_mpi.training.signals import StopRequest\n"
    program += "try:\n with api.collective(), StopRequest(): signal.raise_signal(15)\nexcept api.UserError as e: exit(e.exit_code)"
    assert run_bounded([sys.executable, "-c", program], os.environ, 120).returncode == ExitCode.STOPPED


def test_the_same_request_on_two_ways_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with StopRequest() as stop, stop.noting():
        assert not stop()
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert stop.asked_by == signal.SIGTERM
        assert signal.getsignal(signal.SIGINT) != signal.SIG_DFL


def test_exit_codes_are_in_the_documentation() -> None:
    text = (ROOT / "docs" / "recovery.md").read_text(encoding="utf-8")
    table = dict(re.findall(r"^\| (\d+) \| `(\w+)`", text, re.M))
    assert table == {str(int(code)): code.name for code in ExitCode}
