"""What clients of OpenAI's API send: its fields, which of them are refused, and errors in the API's form.

As other compatible servers do, unknown fields are ignored. A known field that would change the answer and is not supported is
refused, unless its value asks for nothing.
"""

from __future__ import annotations

import json
import secrets
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from hetero_mpi.model.decoding import Sampling

COMPLETION_TOKENS = 16
"""New tokens of a plain completion whose client gives no number, as in OpenAI's API. A chat may fill the context."""
MOST_STOPS, LONGEST_STOP = 16, 1000
"""Texts to stop at, and the characters of each: every token of an answer is compared with all of them."""
_ASKS_FOR_NOTHING: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (),
    "top_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
"""Fields that are not supported -> the values that are accepted all the same, beside null."""


class ApiError(Exception):
    """An answer other than 200. ``kind``: OpenAI's ``type`` of the error."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error", code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.kind, self.code = status, kind, code

    def body(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": self.kind, "param": None, "code": self.code}}


class _StreamOptions(BaseModel):
    include_usage: bool | None = None


class _Asked(BaseModel):
    """The fields of both kinds of request."""

    model_config = ConfigDict(allow_inf_nan=False)

    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None

    @field_validator("stop")
    @classmethod
    def _stops_are_texts(cls, stop: str | list[str] | None) -> str | list[str] | None:
        texts = [stop] if isinstance(stop, str) else stop or []
        if len(texts) > MOST_STOPS or not all(1 <= len(text) <= LONGEST_STOP for text in texts):
            raise ValueError(f"at most {MOST_STOPS} texts to stop at, each of 1 to {LONGEST_STOP:,} characters")
        return stop

    @property
    def limit(self) -> int | None:
        """New tokens at most; None: as many as the context has room for."""
        return self.max_tokens

    @property
    def stop_texts(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def sampling(self) -> Sampling:
        """OpenAI's defaults; without a seed every answer is another."""
        seed = self.seed if self.seed is not None else secrets.randbits(63)
        temperature = 1.0 if self.temperature is None else self.temperature
        return Sampling(temperature, 1.0 if self.top_p is None else self.top_p, seed % 2**63)


class CompletionRequest(_Asked):
    """The body of ``/v1/completions``. ``prompt``: a text, or token ids."""

    prompt: str | list[int] | list[str]

    @field_validator("prompt")
    @classmethod
    def _one_prompt(cls, prompt: str | list[int] | list[str]) -> str | list[int] | list[str]:
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str):
            if len(prompt) > 1:
                raise ValueError(f"one prompt a request, not {len(prompt)}")
            return prompt[0]
        return prompt

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_tokens is not None else COMPLETION_TOKENS


class _Message(BaseModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: str

    @field_validator("content", mode="before")
    @classmethod
    def _joined(cls, content: Any) -> Any:
        """Parts of a text as one."""
        if not isinstance(content, list):
            return content
        texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        known = [text for text in texts if isinstance(text, str)]
        if len(known) < len(content):
            raise ValueError('the only parts that are understood are {"type": "text", "text": "..."}')
        return "".join(known)

    def plain(self) -> dict[str, str]:
        """As chat templates know it."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content}


class ChatRequest(_Asked):
    """The body of ``/v1/chat/completions``."""

    messages: list[_Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


Asked = CompletionRequest | ChatRequest


def parse(kind: type[Asked], body: bytes) -> Asked:
    """A request's body. Raises ApiError: no JSON object, a field that is not supported, or values of the wrong type or range; all
    that are wrong at once.
    """
    try:
        values = json.loads(body)
        json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        half = "half of a surrogate pair (from \\ud800 to \\udfff without the other half)"
        raise ApiError(400, f"the body has {half}, which is no character: send whole characters") from None
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ApiError(400, f"the body must be a JSON object, not {type(values).__name__}")
    if (
        kind is ChatRequest and values.get("logprobs") is False
    ):  # in a completion it is a number, and 0 asks for something
        del values["logprobs"]
    asked_for = [name for name, unasked in _ASKS_FOR_NOTHING.items() if values.get(name) not in (None, *unasked)]
    if asked_for:
        told = ", ".join(f"{name} = {json.dumps(values[name])[:60]}" for name in asked_for)
        raise ApiError(400, f"not supported by this server: {told}; leave it out", code="unsupported_parameter")
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        wrong = (f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise ApiError(400, "; ".join(wrong)) from None
