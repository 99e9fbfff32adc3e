"""Instruction records: JSON files -> conversations, whatever of three shapes each record has.

Every shape (``record_files.SHAPES``) becomes a list of messages, so that the rest of the program knows conversations only: a chat
up to its last answer; of alpaca the instruction, an empty line and the input are the user's. A record with the keys of several
shapes is a chat before it is alpaca, and that before prompt/completion; further keys are ignored.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hetero_mpi.data.documents import matching_files
from hetero_mpi.data.record_files import (
    PAIRS,
    PREFERENCE,
    SHAPES,
    SPELLINGS,
    BadRecord,
    BadRecords,
    Shape,
    keys_named,
    unrecognised,
    values_of,
)
from hetero_mpi.errors import UserError

Role = Literal["system", "user", "assistant", "tool"]
ROLES: dict[str, Role] = {
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "human": "user",
    "gpt": "assistant",
    "observation": "tool",
}
"""Role in a file -> role in a :class:`ChatMessage`."""

LEARNT_BY = ("train", "weight")
"""Keys of a message that say whether it is learnt; OpenAI's files have the second."""


REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message that may hold its thought, as transformers knows them."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: Role
    content: str
    """Text; of a list of parts, that of all of them."""
    given: Mapping[str, Any] | None = None
    """As the file has it, where that is more than a role and a text: calls of tools, a name, content in parts."""
    trained: bool | None = True
    """Is it learnt, if it is an answer? None: as what is asked is."""

    def calls(self) -> list[Mapping[str, Any]]:
        """The functions that it calls: ``name``, and mostly ``arguments``."""
        return [call.get("function", call) for call in (self.given or {}).get("tool_calls") or ()]


@dataclass(frozen=True, slots=True)
class Record:
    """One conversation; its last message is an answer (the assistant's)."""

    messages: tuple[ChatMessage, ...]
    shape: Shape
    source: str
    """Where it stands, for messages to a person: ``data/a.jsonl, line 7``."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """What the assistant may call, for the chat template."""

    def needs_tools(self) -> bool:
        return bool(self.tools) or any(message.role == "tool" or message.calls() for message in self.messages)


@dataclass(frozen=True)
class Records:
    """The records of all files, in the order of the files' paths and of their lines. Held in memory."""

    records: tuple[Record, ...]
    files: int
    unanswered: tuple[str, ...]
    """Sources of the records that were left out because an answer is missing or empty."""
    untrained: tuple[str, ...] = ()
    """Sources of the records that were left out because all of their answers say ``train: false``."""
    preference: bool = False
    """Records are pairs: chosen, rejected, chosen, ..."""

    def lines(self) -> list[str]:
        shapes = Counter(record.shape for record in self.records)
        found = ", ".join(f"{count:,} {shape}" for shape, count in sorted(shapes.items()))
        what = f"{len(self.records) // 2:,} pairs of answers" if self.preference else f"{len(self.records):,} records"
        lines = [f"{what} from {self.files:,} files ({found})"]
        left_out = {"without an answer": self.unanswered, "without an answer to learn (train = false)": self.untrained}
        for why, sources in left_out.items():
            if sources:
                lines.append(f"{len(sources):,} records {why} left out, such as {sources[0]}")
        return lines


