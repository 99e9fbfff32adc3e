"""The timeline of a step: a lane per rank, with tall bars for computing and thin ones below for messages and gradient all-reduces.

Predicted and measured steps are drawn alike, one above the other on one time axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from hetero_mpi.planning.schedule import Event, Op
from hetero_mpi.report.figures.style import COLOURS, add_bars, drawn, far_apart, fitted, key, new_figure, panel
from hetero_mpi.rundir.rank_steps import in_parts
from hetero_mpi.util import units

WIDTH, LEFT, RIGHT = 1080, 184, 14
MOST_LANES = 48
"""Number of ranks that a page shows, the first ones."""
_LANE, _THIN_LANE = 32, 20
_MANY = 12
"""From this number of ranks on, lanes are thin."""
_MOST_NUMBERS = 800
"""With more bars than this, no micro-batch numbers are written into them."""
_LEAST = 0.35
"""A bar narrower than this many pixels is joined with the one before it."""
_STROKE = "\N{PRIME}"
SEVERAL = f"2: micro-batch 2 on a rank's first stage; 2{_STROKE}: on its second one"
KINDS: dict[Op, tuple[str, str]] = {
    Op.F: ("forward", "forward"),
    Op.B: ("backward", "backward"),
    Op.I: ("input gradients", "input-gradients"),
    Op.W: ("weight gradients", "weight-gradients"),
    Op.STEP: ("optimizer", "optimizer"),
    Op.SEND_F: ("message under way", "send"),
    Op.SEND_B: ("message under way", "send"),
    Op.REDUCE: ("gradient all-reduce", "all-reduce"),
}
"""Operation -> (its name, its colour role). Receives are not drawn: what stays white is waiting."""
EXCHANGE = ("exchange in the group", "exchange")
"""The same of what ranks of a group exchange while they compute, drawn behind what each computed by itself."""
_PLACES = {"send": (0.74, 0.1), "all-reduce": (0.86, 0.1)}
_COMPUTING = (0.06, 0.62)
"""(top, height) of the bars of computing within a lane."""


@dataclass(frozen=True)
class Panel:
    """A step that is to be drawn."""

    title: str
    events: Sequence[Event]


@drawn
def timeline(panels: Sequence[Panel], labels: Mapping[int, str], most_lanes: int | None = None) -> Figure:
    """The figure of all panels; ranks in the order of the first stage they compute. ``labels``: rank -> its device's name."""
    ranks = _in_order([event for one in panels for event in one.events])
    shown = ranks[:most_lanes]
    lane = _LANE if len(shown) < _MANY else _THIN_LANE
    ends_s = [max((event.end_s for event in one.events), default=0.0) for one in panels]
    apart = far_apart(ends_s)
    tall, head = lane * len(shown), 26 + (18 if apart else 0)
    turns = _turns([event for one in panels for event in one.events])
    notes = [f"and {len(ranks) - len(shown)} more ranks"] if len(shown) < len(ranks) else []
    notes += [SEVERAL] if any(turns.values()) and lane == _LANE else []
    figure = new_figure(WIDTH, 30 + (tall + head) * len(panels) + 24 + 16 * len(notes))
    for place, (one, end_s) in enumerate(zip(panels, ends_s, strict=True)):
        last_s = (end_s if apart else max(ends_s)) or 1.0
        top = 30 + (tall + head) * place + 20
        axes = panel(figure, LEFT, top, RIGHT, figure.bbox.height - top - tall)
        _draw_bars(axes, shown, one.events, (WIDTH - LEFT - RIGHT) / last_s, turns if lane == _LANE else None)
        axes.set(xlim=(0, last_s), ylim=(len(shown), 0))
        names = [
            fitted(f"{rank}  {units.device_name(labels.get(rank, ''), 26)}".rstrip(), 10.5, LEFT - 8) for rank in shown
        ]
        axes.set_yticks([number + 0.4 for number in range(len(shown))], names, size=10.5)
        axes.yaxis.set_tick_params(pad=LEFT - 2)
        for text in axes.get_yticklabels():
            text.set_horizontalalignment("left")
        axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 2.5, 5, 10]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: units.seconds(value)))
        axes.tick_params(axis="x", labelbottom=apart or one is panels[-1])
        axes.grid(axis="y", visible=False)
        axes.hlines(range(1, len(shown) + 1), 0, last_s, COLOURS["faint"][0], linewidth=0.6)
        axes.axvline(end_s, color=COLOURS["alert"][0], ls="--", lw=1)
        axes.spines[:].set_visible(False)
        figure.text(0, 1 - (top - 7) / figure.bbox.height, one.title, size=12, weight="bold")
    for place, note in enumerate(reversed(notes)):
        figure.text(0, (6 + 16 * place) / figure.bbox.height, note, color=COLOURS["soft"][0])
    present = {KINDS[e.action.op][1] for one in panels for e in one.events if e.action.op in KINDS}
    present |= {EXCHANGE[1] for one in panels for e in one.events if e.exchanged_s}
    keys = [key(colour, name) for name, colour in dict.fromkeys([*KINDS.values(), EXCHANGE]) if colour in present]
    if keys:
        figure.legend(handles=keys, ncols=len(keys), loc="upper left", bbox_to_anchor=(0, 1))
    return figure


