"""Draw the timeline of a step: a lane per rank, with tall bars for computation and thin bars for messages and all-reduces.

Predicted and measured steps are drawn in the same way, one above the other on a common time axis.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from hetero_mpi.planning.schedule import Event, Op
from hetero_mpi.report.figures.style import COLOURS, add_bars, drawn, fitted, key, new_figure, panel
from hetero_mpi.rundir.rank_steps import in_parts
from hetero_mpi.util import units

WIDTH, LEFT, RIGHT = 1080, 184, 14
MAX_LANES = 48
"""Maximum number of ranks to draw on a page."""
_LANE, _THIN_LANE = 32, 20
_MIN_THIN_LANES = 12
"""Number of ranks from which lanes are drawn thinner."""
_MAX_NUMBERED_BARS = 800
"""Number of bars of one colour above which they are not labelled with micro-batch numbers."""
_MIN_BAR_WIDTH = 0.35
"""Minimum width of a bar in pixels; narrower bars are merged with the previous bar."""
_STROKE = "\N{PRIME}"
SEVERAL = f"2: micro-batch 2 on a rank's first stage; 2{_STROKE}: on its second stage"
KINDS: dict[Op, tuple[str, str]] = {
    Op.F: ("forward", "forward"),
    Op.B: ("backward", "backward"),
    Op.I: ("input gradients", "input-gradients"),
    Op.W: ("weight gradients", "weight-gradients"),
    Op.STEP: ("optimizer", "optimizer"),
    Op.SEND_F: ("message transfer", "send"),
    Op.SEND_B: ("message transfer", "send"),
    Op.REDUCE: ("gradient all-reduce", "all-reduce"),
}
"""Maps operations to (name, colour role). Receives are not drawn, so that waiting stays white."""
EXCHANGE = ("tensor-parallel communication", "exchange")
"""Name and colour role of tensor-parallel communication, which is drawn after the computation of each action."""
_PLACES = {"send": (0.74, 0.1), "all-reduce": (0.86, 0.1)}
_COMPUTING = (0.06, 0.62)
"""(top, height) of computation bars, as fractions of the lane height."""


@dataclass(frozen=True)
class Panel:
    """A step to draw, with its title."""

    title: str
    events: Sequence[Event]


@drawn
def timeline(panels: Sequence[Panel], labels: Mapping[int, str], most_lanes: int | None = None) -> Figure:
    """Draw the panels, with ranks in the order of their first stage. ``labels`` maps ranks to device names."""
    ranks = _in_order([event for part in panels for event in part.events])
    shown_ranks = ranks[:most_lanes]
    lane = _LANE if len(shown_ranks) < _MIN_THIN_LANES else _THIN_LANE
    ends_s = [max((event.end_s for event in part.events), default=0.0) for part in panels]
    last_s = max(ends_s) or 1.0
    tall, head = lane * len(shown_ranks), 26
    turns = _turns([event for part in panels for event in part.events])
    notes = [f"and {len(ranks) - len(shown_ranks)} more ranks"] if len(shown_ranks) < len(ranks) else []
    notes += [SEVERAL] if any(turns.values()) and lane == _LANE else []
    figure = new_figure(WIDTH, 30 + (tall + head) * len(panels) + 24 + 16 * len(notes))
    for index, (part, end_s) in enumerate(zip(panels, ends_s, strict=True)):
        top = 30 + (tall + head) * index + 20
        axes = panel(figure, LEFT, top, RIGHT, figure.bbox.height - top - tall)
        _draw_bars(axes, shown_ranks, part.events, (WIDTH - LEFT - RIGHT) / last_s, turns if lane == _LANE else None)
        axes.set(xlim=(0, last_s), ylim=(len(shown_ranks), 0))
        names = [
            fitted(f"{rank}  {units.device_name(labels.get(rank, ''), 26)}".rstrip(), 10.5, LEFT - 8)
            for rank in shown_ranks
        ]
        axes.set_yticks([number + 0.4 for number in range(len(shown_ranks))], names, size=10.5)
        axes.yaxis.set_tick_params(pad=LEFT - 2)
        for text in axes.get_yticklabels():
            text.set_horizontalalignment("left")
        axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 2.5, 5, 10]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: units.seconds(value)))
        axes.tick_params(axis="x", labelbottom=part is panels[-1])
        axes.grid(axis="y", visible=False)
        axes.hlines(range(1, len(shown_ranks) + 1), 0, last_s, COLOURS["faint"][0], linewidth=0.6)
        axes.axvline(end_s, color=COLOURS["alert"][0], ls="--", lw=1)
        axes.spines[:].set_visible(False)
        figure.text(0, 1 - (top - 7) / figure.bbox.height, part.title, size=12, weight="bold")
    for index, note in enumerate(reversed(notes)):
        figure.text(0, (6 + 16 * index) / figure.bbox.height, note, color=COLOURS["soft"][0])
    present = {KINDS[e.action.op][1] for part in panels for e in part.events if e.action.op in KINDS}
    present |= {EXCHANGE[1] for part in panels for e in part.events if e.exchanged_s}
    keys = [key(colour, name) for name, colour in dict.fromkeys([*KINDS.values(), EXCHANGE]) if colour in present]
    if keys:
        figure.legend(handles=keys, ncols=len(keys), loc="upper left", bbox_to_anchor=(0, 1))
    return figure


def _in_order(events: Sequence[Event]) -> list[int]:
    """Return the ranks of the events, sorted by their first stage."""
    first: dict[int, int] = {}
    for event in events:
        first[event.rank] = min(first.get(event.rank, event.action.stage), event.action.stage)
    return sorted(first, key=lambda rank: (first[rank], rank))


def _turns(events: Sequence[Event]) -> dict[int, int]:
    """Map each stage to the number of earlier stages on the same rank."""
    stages_by_rank: dict[int, set[int]] = {}
    for event in events:
        stages_by_rank.setdefault(event.rank, set()).add(event.action.stage)
    return {stage: turn for stages in stages_by_rank.values() for turn, stage in enumerate(sorted(stages))}


def _draw_bars(
    axes: Axes, ranks: Sequence[int], events: Sequence[Event], scale: float, turns: Mapping[int, int] | None
) -> None:
    """Draw all lanes at ``scale`` pixels per second. ``turns`` is the result of ``_turns``, or None to draw no numbers in bars."""
    coloured = dict[str, dict[int, list[Event]]]()
    for event, exchanges in in_parts(events):
        if event.rank in ranks and event.action.op in KINDS:
            colour = EXCHANGE[1] if exchanges else KINDS[event.action.op][1]
            coloured.setdefault(colour, {rank: [] for rank in ranks})[event.rank].append(event)
    for colour, events_by_rank in coloured.items():
        top, height = _PLACES.get(colour, _COMPUTING)
        of = "exchange of " if colour == EXCHANGE[1] else ""
        bars = [
            (begin_s, max(end_s, begin_s + 0.5 / scale), lane + top, event)
            for lane, rank in enumerate(ranks)
            for begin_s, end_s, event in _joined(events_by_rank[rank], _MIN_BAR_WIDTH / scale)
        ]
        add_bars(
            axes,
            [(begin, end, y, y + height) for begin, end, y, _ in bars],
            [f"{of}{bar.action} {units.seconds(end - begin)}" if bar else "several" for begin, end, _, bar in bars],
            colour,
            0 if colour in _PLACES else 0.5,
        )
        if turns is None or colour in _PLACES or of or len(bars) > _MAX_NUMBERED_BARS:
            continue
        ink = COLOURS["on-dark" if colour == "forward" else "on-light"][0]
        for begin, end, y, bar in bars:
            text = "" if bar is None or bar.action.micro_batch is None else str(bar.action.micro_batch)
            text += _STROKE * turns[bar.action.stage] if bar is not None and text else ""
            if text and (end - begin) * scale > 5.8 * len(text.rstrip(_STROKE)) + 2.5 * text.count(_STROKE) + 3:
                axes.text(
                    (begin + end) / 2, y + height / 2, text, size=9.5, color=ink, ha="center", va="center_baseline"
                )


def _joined(events: Sequence[Event], least_s: float) -> list[tuple[float, float, Event | None]]:
    """Compute bars as (begin, end, event). Short bars that are close together are merged into one whose event is None."""
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
