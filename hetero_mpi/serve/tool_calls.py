"""Calls of tools in the text of an answer, in the forms that models write. A text that is none of them is left as it is."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

_DECODER = json.JSONDecoder()
_NOTHING = re.compile(r"\s*")
_END = re.compile(r"\s*</tool_call>\s*|\s*")
_SEPARATOR = re.compile(r"\s*;?\s*")


def opened(text: str) -> Any:
    """The JSON value of a text. Raises ValueError: it is none, is nested too deeply, or has NaN or half of a surrogate pair."""
    value, end = _value_at(text, 0)
    if text[end:].strip():
        raise ValueError("more than one value")
    return value


def _value_at(text: str, place: int) -> tuple[Any, int]:
    """The JSON value that begins at ``place``, and where it ends. Raises ValueError: as ``opened``."""
    blanks = _NOTHING.match(text, place)
    assert blanks is not None
    try:
        value, end = _DECODER.raw_decode(text, blanks.end())
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        raise ValueError("half of a surrogate pair is no character") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return value, end


@dataclass(frozen=True)
class CallForm:
    """How a family writes calls: each is a JSON object with ``name``, and the arguments under a key."""

    name: str
    marker: str
    """The text with which calls begin; "{" only at the beginning of the answer."""
    key: str

    def begin(self, text: str) -> int:
        """Where calls begin, or may begin, in an answer so far: what is before it is text."""
        if self.marker == "{":
            return 0 if text.lstrip()[:1] in ("", "{") else len(text)
        if (found := text.find(self.marker)) >= 0:
            return found
        lengths = range(min(len(self.marker) - 1, len(text)), 0, -1)
        return len(text) - next((n for n in lengths if self.marker.startswith(text[-n:])), 0)

    def split(self, text: str, tools: Collection[str]) -> tuple[str, list[Mapping[str, Any]]]:
        """(text outside of the calls, the calls: ``name`` and ``arguments``) of a whole answer.

        A call is whole, and of one of ``tools``. What is none stays text, and hides no other call. The text begins with what stands
        before ``begin``.
        """
        outside, calls, end = "", list[Mapping[str, Any]](), 0
        place = self.begin(text)
        while 0 <= place < len(text):
            found, after = self._calls_at(text, place, tools)
            if found:
                outside, end, calls = outside + text[end:place], after, calls + found
            place = text.find(self.marker, after)
        return (outside + text[end:], calls) if calls else (text, [])

    def _calls_at(self, text: str, place: int, tools: Collection[str]) -> tuple[list[Mapping[str, Any]], int]:
        """(the calls that begin at ``place``, where to look for more); none: what stands there is text."""
        bare = self.marker == "{"
        try:
            value, end = _value_at(text, place if bare else place + len(self.marker))
            calls = [self._call(one, tools) for one in (value if isinstance(value, list) else [value])]
        except ValueError:
            return [], len(text) if bare else place + 1
        closing = (_SEPARATOR if bare else _END).match(text, end)
        assert closing is not None
        return calls, closing.end()

    def _call(self, value: Any, tools: Collection[str]) -> Mapping[str, Any]:
        """The call that a JSON value is; a tool without arguments may be called without the key. Raises ValueError: it is none."""
        if not isinstance(value, dict) or value.get("name") not in tools:
            raise ValueError("no call")
        arguments = next((value[key] for key in (self.key, "arguments", "parameters") if key in value), None)
        if isinstance(arguments, str):
            arguments = opened(arguments)
        if arguments is not None and not isinstance(arguments, dict):
            raise ValueError("arguments are an object")
        return {"name": value["name"], "arguments": arguments or {}}


HERMES = CallForm("hermes", "<tool_call>", "arguments")
MISTRAL = CallForm("mistral", "[TOOL_CALLS]", "arguments")
LLAMA = CallForm("llama3", "{", "parameters")


def form_of(template: str) -> CallForm | None:
    """The form that a chat template shows to its model; None: it is not known."""
    if "<tool_call>" in template:  # Qwen3-Coder and GLM write XML inside
        return None if "<function=" in template or "<arg_key>" in template else HERMES
    if "[TOOL_CALLS]" in template:  # the newest of Mistral write a name and [ARGS]
        return None if "[ARGS]" in template else MISTRAL
    return LLAMA if '"parameters"' in template and "ipython" in template else None
