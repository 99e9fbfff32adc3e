"""The append-only JSON Lines files of a run: ``metrics.jsonl``, ``steps.jsonl`` and ``events.jsonl``.

If the disk is full, training continues and lines are buffered until there is space.
"""

import contextlib
import json
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hetero_mpi.util.disk import require_regular, write_atomic
from hetero_mpi.util.errors import UserError

METRICS_NAME, STEPS_NAME, EVENTS_NAME = "metrics.jsonl", "steps.jsonl", "events.jsonl"
_LOG = logging.getLogger(__name__)
_MAX_LINES = 100_000
"""Maximum number of buffered lines. If there are more, the oldest are dropped."""


class LineFile:
    """Appends lines to a file. Lines that cannot be written are buffered and written together with the next line.

    Args:
        path: Opened for every write, because the file may be moved in the meantime and several processes may write to it.
        warn: Called once when writing fails, and once when it succeeds again.
    """

    def __init__(self, path: Path, warn: Callable[[str], object] = _LOG.warning) -> None:
        self.path, self._warn = path, warn
        self._waiting: deque[bytes] = deque(maxlen=_MAX_LINES)

    def write(self, *objects: Mapping[str, Any]) -> None:
        """Append JSON objects, one on each line."""
        self.add(*(_line(values) for values in objects))

    def add(self, *records: bytes) -> None:
        """Append records to the file. Without arguments, write only the buffered lines."""
        had_waiting = bool(self._waiting)
        self._waiting.extend(records)
        try:
            _append(self.path, b"".join(self._waiting))
        except OSError as error:
            if not had_waiting:
                self._warn(
                    f"{self.path} cannot be written ({error.strerror}): its lines are buffered, and training continues"
                )
            return
        if had_waiting:
            self._warn(f"{self.path} is writable again; {len(self._waiting)} buffered lines were written")
        self._waiting.clear()


def _line(values: Mapping[str, Any]) -> bytes:
    try:
        text = json.dumps(values, allow_nan=False)
    except ValueError:  # JSON has no NaN: a line with NaN would make the whole file unreadable to strict parsers
        from pydantic_core import to_json  # host agents import this module and may lack packages

        finite = json.loads(to_json(values, inf_nan_mode="null"))
        text = json.dumps({**finite, "non_finite": True})
    return f"{text}\n".encode()


def _append(path: Path, data: bytes) -> None:
    """Append all of ``data`` to a file, or raise OSError and append nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(file.fileno(), rest) :]
        except OSError:
            if file.tell() > end:  # a torn line would corrupt the next line
                os.ftruncate(file.fileno(), end)
            raise


def objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (line including its end, values) for every line that is a JSON object; skip other lines, such as torn ones."""
    return ((line, values) for line in lines(path) if (values := object_of(line)) is not None)


def lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file, including line ends. A missing file has no lines. Raises UserError if it cannot be read."""
    if path.exists():
        require_regular(path)
        try:
            with path.open(encoding="utf-8", errors="replace") as file:
                yield from file
        except OSError as error:
            raise UserError(
                "run.unreadable", f"{path}: cannot be read ({error.strerror}): change its permissions, or move it"
            ) from None


def object_of(line: str) -> dict[str, Any] | None:
    """Parse a line and return its JSON object, or None if the line is not a JSON object."""
    with contextlib.suppress(ValueError, RecursionError):
        values = json.loads(line)
        return values if isinstance(values, dict) else None
    return None


def keep_until(path: Path, step: int) -> None:
    """Remove lines of steps after ``step``, which a run resumed there will repeat, and lines that have no step."""
    if path.exists():
        numbered_lines = [(line, values.get("step")) for line, values in objects(path)]
        content = "".join(line for line, at in numbered_lines if type(at) is int and at <= step).encode()
        try:
            write_atomic(path, content, durable=True)
        except OSError:  # on a full disk it is truncated instead
            with contextlib.suppress(OSError):
                if path.read_bytes().startswith(content):
                    os.truncate(path, len(content))
