"""Write predicted and measured steps as a Chrome trace, for https://ui.perfetto.dev and chrome://tracing.

The format is the Chromium project's "Trace Event Format", in its JSON object form, with complete events (``"ph": "X"``). Times are
in microseconds.
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
"""Maps an operation to its lane, (thread number, name), within a rank; all other operations are computation."""
COMPUTE = (0, "compute")
EMBEDDING = (6, "all-reduce of the embedding's gradients")
"""Lane for the gradients of a tied embedding, whose all-reduce overlaps other all-reduces."""
COPY = (7, "copy between device and host")
GROUP = (8, "tensor-parallel communication")
"""Lane for the communication of a tensor-parallel rank, without waiting. It really interleaves with the preceding computation."""
_NUM_IDS_PER_PROCESS = 100
"""Number of thread IDs reserved for the lanes of a process. Perfetto takes a thread with its process's ID for the main thread, and
ID 0 for the kernel, so lane 0 has the process's ID, other lanes have no process's ID, and no ID is 0."""


def trace(kinds: Mapping[str, Sequence[Event]], labels: Mapping[int, str] | None = None) -> dict[str, Any]:
    """Build the trace as JSON values, with a process for each rank and kind, named by ``labels``.

    Each step begins when the slowest rank of the previous step has finished.
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
    """Return the recorded steps of a run, and its predicted step once for each; empty if the run has no plan or profile."""
    simulation = run.predicted
    if run.plan is None or simulation is None:
        return {}
    measured = [event for records in steps_under(run.rank_steps, run.plan) for event in on_one_clock(records)]
    steps = sorted({event.step for event in measured})
    predicted = [replace(event, step=step) for step in steps or [0] for event in simulation.events]
    return {"measured, emulated" if run.emulated else "measured": measured, "predicted": predicted}


def save_run_trace(run: PastRun, path: Path) -> Path | None:
    """Write the trace of ``run_events`` to ``path`` and return it, or return None if there are no events."""
    kinds, devices = run_events(run), run.profile.devices if run.profile is not None else ()
    labels = {device.rank: place_text(run.profile, device.rank) for device in devices}
    return save_trace(kinds, path, labels) if kinds else None


def save_trace(kinds: Mapping[str, Sequence[Event]], path: Path, labels: Mapping[int, str]) -> Path:
    """Write ``trace(kinds)`` to ``path``, creating its directory if necessary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(trace(kinds, labels), allow_nan=False), encoding="utf-8")
    return path


def _lane(event: Event) -> tuple[int, str]:
    return EMBEDDING if event.action.layer == 0 else LANES.get(event.action.op, COMPUTE)


def _begins_s(events: Sequence[Event]) -> dict[int, float]:
    """Map each step to its start time in the trace, in seconds."""
    longest: dict[int, float] = {}
    for event in events:
        longest[event.step] = max(longest.get(event.step, 0.0), event.end_s)
    begins, now = {}, 0.0
    for step in sorted(longest):
        begins[step], now = now, now + longest[step]
    return begins


def _metadata(kind: str, pid: int, lane: int, values: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": pid + lane, "args": values}
