"""Turns requests into tasks and generated tokens into text, on rank 0's HTTP threads. Never calls MPI."""

from __future__ import annotations

import queue
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hetero_mpi.data.chat_template import messages_text
from hetero_mpi.data.messages import ROLES, ChatMessage
from hetero_mpi.data.printed_parts import unprinted
from hetero_mpi.data.tokenizer import document_token_ids, encoded, starts_of
from hetero_mpi.inference.source import Opened
from hetero_mpi.inference.spelling import Spelling
from hetero_mpi.inference.writer import Task
from hetero_mpi.serve.api_requests import ApiRequest, ChatRequest
from hetero_mpi.serve.bodies import LogprobFormatter, ResponseBuilder
from hetero_mpi.serve.scheduler import Answer, CacheBudget, Scheduler
from hetero_mpi.serve.served_models import ServedModel
from hetero_mpi.serve.web.server import HttpError
from hetero_mpi.serve.wording import Choice, StopStringFilter
from hetero_mpi.util import units
from hetero_mpi.util.errors import UserError

POLL_INTERVAL_S = 0.05
"""How often a thread waiting for a token checks whether the service is ending; Open MPI's launcher allows 0.25 s for that."""
MAX_BODY_BYTES = 32 << 20
_BODY_BYTES, _BODY_BYTES_PER_TOKEN = 1 << 20, 64
"""Maximum size of a request body: a constant, plus bytes per token of context (a token of typical text has four bytes)."""
MAX_PROMPT_LOGPROBS = 1 << 21
"""Maximum number of prompt logprobs per request. All are kept in memory until the answer is sent, at about 200 bytes each."""
_MIN_CHARACTERS_PER_TOKEN = 8
_MAX_EXCESS_TOKENS = 64
"""Maximum number of tokens by which a prefix may exceed the complete text: a prefix that ends mid-word can need more tokens."""


@dataclass(frozen=True)
class Context:
    """Maximum number of tokens in a request and its answer, and the reason for that limit."""

    tokens: int
    reason: str


def context_of(opened: Opened, requested: int | None, room: Sequence[CacheBudget]) -> Context:
    """Return the lowest of the limits set by the model, the memory budgets and the user (``requested``)."""
    positions = opened.positions
    limits = [(sys.maxsize, "there is no limit")]
    if positions is not None:
        limits.append((positions, f"the model has positions for {positions:,} (max_position_embeddings)"))
    if requested is not None:
        limits.append((requested, f"the server was started with --context {requested}"))
    for rank in room:
        if (longest := rank.longest()) < sys.maxsize:
            memory_text = f"rank {rank.rank} has {units.size(rank.free_bytes)} for keys and values"
            limits.append((int(longest), f"{memory_text}: {longest:,.0f} tokens of {units.size(rank.per_token_bytes)}"))
    return Context(*min(limits, key=lambda limit: limit[0]))


