"""A table of a plan, a profile or a run: columns with their units, rows, and like rows as one. It is shown as lines of text
(``Table.lines``), or on the page of a run (``page/report.html``).
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, TypeVar

from hetero_mpi.terminal import line_width, printable, wrapped

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
MOST_ROWS = 16
"""Number of ranks, hosts or links up to which each has a row of its own."""
_TOGETHER = "\N{NO-BREAK SPACE}"
_UNIT = re.compile(r"(?<=\d) (?=(%|[a-zA-Z]{1,2}(/s)?)(?:\s|,|;|$))")
"""The space between a number and its unit, at which no line is broken."""


@dataclass(frozen=True)
class Column:
    """A heading, and how the values below it become texts."""

    name: str
    show: Callable[[Any], str] = str
    several: Callable[[Sequence[Any]], str] | None = None
    """The text of several values that share a row; None: from the least number to the greatest, or the one text of all."""
    left: bool = False
    """It stands at the left; others stand at the right if all their texts begin with a digit."""

    def text(self, value: Any) -> str:
        return "" if value is None else value if isinstance(value, str) else self.show(value)

    def shared(self, values: Sequence[Any]) -> str:
        """The text of the values of several rows."""
        if self.several is not None and len(values) > 1:
            return self.several(values)
        known = [value for value in values if value is not None]
        if known and all(isinstance(value, (int, float)) for value in known):
            return least_most(known, self.show)
        texts = {self.text(value) for value in values}
        return texts.pop() if len(texts) == 1 else ""


@dataclass(frozen=True)
class Table:
    """Columns, and rows with a value for each of them; None: unknown. A column without any text is not shown."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Any]]

    @classmethod
    def of_texts(cls, headings: Iterable[str], rows: Sequence[Sequence[Any]]) -> Table:
        """A table whose columns show values as they are."""
        return cls([Column(heading) for heading in headings], rows)

    def merged(self, key: Callable[[Sequence[Any]], Hashable]) -> Table:
        """The table in which rows with an equal ``key(row)`` share one."""
        rows = [
            [column.shared(values) for column, values in zip(self.columns, zip(*alike, strict=True), strict=True)]
            for alike in grouped(self.rows, key).values()
        ]
        return replace(self, rows=rows)

    def without(self, *names: str) -> Table:
        """The table without the columns of these names."""
        kept = [place for place, column in enumerate(self.columns) if column.name not in names]
        return Table([self.columns[place] for place in kept], [[row[place] for place in kept] for row in self.rows])

    def look(self, row: Sequence[Any]) -> tuple[str, ...]:
        """The texts of a row."""
        return tuple(column.text(value) for column, value in zip(self.columns, row, strict=True))

    def texts(self) -> list[tuple[Column, list[str]]]:
        """The columns that are shown, each with its texts."""
        found = [(column, [column.text(row[place]) for row in self.rows]) for place, column in enumerate(self.columns)]
        return [(column, texts) for column, texts in found if any(texts)]

    def __bool__(self) -> bool:
        """Whether there is anything to show."""
        return bool(self.texts())

    def html(self) -> tuple[list[tuple[str, bool]], list[tuple[str, ...]]]:
        """Headings, each with whether its column stands at the right; and rows of texts."""
        shown = self.texts()
        headings = [(column.name, _at_right(column, texts)) for column, texts in shown]
        return headings, list(zip(*(texts for _, texts in shown), strict=True))

    def lines(self) -> list[str]:
        """Aligned columns within the width of the terminal. Where they are too wide, the widest is wrapped; where even single words
        are too wide, each row is a list of its cells.
        """
        shown = self.texts()
        right = [_at_right(column, texts) for column, texts in shown]
        cells = [[_UNIT.sub(_TOGETHER, printable(text)) for text in (column.name, *texts)] for column, texts in shown]
        least = [max(len(word) for cell in column for word in cell.split(" ")) for column in cells]
        widths, most = [max(map(len, column)) for column in cells], line_width()
        if sum(least) + 2 * len(least) > most:
            return _stacked(cells)
        while sum(widths) + 2 * len(widths) > most:
            wide = max((place for place in range(len(widths)) if widths[place] > least[place]), key=widths.__getitem__)
            widths[wide] -= 1
        return [line.replace(_TOGETHER, " ") for row in zip(*cells, strict=True) for line in _drawn(row, widths, right)]


def _at_right(column: Column, texts: Sequence[str]) -> bool:
    return not column.left and all(not text or text[0].isdigit() for text in texts)


def _drawn(row: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> list[str]:
    """A row as lines."""
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
    """Each row as lines of a heading and a cell, with an empty line behind it; empty cells are left out."""
    headings, *rows = zip(*cells, strict=True)
    wide = max(map(len, headings))
    lines: list[str] = []
    for row in rows:
        for heading, cell in zip(headings, row, strict=True):
            lines += wrapped(f"  {heading:<{wide}}  ", cell.replace(_TOGETHER, " ")) if cell else []
        lines.append("")
    return lines


def grouped(values: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Values by key, in the order in which the keys first occur."""
    found: dict[K, list[T]] = {}
    for value in values:
        found.setdefault(key(value), []).append(value)
    return found


def least_most(values: Sequence[float], show: Callable[[float], str]) -> str:
    """``1.20 ms to 1.31 ms``: least and greatest value as ``show`` writes them; one figure where both look the same."""
    if not values:
        return ""
    least, most = show(min(values)), show(max(values))
    return least if least == most else f"{least} to {most}"
