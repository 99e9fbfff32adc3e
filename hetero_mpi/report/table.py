"""A table of a plan, a profile or a run, as data: its columns, and an object for each row. It is shown as lines of text
(``Table.lines``), or on the page of a run (``page.html``)::

    Table([Column("rank", "rank"), Column("memory", "memory_bytes", units.size)], profile.devices).lines()
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from operator import itemgetter
from typing import Any, TypeVar

from hetero_mpi.util.terminal import line_width, printable, wrap_text

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
MOST_ROWS = 16
"""Ranks or hosts that are shown."""
_TOGETHER = "\N{NO-BREAK SPACE}"
_UNIT = re.compile(r"(?<=\d) (?=(%|[a-zA-Z]{1,2}(/s)?)(?:\s|,|;|\)|$))")
"""The space between a number and its unit, at which no line is broken."""


@dataclass(frozen=True)
class Column:
    """A heading, the value below it in each row, and how this value is written."""

    title: str
    value: str | Callable[[Any], Any]
    """A function of the row, or the name of its attribute. None: unknown."""
    format: Callable[[Any], str] = str
    left: bool = False
    """It stands at the left; others stand at the right if all their texts begin with a digit."""

    def text(self, row: Any) -> str:
        value = getattr(row, self.value) if isinstance(self.value, str) else self.value(row)
        return "" if value is None else value if isinstance(value, str) else self.format(value)


@dataclass(frozen=True)
class Table:
    """Columns, and an object for each row. A column without any text is not shown."""

    columns: Sequence[Column]
    rows: Sequence[Any]

    @classmethod
    def of_texts(cls, headings: Iterable[str], rows: Sequence[Sequence[Any]]) -> Table:
        """A table whose rows are texts, one for each heading."""
        return cls([Column(heading, itemgetter(place)) for place, heading in enumerate(headings)], rows)

    def without(self, *titles: str) -> Table:
        """The table without the columns of these titles."""
        return replace(self, columns=[column for column in self.columns if column.title not in titles])

    def texts(self) -> list[tuple[Column, list[str]]]:
        """The columns that are shown, each with its texts."""
        columns = [(column, [column.text(row) for row in self.rows]) for column in self.columns]
        return [(column, texts) for column, texts in columns if any(texts)]

    def __bool__(self) -> bool:
        """Whether there is anything to show."""
        return bool(self.texts())

    def html(self) -> tuple[list[tuple[str, bool]], list[tuple[str, ...]]]:
        """Headings, each with whether its column stands at the right; and rows of texts."""
        shown = self.texts()
        headings = [(column.title, _at_right(column, texts)) for column, texts in shown]
        return headings, list(zip(*(texts for _, texts in shown), strict=True))

    def lines(self, most: int | None = None) -> list[str]:
        """Aligned columns within the width of the terminal. Where they are too wide, the widest is wrapped; where even single words
        are too wide, each row is a list of its cells. ``most``: where there are more rows, the first ones are shown (``MOST_ROWS``
        at most), and how many more there are.
        """
        if most is not None and len(self.rows) > most:
            rows = self.rows[: min(most, MOST_ROWS)]
            return [*replace(self, rows=rows).lines(), f"  ... and {len(self.rows) - len(rows):,} more"]
        shown = self.texts()
        right = [_at_right(column, texts) for column, texts in shown]
        cells = [[unbroken(printable(text)) for text in (column.title, *texts)] for column, texts in shown]
        least = [max(len(word) for cell in column for word in cell.split(" ")) for column in cells]
        widths, most = [max(map(len, column)) for column in cells], line_width()
        if sum(least) + 2 * len(least) > most:
            return _stacked(cells)
        while sum(widths) + 2 * len(widths) > most:
            wide = max((place for place in range(len(widths)) if widths[place] > least[place]), key=widths.__getitem__)
            widths[wide] -= 1
        return [line.replace(_TOGETHER, " ") for row in zip(*cells, strict=True) for line in _drawn(row, widths, right)]


def unbroken(text: str) -> str:
    """``text`` in which a number and its unit stay on one line."""
    return _UNIT.sub(_TOGETHER, text)


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
            lines += wrap_text(f"  {heading:<{wide}}  ", cell.replace(_TOGETHER, " ")) if cell else []
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
