"""Generate tokens through the pipeline: hidden states move forward, and the last stage sends new tokens to all active ranks.

prefill   every stage processes the prompt in pieces, one (1, T, D) per round, with the previous pieces in the KV cache; so
          activation memory does not grow with the square of the prompt's length
decode    each token takes one (1, 1, D) message from stage to stage, and 8 bytes from the last stage to every active rank

Several texts are generated concurrently: in each round, every text that is not paused gets one token or passes a piece.
Single tokens of several texts, and pieces of several prompts, are packed into passes (1, N, D) of fixed sizes, with padding. Thus a
text's bits depend on ``Writer.settle_width``, but not on the other texts.
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
from hetero_mpi.inference.adapter_switch import OPENED
from hetero_mpi.inference.decoding import Decoder, begins_anew_at, common_sizes, mixes_adapters, takes_pieces
from hetero_mpi.inference.sampling import NOT_A_NUMBER, Sampling, Scored, pick, scored
from hetero_mpi.model.stage import Stage
from hetero_mpi.model.transformers.chain import TransformersChain

_HIDDEN, _TOKENS, _SCORES = (1 << 13) + 16, (1 << 13) + 17, (1 << 13) + 18
_SCORES_RANK = 0
"""Rank to which log-probabilities are sent."""
_MEASURED_TOKENS = 8
PIECE_TOKENS = 512
"""Maximum number of tokens per text that a stage computes at once, if the model supports processing a prompt in pieces."""
SCORED_TOKENS = 128
"""Maximum number of tokens per piece of a prompt with log-probabilities, since all logits of a piece are in memory at once."""
NOT_A_NUMBER_TEXT = "the model's output is not a number: its weights are damaged, or too large for fp16"


@dataclass(frozen=True)
class Task:
    """A request to generate a text. It is the same on every rank."""

    prompt: list[int]
    stops: list[int]
    limit: int
    """Maximum number of new tokens."""
    sampling: Sampling
    least: int = 0
    """Minimum number of new tokens, before which stop tokens are forbidden."""
    likeliest: int | None = None
    """Number of most likely tokens to return with log-probabilities per position; None for no log-probabilities at all."""
    echo: bool = False
    """Whether to return log-probabilities of the prompt, too (except its first token)."""
    given: list[int] = field(default_factory=list)
    """Tokens with which the new text begins, instead of sampled ones."""
    adapter: str = OPENED
    """Name of the adapter to use; "" for the base model."""

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Task:
        return cls(**{**values, "sampling": Sampling(**values["sampling"])})

    def ends_with(self, token: int, written: int) -> bool:
        """Whether the text ends with ``token``, its new token number ``written`` (counted from 1)."""
        return token in (*self.stops, NOT_A_NUMBER) or written == self.limit


@dataclass(frozen=True)
class Round:
    """Results of one round by text number."""

    tokens: Mapping[int, int]
    """Next token of each text whose prompt has been processed completely."""
    scores: Mapping[int, Sequence[Scored]] = field(default_factory=dict)
    """New log-probabilities of texts that request them, in token order; empty on ranks other than 0."""


@dataclass(frozen=True)
class TextChanges:
    """Texts to begin before the next round, texts to end early, and texts to pause in that round, by number."""

    begin: Mapping[int, Task] = field(default_factory=dict)
    end: Sequence[int] = ()
    rest: Sequence[int] = ()


class _Text:
    """An active text. The first ``cached`` of its tokens are in the KV caches."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.text_tokens = list(task.prompt)
        self.cached = 0
        self._scored = 1 if task.echo else len(task.prompt)
        self.rows = 0
        """Number of tokens at the end of the latest piece after which the next token's log-probability is requested."""

    def next_piece(self, most: int | None) -> list[int]:
        """Return the next tokens to add to the KV caches, at most ``most``, or all of them if it is None."""
        first = self.cached
        if most is not None and self.task.echo:
            most = min(most, SCORED_TOKENS)
        self.cached = len(self.text_tokens) if most is None else min(len(self.text_tokens), first + most)
        self.rows = max(0, self.cached + 1 - self._scored) if self.task.likeliest is not None else 0
        self._scored += self.rows
        return self.text_tokens[first : self.cached]

    def scored_tokens(self, picked: int | None) -> list[int]:
        """Return the tokens whose log-probabilities are requested. ``picked``: the newly sampled token, if there is one."""
        first = self.cached + 1 - self.rows
        return [*self.text_tokens[first : self.cached + 1], *([picked] if picked is not None else [])]

    def restart(self) -> None:
        self.cached = 0

    def pick(self, logits: torch.Tensor) -> int:
        """Sample the next token, or return the given one."""
        task, written = self.task, len(self.text_tokens) - len(self.task.prompt)
        if written < len(task.given):
            return task.given[written]
        forbidden = task.stops if written < task.least else ()
        return pick(logits, task.sampling, len(self.text_tokens), self.text_tokens, forbidden)

    @property
    def is_complete(self) -> bool:
        """Whether all known tokens are in the KV caches, so that the next one can be sampled."""
        return self.cached == len(self.text_tokens)

    @property
    def has_ended(self) -> bool:
        return self.task.ends_with(self.text_tokens[-1], len(self.text_tokens) - len(self.task.prompt))


@dataclass(frozen=True)
class _Pass:
    """Input of a stage: a piece of a text, or pieces of several packed texts, and padding."""

    texts: Sequence[int]
    tokens: Sequence[int]
    adapters: Sequence[str]
    """The adapter of each text."""
    rows: int
    """Number of rows of the logits: of a single text's last tokens, or of packed texts."""
    lengths: Sequence[int] = ()
    """Number of tokens of each packed text; empty for a single text."""


