"""The JSON of OpenAI's API that answers a request: whole, or chunk by chunk."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerFast

from hetero_mpi.model.decoding import Scored
from hetero_mpi.runtime.serve.api_requests import Asked, ChatRequest
from hetero_mpi.runtime.serve.wording import Choice

_LEAST = -9999.0
"""In place of a log-likelihood of minus infinity, which JSON does not have."""


class Likelihoods:
    """Log-likelihoods of one answer's tokens, in OpenAI's form. ``prompt``: its tokens; ``echo``: the answer begins with them."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, chat: bool, prompt: Sequence[int], echo: bool) -> None:
        self._tokenizer, self._chat = tokenizer, chat
        self._before = None if echo else prompt[-1]
        self._first = prompt[0] if echo else None
        """The token that has no likelihood, until it is told."""
        self._offset = 0

    def told(self, scores: Sequence[Scored]) -> dict[str, Any]:
        if self._chat:
            return {"content": [self._of_chat(one) for one in scores], "refusal": None}
        found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        if self._first is not None:
            self._add(found, self._text(self._first), None, None)
            self._before, self._first = self._first, None
        for one in scores:
            most: dict[str, float] = {}
            for token, likelihood in ((one.token, one.likelihood), *one.likeliest):
                text = self._text(token)  # of tokens that look alike the likeliest is told
                most[text] = max(most.get(text, _LEAST), likelihood)
            self._add(found, self._text(one.token), max(_LEAST, one.likelihood), most)
            self._before = one.token
        return found

    def _add(self, found: dict[str, list[Any]], text: str, likelihood: float | None, most: Any) -> None:
        for name, value in zip(found, (text, likelihood, most, self._offset), strict=True):
            found[name].append(value)
        self._offset += len(text)

    def _of_chat(self, one: Scored) -> dict[str, Any]:
        likeliest = [self._entry(*pair) for pair in one.likeliest]
        own = self._entry(one.token, one.likelihood)
        self._before = one.token
        return {**own, "top_logprobs": likeliest}

    def _entry(self, token: int, likelihood: float) -> dict[str, Any]:
        text = self._text(token)
        whole = "\N{REPLACEMENT CHARACTER}" not in text  # else it is a part of a character
        return {"token": text, "logprob": max(_LEAST, likelihood), "bytes": list(text.encode()) if whole else None}

    def _text(self, token: int) -> str:
        """Text that the token adds to that before it: some tokenizers drop a space at a text's beginning."""
        behind = [] if self._before is None else [self._before]
        before, both = (
            str(self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))
            for tokens in (behind, [*behind, token])
        )
        return both.removeprefix(before) if both.startswith(before) else str(self._tokenizer.decode([token]))


class Bodies:
    """The JSON objects of a request's answers."""

    def __init__(self, asked: Asked, model: str, prompt_tokens: int, likelihoods: Sequence[Likelihoods]) -> None:
        """``likelihoods``: of each choice; none where they are not wanted."""
        self._chat = isinstance(asked, ChatRequest)
        self._first_call_only = isinstance(asked, ChatRequest) and asked.parallel_tool_calls is False
        self._told_usage = asked.include_usage
        self._prompt_tokens, self._likelihoods = prompt_tokens, likelihoods
        kind = "chatcmpl" if self._chat else "cmpl"
        self._head = {"id": f"{kind}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, texts: Sequence[str], choices: Sequence[Choice]) -> dict[str, Any]:
        found = []
        for text, choice in zip(texts, choices, strict=True):
            own: dict[str, Any] = {"text": text}
            if self._chat:
                calls = self._calls(choice)
                message: dict[str, Any] = {"role": "assistant", "content": (text or None) if calls else text}
                own = {"message": {**message, **({"tool_calls": calls} if calls else {})}}
            found.append(self._choice(choice, own, choice.finish))
        name = "chat.completion" if self._chat else "text_completion"
        return {**self._head, "object": name, "choices": found, "usage": self._usage(choices)}

    def chunk(self, choice: Choice, text: str | None, first: bool = False) -> dict[str, Any]:
        """A piece of an answer. ``text``: None at its end."""
        delta: dict[str, Any] = {
            **({"role": "assistant"} if first else {}),
            **({"content": text} if text is not None else {}),
        }
        if text is None and (calls := self._calls(choice)):
            delta = {**delta, "tool_calls": [{"index": index, **call} for index, call in enumerate(calls)]}
        own = {"delta": delta} if self._chat else {"text": text or ""}
        return self._chunk([self._choice(choice, own, choice.finish if text is None else None)])

    def usage_chunk(self, choices: Sequence[Choice]) -> list[dict[str, Any]]:
        """The numbers of tokens, where the client wants them."""
        return [{**self._chunk([]), "usage": self._usage(choices)}] if self._told_usage else []

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        name = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._head, "object": name, "choices": choices, **({"usage": None} if self._told_usage else {})}

    def _choice(self, choice: Choice, own: dict[str, Any], finish: str | None) -> dict[str, Any]:
        scores = self._likelihoods[choice.number].told(choice.take_scores()) if self._likelihoods else None
        return {"index": choice.number, **own, "logprobs": scores, "finish_reason": finish}

    def _calls(self, choice: Choice) -> list[dict[str, Any]]:
        return choice.calls[:1] if self._first_call_only else choice.calls

    def _usage(self, choices: Sequence[Choice]) -> dict[str, int]:
        written = sum(choice.wording.tokens for choice in choices)
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": written,
            "total_tokens": self._prompt_tokens + written,
        }
