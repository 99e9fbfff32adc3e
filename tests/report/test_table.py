"""One table, shown as lines of text and on a page."""

from operator import itemgetter

import pytest

from hetero_mpi.report.table import Column, Table
from hetero_mpi.util import units

COLUMNS = (
    Column("rank", itemgetter(0)),
    Column("device", lambda row: row[1]),
    Column("forward", itemgetter(2), units.seconds),
    Column("memory", itemgetter(3), units.size),
    Column("reason", itemgetter(4)),
)
ROWS = [(0, "cuda A100", 0.001, 8e9, "free"), (1, "cuda A100", 0.002, 8e9, "asked for"), (2, "cpu", None, 4e9, None)]


def test_both_forms_show_the_same() -> None:
    table = Table(COLUMNS, ROWS)
    headings, rows = table.html()
    assert headings == [("rank", True), ("device", False), ("forward", True), ("memory", True), ("reason", False)]
    assert rows[1] == ("1", "cuda A100", "2.00 ms", "8.00 GB", "asked for") and rows[2][2] == ""
    assert table.lines() == [
        "  rank  device     forward   memory  reason",
        "     0  cuda A100  1.00 ms  8.00 GB  free",
        "     1  cuda A100  2.00 ms  8.00 GB  asked for",
        "     2  cpu                 4.00 GB",
    ]


def test_columns_without_a_text_are_left_out() -> None:
    assert not Table(COLUMNS, []) and not Table(COLUMNS, [(None,) * 5])
    assert Table(COLUMNS, ROWS[2:]).html()[0] == [("rank", True), ("device", False), ("memory", True)]
    assert Table(COLUMNS, ROWS).without("rank", "reason").lines()[0].split() == ["device", "forward", "memory"]


def test_a_number_and_its_unit_stay_on_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "28")
    table = Table.of_texts(("rank", "peak", "why"), [("0", "7.5 GB of 8 GB", "at 27 % of 3.2 GB/s")])
    assert table.lines() == [
        "  rank        peak  why",
        "     0   7.5 GB of  at 27 % of",
        "              8 GB  3.2 GB/s",
    ]
