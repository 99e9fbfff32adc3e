"""The style of all figures: colours, sizes in pixels, and output to files and HTML pages.

Each colour role (``ink``, ``faint``, ``host-2``) has a colour for light and one for dark backgrounds. Files use the light colours.
On a page, roles are CSS variables, so that figures follow the reader's colour scheme.
"""

import io
import re
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from matplotlib.path import Path as MplPath
from matplotlib.textpath import text_to_path

from hetero_mpi.util import toml
from hetero_mpi.util.disk import write_errors

_STYLE = toml.loads(Path(__file__).with_name("style.toml").read_text(encoding="utf-8"))
COLOURS: dict[str, tuple[str, str]] = _STYLE["colours"]
"""Maps roles to colours on (light, dark) backgrounds. Light colours are unique, since pages look up the role by them."""
NUM_HOST_COLOURS = 8
INK, PAPER = COLOURS["ink"][0], COLOURS["paper"][0]
STYLE: Any = {key: COLOURS[value][0] if value in COLOURS else value for key, value in _STYLE["matplotlib"].items()}
drawn = matplotlib.rc_context(STYLE)
"""Decorator for drawing functions that applies this style, regardless of other matplotlib settings in the program."""
PNG_SCALE_FACTOR = 2
"""Number of PNG pixels per pixel of a figure."""
_MARGIN_SIZE = 10
"""Margin in pixels around a figure in a file."""
FONTS = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"


def new_figure(width: float, height: float) -> Figure:
    """Create an empty figure of this size in pixels, without pyplot, which uses a display and global state."""
    return Figure(figsize=(width / 72, height / 72))


def panel(figure: Figure, left: float, top: float, right: float, bottom: float) -> Axes:
    """Add axes to a figure at these distances, in pixels, from its edges."""
    width, height = figure.bbox.width, figure.bbox.height
    return figure.add_axes(
        (left / width, bottom / height, (width - left - right) / width, (height - top - bottom) / height)
    )


def host_colours(hosts: list[str]) -> Mapping[str, str]:
    """Assign a colour role to each host, in order of first occurrence."""
    return {host: f"host-{index % NUM_HOST_COLOURS}" for index, host in enumerate(dict.fromkeys(hosts))}


@cache
def _font(size: float, bold: bool) -> FontProperties:
    return FontProperties(family=STYLE["font.family"], size=size, weight="bold" if bold else "normal")


