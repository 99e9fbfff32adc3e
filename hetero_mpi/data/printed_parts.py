"""The parts of a conversation that its text lacks, as a chat template leaves out what it does not know.

A search for parts of texts, made for every record: it finds what is missing, not what stands in a wrong place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hetero_mpi.data.messages import REASONING, ChatMessage

THOUGHT = re.compile(r"</?(?:think|thinking|thought|reasoning|seed:think)>|\[/?THINK\]|<\|(?:START|END)_THINKING\|>")
"""Begins or ends a thought inside a text."""
Conversation = Sequence[Mapping[str, Any]]
"""The messages as a template gets them."""


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
