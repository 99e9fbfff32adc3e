"""Shells and machines that lack what a launcher takes for granted, each with the real thing: no HOME, a full folder for temporary
files, variables of a SLURM job that has ended, a terminal that closes under ``nohup``."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.long_run import LongRun
from tests.support.mpi import ROOT, launcher_or_skip, require_success
from tests.support.slurm_lab import SlurmLab

pytestmark = pytest.mark.slow

LAUNCH = [sys.executable, "-m", "hetero_mpi", "launch"]
CACHE = ["--", "cache"]


def launched(*words: str, before: tuple[str, ...] = (), **changed: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in changed}
    environment |= {name: value for name, value in changed.items() if value} | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [*before, *LAUNCH, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )


def test_a_service_without_a_home_starts(tmp_path: Path) -> None:
    launcher_or_skip()
    require_success(launched("-np", "1", *CACHE, HOME=""))
    missing = launched("-np", "1", *CACHE, HETERO_MPI_MPIEXEC="/bin/ls")
    assert missing.returncode == 2 and "/bin/ls (ls (GNU coreutils)" in missing.stderr, "what it said is shown"


def test_a_full_folder_for_temporary_files_is_named(tmp_path: Path) -> None:
    launcher_or_skip()
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    mount = f"mount -t tmpfs -o size=1m none {tmp_path} && head -c 2000000 /dev/zero > {tmp_path}/fill; " + 'exec "$@"'
    answer = launched("-np", "2", *CACHE, before=("unshare", "-m", "sh", "-c", mount, "sh"), TMPDIR=str(tmp_path))
    assert answer.returncode == 2, answer.stdout + answer.stderr
    assert re.search(rf"{tmp_path}, the folder for temporary files, has 0\.0 MB of free space", answer.stderr)
    gone = launched("-np", "2", *CACHE, TMPDIR=str(tmp_path / "none" / "such"))
    assert gone.returncode == 2 and "cannot be written" in gone.stderr, gone.stderr


def test_what_a_killed_launcher_left_under_the_same_process_number_does_not_matter(tmp_path: Path) -> None:
    launcher_or_skip()
    for number in range(os.getpid() + 1, os.getpid() + 2000):
        left = tmp_path / f"ompi.{number}"
        left.mkdir()
        (left / f"pmix.{os.uname().nodename}.tool").touch()
    require_success(launched("-np", "1", *CACHE, TMPDIR=str(tmp_path), PRTE_MCA_prte_local_tmpdir_base=""))
    assert all(path.name.startswith("ompi.") for path in tmp_path.iterdir()), "and it leaves nothing itself"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmLab]:
    launcher_or_skip()
    with SlurmLab(tmp_path_factory.mktemp("slurm") / "lab") as started:
        yield started


def test_a_shell_that_outlived_its_slurm_job_and_too_few_tasks(lab: SlurmLab, tmp_path: Path) -> None:
    script, output, variables = tmp_path / "script", tmp_path / "output.txt", tmp_path / "variables"
    script.write_text(
        f"#!/bin/bash\nenv > {variables}\n{' '.join(LAUNCH)} -np 3 {' '.join(CACHE)}\n"
        f"{' '.join(LAUNCH)} -np 1 {' '.join(CACHE)} > {tmp_path}/one.txt 2>&1\n"
    )
    job = lab.submit("--nodes=1", "--ntasks=1", "--mem=0", f"--output={output}", str(script), env={})
    lab.wait_for(job, ("COMPLETED", "FAILED"), 90.0, lambda: output.read_text() + lab.logs())
    assert "this SLURM job has 1: request --ntasks=3" in output.read_text(), output.read_text()
    assert "has no such" not in (tmp_path / "one.txt").read_text(), "the job is running"
    kept = dict(line.split("=", 1) for line in variables.read_text().splitlines() if line.startswith("SLURM"))
    answer = launched("-np", "1", *CACHE, **kept)
    assert answer.returncode == 2, answer.stdout + answer.stderr
    assert f"SLURM job {job}, which is not running" in answer.stderr
    assert 'unset "${!SLURM_@}"' in answer.stderr


def test_nohup_outlives_the_terminal_np2(tmp_path: Path) -> None:
    job, run = LongRun(tmp_path, 2), tmp_path / "run"
    with job.started(["nohup", *LAUNCH, "-np", "2", "--", *job.arguments(run)], job.environment(), run) as running:
        running.wait_for_steps(2)
        running.process.send_signal(signal.SIGHUP)
        time.sleep(1.0)
        running.wait_for_steps(2)
        assert running.process.poll() is None, running.text()
        running.process.send_signal(signal.SIGINT)
        assert running.end() == 76, running.text()
