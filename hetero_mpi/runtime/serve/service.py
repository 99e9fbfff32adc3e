"""The model as HTTP threads see it: requests become tasks, and tasks become text, in the API's JSON. On rank 0 only."""

from __future__ import annotations

import queue
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from hetero_mpi.data.template import choose_form, render_messages
from hetero_mpi.data.tokenizer import begun, own_tokens_only
from hetero_mpi.errors import UserError
from hetero_mpi.model.transformers.families import read_config
from hetero_mpi.report import units
from hetero_mpi.runtime.generate.source import Opened, stop_tokens
from hetero_mpi.runtime.generate.writer import Spelling, Task
from hetero_mpi.runtime.serve.api_requests import ApiError, Asked, ChatRequest
from hetero_mpi.runtime.serve.scheduler import Answer, CacheRoom, Scheduler

LOOK_S = 0.05
"""Interval at which a thread that waits for a token looks whether the service ends; Open MPI's launcher leaves 0.25 s for that."""


@dataclass(frozen=True)
class Context:
    """How many tokens a request may have, its answer's included, and why not more."""

    tokens: int
    reason: str


def context_of(opened: Opened, wanted: int | None, room: Sequence[CacheRoom]) -> Context:
    """The least of what the model, the memory and the user (``wanted``) allow."""
    positions = getattr(read_config(opened.source.config), "max_position_embeddings", None)
    limits = [(sys.maxsize, "there is no limit")]
    if positions is not None:
        limits.append((positions, f"the model has positions for {positions:,} (max_position_embeddings)"))
    if wanted is not None:
        limits.append((wanted, f"the server was started with --context {wanted}"))
    for rank in room:
        if (longest := rank.longest()) < sys.maxsize:
            has = f"rank {rank.rank} has {units.size(rank.free_bytes)} for keys and values"
            limits.append(
                (int(longest), f"{has}, which is {longest:,.0f} tokens of {units.size(rank.per_token_bytes)}")
            )
    return Context(*min(limits, key=lambda limit: limit[0]))


class ServedModel:
    """What rank 0 knows of the model before its weights are loaded. ``name``: of the model, as clients see it. Raises UserError:
    its template or its ``generation_config.json`` cannot be used.
    """

    def __init__(self, name: str, opened: Opened) -> None:
        self.name, self.opened, self.tokenizer, source = name, opened, opened.tokenizer, opened.source
        self.engine = own_tokens_only(opened.tokenizer)
        self.form = choose_form(opened.tokenizer, opened.template) if opened.template is not None else None
        directory = Path(source.base) if source.base is not None else None
        self.stops = stop_tokens(source.config, directory, opened.tokenizer)
        self.rows = int(read_config(source.config).vocab_size)


class Service:
    """Turns requests into text. ``ending``: is the service about to end? Asked by all threads."""

    def __init__(self, model: ServedModel, context: Context, scheduler: Scheduler, ending: Callable[[], bool]) -> None:
        self.model, self.context, self.scheduler, self.ending = model, context, scheduler, ending
        self._tokenizing = threading.Lock()

    @property
    def chats(self) -> bool:
        """Is there a template for conversations?"""
        return self.model.form is not None

    def task(self, asked: Asked) -> Task:
        """What is to be written. Raises ApiError: the prompt is empty or too long, or the template refuses the conversation."""
        with self._tokenizing:
            try:
                prompt = self._prompt(asked)
            except UserError as error:
                raise ApiError(400, str(error)) from None
        if not prompt or not all(0 <= token < self.model.rows for token in prompt):
            raise ApiError(400, f"the prompt must have tokens, with ids from 0 to {self.model.rows - 1}")
        room = self.context.tokens - len(prompt)
        limit = asked.limit if asked.limit is not None else max(1, room)
        if limit > room:
            raise ApiError(
                400,
                f"a request may have {self.context.tokens:,} tokens, since {self.context.reason}; the prompt has {len(prompt):,}, "
                f"and {limit:,} new ones are asked for: shorten the prompt, or lower max_tokens",
                code="context_length_exceeded",
            )
        return Task(prompt, self.model.stops, limit, asked.sampling())

    def _prompt(self, asked: Asked) -> list[int]:
        if isinstance(asked, ChatRequest):
            if self.model.form is None:
                raise ApiError(400, f"{self.model.name} has no chat template: it continues texts, by /v1/completions")
            messages = [message.plain() for message in asked.messages]
            return render_messages(self.model.tokenizer, self.model.engine, self.model.form, messages, "messages")
        if isinstance(asked.prompt, str):
            return begun(self.model.engine, [asked.prompt])[0]
        return [int(token) for token in asked.prompt]

    def pieces(self, answer: Answer, wording: Wording, alive: Callable[[], bool]) -> Iterator[str]:
        """The answer's text, one piece a token (it may be empty), until ``wording`` says that it ends.

        Raises:
            ApiError: the pipeline failed, or the service ends.
            ConnectionError: the client is not ``alive`` any more.
        """
        while wording.finish is None:
            if not alive():
                raise ConnectionError("the client has gone")
            try:
                event = answer.events.get(timeout=LOOK_S)
            except queue.Empty:
                if self.ending():
                    raise ending_error() from None
                continue
            if isinstance(event, ApiError):
                raise event
            yield wording.add(event)


def ending_error(reason: str = "") -> ApiError:
    unknown = "it was asked to, or another rank has failed (its launcher says which)"
    return ApiError(503, f"the service ends: {reason or unknown}", "server_error")


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
