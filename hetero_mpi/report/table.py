"""Tables defined by columns, with one object per row; rendered as text (``Table.lines``) or as HTML (``page.html``).

Example: ``Table([Column("rank", "rank"), Column("memory", "memory_bytes", units.size)], profile.devices).lines()``.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from operator import itemgetter
from typing import Any

from hetero_mpi.util.terminal import line_width, printable, wrap_text

MAX_ROWS = 16
"""Maximum number of ranks or hosts to show in a table."""
_NO_BREAK = "\N{NO-BREAK SPACE}"
_UNIT = re.compile(r"(?<=\d) (?=(%|[a-zA-Z]{1,2}(/s)?)(?:\s|,|;|\)|$))")
"""Matches the space between a number and its unit, where lines must not break."""


@dataclass(frozen=True)
class Column:
    """A column: its heading, and how to get and format its values."""

    title: str
    value: str | Callable[[Any], Any]
    """Function of the row, or name of one of its attributes. None stands for an unknown value."""
    format: Callable[[Any], str] = str
    align_left: bool = False
    """Whether to align left in any case. Other columns align right if all their cells begin with a digit."""

    def text(self, row: Any) -> str:
        value = getattr(row, self.value) if isinstance(self.value, str) else self.value(row)
        return "" if value is None else value if isinstance(value, str) else self.format(value)


@dataclass(frozen=True)
class Table:
    """Columns, and one object per row. Columns whose cells are all empty are hidden."""

    columns: Sequence[Column]
    rows: Sequence[Any]

    @classmethod
    def of_texts(cls, headings: Iterable[str], rows: Sequence[Sequence[Any]]) -> Table:
        """Build a table from rows of cells, one cell per heading."""
        return cls([Column(heading, itemgetter(index)) for index, heading in enumerate(headings)], rows)

    def without(self, *titles: str) -> Table:
        """Return the table without the columns with these titles."""
        return replace(self, columns=[column for column in self.columns if column.title not in titles])

    def texts(self) -> list[tuple[Column, list[str]]]:
        """Return the visible columns, each with the text of its cells."""
        columns = [(column, [column.text(row) for row in self.rows]) for column in self.columns]
        return [(column, texts) for column, texts in columns if any(texts)]

    def __bool__(self) -> bool:
        """Whether the table has visible columns."""
        return bool(self.texts())

    def html(self) -> tuple[list[tuple[str, bool]], list[tuple[str, ...]]]:
        """Return the headings, as (title, whether the column aligns right), and the rows of cell text, for use in HTML."""
        columns = self.texts()
        headings = [(column.title, _at_right(column, texts)) for column, texts in columns]
        return headings, list(zip(*(texts for _, texts in columns), strict=True))

    def lines(self, most: int | None = None) -> list[str]:
        """Render the table to fit the terminal, wrapping wide columns; if words are too wide, list the cells of each row instead.

        If the table has more than ``most`` rows, only the first rows are shown, at most ``MAX_ROWS``.
        """
        if most is not None and len(self.rows) > most:
            rows = self.rows[: min(most, MAX_ROWS)]
            return [*replace(self, rows=rows).lines(), f"  ... and {len(self.rows) - len(rows):,} more"]
        columns = self.texts()
        right = [_at_right(column, texts) for column, texts in columns]
        cells = [[unbroken(printable(text)) for text in (column.title, *texts)] for column, texts in columns]
        mins = [max(len(word) for cell in column for word in cell.split(" ")) for column in cells]
        widths, most = [max(map(len, column)) for column in cells], line_width()
        if sum(mins) + 2 * len(mins) > most:
            return _stacked(cells)
        while sum(widths) + 2 * len(widths) > most:
            wide = max((index for index in range(len(widths)) if widths[index] > mins[index]), key=widths.__getitem__)
            widths[wide] -= 1
        return [line.replace(_NO_BREAK, " ") for row in zip(*cells, strict=True) for line in _lines(row, widths, right)]


def unbroken(text: str) -> str:
    """Replace the spaces between numbers and their units in ``text`` with no-break spaces."""
    return _UNIT.sub(_NO_BREAK, text)


def _at_right(column: Column, texts: Sequence[str]) -> bool:
    return not column.align_left and all(not text or text[0].isdigit() for text in texts)


def _lines(row: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> list[str]:
    parts = [
        textwrap.wrap(cell, width, break_long_words=False, break_on_hyphens=False)
        for cell, width in zip(row, widths, strict=True)
    ]
    lines = []
    for pieces in zip_longest(*parts, fillvalue=""):
        placed = zip(pieces, widths, right, strict=True)
        lines.append(
            "".join(f"  {text:{'>' if at_right else '<'}{width}}" for text, width, at_right in placed).rstrip()
        )
    return lines


def _stacked(cells: Sequence[Sequence[str]]) -> list[str]:
    """Render each row as one ``heading  cell`` line per non-empty cell, followed by an empty line."""
    headings, *rows = zip(*cells, strict=True)
    wide = max(map(len, headings))
    lines: list[str] = []
    for row in rows:
        for heading, cell in zip(headings, row, strict=True):
            lines += wrap_text(f"  {heading:<{wide}}  ", cell.replace(_NO_BREAK, " ")) if cell else []
        lines.append("")
    return lines


def least_most(values: Sequence[float], show: Callable[[float], str]) -> str:
    """Format the range of values, as in ``1.20 ms to 1.31 ms``, or a single value if both ends are formatted alike."""
    if not values:
        return ""
    least, most = show(min(values)), show(max(values))
    return least if least == most else f"{least} to {most}"
