"""The answers of a request on rank 0, as they become text.

Calls of tools in the text of an answer, in the forms that models write. A text that is none of them is left as it is.
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

from hetero_mpi.inference.decoding import Scored
from hetero_mpi.inference.writer import Spelling, Task
from hetero_mpi.serve.scheduler import News

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


class Wording:
    """An answer's text, up to a stop token, a text to stop at, or the limit.

    Attributes:
        task: the one whose tokens it writes.
        finish: OpenAI's ``finish_reason``: ``stop`` or ``length``; None: it goes on.
        tokens: written so far, a stop token among them.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        task: Task,
        stop_texts: tuple[str, ...],
        shown: Mapping[int, str] | None = None,
    ) -> None:
        """``shown``: special tokens that the text shows all the same."""
        self.task, self._stop_texts = task, stop_texts
        self._spelling = Spelling(tokenizer, task.prompt, shown)
        self._held, self._sent = "", 0
        self.finish: str | None = None
        self.tokens = 0

    def add(self, token: int) -> str:
        """The text that has become certain with this token: what may be the beginning of a stop text is held back."""
        text = self._certain(token)
        self._sent += len(text)
        return text

    def _certain(self, token: int) -> str:
        self.tokens += 1
        stopped = token in self.task.stops
        ended = self.task.ends_with(token, self.tokens)
        stop_texts = self._stop_texts if self.tokens >= self.task.least else ()
        self._held += "" if stopped else self._spelling.add(token)
        self._held += self._spelling.end() if ended else ""
        found = [place for text in stop_texts if (place := self._held.find(text)) >= 0]
        if found:
            self.finish = "stop"
            return self._held[: min(found)]
        if ended:
            self.finish = "stop" if stopped else "length"
            return self._held
        certain = len(self._held) - self._beginning_of_a_stop()
        text, self._held = self._held[:certain], self._held[certain:]
        return text

    @property
    def certain_tokens(self) -> int:
        """Tokens of which it is certain what the text shows of them."""
        if self.finish is not None:
            return self.tokens
        ends = [*self._spelling.starts[1:], self._spelling.length]
        return bisect_left(ends, self._sent + (self._sent == self._spelling.length))

    def start(self, number: int) -> int:
        """The character of the text at which the token of this number, from 0, begins."""
        starts = self._spelling.starts
        return min(starts[number], self._sent) if number < len(starts) else self._sent

    def shown_characters(self, number: int) -> int | None:
        """Characters of a token that the text shows: none of one at which it stops; None: all."""
        starts = [*self._spelling.starts[number : number + 2], self._spelling.length]
        if number >= len(self._spelling.starts):
            return 0
        whole = starts[1] <= self._sent and (starts[0] < self._sent or self._sent == self._spelling.length)
        return None if whole else max(0, self._sent - starts[0])

    def end_silently(self) -> None:
        """No new token is wanted."""
        self.finish = "length"

    def _beginning_of_a_stop(self) -> int:
        """Characters at the end of the held text with which a stop text may begin."""
        held, stops = self._held, self._stop_texts
        lengths = range(min(max(map(len, stops), default=1) - 1, len(held)), 0, -1)
        return next((n for n in lengths if any(len(text) > n and text.startswith(held[-n:]) for text in stops)), 0)


class Choice:
    """One answer of a request, for its client.

    Attributes:
        calls: the tools that it calls, in OpenAI's form; known at its end.
    """

    def __init__(
        self, number: int, wording: Wording, echoed: str | None, form: CallForm | None, tools: Collection[str]
    ) -> None:
        """
        Args:
            echoed: the prompt's text, where the answer begins with it; else None.
            form: how the model calls ``tools``; None: it has none, or they are not told from text.
        """
        self.number, self.wording = number, wording
        self._echoed, self._form, self._tools = echoed or "", form, tools
        self._text, self._told = "", 0
        self.calls: list[dict[str, Any]] = []
        self._scores: list[Scored] = []
        self._taken = 0

    @property
    def finish(self) -> str | None:
        return "tool_calls" if self.calls else self.wording.finish

    def add(self, news: News, silent: bool = False) -> str:
        """The text that has become certain. ``silent``: no new token is wanted, the answer ends without the first one."""
        last = silent and news.token is not None
        self._scores += news.scores[:-1] if last else news.scores
        if last:
            self.wording.end_silently()
        if last or news.token is None:
            return self._echoed if last else ""
        text, self._echoed = self._echoed + self.wording.add(news.token), ""
        if self._form is None:
            return text
        self._text += text
        end = self._form.begin(self._text)
        if self.wording.finish is not None:
            self._text, calls = self._form.split(self._text, self._tools)
            self.calls, end = [_in_api(call) for call in calls], len(self._text)
        text, self._told = self._text[self._told : end], max(end, self._told)
        return text

    def take_scores(self) -> list[Scored]:
        """The log-likelihoods that were not taken yet, of tokens that ``wording`` is certain of."""
        task = self.wording.task
        count = (len(task.prompt) - 1) * task.echo + self.wording.certain_tokens - self._taken
        taken, self._scores = self._scores[:count], self._scores[count:]
        self._taken += len(taken)
        return taken


def _in_api(call: Mapping[str, Any]) -> dict[str, Any]:
    identity = secrets.token_hex(5)[:9]  # Mistral's template takes no other length
    arguments = json.dumps(call["arguments"], ensure_ascii=False)
    return {"id": identity, "type": "function", "function": {"name": call["name"], "arguments": arguments}}
