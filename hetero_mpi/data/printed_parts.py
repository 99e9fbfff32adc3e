"""Where the parts of a conversation stand in its text: what a chat template leaves out, as it does not know it, and where messages
and the edges of answers are.

``unprinted`` is a search for parts of texts, made for every record: it finds what is missing, not what stands in a wrong place.
``Anchors`` come from one more rendering, of the conversation with a mark in front of every text of every message: without the marks
it must be the same text. What a template prints between an edge of an answer and the next mark it prints again for messages of the
same kind; where the same stands there, the edge is the same.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from hetero_mpi.data.messages import REASONING, ChatMessage
from hetero_mpi.data.record_files import BadRecord

THOUGHT = re.compile(r"</?(?:think|thinking|thought|reasoning|seed:think)>|\[/?THINK\]|<\|(?:START|END)_THINKING\|>")
"""Begins or ends a thought inside a text."""
Conversation = Sequence[Mapping[str, Any]]
"""The messages as a template gets them."""

_LEAD = re.compile(rf"(?:^|(?:{THOUGHT.pattern}))\s*(?=\S)(?!{THOUGHT.pattern})")
"""A beginning that a template may leave out in front of a text: its first spaces, the sign before or behind a thought."""
_IDS = ("id", "tool_call_id")
_UNMARKED = ("role", "type", *_IDS)
"""Keys with words that a template knows, or whose length it checks."""


def unprinted(
    text: str, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] | None
) -> tuple[str | None, bool]:
    """(what the text lacks, in words; are thoughts of earlier answers left out). None: it lacks nothing else.

    Messages stand in their order, but for the system's, which some templates print beside the last question. Spaces around a
    text, and how JSON is written, are the template's.
    """
    for tool in tools or ():
        lost = next((leaf for leaf in _of_tool(tool) if _end_of(text, leaf, 0) < 0), None)
        if lost is not None:
            return f"what the tools hold ({_shown(lost)})", False
    begin, forgotten = 0, False
    thoughts: list[tuple[int, Any]] = []  # of the answer before, with where to look for them
    for number, message in enumerate(messages, start=1):
        end, last = begin, number == len(messages)
        start = 0 if message.role == "system" else begin
        for what, part in ((what, part) for what, part, thought in _parts(message) if last or not thought):
            if (found := _end_of(text, part, start)) < 0:
                return f"{what}, in message {number} of {len(messages)} ({_shown(part)})", forgotten
            end = max(end, found)
        # What is found further behind is the same thought of another answer.
        forgotten |= any(_end_of(text, part, place, end) < 0 for place, part in thoughts)
        thoughts = [(begin, part) for _, part, thought in _parts(message) if thought]
        begin = begin if message.role == "system" else end
    return None, forgotten


def spoken(message: ChatMessage) -> str:
    """The text of an answer behind its thoughts."""
    return THOUGHT.split(message.content)[-1].strip()


def _parts(message: ChatMessage) -> Iterator[tuple[str, Any, bool]]:
    """(what it is, a text or JSON value, is it a thought) of all that a message holds."""
    given = message.given or {}
    content = given.get("content")
    texts = [part["text"] for part in content] if isinstance(content, list) else [message.content]
    for text in texts:
        *thoughts, said = THOUGHT.split(text) if message.role == "assistant" else [text]
        yield from (("the thought", thought, True) for thought in thoughts)
        yield f"what the {message.role} says" if message.role != "tool" else "what the tool gave", said, False
    yield from (("the thought", given[key], True) for key in REASONING if key in given)
    for call in message.calls():
        yield from (
            (f"the call of {call['name']!r}", leaf, False) for leaf in (call["name"], *_leaves(call.get("arguments")))
        )


def _of_tool(tool: Mapping[str, Any]) -> Iterator[Any]:
    """Its name, what it does, and the names of what it takes."""
    function = tool.get("function", tool)
    if not isinstance(function, Mapping):
        return
    yield from (function[key] for key in ("name", "description") if isinstance(function.get(key), str))
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    yield from properties if isinstance(properties, Mapping) else ()


def _leaves(value: Any) -> Iterator[Any]:
    """The keys, texts and numbers of a JSON value, which may stand in a text."""
    if isinstance(value, str):
        try:
            inner = json.loads(value)
        except (ValueError, RecursionError):
            inner = None
        if not isinstance(inner, dict | list):
            yield value
            return
        value = inner
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield key
            yield from _leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner)
    elif value is not None:
        yield value


def _end_of(text: str, part: Any, begin: int, behind: int | None = None) -> int:
    """Where a part of a record ends in text[begin:behind]; -1: it is not there. The nearest counts, so that little is searched."""
    behind = len(text) if behind is None else behind
    forms = tuple(dict.fromkeys(_forms(part)))
    near = begin
    while True:
        near = min(behind, near + (near - begin) + len(forms[0]) + 1000)
        for form in forms:
            if (place := text.find(form, begin, near)) >= 0:
                return place + len(form)
        if near == behind:
            break
    if isinstance(part, str) and part.lstrip()[:1] in ("{", "["):  # JSON that was read and written again
        leaves = list(_leaves(part))
        if leaves != [part]:
            ends = [_end_of(text, leaf, begin, behind) for leaf in leaves]
            return -1 if -1 in ends else max(ends, default=begin)
    return -1


def _forms(part: Any) -> Iterator[str]:
    """How a template may write a text, number or truth value."""
    if isinstance(part, str):
        yield part.strip()
        yield json.dumps(part.strip(), ensure_ascii=False)[1:-1]
        yield json.dumps(part.strip())[1:-1]
    else:
        yield json.dumps(part, default=str)
        yield str(part)


def _shown(part: Any) -> str:
    words = " ".join(str(part).split())
    return repr(words if len(words) <= 40 else words[:40] + "...")


class Anchors:
    """The first text of each message as printed, and the edges learnt beside it."""

    def __init__(
        self, text: str, conversation: Conversation, first: int, render: Callable[[Conversation, bool], str]
    ) -> None:
        """``first``: the first answer. ``render``: as ``text`` was made, or (True) up to where the next answer begins."""
        self._text = text
        self._kinds = [
            (turn.get("role"), *sorted(key for key, value in turn.items() if value)) for turn in conversation
        ]
        self._ids = [_ids(turn) for turn in conversation]
        self._known: defaultdict[Hashable, set[tuple[str, str]]] = defaultdict(set)
        self._header, self._places = "", dict[int, tuple[int, Hashable]]()
        # A template may refuse what nobody else asks it for.
        with suppress(BadRecord):
            before, question = (render(conversation[:first], asking) for asking in (False, True))
            self._header = question.removeprefix(before) if question.startswith(before) else ""
            self._places = _places(text, conversation, render)

    def answer(self, index: int) -> tuple[int, int] | None:
        """[first, last) of a message's answer, with the spaces behind it. None: nothing like it was learnt, or several things."""
        last = len(self._text) if index == len(self._kinds) - 1 else self._edge(index + 1, False)
        first = self._edge(index, True)
        return None if first is None or last is None else (first, last)

    def learn(self, index: int, first: int, last: int, alike: bool, closing: str) -> None:
        """The answer of a message is [``first``, ``last``) of the text. ``alike``: the text begins as what asks for it.
        ``closing``: what the template closes it with.
        """
        asked = (self._header[:end] for end in range(len(self._header), -1, -1))
        left = next(part for part in asked if self._text.endswith(part, 0, first))
        if left or alike:
            self._learn(index, True, first, left)
        # At least a character in front of a word: the 3 of "3 user:" is no edge of "13 user:".
        word = self._text[last : last + 1].isalnum()
        self._learn(index + 1, False, last, closing or self._text[last - 1 : last] * word)

    def _edge(self, index: int, asked: bool) -> int | None:
        if index not in self._places:
            return None
        place, _ = self._places[index]
        found = set[int]()
        for left, right in self._known[self._key(index, asked)]:
            for number, one in enumerate(self._ids[index]):
                left, right = left.replace(f"\0{number}", one), right.replace(f"\0{number}", one)
            if self._text.endswith(left + right, 0, place):
                found.add(place - len(right))
        return found.pop() if len(found) == 1 else None

    def _learn(self, index: int, asked: bool, edge: int, left: str) -> None:
        if index not in self._places or edge > self._places[index][0]:
            return
        right = self._text[edge : self._places[index][0]]
        for number, one in enumerate(self._ids[index]):
            left, right = left.replace(one, f"\0{number}"), right.replace(one, f"\0{number}")
        self._known[self._key(index, asked)].add((left, right))

    def _key(self, index: int, asked: bool) -> Hashable:
        return asked, self._kinds[max(0, index - 1)], self._kinds[index], self._places[index][1]


