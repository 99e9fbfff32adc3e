"""What a record holds beside its question and its answer is read, or counted; files are read whatever they are packed in."""

import bz2
import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from hetero_mpi.data.messages import ChatMessage
from hetero_mpi.data.records import Records, read_records
from tests.data.test_tools import answer, call, user
from tests.support.errors import refuses

FRENCH = {"role": "system", "content": "In French"}
RED = {"prompt": "red ?", "completion": "boat"}


def read(directory: Path, *values: Any, preference: bool = False) -> Records:
    path = directory / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, values)))
    return read_records([str(path)], preference=preference)


def said(messages: tuple[ChatMessage, ...]) -> list[str]:
    return [f"{message.role[0]}: {message.content}" for message in messages]


TURNS = [user("red ?"), answer("boat")]


SHAREGPT = [{"from": "human", "value": "red ?"}, {"from": "gpt", "value": "boat"}]
EARLIER = [["red ?", "boat"], ["grey ?", "birds"]]
PLAIN = ["u: red ?", "a: boat"]
BRIEFED = ["s: In French", *PLAIN]
BOX = ["u: box ?", "a: lamp"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"instruction": "box ?", "input": "", "output": "lamp", "history": EARLIER, "system": "In French"},
         [*BRIEFED, "u: grey ?", "a: birds", *BOX]),
        ({"prompt": "box ?", "completion": "lamp", "history": TURNS}, [*PLAIN, *BOX]),
        ({"system": "In French", "conversations": SHAREGPT}, BRIEFED),
        ({"system": "In French ", "messages": [FRENCH, *TURNS]}, BRIEFED),
        ({"system_prompt": "In French", "question": "red ?", "response": "boat"}, BRIEFED),
        ({"question": "red ?", "answer": "boat", "system": float("nan")}, PLAIN),
        ({"instruction": "red ?", "input": float("nan"), "output": "boat"}, PLAIN),
        ({"messages": json.dumps([FRENCH, *TURNS])}, BRIEFED),
        ({"messages": [{**FRENCH, "role": "developer"}, *TURNS]}, BRIEFED),
        ({"messages": SHAREGPT}, PLAIN),
        ({"prompt": [FRENCH, *TURNS, user("box ?")], "completion": [answer("lamp")]}, [*BRIEFED, *BOX]),
        ({"prompt": [user("red ?")], "completion": "boat"}, PLAIN),
        ({"prompt": "red ?", "completion": [FRENCH, *TURNS]}, BRIEFED),
        ([FRENCH, *TURNS], BRIEFED),
        (SHAREGPT, PLAIN),
    ],
)  # fmt: skip
def test_what_is_read(tmp_path: Path, value: Any, expected: list[str]) -> None:
    for values in ([value], [value, value]):
        found = read(tmp_path, *values)
        assert [said(record.messages) for record in found.records] == [expected] * len(values)
        assert not found.unread


def test_answers_in_a_prompt_are_learnt_as_prompts_are(tmp_path: Path) -> None:
    (record,) = read(tmp_path, {"prompt": [*TURNS, user("box ?")], "completion": [answer("lamp")]}).records
    assert [one.trained for one in record.messages if one.role == "assistant"] == [None, True]


def test_calls_of_functions_are_those_of_tools(tmp_path: Path) -> None:
    function = {"name": "sum", "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": function}]
    new = {
        "tools": tools,
        "messages": [user("1"), call('{"a": 1}'), {"role": "tool", "name": "sum", "content": "3"}, answer("4")],
    }
    new["messages"][1]["tool_calls"][0].pop("id")
    called = {"name": "sum", "arguments": '{"a": 1}'}
    old = {
        "functions": [function],
        "messages": [
            user("1"),
            {"role": "assistant", "content": None, "function_call": called},
            {"role": "function", "name": "sum", "content": "3"},
            answer("4"),
        ],
    }
    sharegpt = {
        "tools": json.dumps(tools),
        "conversations": [
            {"from": "human", "value": "1"},
            {"from": "function_call", "value": json.dumps(called)},
            {"from": "observation", "value": "3"},
            {"from": "gpt", "value": "4"},
        ],
    }
    found = [read(tmp_path, value) for value in (new, old, sharegpt)]
    assert all(one.records[0].tools == tools and not one.unread for one in found)
    assert found[0].records[0].messages == found[1].records[0].messages
    assert said(found[2].records[0].messages) == ["u: 1", "a: ", "t: 3", "a: 4"]
    assert found[2].records[0].messages[1].calls() == [called]


