"""Requests of OpenAI's API: the fields that are honoured, with their ranges. Others are refused by ``request_fields``."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError, field_validator, model_validator

from hetero_mpi.inference.decoding import Sampling
from hetero_mpi.serve.request_fields import refused_fields
from hetero_mpi.serve.web.server import HttpError
from hetero_mpi.serve.wording import opened

COMPLETION_TOKENS = 16
"""New tokens of a plain completion whose client gives no number, as in OpenAI's API. A chat may fill the context."""
MOST_STOPS, LONGEST_STOP = 16, 1000
"""Texts to stop at, and the characters of each: every token of an answer is compared with all of them."""
MOST_MESSAGES, MOST_STOP_TOKENS, MOST_TOOLS = 10_000, 128, 128
MOST_CHOICES = 128
"""Answers of a request: its prompts, times ``n``."""
MOST_LIKELIEST = 20
_TOLD_ERRORS, _TOLD_CHARACTERS = 5, 200
_HALF_CHARACTER = re.compile(rb"\\u[dD][89a-fA-F]")


class SamplingDefaults(BaseModel):
    """How tokens are chosen where a request does not say it: OpenAI's defaults."""

    model_config = ConfigDict(allow_inf_nan=False)

    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)

    @property
    def given(self) -> dict[str, float]:
        """Those that somebody has set."""
        return {name: getattr(self, name) for name in sorted(self.model_fields_set)}


class _Closed(BaseModel):
    """An object within a request; what it has besides its fields is refused as in the request itself."""

    @model_validator(mode="before")
    @classmethod
    def _nothing_unknown(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and (refused := refused_fields(values, frozenset(cls.model_fields), chat=True)):
            raise ValueError(f"not supported: {refused}")
        return values


class _StreamOptions(_Closed):
    include_usage: bool | None = None


class _Asked(BaseModel):
    """The fields of both kinds of request."""

    model_config = ConfigDict(allow_inf_nan=False)

    model: str | None = None
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = Field(None, ge=0)
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None

    @field_validator("stop", mode="plain")
    @classmethod
    def _stop_texts(cls, stop: Any) -> tuple[str, ...]:
        texts = [stop] if isinstance(stop, str) else [] if stop is None else stop
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise ValueError("must be a text or a list of texts")
        if len(texts) > MOST_STOPS or not all(1 <= len(text) <= LONGEST_STOP for text in texts):
            raise ValueError(f"at most {MOST_STOPS} texts to stop at, each of 1 to {LONGEST_STOP:,} characters")
        return tuple(texts)

    @field_validator("stop_token_ids", mode="before")
    @classmethod
    def _few(cls, tokens: Any) -> Any:
        if isinstance(tokens, list) and len(tokens) > MOST_STOP_TOKENS:
            raise ValueError(f"at most {MOST_STOP_TOKENS} tokens to stop at")
        return tokens

    @property
    def limit(self) -> int | None:
        """New tokens at most; None: as many as the context has room for."""
        return self.max_tokens

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def sampling(self, defaults: SamplingDefaults, number: int = 0) -> Sampling:
        """Without a seed every answer is another. ``number``: of the choice among ``n``, from 0."""
        said = {name: getattr(self, name) for name in SamplingDefaults.model_fields}
        values = {**defaults.model_dump(), **{name: value for name, value in said.items() if value is not None}}
        values["top_k"] = max(0, values["top_k"])  # -1 says the same as 0
        seed = self.seed if self.seed is not None else secrets.randbits(63)
        return Sampling(**values, seed=(seed + number) % 2**63)


class CompletionRequest(_Asked):
    """The body of ``/v1/completions``. ``prompt``: a text, token ids, or a list of either."""

    prompt: list[str | list[int]]
    max_tokens: int | None = Field(None, ge=0)
    echo: bool = Field(False, strict=True)
    logprobs: int | None = Field(None, ge=0, le=MOST_LIKELIEST, strict=True)

    @field_validator("prompt", mode="plain")
    @classmethod
    def _prompts(cls, prompt: Any) -> list[str | list[int]]:
        several = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str | list)
        prompts = prompt if several else [prompt]
        if len(prompts) > MOST_CHOICES:
            raise ValueError(f"at most {MOST_CHOICES} prompts a request, not {len(prompts):,}")
        for one in prompts:
            if isinstance(one, list):
                wrong = next((place for place, token in enumerate(one) if type(token) is not int), None)
                if wrong is not None:
                    raise ValueError(
                        f"must be a text or a list of token ids, or several; entry {wrong} is {_kind(one[wrong])}"
                    )
            elif not isinstance(one, str):
                raise ValueError(f"must be a text or a list of token ids, or several, not {_kind(one)}")
        return prompts

    @model_validator(mode="after")
    def _not_too_many(self) -> CompletionRequest:
        if self.n * len(self.prompt) > MOST_CHOICES:
            raise ValueError(
                f"at most {MOST_CHOICES} answers a request, not {self.n} of each of {len(self.prompt)} prompts"
            )
        return self

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_tokens is not None else COMPLETION_TOKENS

    @property
    def likeliest(self) -> int | None:
        """The likeliest tokens whose log-likelihoods are wanted beside that of the chosen one; None: no likelihood is wanted."""
        return self.logprobs


