"""Drawings made of boxes, texts and lines in pixels, and two ways to put them on paper: our own SVG, and a PNG by matplotlib.

Colours are roles (``ink``, ``faint``, ``host-2``): a page in light or dark gives them their values by CSS variables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from hetero_mpi.errors import UserError

COLOURS: dict[str, tuple[str, str]] = {
    "paper": ("#fdfdfc", "#16181c"),
    "card": ("#ffffff", "#1f2228"),
    "ink": ("#25282d", "#e8e8e4"),
    "soft": ("#6b7280", "#9aa1ab"),
    "faint": ("#dcdfe3", "#353a42"),
    "accent": ("#3f6fa5", "#7ba7d9"),
    "warm": ("#c9772b", "#e5a35c"),
    "good": ("#4f8a55", "#7fb985"),
    "alert": ("#b5483f", "#e08379"),
    "violet": ("#7b5fae", "#ac93d8"),
    "forward": ("#4c78a8", "#6c9bcf"),
    "backward": ("#f2b36b", "#d99a52"),
    "input-gradients": ("#f7cf9c", "#b98a55"),
    "weight-gradients": ("#d98a3d", "#e8a566"),
    "optimizer": ("#6a9f58", "#83b872"),
    "send": ("#9aa5b1", "#7d8894"),
    "receive": ("#c3cad1", "#59626c"),
    "sum": ("#8c6bb1", "#a98bcf"),
    "copy": ("#b8524a", "#d4766e"),
    "host-0": ("#eaf0f7", "#222c38"),
    "host-1": ("#f7efe4", "#362c20"),
    "host-2": ("#e9f3ea", "#213226"),
    "host-3": ("#f1ecf7", "#2d2638"),
    "host-4": ("#f8eaea", "#382525"),
    "host-5": ("#e6f3f4", "#1e3234"),
    "host-6": ("#f4f4e2", "#32321f"),
    "host-7": ("#f0f0f0", "#2b2b2e"),
}
"""Role -> (colour on light paper, on dark paper)."""
HOST_COLOURS = 8
_FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"
_GLYPH = 0.58
"""Mean width of a character in units of the font size: wide enough for the fonts that may be there."""


@dataclass(frozen=True)
class Box:
    x: float
    y: float
    width: float
    height: float
    fill: str | None = None
    """A role; None: not filled."""
    edge: str | None = None
    radius: float = 6.0
    dashed: bool = False
    title: str = ""
    """Shown by a browser where the pointer rests."""


@dataclass(frozen=True)
class Text:
    x: float
    y: float
    """Of the base line."""
    text: str
    size: float = 12.0
    colour: str = "ink"
    anchor: str = "start"
    """``start``, ``middle`` or ``end``."""
    bold: bool = False


@dataclass(frozen=True)
class Line:
    points: tuple[tuple[float, float], ...]
    colour: str = "ink"
    width: float = 1.0
    arrow: bool = False
    dashed: bool = False


Shape = Box | Text | Line
_Paint = Callable[[str | None], str]


@dataclass
class Drawing:
    """Shapes in pixels from the upper left corner, in the order in which they are painted."""

    width: float
    height: float
    label: str
    """What is to be seen, for those who do not see it."""
    shapes: list[Shape] = field(default_factory=list)


def fitting(size: float, width: float) -> int:
    """How many characters fit into ``width`` at a font of ``size``."""
    return max(1, int(width / (_GLYPH * size)))


def fitted(text: str, size: float, width: float) -> str:
    """``text``, shortened to fit into ``width`` at a font of ``size``."""
    most = fitting(size, width)
    return text if len(text) <= most else text[: most - 1].rstrip() + "…"


def width_of(text: str, size: float) -> float:
    """About the width of ``text`` at a font of ``size``."""
    return _GLYPH * size * len(text)


def svg(drawing: Drawing, variables: bool = False) -> str:
    """The drawing as an SVG element. ``variables``: colours by the CSS variables of a page, else those of light paper."""

    def colour(role: str | None) -> str:
        if role is None:
            return "none"
        return f"var(--{role})" if variables else COLOURS[role][0]

    width, height = _number(drawing.width), _number(drawing.height)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(drawing.label)}" font-family="{_FONT}">'
    ]
    if not variables:
        parts.append(f'<rect width="{width}" height="{height}" fill="{COLOURS["paper"][0]}"/>')
    for shape in drawing.shapes:
        if isinstance(shape, Box):
            parts.append(_box(shape, colour))
        elif isinstance(shape, Text):
            parts.append(_text(shape, colour))
        else:
            parts.append(_line(shape, colour))
    return "".join([*parts, "</svg>"])


def save_svg(drawing: Drawing, path: Path) -> Path:
    """Write ``svg`` to a file by itself. :raises UserError: it cannot be written."""
    try:
        path.write_text(svg(drawing), encoding="utf-8")
    except OSError as error:
        raise _unwritable(path, error) from error
    return path


def save_png(drawing: Drawing, path: Path, pixels: float = 2.0) -> Path:
    """Paint by matplotlib, ``pixels`` per pixel of the drawing. :raises UserError: it cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(drawing.width / 100, drawing.height / 100), facecolor=COLOURS["paper"][0])
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, drawing.width), ylim=(drawing.height, 0))
    axes.axis("off")
    for order, shape in enumerate(drawing.shapes):
        if isinstance(shape, Text):
            _paint_text(axes, shape, order)
        else:
            axes.add_patch(_box_patch(shape, order) if isinstance(shape, Box) else _line_patch(shape, order))
    try:
        figure.savefig(path, dpi=100 * pixels)
    except OSError as error:
        raise _unwritable(path, error) from error
    return path


