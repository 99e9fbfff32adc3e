"""A supervisor's events, in ``RUN/events.jsonl`` and on its stderr."""

from __future__ import annotations

import datetime
import sys
from pathlib import Path
from typing import Any

from hetero_mpi.rundir.line_files import EVENTS_NAME, LineFile
from hetero_mpi.rundir.run_directory import LOCK_NAME, RUN_NAME, as_event, is_used, opened_in
from hetero_mpi.util.terminal import write_text

_OF_EVERY_START = ("hosts", "start", "ended", "end")


class EventLog:
    """A supervisor's events: lines with the time of day on stderr, and the same in ``RUN/events.jsonl``.

    In a directory that is used, they wait for one that shows more than a start that is refused or has nothing to do.

    ``supervisor``: its name, which is in all its events, and in the environment of its starts. Raises as ``opened_in``.
    """

    def __init__(self, run_dir: Path, supervisor: str) -> None:
        opened_in(run_dir, LOCK_NAME).close()  # the run looks as well, but events may be written before it starts
        self._supervisor, self._file = supervisor, LineFile(run_dir / EVENTS_NAME, _print)
        self._waiting: list[dict[str, Any]] = []
        self._waits, self._run = is_used(run_dir), run_dir / RUN_NAME
        self._before = _changed_ns(self._run)

    def tell(self, event: str, text: str, **values: Any) -> None:
        _print(text)
        self._waiting.append(as_event(event, text, {**values, "supervisor": self._supervisor}))
        if not self._waits or event not in _OF_EVERY_START or _changed_ns(self._run) != self._before:
            self._waits = False
            self._file.write(*self._waiting)
            self._waiting.clear()


def _changed_ns(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.exists() else None


def _print(text: str) -> None:
    clock = datetime.datetime.now().strftime("%H:%M:%S")
    write_text(f"launch {clock}: {text}\n", sys.stderr)
