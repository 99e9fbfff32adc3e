"""Chrome trace of steps, for https://ui.perfetto.dev and chrome://tracing.

Format: "Trace Event Format" of the Chromium project (JSON object form, complete events ``"ph": "X"``, microseconds), for predicted
and measured events alike.
"""

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
"""Operation -> (thread number, lane name) within its rank; all other operations are computation."""
COMPUTE = (0, "compute")
EMBEDDING = (6, "all-reduce of the embedding's gradients")
"""Lane of the tied embedding's gradients, whose all-reduce overlaps the others."""
COPY = (7, "copy between device and host")
GROUP = (8, "tensor-parallel communication")
"""Communication of a tensor-parallel rank, without waiting; in reality it interleaves with the preceding computation."""
_NUM_IDS_PER_PROCESS = 100
"""IDs reserved per process for its lanes. Perfetto treats a thread with its process's ID as the main thread, and ID 0 as the
kernel's, so lane 0 has the process's ID, no other lane has any process's ID, and no ID is 0."""


def trace(kinds: Mapping[str, Sequence[Event]], labels: Mapping[int, str] | None = None) -> dict[str, Any]:
    """Build the trace as JSON values: a process per rank and kind, and a complete event per ``Event``.

    Each step begins where the slowest rank of the previous step ended. ``labels``: names of ranks.
    """
    begins, entries = _begins_s([event for events in kinds.values() for event in events]), list[dict[str, Any]]()
    for index, (kind, events) in enumerate(kinds.items()):
        order = {rank: len(kinds) * rank + index for rank in sorted({event.rank for event in events})}
        pids = {rank: _NUM_IDS_PER_PROCESS * (1 + number) for rank, number in order.items()}
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
                # A send copies first; a receive copies after the message has arrived.
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
    """Recorded steps of a run, and the predicted step at the start of each of them; empty if nothing is known."""
    simulation = run.predicted
    if run.plan is None or simulation is None:
        return {}
    measured = [event for records in steps_under(run.rank_steps, run.plan) for event in on_one_clock(records)]
    steps = sorted({event.step for event in measured})
    predicted = [replace(event, step=step) for step in steps or [0] for event in simulation.events]
    return {"measured, emulated" if run.emulated else "measured": measured, "predicted": predicted}


def save_run_trace(run: PastRun, path: Path) -> Path | None:
    """Write the trace of ``run_events``; returns None without events."""
    kinds, devices = run_events(run), run.profile.devices if run.profile is not None else ()
    return (
        save_trace(kinds, path, {device.rank: place_text(run.profile, device.rank) for device in devices})
        if kinds
        else None
    )


def save_trace(kinds: Mapping[str, Sequence[Event]], path: Path, labels: Mapping[int, str]) -> Path:
    """Write ``trace(kinds)`` to ``path``, creating its directory if missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(trace(kinds, labels), allow_nan=False), encoding="utf-8")
    return path


def _lane(event: Event) -> tuple[int, str]:
    return EMBEDDING if event.action.layer == 0 else LANES.get(event.action.op, COMPUTE)


def _begins_s(events: Sequence[Event]) -> dict[int, float]:
    """Step -> start time in seconds."""
    longest: dict[int, float] = {}
    for event in events:
        longest[event.step] = max(longest.get(event.step, 0.0), event.end_s)
    begins, now = {}, 0.0
    for step in sorted(longest):
        begins[step], now = now, now + longest[step]
    return begins


def _metadata(kind: str, pid: int, lane: int, values: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": pid + lane, "args": values}
