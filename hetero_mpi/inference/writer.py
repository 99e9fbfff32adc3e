"""Token generation through the pipeline: hidden states move forward, and the last stage sends each new token to all active ranks.

prefill   every stage passes the prompt on in pieces (1, T, D), each after the KV caches of the previous ones, one per round; so
          activation memory does not grow with the square of the prompt
then      per token (1, 1, D) from stage to stage, and 8 bytes from the last stage to every active rank

Several texts are generated concurrently: in every round each gets one token, unless it is paused. Pieces are computed one by one,
a stage the next while the following stage computes the previous one; single tokens in batches (W, 1, D) of ``width`` rows,
filled up with dummies. So a text's bits depend on the width, but not on the other texts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch

from hetero_mpi.comm.ranks.world import CollectiveUserError, World
from hetero_mpi.comm.transport import Request, Transport
from hetero_mpi.device.backend import host_bytes
from hetero_mpi.inference.decoding import OPENED, Decoder, begins_anew_at, takes_batches, takes_pieces
from hetero_mpi.inference.sampling import NOT_A_NUMBER, Sampling, Scored, pick, scored
from hetero_mpi.model.stage import Stage
from hetero_mpi.model.transformers.chain import TransformersChain

_HIDDEN, _TOKENS, _SCORES = (1 << 13) + 16, (1 << 13) + 17, (1 << 13) + 18
_SCORES_RANK = 0
"""The rank that receives log-probabilities."""
_MEASURED_TOKENS = 8
PIECE_TOKENS = 512
"""Maximum tokens of a text that a stage computes at once, if the model supports pieces."""
SCORED_TOKENS = 128
"""The same for a prompt with log-probabilities: all its logits are in memory at once."""
NOT_A_NUMBER_TEXT = "the model's output is not a number: its weights are damaged, or too large for fp16"


@dataclass(frozen=True)
class Task:
    """A text to generate: prompt tokens, stop tokens, limit and sampling. The same on every rank."""

    prompt: list[int]
    stops: list[int]
    limit: int
    """Maximum number of new tokens."""
    sampling: Sampling
    least: int = 0
    """Minimum number of new tokens: stop tokens are forbidden until then."""
    likeliest: int | None = None
    """Number of most likely tokens to return with log-probabilities for each position; None: no log-probabilities."""
    echo: bool = False
    """Return log-probabilities of the prompt too, except of its first token."""
    given: list[int] = field(default_factory=list)
    """The first new tokens, if they are given instead of sampled."""
    adapter: str = OPENED
    """The adapter for the text; "" for the base model."""

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Task:
        return cls(**{**values, "sampling": Sampling(**values["sampling"])})

    def ends_with(self, token: int, written: int) -> bool:
        """Whether ``token``, new token number ``written`` (from 1), is the last."""
        return token in (*self.stops, NOT_A_NUMBER) or written == self.limit


@dataclass(frozen=True)
class Round:
    """Results of a round for the active texts, by text number."""

    tokens: Mapping[int, int]
    """The next token; none for a text whose prompt is not complete."""
    scores: Mapping[int, Sequence[Scored]] = field(default_factory=dict)
    """Log-probabilities that are known now, in token order; on rank 0, for texts that request them."""


@dataclass(frozen=True)
class TextChanges:
    """Texts that begin before the next round, texts that end early, and texts that pause in the round, by number."""

    begin: Mapping[int, Task] = field(default_factory=dict)
    end: Sequence[int] = ()
    rest: Sequence[int] = ()


class _Text:
    """An active text: its tokens, of which ``cached`` are in the KV caches."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.text_tokens = list(task.prompt)
        self.cached = 0
        self._scored = 1 if task.echo else len(task.prompt)
        self.rows = 0
        """Number of last tokens before ``cached`` whose successors' log-probabilities are requested."""

    def next_piece(self, most: int | None) -> list[int]:
        """The next tokens to add to the KV caches in this round, at most ``most`` (None: all)."""
        first = self.cached
        if most is not None and self.task.echo:
            most = min(most, SCORED_TOKENS)
        self.cached = len(self.text_tokens) if most is None else min(len(self.text_tokens), first + most)
        self.rows = max(0, self.cached + 1 - self._scored) if self.task.likeliest is not None else 0
        self._scored += self.rows
        return self.text_tokens[first : self.cached]

    def scored_tokens(self, picked: int | None) -> list[int]:
        """The tokens of ``rows``. ``picked``: the token after all known ones, if the piece has reached it."""
        first = self.cached + 1 - self.rows
        return [*self.text_tokens[first : self.cached + 1], *([picked] if picked is not None else [])]

    def restart(self) -> None:
        self.cached = 0

    def pick(self, logits: torch.Tensor) -> int:
        """Sample the next token."""
        task, written = self.task, len(self.text_tokens) - len(self.task.prompt)
        if written < len(task.given):
            return task.given[written]
        forbidden = task.stops if written < task.least else ()
        return pick(logits, task.sampling, len(self.text_tokens), self.text_tokens, forbidden)

    @property
    def is_complete(self) -> bool:
        """Whether all tokens are in the KV caches, so that the next one can be sampled."""
        return self.cached == len(self.text_tokens)

    @property
    def has_ended(self) -> bool:
        return self.task.ends_with(self.text_tokens[-1], len(self.text_tokens) - len(self.task.prompt))


