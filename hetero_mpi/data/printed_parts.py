"""Find parts of a conversation that are missing from its rendered text, since chat templates omit unknown fields.

The check is a substring search that runs for every record; it detects missing parts, but not misplaced ones.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hetero_mpi.data.messages import REASONING, ChatMessage

THOUGHT = re.compile(r"</?(?:think|thinking|thought|reasoning|seed:think)>|\[/?THINK\]|<\|(?:START|END)_THINKING\|>")
"""Matches the tags that open or close a reasoning block."""
Conversation = Sequence[Mapping[str, Any]]
"""Messages in the form in which they are passed to a template."""


def unprinted(
    text: str, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] | None
) -> tuple[str | None, bool]:
    """Check that a rendered conversation contains all parts of its messages and tools.

    Returns a description of the first missing part (None if complete) and whether the reasoning of earlier answers is omitted.
    Messages must appear in order, except system messages, which some templates print next to the last question. Differences in
    surrounding whitespace and JSON formatting are ignored.
    """
    for tool in tools or ():
        missing_leaf = next((leaf for leaf in _tool_texts(tool) if _find_end(text, leaf, 0) < 0), None)
        if missing_leaf is not None:
            return f"a part of the tools ({_excerpt(missing_leaf)})", False
    begin, forgotten = 0, False
    thoughts: list[tuple[int, Any]] = []  # of the previous answer, with the position to search from
    for number, message in enumerate(messages, start=1):
        end, last = begin, number == len(messages)
        start = 0 if message.role == "system" else begin
        for what, part in ((what, part) for what, part, thought in _parts(message) if last or not thought):
            if (part_end := _find_end(text, part, start)) < 0:
                return f"{what}, in message {number} of {len(messages)} ({_excerpt(part)})", forgotten
            end = max(end, part_end)
        # A match further on is the same reasoning in another answer.
        forgotten |= any(_find_end(text, part, position, end) < 0 for position, part in thoughts)
        thoughts = [(begin, part) for _, part, thought in _parts(message) if thought]
        begin = begin if message.role == "system" else end
    return None, forgotten


def spoken(message: ChatMessage) -> str:
    """Return the text of an answer after its reasoning."""
    return THOUGHT.split(message.content)[-1].strip()


def _parts(message: ChatMessage) -> Iterator[tuple[str, Any, bool]]:
    """Yield every part of a message as (description, string or JSON value, whether it is reasoning)."""
    original = message.original or {}
    content = original.get("content")
    texts = [part["text"] for part in content] if isinstance(content, list) else [message.content]
    for text in texts:
        *thoughts, answer = THOUGHT.split(text) if message.role == "assistant" else [text]
        yield from (("the reasoning", thought, True) for thought in thoughts)
        yield f"the {message.role}'s text" if message.role != "tool" else "the tool's result", answer, False
    yield from (("the reasoning", original[key], True) for key in REASONING if key in original)
    for call in message.calls():
        yield from (
            (f"the call to {call['name']!r}", leaf, False) for leaf in (call["name"], *_leaves(call.get("arguments")))
        )


def _tool_texts(tool: Mapping[str, Any]) -> Iterator[Any]:
    """Yield a tool's name, description, and parameter names."""
    function = tool.get("function", tool)
    if not isinstance(function, Mapping):
        return
    yield from (function[key] for key in ("name", "description") if isinstance(function.get(key), str))
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    yield from properties if isinstance(properties, Mapping) else ()


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the keys, strings and numbers of a JSON value, which a template may print separately."""
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


def _find_end(text: str, part: Any, begin: int, stop: int | None = None) -> int:
    """Return the end of a part in ``text[begin:stop]``, or -1 if it is absent. The window grows, so nearby matches are cheap."""
    stop = len(text) if stop is None else stop
    forms = tuple(dict.fromkeys(_printed_forms(part)))
    window_end = begin
    while True:
        window_end = min(stop, window_end + (window_end - begin) + len(forms[0]) + 1000)
        for form in forms:
            if (position := text.find(form, begin, window_end)) >= 0:
                return position + len(form)
        if window_end == stop:
            break
    if isinstance(part, str) and part.lstrip()[:1] in ("{", "["):  # JSON that was parsed and serialised again
        leaves = list(_leaves(part))
        if leaves != [part]:
            ends = [_find_end(text, leaf, begin, stop) for leaf in leaves]
            return -1 if -1 in ends else max(ends, default=begin)
    return -1


def _printed_forms(part: Any) -> Iterator[str]:
    """Yield the forms in which a template may print a string, number or boolean."""
    if isinstance(part, str):
        yield part.strip()
        yield json.dumps(part.strip(), ensure_ascii=False)[1:-1]
        yield json.dumps(part.strip())[1:-1]
    else:
        yield json.dumps(part, default=str)
        yield str(part)


def _excerpt(part: Any) -> str:
    words = " ".join(str(part).split())
    return repr(words if len(words) <= 40 else words[:40] + "...")
