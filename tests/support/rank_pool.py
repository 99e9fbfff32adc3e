"""MPI jobs that stay: ``run_pooled(3, "comm_world")`` runs a program of tests/programs on ranks that have started already.

Starting a rank (MPI, torch) takes longer than most of what tests run on it. So each test process keeps a job, started by the
real launcher; programs run there one after the other, on all of its ranks or the first ones. What kills a rank, limits a process
or needs an environment of its own belongs to ``tests.support.mpi.run_mpi``.
"""

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import pytest

from hetero_mpi.launch.launcher.command_line import build_command
from tests.support.mpi import ROOT, SHARING, launcher_or_skip

START_S, LEAVING_S = 120.0, 20.0
DIED = "it died"
USUAL_RANKS = 3
"""Of the job that serves all programs on no more ranks."""
AFTER_A_FAILURE_S = 3.0
"""How long the other ranks may take to answer once one has failed: most of them wait for it forever."""


class Pool:
    """``np`` ranks of ``programs/pooled.py``, each connected by a socket; the ranks leave when it closes.

    :raises AssertionError: the ranks did not start.
    """

    def __init__(self, np: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        with socket.socket(socket.AF_UNIX) as listener:
            address = str(self.folder / "socket")
            listener.bind(address)
            listener.listen(np)
            listener.settimeout(1.0)
            command = build_command(
                launcher_or_skip(), np, None, [sys.executable, "-m", "tests.programs.pooled", address]
            )
            environment = {**os.environ, **SHARING, **command.environment}
            self.output = self.folder / "launcher.txt"
            with self.output.open("wb") as file:
                self.process = subprocess.Popen(
                    command.arguments,
                    env=environment,
                    cwd=ROOT,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    start_new_session=True,
                )
            try:
                self.ranks = self._accept(listener, np)
            except BaseException:
                self.kill()
                raise

    def _accept(self, listener: socket.socket, np: int) -> list[tuple[socket.socket, TextIO]]:
        deadline, found = time.monotonic() + START_S, dict[int, tuple[socket.socket, TextIO]]()
        while len(found) < np:
            assert self.process.poll() is None and time.monotonic() < deadline, self.output.read_text()
            with contextlib.suppress(TimeoutError):
                connection, _ = listener.accept()
                connection.setblocking(True)
                stream = connection.makefile("rw")
                found[json.loads(stream.readline())] = (connection, stream)
        return [found[rank] for rank in range(np)]

    def run(self, np: int, program: str, arguments: Sequence[str], timeout_s: float) -> list[dict[str, Any]]:
        """What each rank answers: exit code, traceback ("": none), stdout, stderr. Ranks that do not answer count as failed."""
        for _, stream in self.ranks:
            stream.write(json.dumps([np, program, *arguments]) + "\n")
            stream.flush()
        deadline, answers = time.monotonic() + timeout_s, dict[int, dict[str, Any]]()
        with selectors.DefaultSelector() as waiting:
            for rank, (connection, _) in enumerate(self.ranks):
                waiting.register(connection, selectors.EVENT_READ, rank)
            while waiting.get_map() and (left_s := deadline - time.monotonic()) > 0:
                for key, _ in waiting.select(left_s):
                    connection, stream = self.ranks[key.data]
                    waiting.unregister(connection)
                    line = stream.readline()
                    answers[key.data] = json.loads(line) if line else _failed(DIED)
                    if answers[key.data]["code"] != 0:
                        deadline = min(deadline, time.monotonic() + AFTER_A_FAILURE_S)
        return [answers.get(rank) or _failed("it gave no answer in time") for rank in range(len(self.ranks))]

    def release(self) -> None:
        """Let the ranks leave MPI by themselves."""
        for connection, stream in self.ranks:
            stream.close()
            connection.close()

    def kill(self) -> None:
        before_s = _children_s()
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        _spent_s[0] -= _children_s() - before_s  # what its programs took was counted when they ran
        shutil.rmtree(self.folder)


def _failed(why: str) -> dict[str, Any]:
    return {"code": 1, "traceback": why, "stdout": "", "stderr": "", "seconds": 0.0}


_pools: dict[int, Pool] = {}
_spent_s = [0.0]


def _children_s() -> float:
    times = os.times()
    return times.children_user + times.children_system


def spent_s() -> float:
    """Processor time that ranks of pools spent on programs so far, in seconds."""
    return _spent_s[0]


def run_pooled(
    np: int, program: str, arguments: Sequence[str] = (), timeout_s: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """Run ``main`` of tests/programs/PROGRAM.py on ``np`` ranks that stay; the result is like that of ``run_mpi``.

    A job in which a rank failed is ended, and the next program gets a new one, as it does where the launcher has ended meanwhile.
    Where all ranks of a job that served others before died, the program is run once more, with a warning: what ended them may
    have begun before. At the timeout the test fails.
    """
    size = max(np, USUAL_RANKS)
    served = size in _pools
    if size in _pools and _pools[size].process.poll() is not None:
        pool = _pools.pop(size)
        pool.release()
        pool.kill()
    if size not in _pools:
        _pools[size] = Pool(size)
    begin_s = time.monotonic()
    answers = _pools[size].run(np, program, arguments, timeout_s)
    _spent_s[0] += sum(answer["seconds"] for answer in answers)
    stdout, stderr = ("".join(answer[name] for answer in answers) for name in ("stdout", "stderr"))
    for rank, answer in enumerate(answers):
        if answer["traceback"]:
            stderr += f"\nrank {rank}: {answer['traceback']}"
    code = max((answer["code"] for answer in answers), key=abs)
    if code != 0:
        pool, died = _pools.pop(size), all(answer["traceback"] == DIED for answer in answers)
        if died:
            with contextlib.suppress(subprocess.TimeoutExpired):  # the launcher says which signal it was
                pool.process.wait(LEAVING_S)
        stderr += pool.output.read_text()
        pool.kill()
        if died and served:
            warnings.warn(f"{program} is run once more: {stderr}", stacklevel=2)
            return run_pooled(np, program, arguments, timeout_s)
    if time.monotonic() - begin_s > timeout_s:
        pytest.fail(f"{program} did not end within {timeout_s} s\nstdout:\n{stdout}\nstderr:\n{stderr}")
    return subprocess.CompletedProcess([program, *arguments], code, stdout, stderr)


def close_pools() -> None:
    for pool in _pools.values():
        pool.release()
    for pool in _pools.values():
        with contextlib.suppress(subprocess.TimeoutExpired):
            pool.process.wait(LEAVING_S)
        pool.kill()
    _pools.clear()
