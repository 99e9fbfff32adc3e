"""Instruction records: JSON files -> conversations, whatever of three shapes each record has.

Every shape (``record_files.SHAPES``) becomes a list of messages, so that the rest of the program knows conversations only: a chat
up to its last answer; of alpaca the instruction, an empty line and the input are the user's. A record with the keys of several
shapes is a chat before it is alpaca, and that before prompt/completion. Keys that nobody reads are counted.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hetero_mpi.data.documents import matching_files
from hetero_mpi.data.record_files import (
    PAIRS,
    PREFERENCE,
    PROMPTS,
    SHAPES,
    SPELLINGS,
    SYSTEM,
    BadRecord,
    BadRecords,
    Shape,
    is_chat,
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
    "function": "tool",
    "developer": "system",
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
    unread: Mapping[str, int] = field(default_factory=dict)
    """Key that nobody reads -> number of records, or pairs, that have it; ``messages[].key``: of their messages."""

    def lines(self, template: str = "") -> list[str]:
        """What was found, for a person. ``template``: the chat template, which may read keys of messages."""
        shapes = Counter(record.shape for record in self.records)
        found = ", ".join(f"{count:,} {shape}" for shape, count in sorted(shapes.items()))
        what = f"{len(self.records) // 2:,} pairs of answers" if self.preference else f"{len(self.records):,} records"
        lines = [f"{what} from {self.files:,} files ({found})"]
        left_out = {"without an answer": self.unanswered, "without an answer to learn (train = false)": self.untrained}
        for why, sources in left_out.items():
            if sources:
                lines.append(f"{len(sources):,} records {why} left out, such as {sources[0]}")
        read = set(re.findall(r"\w+", template))
        unread = [(key, count) for key, count in self.unread.items() if key.partition("[].")[2] not in read]
        if unread:
            (key, count), *further = sorted(unread, key=lambda entry: (-entry[1], entry[0]))
            kind, total = ("pairs", len(self.records) // 2) if self.preference else ("records", len(self.records))
            named = [f"{count:,} of {total:,} {kind} have `{key}`", *(f"{count:,} `{key}`" for key, count in further)]
            lines.append(f"{', '.join(named)}, which {'are' if further else 'is'} not learnt")
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
    unanswered, untrained, unread = list[str](), list[str](), Counter[str]()
    paths = matching_files(key, patterns, tell)
    for source, value in (entry for path in paths for entry in values_of(path)):
        try:
            if isinstance(value, BadRecord):
                raise value
            fields = _Fields(_object(value))
            found = _pair_of(fields, source) if preference else [_record(fields, source)]
        except BadRecord as problem:
            bad.add(source, problem)
            continue
        except RecursionError:
            bad.add(source, BadRecord("JSON nested too deeply to be a record"))
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
            unread.update(fields.unread())
    bad.check(key)
    if not records:
        silent = [*unanswered, *untrained] or bad.problems
        such = f", such as {silent[0]}" if silent else ""
        raise UserError(
            f"{key} must hold records with an answer to learn; none of its {len(silent):,} records has one{such}.\n{SHAPES}"
        )
    return Records(tuple(records), len(paths), tuple(unanswered), tuple(untrained), preference, unread)


class _Fields:
    """The keys of a record that have a value, and which of them were read."""

    def __init__(self, value: Mapping[str, Any]) -> None:
        # pandas writes NaN where a table has nothing.
        self.values = {key: inner for key, inner in value.items() if inner is not None and inner == inner}
        self.named = list(value)
        self._read: set[str] = set()
        self._of_messages: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        return self.values.get(key, default)

    def first(self, keys: Sequence[str]) -> str | None:
        """The first of the keys that the record has, empty or not."""
        return next((key for key in keys if key in self.values), next((key for key in keys if key in self.named), None))

    def unread_in_messages(self, keys: Mapping[str, Any]) -> None:
        self._of_messages |= {f"messages[].{key}" for key, value in keys.items() if value not in ("", [], {})}

    def unread(self) -> set[str]:
        own = {key for key, value in self.values.items() if key not in self._read and value not in ("", [], {})}
        return own | self._of_messages


def _object(value: Any) -> Mapping[str, Any]:
    if is_chat(value):
        return {"messages" if "role" in value[0] else "conversations": value}
    if not isinstance(value, dict):
        raise BadRecord(f"must be a JSON object; it is {_kind(value)}")
    return value


def _record(fields: _Fields, source: str) -> Record | None:
    """The record of these fields, or None when it has no answer. Raises BadRecord."""
    tools = _tools_of(fields)
    for key in SPELLINGS:
        if key in fields.values:
            messages = _with_system(fields, _messages(_opened(fields.get(key)), key, fields))
            return _conversation(messages, "chat", source, tools, key)
    for shape, (questions, answers) in PAIRS.items():
        question, answer = fields.first(questions), fields.first(answers)
        if question in fields.values and question is not None and answer is not None:
            asked = _asked(fields, question)
            said = _turns(fields.get(answer, ""), "assistant", answer, fields)
            chat = any(isinstance(fields.get(key), list) for key in (question, answer))
            return _conversation([*asked, *said], "chat" if chat else shape, source, tools, answer)
    raise BadRecord(unrecognised(fields.values))


def _pair_of(fields: _Fields, source: str) -> list[Record | None]:
    """The two records of a preference: its prompt with either answer. Raises BadRecord."""
    missing = [key for key in PREFERENCE if key not in fields.values]
    if missing:
        raise BadRecord(f"{missing[0]!r} is missing for a preference; the record has {keys_named(fields.values)}")
    question, tools = (
        fields.first([key for key in (*PROMPTS, "instruction") if key in fields.values]),
        _tools_of(fields),
    )
    asked = _asked(fields, question) if question is not None else []
    found = []
    for key in PREFERENCE:
        value = fields.get(key)
        turns = _turns(value, "assistant", key, fields)
        chat = not isinstance(value, str) or isinstance(question is not None and fields.get(question), list)
        if question is None and isinstance(value, str):
            chat, turns = True, _with_system(fields, _human_and_assistant(value, key))
        elif turns and turns[0].role == "assistant":
            turns = [*(asked or _with_system(fields, [])), *turns]
        else:  # many files repeat the prompt in both conversations
            turns = _with_system(fields, turns)
            lost = [one for one in asked if one.content.strip() not in "".join(turn.content for turn in turns)]
            if lost:
                raise BadRecord(f"{key!r} begins a conversation that does not hold what {question!r} says")
        found.append(_conversation(turns, "chat" if chat else "prompt/completion", source, tools, key))
    prompts = [[(message.role, message.content) for message in one.messages[:-1]] for one in found if one is not None]
    if len(prompts) == 2 and prompts[0] != prompts[1]:
        raise BadRecord(
            "'chosen' and 'rejected' must be answers to one prompt: all their messages but the last are the same"
        )
    return found


_SPEAKERS: dict[str, Role] = {"Human": "user", "Assistant": "assistant"}
_SPEAKER = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")


def _human_and_assistant(text: str, key: str) -> list[ChatMessage]:
    """The conversation in a text that names who speaks, as those of HH-RLHF do."""
    before, *rest = _SPEAKER.split(text)
    if before or rest[:1] != ["Human"] or rest[-2] != "Assistant":
        raise BadRecord(
            f"'prompt' is missing, and {key!r} is no conversation that holds it (messages, or a text with Human: and Assistant:)"
        )
    return [ChatMessage(_SPEAKERS[speaker], said.strip()) for speaker, said in zip(rest[::2], rest[1::2], strict=True)]


def _asked(fields: _Fields, question: str) -> list[ChatMessage]:
    """What a record asks: the system's message, what was said before, and the question, with its input."""
    value = fields.get(question)
    turns = _turns(value, "user", question, fields)
    if isinstance(value, str):
        further = _text(fields.get("input", ""), "input") if question == "instruction" else ""
        asked = f"{value}\n\n{further}" if further.strip() else value
        if not asked.strip():
            raise BadRecord(f"{question!r} is empty: there is no prompt")
        turns = [ChatMessage("user", asked)]
    # An answer in a prompt is one of what is asked.
    turns = [replace(turn, trained=None) if turn.role == "assistant" else turn for turn in turns]
    return _with_system(fields, [*_history(fields), *turns])


