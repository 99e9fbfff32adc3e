"""Recorded steps: what each rank measured of some steps, one JSON object per rank and step in ``steps.jsonl``.

A line holds the rank's actions of that step, its clock's offset from rank 0's, and its use of time since training began. The same
code makes reports and traces from these lines and from the simulator's events.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import FiniteFloat, TypeAdapter

from hetero_mpi.planning.schedule import COMPUTE, Action, Event, MeasuredEvent, Op, parse_action
from hetero_mpi.planning.types.plan import Plan
from hetero_mpi.rundir.line_files import objects
from hetero_mpi.util.errors import UserError

_DIGITS = 7
"""Decimals of stored times: a tenth of a microsecond."""


@dataclass(frozen=True)
class Usage:
    """A rank's use of time since training began, in seconds, and its memory and messages, in bytes."""

    steps: int = 0
    seconds: float = 0.0
    computing_s: float = 0.0
    """Forward, backward and optimizer."""
    activations_s: float = 0.0
    """Waiting for activations."""
    gradients_s: float = 0.0
    """Waiting for gradients."""
    copies_s: float = 0.0
    """Copying between device and host memory."""
    sums_s: float = 0.0
    """Waiting for gradient all-reduces."""
    group_s: float = 0.0
    """Exchanging with the other ranks of its group while they compute a stage together, or waiting for them."""
    sent_bytes: int = 0
    received_bytes: int = 0
    peak_bytes: int = 0
    """Peak memory so far: of a device what was allocated, of a CPU rank the whole process."""

    @property
    def end_s(self) -> float:
        """All other seconds: waiting for the batch, for the step decision, and for the other ranks."""
        known = self.computing_s + self.activations_s + self.gradients_s + self.copies_s + self.sums_s + self.group_s
        return max(0.0, self.seconds - known)

    def and_step(self, events: Iterable[Event], seconds: float) -> Usage:
        """This usage and one more step, which took ``seconds``."""
        grown = {**asdict(self), "steps": self.steps + 1, "seconds": self.seconds + seconds}
        for event in events:
            lasted, op = event.end_s - event.start_s, event.action.op
            copied = event.copied_s if isinstance(event, MeasuredEvent) else 0.0
            grown["copies_s"] += copied
            if op in COMPUTE or op is Op.STEP:
                grown["computing_s"] += lasted - event.exchanged_s
                grown["group_s"] += event.exchanged_s
            elif op in (Op.RECV_F, Op.RECV_B):
                grown["activations_s" if op is Op.RECV_F else "gradients_s"] += lasted - copied
                grown["received_bytes"] += event.bytes
            elif op is Op.REDUCE:
                grown["sums_s"] += lasted
            else:
                grown["sent_bytes"] += event.bytes
        return Usage(**grown)


@dataclass(frozen=True)
class RankStep:
    """One rank's part of a recorded step."""

    rank: int
    step: int
    """Number of steps taken, this one included, as in ``metrics.jsonl``."""
    begin_s: float
    """When the rank's actions began, on rank 0's clock."""
    events: tuple[MeasuredEvent, ...]
    """With times in seconds since ``begin_s``."""
    usage: Usage


_USAGE = TypeAdapter(Usage)
_EVENTS = TypeAdapter(list[tuple[str, FiniteFloat, FiniteFloat, int, FiniteFloat, FiniteFloat | None, FiniteFloat]])


def rank_step_to_dict(record: RankStep) -> dict[str, Any]:
    """The record as JSON values; an event is ``[action, start_s, end_s, bytes, copied_s, arrived_s, exchanged_s]``."""
    return {
        "step": record.step,
        "rank": record.rank,
        "begin_s": round(record.begin_s, _DIGITS),
        "usage": {name: _rounded(value) for name, value in asdict(record.usage).items()},
        "events": [
            [str(e.action), *map(_rounded, (e.start_s, e.end_s, e.bytes, e.copied_s, e.arrived_s, e.exchanged_s))]
            for e in record.events
        ],
    }


def rank_step_from_dict(values: Mapping[str, Any]) -> RankStep:
    """The inverse of ``rank_step_to_dict``. Unknown keys of ``usage`` are left out."""
    rank, step = int(values["rank"]), int(values["step"])
    events = tuple(
        MeasuredEvent(rank, step, parse_action(text), start, end, size, copied, arrived, exchanged_s=exchanged)
        for text, start, end, size, copied, arrived, exchanged in _EVENTS.validate_python(values["events"])
    )
    return RankStep(rank, step, float(values["begin_s"]), events, _USAGE.validate_python(values["usage"]))


def read_rank_steps(path: Path) -> tuple[RankStep, ...]:
    """All complete lines of a file of recorded steps, in order; empty where there is no file."""
    found = []
    for _, values in objects(path):
        # What is of another version is left out.
        with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError, AttributeError, UserError):
            found.append(rank_step_from_dict(values))
    return tuple(found)


