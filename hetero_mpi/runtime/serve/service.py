"""The served model on rank 0: requests become tasks, tasks become text in the JSON of OpenAI's API, and its routes, with a page for
people. HTTP threads run all of this; it never calls MPI.
"""

from __future__ import annotations

import html
import json
import queue
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from transformers import PreTrainedTokenizerFast

from hetero_mpi import units
from hetero_mpi.data.chat_template import choose_template, messages_text
from hetero_mpi.data.tokenizer import begun, encoded, own_tokens_only
from hetero_mpi.errors import UserError
from hetero_mpi.model.files.model_files import GENERATION
from hetero_mpi.model.transformers.families import read_config
from hetero_mpi.model.transformers.generation import read_generation
from hetero_mpi.report.run_files.logs import say
from hetero_mpi.runtime.generate.source import Opened
from hetero_mpi.runtime.generate.writer import Spelling, Task
from hetero_mpi.runtime.serve.api_requests import Asked, ChatRequest, CompletionRequest, SamplingDefaults, parse
from hetero_mpi.runtime.serve.scheduler import Answer, CacheRoom, Scheduler
from hetero_mpi.web.connection import Connection
from hetero_mpi.web.server import HttpError, Names, WebServer

LOOK_S = 0.05
"""Interval at which a thread that waits for a token looks whether the service ends; Open MPI's launcher leaves 0.25 s for that."""
LARGEST_BODY_BYTES = 32 << 20
_BODY_BYTES, _BODY_BYTES_PER_TOKEN = 1 << 20, 64
"""The largest size of a request's body, with the tokens of the context; a token of usual text has four bytes."""
_CHARACTERS_PER_TOKEN = 8
_CUT_TOKENS = 64
"""Tokens by which, at most, the beginning of a text may have more than the whole, since it ends within a word."""


@dataclass(frozen=True)
class Context:
    """How many tokens a request may have, its answer's included, and why not more."""

    tokens: int
    reason: str


def context_of(opened: Opened, wanted: int | None, room: Sequence[CacheRoom]) -> Context:
    """The least of what the model, the memory and the user (``wanted``) allow."""
    positions = opened.positions
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
    """Rank 0's knowledge of the model before its weights are loaded. ``name``: of the model, as clients see it. Raises UserError:
    its template or its ``generation_config.json`` cannot be used.
    """

    def __init__(self, name: str, opened: Opened) -> None:
        self.name, self.opened, self.tokenizer, source = name, opened, opened.tokenizer, opened.source
        self.engine = own_tokens_only(opened.tokenizer)
        self.form = choose_template(opened.tokenizer, opened.template) if opened.template is not None else None
        self.stops = opened.stops
        self.rows = int(read_config(source.config).vocab_size)
        self.defaults = sampling_defaults(source.directory)
        added = self.engine.get_added_tokens_decoder()
        self.special = {token.content: number for number, token in added.items() if token.special}
        """Text -> id of the tokens that no text shows."""


def sampling_defaults(directory: Path | None) -> SamplingDefaults:
    """Those of the model's ``generation_config.json``. Raises UserError: it cannot be read, or a value is out of its range."""
    values = read_generation(directory) or {}
    try:
        return SamplingDefaults.model_validate(
            {name: values[name] for name in SamplingDefaults.model_fields if values.get(name) is not None}
        )
    except ValidationError as error:
        (wrong, *_) = error.errors(include_url=False)
        raise UserError(
            f"{directory}/{GENERATION}: {wrong['loc'][0]}: {wrong['msg']}; correct it, or remove the file"
        ) from None


