"""Draw line charts over steps as SVG. This is 30 times as fast as matplotlib, since the live page redraws twice a second.

A chart contains everything that a page can show of it: hovering shows the values at a step, and the page's check boxes
(``page.css``) choose between linear and logarithmic axes, and show or hide smoothed curves. No script is needed, so that reports
that are sent by mail and notebooks keep these functions; without the page's CSS, the linear axes are shown.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from hetero_mpi.report.figures.style import FONTS

MAX_POINTS = 400
"""Maximum number of points per series. In longer series, neighbouring points are averaged."""
HOVER_STEPS = 80
"""Maximum number of steps per chart whose values are shown on hovering."""
SMOOTHING_FACTOR = 0.9
"""Weight of the previous value in the exponential moving average of smoothed curves."""
_MIN_SMOOTHED = 10
"""Minimum number of points of a curve that is smoothed."""
_CHARACTER_SIZE = 6.5
"""Mean width of a character in pixels; a legend that would cover the title is omitted."""
_MIN_LOG_RATIO = 1.01
"""Ratio of the largest to the smallest value below which the y axis stays linear."""
_MIN_DECADE_RATIO = 4.0
"""Ratio of the largest to the smallest value from which a logarithmic axis has ticks at 1, 2 and 5 times powers of ten."""
_MAX_TICKS = 7
"""Maximum number of ticks of a logarithmic y axis within powers of ten."""
_LABEL_SIZE = 12
"""Minimum distance of tick labels in pixels."""
_ROUND = [1, 2, 2.5, 5, 10]
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 460, 250, 64, 446, 34, 214
"""Size of a chart and edges of its axes, in pixels."""


@dataclass(frozen=True)
class Series:
    """A line of a chart, with its label, points and colour."""

    name: str
    points: tuple[tuple[float, float], ...]
    colour: str
    """Colour role (see ``style``)."""
    dots: bool = False
    """Whether to mark the points, for series with few points."""
    dashed: bool = False
    noisy: bool = False
    """Whether the page can show a smoothed line instead."""


_Shown = tuple[Series, list[tuple[float, float]]]
"""A series, and the points of it that are drawn."""


@dataclass(frozen=True)
class StepMark:
    """An event after a step, which is drawn as a vertical line with the tooltip ``text``."""

    step: float
    text: str
    colour: str


def plain(value: float) -> str:
    """Format the value of a tick label."""
    return f"{value:,.10g}"


def line_chart(
    label: str, series: Sequence[Series], y_text: Callable[[float], str] = plain, from_zero: bool = False,
    marks: Sequence[StepMark] = (), x_name: str = "step", x_text: Callable[[float], str] = plain,
) -> Markup | None:  # fmt: skip
    """Draw the finite values of ``series``, or return None if there are none.

    Args:
        label: label of the y axis, with its unit.
        y_text: function that formats the tick labels of the y axis.
        from_zero: start the y axis at 0.
        marks: events to mark. Those outside the range of steps are drawn at the edge.
        x_name: label of the x axis.
        x_text: function that formats positions on the x axis.
    """
    drawn_series = [(line, points) for line in series if (points := _thinned(line.points))]
    if not drawn_series:
        return None
    steps = [step for _, points in drawn_series for step, _ in points]
    ends = (min(steps), max(steps)) if min(steps) < max(steps) else (steps[0] - 1, steps[0] + 1)
    across = partial(np.interp, xp=ends, fp=(_LEFT, _RIGHT))
    parts = [_text(0, 14, label, _TITLE), *_scales(drawn_series, across, (_BOTTOM, _TOP), y_text, from_zero)]
    for mark in marks:
        x = across(mark.step)
        lines = [_path([(x, _TOP), (x, _BOTTOM)], mark.colour, form) for form in ('9" opacity="0.18', "1.2")]
        parts.append(Markup("<g><title>{}</title>{}{}</g>").format(mark.text, *lines))
    ticks = MaxNLocator(5, steps=_ROUND, integer=True).tick_values(*ends)
    parts += [_text(across(at), 231, x_text(at), _MIDDLE) for at in ticks if ends[0] <= at <= ends[1]]
    parts.append(_text(_RIGHT, 245, x_name, _END))
    parts += _readings(drawn_series, across, lambda step: f"{x_name} {x_text(step)}", y_text)
    characters = len(label) + sum(len(line.name) + 5 for line, _ in drawn_series)
    if len(drawn_series) > 1 and characters * _CHARACTER_SIZE < _WIDTH:
        key = Markup('\N{EM SPACE}<tspan fill="var(--{})">{}</tspan> {}').format
        kinds = ["–●–" if line.dots else "– –" if line.dashed else "——" for line, _ in drawn_series]
        keys = [key(line.colour, kind, line.name) for kind, (line, _) in zip(kinds, drawn_series, strict=True)]
        parts.append(_text(_WIDTH, 14, Markup("").join(keys), _END))
    about = f"{label}, {x_name} {plain(min(steps))} to {plain(max(steps))}"
    return Markup(
        '<svg width="{}" height="{}" viewBox="0 0 {} {}" role="img" aria-label="{}" font-family="{}" font-size="11" '
        'fill="none" stroke-linejoin="round" xmlns="http://www.w3.org/2000/svg">{}</svg>'
    ).format(_WIDTH, _HEIGHT, _WIDTH, _HEIGHT, about, FONTS, Markup("").join(parts))


_TITLE = 'fill="var(--ink)" font-size="12" font-weight="700"'
_MIDDLE, _END = 'fill="var(--soft)" text-anchor="middle"', 'fill="var(--soft)" text-anchor="end"'


def _scales(
    group: Sequence[_Shown], across: Any, ends: tuple[float, float], y_text: Any, from_zero: bool
) -> list[Markup]:
    """Draw series on a linear and, if its values are positive and differ, on a hidden logarithmic y axis."""
    values = [y for _, points in group for _, y in points]
    ticks = MaxNLocator(5, steps=_ROUND).tick_values(0.0 if from_zero else min(values), max(values))
    linear = _axes(group, across, ticks, np.interp(ticks, (ticks[0], ticks[-1]), ends), y_text)
    if min(values) <= 0 or max(values) < _MIN_LOG_RATIO * min(values):
        return linear
    decades = _logarithmic_ticks(min(values), max(values))
    heights = np.interp(np.log(decades), np.log([decades[0], decades[-1]]), ends)
    layer = Markup('<g class="{}"{}>{}</g>').format
    logarithmic = Markup("").join(_axes(group, across, decades, heights, y_text, np.log))
    return [layer("linear", "", Markup("").join(linear)), layer("log", Markup(' display="none"'), logarithmic)]


def _logarithmic_ticks(low: float, high: float) -> NDArray[np.float64]:
    """Return positive tick values that enclose a range: 1, 2, 5 times powers of ten, or evenly spaced ones for a small range."""
    even = np.asarray(MaxNLocator(5, steps=_ROUND).tick_values(low, high))
    if high < _MIN_DECADE_RATIO * low and even[0] > 0:
        return even
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for multiples in ((1.0, 2.0, 5.0), (1.0,)):
        ticks = np.array([multiple * 10.0**exponent for exponent in exponents for multiple in multiples])
        ticks = ticks[np.searchsorted(ticks, low, "right") - 1 : np.searchsorted(ticks, high) + 1]
        if len(ticks) <= _MAX_TICKS:
            break
    return ticks


def _axes(
    group: Sequence[_Shown], across: Any, ticks: Any, heights: Any, y_text: Any, scale: Any = np.asarray
) -> list[Markup]:
    """Draw the series that share a y axis with these ticks, whose vertical positions in pixels are ``heights``."""
    parts = [_path([(_LEFT, y), (_RIGHT, y)], "faint", "0.8") for y in heights]
    last_y = math.inf
    for tick, y in zip(ticks, heights, strict=True):
        if last_y - y >= _LABEL_SIZE:
            parts.append(_text(_LEFT - 4, y + 4, y_text(tick), _END))
            last_y = y
    for line, points in group:
        x, y = zip(*points, strict=True)

        def drawn(values: Sequence[float], x: Sequence[float] = x) -> list[tuple[float, float]]:
            return list(zip(across(x), np.interp(scale(values), scale(ticks), heights), strict=True))

        smoothed = line.noisy and len(points) >= _MIN_SMOOTHED
        form = '1.6" stroke-dasharray="6 2.6' if line.dashed else '1.6" class="raw' if smoothed else "1.6"
        parts.append(_path(drawn(y), line.colour, form))
        if smoothed:
            parts.append(_path(drawn(_smoothed(y)), line.colour, '2" class="smooth" display="none'))
        if line.dots or len(points) == 1:
            dot = f'<circle cx="%.1f" cy="%.1f" r="3.5" fill="var(--{line.colour})"/>'
            parts += [Markup(dot % point) for point in drawn(y)]
    return parts


def _readings(
    drawn_series: Sequence[_Shown], across: Any, position_text: Callable[[float], str], y_text: Callable[[float], str]
) -> list[Markup]:
    """Draw hidden readings, which the page shows on hovering: a line at a step, and each series' latest value up to it."""
    steps = sorted({step for _, points in drawn_series for step, _ in points})
    steps = steps[:: -(-len(steps) // HOVER_STEPS)]
    positions = [float(x) for x in across(steps)]
    edges = [_LEFT, *((a + b) / 2 for a, b in pairwise(positions)), _RIGHT]
    readings, entry = [], Markup('<tspan x="{}" dy="13" fill="var(--{})">{} {}</tspan>').format
    for step, x, (start, end) in zip(steps, positions, pairwise(edges), strict=True):
        lines = []
        for line, points in drawn_series:
            if (index := bisect_right(points, (step, math.inf)) - 1) < 0:
                continue
            value = points[index][1]
            value_text = f"{value:,.4g}" if y_text is plain else y_text(value)
            lines.append(entry(_RIGHT - 4, line.colour, line.name, value_text))
        area = f'<rect x="{start:.1f}" y="{_TOP}" width="{max(end - start, 0.1):.1f}" height="{_BOTTOM - _TOP}"/>'
        cursor = f'<path d="M{x:.1f} {_TOP}V{_BOTTOM}"/>'
        text = _text(_RIGHT - 4, _TOP + 10, Markup("{}{}").format(position_text(step), Markup("").join(lines)), "")
        readings.append(Markup('<g class="reading">{}{}{}</g>').format(Markup(area), Markup(cursor), text))
    return [Markup('<g visibility="hidden">{}</g>').format(Markup("").join(readings))]


def _smoothed(values: Sequence[float]) -> list[float]:
    """Return the exponential moving average of ``values``, corrected for its start."""
    average, weight, averages = 0.0, 0.0, []
    for value in values:
        average = SMOOTHING_FACTOR * average + (1 - SMOOTHING_FACTOR) * value
        weight = SMOOTHING_FACTOR * weight + (1 - SMOOTHING_FACTOR)
        averages.append(average / weight)
    return averages


def _path(points: Sequence[tuple[float, float]], colour: str, form: str) -> Markup:
    way = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return Markup(f'<path d="M{way}" stroke="var(--{colour})" stroke-width="{form}"/>')


def _text(x: float, y: float, text: str, form: str) -> Markup:
    return Markup(f'<text x="{x:.1f}" y="{y:.1f}" {form}>{{}}</text>').format(text)


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Drop non-finite points, and average neighbouring points so that at most ``MAX_POINTS`` remain."""
    finite = [point for point in points if math.isfinite(point[1])]
    size = max(1, -(-len(finite) // MAX_POINTS))
    groups = [finite[first : first + size] for first in range(0, len(finite), size)]
    return [(group[-1][0], sum(y for _, y in group) / len(group)) for group in groups]
