"""What a launcher takes for granted, and not every shell or machine has: a home, room for temporary files, the SLURM job that its
variables name. Standard library only."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from hetero_mpi.disk import free_bytes
from hetero_mpi.errors import UserError

_NEEDED_BYTES = 1_000_000
"""Open MPI 5.0.11 was seen to write 100 kB for 2 ranks and 190 kB for 16."""
_RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED")


def with_home(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with a HOME, without which Open MPI's programs do not start: that of the password file, where it is unset."""
    found = dict(environment)
    if not found.get("HOME"):
        with contextlib.suppress(RuntimeError):  # the password file does not know this user
            found["HOME"] = str(Path("~").expanduser())
    return found


def check_temporary_folder() -> None:
    """Refuse a folder for temporary files in which the launcher could not begin.

    :raises UserError: it is full, or cannot be written.
    """
    folder = Path(next((found for name in ("TMPDIR", "TEMP", "TMP") if (found := os.environ.get(name))), "/tmp"))
    way_out = "make room there, or name another folder: `export TMPDIR=/var/tmp`, say"
    try:
        free = free_bytes(folder)
    except OSError as error:
        raise UserError(
            f"{folder}, the folder for temporary files, cannot be used ({error.strerror}): {way_out}"
        ) from None
    if free < _NEEDED_BYTES:
        raise UserError(
            f"{folder}, the folder for temporary files, has {free / 1e6:.1f} MB of room, and the launcher needs "
            f"{_NEEDED_BYTES / 1e6:.0f} MB: {way_out}"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"{folder}, the folder for temporary files, cannot be written: {way_out}")


def check_slurm_job(environment: Mapping[str, str]) -> None:
    """Refuse variables of a SLURM job that has ended, as a shell in tmux or Jupyter keeps them.

    :raises UserError: SLURM, where it can be asked, knows no such running job.
    """
    job = environment.get("SLURM_JOB_ID")
    state = None if job is None else _job_state(job)
    if state is not None and state not in _RUNNING:
        raise UserError(
            f"this shell has the variables of SLURM job {job}, and SLURM knows no such running job{state and f' (it is {state})'}: "
            'the shell outlived it, or was copied from it. Take them away, in bash by `unset "${!SLURM_@}"`, or start in a new '
            "allocation (salloc, sbatch)"
        )


def check_slurm_tasks(ranks: int, tasks: int, given: Sequence[str]) -> None:
    """Refuse more ranks than the SLURM job has tasks. ``given``: the user's own options of the launcher.

    :raises UserError: there are too few.
    """
    if 0 < tasks < ranks and not any("oversubscribe" in option for option in given) and shutil.which("squeue"):
        raise UserError(
            f"{ranks} ranks need as many tasks, and this SLURM job has {tasks}: ask for --ntasks={ranks} in the batch script, "
            f"or start {tasks} rank{'s' if tasks > 1 else ''}; --mpirun-args=--oversubscribe lets ranks share cores"
        )


def _job_state(job: str) -> str | None:
    """A SLURM job's state; "": SLURM knows no such job; None: it cannot be asked."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        command = ["squeue", "--noheader", "--jobs", job, "--format", "%T"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10)
        if answer.returncode == 0:
            return answer.stdout.strip().partition("\n")[0]
        if "Invalid job id" in answer.stderr:
            return ""
    return None
