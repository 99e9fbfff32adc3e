"""Token generation through the pipeline: hidden states go forward, and the last stage sends each new token to all active ranks.

prefill   every stage passes the whole prompt (1, T, D) on, once, and fills its KV cache
then      per token (1, 1, D) from stage to stage, and 8 bytes from the last stage to every active rank
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedTokenizerFast

from hetero_mpi.comm.ranks.world import CollectiveUserError
from hetero_mpi.comm.transport import Request, Transport
from hetero_mpi.device.backend import host_bytes
from hetero_mpi.model.decoding import NOT_A_NUMBER, Decoder, Sampling, begins_anew_at, pick
from hetero_mpi.model.stage import Stage
from hetero_mpi.model.transformers.chain import TransformersChain

_HIDDEN, _TOKEN = (1 << 13) + 16, (1 << 13) + 17
_CONTEXT = 6
"""Tokens before a new one that its spelling may depend on (spaces, parts of a character)."""


class Writer:
    """One rank's part in generating text: it computes its stage, and receives every token.

    Args:
        rank: this rank's number in the plan.
        stage_ranks: the ranks that hold the stages, in the order of the chain.
        active: the ranks that receive the tokens: those with a stage, and rank 0.
        stage: this rank's stage; None where it holds none.
    """

    def __init__(
        self,
        rank: int,
        stage_ranks: Sequence[int],
        active: Sequence[int],
        transport: Transport,
        chain: TransformersChain,
        stage: Stage | None,
    ) -> None:
        self.rank, self.transport, self.chain, self.stage = rank, transport, chain, stage
        self.last_rank = stage_ranks[-1]
        self.listeners = [other for other in active if other != self.last_rank]
        position = stage_ranks.index(rank) if stage is not None else 0
        self.previous = stage_ranks[position - 1] if position > 0 else None
        self.next = stage_ranks[position + 1] if stage is not None and position + 1 < len(stage_ranks) else None
        self._decoder = Decoder(stage) if stage is not None else None

    def tokens(self, prompt: Sequence[int], sampling: Sampling, stops: Sequence[int], limit: int) -> Iterator[int]:
        """Up to ``limit`` tokens that follow ``prompt``, the same on every active rank; ends after one of ``stops``. Collective.

        Raises:
            CollectiveUserError: the model's output is not a number.
        """
        known = list(prompt)
        fresh: Sequence[int] = known
        anew = begins_anew_at(self.chain.config)
        with self._decoder or contextlib.nullcontext():
            for _ in range(limit):
                if len(known) == anew and fresh is not known:
                    fresh = known
                    if self._decoder is not None:
                        self._decoder.begin()
                token = self._next_token(fresh, len(known), sampling)
                if token == NOT_A_NUMBER:
                    raise CollectiveUserError(
                        "the model's output is not a number: its weights are damaged, or too large for fp16; "
                        "generate from another checkpoint, or in bf16 or fp32"
                    )
                known.append(token)
                fresh = [token]
                yield token
                if token in stops:
                    return

    def _next_token(self, fresh: Sequence[int], position: int, sampling: Sampling) -> int:
        """Pass the tokens that are not yet in the KV caches through the pipeline; returns the new token, the same on every active
        rank.
        """
        if self._decoder is None:
            return self._hear()
        y = self._decoder.step(self._input(fresh))
        if self.next is None:
            return self._tell(pick(y, sampling, position))
        host = self._decoder.stage.backend.to_host(y)
        sent = self.transport.send(self.next, _HIDDEN, host_bytes(host))
        token = self._hear()
        self.transport.wait(sent)
        return token

    def _input(self, fresh: Sequence[int]) -> torch.Tensor:
        assert self.stage is not None
        if self.previous is None:
            return torch.tensor([list(fresh)], device=self.stage.backend.device)
        buffer = torch.empty((1, len(fresh), self.chain.config.hidden_size), dtype=self.stage.dtype)
        self.transport.wait(self.transport.post_receive(self.previous, _HIDDEN, host_bytes(buffer)))
        return self.stage.backend.from_host(buffer)

    def _tell(self, token: int) -> int:
        word = torch.tensor([token])
        sent: list[Request] = [self.transport.send(other, _TOKEN, host_bytes(word)) for other in self.listeners]
        for request in sent:
            self.transport.wait(request)
        return token

    def _hear(self) -> int:
        word = torch.empty(1, dtype=torch.int64)
        self.transport.wait(self.transport.post_receive(self.last_rank, _TOKEN, host_bytes(word)))
        return int(word)


class Spelling:
    """Converts tokens into text as they are produced. A character of several tokens appears with the last of them."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._tokens = list(prompt[-_CONTEXT:])
        self._begin, self._told = 0, len(self._tokens)

    def add(self, token: int) -> str:
        """The text that has become certain with this token; may be empty."""
        self._tokens.append(token)
        return self._new(final=False)

    def end(self) -> str:
        """The text that was held back."""
        return self._new(final=True)

    def _new(self, final: bool) -> str:
        before = self._text(self._tokens[self._begin : self._told])
        now = self._text(self._tokens[self._begin :])
        if len(now) <= len(before) or (now.endswith("\N{REPLACEMENT CHARACTER}") and not final):
            return ""
        # What was told last is the context of what comes next.
        self._begin, self._told = max(self._begin, self._told - _CONTEXT), len(self._tokens)
        return now[len(before) :]

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))
