"""Metrics for other programs, beside ``metrics.jsonl``: TensorBoard's event files, Weights & Biases, Trackio.

Their packages are imported where the job names them ([report] trackers), on rank 0. None can end a run: one that cannot begin, or
fails later, is left out from then on, and it is said.
"""

from __future__ import annotations

import contextlib
import io
import netrc
import os
import socket
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from hetero_mpi.report.run_files.line_files import LineFile
from hetero_mpi.report.run_files.logs import say
from hetero_mpi.report.run_files.metrics import StepMetrics

PROJECT = "hetero_mpi"
"""In Weights & Biases and Trackio, unless ``WANDB_PROJECT`` or ``TRACKIO_PROJECT`` names another."""


class Tracker(Protocol):
    """Keeps numbers by step."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Trackers:
    """The trackers of a run. Emulated speeds have names of their own.

    Args:
        names: which ones, of ``OPENED``.
        run_dir: what they write is in directories of theirs there; its name is the run's.
        job: the job's values, for those that show them.
    """

    def __init__(self, names: Sequence[str], run_dir: Path, job: Mapping[str, Any]) -> None:
        self._open: dict[str, Tracker] = {}
        for name in names:
            with self._unharmed(name):
                self._open[name] = OPENED[name](run_dir, job)

    def step(self, line: StepMetrics) -> None:
        """Write one step."""
        speed = "speed (emulated)" if line.emulated else "speed"
        values = {
            "loss/training": line.loss,
            "optimizer/learning rate": line.lr,
            "optimizer/gradient norm": line.grad_norm,
            f"{speed}/tokens per second": line.tokens_per_s,
            f"{speed}/seconds per step": line.step_s,
        }
        if line.router_loss is not None:
            values["loss/routers"] = line.router_loss
        if line.predicted_step_s > 0:
            values[f"{speed}/seconds per step, predicted"] = line.predicted_step_s
        self._write(line.step, values)

    def evaluation(self, step: int, loss: float) -> None:
        """Write the held-out loss after ``step`` steps."""
        self._write(step, {"loss/held out": loss})

    def close(self) -> None:
        for name, tracker in list(self._open.items()):
            with self._unharmed(name):
                tracker.close()

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        for name, tracker in list(self._open.items()):
            with self._unharmed(name):
                tracker.write(step, values)

    @contextlib.contextmanager
    def _unharmed(self, name: str) -> Iterator[None]:
        """A block that does something with a tracker, which is left out from then on where that fails, whatever it raises."""
        try:
            yield
        except Exception as error:
            told = f" from now on ({type(error).__name__}: {error}); the run goes on"
            if isinstance(error, ImportError):
                told = f", since its package is missing: pip install {name}, or leave it out of [report] trackers"
            say(f"{name} gets no metrics{told}")
            self._open.pop(name, None)


class TensorBoard:
    """A directory of event files. Neither torch nor TensorFlow is needed."""

    def __init__(self, run_dir: Path, job: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        # tensorboard's own writer ends at the first failure of the disk.
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self._file = LineFile(run_dir / "tensorboard" / name, say)
        self._add(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        scalars = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._add(Event(wall_time=time.time(), step=step, summary=Summary(value=scalars)))

    def close(self) -> None:
        self._file.add()

    def _add(self, event: Any) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        self._file.add(record.getvalue())


class TrackedRun:
    """A run of wandb, or of Trackio, which has the same functions."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def _told(variable: str, run_dir: Path, job: Mapping[str, Any]) -> dict[str, Any]:
    """What both services are told of a run. A resumed run is another one of its group."""
    project = os.environ.get(variable, PROJECT)
    return {"project": project, "name": run_dir.name, "group": run_dir.name, "config": dict(job)}


def weights_and_biases(run_dir: Path, job: Mapping[str, Any]) -> TrackedRun:
    """In the run's own directory. Offline where ``WANDB_MODE`` says so, or no key is known: it must not ask for one."""
    import wandb

    mode: Any = os.environ.get("WANDB_MODE") or ("online" if _has_key() else "offline")
    settings = wandb.Settings(silent=True, init_timeout=30)
    run: Any = wandb.init(dir=str(run_dir), mode=mode, settings=settings, **_told("WANDB_PROJECT", run_dir, job))
    where = f"offline; to send it later: wandb sync {Path(run.dir).parent}" if mode == "offline" else run.url
    say(f"wandb: {where}")
    return TrackedRun(run)


def _has_key() -> bool:
    """Is there a key for Weights & Biases, in the environment or where ``wandb login`` keeps it?"""
    host = urllib.parse.urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return "WANDB_API_KEY" in os.environ or netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def trackio(run_dir: Path, job: Mapping[str, Any]) -> TrackedRun:
    """Kept on this machine (``TRACKIO_DIR``); ``trackio show`` shows it."""
    import trackio

    return TrackedRun(trackio.init(embed=False, **_told("TRACKIO_PROJECT", run_dir, job)))


OPENED: dict[str, Callable[[Path, Mapping[str, Any]], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": weights_and_biases,
    "trackio": trackio,
}