def read_records(
    patterns: Sequence[str],
    key: str = "data.records",
    bad: BadRecords | None = None,
    preference: bool = False,
    tell: Callable[[str], None] | None = None,
) -> Records:
    """Read all records of the files that match the glob patterns of the job's ``key`` (see :func:`matching_files`).

    Records with nothing to learn (an answer is missing or empty, or all say ``train: false``) are left out and listed; bad
    ones go to ``bad``. With ``preference`` each holds a chosen and a rejected answer and becomes two records, in this order. Raises
    UserError when nothing matches, when a file is empty or unreadable, when no record has an answer, and with all bad records (the
    first few by name) at once where there are more than may be skipped.
    """
    bad = BadRecords() if bad is None else bad
    records: list[Record] = []
    unanswered, untrained = list[str](), list[str]()
    paths = matching_files(key, patterns, tell)
    for source, value in (entry for path in paths for entry in values_of(path)):
        try:
            if isinstance(value, BadRecord):
                raise value
            if not isinstance(value, dict):
                raise BadRecord(f"must be a JSON object; it is {_kind(value)}")
            found = _pair_of(value, source) if preference else [_record(value, source)]
        except BadRecord as problem:
            bad.add(source, problem)
            continue
        answered = [record for record in found if record is not None]
        # Is there an answer to learn: any, or of a preference the last one?
        own = [record.messages[-1:] if preference else record.messages for record in answered]
        if len(answered) < len(found):
            unanswered.append(source)
        elif not all(any(one.trained for one in some if one.role == "assistant") for some in own):
            untrained.append(source)
        else:
            records.extend(answered)
    bad.check(key)
    if not records:
        silent = [*unanswered, *untrained] or bad.problems
        such = f", such as {silent[0]}" if silent else ""
        raise UserError(
            f"{key} must hold records with an answer to learn; none of its {len(silent):,} records has one{such}.\n{SHAPES}"
        )
    return Records(tuple(records), len(paths), tuple(unanswered), tuple(untrained), preference)


def _record(value: Mapping[str, Any], source: str) -> Record | None:
    """The record in ``value``, or None when it has no answer. Raises BadRecord."""
    present = {key: inner for key, inner in value.items() if inner is not None}
    for key, spelling in SPELLINGS.items():
        if key in present:
            return _chat(present[key], _tools(present.get("tools")), key, spelling, source)
    for shape, (question, answer) in PAIRS.items():
        if question in present and answer in value:
            return _pair(present, shape, question, answer, source)
    raise BadRecord(unrecognised(present))


def _pair_of(value: Mapping[str, Any], source: str) -> list[Record | None]:
    """The two records of a preference: its prompt with either answer. Raises BadRecord."""
    missing = [key for key in PREFERENCE if value.get(key) is None]
    if missing:
        raise BadRecord(f"{missing[0]!r} is missing for a preference; the record has {keys_named(value)}")
    prompt = value.get("prompt")
    found = []
    for key in PREFERENCE:
        if isinstance(value[key], list):
            asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
            # Many files repeat the prompt in both conversations.
            begins = value[key][:1] and isinstance(value[key][0], dict) and value[key][0].get("role") == "assistant"
            turns = [*asked, *value[key]] if begins else value[key]
            found.append(_record({"messages": turns, "tools": value.get("tools")}, source))
        else:
            asked_in_text = {"prompt": _text(prompt, "prompt"), "completion": _text(value[key], key)}
            found.append(_record(asked_in_text, source))
    prompts = [[(message.role, message.content) for message in one.messages[:-1]] for one in found if one is not None]
    if len(prompts) == 2 and prompts[0] != prompts[1]:
        raise BadRecord(
            "'chosen' and 'rejected' must be answers to one prompt: all their messages but the last are the same"
        )
    return found


def _pair(value: Mapping[str, Any], shape: Shape, question: str, answer: str, source: str) -> Record | None:
    prompt = _text(value[question], question)
    further = _text(value["input"], "input") if shape == "alpaca" and "input" in value else ""
    if further.strip():
        prompt = f"{prompt}\n\n{further}"
    if not prompt.strip():
        raise BadRecord(f"{question!r} is empty: there is no prompt")
    content = _text(value.get(answer, ""), answer)
    if not content.strip():
        return None
    return Record((ChatMessage("user", prompt), ChatMessage("assistant", content)), shape, source)


def _chat(
    turns: Any, tools: Sequence[Mapping[str, Any]] | None, key: str, spelling: tuple[str, str], source: str
) -> Record | None:
    if not isinstance(turns, list):
        raise BadRecord(f"{key!r} must be a list of messages; it is {_kind(turns)}")
    messages = [_message(turn, f"{key}[{index}]", spelling) for index, turn in enumerate(turns)]
    # What follows the last answer is answered by nobody.
    while messages and messages[-1].role != "assistant":
        messages.pop()
    answers = [message for message in messages if message.role == "assistant"]
    if not messages or not all(message.content.strip() or message.calls() for message in answers):
        return None
    if messages[0].role in ("assistant", "tool"):
        what = "an answer" if messages[0].role == "assistant" else "what a tool gave"
        raise BadRecord(f"{key}[0] is {what}: a conversation must begin with a user's (or system) message")
    late = [index for index, message in enumerate(messages) if message.role == "system" and index]
    if late:
        raise BadRecord(f"{key}[{late[0]}] is a system message: only the first message may be one")
    return Record(tuple(messages), "chat", source, tools)


