"""Start a real MPI job from a test: ``run_mpi(3, ["tests/programs/comm_world.py", "sums"])``."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from hetero_mpi.launch.launcher.command_line import build_command
from hetero_mpi.launch.launcher.launcher import Launcher, find_launcher, recovery_options
from hetero_mpi.util.errors import UserError
from tests.support.processes import run_within

ROOT = Path(__file__).resolve().parents[2]


QUICK_RANKS = (1, 3)
"""Where a test runs on several numbers of ranks, the short suite takes these."""


SHARING = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "OMPI_MCA_mpi_yield_when_idle": "1"}
"""Environment of ranks that share their cores with those of other test processes: one that waits lets others run."""


def on_ranks(*counts: int, quick: Sequence[int] = QUICK_RANKS) -> pytest.MarkDecorator:
    """Run the test, whose parameter is ``ranks``, on each of these numbers of ranks; in the short suite on the ``quick`` ones."""
    marked = [pytest.param(n, id=f"np{n}", marks=() if n in quick else pytest.mark.long) for n in counts]
    return pytest.mark.parametrize("ranks", marked)


def launcher_or_skip() -> Launcher:
    """The launcher of the loaded MPI library; the test is skipped, with the reason, where there is none."""
    try:
        return find_launcher()
    except UserError as error:
        pytest.skip(str(error))


def outliving_or_skip() -> list[str]:
    """The launcher's options that let a job outlive its ranks; skipped where there is no such MPI."""
    try:
        return recovery_options(launcher_or_skip())
    except UserError as error:
        pytest.skip(str(error))


def run_mpi(
    np: int,
    program_or_module_args: Sequence[str],
    timeout_s: float = 60.0,
    env: Mapping[str, str] | None = None,
    launcher: Launcher | None = None,
    options: Sequence[str] = (),
) -> subprocess.CompletedProcess[str]:
    """Run ``python ARGS`` (a program, or ``-m module ...``) on ``np`` ranks from the repository's root.

    ``options``: the launcher's own.

    The result holds exit code, stdout and stderr as text. At the timeout all processes are ended and the test fails with
    what was printed. ``env`` is added to the environment.
    """
    program = [sys.executable, *program_or_module_args]
    command = build_command(launcher or launcher_or_skip(), np, None, program, options)
    environment = {**os.environ, **SHARING, **command.environment, **(env or {})}
    return run_bounded(command.arguments, environment, timeout_s)


def finish_mpi(*arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    """As ``run_mpi``, of ranks that all end well."""
    return require_success(run_mpi(*arguments, **options))


def require_success(done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    """Fail the test, with the end of what the process printed, unless its exit code is 0."""
    assert done.returncode == 0, f"{done.args}\n{str(done.stdout)[-4000:]}\n{str(done.stderr)[-4000:]}"
    return done


def run_bounded(
    arguments: Sequence[str], environment: Mapping[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Run a command from the repository's root; the test fails, and all its processes are ended, at the timeout."""
    try:
        return run_within(timeout_s, arguments, environment, ROOT)
    except subprocess.TimeoutExpired as late:
        words = " ".join(arguments)
        pytest.fail(f"{words} did not end within {timeout_s} s\nstdout:\n{late.stdout}\nstderr:\n{late.stderr}")
