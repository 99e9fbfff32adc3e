"""What clients get: the text of an answer as its tokens come, and the API's JSON around it."""

from __future__ import annotations

import time
import uuid
from typing import Any

from transformers import PreTrainedTokenizerFast

from hetero_mpi.runtime.generate.writer import Spelling, Task
from hetero_mpi.runtime.serve.api_requests import Asked, ChatRequest


class Wording:
    """An answer's text, up to a stop token, a text to stop at, or the limit.

    Attributes:
        finish: OpenAI's ``finish_reason``: ``stop`` or ``length``; None: it goes on.
        tokens: written so far, a stop token among them.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, task: Task, stop_texts: tuple[str, ...]) -> None:
        self._task, self._stop_texts = task, stop_texts
        self._spelling = Spelling(tokenizer, task.prompt)
        self._held = ""
        self.finish: str | None = None
        self.tokens = 0

    def add(self, token: int) -> str:
        """The text that has become certain with this token: what may be the beginning of a stop text is held back."""
        self.tokens += 1
        stopped = token in self._task.stops
        ended = self._task.ends_with(token, self.tokens)
        self._held += "" if stopped else self._spelling.add(token)
        self._held += self._spelling.end() if ended else ""
        found = [place for text in self._stop_texts if (place := self._held.find(text)) >= 0]
        if found:
            self.finish = "stop"
            return self._held[: min(found)]
        if ended:
            self.finish = "stop" if stopped else "length"
            return self._held
        certain = len(self._held) - self._beginning_of_a_stop()
        text, self._held = self._held[:certain], self._held[certain:]
        return text

    def _beginning_of_a_stop(self) -> int:
        """Characters at the end of the held text with which a stop text may begin."""
        held, stops = self._held, self._stop_texts
        lengths = range(min(max(map(len, stops), default=1) - 1, len(held)), 0, -1)
        return next((n for n in lengths if any(len(text) > n and text.startswith(held[-n:]) for text in stops)), 0)


class Bodies:
    """The JSON objects of one answer: whole, or chunk by chunk."""

    def __init__(self, asked: Asked, model: str, prompt_tokens: int) -> None:
        self._chat = isinstance(asked, ChatRequest)
        self._told_usage = asked.include_usage
        self._prompt_tokens = prompt_tokens
        kind = "chatcmpl" if self._chat else "cmpl"
        self._head = {"id": f"{kind}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, text: str, wording: Wording) -> dict[str, Any]:
        own = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        name = "chat.completion" if self._chat else "text_completion"
        return {**self._object(name, own, wording.finish), "usage": self._usage(wording)}

    def chunk(self, text: str | None, finish: str | None = None, first: bool = False) -> dict[str, Any]:
        """A piece of the answer. ``text``: None where only ``finish`` is told."""
        delta = {**({"role": "assistant"} if first else {}), **({"content": text} if text is not None else {})}
        own = {"delta": delta} if self._chat else {"text": text or ""}
        name = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._object(name, own, finish), **({"usage": None} if self._told_usage else {})}

    def last(self, wording: Wording) -> list[dict[str, Any]]:
        """What follows the text: the reason for its end, and the numbers of tokens where the client wants them."""
        end = self.chunk(None, wording.finish)
        return [end, {**end, "choices": [], "usage": self._usage(wording)}] if self._told_usage else [end]

    def _object(self, name: str, own: dict[str, Any], finish: str | None) -> dict[str, Any]:
        choice = {"index": 0, **own, "logprobs": None, "finish_reason": finish}
        return {**self._head, "object": name, "choices": [choice]}

    def _usage(self, wording: Wording) -> dict[str, int]:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": wording.tokens,
            "total_tokens": self._prompt_tokens + wording.tokens,
        }