@dataclass(frozen=True)
class _Pass:
    """Input of a stage: a piece of a text, or the next tokens of several texts with the same adapter."""

    texts: Sequence[int]
    """Their numbers; the further rows are dummies."""
    tokens: Sequence[Sequence[int]]
    adapter: str
    rows: int = 1
    """Number of last tokens whose logits are needed."""


@dataclass(frozen=True)
class _OwnStage:
    """One of the rank's stages, and the ranks of the previous and next stages in the chain (or None)."""

    decoder: Decoder
    previous: int | None
    next: int | None


class Writer:
    """One rank's part in generating texts: it computes its stages, and receives every token.

    Args:
        rank: number of this rank in the plan.
        stage_ranks: the ranks of the stages, in chain order.
        active: the ranks that receive the tokens: those with a stage, and rank 0.
        stages: this rank's stages, in chain order.
        piece_tokens: maximum tokens of a prompt per piece, the same on every rank; ignored if the model does not support pieces.

    Attributes:
        width: rows of a batch of single tokens, the same on every rank (``settle_width``); 1: no batches.
    """

    width = 1

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
        self.listeners = [r for r in active if r != self.last_rank]
        indices = [index for index, holder in enumerate(stage_ranks) if holder == rank] if stages else []
        neighbours = [None, *stage_ranks, None]
        self._stages = [
            _OwnStage(Decoder(stage), neighbours[index], neighbours[index + 2])
            for stage, index in zip(stages, indices, strict=True)
        ]
        self._piece_tokens = piece_tokens if takes_pieces(chain.config) else None

    def tokens(self, task: Task) -> Iterator[int]:
        """Generate the tokens of one text, the same on every active rank; the last may be a stop token. Collective.

        Raises CollectiveUserError if the model's output is not a number.
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
        """Generate the next token of the active texts, round by round. Collective.

        A text ends with a stop token, at its limit, or with ``NOT_A_NUMBER`` for an invalid output. ``changes`` is called before
        each round, with True if no text is active; its result must be the same on every active rank. None ends the generation.
        """
        texts: dict[int, _Text] = {}
        restart_length = begins_anew_at(self.chain.config)
        with contextlib.ExitStack() as decoding:
            for stage in self._stages:
                decoding.enter_context(stage.decoder)
            while (change := changes(not texts)) is not None:
                self._end(texts, change.end)
                texts.update({number: _Text(task) for number, task in change.begin.items()})
                if not texts:
                    continue
                result = self._round({number: text for number, text in texts.items() if number not in change.rest})
                yield result
                for number, token in result.tokens.items():
                    texts[number].text_tokens.append(token)
                    if len(texts[number].text_tokens) == restart_length:
                        texts[number].restart()
                        self._forget(number)
                self._end(texts, [number for number in result.tokens if texts[number].has_ended])

    def settle_width(self, members: World, width: int) -> None:
        """Compute batches of ``width`` rows if a row's bits do not depend on the other rows on any rank. Collective."""
        alike = width > 1 and takes_batches(self.chain.config, self.chain.model)
        alike = alike and all(stage.decoder.rows_are_alike(width) for stage in self._stages)
        if all(members.all_gather_json(alike)):
            self.width = width

    def cache_bytes(self) -> tuple[int, int]:
        """Memory of a text on this rank: fixed bytes, and bytes per token. Measured; collective.

        Raises CollectiveUserError if the model's output is not a number.
        """
        probe = Task(list(range(_MEASURED_TOKENS)), [], 2, Sampling())
        sizes = [sum(stage.decoder.cached_bytes() for stage in self._stages) for _ in self.tokens(probe)]
        per_token = sizes[1] - sizes[0]
        return sizes[0] - _MEASURED_TOKENS * per_token, per_token

    def _end(self, texts: dict[int, _Text], numbers: Sequence[int]) -> None:
        for number in numbers:
            texts.pop(number, None)
            self._forget(number)

    def _forget(self, number: int) -> None:
        for stage in self._stages:
            stage.decoder.forget(number)

    def _round(self, texts: Mapping[int, _Text]) -> Round:
        """Pass the next piece of every text through the pipeline."""
        passes = self._passes(texts)
        complete = [number for part in passes for number in part.texts if texts[number].is_complete]
        # All texts pass one stage of the rank, then the next, so messages between two ranks have the same order on both.
        passed: list[torch.Tensor] = []
        sent: list[Request] = []
        for stage in self._stages:
            passed = self._pass_on(stage, passes, passed, sent)
        tokens: Sequence[int] = []
        logits: dict[int, torch.Tensor] = {}
        for part, output in zip(passes, passed if self.rank == self.last_rank else (), strict=False):
            logits.update(zip(part.texts, output.tensor_split(len(part.tokens)), strict=False))
        if complete and logits:
            tokens = self._send_tokens([texts[n].pick(logits[n][-1]) for n in complete])
        elif complete:
            tokens = self._receive_tokens(len(complete))
        written = dict(zip(complete, tokens, strict=True))
        targets = {n: text.scored_tokens(written.get(n)) for n, text in texts.items() if text.rows}
        scores = {number: self._scores(texts[number], ids, logits.get(number), sent) for number, ids in targets.items()}
        for request in sent:
            self.transport.wait(request)
        return Round(written, scores if self.rank == _SCORES_RANK else {})

    def _passes(self, texts: Mapping[int, _Text]) -> list[_Pass]:
        """The passes of a round: the next pieces of the texts, and batches of single tokens that follow cached ones."""
        passes = []
        by_adapter = sorted(texts.items(), key=lambda item: item[1].task.adapter)  # activates each adapter once
        for adapter, group in groupby(by_adapter, lambda item: item[1].task.adapter):
            singles: list[tuple[int, Sequence[int]]] = []
            for number, text in group:
                piece = text.next_piece(self._piece_tokens)
                if self.width > 1 and len(piece) == 1 < text.cached:
                    singles.append((number, piece))
                else:
                    rows = max(text.rows, text.is_complete)  # only the last piece's logits choose a token
                    passes.append(_Pass([number], [piece], adapter, rows))
            for first in range(0, len(singles), self.width):
                numbers, pieces = zip(*singles[first : first + self.width], strict=True)
                passes.append(_Pass(numbers, [*pieces, *[[0]] * (self.width - len(pieces))], adapter))
        return passes

    def _scores(
        self, text: _Text, tokens: Sequence[int], logits: torch.Tensor | None, sent: list[Request]
    ) -> Sequence[Scored]:
        """Log-probabilities of ``tokens`` on rank 0, computed by the last stage. Appends its sends to ``sent``."""
        count = min(text.task.likeliest or 0, self.chain.config.vocab_size)
        words = torch.empty((len(tokens), 1 + 2 * count), dtype=torch.float64)
        if logits is not None:
            words = scored(logits[-len(tokens) :], [max(0, token) for token in tokens], count)
            if self.rank != _SCORES_RANK:
                sent.append(self.transport.send(_SCORES_RANK, _SCORES, host_bytes(words)))
        elif self.rank == _SCORES_RANK:
            self.transport.wait(self.transport.post_receive(self.last_rank, _SCORES, host_bytes(words)))
        if self.rank != _SCORES_RANK:
            return ()
        rows = zip(tokens, words.tolist(), strict=True)
        return [
            Scored(t, row[0], tuple((int(a), b) for a, b in zip(row[1:][:count], row[1 + count :], strict=True)))
            for t, row in rows
        ]

    def _pass_on(
        self,
        stage: _OwnStage,
        passes: Sequence[_Pass],
        before: Sequence[torch.Tensor],
        sent: list[Request],
    ) -> list[torch.Tensor]:
        """Compute a stage; returns the outputs, unless they are sent to another rank.

        Args:
            before: outputs of this rank's previous stage.
            sent: list to append the sends to.
        """
        receives = stage.previous is not None and stage.previous != self.rank
        coming = [self._post_receive(stage, part) for part in passes] if receives else []
        backend, outputs = stage.decoder.stage.backend, []
        for index, part in enumerate(passes):
            if receives:
                self.transport.wait(coming[index][0])
                x = backend.from_host(coming[index][1])
            else:
                x = torch.tensor(part.tokens, device=backend.device) if stage.previous is None else before[index]
            if len(part.tokens) > 1:
                y = stage.decoder.step_batch(x, part.texts, part.adapter)
            else:
                y = stage.decoder.step(x, part.texts[0], part.rows, part.adapter)
            if stage.next is None or stage.next == self.rank:
                outputs.append(y)
            else:
                sent.append(self.transport.send(stage.next, _HIDDEN, host_bytes(backend.to_host(y))))
        return outputs

    def _post_receive(self, stage: _OwnStage, part: _Pass) -> tuple[Request, torch.Tensor]:
        """Post the receive of the tokens' hidden states; returns the request and its buffer."""
        assert stage.previous is not None
        shape = len(part.tokens), len(part.tokens[0]), self.chain.config.hidden_size
        buffer = torch.empty(shape, dtype=stage.decoder.stage.dtype)
        return self.transport.post_receive(stage.previous, _HIDDEN, host_bytes(buffer)), buffer

    def _send_tokens(self, tokens: Sequence[int]) -> Sequence[int]:
        words = torch.tensor(tokens)
        sent: list[Request] = [self.transport.send(rank, _TOKENS, host_bytes(words)) for rank in self.listeners]
        for request in sent:
            self.transport.wait(request)
        return tokens

    def _receive_tokens(self, count: int) -> Sequence[int]:
        words = torch.empty(count, dtype=torch.int64)
        self.transport.wait(self.transport.post_receive(self.last_rank, _TOKENS, host_bytes(words)))
        return [int(word) for word in words]