@dataclass(frozen=True)
class _OwnStage:
    """One of this rank's stages, and the ranks of the previous and next stages in the chain (None at its ends)."""

    decoder: Decoder
    previous: int | None
    next: int | None


class Writer:
    """One rank's part in generating texts: computes its stages and receives every token.

    Args:
        rank: number of this rank in the plan.
        stage_ranks: the ranks of the stages, in chain order.
        active: the ranks that receive the tokens, which are rank 0 and all ranks with a stage.
        stages: this rank's stages, in chain order.
        piece_tokens: maximum number of prompt tokens per piece, the same on every rank; unused if the model rules out pieces.

    Attributes:
        widths: numbers of rows, ascending, in batches of single tokens (``settle_width``), the same on every rank; maybe none.
        prompt_sizes: likewise numbers of tokens in passes of packed prompts.
        batches: how texts are computed together, or why they are not.
    """

    widths: Sequence[int] = ()
    prompt_sizes: Sequence[int] = ()
    batches = "each computed separately"

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
        self._mixes_adapters = mixes_adapters(chain.config)

    def tokens(self, task: Task) -> Iterator[int]:
        """Generate one text; yields its tokens on every active rank. The last one may be a stop token. Collective.

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
        """Generate texts round by round, one token of each active text per round. Collective.

        A text ends with a stop token, at its limit, or with ``NOT_A_NUMBER`` if the output is invalid. ``changes`` is called before
        each round with an argument that says whether no text is active; it must return the same result on every active rank, and
        None to end the generation.
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
        """Pack up to ``width`` texts into a pass if on every rank a text's bits are independent of the other texts. Collective."""
        decoders = [stage.decoder for stage in self._stages]
        self.widths, self.prompt_sizes, self.batches = common_sizes(members, self.chain, decoders, width)
        if self.prompt_sizes and self._piece_tokens is not None:
            self._piece_tokens = min(self._piece_tokens, self.prompt_sizes[-1])

    def cache_bytes(self) -> tuple[int, int]:
        """Measure the memory of a text on this rank; returns fixed bytes and bytes per token. Collective.

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
            logits.update(zip(part.texts, output.split(1) if part.lengths else [output], strict=False))
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
        """Plan the passes of a round: pieces of prompts, and single tokens of texts that are being decoded."""
        passes = []
        kind = lambda item: "" if self._mixes_adapters else item[1].task.adapter  # noqa: E731
        for _, group in groupby(sorted(texts.items(), key=kind), kind):
            singles, prompts = dict[int, list[int]](), dict[int, list[int]]()
            for number, text in group:
                piece = text.next_piece(self._piece_tokens)
                if self.widths and len(piece) == 1 < text.cached:
                    singles[number] = piece
                elif self.prompt_sizes and not text.task.echo:  # echo needs more logits than a row
                    prompts[number] = piece
                else:
                    rows = max(text.rows, text.is_complete)  # only the last piece's logits choose a token
                    passes.append(_Pass([number], piece, [text.task.adapter], rows))
            passes += self._packed(texts, singles, self.widths)
            passes += self._packed(texts, prompts, self.prompt_sizes)
        return passes

    def _packed(
        self, texts: Mapping[int, _Text], pieces: dict[int, list[int]], sizes: Sequence[int]
    ) -> Iterator[_Pass]:
        """Pack the ``pieces`` of texts, by number, into passes of the smallest of ``sizes`` (tokens). Empties ``pieces``."""
        while pieces:
            numbers, total = list[int](), 0
            for number, piece in pieces.items():
                if total + len(piece) <= sizes[-1] and len(numbers) < self.widths[-1]:
                    numbers.append(number)
                    total += len(piece)
            parts, size = [pieces.pop(number) for number in numbers], next(size for size in sizes if size >= total)
            tokens = [token for part in parts for token in part] + [0] * (size - total)
            adapters = [texts[number].task.adapter for number in numbers]
            yield _Pass(numbers, tokens, adapters, min(size, self.widths[-1]), [*map(len, parts)])

    def _scores(
        self, text: _Text, tokens: Sequence[int], logits: torch.Tensor | None, sent: list[Request]
    ) -> Sequence[Scored]:
        """Return the log-probabilities of ``tokens`` on rank 0, as computed by the last stage. Adds its sends to ``sent``."""
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
        self, stage: _OwnStage, passes: Sequence[_Pass], before: Sequence[torch.Tensor], sent: list[Request]
    ) -> list[torch.Tensor]:
        """Compute a stage and send the outputs to the next rank, or return them if there is none.

        Args:
            before: outputs of the previous stage, if it is on this rank.
            sent: list to which the sends are appended.
        """
        receives = stage.previous is not None and stage.previous != self.rank
        coming = [self._post_receive(stage, part) for part in passes] if receives else []
        backend, outputs = stage.decoder.stage.backend, []
        for index, part in enumerate(passes):
            if receives:
                self.transport.wait(coming[index][0])
                x = backend.from_host(coming[index][1])
            else:
                x = torch.tensor([part.tokens], device=backend.device) if stage.previous is None else before[index]
            if part.lengths:
                y = stage.decoder.step_packed(x, part.texts, part.lengths, part.rows, part.adapters)
            else:
                y = stage.decoder.step(x, part.texts[0], part.rows, part.adapters[0])
            if stage.next is None or stage.next == self.rank:
                outputs.append(y)
            else:
                sent.append(self.transport.send(stage.next, _HIDDEN, host_bytes(backend.to_host(y))))
        return outputs

    def _post_receive(self, stage: _OwnStage, part: _Pass) -> tuple[Request, torch.Tensor]:
        """Post the receive of a pass's hidden states; returns the request and its buffer."""
        assert stage.previous is not None
        shape = 1, len(part.tokens), self.chain.config.hidden_size
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
