"""Bytes and times of messages in a step, predicted or measured, per directed pair of ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hetero_mpi.planning.schedule import Event, Op
from hetero_mpi.planning.types.plan import Plan


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
