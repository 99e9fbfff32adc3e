"""Tables and paragraphs as lines of plain text, for terminals and logs. The first table loads rich, which lays them out."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from hetero_mpi.report import units
from hetero_mpi.text import printable

WIDTH = 120
"""Most characters of a line: two terminals fit beside each other, and lines of a job's log."""
SHORTEST_NAME = 10
PROSE = 30
"""Least width of a column of prose."""


def wrapped(start: str, text: str, width: int = WIDTH) -> list[str]:
    """``start + text`` within ``width``; later lines are indented below the text, or a little where ``start`` is long."""
    indent = " " * (len(start) if len(start) <= WIDTH - PROSE else 4)
    lines = textwrap.wrap(
        text, width, initial_indent=start, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )
    return [line.rstrip() for line in lines] or [start.rstrip()]


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned columns within ``WIDTH``, numbers to the right. Columns that are empty in all rows are left out.

    Where the width is too small, names of hosts and devices are shortened, and a last column of prose is wrapped.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    kept = [column for column in range(len(headers)) if any(row[column] for row in rows)]
    columns = [[printable(row[column]) for row in (headers, *rows)] for column in kept]
    right = [all(not cell or cell[0].isdigit() for cell in cells) for _, *cells in columns]
    widths = [max(map(len, column)) for column in columns]
    if not right[-1]:
        widths[-1] = min(widths[-1], PROSE)
    names = [place for place, column in enumerate(columns[:-1]) if column[0].endswith(("host", "device"))]
    while sum(widths) + 2 * len(widths) > WIDTH and any(widths[place] > SHORTEST_NAME for place in names):
        widths[max(names, key=lambda place: widths[place])] -= 1
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for place, (heading, *_) in enumerate(columns):
        shown.add_column(heading, justify="right" if right[place] else "left", no_wrap=place < len(columns) - 1)
    headings, *cells = zip(*columns, strict=True)
    for row in cells:
        shown.add_row(*(Text(_shortened(*cell)) for cell in zip(row, widths, headings, strict=True)))
    console = Console(width=WIDTH - 2, color_system=None, force_terminal=False, force_jupyter=False)
    with console.capture() as capture:
        console.print(shown)
    return [f"  {line}".rstrip() for line in capture.get().splitlines()]


def _shortened(cell: str, width: int, heading: str) -> str:
    if heading.endswith("device"):
        return units.device_name(cell, width)
    return units.shortened(cell, width) if heading.endswith("host") else cell
