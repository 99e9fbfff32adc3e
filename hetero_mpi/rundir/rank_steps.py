"""Recorded steps: the measurements of each rank, stored in ``steps.jsonl`` as one JSON object per rank and step.

Each object has the rank's actions in that step, their start on rank 0's clock, and the rank's time usage since training began. The
same code creates reports and traces from these records and from the simulator's events.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import FiniteFloat, TypeAdapter

from hetero_mpi.planning.schedule import COMPUTE, RECEIVES, SENDS, Action, Event, MeasuredEvent, Op
from hetero_mpi.planning.types.plan import Plan
from hetero_mpi.rundir.line_files import objects
from hetero_mpi.util.display import Displayed
from hetero_mpi.util.errors import UserError

_MAX_TIME_DECIMALS = 7
"""Decimals to which stored times are rounded, which is a tenth of a microsecond."""


@dataclass(frozen=True)
class Usage:
    """A rank's time usage since training began, in seconds, and its memory and traffic in bytes."""

    steps: int = 0
    seconds: float = 0.0
    computing_s: float = 0.0
    """Time in forward, backward and optimizer."""
    activations_s: float = 0.0
    """Time waiting for activations."""
    gradients_s: float = 0.0
    """Time waiting for gradients."""
    copies_s: float = 0.0
    """Time copying between device and host memory."""
    sums_s: float = 0.0
    """Time waiting for gradient all-reduces."""
    group_s: float = 0.0
    """Time in tensor-parallel communication, including waiting for the other ranks of the group."""
    sent_bytes: int = 0
    received_bytes: int = 0
    peak_bytes: int = 0
    """Peak memory: the memory allocated on a GPU, or that of the whole process of a CPU rank."""

    @property
    def end_s(self) -> float:
        """The remaining time, spent waiting for the batch, for the decision on the step, and for other ranks."""
        timed = self.computing_s + self.activations_s + self.gradients_s + self.copies_s + self.sums_s + self.group_s
        return max(0.0, self.seconds - timed)

    def and_step(self, events: Iterable[Event], seconds: float) -> Usage:
        """Return this usage plus that of one more step, which took ``seconds``."""
        totals = {**asdict(self), "steps": self.steps + 1, "seconds": self.seconds + seconds}
        for event in events:
            duration_s, op = event.end_s - event.start_s, event.action.op
            copied = event.copied_s if isinstance(event, MeasuredEvent) else 0.0
            totals["copies_s"] += copied
            if op in COMPUTE or op is Op.STEP:
                totals["computing_s"] += duration_s - event.exchanged_s
                totals["group_s"] += event.exchanged_s
            elif op in RECEIVES:
                totals["activations_s" if op is Op.RECV_F else "gradients_s"] += duration_s - copied
                totals["received_bytes"] += event.bytes
            elif op is Op.REDUCE:
                totals["sums_s"] += duration_s
            else:
                totals["sent_bytes"] += event.bytes
        return Usage(**totals)


@dataclass(frozen=True, repr=False)
class RankStep(Displayed):
    rank: int
    step: int
    """Number of completed steps, as in ``metrics.jsonl``."""
    begin_s: float
    """Time on rank 0's clock at which the rank's actions started."""
    events: tuple[MeasuredEvent, ...]
    """The rank's actions, with times in seconds since ``begin_s``."""
    usage: Usage


_USAGE = TypeAdapter(Usage)
_EVENTS = TypeAdapter(list[tuple[str, FiniteFloat, FiniteFloat, int, FiniteFloat, FiniteFloat | None, FiniteFloat]])


def rank_step_to_dict(record: RankStep) -> dict[str, Any]:
    """Convert a record to JSON. An event becomes ``[action, start_s, end_s, bytes, copied_s, arrived_s, exchanged_s]``."""
    return {
        "step": record.step,
        "rank": record.rank,
        "begin_s": round(record.begin_s, _MAX_TIME_DECIMALS),
        "usage": {name: _rounded(value) for name, value in asdict(record.usage).items()},
        "events": [
            [str(e.action), *map(_rounded, (e.start_s, e.end_s, e.bytes, e.copied_s, e.arrived_s, e.exchanged_s))]
            for e in record.events
        ],
    }


def rank_step_from_dict(values: Mapping[str, Any]) -> RankStep:
    """Restore a record from the result of ``rank_step_to_dict``. Unknown keys in ``usage`` are ignored."""
    rank, step = int(values["rank"]), int(values["step"])
    events = tuple(
        MeasuredEvent(rank, step, Action.parse(text), start, end, size, copied, arrived, exchanged_s=exchanged)
        for text, start, end, size, copied, arrived, exchanged in _EVENTS.validate_python(values["events"])
    )
    return RankStep(rank, step, float(values["begin_s"]), events, _USAGE.validate_python(values["usage"]))


def read_rank_steps(path: Path) -> tuple[RankStep, ...]:
    """Read the valid records in a file of recorded steps, in order. A missing file has no records."""
    records = []
    for _, values in objects(path):
        # Skip lines of other versions.
        with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError, AttributeError, UserError):
            records.append(rank_step_from_dict(values))
    return tuple(records)


