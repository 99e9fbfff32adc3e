"""Requests in the format of OpenAI's API: supported fields and their ranges. ``request_fields`` rejects all other fields."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError, field_validator, model_validator

from hetero_mpi.inference.sampling import Sampling
from hetero_mpi.serve.request_fields import refused_fields
from hetero_mpi.serve.web.server import HttpError
from hetero_mpi.serve.wording import parse_json

COMPLETION_TOKENS = 16
"""Default maximum number of new tokens in a plain completion, as in OpenAI's API. The default in a chat is the whole context."""
MAX_STOP_TEXTS = 16
MAX_STOP_CHARACTERS = 1000
"""Limits on the number and length of stop strings, because every new token is checked against all of them."""
MAX_MESSAGES = 10_000
MAX_STOP_TOKENS = MAX_TOOLS = 128
MAX_CHOICES = 128
"""Maximum number of answers per request, which is the number of prompts times ``n``."""
MAX_TOP_LOGPROBS = 20
_MAX_ERRORS = 5
_MAX_ERROR_CHARACTERS = 200
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class SamplingDefaults(BaseModel):
    """Sampling parameters for requests that do not set them. The defaults are those of OpenAI's API."""

    model_config = ConfigDict(allow_inf_nan=False)

    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)

    @property
    def given(self) -> dict[str, float]:
        """The values that were set explicitly."""
        return {name: getattr(self, name) for name in sorted(self.model_fields_set)}


class _StrictObject(BaseModel):
    """An object inside a request. Unsupported fields are rejected as in the request itself."""

    @model_validator(mode="before")
    @classmethod
    def _nothing_unknown(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and (refused := refused_fields(values, frozenset(cls.model_fields), chat=True)):
            raise ValueError(f"not supported: {refused}")
        return values


class _StreamOptions(_StrictObject):
    include_usage: bool | None = None


class _Request(BaseModel):
    """Fields shared by both kinds of request."""

    model_config = ConfigDict(allow_inf_nan=False)

    model: str | None = None
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: list[int] | None = Field(None, max_length=MAX_STOP_TOKENS)
    min_tokens: int | None = Field(None, ge=0)
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None

    @field_validator("stop", mode="plain")
    @classmethod
    def _stop_texts(cls, stop: Any) -> tuple[str, ...]:
        texts = [stop] if isinstance(stop, str) else [] if stop is None else stop
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise ValueError("must be a string or a list of strings")
        if len(texts) > MAX_STOP_TEXTS or not all(1 <= len(text) <= MAX_STOP_CHARACTERS for text in texts):
            raise ValueError(f"at most {MAX_STOP_TEXTS} stop strings, each of 1 to {MAX_STOP_CHARACTERS:,} characters")
        return tuple(texts)

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def sampling(self, defaults: SamplingDefaults, number: int = 0) -> Sampling:
        """Return the sampling parameters of choice ``number`` (from 0) of ``n``. Without a seed, each choice gets a random one."""
        requested = {name: getattr(self, name) for name in SamplingDefaults.model_fields}
        values = {**defaults.model_dump(), **{name: value for name, value in requested.items() if value is not None}}
        values["top_k"] = max(0, values["top_k"])  # -1 means 0
        seed = self.seed if self.seed is not None else secrets.randbits(63)
        return Sampling(**values, seed=(seed + number) % 2**63)


class CompletionRequest(_Request):
    """The body of a request to ``/v1/completions``. ``prompt`` is a string, a list of token ids, or a list of either."""

    usable_tools: ClassVar[list[dict[str, Any]]] = []
    prompt: list[str | list[int]]
    max_tokens: int | None = Field(None, ge=0)
    echo: bool = Field(False, strict=True)
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS, strict=True)

    @field_validator("prompt", mode="plain")
    @classmethod
    def _prompts(cls, prompt: Any) -> list[str | list[int]]:
        is_list = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str | list)
        prompts = prompt if is_list else [prompt]
        if len(prompts) > MAX_CHOICES:
            raise ValueError(f"at most {MAX_CHOICES} prompts per request, not {len(prompts):,}")
        for text_or_ids in prompts:
            if isinstance(text_or_ids, list):
                invalid = next((index for index, token in enumerate(text_or_ids) if type(token) is not int), None)
                if invalid is not None:
                    raise ValueError(
                        f"must be a string, token ids, or a list of either; entry {invalid} is {_json_type(text_or_ids[invalid])}"
                    )
            elif not isinstance(text_or_ids, str):
                raise ValueError(f"must be a string, token ids, or a list of either, not {_json_type(text_or_ids)}")
        return prompts

    @model_validator(mode="after")
    def _not_too_many(self) -> CompletionRequest:
        if self.n * len(self.prompt) > MAX_CHOICES:
            raise ValueError(
                f"at most {MAX_CHOICES} answers per request, not {self.n} for each of {len(self.prompt)} prompts"
            )
        return self

    @property
    def limit(self) -> int | None:
        """Maximum number of new tokens, or None if only the context limits it."""
        return self.max_tokens if self.max_tokens is not None else COMPLETION_TOKENS

    @property
    def likeliest(self) -> int | None:
        """Number of top tokens to return with their logprobs in addition to the sampled token. None requests no logprobs."""
        return self.logprobs