class _Called(_Closed):
    name: str
    arguments: dict[str, Any]

    @field_validator("arguments", mode="before")
    @classmethod
    def _opened(cls, arguments: Any) -> Any:
        """An object, as chat templates have it; OpenAI's API has it as JSON in a text."""
        found = opened(arguments) if isinstance(arguments, str) else arguments
        if not isinstance(found, dict):
            raise ValueError("must be a JSON object, or one in a text")
        return found


class _Call(_Closed):
    """A call of a tool in an earlier answer."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: _Called
    index: int | None = Field(None, exclude=True)


class _Function(_Closed):
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] | None = None

    @field_validator("strict", mode="before")
    @classmethod
    def _cannot_be_guaranteed(cls, strict: Any) -> Any:
        if strict is True:
            raise ValueError("true cannot be guaranteed, as answers are written freely: leave it out")
        return strict


class _Tool(_Closed):
    type: Literal["function"]
    function: _Function


class _Message(_Closed):
    """``name`` and ``reasoning_content`` (a thought of an earlier answer) go to the chat template, which may leave them out."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = Field(None, max_length=MOST_TOOLS)
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _with_content(cls, message: Any) -> Any:
        """An answer may have none (a call of a tool has), and OpenAI's client sends it back so."""
        if isinstance(message, Mapping) and message.get("role") == "assistant" and message.get("content") is None:
            return {**message, "content": ""}
        return message

    @field_validator("content", mode="before")
    @classmethod
    def _joined(cls, content: Any) -> Any:
        """Parts of a text as one."""
        if not isinstance(content, list):
            return content
        for part in content:
            plain = isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
            if not plain or refused_fields(part, frozenset({"type", "text"}), chat=True):
                raise ValueError('the only parts that are understood are {"type": "text", "text": "..."}')
        return "".join(part["text"] for part in content)

    @model_validator(mode="after")
    def _calls_of_answers_only(self) -> _Message:
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"a message of the role {self.role} calls no tools")
        return self

    def plain(self, opened: bool = True) -> dict[str, Any]:
        """The message in the form of chat templates. ``opened``: arguments of calls are objects, else JSON in a text."""
        found = {**self.model_dump(exclude_none=True), "role": "system" if self.role == "developer" else self.role}
        if not self.tool_calls:
            found.pop("tool_calls", None)
        elif not opened:
            for call in found["tool_calls"]:
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        return found


class ChatRequest(_Asked):
    """The body of ``/v1/chat/completions``."""

    messages: Annotated[list[_Message], FailFast(), Field(min_length=1, max_length=MOST_MESSAGES)]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = Field(None, strict=True)
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LIKELIEST)
    tools: list[_Tool] | None = Field(None, max_length=MOST_TOOLS)
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    """False: an answer has its first call only."""

    @field_validator("tools")
    @classmethod
    def _told_apart(cls, tools: list[_Tool] | None) -> list[_Tool] | None:
        names = [tool.function.name for tool in tools or []]
        if twice := next((name for place, name in enumerate(names) if name in names[:place]), None):
            raise ValueError(f"two have the name {twice[:60]!r}: a call could not tell which")
        return tools

    @field_validator("tool_choice")
    @classmethod
    def _free(cls, choice: Any) -> Any:
        if choice not in (None, "none", "auto"):
            raise ValueError('must be "auto" or "none": answers are written freely, so a call cannot be guaranteed')
        return choice

    @model_validator(mode="after")
    def _of_wanted_likelihoods(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs = true")
        return self

    @property
    def likeliest(self) -> int | None:
        """As a completion's."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def usable_tools(self) -> list[dict[str, Any]]:
        """The tools that the answer may call, in the form of chat templates."""
        return [tool.model_dump(exclude_none=True) for tool in self.tools or []] if self.tool_choice != "none" else []

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


Asked = CompletionRequest | ChatRequest


def parse(kind: type[Asked], body: bytes) -> Asked:
    """A request's body. Raises HttpError: no JSON object, a field that is not supported, or values of the wrong type or range; of
    a list the first entry that is wrong.
    """
    try:
        values = json.loads(body.decode("utf-8-sig"), parse_constant=_no_number)
        if _HALF_CHARACTER.search(body):
            json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        half = "half of a surrogate pair (from \\ud800 to \\udfff without the other half)"
        raise HttpError(400, f"the body has {half}, which is no character: send whole characters") from None
    except (ValueError, RecursionError) as error:
        raise HttpError(400, f"the body is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise HttpError(400, f"the body must be a JSON object, not {_kind(values)}")
    if refused := refused_fields(values, frozenset(kind.model_fields), kind is ChatRequest):
        raise HttpError(400, f"not supported by this server: {refused}; leave it out", code="unsupported_parameter")
    try:
        return kind.model_validate({name: value for name, value in values.items() if value is not None})
    except ValidationError as error:
        wrong = [
            f"{'.'.join(map(str, one['loc']))}: {one['msg']}"[:_TOLD_CHARACTERS]
            for one in error.errors(include_url=False, include_context=False, include_input=False)[:_TOLD_ERRORS]
        ]
        raise HttpError(400, "; ".join(wrong)) from None


def _no_number(word: str) -> Any:
    raise ValueError(f"{word} is no number of JSON")


def _kind(value: Any) -> str:
    """The name of a type in JSON."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), f"the number {value}"[:40])