def test_keys_that_nobody_reads_are_counted_in_one_line(tmp_path: Path) -> None:
    one = {**RED, "context": "x", "id": 7, "empty": "", "none": None, "list": []}
    assert read(tmp_path, *[{**RED, "context": "x"}] * 3).unread == {"context": 3}
    turns = [user("a"), answer("b", mood="glad", refusal=None)]
    found = read(tmp_path, one, RED, {**RED, "id": 8}, {"prompt": "c", "messages": turns})
    assert found.unread == {"context": 1, "id": 2, "messages[].mood": 1, "prompt": 1}
    assert "`id`, 1 `context`, 1 `messages[].mood`, 1 `prompt`" in found.lines()[1] and len(found.lines()) == 2
    assert "mood" not in found.lines("{{ message.mood }}")[1], "the template reads it"
    pair = {"prompt": "red ?", "chosen": "boat", "rejected": "crew", "score": 3, "messages": turns}
    assert read(tmp_path, pair, preference="pairs").unread == {"messages": 1, "score": 1}


HH = "\n\nHuman: red ?\n\nAssistant: A what?\n\nHuman: box\n\nAssistant: "
ASKED = [user("red ?")]
TEXTS = {"chosen": "boat", "rejected": "crew"}
CHATS = {"chosen": [*ASKED, answer("boat")], "rejected": [*ASKED, answer("crew")]}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"chosen": HH + "boat", "rejected": HH + "crew"}, ["u: red ?", "a: A what?", "u: box", "a: boat"]),
        ({"system": "In French", "question": "red ?", **TEXTS}, BRIEFED),
        ({"system": "In French", **CHATS}, BRIEFED),
        ({"system": "In French", "prompt": ASKED, "chosen": [answer("boat")], "rejected": answer("crew")}, BRIEFED),
        (
            {"instruction": "red", "input": "?", **TEXTS, "history": [["a", "b"]]},
            ["u: a", "a: b", "u: red\n\n?", "a: boat"],
        ),
        ({"prompt": ASKED, "chosen": "boat", "rejected": [answer("crew")]}, PLAIN),
    ],
)
def test_pairs(tmp_path: Path, value: dict[str, Any], expected: list[str]) -> None:
    found = read(tmp_path, value, preference="pairs")
    assert [said(record.messages) for record in found.records] == [expected, [*expected[:-1], "a: crew"]]
    assert not found.unread


@pytest.mark.parametrize("bad", [3, 0, 1.5, True, ["a"], {"a": 1}, [[1]], "\ud800"])
@pytest.mark.parametrize("key", ["prompt", "chosen", "rejected", "system", "history", "tools"])
def test_odd_types_in_pairs_are_named(tmp_path: Path, key: str, bad: Any) -> None:
    pair = {"prompt": "red ?", "chosen": "boat", "rejected": "crew"}
    for base in (pair, {**pair, "chosen": [answer("boat")], "rejected": [answer("crew")]}):
        with refuses("records.malformed", "a.jsonl, line 1: "):
            read(tmp_path, {**base, key: bad}, preference="pairs")


