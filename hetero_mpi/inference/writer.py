"""Token generation through the pipeline: hidden states go forward, and the last stage sends each new token to all active ranks.

prefill   every stage passes the prompt on in pieces (1, T, D), each behind the KV caches of those before it, one a round; so the
          memory of the activations does not grow with the square of the prompt
then      per token (1, 1, D) from stage to stage, and 8 bytes from the last stage to every active rank

Several texts are written side by side: in every round each gets one token, unless it rests, and a stage computes one text while
the next stage computes the text before it, or the piece before it. Every text is computed by itself, so its bits do not depend on
the others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from hetero_mpi.comm.ranks.world import CollectiveUserError
from hetero_mpi.comm.transport import Request, Transport
from hetero_mpi.device.backend import host_bytes
from hetero_mpi.inference.decoding import (
    NOT_A_NUMBER,
    OPENED,
    Decoder,
    Sampling,
    Scored,
    begins_anew_at,
    pick,
    scored,
    takes_pieces,
)
from hetero_mpi.model.stage import Stage
from hetero_mpi.model.transformers.chain import TransformersChain

_HIDDEN, _TOKENS, _SCORES = (1 << 13) + 16, (1 << 13) + 17, (1 << 13) + 18
_LEADER = 0
"""The rank that asks for log-likelihoods."""
_CONTEXT = 6
"""Tokens before a new one that its spelling may depend on (spaces, parts of a character)."""
_MEASURED_TOKENS = 8
PIECE_TOKENS = 512
"""Tokens of a text that a stage computes at once at most, where the model takes pieces."""
SCORED_TOKENS = 128
"""The same of a prompt whose tokens' log-likelihoods are wanted: its logits are there all at once."""
NOT_A_NUMBER_TEXT = "the model's output is not a number: its weights are damaged, or too large for fp16"


@dataclass(frozen=True)
class Task:
    """A text to be written: prompt tokens, stop tokens, limit and sampling. The same on every rank."""

    prompt: list[int]
    stops: list[int]
    limit: int
    """New tokens at most."""
    sampling: Sampling
    least: int = 0
    """New tokens at least: until then no stop token is chosen."""
    likeliest: int | None = None
    """Log-likelihoods are wanted: of each token, and of so many of the likeliest in its place. None: they are not."""
    echo: bool = False
    """They are wanted of the prompt's tokens, too: of all but the first."""
    given: list[int] = field(default_factory=list)
    """The first new tokens, where they are known and none is to be chosen."""
    adapter: str = OPENED
    """That by which the text is computed; "": the base alone."""

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Task:
        return cls(**{**values, "sampling": Sampling(**values["sampling"])})

    def ends_with(self, token: int, written: int) -> bool:
        """Whether ``token``, the one of number ``written`` (from 1), is the last."""
        return token in (*self.stops, NOT_A_NUMBER) or written == self.limit


@dataclass(frozen=True)
class Round:
    """Results of a round for the texts under way, by their numbers."""

    tokens: Mapping[int, int]
    """The next token; of a text whose prompt has not passed entirely there is none."""
    scores: Mapping[int, Sequence[Scored]] = field(default_factory=dict)
    """The log-likelihoods that are known now, in the order of the tokens; on rank 0, of texts that want them."""


@dataclass(frozen=True)
class TextChanges:
    """The texts that begin before the next round, those that end early, and those that take no part in it, by number."""

    begin: Mapping[int, Task] = field(default_factory=dict)
    end: Sequence[int] = ()
    rest: Sequence[int] = ()


