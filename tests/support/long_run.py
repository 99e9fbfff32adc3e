"""A job under a real launcher that goes on until a test signals, stops or kills its processes: training, or a service."""

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from hetero_mpi.launch.launcher.command_line import build_command
from hetero_mpi.rundir.metrics import read_metrics
from tests.support.jobs import Workshop, write_profile
from tests.support.mpi import ROOT, launcher_or_skip, run_bounded
from tests.support.plans import pipeline, write_plan

PATIENCE_S = 300.0
"""Tests share their machine."""
_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")


def rank_of(process: psutil.Process) -> int | None:
    """The MPI rank that a process is; None for one that is none (launcher, daemon, a rank's own child) or has gone."""
    try:
        environment = process.environ()
        words = process.cmdline()
        if words[1:2] != ["-m"] or not {"train", "serve"} & set(words) or "launch" in words:
            return None
    except (psutil.Error, OSError):
        return None
    return next((int(environment[key]) for key in _RANK_VARIABLES if key in environment), None)


class Running:
    """A started job. ``ranks``: the processes by rank, known once it has taken a step."""

    def __init__(self, process: psutil.Popen, run: Path, output: Path) -> None:
        self.process, self.run, self.output = process, run, output
        self.ranks: dict[int, psutil.Process] = {}

    def steps(self) -> int:
        """Lines of metrics.jsonl so far."""
        path = self.run / "metrics.jsonl"
        return path.read_bytes().count(b'"loss"') if path.exists() else 0

    def wait_for(self, what: str, condition: Callable[[], bool]) -> None:
        """Return when the condition holds; fail when the job ends before that."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert self.process.poll() is None, f"ended before {what}:\n{self.text()}"
            assert time.monotonic() < deadline, f"no {what} within {PATIENCE_S} s:\n{self.text()}"
            time.sleep(0.05)

    def wait_for_steps(self, more: int) -> None:
        """Until so many more steps are done than now; finds the ranks."""
        begin = self.steps()
        self.wait_for(f"{more} more steps", lambda: self.steps() >= begin + more)
        self.find_ranks()

    def find_ranks(self) -> None:
        """Look for the ranks' processes."""
        children = self.process.children(recursive=True)
        self.ranks = {rank: child for child in children if (rank := rank_of(child)) is not None}

    def end(self) -> int:
        """The launcher's exit code, once it has ended; nothing of the job may be left then."""
        code = self.process.wait(PATIENCE_S)
        deadline = time.monotonic() + 30
        while any(is_alive(process) for process in self.ranks.values()):
            assert time.monotonic() < deadline, f"ranks are left:\n{self.text()}"
            time.sleep(0.05)
        return int(code)

    def finish(self) -> str:
        """All that was printed, once the job has ended well."""
        assert self.end() == 0, self.text()
        return self.text()

    def text(self) -> str:
        """All that was printed so far."""
        return self.output.read_text(errors="replace")


class LongRun(Workshop):
    """A job with a fixed plan for the first two ranks and no end in sight; checkpoints are written on request only."""

    def __init__(self, directory: Path, ranks: int, module: str = "hetero_mpi") -> None:
        super().__init__(directory)
        self.ranks, self.module = ranks, module
        self.plan = write_plan(directory / "plan.toml", pipeline([0, 1], [0, 2, 4]))
        self.file = self.job("job", self.values(self.model()), train={"steps": 100_000}, checkpoint={"every": 0})

    def made_up(self, *changes: str) -> Path:
        """A profile that nobody measured, of the job with these ``changes`` of its keys."""
        return write_profile(self.directory / "made-up.toml", self.file, self.ranks, changes)

    def arguments(self, run: Path, *more: str, planned: bool = True) -> list[str]:
        """``train`` and its options. Unless ``planned``, the run measures a profile and makes its plan itself."""
        given: list[str] = []
        if planned:
            changes = [value for word, value in itertools.pairwise(more) if word == "--set"]
            given = ["--plan", str(self.plan), "--profile", str(self.made_up(*changes))]
        return ["train", str(self.file), "--run-dir", str(run), *given, *more]

    def command(self, run: Path, *more: str, planned: bool = True) -> tuple[list[str], dict[str, str]]:
        """Command line and environment under the launcher."""
        program = [sys.executable, "-m", self.module, *self.arguments(run, *more, planned=planned)]
        command = build_command(launcher_or_skip(), self.ranks, None, program)
        return command.arguments, {**self.environment(), **command.environment}

    def environment(self) -> dict[str, str]:
        return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}

    def finish(self, run: Path, steps: int, *more: str) -> subprocess.CompletedProcess[str]:
        """Run it to the end, of so many steps."""
        return run_bounded(*self.command(run, "--set", f"train.steps={steps}", *more), PATIENCE_S)

    @contextmanager
    def started(self, arguments: list[str], environment: dict[str, str], run: Path) -> Iterator[Running]:
        """As ``started``."""
        with started(arguments, environment, run, self.directory / "output.txt") as running:
            yield running


@contextmanager
def started(
    arguments: list[str], environment: dict[str, str], run: Path, output: Path, kind: type[Any] = Running
) -> Iterator[Any]:
    """The job in the background, which prints to ``output``; whatever is left of it at the end of the block is killed."""
    with output.open("w") as stream:
        process = psutil.Popen(
            arguments,
            env=environment,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    running = kind(process, run, output)
    try:
        yield running
    finally:
        left = [*running.ranks.values(), *(process.children(recursive=True) if process.is_running() else [])]
        for one in [*left, process]:
            if is_alive(one):
                one.send_signal(signal.SIGKILL)
        process.wait(60)


def kill(running: Running, *victims: int) -> float:
    """SIGKILL at a moment between two looks; the seconds until the next step that the run had not done before."""
    done = running.steps()
    for victim in victims:
        running.ranks[victim].send_signal(signal.SIGKILL)
    began = time.monotonic()
    running.wait_for("the steps after a death", lambda: newest_step(running.run) > done)
    return time.monotonic() - began


def newest_step(run: Path) -> int:
    if not (run / "metrics.jsonl").exists():
        return 0
    steps = read_metrics(run / "metrics.jsonl").steps
    return steps[-1].step if steps else 0


def kill_until_one_is_left(running: Running, ranks: int, chance: random.Random, steps_between: int) -> None:
    """SIGKILL of any rank at any moment, after every so many steps."""
    alive = list(range(ranks))
    for turn in range(ranks - 1):
        running.wait_for(
            "a step", lambda turn=turn: newest_step(running.run) >= steps_between * turn + chance.randrange(1, 10)
        )
        time.sleep(chance.random() * 0.2)
        if turn == 0:
            running.wait_for_steps(1)
        kill(running, alive.pop(chance.randrange(len(alive))))


def is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