class Service:
    """Answers API requests with text from the models.

    Args:
        models: The first model answers requests that name none. A single model answers to every name.
        ending: Returns whether the service is about to end. Called from any thread.
    """

    def __init__(
        self, models: Sequence[ServedModel], context: Context, scheduler: Scheduler, ending: Callable[[], bool]
    ) -> None:
        self.models = {model.name: model for model in models}
        self.model, self.context, self.scheduler, self.ending = models[0], context, scheduler, ending
        self.largest_body_bytes = min(MAX_BODY_BYTES, _BODY_BYTES + _BODY_BYTES_PER_TOKEN * context.tokens)

    @property
    def chats(self) -> bool:
        """Whether the default model has a chat template."""
        return self.model.form is not None

    def model_of(self, request: ApiRequest) -> ServedModel:
        """Return the model that a request names. Raises HttpError if there is no model with that name."""
        if len(self.models) == 1 or not request.model:
            return self.model
        if request.model not in self.models:
            raise HttpError(
                404,
                f"there is no model {request.model[:100]!r} on this server; available: {', '.join(self.models)}",
                code="model_not_found",
            )
        return self.models[request.model]

    def tasks(self, request: ApiRequest) -> list[Task]:
        """Convert a request into tasks, ``n`` per prompt. Raises HttpError for an invalid prompt or option."""
        model = self.model_of(request)
        try:
            prompts = self._prompts(model, request)
        except UserError as error:
            raise HttpError(400, str(error)) from None
        logprobs = sum(map(len, prompts)) * request.n * (1 + (request.likeliest or 0)) if request.echo else 0
        if request.likeliest is not None and logprobs > MAX_PROMPT_LOGPROBS:
            raise HttpError(
                400,
                f"at most {MAX_PROMPT_LOGPROBS:,} logprobs of prompts per request, not {logprobs:,} (tokens x n x (1 + logprobs)): "
                f"send fewer prompts, or lower n or logprobs",
            )
        stops = self._stops(model, request)
        return [self._task(model, request, prompt, stops, number) for prompt in prompts for number in range(request.n)]

    def _task(self, model: ServedModel, request: ApiRequest, prompt: list[int], stops: list[int], number: int) -> Task:
        if not prompt or not _are_tokens(model, prompt):
            raise HttpError(400, f"the prompt must have at least one token, with ids from 0 to {model.rows - 1}")
        room_tokens = self.context.tokens - len(prompt)
        limit = request.limit if request.limit is not None else max(1, room_tokens)
        if max(1, limit) > room_tokens:
            raise self._too_long(f"{len(prompt):,}, and {max(1, limit):,} new tokens are requested")
        min_tokens = request.min_tokens or 0
        if min_tokens > limit:
            raise HttpError(400, f"min_tokens = {min_tokens:,} must be at most the number of new tokens ({limit:,})")
        requested = request.sampling(model.defaults, number), min_tokens, request.likeliest, request.echo
        # If no new token is requested, one is still generated but not returned.
        return Task(prompt, stops, max(1, limit), *requested, adapter=model.adapter)

    def _prompts(self, model: ServedModel, request: ApiRequest) -> list[list[int]]:
        if isinstance(request, ChatRequest):
            return [self._tokens(model, self._conversation(model, request), begins=False)]
        prompts = []
        for prompt in request.prompt:
            if isinstance(prompt, list) and len(prompt) > self.context.tokens:
                raise self._too_long(f"{len(prompt):,}")
            prompts.append(self._tokens(model, prompt, begins=True) if isinstance(prompt, str) else prompt)
        return prompts

    def _conversation(self, model: ServedModel, request: ChatRequest) -> str:
        """Render a conversation. Raises HttpError if the template drops tools, tool calls or their results."""
        if model.form is None:
            raise HttpError(400, f"{model.name} has no chat template: use /v1/completions")
        messages, tools = [message.plain() for message in request.messages], request.usable_tools
        try:
            text = messages_text(model.form, messages, "messages", tools)
        except UserError:
            if not any("tool_calls" in message for message in messages):
                raise
            # DeepSeek's templates accept arguments only as JSON strings.
            messages = [message.plain(as_objects=False) for message in request.messages]
            text = messages_text(model.form, messages, "messages", tools)
        if tools or any(message["role"] == "tool" or "tool_calls" in message for message in messages):
            chat_messages = [ChatMessage(ROLES[message["role"]], message["content"], message) for message in messages]
            missing, _ = unprinted(text, chat_messages, tools)
            if missing is not None:
                raise HttpError(400, f"the chat template of {model.name} omits {missing}")
        return text

    def choices(self, request: ApiRequest, tasks: Sequence[Task]) -> list[Choice]:
        """Create an empty answer for each task of a request."""
        model = self.model_of(request)
        tools = [tool["function"]["name"] for tool in request.usable_tools]
        choices = []
        for number, task in enumerate(tasks):
            wording = StopStringFilter(model.tokenizer, task, request.stop, model.visible_tokens if tools else None)
            echoed = self._echoed(model, request, number // request.n)
            choices.append(Choice(number, wording, echoed, model.calls if tools else None, tools))
        return choices

    def _echoed(self, model: ServedModel, request: ApiRequest, number: int) -> str:
        if isinstance(request, ChatRequest) or not request.echo:
            return ""
        prompt = request.prompt[number]
        return prompt if isinstance(prompt, str) else str(model.tokenizer.decode(prompt, skip_special_tokens=True))

    def _starts(self, model: ServedModel, request: ApiRequest, number: int, tokens: Sequence[int]) -> list[int]:
        """Return the start position of each token in an echoed prompt, then the prompt's length, all in characters."""
        if isinstance(request, ChatRequest) or not request.echo:
            return []
        text = self._echoed(model, request, number)
        if isinstance(request.prompt[number], str):
            return [*starts_of(model.engine, text, len(tokens)), len(text)]
        spelling = Spelling(model.tokenizer, [])
        for token in tokens:
            spelling.add(token)
        spelling.end()
        return [*spelling.starts, len(text)]

    def bodies(self, request: ApiRequest, tasks: Sequence[Task]) -> ResponseBuilder:
        model, chat = self.model_of(request), isinstance(request, ChatRequest)
        hidden = {*model.special.values()} - {*(model.visible_tokens if request.usable_tools else ())}
        likelihoods = []
        for number, task in enumerate(tasks if request.likeliest is not None else []):
            starts = self._starts(model, request, number // request.n, task.prompt)
            likelihoods.append(LogprobFormatter(model.tokenizer, chat, hidden, task.prompt, starts))
        return ResponseBuilder(request, model.name, sum(len(task.prompt) for task in tasks[:: request.n]), likelihoods)

    def _tokens(self, model: ServedModel, text: str, begins: bool) -> list[int]:
        """Tokenize ``text``, with a begin-of-text token if ``begins``. Raises HttpError if there are too many tokens.

        Prefixes are checked first, so that rejecting an overlong text costs little more than tokenizing one that fits.
        """
        end = _MIN_CHARACTERS_PER_TOKEN * self.context.tokens
        while end < len(text):
            count = len(encoded(model.engine, [text[:end]])[0])
            if count > self.context.tokens + _MAX_EXCESS_TOKENS:
                raise self._too_long(f"more than {self.context.tokens:,}")
            end *= 2
        return (document_token_ids if begins else encoded)(model.engine, [text])[0]

    def _stops(self, model: ServedModel, request: ApiRequest) -> list[int]:
        """Return the stop tokens of a request, including special tokens that the client passed as stop strings."""
        special = model.special
        for text in request.stop:
            hidden = next((special_text for special_text in special if special_text and special_text in text), None)
            if hidden is not None and text not in special:
                raise HttpError(
                    400,
                    f"stop: {text[:60]!r} cannot occur, as answers never contain the special token {hidden!r}; stop at "
                    f"{hidden!r} alone, or at the rest",
                )
        requested = request.stop_token_ids or []
        if not _are_tokens(model, requested):
            raise HttpError(400, f"stop_token_ids must be ids from 0 to {model.rows - 1}")
        model_stops = [] if request.ignore_eos else [token for token in model.stops if _are_tokens(model, [token])]
        return sorted({*model_stops, *requested, *(special[text] for text in request.stop if text in special)})

    def _too_long(self, has: str) -> HttpError:
        return HttpError(
            400,
            f"a request may have {self.context.tokens:,} tokens, since {self.context.reason}; the prompt has {has}: shorten the "
            f"prompt, or lower max_tokens",
            code="context_length_exceeded",
        )

    def pieces(
        self, answers: Sequence[Answer], choices: Sequence[Choice], silent: bool, alive: Callable[[], bool]
    ) -> Iterator[tuple[Choice, str]]:
        """Yield the text of the answers piece by piece, one possibly empty piece per token, until all answers end.

        Args:
            silent: Whether the client requested no new tokens, so that none are returned.

        Raises:
            HttpError: If the pipeline fails or the service ends.
            ConnectionError: If the client is no longer ``alive``.
        """
        while not all(choice.finish for choice in choices):
            if not alive():
                raise ConnectionError("the client disconnected")
            try:
                event = answers[0].events.get(timeout=POLL_INTERVAL_S)
            except queue.Empty:
                if self.ending():
                    raise ending_error() from None
                continue
            if isinstance(event, HttpError):
                raise event
            choice = choices[event.choice]
            if choice.finish is not None:  # a stop string was found; later tokens are dropped
                continue
            text = choice.add(event, silent)
            if choice.finish is not None:
                answers[event.choice].cancelled.set()
            yield choice, text


def _are_tokens(model: ServedModel, tokens: Sequence[int]) -> bool:
    return all(0 <= token < model.rows for token in tokens)


def ending_error(reason: str = "") -> HttpError:
    unknown = "it was stopped, or another rank has failed (see its launcher's output)"
    return HttpError(503, f"the service ends: {reason or unknown}")