class _Text:
    """A text under way: its tokens so far, of which ``cached`` are in the KV caches."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.known = list(task.prompt)
        self.cached = 0
        self._scored = 1 if task.echo else len(task.prompt)
        self.rows = 0
        """Of how many last tokens before ``cached`` the next one's log-likelihood is wanted."""

    def next_piece(self, most: int | None) -> list[int]:
        """At most so many of the tokens that are not yet in the KV caches (None: all), which they are after this round."""
        first = self.cached
        if most is not None and self.task.echo:
            most = min(most, SCORED_TOKENS)
        self.cached = len(self.known) if most is None else min(len(self.known), first + most)
        self.rows = max(0, self.cached + 1 - self._scored) if self.task.likeliest is not None else 0
        self._scored += self.rows
        return self.known[first : self.cached]

    def scored_tokens(self, picked: int | None) -> list[int]:
        """The tokens of ``rows``. ``picked``: the one behind all that are known, where the piece has reached it."""
        first = self.cached + 1 - self.rows
        return [*self.known[first : self.cached + 1], *([picked] if picked is not None else [])]

    def begin_anew(self) -> None:
        self.cached = 0

    def pick(self, logits: torch.Tensor) -> int:
        """The next token."""
        task, written = self.task, len(self.known) - len(self.task.prompt)
        if written < len(task.given):
            return task.given[written]
        forbidden = task.stops if written < task.least else ()
        return pick(logits, task.sampling, len(self.known), self.known, forbidden)

    @property
    def complete(self) -> bool:
        """True if all tokens are in the KV caches: then the next one can be picked."""
        return self.cached == len(self.known)

    @property
    def ended(self) -> bool:
        return self.task.ends_with(self.known[-1], len(self.known) - len(self.task.prompt))


@dataclass(frozen=True)
class _OwnStage:
    """One of the rank's stages, and the ranks of those before and after it in the chain (None: there is none)."""

    decoder: Decoder
    previous: int | None
    next: int | None


