"""The served models on rank 0: requests become tasks, and what is written of them becomes text. HTTP threads run all of this; it
never calls MPI.
"""

from __future__ import annotations

import queue
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hetero_mpi.data.chat_template import messages_text
from hetero_mpi.data.messages import ROLES, ChatMessage
from hetero_mpi.data.printed_parts import unprinted
from hetero_mpi.data.tokenizer import begun, encoded, starts_of
from hetero_mpi.inference.source import Opened
from hetero_mpi.inference.writer import Spelling, Task
from hetero_mpi.serve.api_requests import Asked, ChatRequest
from hetero_mpi.serve.bodies import Bodies, Likelihoods
from hetero_mpi.serve.scheduler import Answer, CacheRoom, Scheduler
from hetero_mpi.serve.served_models import ServedModel
from hetero_mpi.serve.web.server import HttpError
from hetero_mpi.serve.wording import Choice, Wording
from hetero_mpi.util import units
from hetero_mpi.util.errors import UserError

LOOK_S = 0.05
"""Interval at which a thread that waits for a token looks whether the service ends; Open MPI's launcher leaves 0.25 s for that."""
LARGEST_BODY_BYTES = 32 << 20
_BODY_BYTES, _BODY_BYTES_PER_TOKEN = 1 << 20, 64
"""The largest size of a request's body, with the tokens of the context; a token of usual text has four bytes."""
MOST_LIKELIHOODS = 1 << 21
"""Of a request's prompts. All are kept until its answer, some 200 bytes each."""
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


