"""A step as lanes, predicted above measured on one time axis: computing tall, messages and sums of gradients thin below it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetero_mpi.planning.schedule import COMPUTE, Event, Op
from hetero_mpi.report import units
from hetero_mpi.report.drawing import Box, Drawing, Line, Text, fitting
from hetero_mpi.report.page.charts import ticks

WIDTH = 1080.0
MOST_LANES = 48
"""Of more ranks, the first ones are drawn."""
_LEFT, _RIGHT = 176.0, 12.0
_LANE, _THIN_LANE = 30.0, 19.0
_MANY = 12
"""From so many ranks on, lanes are thin."""
_LEAST = 0.35
"""A bar narrower than this many pixels is joined with the one before it."""
KINDS: dict[Op, tuple[str, str]] = {
    Op.F: ("forward", "forward"),
    Op.B: ("backward", "backward"),
    Op.I: ("input gradients", "input-gradients"),
    Op.W: ("weight gradients", "weight-gradients"),
    Op.STEP: ("optimizer", "optimizer"),
    Op.SEND_F: ("message under way", "send"),
    Op.SEND_B: ("message under way", "send"),
    Op.REDUCE: ("sum of gradients", "sum"),
}
"""Operation -> (its name, its colour). Receives are not drawn: waiting is what is left white."""


@dataclass(frozen=True)
class Panel:
    """One step to be drawn."""

    title: str
    events: Sequence[Event]


def timelines(panels: Sequence[Panel], labels: Mapping[int, str]) -> Drawing:
    """All panels, one below the other, on one time axis; ranks in the order of the first stage they work for."""
    ranks = _in_order([event for panel in panels for event in panel.events])
    shown = ranks[:MOST_LANES]
    lane = _LANE if len(shown) < _MANY else _THIN_LANE
    last_s = max((event.end_s for panel in panels for event in panel.events), default=0.0) or 1.0
    drawing = Drawing(WIDTH, 0.0, "timeline of a step: " + ", ".join(panel.title for panel in panels))
    scale = (WIDTH - _LEFT - _RIGHT) / last_s
    y = _legend(drawing, panels)
    for panel in panels:
        drawing.shapes.append(Text(0, y + 14, panel.title, 13, bold=True))
        y += 22
        top = y
        for rank in shown:
            most = fitting(11, _LEFT - 10) - len(f"{rank}  ")
            name = f"{rank}  {units.device_name(labels.get(rank, ''), most)}".rstrip()
            drawing.shapes.append(Text(0, y + lane * 0.5, name, 11, "soft"))
            drawing.shapes.append(Line(((_LEFT, y + lane - 1), (WIDTH - _RIGHT, y + lane - 1)), "faint", 0.6))
            _bars(drawing, [event for event in panel.events if event.rank == rank], y, lane, scale)
            y += lane
        end_s = max((event.end_s for event in panel.events), default=0.0)
        x = _LEFT + end_s * scale
        drawing.shapes.append(Line(((x, top - 4), (x, y)), "alert", 1, dashed=True))
        y += 14
    _time_axis(drawing, y - 8, last_s, scale)
    drawing.height = y + 16
    if len(ranks) > len(shown):
        drawing.height += 16
        drawing.shapes.append(Text(0, y + 26, f"and {len(ranks) - len(shown)} more ranks", 11, "soft"))
    return drawing


def _in_order(events: Sequence[Event]) -> list[int]:
    first: dict[int, int] = {}
    for event in events:
        first[event.rank] = min(first.get(event.rank, event.action.stage), event.action.stage)
    return sorted(first, key=lambda rank: (first[rank], rank))


def _legend(drawing: Drawing, panels: Sequence[Panel]) -> float:
    present = {KINDS[e.action.op] for panel in panels for e in panel.events if e.action.op in KINDS}
    x = 0.0
    for name, colour in dict.fromkeys(KINDS.values()):
        if (name, colour) in present:
            drawing.shapes.append(Box(x, 4, 12, 12, colour, radius=2))
            drawing.shapes.append(Text(x + 17, 14, name, 11.5, "soft"))
            x += 36 + 6.4 * len(name)
    return 30.0


def _bars(drawing: Drawing, events: Sequence[Event], y: float, lane: float, scale: float) -> None:
    for colour in dict.fromkeys(colour for _, colour in KINDS.values()):
        own = [e for e in events if KINDS.get(e.action.op, ("", ""))[1] == colour]
        computing = bool(own) and (own[0].action.op in COMPUTE or own[0].action.op is Op.STEP)
        place = (y + 2, lane * 0.62) if computing else (y + lane * (0.72 if colour == "send" else 0.84), lane * 0.1)
        for begin_s, end_s, event in _joined(own, _LEAST / scale):
            left, width = _LEFT + begin_s * scale, max((end_s - begin_s) * scale, 0.5)
            title = f"{event.action} {units.seconds(end_s - begin_s)}" if event is not None else "several"
            drawing.shapes.append(
                Box(left, place[0], width, place[1], colour, radius=1 if width > 3 else 0, title=title)
            )
            number = "" if event is None or event.action.micro_batch is None else str(event.action.micro_batch)
            if computing and lane == _LANE and number and width > 7 * len(number) + 4:
                drawing.shapes.append(Text(left + width / 2, y + lane * 0.47, number, 10, "paper", "middle"))


def _joined(events: Sequence[Event], least_s: float) -> list[tuple[float, float, Event | None]]:
    """(begin, end, event) of bars: those too short to be seen, and hardly apart, are one, which is no event."""
    bars: list[tuple[float, float, Event | None]] = []
    for event in sorted(events, key=lambda event: event.start_s):
        if bars:
            begin, end, _ = bars[-1]
            both_short = end - begin < 4 * least_s and event.end_s - event.start_s < least_s
            if both_short and event.start_s - end < least_s:
                bars[-1] = (begin, max(end, event.end_s), None)
                continue
        bars.append((event.start_s, event.end_s, event))
    return bars


def _time_axis(drawing: Drawing, y: float, last_s: float, scale: float) -> None:
    for tick in ticks(0.0, last_s, 8):
        if tick <= last_s * 1.001:
            x = _LEFT + tick * scale
            drawing.shapes.append(Line(((x, y - 6), (x, y - 2)), "soft", 1))
            drawing.shapes.append(Text(x, y + 10, units.seconds(tick), 11, "soft", "middle"))
