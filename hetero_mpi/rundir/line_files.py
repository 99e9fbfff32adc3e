"""The files that grow line by line during a run, a JSON object a line: ``metrics.jsonl``, ``steps.jsonl`` and ``events.jsonl``.

On a full disk training goes on, and lines are written when there is room again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hetero_mpi.util.disk import require_regular, write_atomic
from hetero_mpi.util.errors import UserError

METRICS_NAME, STEPS_NAME, EVENTS_NAME = "metrics.jsonl", "steps.jsonl", "events.jsonl"
_LOG = logging.getLogger(__name__)
_MOST_LINES = 100_000
"""Largest number of lines that wait for room; the oldest are dropped first."""


class LineFile:
    """Appends lines to a file. Lines that find no room wait, and are written with the next one.

    Args:
        path: opened for every write, since it may be moved meanwhile, and several processes may write to it.
        warn: called once when the disk is full, and once when lines are written again.
    """

    def __init__(self, path: Path, warn: Callable[[str], object] = _LOG.warning) -> None:
        self.path, self._warn = path, warn
        self._waiting: deque[bytes] = deque(maxlen=_MOST_LINES)

    def write(self, *objects: Mapping[str, Any]) -> None:
        """Append JSON objects, a line each."""
        self.add(*(_line(values) for values in objects))

    def add(self, *records: bytes) -> None:
        """Append bytes; without any, those that have waited."""
        late = bool(self._waiting)
        self._waiting.extend(records)
        try:
            _append(self.path, b"".join(self._waiting))
        except OSError as error:
            if not late:
                self._warn(
                    f"{self.path} cannot be written ({error.strerror}): its lines wait until it can, and training goes on"
                )
            return
        if late:
            self._warn(f"{self.path} is written again, with the {len(self._waiting)} lines that had waited")
        self._waiting.clear()


def _line(values: Mapping[str, Any]) -> bytes:
    # JSON has no NaN: a line with one would make the whole file unreadable to strict parsers.
    bad = [key for key, value in values.items() if isinstance(value, float) and not math.isfinite(value)]
    whole = {**values, **dict.fromkeys(bad), **({"non_finite": True} if bad else {})}
    return (json.dumps(whole, allow_nan=False) + "\n").encode()


def _append(path: Path, data: bytes) -> None:
    """Append all of ``data``, or nothing. Raises OSError: nothing was appended."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(file.fileno(), rest) :]
        except OSError:
            if file.tell() > end:  # a torn line would hide all that come after it
                os.ftruncate(file.fileno(), end)
            raise


def objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(line with its end, values) of every line that is a JSON object. Torn lines are left out."""
    return ((line, values) for line in lines(path) if (values := object_of(line)) is not None)


def lines(path: Path) -> Iterator[str]:
    """The lines of a file with their ends; without a file there are none. Raises UserError: it cannot be read."""
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
    """The JSON object that a line holds; None: it holds none."""
    with contextlib.suppress(ValueError, RecursionError):
        values = json.loads(line)
        return values if isinstance(values, dict) else None
    return None


def keep_until(path: Path, step: int) -> None:
    """Drop the lines of steps after ``step``, and lines without a step: a run resumed there takes these steps again."""
    if path.exists():
        until = [(line, values.get("step")) for line, values in objects(path)]
        _rewrite(path, [line for line, at in until if type(at) is int and at <= step])


def _rewrite(path: Path, lines: Iterable[str]) -> None:
    """Replace a file's contents by ``lines``, its own first ones, with their ends. On a full disk the file is cut instead."""
    kept = "".join(lines).encode()
    try:
        write_atomic(path, kept, durable=True)
    except OSError:
        with contextlib.suppress(OSError):
            if path.read_bytes().startswith(kept):
                os.truncate(path, len(kept))
