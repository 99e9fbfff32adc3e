"""Line charts of values over steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from hetero_mpi.report.figures.style import COLOURS, drawn, far_apart, key, new_figure, panel

MOST_POINTS = 400
"""A series of more points is drawn as means of neighbouring points."""
_ROUND = [1, 2, 2.5, 5, 10]
_CHART, _BETWEEN = 250.0, 18.0
"""Pixels: height of a chart, and distance between two axes in it."""


@dataclass(frozen=True)
class Series:
    """A line of a chart: its label, points and colour."""

    name: str
    points: tuple[tuple[float, float], ...]
    colour: str
    """A colour role of the style."""
    dots: bool = False
    """Mark the points; for series of few points."""
    dashed: bool = False


_Shown = tuple[Series, list[tuple[float, float]]]
"""A series, and those of its points that are drawn."""


@dataclass(frozen=True)
class StepMark:
    """An event after a step, drawn as a vertical line over a chart; ``text`` appears under the pointer."""

    step: float
    text: str
    colour: str


def plain(value: float) -> str:
    """The label of an axis value."""
    return f"{value:,.10g}"


@drawn
def line_chart(
    label: str, series: Sequence[Series], y_text: Callable[[float], str] = plain, from_zero: bool = False,
    marks: Sequence[StepMark] = (),
) -> Figure | None:  # fmt: skip
    """A chart of the finite values of ``series``; None where there are none.

    Args:
        label: of the y axis, with its unit.
        y_text: writes a value of the y axis.
        from_zero: the y axis begins at 0; series of very different size have an axis each, one above the other.
        marks: those outside the steps of ``series`` are drawn at the edge.
    """
    shown = [(one, points) for one in series if (points := _thinned(one.points))]
    if not shown:
        return None
    groups = [[one] for one in shown] if from_zero and far_apart([_middle(points) for _, points in shown]) else [shown]
    figure = new_figure(460, _CHART)
    tall = (_CHART - 34 - 36 - _BETWEEN * (len(groups) - 1)) / len(groups)
    tops = [34 + place * (tall + _BETWEEN) for place in range(len(groups))]
    panels = [panel(figure, 64, top, 14, _CHART - top - tall) for top in tops]
    for axes, group in zip(panels, sorted(groups, key=lambda group: -_middle(group[0][1])), strict=True):
        _draw_lines(axes, group, y_text, from_zero)
        _draw_marks(axes, marks, shown)
        axes.tick_params(axis="x", labelbottom=axes is panels[-1])
    panels[-1].set_xlabel("step", x=1, ha="right")
    figure.text(0, 1 - 14 / _CHART, label + (", an axis each" if len(groups) > 1 else ""), size=12, weight="bold")
    if len(shown) > 1:
        keys = [key(one.colour, one.name, one.dashed, thick=False) for one, _ in shown]
        figure.legend(handles=keys, ncols=len(keys), loc="upper right", bbox_to_anchor=(1, 1), handlelength=1.6)
    return figure


def _draw_lines(axes: Axes, group: Sequence[_Shown], y_text: Callable[[float], str], from_zero: bool) -> None:
    values = [y for _, points in group for _, y in points]
    ticks = MaxNLocator(5, steps=_ROUND).tick_values(0.0 if from_zero else min(values), max(values))
    for one, points in group:
        marked = one.dots or len(points) == 1
        look: dict[str, Any] = {"marker": "o" if marked else "", "markersize": 6, "linewidth": 1.6}
        axes.plot(*zip(*points, strict=True), "--" if one.dashed else "-", color=COLOURS[one.colour][0], **look)
    axes.set(yticks=ticks, ylim=(ticks[0], ticks[-1]))
    axes.margins(x=0)
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=_ROUND, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: y_text(value)))
    axes.grid(axis="x", visible=False)
    axes.spines[["left", "bottom"]].set_visible(False)


def _draw_marks(axes: Axes, marks: Sequence[StepMark], shown: Sequence[_Shown]) -> None:
    """A thin line for each mark, on a pale one wide enough to be pointed at."""
    steps = [step for _, points in shown for step, _ in points]
    for mark in marks:
        step, colour = min(max(mark.step, min(steps)), max(steps)), COLOURS[mark.colour][0]
        for width, opacity in ((9.0, 0.18), (1.2, 1.0)):
            axes.axvline(step, color=colour, linewidth=width, alpha=opacity, url=mark.text)


def _middle(points: Sequence[tuple[float, float]]) -> float:
    return statistics.median(y for _, y in points)


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most ``MOST_POINTS`` points, without those that are not finite."""
    finite = [point for point in points if math.isfinite(point[1])]
    size = max(1, -(-len(finite) // MOST_POINTS))
    groups = [finite[first : first + size] for first in range(0, len(finite), size)]
    return [(group[-1][0], sum(y for _, y in group) / len(group)) for group in groups]
