"""Builds JSON responses in OpenAI's format, either complete or streamed in chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection, Sequence
from typing import Any

from transformers import PreTrainedTokenizerFast

from hetero_mpi.data.tokenizer import token_bytes
from hetero_mpi.inference.sampling import Scored
from hetero_mpi.serve.api_requests import ApiRequest, ChatRequest
from hetero_mpi.serve.wording import Choice, StopStringFilter

_MIN_LOGPROB = -9999.0
"""Lower bound of reported logprobs. It replaces minus infinity, which JSON cannot represent."""


class LogprobFormatter:
    """Formats the logprobs of one answer's tokens as in OpenAI's API.

    Args:
        hidden: Ids of tokens that are not shown in the text.
        prompt: Token ids of the prompt.
        starts: If the prompt is echoed, the position in the answer at which each of its tokens starts, and the prompt's length.
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
        """First token of an echoed prompt, which has no logprob; None once it has been formatted."""
        self._number = 0
        """Index of the next token, from 0."""

    def format_scores(self, scores: Sequence[Scored], wording: StopStringFilter) -> dict[str, Any]:
        if self._chat:
            return {"content": [self._chat_entry(scored, wording) for scored in scores], "refusal": None}
        columns: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        if self._first is not None:
            self._add(columns, self._first, None, None, wording)
            self._first = None
        for scored in scores:
            best_by_text: dict[str, float] = {}
            for token, likelihood in ((scored.token, scored.likelihood), *scored.likeliest):
                text = self._text(token)  # of tokens with equal text, the likeliest counts
                best_by_text[text] = max(best_by_text.get(text, _MIN_LOGPROB), likelihood)
            self._add(columns, scored.token, max(_MIN_LOGPROB, scored.likelihood), best_by_text, wording)
        return columns

    def _add(
        self, columns: dict[str, list[Any]], token: int, likelihood: float | None, top: Any, wording: StopStringFilter
    ) -> None:
        new_index = self._number - max(0, len(self._starts) - 1)
        echoed = self._starts[min(self._number, len(self._starts) - 1)] if self._starts else 0
        start = echoed + (wording.start(new_index) if new_index >= 0 else 0)
        for name, value in zip(columns, (self._text(token), likelihood, top, start), strict=True):
            columns[name].append(value)
        self._before, self._number = token, self._number + 1

    def _chat_entry(self, scored: Scored, wording: StopStringFilter) -> dict[str, Any]:
        likeliest = [self._entry(*pair) for pair in scored.likeliest]
        entry, characters = self._entry(scored.token, scored.likelihood), wording.shown_characters(self._number)
        if characters is not None or scored.token in self._hidden:
            entry["bytes"] = list(entry["token"][: characters or 0].encode())  # concatenate to the content's bytes
        self._before, self._number = scored.token, self._number + 1
        return {**entry, "top_logprobs": likeliest}

    def _entry(self, token: int, likelihood: float) -> dict[str, Any]:
        text = self._text(token)
        content = token_bytes(str(self._tokenizer.convert_ids_to_tokens(token)), text)
        return {"token": text, "logprob": max(_MIN_LOGPROB, likelihood), "bytes": list(content)}

    def _text(self, token: int) -> str:
        """Decode a token in the context of the preceding one, because some tokenizers drop a leading space."""
        context = [] if self._before is None else [self._before]
        before, joined = (
            str(self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))
            for tokens in (context, [*context, token])
        )
        extends = joined.startswith(before) and joined != before  # a partial character may add nothing
        return joined.removeprefix(before) if extends else str(self._tokenizer.decode([token]))


class ResponseBuilder:
    """Builds the JSON objects of a request's responses."""

    def __init__(
        self, request: ApiRequest, model: str, prompt_tokens: int, likelihoods: Sequence[LogprobFormatter]
    ) -> None:
        """``likelihoods`` has one formatter per choice, or is empty if the client requests no logprobs."""
        self._chat = isinstance(request, ChatRequest)
        self._first_call_only = isinstance(request, ChatRequest) and request.parallel_tool_calls is False
        self._include_usage = request.include_usage
        self._prompt_tokens, self._likelihoods = prompt_tokens, likelihoods
        kind = "chatcmpl" if self._chat else "cmpl"
        self._head = {"id": f"{kind}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def response(self, texts: Sequence[str], choices: Sequence[Choice]) -> dict[str, Any]:
        results = []
        for text, choice in zip(texts, choices, strict=True):
            content: dict[str, Any] = {"text": text}
            if self._chat:
                calls = self._calls(choice)
                message: dict[str, Any] = {"role": "assistant", "content": (text or None) if calls else text}
                content = {"message": {**message, **({"tool_calls": calls} if calls else {})}}
            results.append(self._choice(choice, content, choice.finish))
        name = "chat.completion" if self._chat else "text_completion"
        return {**self._head, "object": name, "choices": results, "usage": self._usage(choices)}

    def chunk(self, choice: Choice, text: str | None, first: bool = False) -> dict[str, Any]:
        """Build a chunk of a streamed answer. ``text`` is None for the answer's last chunk."""
        delta: dict[str, Any] = {"role": "assistant"} if first else {}
        if text is not None:
            delta["content"] = text
        elif calls := self._calls(choice):
            delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
        content = {"delta": delta} if self._chat else {"text": text or ""}
        return self._chunk([self._choice(choice, content, choice.finish if text is None else None)])

    def usage_chunk(self, choices: Sequence[Choice]) -> list[dict[str, Any]]:
        """Return [chunk with the token counts], or [] if the client does not request it."""
        return [{**self._chunk([]), "usage": self._usage(choices)}] if self._include_usage else []

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        name = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._head, "object": name, "choices": choices, **({"usage": None} if self._include_usage else {})}

    def _choice(self, choice: Choice, content: dict[str, Any], finish: str | None) -> dict[str, Any]:
        scores = None
        if self._likelihoods:
            scores = self._likelihoods[choice.number].format_scores(choice.take_scores(), choice.wording)
        return {"index": choice.number, **content, "logprobs": scores, "finish_reason": finish}

    def _calls(self, choice: Choice) -> list[dict[str, Any]]:
        return choice.calls[:1] if self._first_call_only else choice.calls

    def _usage(self, choices: Sequence[Choice]) -> dict[str, int]:
        new_tokens = sum(choice.wording.tokens for choice in choices)
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": new_tokens,
            "total_tokens": self._prompt_tokens + new_tokens,
        }
