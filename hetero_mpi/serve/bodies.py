"""The JSON of OpenAI's API that answers a request: whole, or chunk by chunk."""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection, Sequence
from typing import Any

from transformers import PreTrainedTokenizerFast

from hetero_mpi.data.tokenizer import token_bytes
from hetero_mpi.inference.decoding import Scored
from hetero_mpi.serve.api_requests import Asked, ChatRequest
from hetero_mpi.serve.wording import Choice, Wording

_LEAST = -9999.0
"""In place of a log-likelihood of minus infinity, which JSON does not have."""


class Likelihoods:
    """Log-likelihoods of one answer's tokens, in OpenAI's form.

    Args:
        hidden: the tokens that no text shows.
        prompt: the prompt's tokens.
        starts: the characters at which these begin in the answer, then those at which the new ones do; none where the answer
            does not begin with them.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        chat: bool,
        hidden: Collection[int],
        prompt: Sequence[int],
        starts: Sequence[int],
    ) -> None:
        self._tokenizer, self._chat, self._hidden, self._starts = tokenizer, chat, hidden, starts
        self._before = None if starts else prompt[-1]
        self._first = prompt[0] if starts else None
        """The token that has no likelihood, until it is told."""
        self._number = 0
        """Of the next token, from 0."""

    def told(self, scores: Sequence[Scored], wording: Wording) -> dict[str, Any]:
        if self._chat:
            return {"content": [self._of_chat(one, wording) for one in scores], "refusal": None}
        found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        if self._first is not None:
            self._add(found, self._first, None, None, wording)
            self._first = None
        for one in scores:
            most: dict[str, float] = {}
            for token, likelihood in ((one.token, one.likelihood), *one.likeliest):
                text = self._text(token)  # of tokens that look alike the likeliest is told
                most[text] = max(most.get(text, _LEAST), likelihood)
            self._add(found, one.token, max(_LEAST, one.likelihood), most, wording)
        return found

    def _add(
        self, found: dict[str, list[Any]], token: int, likelihood: float | None, most: Any, wording: Wording
    ) -> None:
        new = self._number - max(0, len(self._starts) - 1)
        start = (
            self._starts[self._number] if new < 0 else wording.start(new) + (self._starts[-1] if self._starts else 0)
        )
        for name, value in zip(found, (self._text(token), likelihood, most, start), strict=True):
            found[name].append(value)
        self._before, self._number = token, self._number + 1

    def _of_chat(self, one: Scored, wording: Wording) -> dict[str, Any]:
        likeliest = [self._entry(*pair) for pair in one.likeliest]
        own, shown = self._entry(one.token, one.likelihood), wording.shown_characters(self._number)
        if shown is not None or one.token in self._hidden:
            own["bytes"] = list(own["token"][: shown or 0].encode())  # all bytes together are the content's
        self._before, self._number = one.token, self._number + 1
        return {**own, "top_logprobs": likeliest}

    def _entry(self, token: int, likelihood: float) -> dict[str, Any]:
        text = self._text(token)
        own = token_bytes(str(self._tokenizer.convert_ids_to_tokens(token)), text)
        return {"token": text, "logprob": max(_LEAST, likelihood), "bytes": list(own)}

    def _text(self, token: int) -> str:
        """Text that the token adds to that before it: some tokenizers drop a space at a text's beginning."""
        behind = [] if self._before is None else [self._before]
        before, both = (
            str(self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))
            for tokens in (behind, [*behind, token])
        )
        more = both.startswith(before) and both != before  # a part of a character may change nothing
        return both.removeprefix(before) if more else str(self._tokenizer.decode([token]))


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
        scores = (
            self._likelihoods[choice.number].told(choice.take_scores(), choice.wording) if self._likelihoods else None
        )
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