def _message(turn: Any, where: str, spelling: tuple[str, str]) -> ChatMessage:
    if not isinstance(turn, dict):
        raise BadRecord(f"{where} must be an object with {spelling[0]!r} and {spelling[1]!r}; it is {_kind(turn)}")
    said = {key: value for key, value in turn.items() if value is not None}
    role, content = turn.get(spelling[0]), turn.get(spelling[1])
    calls = _calls(said["tool_calls"], f"{where}.tool_calls") if "tool_calls" in said else False
    if spelling[0] not in turn or (spelling[1] not in turn and not calls):
        has = ", ".join(map(repr, turn)) or "no keys"
        raise BadRecord(f"{where} must have {spelling[0]!r} and {spelling[1]!r}; it has {has}")
    if not isinstance(role, str) or role not in ROLES:
        raise BadRecord(f"{where} has the role {role!r}; accepted are {', '.join(ROLES)}")
    text = "" if content is None else _content(content, f"{where}.{spelling[1]}")
    trained = _trained(said, where, ROLES[role])
    further = {key: value for key, value in said.items() if key not in (*spelling, *LEARNT_BY)}
    if not further and not isinstance(content, list):
        return ChatMessage(ROLES[role], text, None, trained)
    given = {"role": ROLES[role], **({} if calls and content is None else {"content": content or ""}), **further}
    _whole_characters(given, where)
    return ChatMessage(ROLES[role], text, given, trained)


def _content(content: Any, where: str) -> str:
    """The text of a message: of all its parts, where it has parts."""
    if not isinstance(content, list):
        return _text(content, where)
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            what = f"of the type {kind!r}" if isinstance(part, dict) else _kind(part)
            raise BadRecord(
                f"{where}[{index}] must be a part of the type 'text'; it is {what}, which is not learnt here"
            )
    return "".join(_text(part.get("text"), f"{where}[{index}].text") for index, part in enumerate(content))


def _trained(said: Mapping[str, Any], where: str, role: Role) -> bool:
    """Is a message learnt, if it is an answer?"""
    for key in (key for key in LEARNT_BY if key in said):
        value = said[key]
        if type(value) not in (bool, int, float) or value not in (0, 1):
            shown = json.dumps(value, ensure_ascii=False, default=str)[:40]
            raise BadRecord(f"{where}.{key} must be true or false, or 1 or 0; it is {shown}")
        if value and role != "assistant":
            raise BadRecord(
                f"{where}.{key} asks for a {role} message to be learnt: data.train_on_prompt learns them all"
            )
    return all(said.get(key, True) for key in LEARNT_BY)


def _calls(calls: Any, where: str) -> bool:
    """Does the message call tools? Raises BadRecord where calls have no names."""
    if not isinstance(calls, list):
        raise BadRecord(f"{where} must be a list of calls; it is {_kind(calls)}")
    for index, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRecord(f'{where}[{index}] must be {{"function": {{"name": "...", "arguments": {{...}}}}}}')
    return bool(calls)


def _tools(tools: Any) -> list[Mapping[str, Any]] | None:
    """``tools`` of a record, which some files hold as JSON in a text."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError):
            raise BadRecord("'tools' must be a list of objects, or JSON of one; it is a text that is no JSON") from None
    if tools is None:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRecord(f"'tools' must be a list of objects, or JSON of one; it is {_kind(tools)}")
    _whole_characters(tools, "'tools'")
    return tools


def _whole_characters(value: Any, where: str) -> None:
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode("utf-8")
    except UnicodeEncodeError:
        raise BadRecord(f"{where} holds half a character (a lone surrogate)") from None


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise BadRecord(f"{name!r} must be text; it is {_kind(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRecord(f"{name!r} holds half a character (a lone surrogate) at position {error.start}") from None
    return value


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(
        type(value), "a number" if isinstance(value, int | float) else f"of the type {type(value).__name__}"
    )
