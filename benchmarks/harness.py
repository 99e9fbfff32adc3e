"""What benchmarks that start ranks have in common: the command line, the launcher, and counting what a rank spends its time on."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import tomli_w

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from hetero_mpi.comm.mpi_transport import MpiTransport  # noqa: E402
from hetero_mpi.comm.transport import Request  # noqa: E402
from hetero_mpi.launch.launcher.command_line import build_command  # noqa: E402
from hetero_mpi.launch.launcher.launcher import find_launcher  # noqa: E402
from hetero_mpi.planning.types.plan import Plan  # noqa: E402
from hetero_mpi.planning.types.toml_files import load_report, save_plan  # noqa: E402
from hetero_mpi.rundir.metrics import measured_step_s, read_metrics  # noqa: E402
from tests.support.processes import run_within  # noqa: E402

MAX_RUN_S = 1800.0
"""Longest run of ranks: what takes longer hangs."""


def parser_of(docstring: str | None, **smallest: object) -> argparse.ArgumentParser:
    """Make the parser of a benchmark, with ``--json``, ``--check`` and ``--smallest``.

    Args:
        docstring: The benchmark's; its first line describes it.
        smallest: Option and the value that ``--smallest`` gives it. Options behind ``--smallest`` on the command line count.
    """
    parser = argparse.ArgumentParser(description=(docstring or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the raw figures there")
    parser.add_argument("--check", action="store_true", help="exit 1 where the bar is missed")
    add_smallest(parser, **smallest)
    return parser


def add_smallest(parser: argparse.ArgumentParser, **smallest: object) -> None:
    """Add ``--smallest`` to a benchmark's parser; see ``parser_of``."""
    parser.add_argument(
        "--smallest",
        action=_Smallest,
        nargs=0,
        default=False,
        const=smallest,
        help="the least work that shows that the program runs; its figures mean nothing",
    )


class _Smallest(argparse.Action):
    """Gives every option that has a smallest value that value."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, *_: object) -> None:
        vars(namespace).update({**self.const, self.dest: True})


def skip(reason: str) -> NoReturn:
    """End the benchmark where the machine lacks what it needs; that is no failure."""
    print(f"skipped: {reason}")
    sys.exit(0)


def require_cores(ranks: int) -> None:
    """End a benchmark whose ``ranks`` ranks need a core each, where the machine has fewer."""
    if (os.cpu_count() or 1) < ranks:
        skip(f"every rank needs a core of its own: this machine has {os.cpu_count()}, {ranks} are needed")


@contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes that compute beside what is measured."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def run_ranks(ranks: int, program: Sequence[str], timeout_s: float = MAX_RUN_S) -> subprocess.CompletedProcess[str]:
    """Run ``python PROGRAM`` on ``ranks`` ranks with one thread each, from the repository's root, and keep its output.

    Raises:
        subprocess.TimeoutExpired: It did not end in time; all its processes are ended.
    """
    command = build_command(find_launcher(), ranks, None, [sys.executable, *program])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **command.environment}
    return run_within(timeout_s, command.arguments, environment, ROOT)


def output_of_ranks(ranks: int, program: Sequence[str]) -> str:
    """What ``run_ranks`` printed. Ends the benchmark where the ranks fail or do not end in time."""
    try:
        done = run_ranks(ranks, program)
    except subprocess.TimeoutExpired as late:
        sys.exit(f"{ranks} ranks did not end within {MAX_RUN_S:g} s:\n{late.stdout}\n{late.stderr}")
    if done.returncode != 0:
        sys.exit(f"{ranks} ranks failed (exit code {done.returncode}):\n{done.stdout}\n{done.stderr}")
    return done.stdout


def found_by_ranks(ranks: int, program: Sequence[str]) -> Any:
    """What rank 0 of ``python PROGRAM FILE`` writes into FILE, as JSON. Ends the benchmark where the ranks fail."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        output_of_ranks(ranks, [*program, str(out)])
        return json.loads(out.read_text())


def llama_job(
    config: Mapping[str, Any],
    vocabulary: int,
    sources: Sequence[str],
    length: int,
    train: Mapping[str, Any],
    **tables: Mapping[str, Any],
) -> dict[str, Any]:
    """The tables of a job for CPU ranks of one thread each: a llama that learns packages (``sources``) of the standard library in
    sequences of ``length`` tokens; ``tables``: further ones."""
    return {
        "model": {"config": {"model_type": "llama", **config}},
        "tokenizer": {"train_vocab_size": vocabulary},
        "data": {
            "text": [f"{{stdlib}}/{name}/*.py" for name in sources],
            "sequence_length": length,
            "evaluation_fraction": 0.0,
        },
        "train": train,
        "cluster": {"device": "cpu", "threads": 1},
        **tables,
    }


def predicted_and_measured_s(ranks: int, job: Mapping[str, Any], plan: Plan | None = None) -> tuple[float, float]:
    """Seconds per step of one run of a job that measures its machine first. Ends the benchmark where the run fails."""
    with tempfile.TemporaryDirectory() as folder:
        file, given, out = (Path(folder) / name for name in ("job.toml", "given.toml", "run"))
        file.write_text(tomli_w.dumps(job))
        words = ["-m", "hetero_mpi", "train", str(file), "--run-dir", str(out), "--set", "profile.cache=false"]
        if plan is not None:
            save_plan(plan, given)
            words += ["--plan", str(given)]
        output_of_ranks(ranks, words)
        measured_s = measured_step_s(read_metrics(out / "metrics.jsonl").steps)
        assert measured_s is not None, "a run has more steps than are left out"
        return load_report(out / "plan.toml").predicted_step_s, measured_s


class Metered(MpiTransport):
    """A transport that counts the processor time its rank's own thread spends waiting."""

    waiting_s = 0.0

    def wait(self, request: Request) -> None:
        begin = time.thread_time()
        super().wait(request)
        self.waiting_s += time.thread_time() - begin


class Stopwatch:
    """Adds up this thread's processor time over blocks."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        begin = time.thread_time()
        yield
        self.seconds += time.thread_time() - begin


def resident_bytes() -> int:
    """Memory of this process that is in use, after what it has freed was given back."""
    import gc

    import psutil

    from hetero_mpi.device.backend import return_freed_memory

    gc.collect()
    return_freed_memory()
    return int(psutil.Process().memory_info().rss)
