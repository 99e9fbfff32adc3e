"""Tables and paragraphs as lines of plain text, for terminals and logs. The first table loads rich, which lays them out."""

from __future__ import annotations

from collections.abc import Sequence

from hetero_mpi.report import units
from hetero_mpi.text import columns, folded, printable

WIDTH = 120
"""Most characters of a line that is fitted to a terminal: two terminals fit beside each other."""
SHORTEST_NAME = 10
PROSE = 30
"""Least width of a column of prose."""
_WHOLE = 1_000_000


def line_width() -> int:
    """Characters that a line may have, which is no limit where nobody watches."""
    width = columns()
    return _WHOLE if width is None else min(width, WIDTH)


def wrapped(start: str, text: str) -> list[str]:
    """``start + text`` within the width; later lines are indented below the text, or a little where ``start`` is long."""
    width = line_width()
    indent = " " * (len(start) if len(start) <= width - PROSE else 4)
    return [line.rstrip() for line in folded(" ".join(text.split()), width, start, indent)]


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned columns within the width, numbers to the right. Columns that are empty in all rows are left out.

    Where the width is too small, names of hosts and devices are shortened, and a last column of prose is wrapped; then texts of
    other columns are wrapped, too. Where even that is too wide, each row is a list of its cells.
    """
    kept = [column for column in range(len(headers)) if any(row[column] for row in rows)]
    cells = [[printable(row[column]) for row in (headers, *rows)] for column in kept]
    right = [all(not cell or cell[0].isdigit() for cell in column[1:]) for column in cells]
    width = line_width()
    widths = _narrowed(cells, right, width)
    if widths is None:
        return _stacked(cells)
    return _drawn(cells, right, widths)


def _narrowed(cells: Sequence[Sequence[str]], right: Sequence[bool], width: int) -> list[int] | None:
    """The width of each column; None: they do not fit."""
    widths = [max(map(len, column)) for column in cells]

    def shrunk(places: Sequence[int], least: Sequence[int]) -> None:
        while sum(widths) + 2 * len(widths) > width and any(widths[place] > least[place] for place in places):
            widths[max((place for place in places if widths[place] > least[place]), key=lambda one: widths[one])] -= 1

    words = [max((len(word) for cell in column for word in cell.split()), default=0) for column in cells]
    names = [place for place, column in enumerate(cells[:-1]) if column[0].endswith(("host", "device"))]
    last = len(cells) - 1
    if not right[last]:
        shrunk([last], [*words[:-1], min(widths[last], PROSE)])
    shrunk(names, [SHORTEST_NAME] * len(cells))
    texts = [place for place in range(len(cells)) if not right[place] and place not in names]
    shrunk(texts, words)
    return widths if sum(widths) + 2 * len(widths) <= width else None


def _drawn(cells: Sequence[Sequence[str]], right: Sequence[bool], widths: Sequence[int]) -> list[str]:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for place, (heading, *_) in enumerate(cells):
        shown.add_column(Text(heading), justify="right" if right[place] else "left", width=widths[place])
    headings, *rows = zip(*cells, strict=True)
    for row in rows:
        shown.add_row(*(Text(_shortened(*cell)) for cell in zip(row, widths, headings, strict=True)))
    console = Console(width=sum(widths) + 2 * len(widths), color_system=None, force_terminal=False, force_jupyter=False)
    with console.capture() as capture:
        console.print(shown)
    return [f"  {line}".rstrip() for line in capture.get().splitlines()]


def _stacked(cells: Sequence[Sequence[str]]) -> list[str]:
    """Each row as lines of a heading and a cell, with an empty line behind it; empty cells are left out."""
    headings, *rows = zip(*cells, strict=True)
    wide = max(map(len, headings))
    lines: list[str] = []
    for row in rows:
        for heading, cell in zip(headings, row, strict=True):
            lines += wrapped(f"  {heading:<{wide}}  ", cell) if cell else []
        lines.append("")
    return lines


def _shortened(cell: str, width: int, heading: str) -> str:
    if heading.endswith("device"):
        return units.device_name(cell, width)
    return units.shortened(cell, width) if heading.endswith("host") else cell
