"""Requests of OpenAI's API: the fields that are honoured, with their ranges, and those that the servers of OpenAI, vLLM
and llama.cpp know and this one does not honour.

A field may change the answer, so one that is not honoured is refused, unless it is listed here as changing nothing, or its value
asks for nothing.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError, field_validator, model_validator

from hetero_mpi.model.decoding import Sampling
from hetero_mpi.web.server import HttpError

_WHOSE = (
    "model user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention prompt_cache_options "
    "prediction parallel_tool_calls include_obfuscation cache_control request_id priority cache_salt cache_prompt id_slot "
    "n_keep n_discard n_cache_reuse"
)
"""Fields that say whose a request is, and where and when it is computed."""
_OF_REFUSED = (
    "guided_decoding_backend guided_whitespace_pattern length_penalty spaces_between_special_tokens "
    "return_tokens_as_token_ids post_sampling_probs repeat_last_n penalize_nl mirostat_tau mirostat_eta dynatemp_exponent "
    "xtc_threshold dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers min_keep adaptive_decay "
    "parse_tool_calls preserved_tokens grammar_lazy grammar_triggers chat_format speculative.n_max speculative.n_min "
    "speculative.p_min max_repetition_pattern_size min_repetition_pattern_size"
)
"""Settings of methods that are refused by a field of their own."""
_CHANGE_NOTHING = frozenset([*_WHOSE.split(), *_OF_REFUSED.split()])
_ASKS_FOR_NOTHING: dict[str, tuple[Any, ...]] = {
    # OpenAI
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
    "logit_bias": ({}, []),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "moderation": (),
    # vLLM
    "use_beam_search": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "documents": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structural_tag": (),
    "logits_processors": ([],),
    "return_token_ids": (False,),
    "include_reasoning": (True,),
    "thinking_token_budget": (-1,),
    "prompt_embeds": (),
    "kv_transfer_params": ({},),
    "vllm_xargs": ({},),
    "repetition_min_count": (0,),
    # llama.cpp
    "n_predict": (-1,),
    "n_indent": (0,),
    "n_probs": (0,),
    "n_cmpl": (1,),
    "t_max_predict_ms": (0, -1),
    "repeat_penalty": (1,),
    "typical_p": (1,),
    "typ_p": (1,),
    "tfs_z": (1,),
    "top_n_sigma": (-1, 0),
    "adaptive_target": (-1,),
    "mirostat": (0,),
    "dynatemp_range": (0,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
    "samplers": (),
    "grammar": ("",),
    "json_schema": (),
    "lora": ([],),
    "response_fields": ([],),
    "return_tokens": (False,),
    "return_progress": (False,),
    "timings_per_token": (False,),
    "reasoning_format": ("none",),
    "reasoning_in_content": (False,),
    "reasoning_budget": (-1,),
    "thinking_forced_open": (False,),
}
"""Field -> the values that are accepted all the same, beside null."""
_EMPTY: tuple[Any, ...] = (False, "", [], {})
"""Values that are accepted of a field that nobody knows, beside null."""
_TOLD = 5


def refused_fields(values: Mapping[str, Any], honoured: frozenset[str], chat: bool) -> str:
    """The fields of a request's body that are asked for and not honoured, in words; empty: none."""
    own = {"add_special_tokens": (not chat,), **({"logprobs": (False,)} if chat else {})}
    found = [
        name
        for name, value in values.items()
        if name not in honoured
        and name not in _CHANGE_NOTHING
        and value is not None
        and not any(_same(value, one) for one in own.get(name, _ASKS_FOR_NOTHING.get(name, _EMPTY)))
    ]
    told = [f"{name[:60]} = {json.dumps(values[name])[:60]}" for name in found[:_TOLD]]
    return ", ".join([*told, *([f"and {len(found) - _TOLD} more"] if len(found) > _TOLD else [])])


def _same(value: Any, other: Any) -> bool:
    """Equal, and of one kind: to JSON 0 is not false."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


COMPLETION_TOKENS = 16
"""New tokens of a plain completion whose client gives no number, as in OpenAI's API. A chat may fill the context."""
MOST_STOPS, LONGEST_STOP = 16, 1000
"""Texts to stop at, and the characters of each: every token of an answer is compared with all of them."""
MOST_MESSAGES, MOST_STOP_TOKENS = 10_000, 128
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

    def sampling(self, defaults: SamplingDefaults) -> Sampling:
        """Without a seed every answer is another."""
        said = {name: getattr(self, name) for name in SamplingDefaults.model_fields}
        values = {**defaults.model_dump(), **{name: value for name, value in said.items() if value is not None}}
        values["top_k"] = max(0, values["top_k"])  # -1 says the same as 0
        seed = self.seed if self.seed is not None else secrets.randbits(63)
        return Sampling(**values, seed=seed % 2**63)


class CompletionRequest(_Asked):
    """The body of ``/v1/completions``. ``prompt``: a text, or token ids."""

    prompt: str | list[int]

    @field_validator("prompt", mode="plain")
    @classmethod
    def _one_prompt(cls, prompt: Any) -> str | list[int]:
        if isinstance(prompt, list):
            if prompt and isinstance(prompt[0], str):
                if len(prompt) > 1:
                    raise ValueError(f"one prompt a request, not {len(prompt)}")
                return prompt[0]
            wrong = next((place for place, token in enumerate(prompt) if type(token) is not int), None)
            if wrong is None:
                return prompt
            raise ValueError(f"must be a text or a list of token ids; entry {wrong} is {_kind(prompt[wrong])}")
        if not isinstance(prompt, str):
            raise ValueError(f"must be a text or a list of token ids, not {_kind(prompt)}")
        return prompt

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_tokens is not None else COMPLETION_TOKENS


class _Message(_Closed):
    """``name`` and ``reasoning_content`` (a thought of an earlier answer) go to the chat template, which may leave them out."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str
    name: str | None = None
    reasoning_content: str | None = None

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

    def plain(self) -> dict[str, str]:
        """The message in the form of chat templates."""
        role = "system" if self.role == "developer" else self.role
        return {**self.model_dump(exclude_none=True), "role": role}


class ChatRequest(_Asked):
    """The body of ``/v1/chat/completions``."""

    messages: Annotated[list[_Message], FailFast(), Field(min_length=1, max_length=MOST_MESSAGES)]
    max_completion_tokens: int | None = Field(None, ge=1)

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


Asked = CompletionRequest | ChatRequest


def parse(kind: type[Asked], body: bytes) -> Asked:
    """A request's body. Raises HttpError: no JSON object, a field that is not supported, or values of the wrong type or range; of
    a list the first entry that is wrong.
    """
    try:
        values = json.loads(body.decode("utf-8-sig"))
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
        return kind.model_validate(values)
    except ValidationError as error:
        wrong = [
            f"{'.'.join(map(str, one['loc']))}: {one['msg']}"[:_TOLD_CHARACTERS]
            for one in error.errors(include_url=False, include_context=False, include_input=False)[:_TOLD_ERRORS]
        ]
        raise HttpError(400, "; ".join(wrong)) from None


def _kind(value: Any) -> str:
    """The name of a type in JSON."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), f"the number {value}"[:40])
