"""Parquet files give the same records as JSON lines, without being held in memory; damaged ones are named."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from hetero_mpi.data.record_files import values_of
from hetero_mpi.data.records import read_records
from tests.data.test_tools import CALLING, HALVES, TWICE, answer, call, user
from tests.support.errors import refuses

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

PAIRS = [{"prompt": f"Grass {i}", "completion": f" green {i}", "score": i / 2} for i in range(7)]
ALPACA = [
    {"instruction": "Say", "input": None, "output": "Hello"},
    {"instruction": "Add", "input": "1, 2", "output": "3"},
]
SAID = [{"messages": [user("Grün 🙂"), answer("Hello\u2028!")]}, {"messages": HALVES}]
TYPED = [{"type": "function", "function": {"name": "sum", "parameters": {"a": {"type": "string"}}}}]
TOOL = [{"messages": CALLING, "tools": TYPED}, {"messages": TWICE}, {"messages": [user("1"), call({"b": 1})]}]
MIXED = [*PAIRS, *ALPACA, {"messages": [user("Hi"), {"role": "assistant", "content": None}]}]


def both(directory: Path, rows: list[dict[str, Any]], rows_in_group: int = 2) -> tuple[Path, Path]:
    lines, table = directory / "a.jsonl", directory / "a.parquet"
    lines.write_text("\n".join(json.dumps(row, ensure_ascii=False, default=str) for row in rows), encoding="utf-8")
    pq.write_table(pa.Table.from_pylist(rows, schema=schema_of(rows)), table, row_group_size=rows_in_group)
    return lines, table


def schema_of(rows: list[dict[str, Any]]) -> Any:
    """Of all keys of all rows, which ``from_pylist`` would take from the first row alone."""
    return pa.schema(
        [(key, pa.array([row.get(key) for row in rows]).type) for key in {k: 0 for row in rows for k in row}]
    )


@pytest.mark.parametrize("rows", [PAIRS, ALPACA, SAID, TOOL, MIXED], ids=["pairs", "alpaca", "chat", "tools", "mixed"])
def test_the_records_are_those_of_json_lines(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    found = [read_records([str(path)]) for path in both(tmp_path, rows)]
    shown = [[(one.messages, one.tools, one.shape) for one in some.records] for some in found]
    assert shown[0] == shown[1] and len(shown[0]) > 0
    assert len(found[0].unanswered) == len(found[1].unanswered) and found[0].untrained == ()
    assert found[1].records[-1].source.startswith(f"{tmp_path}/a.parquet, row ")
    dictionary = tmp_path / "a"  # told by its content, not by its name
    table = pq.read_table(tmp_path / "a.parquet")
    pq.write_table(table, dictionary, compression="zstd", version="1.0", use_dictionary=True)
    assert [one.messages for one in read_records([str(dictionary)]).records] == [one[0] for one in shown[0]]


@pytest.mark.parametrize("chat", [False, True])
def test_preferences(tmp_path: Path, chat: bool) -> None:
    def said(role: str, text: str) -> Any:
        return [{"role": role, "content": text, "name": None}] if chat else text

    answers = {"chosen": said("assistant", "b"), "rejected": said("assistant", "c")}
    rows = [{"prompt": said("user", f"a {i}"), **answers, "score": i} for i in range(3)]
    found = [read_records([str(path)], preference="pairs").records for path in both(tmp_path, rows)]
    assert [one.messages for one in found[0]] == [one.messages for one in found[1]] and len(found[1]) == 6


def test_a_large_file_is_not_held_in_memory(tmp_path: Path) -> None:
    path, row = tmp_path / "a.parquet", {"prompt": "a", "completion": "b", "unused": "c" * 5000}
    with pq.ParquetWriter(path, schema_of([row]), compression="zstd") as writer:
        for group in range(20):
            texts = [{**row, "prompt": f"{group}-{i}" * 100} for i in range(2000)]
            writer.write_table(pa.Table.from_pylist(texts, schema=schema_of([row])))
    del texts
    before, most, count = pa.total_allocated_bytes(), 0, 0
    for count, _ in enumerate(values_of(path), start=1):
        most = max(most, pa.total_allocated_bytes() - before) if count % 500 == 0 else most
    size = 20 * 2000 * 500
    assert count == 40_000 and most < size / 4, (
        f"{most} bytes of {size}, and of ten times as many in the column not wanted"
    )


@pytest.mark.parametrize(
    ("rows", "kind", "shown"),
    [
        ([{"text": "a", "id": 3}], "record.unknown_shape", "a.parquet: "),
        ([{"instruction": "a"}], "record.unknown_shape", "a.parquet: 'output'"),
        ([{"prompt": "a", "completion": 3}], "record.text", "a.parquet, row 1: 'completion'"),
        ([{"prompt": b"a", "completion": "b"}], "record.text", "a.parquet, row 1: 'prompt'"),
        ([{"messages": "a"}], "record.messages", "a.parquet, row 1: 'messages'"),
        (
            [{"messages": [user("a"), {"role": "critic", "content": "b"}]}],
            "record.role",
            "a.parquet, row 1: messages[1]",
        ),
    ],
)
def test_bad_tables(tmp_path: Path, rows: list[dict[str, Any]], kind: str, shown: str) -> None:
    both(tmp_path, rows)
    with refuses(kind, shown):
        read_records([f"{tmp_path}/*.parquet"])


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, path = both(tmp_path, PAIRS)
    whole = path.read_bytes()
    for content in (whole[:-20], whole[:40], b"{}", whole[:60] + b"\xff" * 40 + whole[100:], b""):
        path.write_bytes(content)
        with refuses("records.damaged" if content else "records.empty", path):
            read_records([str(path)])
    pq.write_table(pa.table({"prompt": pa.array([], pa.string()), "completion": pa.array([], pa.string())}), path)
    with refuses("records.empty", path):
        read_records([str(path)])
    path.write_bytes(whole)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with refuses("records.package_missing", path, "pyarrow"):
        read_records([str(path)])
