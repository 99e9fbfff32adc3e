"""Converts generated tokens into the text of answers on rank 0, handling stop strings and tool calls.

Tool calls are recognised in the format of the model's family. All other text is returned unchanged.
"""

from __future__ import annotations

import json
import re
import secrets
from bisect import bisect_left
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerFast

from hetero_mpi.inference.sampling import Scored
from hetero_mpi.inference.spelling import Spelling
from hetero_mpi.inference.writer import Task
from hetero_mpi.serve.scheduler import TokenEvent

_DECODER = json.JSONDecoder()
_BLANKS = re.compile(r"\s*")
_CLOSING_TAG = re.compile(r"\s*</tool_call>\s*|\s*")
_SEPARATOR = re.compile(r"\s*;?\s*")


def parse_json(text: str) -> Any:
    """Parse a JSON string. Raises ValueError for invalid JSON, excessive nesting, NaN, or half of a surrogate pair."""
    value, end = _value_at(text, 0)
    if text[end:].strip():
        raise ValueError("more than one value")
    return value


def _value_at(text: str, position: int) -> tuple[Any, int]:
    """Parse the JSON value at ``position``; return it and its end position. Raises ValueError like ``parse_json``."""
    blanks = _BLANKS.match(text, position)
    assert blanks is not None
    try:
        value, end = _DECODER.raw_decode(text, blanks.end())
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        raise ValueError("contains an unpaired surrogate") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return value, end


@dataclass(frozen=True)
class CallForm:
    """The format in which a model family writes tool calls: JSON objects with a ``name``, and the arguments under ``key``."""

    name: str
    marker: str
    """The string that starts tool calls. "{" counts only at the beginning of the answer."""
    key: str

    def start_position(self, text: str) -> int:
        """Return the position in an incomplete answer at which calls begin or may begin. The text before it is final."""
        if self.marker == "{":
            return 0 if text.lstrip()[:1] in ("", "{") else len(text)
        if (position := text.find(self.marker)) >= 0:
            return position
        lengths = range(min(len(self.marker) - 1, len(text)), 0, -1)
        return len(text) - next((n for n in lengths if self.marker.startswith(text[-n:])), 0)

    def split(self, text: str, tools: Collection[str]) -> tuple[str, list[Mapping[str, Any]]]:
        """Split a complete answer into the text outside the calls and the calls, each with ``name`` and ``arguments``.

        Only complete calls of one of ``tools`` count. Anything else stays text and does not hide other calls. The returned text
        begins with the part before ``start_position``.
        """
        outside, calls, end = "", list[Mapping[str, Any]](), 0
        position = self.start_position(text)
        while 0 <= position < len(text):
            found_calls, next_position = self._calls_at(text, position, tools)
            if found_calls:
                outside, end, calls = outside + text[end:position], next_position, calls + found_calls
            position = text.find(self.marker, next_position)
        return (outside + text[end:], calls) if calls else (text, [])

    def _calls_at(self, text: str, position: int, tools: Collection[str]) -> tuple[list[Mapping[str, Any]], int]:
        """Return the calls at ``position``, or [] if the text there is not a call, and the position from which to continue."""
        no_marker = self.marker == "{"
        try:
            value, end = _value_at(text, position if no_marker else position + len(self.marker))
            calls = [self._call(call, tools) for call in (value if isinstance(value, list) else [value])]
        except ValueError:
            return [], len(text) if no_marker else position + 1
        closing = (_SEPARATOR if no_marker else _CLOSING_TAG).match(text, end)
        assert closing is not None
        return calls, closing.end()

    def _call(self, value: Any, tools: Collection[str]) -> Mapping[str, Any]:
        """Convert a JSON value to a call; missing arguments become {}. Raises ValueError if the value is not a valid call."""
        if not isinstance(value, dict) or value.get("name") not in tools:
            raise ValueError("no call")
        arguments = next((value[key] for key in (self.key, "arguments", "parameters") if key in value), None)
        if isinstance(arguments, str):
            arguments = parse_json(arguments)
        if arguments is not None and not isinstance(arguments, dict):
            raise ValueError("arguments must be an object")
        return {"name": value["name"], "arguments": arguments or {}}


HERMES = CallForm("hermes", "<tool_call>", "arguments")
MISTRAL = CallForm("mistral", "[TOOL_CALLS]", "arguments")
LLAMA = CallForm("llama3", "{", "parameters")


def call_form(template: str) -> CallForm | None:
    """Return the format of tool calls that a chat template uses, or None if it is unknown."""
    if "<tool_call>" in template:  # Qwen3-Coder and GLM write XML inside
        return None if "<function=" in template or "<arg_key>" in template else HERMES
    if "[TOOL_CALLS]" in template:  # the newest of Mistral write a name and [ARGS]
        return None if "[ARGS]" in template else MISTRAL
    return LLAMA if '"parameters"' in template and "ipython" in template else None