class _CalledFunction(_StrictObject):
    name: str
    arguments: dict[str, Any]

    @field_validator("arguments", mode="before")
    @classmethod
    def _opened(cls, arguments: Any) -> Any:
        """Parse arguments into an object, which chat templates expect; in OpenAI's API they are a JSON string."""
        value = parse_json(arguments) if isinstance(arguments, str) else arguments
        if not isinstance(value, dict):
            raise ValueError("must be a JSON object, or a string with one")
        return value


class _Call(_StrictObject):
    """A tool call in an earlier answer of the conversation."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: _CalledFunction
    index: int | None = Field(None, exclude=True)


class _Function(_StrictObject):
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] | None = None

    @field_validator("strict", mode="before")
    @classmethod
    def _cannot_be_guaranteed(cls, strict: Any) -> Any:
        if strict is True:
            raise ValueError("true cannot be guaranteed, because generation is unconstrained: omit it")
        return strict


class _Tool(_StrictObject):
    type: Literal["function"]
    function: _Function


class _Message(_StrictObject):
    """A chat message. The chat template may ignore ``name`` and ``reasoning_content`` (the reasoning in an earlier answer)."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = Field(None, max_length=MAX_TOOLS)
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _with_content(cls, message: Any) -> Any:
        """Replace missing content with "": answers with only tool calls have none, and OpenAI's client sends them back as is."""
        if isinstance(message, Mapping) and message.get("role") == "assistant" and message.get("content") is None:
            return {**message, "content": ""}
        return message

    @field_validator("content", mode="before")
    @classmethod
    def _joined(cls, content: Any) -> Any:
        """Join content that is sent as a list of text parts."""
        if not isinstance(content, list):
            return content
        for part in content:
            plain = isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
            if not plain or refused_fields(part, frozenset({"type", "text"}), chat=True):
                raise ValueError('only parts of the form {"type": "text", "text": "..."} are supported')
        return "".join(part["text"] for part in content)

    @model_validator(mode="after")
    def _calls_of_answers_only(self) -> _Message:
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"a message with role {self.role} cannot call tools")
        return self

    def plain(self, as_objects: bool = True) -> dict[str, Any]:
        """Convert the message for a chat template. If ``as_objects`` is false, the arguments of calls become JSON strings."""
        message = {**self.model_dump(exclude_none=True), "role": "system" if self.role == "developer" else self.role}
        if not self.tool_calls:
            message.pop("tool_calls", None)
        elif not as_objects:
            for call in message["tool_calls"]:
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        return message


class ChatRequest(_Request):
    """The body of a request to ``/v1/chat/completions``."""

    echo: ClassVar[bool] = False
    messages: Annotated[list[_Message], FailFast(), Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = Field(None, strict=True)
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: list[_Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    """If false, only the first tool call of an answer is returned."""

    @field_validator("tools")
    @classmethod
    def _told_apart(cls, tools: list[_Tool] | None) -> list[_Tool] | None:
        names = [tool.function.name for tool in tools or []]
        if duplicate := next((name for index, name in enumerate(names) if name in names[:index]), None):
            raise ValueError(f"two tools have the name {duplicate[:60]!r}: calls would be ambiguous")
        return tools

    @field_validator("tool_choice")
    @classmethod
    def _free(cls, choice: Any) -> Any:
        if choice not in (None, "none", "auto"):
            raise ValueError('must be "auto" or "none": generation is unconstrained, so a call cannot be guaranteed')
        return choice

    @model_validator(mode="after")
    def _of_wanted_likelihoods(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs requires logprobs = true")
        return self

    @property
    def likeliest(self) -> int | None:
        """See ``CompletionRequest.likeliest``."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def usable_tools(self) -> list[dict[str, Any]]:
        """The tools that the model may call, in the format that chat templates expect."""
        return [tool.model_dump(exclude_none=True) for tool in self.tools or []] if self.tool_choice != "none" else []

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


ApiRequest = CompletionRequest | ChatRequest


def parse(kind: type[ApiRequest], body: bytes) -> ApiRequest:
    """Parse a request's body.

    Raises HttpError if the body is not a JSON object, or if it has unsupported fields or invalid values.
    """
    try:
        values = json.loads(body.decode("utf-8-sig"), parse_constant=_reject_constant)
        if _SURROGATE.search(body):
            json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        reason = "half of a surrogate pair (from \\ud800 to \\udfff without the other half)"
        raise HttpError(400, f"the body has {reason}, which is not a character: send complete characters") from None
    except (ValueError, RecursionError) as error:
        raise HttpError(400, f"the body is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise HttpError(400, f"the body must be a JSON object, not {_json_type(values)}")
    if refused := refused_fields(values, frozenset(kind.model_fields), kind is ChatRequest):
        raise HttpError(400, f"not supported by this server: {refused}; omit it", code="unsupported_parameter")
    try:
        return kind.model_validate({name: value for name, value in values.items() if value is not None})
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"[:_MAX_ERROR_CHARACTERS]
            for problem in error.errors(include_url=False, include_context=False, include_input=False)[:_MAX_ERRORS]
        ]
        raise HttpError(400, "; ".join(problems)) from None


def _reject_constant(word: str) -> Any:
    raise ValueError(f"{word} is not a JSON number")


def _json_type(value: Any) -> str:
    """Describe the JSON type of a value for an error message."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), f"the number {value}"[:40])