def steps_under(records: Sequence[RankStep], plan: Plan) -> list[tuple[RankStep, ...]]:
    """Return, in order, the steps under ``plan`` that all ranks of the plan have recorded."""
    expected = {(number, rank) for number, _, stage in plan.numbered for rank in stage.ranks}
    by_step: dict[int, dict[int, RankStep]] = {}
    for record in records:
        if record.events:
            by_step.setdefault(record.step, {})[record.rank] = record
    complete_steps = []
    for _, record_by_rank in sorted(by_step.items()):
        recorded = {(event.action.stage, rank) for rank, record in record_by_rank.items() for event in record.events}
        if recorded == expected:
            complete_steps.append(tuple(record_by_rank[rank] for rank in sorted(record_by_rank)))
    return complete_steps


def newest_step(records: Sequence[RankStep], plan: Plan) -> tuple[RankStep, ...]:
    """Return the latest of the ``steps_under`` a plan, or () if there are none."""
    steps = steps_under(records, plan)
    return steps[-1] if steps else ()


def on_one_clock(records: Sequence[RankStep]) -> tuple[Event, ...]:
    """Return the events of one recorded step, with times in seconds since the first rank began.

    Sends are converted to those of the simulator, which last while the link is in use: a send ends when its message arrives, and
    starts no earlier than the arrival of the previous message.
    """
    if not records:
        return ()
    first_s = min(record.begin_s for record in records)
    arrivals: dict[Action, float] = {}
    receivers: dict[Action, int] = {}
    shifted: list[MeasuredEvent] = []
    for record in records:
        offset = record.begin_s - first_s
        for event in record.events:
            arrived = None if event.arrived_s is None else event.arrived_s + offset
            copy = replace(event, start_s=event.start_s + offset, end_s=event.end_s + offset, arrived_s=arrived)
            shifted.append(copy)
            if arrived is not None:
                send = event.action.other_end()
                arrivals[send], receivers[send] = arrived, event.rank
    result: list[Event] = []
    free: dict[tuple[int, int | Op], float] = {}
    for event in sorted(shifted, key=lambda event: event.start_s):
        link = event.rank, receivers.get(event.action, event.action.op)
        if event.action.op in SENDS:
            free[link], before = max(event.end_s, arrivals.get(event.action, event.end_s)), free.get(link, 0.0)
            start = min(max(event.start_s, before), free[link])
            event = replace(event, start_s=start, end_s=free[link], begun_s=event.start_s)
        result.append(event)
    return tuple(sorted(result, key=lambda event: (event.start_s, event.rank)))


def in_parts(events: Iterable[Event]) -> list[tuple[Event, bool]]:
    """Split events of tensor-parallel groups into (event, False) for the computation and (event, True) for the communication.

    The communication is assumed to take as long as on the rank of the group that spent the least time in it. The other ranks
    spend the rest of their time waiting, which belongs to no event.
    """
    listed = list(events)
    passing_s = dict[tuple[int, Action], float]()
    for event in listed:
        key = event.step, event.action
        passing_s[key] = min(event.exchanged_s, passing_s.get(key, event.exchanged_s))
    parts = list[tuple[Event, bool]]()
    for event in listed:
        end_s = event.end_s - event.exchanged_s
        parts.append((replace(event, end_s=end_s) if event.exchanged_s else event, False))
        if (seconds := passing_s[event.step, event.action]) > 0:
            parts.append((replace(event, start_s=end_s, end_s=end_s + seconds), True))
    return parts


def last_usage(records: Sequence[RankStep]) -> dict[int, Usage]:
    """Map each rank to its usage as of its latest recorded step."""
    return {record.rank: record.usage for record in sorted(records, key=lambda record: record.step)}


@dataclass(frozen=True)
class Traffic:
    """The messages between stages that one rank sends to another in one step."""

    messages: int = 0
    bytes: int = 0
    seconds: float = 0.0
    """Total transit time of the messages."""

    @property
    def bytes_per_s(self) -> float:
        return self.bytes / self.seconds if self.seconds > 0 else float("nan")


def traffic(events: Iterable[Event], plan: Plan) -> dict[tuple[int, int], Traffic]:
    """Map (sender, receiver) to the messages of one step. Gradient all-reduces are not included."""
    rank_of = {number: stage.ranks[0] for number, _, stage in plan.numbered}
    traffic_by_pair: dict[tuple[int, int], Traffic] = {}
    for event in events:
        if event.action.op in SENDS:
            pair = event.rank, rank_of.get(event.action.other_end().stage, -1)
            total = traffic_by_pair.get(pair, Traffic())
            traffic_by_pair[pair] = Traffic(
                total.messages + 1, total.bytes + event.bytes, total.seconds + event.end_s - event.start_s
            )
    return dict(sorted(traffic_by_pair.items()))


def _rounded(value: Any) -> Any:
    return round(value, _MAX_TIME_DECIMALS) if isinstance(value, float) else value
