"""Read instruction records from files as conversations; record shapes may be mixed freely.

Every shape (``record_shapes.SHAPES``) becomes a list of messages, so the rest of the program handles conversations only. A chat
ends with its last answer; an alpaca record's user message is the instruction, an empty line and the input. If a record has
the keys of several shapes, chat takes precedence over alpaca, and alpaca over prompt/completion. Unused keys are counted.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hetero_mpi.data.batch import IGNORED
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
    """A conversation whose last message is an answer of the assistant."""

    messages: tuple[ChatMessage, ...]
    shape: Shape
    source: str
    """Position in the data for messages, such as ``data/a.jsonl, line 7``."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """Functions that the assistant may call, for the chat template."""
    desirable: bool = True
    """Whether the answer is desirable (``label``)."""
    weight: float = 1.0
    """Factor by which the loss weights of all tokens in the record are multiplied."""
    is_dialogue: bool = False
    """Whether the record is a single list of messages, without a separate prompt."""
    ids: tuple[int, ...] = ()
    """Token ids of a tokenised record, which has no messages."""
    targets: tuple[bool, ...] = ()
    """Whether each of ``ids`` is a target."""

    def needs_tools(self) -> bool:
        return bool(self.tools) or any(message.role == "tool" or message.calls() for message in self.messages)


@dataclass(frozen=True)
class Records:
    """The records of all files, ordered by path and line. All are held in memory."""

    records: tuple[Record, ...]
    files: int
    unanswered: tuple[str, ...]
    """Sources of records that were dropped because an answer is missing or empty."""
    untrained: tuple[str, ...] = ()
    """Sources of records that were dropped because no answer has a loss weight above 0."""
    preference: Compared | None = None
    """Form of preference records. Pairs are stored as alternating records: chosen, rejected, chosen, ..."""
    unread: Mapping[str, int] = field(default_factory=dict)
    """Maps each unused key (``messages[].key`` for a key of messages) to the number of records or pairs that have it."""

    def lines(self, template: str = "") -> list[str]:
        """Summarise the records for the user. ``template``: source of the chat template, which may use keys of messages."""
        shapes = Counter(record.shape for record in self.records)
        names = {"tokens": "already tokenised"}
        shape_counts = ", ".join(f"{count:,} {names.get(shape, shape)}" for shape, count in sorted(shapes.items()))
        total = len(self.records) // (2 if self.preference == "pairs" else 1)
        kind, of = ("pair", " of answers") if self.preference == "pairs" else ("record", "")
        lines = [f"{units.plural(total, kind)}{of} from {units.plural(self.files, 'file')} ({shape_counts})"]
        untrained = "without an answer to train on (train = false, weight = 0)"
        for why, sources in (("without an answer", self.unanswered), (untrained, self.untrained)):
            if sources:
                lines.append(f"{units.plural(len(sources), 'record')} {why} dropped, such as {sources[0]}")
        read = set(re.findall(r"\w+", template))
        unread = [(key, count) for key, count in self.unread.items() if key.partition("[].")[2] not in read]
        if unread:
            (key, count), *further = sorted(unread, key=lambda entry: (-entry[1], entry[0]))
            named = [f"{count:,} of {total:,} {kind}s have `{key}`", *(f"{count:,} `{key}`" for key, count in further)]
            lines.append(f"{', '.join(named)}, which {'are' if further else 'is'} not used")
        return lines


def read_records(
    patterns: Sequence[str],
    key: str = "data.records",
    bad: BadRecords | None = None,
    preference: Compared | None = None,
    tell: Callable[[str], None] | None = None,
    keys: OwnKeys | None = None,
) -> Records:
    """Read all records of the files that match the glob patterns of the job's ``key`` (see ``matching_files``).

    Records without a trainable answer are dropped and listed; bad records are added to ``bad``. In preference training, a record
    with a chosen and a rejected answer becomes two records, in this order. Raises UserError if no file matches, if a file is
    empty or unreadable, if no record has an answer to train on, or if more records are bad than may be skipped.
    """
    bad = BadRecords() if bad is None else bad
    records: list[Record] = []
    unanswered, untrained, unread = list[str](), list[str](), Counter[str]()
    paths = matching_files(key, patterns, tell)
    for source, value in (entry for path in paths for entry in values_of(path, keys)):
        try:
            if isinstance(value, BadRecord):
                raise value
            fields = _RecordFields(value)
            weight = weight_of(fields.get("weight", 1), "'weight'")
            if preference == "labels":
                parsed = _labelled_records(fields, source)
            else:
                parsed = _preference_pair(fields, source) if preference else [_record(fields, source)]
            weights = {weight, *(m.trained for message in parsed if message for m in message.messages)}
            if preference and not weights <= {0, 1, None}:
                raise BadRecord("record.weight_in_preference", "preference training supports only the weights 0 and 1")
        except BadRecord as problem:
            bad.add(source, problem)
            continue
        except RecursionError:
            bad.add(source, BadRecord("record.nesting", "the JSON is nested too deeply for a record"))
            continue
        answered = [replace(record, weight=weight) for record in parsed if record is not None]
        # A record needs a trainable answer: any answer, or the last one in preference training.
        trainable = [record.messages[-1:] if preference else record.messages for record in answered]
        if len(answered) < len(parsed):
            unanswered.append(source)
        elif not all(record.weight for record in answered) or not all(
            fields.get("input_ids") or any(message.trained for message in messages if message.role == "assistant")
            for messages in trainable
        ):
            untrained.append(source)
        else:
            records.extend(answered)
            unread.update(fields.unread())
    bad.check(key)
    if not records:
        dropped = [*unanswered, *untrained] or [str(problem) for problem in bad.problems]
        example = f", such as {dropped[0]}" if dropped else ""
        raise UserError(
            "records.nothing_to_learn",
            f"{key} must hold records with an answer to train on; none of its {len(dropped):,} records has one{example}.\n{SHAPES}",
        )
    return Records(tuple(records), len(paths), tuple(unanswered), tuple(untrained), preference, unread)


class _RecordFields:
    """The non-null fields of a record; records the keys that are read."""

    def __init__(self, value: Any) -> None:
        """Wrap a record. Raises BadRecord unless ``value`` is an object or a list of messages."""
        if is_chat(value):
            value = {"messages" if "role" in value[0] else "conversations": value}
        if not isinstance(value, dict):
            raise BadRecord("record.not_an_object", f"must be a JSON object; it is {kind_name(value)}")
        # pandas writes NaN for missing values.
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
        """Return the messages under ``key``, or its string as one message with the given role."""
        return turns_of(self.get(key, ""), role, key, self.unread_in_messages)

    def messages(self, key: str) -> list[ChatMessage]:
        return messages_of(json_of(self.get(key)), key, self.unread_in_messages)

    def tools(self) -> list[Mapping[str, Any]] | None:
        """Return the functions that the assistant may call: ``tools``, or ``functions`` in older OpenAI files."""
        if "tools" in self.values:
            return tools_of(self.get("tools"), "tools")
        functions = tools_of(self.get("functions"), "functions")
        return None if functions is None else [{"type": "function", "function": function} for function in functions]

    def first(self, keys: Sequence[str]) -> str | None:
        """Return the first of ``keys`` that the record has, preferring keys with a value; None if it has none of them."""
        return next((key for key in keys if key in self.values), next((key for key in keys if key in self.named), None))

    def unread(self) -> set[str]:
        unread_keys = {key for key, value in self.values.items() if key not in self._read and value not in ("", [], {})}
        return unread_keys | self.unread_in_messages


def _record(fields: _RecordFields, source: str) -> Record | None:
    """Parse a record of any shape; None if an answer is missing. Raises BadRecord."""
    if "input_ids" in fields.values:
        return _tokenised(fields, source)
    tools = fields.tools()
    for key in SPELLINGS:
        if key in fields.values:
            record = _conversation(_with_system(fields, fields.messages(key)), "chat", source, tools, key)
            return record and replace(record, is_dialogue=True)
    for shape, (questions, answers) in PAIRS.items():
        question, answer = fields.first(questions), fields.first(answers)
        if question in fields.values and question is not None and answer is not None:
            prompt, turns = _prompt_messages(fields, question), fields.turns(answer, "assistant")
            turns = _repeating(fields, prompt, turns) or [*prompt, *turns]
            is_text = all(isinstance(fields.values.get(key, ""), str) for key in (question, answer))
            return _conversation(turns, shape if is_text else "chat", source, tools, answer)
    raise BadRecord("record.unknown_shape", unrecognised(fields.values))


def _tokenised(fields: _RecordFields, source: str) -> Record | None:
    """Parse a record of token ids; None if no token is a target."""
    ids = fields.get("input_ids")
    labels = fields.get("labels", ids)
    lists = isinstance(ids, list) and isinstance(labels, list) and len(ids) == len(labels)
    if not lists or not all(type(i) is int and label in (i, IGNORED) for i, label in zip(ids, labels, strict=True)):
        raise BadRecord("record.tokens", "'input_ids' must list token ids, 'labels' the same ids or -100 (no target)")
    targets = tuple(label != IGNORED for label in labels)
    return Record((), "tokens", source, ids=tuple(ids), targets=targets) if any(targets[1:]) else None


def _preference_pair(fields: _RecordFields, source: str) -> list[Record | None]:
    """Parse a preference pair into two records: the prompt with the chosen and the rejected answer. Raises BadRecord."""
    missing = [key for key in PREFERENCE if key not in fields.values]
    if missing:
        raise BadRecord(
            "record.preference_key_missing",
            f"a preference needs {missing[0]!r}; the record has {keys_named(fields.values)}",
        )
    question = next((key for key in (*PROMPTS, "instruction") if key in fields.values), None)
    tools, prompt = fields.tools(), _prompt_messages(fields, question) if question is not None else []
    pair = []
    for key in PREFERENCE:
        turns, text = fields.turns(key, "assistant"), isinstance(fields.values[key], str)
        if question is None and text:
            turns = _parse_dialogue(turns[0].content, key)
        conversation = _repeating(fields, prompt, turns)
        if conversation is None and turns and turns[0].role != "assistant":
            raise BadRecord("record.prompt_differs", f"{key!r} must be an answer to {question!r}, or contain it")
        turns = conversation or [*(prompt or _with_system(fields, [])), *turns]
        is_text = text and isinstance(fields.values.get(question), str)
        pair.append(_conversation(turns, "prompt/completion" if is_text else "chat", source, tools, key))
    prompts = [[(turn.role, turn.content) for turn in entry.messages[:-1]] for entry in pair if entry is not None]
    if len(prompts) == 2 and prompts[0] != prompts[1]:
        raise BadRecord(
            "record.prompts_differ",
            "'chosen' and 'rejected' must be answers to one prompt: all messages before the last must be equal",
        )
    return pair


def _labelled_records(fields: _RecordFields, source: str) -> list[Record | None]:
    """Parse a labelled record, or a preference pair as two labelled records. Raises BadRecord."""
    if all(key in fields.values for key in PREFERENCE):
        labelled_pair = zip(_preference_pair(fields, source), (True, False), strict=True)
        return [answer and replace(answer, desirable=desirable) for answer, desirable in labelled_pair]
    label = fields.get("label")
    if label not in (True, False):
        actual = f"it is {label!r:.40}" if "label" in fields.values else f"the record has {keys_named(fields.values)}"
        raise BadRecord("record.label", f"'label' must be true (a desirable answer) or false; {actual}")
    record = _record(fields, source)
    return [record and replace(record, desirable=bool(label))]


_SPEAKERS: dict[str, Role] = {"Human": "user", "Assistant": "assistant"}
_SPEAKER = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")


def _parse_dialogue(text: str, key: str) -> list[ChatMessage]:
    """Parse a conversation from a string with speaker names, as in HH-RLHF. Raises BadRecord."""
    before, *rest = _SPEAKER.split(text)
    if before or rest[:1] != ["Human"] or rest[-2] != "Assistant":
        raise BadRecord(
            "record.prompt_missing",
            f"'prompt' is missing, and {key!r} is not a conversation with a prompt (messages, or text with Human: and "
            f"Assistant:)",
        )
    return [ChatMessage(_SPEAKERS[speaker], turn.strip()) for speaker, turn in zip(rest[::2], rest[1::2], strict=True)]


def _prompt_messages(fields: _RecordFields, question: str) -> list[ChatMessage]:
    """Assemble the prompt's messages: system message, history, and the question with its input. Raises BadRecord."""
    turns, value = fields.turns(question, "user"), fields.values[question]
    if isinstance(value, str):
        extra_input = fields.text("input") if question == "instruction" else ""
        content = f"{value}\n\n{extra_input}" if extra_input.strip() else value
        if not content.strip():
            raise BadRecord("record.empty_prompt", f"{question!r} is empty: there is no prompt")
        turns = [ChatMessage("user", content)]
    # An answer inside a prompt is part of the prompt.
    turns = [replace(turn, trained=None) if turn.role == "assistant" else turn for turn in turns]
    return _with_system(fields, [*_history(fields), *turns])


