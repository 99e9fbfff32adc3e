"""TensorBoard: a directory of event files. Neither torch nor TensorFlow is needed."""

import io
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetero_mpi.rundir.line_files import LineFile
from hetero_mpi.rundir.logs import say


class TensorBoard:
    """Writes event files. Unlike TensorBoard's own writer, it continues after a disk error."""

    def __init__(self, run_dir: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self._file = LineFile(run_dir / "tensorboard" / name, say)
        self._add(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def log(self, values: dict[str, float], *, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        scalars = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._add(Event(wall_time=time.time(), step=step, summary=Summary(value=scalars)))

    def finish(self) -> None:
        self._file.add()

    def _add(self, event: Any) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        self._file.add(record.getvalue())


def open_tracker(run_dir: Path, _: Mapping[str, Any]) -> TensorBoard:
    return TensorBoard(run_dir)