def _on_paper(role: str | None) -> str:
    return COLOURS[role][0] if role is not None else "none"


def _box_patch(box: Box, order: int) -> Any:
    from matplotlib.patches import FancyBboxPatch

    return FancyBboxPatch(
        (box.x, box.y),
        box.width,
        box.height,
        boxstyle=f"round,pad=0,rounding_size={min(box.radius, box.width / 2, box.height / 2)}",
        zorder=order,
        linewidth=0.8,
        facecolor=_on_paper(box.fill),
        edgecolor=_on_paper(box.edge),
        linestyle="--" if box.dashed else "-",
    )


def _line_patch(line: Line, order: int) -> Any:
    from matplotlib.patches import FancyArrowPatch, Polygon

    colour, width = _on_paper(line.colour), 0.72 * line.width
    if line.arrow:
        look: dict[str, Any] = {"arrowstyle": "-|>", "mutation_scale": 8, "shrinkA": 0, "shrinkB": 0}
        return FancyArrowPatch(*line.points[-2:], zorder=order, color=colour, linewidth=width, **look)
    style = "--" if line.dashed else "-"
    return Polygon(
        line.points, closed=False, fill=False, zorder=order, edgecolor=colour, linewidth=width, linestyle=style
    )


def _paint_text(axes: Any, text: Text, order: int) -> None:
    axes.text(
        text.x,
        text.y,
        text.text,
        fontsize=0.72 * 0.92 * text.size,  # points per pixel; matplotlib's own font is a little wider than a browser's
        color=_on_paper(text.colour),
        zorder=order,
        ha={"start": "left", "middle": "center", "end": "right"}[text.anchor],
        va="baseline",
        fontweight="bold" if text.bold else "normal",
    )


def palette_css() -> str:
    """The roles as CSS variables, for light and for dark paper."""

    def variables(which: int) -> str:
        return "".join(f"--{role}:{pair[which]};" for role, pair in COLOURS.items())

    return f":root{{{variables(0)}}}@media (prefers-color-scheme:dark){{:root{{{variables(1)}}}}}"


def host_colours(hosts: list[str]) -> Mapping[str, str]:
    """Host -> role, by the order in which they come."""
    return {host: f"host-{place % HOST_COLOURS}" for place, host in enumerate(dict.fromkeys(hosts))}


def _box(box: Box, colour: _Paint) -> str:
    dash = ' stroke-dasharray="4 3"' if box.dashed else ""
    edge = f' stroke="{colour(box.edge)}"' if box.edge is not None else ""
    title = f"<title>{escape(box.title)}</title>" if box.title else ""
    x, y, width, height = map(_number, (box.x, box.y, max(box.width, 0.0), max(box.height, 0.0)))
    radius = f' rx="{_number(box.radius)}"' if box.radius else ""
    start = f'<rect x="{x}" y="{y}" width="{width}" height="{height}"{radius} fill="{colour(box.fill)}"{edge}{dash}'
    return f"{start}>{title}</rect>" if title else f"{start}/>"


def _text(text: Text, colour: _Paint) -> str:
    anchor = f' text-anchor="{text.anchor}"' if text.anchor != "start" else ""
    weight = ' font-weight="600"' if text.bold else ""
    return (
        f'<text x="{_number(text.x)}" y="{_number(text.y)}" font-size="{_number(text.size)}"{anchor}{weight} '
        f'fill="{colour(text.colour)}">{escape(text.text)}</text>'
    )


def _line(line: Line, colour: _Paint) -> str:
    points = " ".join(f"{_number(x)},{_number(y)}" for x, y in line.points)
    dash = ' stroke-dasharray="4 3"' if line.dashed else ""
    drawn = (
        f'<polyline points="{points}" fill="none" stroke="{colour(line.colour)}" stroke-width="{_number(line.width)}" '
        f'stroke-linejoin="round"{dash}/>'
    )
    if not line.arrow:
        return drawn
    (x0, y0), (x1, y1) = line.points[-2:]
    length = max(((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5, 1e-9)
    dx, dy = 6 * (x1 - x0) / length, 6 * (y1 - y0) / length
    corners = ((x1, y1), (x1 - dx - dy / 2, y1 - dy + dx / 2), (x1 - dx + dy / 2, y1 - dy - dx / 2))
    return (
        drawn
        + f'<polygon points="{" ".join(f"{_number(x)},{_number(y)}" for x, y in corners)}" fill="{colour(line.colour)}"/>'
    )


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _unwritable(path: Path, error: OSError) -> UserError:
    return UserError(
        f"{path}: the picture cannot be written ({error.strerror}); choose a directory that can be written to"
    )