class Service:
    """Turns requests into text. ``ending``: is the service about to end? Asked by all threads."""

    def __init__(self, model: ServedModel, context: Context, scheduler: Scheduler, ending: Callable[[], bool]) -> None:
        self.model, self.context, self.scheduler, self.ending = model, context, scheduler, ending
        self.largest_body_bytes = min(LARGEST_BODY_BYTES, _BODY_BYTES + _BODY_BYTES_PER_TOKEN * context.tokens)

    @property
    def chats(self) -> bool:
        """Whether there is a template for conversations."""
        return self.model.form is not None

    def task(self, asked: Asked) -> Task:
        """The task of a request. Raises HttpError: the prompt is empty or too long, or the template refuses the conversation."""
        try:
            prompt = self._prompt(asked)
        except UserError as error:
            raise HttpError(400, str(error)) from None
        if not prompt or not self._are_tokens(prompt):
            raise HttpError(400, f"the prompt must have tokens, with ids from 0 to {self.model.rows - 1}")
        room = self.context.tokens - len(prompt)
        limit = asked.limit if asked.limit is not None else max(1, room)
        if limit > room:
            raise self._too_long(f"{len(prompt):,}, and {limit:,} new ones are asked for")
        least = asked.min_tokens or 0
        if least > limit:
            raise HttpError(400, f"min_tokens = {least:,} must be at most the new tokens, which are {limit:,} here")
        return Task(prompt, self._stops(asked), limit, asked.sampling(self.model.defaults), least)

    def _prompt(self, asked: Asked) -> list[int]:
        if isinstance(asked, ChatRequest):
            if self.model.form is None:
                raise HttpError(400, f"{self.model.name} has no chat template: it continues texts, by /v1/completions")
            messages = [message.plain() for message in asked.messages]
            return self._tokens(messages_text(self.model.form, messages, "messages"), begins=False)
        if isinstance(asked.prompt, str):
            return self._tokens(asked.prompt, begins=True)
        if len(asked.prompt) > self.context.tokens:
            raise self._too_long(f"{len(asked.prompt):,}")
        return asked.prompt

    def _tokens(self, text: str, begins: bool) -> list[int]:
        """A text's tokens, behind the beginning token where it ``begins``.

        One that is too long costs hardly more than one that fits: its beginnings are looked at first.

        :raises HttpError: it has more tokens than a request may have.
        """
        end = _CHARACTERS_PER_TOKEN * self.context.tokens
        while end < len(text):
            count = len(encoded(self.model.engine, [text[:end]])[0])
            if count > self.context.tokens + _CUT_TOKENS:
                raise self._too_long(f"more than {self.context.tokens:,}")
            end *= 2
        return (begun if begins else encoded)(self.model.engine, [text])[0]

    def _stops(self, asked: Asked) -> list[int]:
        """Tokens that end the answer. A special token has no text in it, so a text to stop at that is one stands for the token."""
        special = self.model.special
        for text in asked.stop:
            hidden = next((one for one in special if one and one in text), None)
            if hidden is not None and text not in special:
                raise HttpError(
                    400,
                    f"stop: {text[:60]!r} can never come, since answers do not show the special token {hidden!r}; stop at "
                    f"{hidden!r} alone, or at the rest",
                )
        wanted = asked.stop_token_ids or []
        if not self._are_tokens(wanted):
            raise HttpError(400, f"stop_token_ids must be ids from 0 to {self.model.rows - 1}")
        own = [] if asked.ignore_eos else [token for token in self.model.stops if self._are_tokens([token])]
        return sorted({*own, *wanted, *(special[text] for text in asked.stop if text in special)})

    def _are_tokens(self, tokens: Sequence[int]) -> bool:
        return all(0 <= token < self.model.rows for token in tokens)

    def _too_long(self, has: str) -> HttpError:
        return HttpError(
            400,
            f"a request may have {self.context.tokens:,} tokens, since {self.context.reason}; the prompt has {has}: shorten the "
            f"prompt, or lower max_tokens",
            code="context_length_exceeded",
        )

    def pieces(self, answer: Answer, wording: Wording, alive: Callable[[], bool]) -> Iterator[str]:
        """The answer's text, one piece a token (it may be empty), until ``wording`` says that it ends.

        Raises:
            HttpError: the pipeline failed, or the service ends.
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
            if isinstance(event, HttpError):
                raise event
            yield wording.add(event)


def ending_error(reason: str = "") -> HttpError:
    unknown = "it was asked to, or another rank has failed (its launcher says which)"
    return HttpError(503, f"the service ends: {reason or unknown}")


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
        stop_texts = self._stop_texts if self.tokens >= self._task.least else ()
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
        """The end of a text: the reason for its end, and the numbers of tokens where the client wants them."""
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


_POSTED: dict[str, type[Asked]] = {"/v1/chat/completions": ChatRequest, "/v1/completions": CompletionRequest}
_PAGE = Path(__file__).with_name("page.html")
_PAGE_MAY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)


class ApiServer(WebServer):
    """Answers requests to a model. The arguments are those of WebServer, and the service."""

    def __init__(self, bound: socket.socket, token: str | None, service: Service, names: Names) -> None:
        self.service = service
        begun = int(time.time())
        own = {"id": service.model.name, "object": "model", "created": begun, "owned_by": "hetero_mpi"}
        self.models = [{**own, "max_model_len": service.context.tokens}]
        super().__init__(bound, _ApiConnection, names, token)

    def page(self) -> bytes:
        """A text box for the model, whole in itself."""
        values = {
            "CHATS": json.dumps(self.service.chats),
            "KEY": json.dumps(self.token is not None),
            "NAME": html.escape(self.service.model.name),
        }
        page = _PAGE.read_text(encoding="utf-8")
        for name, value in values.items():
            page = page.replace(f"@{name}@", value)
        return page.encode()


class _ApiConnection(Connection):
    server: ApiServer

    def answer(self) -> None:
        (self._post if self.command == "POST" else self._get)(self.server.service)

    def _get(self, service: Service) -> None:
        if self.route == "":
            self.send_content(self.server.page(), "text/html; charset=utf-8", {"Content-Security-Policy": _PAGE_MAY})
            return
        if self.route == "/health":
            if service.ending():
                raise ending_error()
            self.send({"status": "ok", **service.scheduler.counts()})
            return
        self.check_token()
        models = self.server.models
        if self.route == "/v1/models":
            self.send({"object": "list", "data": models})
        elif self.route == f"/v1/models/{service.model.name}":
            self.send(models[0])
        elif self.route in _POSTED:
            raise HttpError(405, f"{self.route} answers POST", allow="POST")
        else:
            raise HttpError(404, f"there is no {self.route[:100]} here", code="not_found")

    def _post(self, service: Service) -> None:
        self.check_token()
        kind = _POSTED.get(self.route)
        if kind is None:
            raise HttpError(
                404, f"there is no {self.route[:100]} here; POST to {' or '.join(_POSTED)}", code="not_found"
            )
        with self.body("application/json", service.largest_body_bytes) as body:
            asked = parse(kind, body)
        task = service.task(asked)
        begin = time.monotonic()
        answer = service.scheduler.submit(task)
        wording = Wording(service.model.tokenizer, task, asked.stop)
        bodies = Bodies(asked, service.model.name, len(task.prompt))
        try:
            pieces = service.pieces(answer, wording, self.alive)
            if asked.stream:
                self._stream(pieces, wording, bodies)
            else:
                self.send(bodies.whole("".join(pieces), wording))
        finally:
            answer.given_up.set()
            how = wording.finish or "broken off"
            say(
                f"{self.route}: {len(task.prompt)} + {wording.tokens} tokens in {time.monotonic() - begin:.1f} s, {how}"
            )

    def _stream(self, pieces: Iterator[str], wording: Wording, bodies: Bodies) -> None:
        text = next(pieces)  # what fails before the first token has a status of its own
        send = self.begin_events()

        def tell(value: dict[str, Any]) -> None:
            send(json.dumps(value))

        tell(bodies.chunk(text, first=True))
        try:
            for text in pieces:
                if text:
                    tell(bodies.chunk(text))
        except HttpError as error:
            tell(error.body())
            return
        for chunk in bodies.last(wording):
            tell(chunk)
        send("[DONE]")