def steps_under(records: Sequence[RankStep], plan: Plan) -> list[tuple[RankStep, ...]]:
    """The steps that were run under ``plan`` and recorded by all its ranks, in order."""
    held = {(number, rank) for number, _, stage in plan.numbered for rank in stage.ranks}
    by_step: dict[int, dict[int, RankStep]] = {}
    for record in records:
        if record.events:
            by_step.setdefault(record.step, {})[record.rank] = record
    found = []
    for _, own in sorted(by_step.items()):
        told = {(event.action.stage, rank) for rank, record in own.items() for event in record.events}
        if told == held:
            found.append(tuple(own[rank] for rank in sorted(own)))
    return found


def newest_step(records: Sequence[RankStep], plan: Plan) -> tuple[RankStep, ...]:
    """The latest step of ``steps_under``; empty: there is none."""
    found = steps_under(records, plan)
    return found[-1] if found else ()


def on_one_clock(records: Sequence[RankStep]) -> tuple[Event, ...]:
    """The events of one recorded step, in seconds since its first rank began.

    Sends become comparable with the simulator's, whose events span the time on the link: a send ends when its message has arrived,
    and begins when the one before it has.
    """
    if not records:
        return ()
    first_s = min(record.begin_s for record in records)
    arrivals: dict[Action, float] = {}
    receivers: dict[Action, int] = {}
    shifted: list[MeasuredEvent] = []
    for record in records:
        later = record.begin_s - first_s
        for event in record.events:
            arrived = None if event.arrived_s is None else event.arrived_s + later
            moved = replace(event, start_s=event.start_s + later, end_s=event.end_s + later, arrived_s=arrived)
            shifted.append(moved)
            if arrived is not None:
                arrivals[_sent(event.action)], receivers[_sent(event.action)] = arrived, event.rank
    result: list[Event] = []
    free: dict[tuple[int, int | Op], float] = {}
    for event in sorted(shifted, key=lambda event: event.start_s):
        link = event.rank, receivers.get(event.action, event.action.op)
        if event.action.op in (Op.SEND_F, Op.SEND_B):
            free[link], before = max(event.end_s, arrivals.get(event.action, event.end_s)), free.get(link, 0.0)
            start = min(max(event.start_s, before), free[link])
            event = replace(event, start_s=start, end_s=free[link], begun_s=event.start_s)
        result.append(event)
    return tuple(sorted(result, key=lambda event: (event.start_s, event.rank)))


def in_parts(events: Iterable[Event]) -> list[tuple[Event, bool]]:
    """The events with False; where a group computes, what each rank computed by itself, and behind it, with True, the exchanges.

    An exchange is taken to last as long as for the rank of the group that spent the least time in them. The others waited for the
    rest, which is in no event.
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


def _sent(receive: Action) -> Action:
    """The send that belongs to ``receive``."""
    if receive.op is Op.RECV_F:
        return Action(Op.SEND_F, receive.stage - 1, receive.micro_batch)
    return Action(Op.SEND_B, receive.stage + 1, receive.micro_batch)


def last_usage(records: Sequence[RankStep]) -> dict[int, Usage]:
    """Rank -> its usage at its latest recorded step."""
    return {record.rank: record.usage for record in sorted(records, key=lambda record: record.step)}


@dataclass(frozen=True)
class Traffic:
    """The messages between stages from one rank to another in one step."""

    messages: int = 0
    bytes: int = 0
    seconds: float = 0.0
    """Sum of the messages' times under way."""

    @property
    def bytes_per_s(self) -> float:
        return self.bytes / self.seconds if self.seconds > 0 else float("nan")


def traffic(events: Iterable[Event], plan: Plan) -> dict[tuple[int, int], Traffic]:
    """(sender, receiver) -> messages of one step. Gradient all-reduces are not included (``sums`` has their times)."""
    rank_of = {number: stage.ranks[0] for number, _, stage in plan.numbered}
    found: dict[tuple[int, int], Traffic] = {}
    for event in events:
        if event.action.op in (Op.SEND_F, Op.SEND_B):
            step = 1 if event.action.op is Op.SEND_F else -1
            pair = event.rank, rank_of.get(event.action.stage + step, -1)
            so_far = found.get(pair, Traffic())
            found[pair] = Traffic(
                so_far.messages + 1, so_far.bytes + event.bytes, so_far.seconds + event.end_s - event.start_s
            )
    return dict(sorted(found.items()))


def sums(events: Iterable[Event]) -> dict[int, float]:
    """Rank -> seconds of a step in which it takes part in gradient all-reduces. Ranks that take part in none are absent."""
    found: dict[int, float] = {}
    for event in events:
        if event.action.op is Op.REDUCE:
            found[event.rank] = found.get(event.rank, 0.0) + event.end_s - event.start_s
    return found


def _rounded(value: Any) -> Any:
    return round(value, _DIGITS) if isinstance(value, float) else value
