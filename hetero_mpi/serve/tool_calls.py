"""Calls of tools in the text of an answer, in the forms that models write. A text that is none of them is left as it is."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

_BLOCK = re.compile(r"\s*<tool_call>(.*?)(?:</tool_call>|\Z)\s*", re.DOTALL)


def opened(text: str) -> Any:
    """The JSON value of a text. Raises ValueError: it is none, is nested too deeply, or has NaN or half of a surrogate pair."""
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        raise ValueError("half of a surrogate pair is no character") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return value


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
        """(text before the calls, the calls: ``name`` and ``arguments``) of a whole answer; no calls: all of it is text.

        Calls stand at the end of the answer, and call tools that there are.
        """
        begin = self.begin(text)
        try:
            calls = [self._call(one, tools) for one in self._objects(text[begin:])]
        except ValueError:
            return text, []
        return (text[:begin], calls) if calls else (text, [])

    def _objects(self, text: str) -> list[Any]:
        """The JSON values of the calls. Raises ValueError: there is something else."""
        if self.name == "mistral":
            found = opened(text.removeprefix(self.marker)) if text else []
            return found if isinstance(found, list) else [found]
        if self.name == "llama3":
            return [opened(part) for part in (text.split(";") if text.count(";") and not _is_json(text) else [text])]
        blocks = list(_BLOCK.finditer(text))
        if "".join(block[0] for block in blocks) != text:
            raise ValueError("text between calls")
        return [opened(block[1]) for block in blocks]

    def _call(self, value: Any, tools: Collection[str]) -> Mapping[str, Any]:
        if not isinstance(value, dict) or value.get("name") not in tools or not isinstance(value.get(self.key), dict):
            raise ValueError("no call")
        return {"name": value["name"], "arguments": value[self.key]}


def _is_json(text: str) -> bool:
    try:
        opened(text)
        return True
    except ValueError:
        return False


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
