"""Ranks of real runs are killed at random moments, and the survivors go on: the rows ``kills`` and ``pipeline_kills`` of
``reliability.py``."""

from __future__ import annotations

import os
import random
import re
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from hetero_mpi.launch.supervisor.host_reports import last_step
from hetero_mpi.rundir.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[1]
RUNS, RANKS, STEPS = 8, 4, 120
ALIKE = 1e-5
"""Relative: several pipelines add gradients up in another order where ranks and their shares are others."""
PATIENCE_S = 120.0
"""For one step more, or for the end after the last one; a step takes well under a second, a recovery a few."""
BUDGET_S = 200.0
"""No run begins later than this: on a slow or busy machine there are fewer."""
Row = tuple[str, float, str, float | None, float | None]
"""Name, value, unit, and between which bounds it must lie."""


@dataclass
class Tally:
    """What the runs so far have come to."""

    tried: int = 0
    survived: int = 0
    runs: int = 0
    equal: int = 0
    seconds: list[float] = field(default_factory=list)
    """From each death to the next step that is new."""
    lost: list[int] = field(default_factory=list)
    """Steps that each death cost."""
    every: list[int] = field(default_factory=list)
    """Steps between copies, as chosen."""

    def rows(self) -> list[Row]:
        """The figures; as far as there are any."""
        lost, seconds = self.lost or [0], self.seconds or [0.0]
        return [
            ("deaths of a rank tried", self.tried, "", None, None),
            ("... survived", self.survived, "", self.tried, None),
            ("runs", self.runs, "", 1, None),
            ("... with the losses of an undisturbed run", self.equal, "", self.runs, None),
            (
                "steps between copies in memory, as chosen (median)",
                statistics.median(self.every or [0]),
                "",
                None,
                None,
            ),
            ("steps lost per death (median)", statistics.median(lost), "", None, None),
            ("steps lost per death (most)", max(lost), "", None, None),
            ("from the death to the next step that is new (median)", statistics.median(seconds), "s", None, 5.0),
            ("from the death to the next step that is new (most)", max(seconds), "s", None, None),
        ]


def kills(folder: Path, smallest: bool, pipelines: int = 1) -> list[Row]:
    """SIGKILL at random moments, up to three times in each run of four ranks, until each pipeline has one rank left to finish."""
    dice, tally, began = random.Random(1), Tally(), time.monotonic()
    job = job_of(folder, pipelines)
    before = signal.signal(signal.SIGTERM, _interrupted)
    try:
        print("kills: the undisturbed run", flush=True)
        whole = _losses(_finished(folder, job, pipelines))
        while tally.runs < (1 if smallest else RUNS) and time.monotonic() - began < BUDGET_S:
            _one_run(folder, job, pipelines, whole, dice, tally)
            print(
                f"kills: run {tally.runs} of {RUNS}, {time.monotonic() - began:.0f} s: {tally.survived} of {tally.tried} deaths "
                f"survived, {tally.equal} runs with equal losses",
                flush=True,
            )
    except BaseException:
        print("\nkills was interrupted; so far:", *(f"  {name}: {value:.4g} {unit}" for name, value, unit, *_ in tally.rows()),
              sep="\n", flush=True)  # fmt: skip
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    return tally.rows()


def _interrupted(*_: object) -> None:
    sys.exit(128 + signal.SIGTERM)


