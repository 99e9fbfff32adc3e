"""Line charts: values over steps, with axes that a person can read."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hetero_mpi.report.drawing import Box, Drawing, Line, Text, width_of

_WIDTH, _HEIGHT = 460.0, 250.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 62.0, 14.0, 34.0, 36.0
_FONT = 12.0
MOST_POINTS = 400
"""A series of more points is drawn as means of neighbours."""


@dataclass(frozen=True)
class Series:
    name: str
    points: tuple[tuple[float, float], ...]
    colour: str
    dots: bool = False
    """Points are few and marked."""
    dashed: bool = False


def line_chart(
    label: str, series: Sequence[Series], y_text: Callable[[float], str], from_zero: bool = False
) -> Drawing | None:
    """A chart of what is finite in ``series``; None where nothing is.

    Args:
        label: of the y axis, with its unit.
        y_text: how a value of the y axis is written.
        from_zero: the y axis begins at 0.
    """
    drawn = [Series(s.name, _thinned(_finite(s.points)), s.colour, s.dots, s.dashed) for s in series]
    drawn = [s for s in drawn if s.points]
    if not drawn:
        return None
    xs, ys = ([point[axis] for s in drawn for point in s.points] for axis in (0, 1))
    x_ticks = ticks(min(xs), max(xs), 5)
    y_ticks = ticks(0.0 if from_zero else min(ys), max(ys), 5)
    low_x, high_x = min(xs), max(max(xs), min(xs) + 1e-9)
    low_y, high_y = min(y_ticks[0], min(ys)), max(y_ticks[-1], max(ys))

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - low_x) / (high_x - low_x)
        up = (y - low_y) / max(high_y - low_y, 1e-300)
        return _LEFT + across * (_WIDTH - _LEFT - _RIGHT), _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM)

    drawing = Drawing(_WIDTH, _HEIGHT, label)
    _axes(drawing, label, [t for t in x_ticks if low_x <= t <= high_x], y_ticks, y_text, place)
    for s in drawn:
        points = tuple(place(*point) for point in s.points)
        if len(points) > 1:
            drawing.shapes.append(Line(points, s.colour, 1.6, dashed=s.dashed))
        if s.dots or len(points) == 1:
            drawing.shapes += [Box(x - 3, y - 3, 6, 6, s.colour, radius=3) for x, y in points]
    if len(drawn) > 1:
        _legend(drawing, drawn)
    return drawing


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers (1, 2, 2.5 or 5 times a power of ten apart) that enclose ``low`` to ``high``; at least two."""
    if not high > low:
        spread = abs(low) * 0.1 or 1.0
        low, high = low - spread, high + spread
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999), 10 * power)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(place * step, 12) for place in range(first, max(last, first + 1) + 1)]


def _axes(
    drawing: Drawing, label: str, x_ticks: Sequence[float], y_ticks: Sequence[float],
    y_text: Callable[[float], str], place: Callable[[float, float], tuple[float, float]],
) -> None:  # fmt: skip
    drawing.shapes.append(Text(0, 14, label, _FONT + 1, "ink", bold=True))
    bottom = _HEIGHT - _BOTTOM
    for tick in y_ticks:
        y = place(x_ticks[0] if x_ticks else 0.0, tick)[1]
        drawing.shapes.append(Line(((_LEFT, y), (_WIDTH - _RIGHT, y)), "faint", 1))
        drawing.shapes.append(Text(_LEFT - 8, y + 4, y_text(tick), _FONT, "soft", "end"))
    for tick in x_ticks:
        x = place(tick, y_ticks[0])[0]
        drawing.shapes.append(Text(x, bottom + 17, f"{tick:,.10g}", _FONT, "soft", "middle"))
    drawing.shapes.append(Text(_WIDTH - _RIGHT, _HEIGHT - 4, "step", _FONT, "soft", "end"))


def _legend(drawing: Drawing, series: Sequence[Series]) -> None:
    x = _WIDTH - _RIGHT
    for s in reversed(series):
        drawing.shapes.append(Text(x, 14, s.name, _FONT, "soft", "end"))
        x -= width_of(s.name, _FONT) + 12
        drawing.shapes.append(Line(((x - 16, 10), (x, 10)), s.colour, 2, dashed=s.dashed))
        x -= 28


def _finite(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    return tuple(point for point in points if math.isfinite(point[1]))


def _thinned(points: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
    size = -(-len(points) // MOST_POINTS)
    if size <= 1:
        return points
    groups = [points[first : first + size] for first in range(0, len(points), size)]
    return tuple((group[-1][0], sum(y for _, y in group) / len(group)) for group in groups)
