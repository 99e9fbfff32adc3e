"""Incremental detokenisation of tokens that are generated one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from transformers import PreTrainedTokenizerFast

_CONTEXT_TOKENS = 6
"""Number of preceding tokens on which a new token's text may depend (spaces, parts of a character)."""


class Spelling:
    """Converts tokens to text as they are generated. A character that spans several tokens appears with the last of them.

    Attributes:
        starts: character positions at which the tokens of the final text begin.
        length: length of the final text in characters.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, prompt: Sequence[int], visible: Mapping[int, str] | None = None
    ) -> None:
        """Start after a prompt. ``visible``: maps special tokens to include in the text to their strings."""
        self._tokenizer, self._visible = tokenizer, visible or {}
        self._tokens = list(prompt[-_CONTEXT_TOKENS:])
        self._begin, self._final = 0, len(self._tokens)
        self.starts, self.length = list[int](), 0

    def add(self, token: int) -> str:
        """Add a token and return the text that has become final, which may be empty."""
        visible = self._visible.get(token, "")
        text = self.end() if visible else ""
        self._tokens.append(token)
        return text + (self._finalize(visible) if visible else self._new(final=False))

    def end(self) -> str:
        """Return the remaining text."""
        return self._new(final=True)

    def _new(self, final: bool) -> str:
        before = self._text(self._tokens[self._begin : self._final])
        now = self._text(self._tokens[self._begin :])
        if (len(now) <= len(before) or now.endswith("\N{REPLACEMENT CHARACTER}")) and not final:
            return ""
        return self._finalize(now[len(before) :])

    def _finalize(self, text: str) -> str:
        """Mark the text of the pending tokens as final and return it."""
        behind = len(self._text(self._tokens[self._begin : self._final])) if len(self._tokens) > self._final + 1 else 0
        for end in range(self._final, len(self._tokens)):
            parts = self._text(self._tokens[self._begin : end])[behind:] if end > self._final else ""
            alike = (n for n, pair in enumerate(zip(parts, text, strict=False)) if pair[0] != pair[1])
            self.starts.append(self.length + next(alike, min(len(parts), len(text))))
        # The last final tokens are the context of the next ones.
        self._begin, self._final = max(self._begin, self._final - _CONTEXT_TOKENS), len(self._tokens)
        self.length += len(text)
        return text

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))