class Writer:
    """One rank's part in writing texts: it computes its stages, and receives every token.

    Args:
        rank: this rank's number in the plan.
        stage_ranks: the ranks that hold the stages, in the order of the chain.
        active: the ranks that receive the tokens: those with a stage, and rank 0.
        stages: this rank's, in the order of the chain.
        piece_tokens: tokens of a prompt that pass at once at most, the same on every rank; whole where the model takes no pieces.
    """

    def __init__(
        self,
        rank: int,
        stage_ranks: Sequence[int],
        active: Sequence[int],
        transport: Transport,
        chain: TransformersChain,
        stages: Sequence[Stage],
        piece_tokens: int = PIECE_TOKENS,
    ) -> None:
        self.rank, self.transport, self.chain = rank, transport, chain
        self.last_rank = stage_ranks[-1]
        self.listeners = [other for other in active if other != self.last_rank]
        places = [place for place, holder in enumerate(stage_ranks) if holder == rank] if stages else []
        neighbours = [None, *stage_ranks, None]
        self._stages = [
            _OwnStage(Decoder(stage), neighbours[place], neighbours[place + 2])
            for stage, place in zip(stages, places, strict=True)
        ]
        self._piece_tokens = piece_tokens if takes_pieces(chain.config) else None

    def tokens(self, task: Task) -> Iterator[int]:
        """The tokens of one text, the same on every active rank; the last may be a stop token. Collective. Raises
        CollectiveUserError: the model's output is not a number.
        """
        waiting = [task]

        def changes(idle: bool) -> TextChanges | None:
            if waiting:
                return TextChanges({0: waiting.pop()})
            return None if idle else TextChanges()

        for token in (round_.tokens[0] for round_ in self.written(changes) if round_.tokens):
            if token == NOT_A_NUMBER:
                raise CollectiveUserError(
                    "numbers.not_finite", f"{NOT_A_NUMBER_TEXT}; generate from another checkpoint, or in bf16 or fp32"
                )
            yield token

    def written(self, changes: Callable[[bool], TextChanges | None]) -> Iterator[Round]:
        """Round by round the next token of the texts that are under way. Collective.

        A text ends with a stop token, with its limit, or with ``NOT_A_NUMBER`` where the model's output is none. ``changes``:
        called before each round, with True where no text is under way; what it returns must be the same on every active rank. None:
        nothing more is to be written.
        """
        texts: dict[int, _Text] = {}
        anew = begins_anew_at(self.chain.config)
        with contextlib.ExitStack() as decoding:
            for own in self._stages:
                decoding.enter_context(own.decoder)
            while (change := changes(not texts)) is not None:
                self._end(texts, change.end)
                texts.update({number: _Text(task) for number, task in change.begin.items()})
                if not texts:
                    continue
                found = self._round({number: text for number, text in texts.items() if number not in change.rest})
                yield found
                for number, token in found.tokens.items():
                    texts[number].known.append(token)
                    if len(texts[number].known) == anew:
                        texts[number].begin_anew()
                        self._forget(number)
                self._end(texts, [number for number in found.tokens if texts[number].ended])

    def cache_bytes(self) -> tuple[int, int]:
        """Memory that a text takes on this rank: bytes however short it is, and bytes per token. Measured; collective. Raises
        CollectiveUserError: the model's output is not a number.
        """
        probe = Task(list(range(_MEASURED_TOKENS)), [], 2, Sampling())
        sizes = [sum(own.decoder.cached_bytes() for own in self._stages) for _ in self.tokens(probe)]
        per_token = sizes[1] - sizes[0]
        return sizes[0] - _MEASURED_TOKENS * per_token, per_token

    def _end(self, texts: dict[int, _Text], numbers: Sequence[int]) -> None:
        for number in numbers:
            texts.pop(number, None)
            self._forget(number)

    def _forget(self, number: int) -> None:
        for own in self._stages:
            own.decoder.forget(number)

    def _round(self, texts: Mapping[int, _Text]) -> Round:
        """Pass the next piece of every text through the pipeline."""
        texts = dict(sorted(texts.items(), key=lambda one: one[1].task.adapter))  # to turn to each of them once
        pieces = {number: text.next_piece(self._piece_tokens) for number, text in texts.items()}
        complete = [number for number, text in texts.items() if text.complete]
        # All texts pass one stage of the rank, then the next one: so messages between two ranks keep one order on both.
        passed: list[torch.Tensor] = []
        sent: list[Request] = []
        for own in self._stages:
            passed = self._pass_on(own, texts, pieces, passed, sent)
        tokens: Sequence[int] = []
        logits = dict(zip(pieces, passed, strict=True)) if self.rank == self.last_rank else {}
        if complete and logits:
            tokens = self._tell([texts[n].pick(logits[n][-1]) for n in complete])
        elif complete:
            tokens = self._hear(len(complete))
        written = dict(zip(complete, tokens, strict=True))
        wanted = {n: text.scored_tokens(written.get(n)) for n, text in texts.items() if text.rows}
        scores = {number: self._scores(texts[number], own, logits.get(number), sent) for number, own in wanted.items()}
        for request in sent:
            self.transport.wait(request)
        return Round(written, scores if self.rank == _LEADER else {})

    def _scores(
        self, text: _Text, tokens: Sequence[int], logits: torch.Tensor | None, sent: list[Request]
    ) -> Sequence[Scored]:
        """Log-likelihoods of ``tokens`` on rank 0, which the last stage knows by its logits. ``sent``: takes what is being sent."""
        count = min(text.task.likeliest or 0, self.chain.config.vocab_size)
        words = torch.empty((len(tokens), 1 + 2 * count), dtype=torch.float64)
        if logits is not None:
            words = scored(logits[-len(tokens) :], [max(0, token) for token in tokens], count)
            if self.rank != _LEADER:
                sent.append(self.transport.send(_LEADER, _SCORES, host_bytes(words)))
        elif self.rank == _LEADER:
            self.transport.wait(self.transport.post_receive(self.last_rank, _SCORES, host_bytes(words)))
        if self.rank != _LEADER:
            return ()
        rows = zip(tokens, words.tolist(), strict=True)
        return [
            Scored(t, row[0], tuple((int(a), b) for a, b in zip(row[1:][:count], row[1 + count :], strict=True)))
            for t, row in rows
        ]

    def _pass_on(
        self,
        own: _OwnStage,
        texts: Mapping[int, _Text],
        pieces: Mapping[int, Sequence[int]],
        before: Sequence[torch.Tensor],
        sent: list[Request],
    ) -> list[torch.Tensor]:
        """A stage's part in a round: what it makes of the pieces, unless another rank goes on with that.

        Args:
            before: what this rank's stage before it has made of them.
            sent: takes what is being sent.
        """
        receives = own.previous is not None and own.previous != self.rank
        coming = [self._coming(own, len(piece)) for piece in pieces.values()] if receives else []
        backend, found = own.decoder.stage.backend, []
        for place, (number, piece) in enumerate(pieces.items()):
            if receives:
                self.transport.wait(coming[place][0])
                x = backend.from_host(coming[place][1])
            else:
                x = torch.tensor([list(piece)], device=backend.device) if own.previous is None else before[place]
            y = own.decoder.step(x, number, max(1, texts[number].rows), texts[number].task.adapter)
            if own.next is None or own.next == self.rank:
                found.append(y)
            else:
                sent.append(self.transport.send(own.next, _HIDDEN, host_bytes(backend.to_host(y))))
        return found

    def _coming(self, own: _OwnStage, length: int) -> tuple[Request, torch.Tensor]:
        """The receive of so many tokens' hidden states, and where they will lie."""
        assert own.previous is not None
        buffer = torch.empty((1, length, self.chain.config.hidden_size), dtype=own.decoder.stage.dtype)
        return self.transport.post_receive(own.previous, _HIDDEN, host_bytes(buffer)), buffer

    def _tell(self, tokens: Sequence[int]) -> Sequence[int]:
        words = torch.tensor(tokens)
        sent: list[Request] = [self.transport.send(other, _TOKENS, host_bytes(words)) for other in self.listeners]
        for request in sent:
            self.transport.wait(request)
        return tokens

    def _hear(self, count: int) -> Sequence[int]:
        words = torch.empty(count, dtype=torch.int64)
        self.transport.wait(self.transport.post_receive(self.last_rank, _TOKENS, host_bytes(words)))
        return [int(word) for word in words]