_IN_TURN: tuple[Role, Role] = ("user", "assistant")


def _history(fields: _Fields) -> list[ChatMessage]:
    """The questions and answers before."""
    value = _opened(fields.get("history", []))
    if is_chat(value):
        return _messages(value, "history", fields)
    if not isinstance(value, list) or not all(isinstance(one, list) and len(one) == 2 for one in value):
        raise BadRecord(f"'history' must be a list of [question, answer]; it is {_kind(value)}")
    return [
        ChatMessage(role, _text(said, f"history[{index}]"))
        for index, pair in enumerate(value)
        for role, said in zip(_IN_TURN, pair, strict=True)
    ]


def _with_system(fields: _Fields, messages: list[ChatMessage]) -> list[ChatMessage]:
    """The messages behind that of the record's own key for the system."""
    said = {text.strip(): text for key in SYSTEM if (text := _text(fields.get(key, ""), key)).strip()}
    if messages[:1] and messages[0].role == "system":
        said.setdefault(messages[0].content.strip(), messages[0].content)
        if len(said) == 1:
            return messages
    if len(said) > 1:
        raise BadRecord("the record has two system messages that are not the same: leave one of them")
    return [*(ChatMessage("system", text) for text in said.values()), *messages]


def _turns(value: Any, role: Role, name: str, fields: _Fields) -> list[ChatMessage]:
    """A text of a role, or messages as they are."""
    if isinstance(value, list | dict):
        return _messages(value if isinstance(value, list) else [value], name, fields)
    return [ChatMessage(role, _text(value, name))]