def _one_run(folder: Path, job: Path, pipelines: int, whole: list[float], dice: random.Random, tally: Tally) -> None:
    run = folder / f"run-{tally.runs}"
    known = [word for path in sorted(folder.glob("run-0/profile.toml")) for word in ("--profile", str(path))]
    with started(folder, job, run, RANKS, ["--with-ft", "ulfm"], known) as (process, log):
        alive = list(range(RANKS))
        for turn in range(1, RANKS - pipelines + 1):
            if not wait_for(process, run, turn * STEPS // (RANKS + 1) + dice.randrange(STEPS // 10)):
                raise SystemExit(f"no progress before death {turn}:\n{log.read_text()}")
            time.sleep(dice.random() * 0.1)
            victim = alive.pop(dice.randrange(len(alive)))
            before = newest(run)
            tally.tried += 1
            began = time.monotonic()
            _rank(process, victim).send_signal(signal.SIGKILL)
            if not wait_for(process, run, before + 1):
                print(f"kills: the death of rank {victim} was not survived:\n{log.read_text()[-2000:]}", flush=True)
                break
            tally.survived += 1
            tally.seconds.append(time.monotonic() - began)
            begins = [int(step) for step in re.findall(r"Going on after step (\d+)", log.read_text())]
            tally.lost.append(before - begins[-1] if begins else before)
        code = ended(process)
    tally.runs += 1
    tally.equal += code == 0 and _equal(_losses(run), whole, pipelines)
    tally.every += [int(found) for found in re.findall(r"memory: every (\d+) step", log.read_text())]


def _equal(losses: list[float], whole: list[float], pipelines: int) -> bool:
    if pipelines == 1:
        return losses == whole
    return len(losses) == len(whole) and all(abs(a - b) <= ALIKE * abs(b) for a, b in zip(losses, whole, strict=True))


def job_of(folder: Path, pipelines: int = 1) -> Path:
    """A Llama of some 1.5 million parameters, trained from scratch."""
    import tomli_w

    values = {
        "model": {
            "config": {
                "model_type": "llama",
                "hidden_size": 128,
                "intermediate_size": 344,
                "num_hidden_layers": 6,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
            }
        },
        "tokenizer": {"train_vocab_size": 1024},
        "data": {"text": ["{stdlib}/*.py"], "max_bytes": 500_000, "sequence_length": 64, "evaluation_fraction": 0},
        "train": {"steps": STEPS, "global_batch": 8, "micro_batch": 1},
        "plan": {"pipelines": pipelines},
        "cluster": {"threads": 1},
    }
    path = folder / "job.toml"
    path.write_text(tomli_w.dumps(values))
    return path


@contextmanager
def started(
    folder: Path, job: Path, run: Path, ranks: int, options: list[str], more: list[str] | None = None, **variables: str
) -> Iterator[tuple[psutil.Popen, Path]]:
    """A run in the background, and its output; whatever is left of it at the end of the block is killed."""
    from hetero_mpi.launch.launcher.command_line import build_command
    from hetero_mpi.launch.launcher.launcher import find_launcher

    program = [sys.executable, "-m", "hetero_mpi", "train", str(job), "--run-dir", str(run), *(more or [])]
    command = build_command(find_launcher(), ranks, None, program, options)
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    log = folder / f"{run.name}.txt"
    with log.open("w") as stream:
        process = psutil.Popen(
            command.arguments,
            env={**os.environ, **command.environment, **own, **variables},
            stdout=stream,
            stderr=stream,
        )
    try:
        yield process, log
    finally:
        for one in [*_children(process), process]:
            with suppress(psutil.Error):
                one.kill()
        process.wait(PATIENCE_S)


def ended(process: psutil.Popen) -> int | None:
    """The exit code of a run; None where it does not end in time."""
    try:
        return int(process.wait(PATIENCE_S))
    except psutil.TimeoutExpired:
        return None


def _finished(folder: Path, job: Path, ranks: int) -> Path:
    with started(folder, job, folder / "undisturbed", ranks, []) as (process, log):
        if not wait_for(process, folder / "undisturbed", STEPS) or ended(process) != 0:
            raise SystemExit(log.read_text())
    return folder / "undisturbed"


def wait_for(process: psutil.Popen, run: Path, step: int) -> bool:
    """Until a step is done; False where the run ends before it, or gets no further for ``PATIENCE_S``."""
    seen, since = newest(run), time.monotonic()
    while seen < step:
        if process.poll() is not None or time.monotonic() > since + PATIENCE_S:
            return newest(run) >= step
        time.sleep(0.01)
        if (now := newest(run)) > seen:
            seen, since = now, time.monotonic()
    return True


def _children(process: psutil.Popen) -> list[psutil.Process]:
    try:
        found: list[psutil.Process] = process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return found


def _rank(process: psutil.Popen, rank: int) -> psutil.Process:
    for child in _children(process):
        with suppress(psutil.Error):
            if "train" in child.cmdline() and child.environ().get("OMPI_COMM_WORLD_RANK") == str(rank):
                return child
    raise SystemExit(f"rank {rank} is not there")


def newest(run: Path) -> int:
    """The newest step that the run has told; looks at the end of the file only, since it is asked for all the time."""
    return last_step(_tail(run / "metrics.jsonl"))


def _tail(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - 4096))
            return file.read()
    except OSError:
        return b""


def _losses(run: Path) -> list[float]:
    return [line.loss for line in read_metrics(run / "metrics.jsonl").steps]
