"""The kernel kills a rank for lack of memory: the limit of a real control group, and what the run then says."""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hetero_mpi.device.shortage import memory_kills, memory_kills_text
from hetero_mpi.rundir.metrics import read_metrics
from tests.runtime.test_recovery import outliving_or_skip
from tests.support.long_run import LongRun

pytestmark = pytest.mark.slow

ROOT_GROUP = Path("/sys/fs/cgroup")
BALLOON = """\
import sys, time
open("/proc/self/oom_score_adj", "w").write("-1000")  # something else in the group, which the kernel is to spare
held = []
while len(held) < 500:
    held.append(bytearray(8_000_000))
    held[-1][::4096] = b"x" * len(held[-1][::4096])
    time.sleep(0.05)
time.sleep(600)
"""


class MemoryGroup:
    """A control group without a limit; a fixture's value. Skips where none can be made."""

    def __init__(self) -> None:
        version_2 = (ROOT_GROUP / "cgroup.controllers").exists()
        self.path = (ROOT_GROUP if version_2 else ROOT_GROUP / "memory") / f"hetero-test-{os.getpid()}"
        names = ("memory.max", "memory.current") if version_2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        self._limit, self._usage = (self.path / name for name in names)
        if os.geteuid() != 0:
            pytest.skip("a control group with a limit needs root")
        try:
            self.path.mkdir()
        except OSError as error:
            pytest.skip(f"no control group can be made here: {error}")
        if not self._limit.exists():
            self.path.rmdir()
            pytest.skip(f"{self.path.parent} has no memory controller")

    def add(self, pid: int) -> None:
        (self.path / "cgroup.procs").write_text(str(pid))

    def fill(self, spare_bytes: int) -> subprocess.Popen[bytes]:
        """Limit the group to what it holds and so many bytes more, and start a process in it that wants more than that."""
        self._limit.write_text(str(int(self._usage.read_text()) + spare_bytes))
        balloon = subprocess.Popen([sys.executable, "-c", f"input()\n{BALLOON}"], stdin=subprocess.PIPE)
        self.add(balloon.pid)
        assert balloon.stdin is not None
        balloon.stdin.write(b"\n")
        balloon.stdin.flush()
        return balloon


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    made = MemoryGroup()
    yield made
    deadline = time.monotonic() + 30
    while (made.path / "cgroup.procs").read_text() and time.monotonic() < deadline:
        time.sleep(0.1)
    made.path.rmdir()


def kill_rank_1(job: LongRun, run: Path, group: MemoryGroup, *options: str) -> tuple[int, str]:
    """Train on two ranks; rank 1 is in the group, which becomes too small once steps are taken. (Exit code, what was printed.)"""
    words = [sys.executable, "-m", "hetero_mpi", "launch", "-np", "2", *options, "--", *job.arguments(run)]
    words += ["--set", "train.steps=200"]
    with job.started(words, job.environment(), run) as running:
        running.wait_for("two ranks", lambda: running.find_ranks() is None and len(running.ranks) == 2)
        group.add(running.ranks[1].pid)
        running.wait_for_steps(3)
        running.ranks[0].suspend()  # or the last step may be done before the group is full
        victim = running.ranks[1]
        balloon = group.fill(32_000_000)
        try:
            running.wait_for("the death", lambda: not victim.is_running() or victim.status() == psutil.STATUS_ZOMBIE)
        finally:
            balloon.kill()
            balloon.wait()
            running.ranks[0].resume()
        return running.end(), running.text()


@pytest.mark.parametrize("recover", [False, pytest.param(True, marks=pytest.mark.long)], ids=["plain", "recover"])
def test_a_rank_that_the_kernel_kills_is_named_with_the_reason_np2(
    recover: bool, group: MemoryGroup, tmp_path: Path
) -> None:
    options = ["--recover"] if recover and outliving_or_skip() else []
    job, run, before = LongRun(tmp_path, 2), tmp_path / "run", memory_kills()
    code, text = kill_rank_1(job, run, group, *options)
    assert memory_kills() > before, text
    host = socket.gethostname()
    assert re.search(rf"he kernel on {host} killed \d+ process(es)? because it ran out of memory", text), text
    assert "--set plan.memory_reserve=0.2" in text
    if recover:
        assert code == 0, text
        assert f"Lost rank 1 on {host}. Continuing with 1 rank, numbered 0. The kernel" in text, text
        assert [step.step for step in read_metrics(run / "metrics.jsonl").steps] == list(range(1, 201))
    else:
        assert code != 0
        assert "rank 1 with PID" in text and f"on node {host} exited on" in text and "signal 9" in text, text


def test_the_count_of_the_kernel_and_its_words(tmp_path: Path) -> None:
    counters = tmp_path / "vmstat"
    counters.write_text("nr_free_pages 12\noom_kill 3\nswap_ra 0\n")
    assert memory_kills(counters) == 3 and memory_kills(tmp_path / "absent") == 0
    assert memory_kills_text({"a": 0, "b": 0}) == ""
    text = memory_kills_text({"a": 2, "b": 0, "c": 1})
    assert text.startswith(
        "the kernel on a killed 2 processes because it ran out of memory, the kernel on c killed 1 process because"
    )