def _opened(value: Any) -> Any:
    """What a text holds as JSON, if it does."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def _messages(turns: Any, key: str, fields: _Fields) -> list[ChatMessage]:
    if not isinstance(turns, list):
        raise BadRecord(f"{key!r} must be a list of messages; it is {_kind(turns)}")
    # By what stands there: files have one spelling under the key of another.
    objects = [turn for turn in turns if isinstance(turn, dict)]
    fitting = (one for one in SPELLINGS.values() if all(key in turn for turn in objects for key in one))
    spelling = next(fitting, SPELLINGS.get(key, SPELLINGS["messages"]))
    return [_message(turn, f"{key}[{index}]", spelling, fields) for index, turn in enumerate(turns)]


def _conversation(
    messages: list[ChatMessage], shape: Shape, source: str, tools: Sequence[Mapping[str, Any]] | None, key: str
) -> Record | None:
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
    return Record(tuple(messages), shape, source, tools)


_KNOWN = {*LEARNT_BY, *REASONING, "name", "tool_calls", "tool_call_id"}
"""Keys of a message beside its role and its content."""


def _message(turn: Any, where: str, spelling: tuple[str, str], fields: _Fields) -> ChatMessage:
    if not isinstance(turn, dict):
        raise BadRecord(f"{where} must be an object with {spelling[0]!r} and {spelling[1]!r}; it is {_kind(turn)}")
    turn = _with_calls(turn, where, spelling)
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
    for key in (key for key in REASONING if key in said):
        _text(said[key], f"{where}.{key}")
    further = {key: value for key, value in said.items() if key not in (*spelling, *LEARNT_BY)}
    fields.unread_in_messages({key: value for key, value in further.items() if key not in _KNOWN})
    if not further and not isinstance(content, list):
        return ChatMessage(ROLES[role], text, None, trained)
    given = {"role": ROLES[role], **({} if calls and content is None else {"content": content or ""}), **further}
    _whole_characters(given, where)
    return ChatMessage(ROLES[role], text, given, trained)


def _with_calls(turn: dict[str, Any], where: str, spelling: tuple[str, str]) -> dict[str, Any]:
    """The message with its call of a function, which OpenAI's older files and ShareGPT's have as such, as one of a tool."""
    called, rest = turn.get("function_call"), {key: value for key, value in turn.items() if key != "function_call"}
    if turn.get(spelling[0]) == "function_call":
        called = _opened(turn.get(spelling[1]))
        rest = {**rest, spelling[0]: "assistant", spelling[1]: None}
        if not isinstance(called, dict | list):
            raise BadRecord(
                f"{where} is a call of a function: it must be JSON with 'name' and 'arguments'; it is {_kind(called)}"
            )
    if called is None or rest.get("tool_calls"):
        return turn
    calls = called if isinstance(called, list) else [called]
    return {**rest, "tool_calls": [{"type": "function", "function": one} for one in calls]}


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


def _tools_of(fields: _Fields) -> list[Mapping[str, Any]] | None:
    """What the assistant may call: ``tools``, or ``functions``, as OpenAI's older files have it."""
    if "tools" in fields.values:
        return _tools(fields.get("tools"), "tools")
    functions = _tools(fields.get("functions"), "functions")
    return None if functions is None else [{"type": "function", "function": one} for one in functions]


def _tools(tools: Any, key: str) -> list[Mapping[str, Any]] | None:
    """A list of objects, which some files hold as JSON in a text."""
    if isinstance(tools, str) and not tools.strip():
        return None
    if isinstance(tools, str) and isinstance(_opened(tools), str):
        raise BadRecord(f"{key!r} must be a list of objects, or JSON of one; it is a text that is no JSON")
    tools = _opened(tools)
    if tools is None:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRecord(f"{key!r} must be a list of objects, or JSON of one; it is {_kind(tools)}")
    _whole_characters(tools, repr(key))
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