class Spelling:
    """Converts tokens into text as they are produced. A character of several tokens appears with the last of them.

    Attributes:
        starts: the characters at which the tokens begin whose text is certain.
        length: characters of the text that is certain.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, prompt: Sequence[int], shown: Mapping[int, str] | None = None
    ) -> None:
        """``shown``: special tokens that the text shows all the same."""
        self._tokenizer, self._shown = tokenizer, shown or {}
        self._tokens = list(prompt[-_CONTEXT:])
        self._begin, self._told = 0, len(self._tokens)
        self.starts, self.length = list[int](), 0

    def add(self, token: int) -> str:
        """The text that has become certain with this token; may be empty."""
        shown = self._shown.get(token, "")
        text = self.end() if shown else ""
        self._tokens.append(token)
        return text + (self._settled(shown) if shown else self._new(final=False))

    def end(self) -> str:
        """The text that was held back."""
        return self._new(final=True)

    def _new(self, final: bool) -> str:
        before = self._text(self._tokens[self._begin : self._told])
        now = self._text(self._tokens[self._begin :])
        if (len(now) <= len(before) or now.endswith("\N{REPLACEMENT CHARACTER}")) and not final:
            return ""
        return self._settled(now[len(before) :])

    def _settled(self, text: str) -> str:
        """The text of the tokens that were not told yet."""
        behind = len(self._text(self._tokens[self._begin : self._told])) if len(self._tokens) > self._told + 1 else 0
        for end in range(self._told, len(self._tokens)):
            parts = self._text(self._tokens[self._begin : end])[behind:] if end > self._told else ""
            alike = (n for n, pair in enumerate(zip(parts, text, strict=False)) if pair[0] != pair[1])
            self.starts.append(self.length + next(alike, min(len(parts), len(text))))
        # What was told last is the context of what comes next.
        self._begin, self._told = max(self._begin, self._told - _CONTEXT), len(self._tokens)
        self.length += len(text)
        return text

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))
