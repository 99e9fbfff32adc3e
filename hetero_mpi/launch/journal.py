"""What the supervisor tells: calm lines with the time of day on stderr, and the same as JSON lines in the run directory."""

from __future__ import annotations

import contextlib
import datetime
import json
import sys
import time
from pathlib import Path
from typing import Any

from hetero_mpi.errors import UserError
from hetero_mpi.report.run_directory import refuse_links

EVENTS_NAME = "events.jsonl"


def append_event(run_dir: Path, event: str, text: str, **values: Any) -> None:
    """Write one event, without the supervisor: for what a run itself has to tell. A disk that is full is nobody's end."""
    with contextlib.suppress(OSError), (run_dir / EVENTS_NAME).open("a", encoding="utf-8") as file:
        file.write(_line(event, text, values))


def _line(event: str, text: str, values: dict[str, Any]) -> str:
    return json.dumps({"unix_s": round(time.time(), 3), "event": event, "text": text, **values}) + "\n"


class Journal:
    """Appends to ``RUN/events.jsonl``; every line has ``unix_s``, ``event`` and ``text``, and what belongs to the event.

    :raises UserError: the run directory cannot be written, or has a link that leads out of it.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / EVENTS_NAME
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            refuse_links(run_dir)  # the run does so too, but this file is written before it starts
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"the run directory must be a directory this user can write to; {run_dir} is not: {error.strerror}. "
                "Choose another with output.run_dir or --run-dir."
            ) from None

    def tell(self, event: str, text: str, **values: Any) -> None:
        """Print and write one event."""
        clock = datetime.datetime.now().strftime("%H:%M:%S")
        with contextlib.suppress(OSError):  # the terminal may have gone, and the job need not end for that
            print(f"launch {clock}: {text}", file=sys.stderr, flush=True)
        self._file.write(_line(event, text, values))
        self._file.flush()

    def close(self) -> None:
        self._file.close()