def _ids(turn: Mapping[str, Any]) -> list[str]:
    """The names of a call, which a template may print in front of the message's first text."""
    calls = [call for call in turn.get("tool_calls") or () if isinstance(call, Mapping)]
    return [one for some in (turn, *calls) for key in _IDS if isinstance(one := some.get(key), str) and one]


def _places(
    text: str, conversation: Conversation, render: Callable[[Conversation, bool], str]
) -> dict[int, tuple[int, Hashable]]:
    """Message -> (where its first text begins, which one it is and what stood in front of it); none where marks change the text or
    messages stand in another order. Systems' are left out: some templates print them beside the last question.
    """
    sign = "qzxv"  # no end of it is a beginning of it, so that it is not found across what is in front of it
    while sign in text:
        sign += "z"
    marks: list[tuple[int, Hashable]] = []

    def mark(index: int, key: str, lead: str) -> str:
        marks.append((index, (key, lead)))
        return f"{lead}{sign}{len(marks) - 1}x"

    def marked(value: Any, index: int, key: str) -> Any:
        if isinstance(value, Mapping):
            return {name: marked(inner, index, name) for name, inner in value.items()}
        if isinstance(value, list):
            return [marked(inner, index, key) for inner in value]
        if not isinstance(value, str) or key in _UNMARKED:
            return value
        return _LEAD.sub(lambda found: mark(index, key, found[0]), value)

    turns: list[Mapping[str, Any]] = []
    for index, turn in enumerate(conversation):
        content = turn.get("content")
        turns.append(turn if turn.get("role") == "system" else marked(turn, index, ""))
        if (
            isinstance(content, str)
            and not content.strip()
            and not turn.get("tool_calls")
            and turn.get("role") != "system"
        ):
            turns[-1] = {**turns[-1], "content": mark(index, "content", content)}
    pieces = re.split(rf"{sign}(\d+)x", render(turns, False))
    if "".join(pieces[::2]) != text:
        return {}
    place, places = 0, dict[int, tuple[int, Hashable]]()
    for piece, number in zip(pieces[::2], pieces[1::2], strict=False):
        place += len(piece)
        index, what = marks[int(number)]
        places.setdefault(index, (place, what))
    return places if list(places) == sorted(places) else {}