@pytest.mark.parametrize(
    ("value", "kind", "shown"),
    [
        ({**RED, "system": "a", "system_prompt": "b"}, "record.two_systems", ""),
        ({"system": "a", "messages": [FRENCH, *TURNS]}, "record.two_systems", ""),
        ({**RED, "history": [["a"]]}, "record.history", "'history'"),
        ({**RED, "history": [["a", 3]]}, "record.text", "'history[0]'"),
        ({"messages": [user("a"), answer("b", reasoning_content=3)]}, "record.text", "'messages[1].reasoning_content'"),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": "b"}]},
            "record.call",
            "conversations[1]",
        ),
        ({"chosen": "a", "rejected": "b"}, "record.unknown_shape", "[train] preference"),
        ({"prompt": "blue", **CHATS}, "record.prompt_differs", ""),
    ],
)
def test_what_contradicts_itself_is_named(tmp_path: Path, value: Any, kind: str, shown: str) -> None:
    with refuses(kind, "a.jsonl, line 1: ", shown):
        read(tmp_path, value, preference="pairs" if kind == "record.prompt_differs" else False)


# Files

LINES = "".join(json.dumps({"prompt": f"grün {i}", "completion": "b"}, ensure_ascii=False) + "\n" for i in range(3))
PRETTY = "".join(json.dumps(json.loads(line), indent=1, ensure_ascii=False) + "\n" for line in LINES.splitlines())


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl.gz", gzip.compress(LINES.encode(), mtime=0)),
        ("a.jsonl.bz2", bz2.compress(LINES.encode())),
        ("a.jsonl.xz", lzma.compress(LINES.encode())),
        ("a", gzip.compress(json.dumps([json.loads(line) for line in LINES.splitlines()]).encode("utf-16"), mtime=0)),
        *(
            (f"{code}.jsonl", LINES.encode(code))
            for code in ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-8-sig")
        ),
        ("pretty.json", PRETTY.encode()),
        ("pretty.json", PRETTY.encode("utf-16")),
        ("pretty.json", PRETTY.replace("}\n{", "}{").encode()),
        ("lists.json", json.dumps([[user(f"grün {i}"), answer("b")] for i in range(3)]).encode()),
        ("pretty.json", "\n".join(json.dumps([user(f"grün {i}"), answer("b")], indent=2) for i in range(3)).encode()),
    ],
)
def test_files_are_read_whatever_they_are_packed_in(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    found = read_records([f"{tmp_path}/*"]).records
    assert [said(record.messages) for record in found] == [[f"u: grün {i}", "a: b"] for i in range(3)]


@pytest.mark.parametrize(
    ("text", "kind", "place"),
    [
        (PRETTY + '\n{"prompt": 3,\n "completion": "b"}\n', "record.text", "a.json, line "),
        (PRETTY[:-5], "record.json", "a.json, line 11: "),
        ('{"prompt": "a",\n' + LINES, "record.json", "a.json, line "),
    ],
)
def test_values_one_after_the_other_are_named_by_their_lines(tmp_path: Path, text: str, kind: str, place: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with refuses(kind, place):
        read_records([f"{tmp_path}/*"])


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (gzip.compress(LINES.encode() * 9, mtime=0)[:-20], "records.damaged"),
        (gzip.compress(LINES.encode(), mtime=0)[:20] + b"\xff" * 40, "records.damaged"),
        (bz2.compress(LINES.encode())[:-9], "records.damaged"),
        (bz2.compress(LINES.encode())[:9] + b"\xff" * 40, "records.damaged"),
        (lzma.compress(LINES.encode())[:-9], "records.damaged"),
        (LINES.encode("utf-16")[:-1], "records.damaged"),
        (b"PK\3\4" + b"a" * 40, "records.format"),
        (gzip.compress(b"PAR1abcd", mtime=0), "records.format"),
        (gzip.compress(b"", mtime=0), "records.empty"),
    ],
)
def test_other_files_are_named(tmp_path: Path, content: bytes, kind: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with refuses(kind, f"{tmp_path}/a.jsonl: "):
        read_records([f"{tmp_path}/*"])


def test_zstd(tmp_path: Path) -> None:
    try:
        from compression import zstd  # type: ignore[import-not-found]
    except ImportError:
        (tmp_path / "a.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd" + b"a" * 20)
        with refuses("records.compression", "zstd -d a.jsonl.zst"):
            read_records([f"{tmp_path}/*"])
        return
    (tmp_path / "a.jsonl.zst").write_bytes(zstd.compress(LINES.encode()))
    assert len(read_records([f"{tmp_path}/*"]).records) == 3