_HISTORY_ROLES: tuple[Role, Role] = ("user", "assistant")


def _history(fields: _RecordFields) -> list[ChatMessage]:
    """Parse the previous turns of the conversation (``history``). Raises BadRecord."""
    value = json_of(fields.get("history", []))
    if is_chat(value):
        return messages_of(value, "history", fields.unread_in_messages)
    if not isinstance(value, list) or not all(isinstance(exchange, list) and len(exchange) == 2 for exchange in value):
        raise BadRecord("record.history", f"'history' must list [question, answer] pairs, not {kind_name(value)}")
    return [
        ChatMessage(role, text_of(content, f"history[{index}]"))
        for index, pair in enumerate(value)
        for role, content in zip(_HISTORY_ROLES, pair, strict=True)
    ]


def _with_system(fields: _RecordFields, messages: list[ChatMessage]) -> list[ChatMessage]:
    """Prepend the system message of the record's fields. Raises BadRecord if there are two different ones."""
    system_texts = {text.strip(): text for key in SYSTEM if (text := fields.text(key)).strip()}
    if messages[:1] and messages[0].role == "system":
        system_texts.setdefault(messages[0].content.strip(), messages[0].content)
        if len(system_texts) == 1:
            return messages
    if len(system_texts) > 1:
        raise BadRecord("record.two_systems", "the record has two different system messages: remove one of them")
    return [*(ChatMessage("system", text) for text in system_texts.values()), *messages]