class StopStringFilter:
    """Decodes an answer's tokens up to a stop token, a stop string or the token limit.

    Attributes:
        task: The task that generates the tokens.
        finish: OpenAI's ``finish_reason``, ``stop`` or ``length``; None while the answer is unfinished.
        tokens: Number of tokens so far, including a stop token.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        task: Task,
        stop_texts: tuple[str, ...],
        visible: Mapping[int, str] | None = None,
    ) -> None:
        """``visible`` maps the ids of special tokens that the text should include to their text."""
        self.task, self._stop_texts = task, stop_texts
        self._spelling = Spelling(tokenizer, task.prompt, visible)
        self._pending_text, self._sent = "", 0
        self.finish: str | None = None
        self.tokens = 0

    def add(self, token: int) -> str:
        """Add a token and return the text that it makes final. A possible prefix of a stop string is held back."""
        text = self._certain_text(token)
        self._sent += len(text)
        return text

    def _certain_text(self, token: int) -> str:
        self.tokens += 1
        stopped = token in self.task.stops
        ended = self.task.ends_with(token, self.tokens)
        stop_texts = self._stop_texts if self.tokens >= self.task.least else ()
        self._pending_text += "" if stopped else self._spelling.add(token)
        self._pending_text += self._spelling.end() if ended else ""
        stop_positions = [position for text in stop_texts if (position := self._pending_text.find(text)) >= 0]
        if stop_positions:
            self.finish = "stop"
            return self._pending_text[: min(stop_positions)]
        if ended:
            self.finish = "stop" if stopped else "length"
            return self._pending_text
        certain = len(self._pending_text) - self._partial_stop_length()
        text, self._pending_text = self._pending_text[:certain], self._pending_text[certain:]
        return text

    @property
    def certain_tokens(self) -> int:
        """Number of tokens whose visible text is final."""
        if self.finish is not None:
            return self.tokens
        ends = [*self._spelling.starts[1:], self._spelling.length]
        return bisect_left(ends, self._sent + (self._sent == self._spelling.length))

    def start(self, number: int) -> int:
        """Return the position in the text, in characters, at which the token with index ``number`` (from 0) starts."""
        starts = self._spelling.starts
        return min(starts[number], self._sent) if number < len(starts) else self._sent

    def shown_characters(self, number: int) -> int | None:
        """Return how many characters of a token are visible: None if all of them are, 0 for a stop token."""
        starts = [*self._spelling.starts[number : number + 2], self._spelling.length]
        if number >= len(self._spelling.starts):
            return 0
        complete = starts[1] <= self._sent and (starts[0] < self._sent or self._sent == self._spelling.length)
        return None if complete else max(0, self._sent - starts[0])

    def end_silently(self) -> None:
        self.finish = "length"

    def _partial_stop_length(self) -> int:
        """Return the length of the longest prefix of a stop string with which the pending text ends."""
        text, stops = self._pending_text, self._stop_texts
        lengths = range(min(max(map(len, stops), default=1) - 1, len(text)), 0, -1)
        return next(
            (n for n in lengths if any(len(stop_text) > n and stop_text.startswith(text[-n:]) for stop_text in stops)),
            0,
        )


class Choice:
    """One answer to a request, as its client sees it.

    Attributes:
        calls: The tool calls in OpenAI's format, filled in when the answer is complete.
    """

    def __init__(
        self, number: int, wording: StopStringFilter, echoed: str | None, form: CallForm | None, tools: Collection[str]
    ) -> None:
        """Create an empty answer.

        Args:
            echoed: The text of the prompt, if the answer is to begin with it.
            form: The format in which the model calls ``tools``. None if there are no tools or calls stay part of the text.
        """
        self.number, self.wording = number, wording
        self._echoed, self._form, self._tools = echoed or "", form, tools
        self._text, self._sent_characters = "", 0
        self.calls: list[dict[str, Any]] = []
        self._scores: list[Scored] = []
        self._taken_count = 0

    @property
    def finish(self) -> str | None:
        return "tool_calls" if self.calls else self.wording.finish

    def add(self, event: TokenEvent, silent: bool = False) -> str:
        """Add an event and return the text that it makes final. If ``silent``, the answer ends before its first new token."""
        ends_here = silent and event.token is not None
        self._scores += event.scores[:-1] if ends_here else event.scores
        if ends_here:
            self.wording.end_silently()
            return self._echoed
        if event.token is None:
            return ""
        text, self._echoed = self._echoed + self.wording.add(event.token), ""
        if self._form is None:
            return text
        self._text += text
        end = self._form.start_position(self._text)
        if self.wording.finish is not None:
            self._text, calls = self._form.split(self._text, self._tools)
            self.calls, end = [_api_call(call) for call in calls], len(self._text)
        text, self._sent_characters = self._text[self._sent_characters : end], max(end, self._sent_characters)
        return text

    def take_scores(self) -> list[Scored]:
        """Return the logprobs of the tokens whose text is final, without those that an earlier call returned."""
        task = self.wording.task
        count = (len(task.prompt) - 1) * task.echo + self.wording.certain_tokens - self._taken_count
        scores, self._scores = self._scores[:count], self._scores[count:]
        self._taken_count += len(scores)
        return scores


def _api_call(call: Mapping[str, Any]) -> dict[str, Any]:
    identity = secrets.token_hex(5)[:9]  # Mistral's template requires this length
    arguments = json.dumps(call["arguments"], ensure_ascii=False)
    return {"id": identity, "type": "function", "function": {"name": call["name"], "arguments": arguments}}
