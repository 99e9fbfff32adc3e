"""A step, or several, as a Chrome trace: open the file in https://ui.perfetto.dev or chrome://tracing.

Format: "Trace Event Format" of the Chromium project (JSON object form, complete events ``"ph": "X"``, microseconds).
Predicted and measured events make the same file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hetero_mpi.planning.schedule import Event, Op

LANES = {
    Op.RECV_F: (1, "receive activations"),
    Op.RECV_B: (2, "receive gradients"),
    Op.SEND_F: (3, "send activations"),
    Op.SEND_B: (4, "send gradients"),
    Op.REDUCE: (5, "sum gradients"),
}
"""Operation -> (thread number, name of the lane) within its rank; everything else is computing."""
COMPUTE = (0, "compute")
EMBEDDING = (6, "sum the embedding's gradients")
"""The head's share of a tied matrix travels beside its other sums: it has a lane to itself."""


def trace(events: Sequence[Event], labels: Mapping[int, str] | None = None) -> dict[str, Any]:
    """The trace as JSON values: one process per rank, one complete event per ``Event``.

    Steps follow each other: a step begins where the longest rank of the one before ended. ``labels``: names of ranks.
    """
    begins = _begins_s(events)
    entries: list[dict[str, Any]] = []
    lanes = sorted({(event.rank, *_lane(event)) for event in events})
    for rank in sorted({event.rank for event in events}):
        name = (labels or {}).get(rank, "")
        entries.append(_metadata("process_name", rank, 0, f"rank {rank}{': ' if name else ''}{name}"))
    entries += [_metadata("thread_name", rank, lane, name) for rank, lane, name in lanes]
    for event in events:
        entries.append(
            {
                "ph": "X",
                "name": str(event.action),
                "cat": event.action.op.value,
                "pid": event.rank,
                "tid": _lane(event)[0],
                "ts": (begins[event.step] + event.start_s) * 1e6,
                "dur": (event.end_s - event.start_s) * 1e6,
                "args": {"step": event.step, "bytes": event.bytes},
            }
        )
    return {"displayTimeUnit": "ms", "traceEvents": entries}


def save_trace(events: Sequence[Event], path: str | Path, labels: Mapping[int, str] | None = None) -> Path:
    """Write ``trace(events)`` to ``path``; its folder is made where it is missing."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(trace(events, labels), allow_nan=False), encoding="utf-8")
    return path


def _lane(event: Event) -> tuple[int, str]:
    return EMBEDDING if event.action.item == 0 else LANES.get(event.action.op, COMPUTE)


def _begins_s(events: Sequence[Event]) -> dict[int, float]:
    """Step -> when it begins."""
    longest: dict[int, float] = {}
    for event in events:
        longest[event.step] = max(longest.get(event.step, 0.0), event.end_s)
    begins, now = {}, 0.0
    for step in sorted(longest):
        begins[step], now = now, now + longest[step]
    return begins


def _metadata(kind: str, rank: int, lane: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": lane, "args": {"name": name}}
