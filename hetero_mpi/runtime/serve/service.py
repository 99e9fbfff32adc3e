"""The model as HTTP threads see it: requests become tasks, and tasks become text. On rank 0 only."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetero_mpi.data.template import choose_form, render_messages
from hetero_mpi.data.tokenizer import encoded, own_tokens_only
from hetero_mpi.errors import UserError
from hetero_mpi.model.transformers.families import read_config
from hetero_mpi.report import units
from hetero_mpi.runtime.generate.source import Opened, stop_tokens
from hetero_mpi.runtime.generate.writer import Task
from hetero_mpi.runtime.serve.answers import Wording
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
    """What rank 0 knows of the model before its weights are loaded.

    Args:
        name: of the model, as clients see it.

    Raises:
        UserError: its template or its ``generation_config.json`` cannot be used.
    """

    def __init__(self, name: str, opened: Opened) -> None:
        self.name, self.opened, self.tokenizer, source = name, opened, opened.tokenizer, opened.source
        self.engine = own_tokens_only(opened.tokenizer)
        self.form = choose_form(opened.tokenizer, opened.template) if opened.template is not None else None
        directory = Path(source.base) if source.base is not None else None
        self.stops = stop_tokens(source.config, directory, opened.tokenizer)
        self.rows = int(read_config(source.config).vocab_size)


class Service:
    """Turns requests into text.

    Args:
        ending: is the service about to end? Asked by all threads.
    """

    def __init__(self, model: ServedModel, context: Context, scheduler: Scheduler, ending: Callable[[], bool]) -> None:
        self.model, self.context, self.scheduler, self.ending = model, context, scheduler, ending
        self._tokenizing = threading.Lock()

    @property
    def chats(self) -> bool:
        """Is there a template for conversations?"""
        return self.model.form is not None

    def task(self, asked: Asked) -> Task:
        """What is to be written.

        Raises:
            ApiError: the prompt is empty or too long, or the template refuses the conversation.
        """
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
            return encoded(self.model.engine, [asked.prompt], special=not self.model.opened.learnt_text)[0]
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
