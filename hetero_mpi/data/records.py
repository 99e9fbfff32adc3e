"""Instruction records: files -> conversations, whatever of three shapes each record has.

Every shape (``record_shapes.SHAPES``) becomes a list of messages, so that the rest of the program knows conversations only: a chat
up to its last answer; of alpaca the instruction, an empty line and the input are the user's. A record with the keys of several
shapes is a chat before it is alpaca, and that before prompt/completion. Keys that nobody reads are counted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hetero_mpi.data.messages import (
    ChatMessage,
    Role,
    json_of,
    kind_name,
    messages_of,
    text_of,
    tools_of,
    turns_of,
    weight_of,
)
from hetero_mpi.data.record_files import OwnKeys, is_chat, values_of
from hetero_mpi.data.record_shapes import (
    PAIRS,
    PREFERENCE,
    PROMPTS,
    SHAPES,
    SPELLINGS,
    SYSTEM,
    BadRecord,
    BadRecords,
    Compared,
    Shape,
    keys_named,
    unrecognised,
)
from hetero_mpi.data.source_files import matching_files
from hetero_mpi.util import units
from hetero_mpi.util.errors import UserError


@dataclass(frozen=True, slots=True)
class Record:
    """One conversation; its last message is an answer (the assistant's)."""

    messages: tuple[ChatMessage, ...]
    shape: Shape
    source: str
    """Where it stands, for messages to a person: ``data/a.jsonl, line 7``."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """Functions that the assistant may call, for the chat template."""
    desirable: bool = True
    """False: its answer is not (``label``)."""
    weight: float = 1.0
    """Factor of the weights of all its tokens in the loss."""
    is_dialogue: bool = False
    """It is one list of messages, which does not say where the answer begins."""

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
    preference: Compared | None = None
    """Pairs: records are chosen, rejected, chosen, ..."""
    unread: Mapping[str, int] = field(default_factory=dict)
    """Key that nobody reads -> number of records, or pairs, that have it; ``messages[].key``: of their messages."""

    def lines(self, template: str = "") -> list[str]:
        """Counts of what was found, for a person. ``template``: the chat template, which may read keys of messages."""
        shapes = Counter(record.shape for record in self.records)
        found = ", ".join(f"{count:,} {shape}" for shape, count in sorted(shapes.items()))
        total = len(self.records) // (2 if self.preference == "pairs" else 1)
        kind, of = ("pair", " of answers") if self.preference == "pairs" else ("record", "")
        lines = [f"{units.plural(total, kind)}{of} from {units.plural(self.files, 'file')} ({found})"]
        left_out = {
            "without an answer": self.unanswered,
            "without an answer to learn (train = false, weight = 0)": self.untrained,
        }
        for why, sources in left_out.items():
            if sources:
                lines.append(f"{len(sources):,} records {why} left out, such as {sources[0]}")
        read = set(re.findall(r"\w+", template))
        unread = [(key, count) for key, count in self.unread.items() if key.partition("[].")[2] not in read]
        if unread:
            (key, count), *further = sorted(unread, key=lambda entry: (-entry[1], entry[0]))
            named = [f"{count:,} of {total:,} {kind}s have `{key}`", *(f"{count:,} `{key}`" for key, count in further)]
            lines.append(f"{', '.join(named)}, which {'are' if further else 'is'} not learnt")
        return lines


def read_records(
    patterns: Sequence[str],
    key: str = "data.records",
    bad: BadRecords | None = None,
    preference: Compared | None = None,
    tell: Callable[[str], None] | None = None,
    keys: OwnKeys | None = None,
) -> Records:
    """Read all records of the files that match the glob patterns of the job's ``key`` (see :func:`matching_files`).

    Records with nothing to learn (an answer is missing or empty, or all say ``train: false``) are left out and listed; bad
    ones go to ``bad``. With ``preference`` a record that holds a chosen and a rejected answer becomes two, in this order. Raises
    UserError when nothing matches, when a file is empty or unreadable, when no record has an answer, and with all bad records (the
    first few by name) at once where there are more than may be skipped.
    """
    bad = BadRecords() if bad is None else bad
    records: list[Record] = []
    unanswered, untrained, unread = list[str](), list[str](), Counter[str]()
    paths = matching_files(key, patterns, tell)
    for source, value in (entry for path in paths for entry in values_of(path, keys)):
        try:
            if isinstance(value, BadRecord):
                raise value
            fields = _Fields(value)
            weight = weight_of(fields.get("weight", 1), "'weight'")
            if preference == "labels":
                found = _labelled(fields, source)
            else:
                found = _pair_of(fields, source) if preference else [_record(fields, source)]
            weights = {weight, *(m.trained for one in found if one for m in one.messages)}
            if preference and not weights <= {0, 1, None}:
                raise BadRecord(
                    "record.weight_in_preference",
                    "weights other than 0 and 1 are not computed where answers are compared",
                )
        except BadRecord as problem:
            bad.add(source, problem)
            continue
        except RecursionError:
            bad.add(source, BadRecord("record.nesting", "JSON nested too deeply to be a record"))
            continue
        answered = [replace(record, weight=weight) for record in found if record is not None]
        # Is there an answer to learn: any, or of a preference the last one?
        own = [record.messages[-1:] if preference else record.messages for record in answered]
        if len(answered) < len(found):
            unanswered.append(source)
        elif not all(record.weight for record in answered) or not all(
            any(one.trained for one in some if one.role == "assistant") for some in own
        ):
            untrained.append(source)
        else:
            records.extend(answered)
            unread.update(fields.unread())
    bad.check(key)
    if not records:
        silent = [*unanswered, *untrained] or [str(problem) for problem in bad.problems]
        such = f", such as {silent[0]}" if silent else ""
        raise UserError(
            "records.nothing_to_learn",
            f"{key} must hold records with an answer to learn; none of its {len(silent):,} records has one{such}.\n{SHAPES}",
        )
    return Records(tuple(records), len(paths), tuple(unanswered), tuple(untrained), preference, unread)


class _Fields:
    """The keys of a record that have a value, and which of them were read."""

    def __init__(self, value: Any) -> None:
        """Raises BadRecord: it is no object, and no list of messages."""
        if is_chat(value):
            value = {"messages" if "role" in value[0] else "conversations": value}
        if not isinstance(value, dict):
            raise BadRecord("record.not_an_object", f"must be a JSON object; it is {kind_name(value)}")
        # pandas writes NaN where a table has nothing.
        self.values = {key: inner for key, inner in value.items() if inner is not None and inner == inner}
        self.named = list(value)
        self._read: set[str] = set()
        self.unread_in_messages: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        return self.values.get(key, default)

    def text(self, key: str) -> str:
        return text_of(self.get(key, ""), key)

    def turns(self, key: str, role: Role) -> list[ChatMessage]:
        """Messages as they are, or a text of a role."""
        return turns_of(self.get(key, ""), role, key, self.unread_in_messages)

    def messages(self, key: str) -> list[ChatMessage]:
        return messages_of(json_of(self.get(key)), key, self.unread_in_messages)

    def tools(self) -> list[Mapping[str, Any]] | None:
        """Functions that the assistant may call: ``tools``, or ``functions``, as OpenAI's older files have it."""
        if "tools" in self.values:
            return tools_of(self.get("tools"), "tools")
        functions = tools_of(self.get("functions"), "functions")
        return None if functions is None else [{"type": "function", "function": one} for one in functions]

    def first(self, keys: Sequence[str]) -> str | None:
        """The first of the keys that the record has, empty or not."""
        return next((key for key in keys if key in self.values), next((key for key in keys if key in self.named), None))

    def unread(self) -> set[str]:
        own = {key for key, value in self.values.items() if key not in self._read and value not in ("", [], {})}
        return own | self.unread_in_messages


def _record(fields: _Fields, source: str) -> Record | None:
    """The record of these fields, or None when it has no answer. Raises BadRecord."""
    tools = fields.tools()
    for key in SPELLINGS:
        if key in fields.values:
            record = _conversation(_with_system(fields, fields.messages(key)), "chat", source, tools, key)
            return record and replace(record, is_dialogue=True)
    for shape, (questions, answers) in PAIRS.items():
        question, answer = fields.first(questions), fields.first(answers)
        if question in fields.values and question is not None and answer is not None:
            turns = [*_asked(fields, question), *fields.turns(answer, "assistant")]
            chat = any(isinstance(fields.values.get(key), list) for key in (question, answer))
            return _conversation(turns, "chat" if chat else shape, source, tools, answer)
    raise BadRecord("record.unknown_shape", unrecognised(fields.values))


def _pair_of(fields: _Fields, source: str) -> list[Record | None]:
    """The two records of a preference: its prompt with either answer. Raises BadRecord."""
    missing = [key for key in PREFERENCE if key not in fields.values]
    if missing:
        raise BadRecord(
            "record.preference_key_missing",
            f"{missing[0]!r} is missing for a preference; the record has {keys_named(fields.values)}",
        )
    question = next((key for key in (*PROMPTS, "instruction") if key in fields.values), None)
    tools, asked = fields.tools(), _asked(fields, question) if question is not None else []
    listed = question is not None and isinstance(fields.values[question], list)
    found = []
    for key in PREFERENCE:
        turns, text = fields.turns(key, "assistant"), isinstance(fields.values[key], str)
        if question is None and text:
            turns = _with_system(fields, _human_and_assistant(turns[0].content, key))
        elif turns and turns[0].role == "assistant":
            turns = [*(asked or _with_system(fields, [])), *turns]
        else:  # many files repeat the prompt in both conversations
            turns = _with_system(fields, turns)
            lost = [one for one in asked if one.content.strip() not in "".join(turn.content for turn in turns)]
            if lost:
                raise BadRecord(
                    "record.prompt_differs", f"{key!r} begins a conversation that does not hold what {question!r} says"
                )
        chat = listed or not text or question is None
        found.append(_conversation(turns, "chat" if chat else "prompt/completion", source, tools, key))
    prompts = [[(message.role, message.content) for message in one.messages[:-1]] for one in found if one is not None]
    if len(prompts) == 2 and prompts[0] != prompts[1]:
        raise BadRecord(
            "record.prompts_differ",
            "'chosen' and 'rejected' must be answers to one prompt: all their messages but the last are the same",
        )
    return found


def _labelled(fields: _Fields, source: str) -> list[Record | None]:
    """The record of these fields with its label; a pair is two. Raises BadRecord."""
    if all(key in fields.values for key in PREFERENCE):
        found = zip(_pair_of(fields, source), (True, False), strict=True)
        return [one and replace(one, desirable=desirable) for one, desirable in found]
    label = fields.get("label")
    if label not in (True, False):
        there = f"it is {label!r:.40}" if "label" in fields.values else f"the record has {keys_named(fields.values)}"
        raise BadRecord("record.label", f"'label' must be true (a desirable answer) or false; {there}")
    record = _record(fields, source)
    return [record and replace(record, desirable=bool(label))]


_SPEAKERS: dict[str, Role] = {"Human": "user", "Assistant": "assistant"}
_SPEAKER = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")


def _human_and_assistant(text: str, key: str) -> list[ChatMessage]:
    """The conversation in a text that names who speaks, as those of HH-RLHF do."""
    before, *rest = _SPEAKER.split(text)
    if before or rest[:1] != ["Human"] or rest[-2] != "Assistant":
        raise BadRecord(
            "record.prompt_missing",
            f"'prompt' is missing, and {key!r} is no conversation that holds it (messages, or a text with Human: and Assistant:)",
        )
    return [ChatMessage(_SPEAKERS[speaker], said.strip()) for speaker, said in zip(rest[::2], rest[1::2], strict=True)]


def _asked(fields: _Fields, question: str) -> list[ChatMessage]:
    """Messages that ask: the system's message, what was said before, and the question, with its input."""
    turns, value = fields.turns(question, "user"), fields.values[question]
    if isinstance(value, str):
        further = fields.text("input") if question == "instruction" else ""
        asked = f"{value}\n\n{further}" if further.strip() else value
        if not asked.strip():
            raise BadRecord("record.empty_prompt", f"{question!r} is empty: there is no prompt")
        turns = [ChatMessage("user", asked)]
    # An answer in a prompt is one of what is asked.
    turns = [replace(turn, trained=None) if turn.role == "assistant" else turn for turn in turns]
    return _with_system(fields, [*_history(fields), *turns])


_IN_TURN: tuple[Role, Role] = ("user", "assistant")


def _history(fields: _Fields) -> list[ChatMessage]:
    """The questions and answers before."""
    value = json_of(fields.get("history", []))
    if is_chat(value):
        return messages_of(value, "history", fields.unread_in_messages)
    if not isinstance(value, list) or not all(isinstance(one, list) and len(one) == 2 for one in value):
        raise BadRecord("record.history", f"'history' must be a list of [question, answer]; it is {kind_name(value)}")
    return [
        ChatMessage(role, text_of(said, f"history[{index}]"))
        for index, pair in enumerate(value)
        for role, said in zip(_IN_TURN, pair, strict=True)
    ]


def _with_system(fields: _Fields, messages: list[ChatMessage]) -> list[ChatMessage]:
    """The messages behind that of the record's own key for the system."""
    said = {text.strip(): text for key in SYSTEM if (text := fields.text(key)).strip()}
    if messages[:1] and messages[0].role == "system":
        said.setdefault(messages[0].content.strip(), messages[0].content)
        if len(said) == 1:
            return messages
    if len(said) > 1:
        raise BadRecord(
            "record.two_systems", "the record has two system messages that are not the same: leave one of them"
        )
    return [*(ChatMessage("system", text) for text in said.values()), *messages]


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
        raise BadRecord(
            "record.first_role", f"{key}[0] is {what}: a conversation must begin with a user's (or system) message"
        )
    late = [index for index, message in enumerate(messages) if message.role == "system" and index]
    if late:
        raise BadRecord(
            "record.late_system", f"{key}[{late[0]}] is a system message: only the first message may be one"
        )
    return Record(tuple(messages), shape, source, tools)