def _repeating(fields: _RecordFields, prompt: list[ChatMessage], turns: list[ChatMessage]) -> list[ChatMessage] | None:
    """Return the conversation if ``turns`` repeat the prompt, as in many files; None if they lack it. Raises BadRecord."""
    if not turns or turns[0].role == "assistant":
        return None
    turns = _with_system(fields, turns)
    text = "".join(turn.content for turn in turns)
    return turns if all(entry.content.strip() in text for entry in prompt) else None


def _conversation(
    messages: list[ChatMessage], shape: Shape, source: str, tools: Sequence[Mapping[str, Any]] | None, key: str
) -> Record | None:
    # Messages after the last answer have no answer.
    while messages and messages[-1].role != "assistant":
        messages.pop()
    answers = [message for message in messages if message.role == "assistant"]
    if not messages or not all(message.content.strip() or message.calls() for message in answers):
        return None
    if messages[0].role in ("assistant", "tool"):
        what = "an answer" if messages[0].role == "assistant" else "a tool's result"
        raise BadRecord(
            "record.first_role", f"{key}[0] is {what}: a conversation must begin with a user or system message"
        )
    late_indices = [index for index, message in enumerate(messages) if message.role == "system" and index]
    if late_indices:
        raise BadRecord(
            "record.late_system", f"{key}[{late_indices[0]}] is a system message: only the first message may be one"
        )
    return Record(tuple(messages), shape, source, tools)
