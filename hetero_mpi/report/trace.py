"""Steps as a Chrome trace, which https://ui.perfetto.dev and chrome://tracing open.

Format: "Trace Event Format" of the Chromium project (JSON object form, complete events ``"ph": "X"``, microseconds). Predicted and
measured events give the same form of file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

from hetero_mpi.planning.schedule import Event, MeasuredEvent, Op
from hetero_mpi.report.past_run import PastRun
from hetero_mpi.report.profile_text import place_text
from hetero_mpi.rundir.rank_steps import in_parts, on_one_clock, steps_under

LANES = {
    Op.RECV_F: (1, "receive activations"),
    Op.RECV_B: (2, "receive gradients"),
    Op.SEND_F: (3, "send activations"),
    Op.SEND_B: (4, "send gradients"),
    Op.REDUCE: (5, "gradient all-reduce"),
}
"""Operation -> (thread number, name of the lane) within its rank; all other operations are computing."""
COMPUTE = (0, "compute")
EMBEDDING = (6, "all-reduce of the embedding's gradients")
"""The lane of the tied embedding's gradients, whose all-reduce runs beside the others."""
COPY = (7, "copy between device and host")
GROUP = (8, "exchange in the group")
"""What a group's rank did not compute itself, without its waiting for the others; it was spread over the computing before it."""
_NUMBERS = 100
"""Numbers reserved for each process and its lanes. Perfetto takes a thread with its process's number for the main thread, and
number 0 for the kernel's. So lane 0 has the process's number, no other lane has a process's number, and none is 0.
"""


def trace(kinds: Mapping[str, Sequence[Event]], labels: Mapping[int, str] | None = None) -> dict[str, Any]:
    """The trace as JSON values: a process per rank and kind, one below the other; a complete event per ``Event``.

    Steps follow each other: a step begins where the longest rank of the one before ended. ``labels``: names of ranks.
    """
    begins, entries = _begins_s([event for events in kinds.values() for event in events]), list[dict[str, Any]]()
    for place, (kind, events) in enumerate(kinds.items()):
        order = {rank: len(kinds) * rank + place for rank in sorted({event.rank for event in events})}
        pids = {rank: _NUMBERS * (1 + number) for rank, number in order.items()}
        for rank, pid in pids.items():
            words, label = f"rank {rank}{kind and ', '}{kind}", (labels or {}).get(rank)
            entries.append(_metadata("process_name", pid, 0, {"name": f"{words}: {label}" if label else words}))
            if len(kinds) > 1:
                entries.append(_metadata("process_sort_index", pid, 0, {"sort_index": order[rank]}))
        parts = in_parts(events)
        lanes = {(event.rank, *(GROUP if exchanges else _lane(event))) for event, exchanges in parts}
        lanes |= {(event.rank, *COPY) for event in events if _copies(event)}
        entries += [_metadata("thread_name", pids[rank], lane, {"name": name}) for rank, lane, name in sorted(lanes)]
        for event, exchanges in parts:
            begin, pid = begins[event.step], pids[event.rank]
            lane = GROUP if exchanges else _lane(event)
            entries.append(_complete(event, pid, lane[0], begin + event.start_s, event.end_s - event.start_s))
            if _copies(event):
                # A send copies first; a receive copies when the message has come.
                begun_s = event.start_s if event.begun_s is None else event.begun_s
                start_s = event.end_s - event.copied_s if event.action.op in (Op.RECV_F, Op.RECV_B) else begun_s
                entries.append(_complete(event, pid, COPY[0], begin + start_s, event.copied_s))
    return {"displayTimeUnit": "ms", "traceEvents": entries}


def _complete(event: Event, pid: int, lane: int, start_s: float, lasts_s: float) -> dict[str, Any]:
    start_us, end_us = round(start_s * 1e6, 3), round((start_s + lasts_s) * 1e6, 3)
    return {
        "ph": "X",
        "name": str(event.action),
        "cat": event.action.op.value,
        "pid": pid,
        "tid": pid + lane,
        "ts": start_us,
        "dur": round(end_us - start_us, 3),
        "args": {"step": event.step, "bytes": event.bytes},
    }


def _copies(event: Event) -> TypeGuard[MeasuredEvent]:
    return isinstance(event, MeasuredEvent) and event.copied_s > 0


def run_events(run: PastRun) -> dict[str, Sequence[Event]]:
    """A run's recorded steps; and the predicted step, once for each recorded one, beginning with it. Empty: nothing is known."""
    simulation = run.predicted
    if run.plan is None or simulation is None:
        return {}
    measured = [event for records in steps_under(run.rank_steps, run.plan) for event in on_one_clock(records)]
    steps = sorted({event.step for event in measured})
    predicted = [replace(event, step=step) for step in steps or [0] for event in simulation.events]
    return {"measured, emulated" if run.emulated else "measured": measured, "predicted": predicted}


def save_run_trace(run: PastRun, path: Path) -> Path | None:
    """Write the trace of ``run_events``; None where there is nothing to write."""
    kinds, devices = run_events(run), run.profile.devices if run.profile is not None else ()
    return save_trace(kinds, path, {one.rank: place_text(run.profile, one.rank) for one in devices}) if kinds else None


def save_trace(kinds: Mapping[str, Sequence[Event]], path: Path, labels: Mapping[int, str]) -> Path:
    """Write ``trace(kinds)`` to ``path``; its folder is created if missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(trace(kinds, labels), allow_nan=False), encoding="utf-8")
    return path


def _lane(event: Event) -> tuple[int, str]:
    return EMBEDDING if event.action.layer == 0 else LANES.get(event.action.op, COMPUTE)


def _begins_s(events: Sequence[Event]) -> dict[int, float]:
    """Step -> its begin, in seconds."""
    longest: dict[int, float] = {}
    for event in events:
        longest[event.step] = max(longest.get(event.step, 0.0), event.end_s)
    begins, now = {}, 0.0
    for step in sorted(longest):
        begins[step], now = now, now + longest[step]
    return begins


def _metadata(kind: str, pid: int, lane: int, values: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": pid + lane, "args": values}
