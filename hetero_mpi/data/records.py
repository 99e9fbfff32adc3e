"""Instruction records: JSON files -> conversations, whatever of three shapes each record has.

Every shape becomes a list of messages, so that the rest of the program knows conversations only:

=================  ====================================================  ============================================
shape              recognised by                                         becomes
=================  ====================================================  ============================================
chat               ``messages`` (role, content), or ``conversations``    these messages, up to the last answer
                   (from, value: the spelling of ShareGPT)
alpaca             ``instruction`` and ``output``; ``input`` may follow  user: instruction, empty line, input;
                                                                         assistant: output
prompt/completion  ``prompt`` and ``completion``                         user: prompt; assistant: completion
=================  ====================================================  ============================================

A record with the keys of several shapes has the first of them; further keys are ignored.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hetero_mpi.data.documents import matching_files
from hetero_mpi.errors import UserError

Shape = Literal["chat", "alpaca", "prompt/completion"]

SHOWN = 5
"""Bad records that one error names; a wrong file would otherwise fill the terminal."""

SHAPES = """\
A file holds JSON lines, or one JSON array, of records in these shapes:
  alpaca             {"instruction": "...", "input": "...", "output": "..."}; input may be left out
  chat               {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
  chat (ShareGPT)    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}
  prompt/completion  {"prompt": "...", "completion": "..."}"""

ROLES = {"system": "system", "user": "user", "assistant": "assistant", "human": "user", "gpt": "assistant"}
"""Role in a file -> role in a :class:`ChatMessage`."""

SPELLINGS = {"messages": ("role", "content"), "conversations": ("from", "value")}
PAIRS: dict[Shape, tuple[str, str]] = {
    "alpaca": ("instruction", "output"),
    "prompt/completion": ("prompt", "completion"),
}


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True, slots=True)
class Record:
    """One conversation; its last message is an answer (the assistant's)."""

    messages: tuple[ChatMessage, ...]
    shape: Shape
    source: str
    """Where it stands, for messages to a person: ``data/a.jsonl, line 7``."""


@dataclass(frozen=True)
class Records:
    """The records of all files, in the order of the files' paths and of their lines. Held in memory."""

    records: tuple[Record, ...]
    files: int
    unanswered: tuple[str, ...]
    """Sources of the records that were left out because an answer is missing or empty."""

    def lines(self) -> list[str]:
        shapes = Counter(record.shape for record in self.records)
        found = ", ".join(f"{count:,} {shape}" for shape, count in sorted(shapes.items()))
        lines = [f"{len(self.records):,} records from {self.files:,} files ({found})"]
        if self.unanswered:
            lines.append(f"{len(self.unanswered):,} records without an answer left out, such as {self.unanswered[0]}")
        return lines


class _BadRecord(Exception):
    """What is wrong with one record, in words."""


def read_records(patterns: Sequence[str], key: str = "data.records") -> Records:
    """Read all records of the files that match the glob patterns of the job's ``key``.

    Records whose answer is missing or empty are left out and listed. Raises UserError when nothing matches, when a file
    is empty or unreadable, when no record has an answer, and with all bad records (the first few by name) at once.
    """
    records: list[Record] = []
    unanswered: list[str] = []
    problems: list[str] = []
    paths = matching_files(key, patterns)
    for path in paths:
        for source, value in _values(path):
            try:
                record = _record(value, source)
            except _BadRecord as problem:
                problems.append(f"{source}: {problem}")
                continue
            if record is None:
                unanswered.append(source)
            else:
                records.append(record)
    if problems:
        shown = [f"  {problem}" for problem in problems[:SHOWN]]
        more = [f"  and {len(problems) - SHOWN:,} more"] if len(problems) > SHOWN else []
        title = f"{key} must hold records that can be learnt from; {len(problems):,} cannot:"
        raise UserError("\n".join([title, *shown, *more, SHAPES]))
    if not records:
        raise UserError(
            f"{key} must hold records with an answer to learn; none of its {len(unanswered):,} records has one, such as "
            f"{unanswered[0]}.\n{SHAPES}"
        )
    return Records(tuple(records), len(paths), tuple(unanswered))


def _values(path: Path) -> Iterator[tuple[str, Any]]:
    """(source, JSON value) of every record of a file; the value is a _BadRecord where the JSON is broken."""
    text = _read(path)
    if text.lstrip().startswith("["):
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            where = f"{path}, line {error.lineno}" if isinstance(error, json.JSONDecodeError) else str(path)
            yield where, _BadRecord(_broken(error))
            return
        if not values:
            raise UserError(f"{path}: the file holds no records: its JSON array is empty. Leave it out, or fill it.")
        for number, value in enumerate(values, start=1):
            yield f"{path}, record {number}", value
        return
    # Not splitlines(): JSON allows characters inside a string at which that would cut.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                value = _BadRecord(_broken(error))
            yield f"{path}, line {number}", value


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"{path}: the file of records cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise UserError(f"{path}, line {line}: records must be JSON in UTF-8; this is not UTF-8. Convert it.") from None
    if not text.strip():
        raise UserError(f"{path}: the file of records is empty. Leave it out, or fill it.\n{SHAPES}")
    return text


def _broken(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"broken JSON at column {error.colno}: {error.msg}"
    if isinstance(error, ValueError):
        return "JSON with a number of more digits than can be read"
    return "JSON nested too deeply to be a record"


def _record(value: Any, source: str) -> Record | None:
    """The record in ``value``, or None when it has no answer. Raises _BadRecord."""
    if isinstance(value, _BadRecord):
        raise value
    if not isinstance(value, dict):
        raise _BadRecord(f"must be a JSON object; it is {_kind(value)}")
    present = {key: inner for key, inner in value.items() if inner is not None}
    for key, spelling in SPELLINGS.items():
        if key in present:
            return _chat(present[key], key, spelling, source)
    for shape, (question, answer) in PAIRS.items():
        if question in present and answer in value:
            return _pair(present, shape, question, answer, source)
    raise _BadRecord(_unrecognised(present))


def _pair(value: Mapping[str, Any], shape: Shape, question: str, answer: str, source: str) -> Record | None:
    prompt = _text(value[question], question)
    further = _text(value["input"], "input") if shape == "alpaca" and "input" in value else ""
    if further.strip():
        prompt = f"{prompt}\n\n{further}"
    if not prompt.strip():
        raise _BadRecord(f"{question!r} is empty: there is no prompt")
    content = _text(value.get(answer, ""), answer)
    if not content.strip():
        return None
    return Record((ChatMessage("user", prompt), ChatMessage("assistant", content)), shape, source)


def _chat(turns: Any, key: str, spelling: tuple[str, str], source: str) -> Record | None:
    if not isinstance(turns, list):
        raise _BadRecord(f"{key!r} must be a list of messages; it is {_kind(turns)}")
    messages = [_message(turn, f"{key}[{index}]", spelling) for index, turn in enumerate(turns)]
    # What follows the last answer is answered by nobody.
    while messages and messages[-1].role != "assistant":
        messages.pop()
    if not messages or not all(message.content.strip() for message in messages if message.role == "assistant"):
        return None
    if messages[0].role == "assistant":
        raise _BadRecord(f"{key}[0] is an answer: a conversation must begin with a user's (or system) message")
    late = [index for index, message in enumerate(messages) if message.role == "system" and index]
    if late:
        raise _BadRecord(f"{key}[{late[0]}] is a system message: only the first message may be one")
    return Record(tuple(messages), "chat", source)


def _message(turn: Any, where: str, spelling: tuple[str, str]) -> ChatMessage:
    if not isinstance(turn, dict):
        raise _BadRecord(f"{where} must be an object with {spelling[0]!r} and {spelling[1]!r}; it is {_kind(turn)}")
    for name in spelling:
        if name not in turn:
            has = ", ".join(map(repr, turn)) or "no keys"
            raise _BadRecord(f"{where} must have {spelling[0]!r} and {spelling[1]!r}; it has {has}")
    role = turn[spelling[0]]
    if not isinstance(role, str) or role not in ROLES:
        raise _BadRecord(f"{where} has the role {role!r}; accepted are {', '.join(ROLES)}")
    content = "" if turn[spelling[1]] is None else _text(turn[spelling[1]], f"{where}.{spelling[1]}")
    return ChatMessage(ROLES[role], content)  # type: ignore[arg-type]


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise _BadRecord(f"{name!r} must be text; it is {_kind(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _BadRecord(f"{name!r} holds half a character (a lone surrogate) at position {error.start}") from None
    return value


def _unrecognised(value: Mapping[str, Any]) -> str:
    for shape, pair in PAIRS.items():
        missing = [key for key in pair if key not in value]
        if len(missing) == 1:
            return f"{missing[0]!r} is missing for the {shape} shape; the record has {_keys(value)}"
    return f"no shape has these keys: {_keys(value)}"


def _keys(value: Mapping[str, Any]) -> str:
    shown = ", ".join(repr(key) for key in list(value)[:6])
    return (shown + (", ..." if len(value) > 6 else "")) or "no keys"


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
