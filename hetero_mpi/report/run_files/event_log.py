"""The event log of a run: lines with the time of day on stderr, and the same as JSON lines in the run directory."""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetero_mpi.report.run_files.line_files import LineFile
from hetero_mpi.report.run_files.run_directory import opened_in
from hetero_mpi.text import write_text

EVENTS_NAME = "events.jsonl"
START_VARIABLE = "HETERO_MPI_START"
"""Environment variable of all processes of a start: ``SUPERVISOR.NUMBER``."""


def append_event(run_dir: Path, event: str, text: str, **values: Any) -> None:
    """Append one event of the run itself, without a supervisor. A full disk is no error."""
    LineFile(run_dir / EVENTS_NAME).write(_line(event, text, values))


def own_event(values: Mapping[str, Any]) -> bool:
    """Does an event belong to this process's run: was it written by its supervisor, or by its ranks since they began?"""
    import psutil  # doctor runs before it is installed

    supervisor = os.environ.get(START_VARIABLE, "").partition(".")[0]
    told_s = values.get("unix_s")
    if not isinstance(told_s, (int, float)):
        return False
    return told_s >= psutil.Process().create_time() or bool(supervisor and values.get("supervisor") == supervisor)


def _line(event: str, text: str, values: dict[str, Any]) -> str:
    return json.dumps({"unix_s": round(time.time(), 3), "event": event, "text": text, **values})


class EventLog:
    """Appends to ``RUN/events.jsonl``. Every line has ``unix_s``, ``event`` and ``text``, and the event's own values.

    ``supervisor``: its name, which is in all its events, and in the environment of its starts. Raises as ``opened_in``.
    """

    def __init__(self, run_dir: Path, supervisor: str) -> None:
        self.path, self._supervisor = run_dir / EVENTS_NAME, supervisor
        opened_in(run_dir, EVENTS_NAME).close()  # the run looks as well, but this file is written before it starts
        self._file = LineFile(self.path, _print)

    def tell(self, event: str, text: str, **values: Any) -> None:
        _print(text)
        self._file.write(_line(event, text, {**values, "supervisor": self._supervisor}))


def _print(text: str) -> None:
    clock = datetime.datetime.now().strftime("%H:%M:%S")
    write_text(f"launch {clock}: {text}\n", sys.stderr)