def width_of(text: str, size: float, bold: bool = False) -> float:
    """Return the width of ``text`` in pixels in the font used for files. Browser fonts have nearly the same width."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # missing glyphs
        return float(text_to_path.get_text_width_height_descent(text, _font(size, bold), False)[0])


def fitted(text: str, size: float, width: float, bold: bool = False) -> str:
    """Truncate ``text`` to at most ``width`` pixels, including an ellipsis."""
    if width_of(text, size, bold) <= width:
        return text
    while text and width_of(text + "…", size, bold) > width:
        text = text[:-1]
    return text.rstrip() + "…"


class Sheet:
    """A figure of boxes, text and arrows. Positions are in pixels from the upper left; later elements cover earlier ones."""

    def __init__(self) -> None:
        self.figure = new_figure(1, 1)
        self._axes = self.figure.add_axes((0, 0, 1, 1))
        self._axes.axis("off")
        self._order = 0

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, edge: str | None = None,
        radius: float = 6, dashed: bool = False, title: str | None = None,
    ) -> None:  # fmt: skip
        """Draw a box. ``title`` is its tooltip in a browser."""
        style = f"round,pad=0,rounding_size={min(radius, width / 2, height / 2)}"
        colours: dict[str, Any] = {"fc": COLOURS[fill][0], "ec": COLOURS[edge][0] if edge else "none"}
        patch = FancyBboxPatch((x, y), width, height, style, lw=1, ls="--" if dashed else "-", url=title, **colours)
        self._axes.add_patch(self._above(patch))

    def text(
        self, x: float, y: float, text: str, size: float = 12, colour: str = "ink", anchor: str = "left", bold: bool = False,
        width: float | None = None,
    ) -> None:  # fmt: skip
        """Draw ``text`` with the baseline at ``y``, truncated to ``width``. ``anchor`` is ``left``, ``center`` or ``right``."""
        text = text if width is None else fitted(text, size, width, bold)
        look: dict[str, Any] = {"size": size, "color": COLOURS[colour][0], "weight": "bold" if bold else "normal"}
        self._above(self._axes.text(x, y, text, ha=anchor, va="baseline", **look))

    def arrow(self, *corners: tuple[float, float], colour: str = "accent") -> None:
        """Draw an arrow along ``corners``, with its head at the last one."""
        look: dict[str, Any] = {"arrowstyle": "-|>", "mutation_scale": 9, "shrinkA": 0, "shrinkB": 0, "linewidth": 1.4}
        self._axes.add_patch(self._above(FancyArrowPatch(path=MplPath(corners), color=COLOURS[colour][0], **look)))

    def finished(self, width: float, height: float) -> Figure:
        """Set the size of the figure in pixels, and return it."""
        self.figure.set_size_inches(width / 72, height / 72)
        self._axes.set(xlim=(0, width), ylim=(height, 0))
        return self.figure

    def _above(self, artist: Any) -> Any:
        self._order += 1
        artist.set_zorder(self._order)
        return artist


def add_bars(
    axes: Axes, bars: Sequence[tuple[float, float, float, float]], titles: Sequence[str], role: str, edge: float = 0
) -> None:
    """Draw bars, given as (left, right, top, bottom), in one colour, with edges of ``edge`` pixels and tooltips ``titles``."""
    corners = [((left, top), (right, top), (right, bottom), (left, bottom)) for left, right, top, bottom in bars]
    # At least two titles, as matplotlib treats a collection with one as markers, without titles.
    look: dict[str, Any] = {"facecolors": COLOURS[role][0], "edgecolors": PAPER if edge else "none", "linewidths": edge}
    axes.add_collection(PolyCollection(corners, urls=[*titles, ""], **look), autolim=False)


def key(colour: str, label: str, dashed: bool = False, thick: bool = True) -> Line2D:
    """Create a legend entry."""
    look: dict[str, Any] = {"linewidth": 9} if thick else {"linewidth": 2, "linestyle": "--" if dashed else "-"}
    return Line2D([], [], color=COLOURS[colour][0], label=label, **look)


def svg(figure: Figure, label: str, page: bool = False) -> str:
    """Render the figure as an SVG element.

    Args:
        label: description for screen readers.
        page: use a page's CSS variables (``palette_css``) as colours, instead of the colours for a light background.
    """
    out = io.StringIO()
    _render(figure, out, "svg", label, 0 if page else _MARGIN_SIZE)
    text = re.sub(r"<(metadata|style|clipPath).*?</\1>|<\?xml.*?\?>|<!DOCTYPE.*?>", "", out.getvalue(), flags=re.S)
    text = re.sub(
        r' clip-path="[^"]*"| id="(?!m[0-9a-f]{10}")[^"]*"|font-family: [^;"]*;? ?|<defs>\s*</defs>', "", text
    )
    # matplotlib supports links but not tooltips, so tooltips are encoded as link targets.
    text = re.sub(r'<a xlink:href="([^"]*)"[^>]*>', r"<g><title>\1</title>", text).replace("</a>", "</g>")
    text = re.sub(r">\s+<", "><", text.strip())
    about = f'role="img" aria-label="{escape(label)}" font-family="{FONTS}" stroke-linejoin="round"'
    size = r'width="([\d.]+)pt" height="([\d.]+)pt"'
    text = re.sub(size, lambda match: f'width="{match[1]}" height="{match[2]}" {about}', text, count=1)
    text = text.replace("; stroke-linejoin: miter", "")
    if not page:
        return text
    for role, (light, _) in COLOURS.items():
        text = text.replace(light, f"var(--{role})")
    return text


def save(figure: Figure, path: Path, label: str) -> Path:
    """Write a figure in the format given by the file suffix. Raises UserError if the file cannot be written."""
    with write_errors(path, "choose another path with -o or --run-dir"):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".svg":
            path.write_text(svg(figure, label), encoding="utf-8")
        else:
            _render(figure, path, None, label, _MARGIN_SIZE)
    return path


def palette_css() -> str:
    """Return CSS that defines the colour roles as variables, for light and dark backgrounds."""

    def variables(which: int) -> str:
        return "".join(f"--{role}:{pair[which]};" for role, pair in COLOURS.items())

    return f":root{{{variables(0)}}}@media (prefers-color-scheme:dark){{:root{{{variables(1)}}}}}"


@drawn
def _render(figure: Figure, out: Any, kind: str | None, label: str, margin: float) -> None:
    around = figure.bbox_inches.padded(margin / 72)
    with warnings.catch_warnings(), matplotlib.rc_context({"svg.hashsalt": label}):
        warnings.filterwarnings("ignore", "Glyph")  # glyphs missing in this font; browsers use other fonts
        figure.savefig(out, format=kind, dpi=72 * (1 if kind == "svg" else PNG_SCALE_FACTOR), bbox_inches=around)
