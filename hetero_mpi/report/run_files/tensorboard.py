"""Metrics as TensorBoard event files, if the package ``tensorboard`` is installed. Neither torch nor TensorFlow is needed."""

from __future__ import annotations

import importlib.util
import io
import os
import socket
import time
from pathlib import Path
from typing import Any

from hetero_mpi.report.run_files.line_files import LineFile
from hetero_mpi.report.run_files.logs import say
from hetero_mpi.report.run_files.metrics import StepMetrics

REMEDY = "pip install tensorboard, or leave [report] tensorboard out"


class TensorBoard:
    """Writes scalars of steps and evaluations into a directory of event files. Emulated speeds have names of their own."""

    def __init__(self, directory: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        # tensorboard's own writer ends at the first failure of the disk.
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self._file = LineFile(directory / name, say)
        self._add(Event(wall_time=time.time(), file_version="brain.Event:2"))

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
        if line.predicted_step_s > 0:
            values[f"{speed}/seconds per step, predicted"] = line.predicted_step_s
        self._write(line.step, values)

    def evaluation(self, step: int, loss: float) -> None:
        """Write the held-out loss after ``step`` steps."""
        self._write(step, {"loss/held out": loss})

    def close(self) -> None:
        self._file.add()

    def _write(self, step: int, values: dict[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        scalars = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._add(Event(wall_time=time.time(), step=step, summary=Summary(value=scalars)))

    def _add(self, event: Any) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        self._file.add(record.getvalue())


def available() -> bool:
    """Is the package installed?"""
    return importlib.util.find_spec("tensorboard") is not None