class Service:
    """Turns requests into text.

    Args:
        models: by their names; the first one answers where a request names none. A model alone answers to every name.
        ending: is the service about to end? Asked by all threads.
    """

    def __init__(
        self, models: Sequence[ServedModel], context: Context, scheduler: Scheduler, ending: Callable[[], bool]
    ) -> None:
        self.models = {model.name: model for model in models}
        self.model, self.context, self.scheduler, self.ending = models[0], context, scheduler, ending
        self.largest_body_bytes = min(LARGEST_BODY_BYTES, _BODY_BYTES + _BODY_BYTES_PER_TOKEN * context.tokens)

    @property
    def chats(self) -> bool:
        """Whether there is a template for conversations."""
        return self.model.form is not None

    def model_of(self, asked: Asked) -> ServedModel:
        """The model that a request names. Raises HttpError: there is none of that name."""
        if len(self.models) == 1 or not asked.model:
            return self.model
        if asked.model not in self.models:
            raise HttpError(
                404,
                f"there is no model {asked.model[:100]!r} here, but {', '.join(self.models)}",
                code="model_not_found",
            )
        return self.models[asked.model]

    def tasks(self, asked: Asked) -> list[Task]:
        """The tasks of a request: ``n`` of each prompt. Raises HttpError: a prompt is empty or too long, or the template refuses
        the conversation.
        """
        model = self.model_of(asked)
        try:
            prompts = self._prompts(model, asked)
        except UserError as error:
            raise HttpError(400, str(error)) from None
        told = sum(map(len, prompts)) * asked.n * (1 + (asked.likeliest or 0)) if _echo(asked) else 0
        if asked.likeliest is not None and told > MOST_LIKELIHOODS:
            raise HttpError(
                400,
                f"at most {MOST_LIKELIHOODS:,} log-likelihoods of prompts a request, not {told:,} (tokens x n x (1 + logprobs)): "
                f"send fewer prompts, or lower n or logprobs",
            )
        stops = self._stops(model, asked)
        return [self._task(model, asked, prompt, stops, number) for prompt in prompts for number in range(asked.n)]

    def _task(self, model: ServedModel, asked: Asked, prompt: list[int], stops: list[int], number: int) -> Task:
        if not prompt or not _are_tokens(model, prompt):
            raise HttpError(400, f"the prompt must have tokens, with ids from 0 to {model.rows - 1}")
        room = self.context.tokens - len(prompt)
        limit = asked.limit if asked.limit is not None else max(1, room)
        if max(1, limit) > room:
            raise self._too_long(f"{len(prompt):,}, and {max(1, limit):,} new ones are asked for")
        least = asked.min_tokens or 0
        if least > limit:
            raise HttpError(400, f"min_tokens = {least:,} must be at most the new tokens, which are {limit:,} here")
        echo, sampling = _echo(asked), asked.sampling(model.defaults, number)
        # Where no new token is wanted the one that is written all the same is not told.
        return Task(prompt, stops, max(1, limit), sampling, least, asked.likeliest, echo, adapter=model.adapter)

    def _prompts(self, model: ServedModel, asked: Asked) -> list[list[int]]:
        if isinstance(asked, ChatRequest):
            return [self._tokens(model, self._conversation(model, asked), begins=False)]
        found = []
        for prompt in asked.prompt:
            if isinstance(prompt, list) and len(prompt) > self.context.tokens:
                raise self._too_long(f"{len(prompt):,}")
            found.append(self._tokens(model, prompt, begins=True) if isinstance(prompt, str) else prompt)
        return found

    def _conversation(self, model: ServedModel, asked: ChatRequest) -> str:
        """Its text. What tools are, are asked, and give must be in it: templates leave out what they do not know."""
        if model.form is None:
            raise HttpError(400, f"{model.name} has no chat template: it continues texts, by /v1/completions")
        messages, tools = [message.plain() for message in asked.messages], asked.usable_tools
        try:
            text = messages_text(model.form, messages, "messages", tools)
        except UserError:
            if not any("tool_calls" in message for message in messages):
                raise
            # DeepSeek's templates take arguments as JSON in a text only.
            messages = [message.plain(opened=False) for message in asked.messages]
            text = messages_text(model.form, messages, "messages", tools)
        if tools or any(message["role"] == "tool" or "tool_calls" in message for message in messages):
            shown = [ChatMessage(ROLES[message["role"]], message["content"], message) for message in messages]
            lost, _ = unprinted(text, shown, tools)
            if lost is not None:
                raise HttpError(400, f"the chat template of {model.name} prints nothing of {lost}")
        return text

    def choices(self, asked: Asked, tasks: Sequence[Task]) -> list[Choice]:
        """The answers of a request, of which nothing is written yet."""
        model = self.model_of(asked)
        tools = [tool["function"]["name"] for tool in asked.usable_tools] if isinstance(asked, ChatRequest) else []
        found = []
        for number, task in enumerate(tasks):
            wording = Wording(model.tokenizer, task, asked.stop, model.shown if tools else None)
            echoed = self._echoed(model, asked, number // asked.n)
            found.append(Choice(number, wording, echoed, model.calls if tools else None, tools))
        return found

    def _echoed(self, model: ServedModel, asked: Asked, number: int) -> str:
        if isinstance(asked, ChatRequest) or not asked.echo:
            return ""
        prompt = asked.prompt[number]
        return prompt if isinstance(prompt, str) else str(model.tokenizer.decode(prompt, skip_special_tokens=True))

    def _starts(self, model: ServedModel, asked: Asked, number: int, tokens: Sequence[int]) -> list[int]:
        """The characters of an echoed prompt at which its tokens begin, and its length."""
        if isinstance(asked, ChatRequest) or not asked.echo:
            return []
        text = self._echoed(model, asked, number)
        if isinstance(asked.prompt[number], str):
            return [*starts_of(model.engine, text, len(tokens)), len(text)]
        spelling = Spelling(model.tokenizer, [])
        for token in tokens:
            spelling.add(token)
        spelling.end()
        return [*spelling.starts, len(text)]

    def bodies(self, asked: Asked, tasks: Sequence[Task]) -> Bodies:
        model, chat = self.model_of(asked), isinstance(asked, ChatRequest)
        shown = model.shown if isinstance(asked, ChatRequest) and asked.usable_tools else {}
        hidden = {*model.special.values()} - {*shown}
        likelihoods = [
            Likelihoods(
                model.tokenizer,
                chat,
                hidden,
                task.prompt,
                self._starts(model, asked, number // asked.n, task.prompt),
            )
            for number, task in enumerate(tasks if asked.likeliest is not None else [])
        ]
        return Bodies(asked, model.name, sum(len(task.prompt) for task in tasks[:: asked.n]), likelihoods)

    def _tokens(self, model: ServedModel, text: str, begins: bool) -> list[int]:
        """A text's tokens, behind the beginning token where it ``begins``.

        One that is too long costs hardly more than one that fits: its beginnings are looked at first.

        :raises HttpError: it has more tokens than a request may have.
        """
        end = _CHARACTERS_PER_TOKEN * self.context.tokens
        while end < len(text):
            count = len(encoded(model.engine, [text[:end]])[0])
            if count > self.context.tokens + _CUT_TOKENS:
                raise self._too_long(f"more than {self.context.tokens:,}")
            end *= 2
        return (begun if begins else encoded)(model.engine, [text])[0]

    def _stops(self, model: ServedModel, asked: Asked) -> list[int]:
        """Tokens that end the answer. A special token has no text in it, so a text to stop at that is one stands for the token."""
        special = model.special
        for text in asked.stop:
            hidden = next((one for one in special if one and one in text), None)
            if hidden is not None and text not in special:
                raise HttpError(
                    400,
                    f"stop: {text[:60]!r} can never come, since answers do not show the special token {hidden!r}; stop at "
                    f"{hidden!r} alone, or at the rest",
                )
        wanted = asked.stop_token_ids or []
        if not _are_tokens(model, wanted):
            raise HttpError(400, f"stop_token_ids must be ids from 0 to {model.rows - 1}")
        own = [] if asked.ignore_eos else [token for token in model.stops if _are_tokens(model, [token])]
        return sorted({*own, *wanted, *(special[text] for text in asked.stop if text in special)})

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
        """The answers' texts, one piece a token (it may be empty), until all of them end.

        Args:
            silent: nothing is told of the new tokens.

        Raises:
            HttpError: the pipeline failed, or the service ends.
            ConnectionError: the client is not ``alive`` any more.
        """
        while not all(choice.finish for choice in choices):
            if not alive():
                raise ConnectionError("the client has gone")
            try:
                news = answers[0].events.get(timeout=LOOK_S)
            except queue.Empty:
                if self.ending():
                    raise ending_error() from None
                continue
            if isinstance(news, HttpError):
                raise news
            choice = choices[news.choice]
            if choice.finish is not None:  # a text to stop at has come; what is written since then is nobody's
                continue
            text = choice.add(news, silent)
            if choice.finish is not None:
                answers[news.choice].given_up.set()
            yield choice, text


def _echo(asked: Asked) -> bool:
    return not isinstance(asked, ChatRequest) and asked.echo


def _are_tokens(model: ServedModel, tokens: Sequence[int]) -> bool:
    return all(0 <= token < model.rows for token in tokens)


def ending_error(reason: str = "") -> HttpError:
    unknown = "it was asked to, or another rank has failed (its launcher says which)"
    return HttpError(503, f"the service ends: {reason or unknown}")
