"""Why ranks wait: every second of a step in which a rank computes nothing is given one cause.

Works on events alone, so measured steps are explained as predicted ones are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hetero_mpi.planning.plan import Plan
from hetero_mpi.planning.schedule import Event, Op, stages

MESSAGES = (Op.SEND_F, Op.RECV_F, Op.SEND_B, Op.RECV_B)
"""Actions that compute nothing; REDUCE is the only other one."""


@dataclass(frozen=True)
class Idling:
    """Seconds of a step in which one rank computes nothing, by cause."""

    activations_s: float = 0.0
    """The stage before has not computed the awaited activations yet."""
    gradients_s: float = 0.0
    """The stage behind has not computed the awaited gradients yet."""
    link_s: float = 0.0
    """What is awaited has been computed and is queued or under way; summing tied gradients counts here too."""
    end_s: float = 0.0
    """The rank is done with its micro-batches, or with the step, and others are not."""

    @property
    def total_s(self) -> float:
        return self.activations_s + self.gradients_s + self.link_s + self.end_s


def idling(events: Sequence[Event], plan: Plan) -> dict[int, Idling]:
    """Rank -> its idle seconds by cause, of one step's ``events`` under ``plan``.

    The step lasts from 0 to the last event's end; on each rank computing (F, B, STEP) and idling add up to it::

        clock     0   1   2   3   4   5   6
        rank 0    F   F   g   g   B   B   S
        rank 1    a   F   B   F   B   e   S      a: activations, g: gradients, e: end
    """
    last = max((event.end_s for event in events), default=0.0)
    ready = _computed(events)
    first_stages, last_stages = _ends(plan)
    result: dict[int, Idling] = {}
    for rank in sorted({event.rank for event in events}):
        found, now = Idling(), 0.0
        own = [event for event in events if event.rank == rank and event.action.op not in MESSAGES]
        for event in sorted(own, key=lambda event: (event.start_s, event.end_s)):
            gap = event.start_s - now
            op, stage, number = event.action.op, event.action.stage, event.action.micro_batch
            if gap > 0 and op in (Op.REDUCE, Op.STEP):
                found = replace(found, end_s=found.end_s + gap)
            elif gap > 0:
                at_end = stage in (first_stages if op is Op.F else last_stages)
                source = (op is Op.F, stage + (-1 if op is Op.F else 1), number)
                # With nothing to wait for, only a send that blocks its rank can have kept it.
                since = now if at_end else min(max(now, ready.get(source, now)), event.start_s)
                found = replace(found, link_s=found.link_s + event.start_s - since)
                if op is Op.F:
                    found = replace(found, activations_s=found.activations_s + since - now)
                else:
                    found = replace(found, gradients_s=found.gradients_s + since - now)
            if op is Op.REDUCE:
                found = replace(found, link_s=found.link_s + event.end_s - event.start_s)
            now = max(now, event.end_s)
        result[rank] = replace(found, end_s=found.end_s + last - now)
    return result


def busy(events: Iterable[Event]) -> dict[int, float]:
    """Rank -> seconds of computing: all actions but messages and REDUCE."""
    result: dict[int, float] = {}
    for event in events:
        seconds = 0.0 if event.action.op in (*MESSAGES, Op.REDUCE) else event.end_s - event.start_s
        result[event.rank] = result.get(event.rank, 0.0) + seconds
    return result


def _computed(events: Sequence[Event]) -> dict[tuple[bool, int, int | None], float]:
    """(forward?, stage, micro-batch) -> when its result was there: the first end, where a backward has several parts."""
    ready: dict[tuple[bool, int, int | None], float] = {}
    for event in sorted(events, key=lambda event: event.end_s):
        if event.action.op not in (*MESSAGES, Op.REDUCE, Op.STEP):
            key = (event.action.op is Op.F, event.action.stage, event.action.micro_batch)
            ready.setdefault(key, event.end_s)
    return ready


def _ends(plan: Plan) -> tuple[set[int], set[int]]:
    """Stages without a stage before them, and without one behind them."""
    by_pipeline: dict[int, list[int]] = {}
    for number, index, _ in stages(plan):
        by_pipeline.setdefault(index, []).append(number)
    return {numbers[0] for numbers in by_pipeline.values()}, {numbers[-1] for numbers in by_pipeline.values()}