def _in_order(events: Sequence[Event]) -> list[int]:
    """Ranks by the first stage they work for."""
    first: dict[int, int] = {}
    for event in events:
        first[event.rank] = min(first.get(event.rank, event.action.stage), event.action.stage)
    return sorted(first, key=lambda rank: (first[rank], rank))


def _turns(events: Sequence[Event]) -> dict[int, int]:
    """Stage -> how many earlier stages its rank holds."""
    held: dict[int, set[int]] = {}
    for event in events:
        held.setdefault(event.rank, set()).add(event.action.stage)
    return {stage: turn for stages in held.values() for turn, stage in enumerate(sorted(stages))}


def _draw_bars(
    axes: Axes, ranks: Sequence[int], events: Sequence[Event], scale: float, turns: Mapping[int, int] | None
) -> None:
    """Draw all lanes. ``scale``: pixels per second; ``turns``: as ``_turns``, or None: bars have no numbers."""
    coloured = dict[str, dict[int, list[Event]]]()
    for event, exchanges in in_parts(events):
        if event.rank in ranks and event.action.op in KINDS:
            colour = EXCHANGE[1] if exchanges else KINDS[event.action.op][1]
            coloured.setdefault(colour, {rank: [] for rank in ranks})[event.rank].append(event)
    for colour, own in coloured.items():
        top, height = _PLACES.get(colour, _COMPUTING)
        of = "exchange of " if colour == EXCHANGE[1] else ""
        bars = [
            (begin_s, max(end_s, begin_s + 0.5 / scale), lane + top, event)
            for lane, rank in enumerate(ranks)
            for begin_s, end_s, event in _joined(own[rank], _LEAST / scale)
        ]
        add_bars(
            axes,
            [(begin, end, y, y + height) for begin, end, y, _ in bars],
            [f"{of}{one.action} {units.seconds(end - begin)}" if one else "several" for begin, end, _, one in bars],
            colour,
            0 if colour in _PLACES else 0.5,
        )
        if turns is None or colour in _PLACES or of or len(bars) > _MOST_NUMBERS:
            continue
        ink = COLOURS["on-dark" if colour == "forward" else "on-light"][0]
        for begin, end, y, one in bars:
            text = "" if one is None or one.action.micro_batch is None else str(one.action.micro_batch)
            text += _STROKE * turns[one.action.stage] if one is not None and text else ""
            if text and (end - begin) * scale > 5.8 * len(text.rstrip(_STROKE)) + 2.5 * text.count(_STROKE) + 3:
                axes.text(
                    (begin + end) / 2, y + height / 2, text, size=9.5, color=ink, ha="center", va="center_baseline"
                )


def _joined(events: Sequence[Event], least_s: float) -> list[tuple[float, float, Event | None]]:
    """(begin, end, event) of bars. Bars too short to be seen, and close together, are joined into one without an event."""
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
