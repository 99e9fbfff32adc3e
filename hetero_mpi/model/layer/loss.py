"""The summed cross-entropy of a micro-batch, a few rows of logits at a time.

Logits are a head's largest tensor: with 150,000 words, 2,048 tokens of them take 0.6 GB in bf16. torch's own function keeps them
in fp32 and needs as much again, twice, in backward. In pieces, only the logits themselves and their gradient exist, both in the
compute dtype. Each row is computed as torch does it whole and the rows' losses are added as torch adds them, so the pieces
change no bit.

And the loss by which routers learn to spread tokens over the experts, sequence by sequence and over all stages. It is
transformers' ``load_balancing_loss_func`` of a batch of one sequence: experts x the sum, over experts, of the share of choices that
fall on it times its mean probability. Both are means over the tokens of *all* layers, so their product is no sum over layers. Each
layer adds to sums of each sequence, which travel behind the hidden states from stage to stage, and their gradients back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

IGNORED = -100
"""Target of a position that is not learnt."""
PIECE = 1 << 22
"""Logits in a piece on the CPU: 16 MB in fp32, as caches hold them. Fewer are computed at once, which is faster and needs little
memory."""
LARGEST_PIECE = 1 << 26
"""On other devices, where a piece costs a dozen launches of kernels whatever its size."""


def summed_loss(logits: torch.Tensor, targets: torch.Tensor, piece: int | None = None) -> torch.Tensor:
    """Sum of the losses of all targets that are not ``IGNORED``, a scalar (fp32), differentiable.

    Args:
        logits: (B, T, V) in the compute dtype.
        targets: (B, T) int64.
        piece: logits computed at once, by default ``piece_size``; the result does not depend on it.
    """
    rows, words = logits.flatten(0, 1), targets.flatten()
    piece = piece or piece_size(rows.numel(), rows.is_cpu)
    if rows.numel() <= piece:
        return _whole(rows, words, "sum")
    losses = _InPieces.apply(rows, words, max(1, piece // rows.shape[1]))
    # The same order of additions as in torch's sum over targets: each row is a vocabulary of one word.
    return F.nll_loss(-losses.unsqueeze(1), words.clamp(max=0), ignore_index=IGNORED, reduction="sum")


def target_losses(logits: torch.Tensor, targets: torch.Tensor, piece: int | None = None) -> torch.Tensor:
    """Loss of each target, (B, T) in fp32, differentiable; 0 where it is ``IGNORED``. Takes what ``summed_loss`` does."""
    rows, words = logits.flatten(0, 1), targets.flatten()
    piece = piece or piece_size(rows.numel(), rows.is_cpu)
    if rows.numel() <= piece:
        return _whole(rows, words, "none").view_as(targets)
    losses: torch.Tensor = _InPieces.apply(rows, words, max(1, piece // rows.shape[1]))
    return losses.view_as(targets)


def likeliest(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """How many targets have the largest logit, a scalar. Takes what ``summed_loss`` does."""
    return (logits.argmax(-1) == targets).sum()


def piece_size(logits: int, cpu: bool) -> int:
    """Logits to compute at once of so many.

    Of an eighth of all, the three tensors in fp32 that backward holds beside the gradient take no more than the gradient: so much
    planning counts (``cost.model_cost``).
    """
    return PIECE if cpu else min(max(PIECE, logits // 8), LARGEST_PIECE)


def _whole(logits: torch.Tensor, targets: torch.Tensor, reduction: str) -> torch.Tensor:
    return F.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction=reduction)


class _InPieces(torch.autograd.Function):
    """The losses of all targets. Backward takes each piece's softmax again: what torch would keep is as large as the logits."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, rows: int) -> torch.Tensor:
        ctx.save_for_backward(logits, targets)
        ctx.rows = rows
        return torch.cat([_whole(logits[own], targets[own], "none") for own in _pieces(len(logits), rows)])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, targets = ctx.saved_tensors
        result = torch.empty_like(logits)
        for own in _pieces(len(logits), ctx.rows):
            result[own] = _gradient(logits[own], targets[own], gradient[own])  # frees its tensors before the next piece
        return result, None, None


def _gradient(logits: torch.Tensor, targets: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """(softmax - one-hot) x the row's factor (fp32), by the kernel that torch's own backward ends in; 0 where nothing is learnt."""
    likelihoods, words = F.log_softmax(logits, 1, dtype=torch.float32), targets.unsqueeze(1)
    of_words = torch.zeros_like(likelihoods).scatter_(1, words.clamp(min=0), -factors.unsqueeze(1) * (words != IGNORED))
    return torch.ops.aten._log_softmax_backward_data(of_words, likelihoods, 1, torch.float32)


def _pieces(length: int, rows: int) -> Iterator[slice]:
    return (slice(first, first + rows) for first in range(0, length, rows))


_SUM_BYTES = 4
_NARROWEST_BYTES = 2


@dataclass(frozen=True)
class Routers:
    """The routers of a whole model that has this loss.

    Attributes:
        names: of the modules that give the logits of every choice.
        output: which of their outputs these are.
        experts, choices: experts of a layer, and how many of them a token is sent to.
        coefficient: the factor of the loss.
    """

    names: tuple[str, ...]
    output: int
    experts: int
    choices: int
    coefficient: float

    def places(self, width: int) -> int:
        """Places of a sequence of hidden states of ``width`` numbers that its sums take in any dtype: nearly always one."""
        return math.ceil(2 * self.experts * _SUM_BYTES / _NARROWEST_BYTES / width)


@dataclass(frozen=True)
class Routed:
    """The part of B sequences that routers' losses count."""

    lengths: torch.Tensor
    """(B,) int64: tokens of each, from its first on; 0: it does not count."""
    weight: float
    """The weight of each sequence that counts."""

    def of_rows(self, rows: slice) -> Routed:
        return Routed(self.lengths[rows], self.weight)


class RouterLoss:
    """The loss on one stage. Between ``enter`` and ``leave`` (or ``loss``) the stage's routers add to the sums.

    Attributes:
        seen: (micro-batch, its first sequence) -> mean loss times its sequences' weights, before the coefficient.
    """

    def __init__(
        self, routers: Routers, modules: Iterable[nn.Module], routed: Callable[[], Routed | None], trains: bool = True
    ) -> None:
        """``modules``: the routers of the stage's own layers. ``routed``: of the sequences that are computed now, or again.
        ``trains``: these routers have a gradient of it; not where another rank, which computes the same, has it."""
        self.routers, self._routed, self._trains = routers, routed, trains
        self.seen: dict[tuple[int, int], torch.Tensor] = {}
        self._sums: torch.Tensor | None = None
        for module in modules:
            module.register_forward_hook(self._add)

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """The hidden states of what a stage receives; token ids as they are."""
        if not x.is_floating_point():
            self._sums = torch.zeros((len(x), 2 * self.routers.experts), device=x.device)
            return x
        hidden: torch.Tensor
        hidden, self._sums = _Split.apply(x, self.routers)
        return hidden

    def leave(self, hidden: torch.Tensor) -> torch.Tensor:
        """The output for the next stage."""
        joined: torch.Tensor = _Join.apply(hidden, self._taken(), self.routers)
        return joined

    def loss(self, key: tuple[int, int]) -> torch.Tensor:
        """The sequences' share of the loss, a scalar (fp32), differentiable; noted in ``seen``."""
        sums, routed = self._taken(), self._routed()
        assert routed is not None
        tokens = (routed.lengths * len(self.routers.names)).clamp(min=1).unsqueeze(1)
        choices, likelihoods = (sums / tokens).chunk(2, dim=1)
        share = self.routers.experts * (choices * likelihoods).sum() * routed.weight
        self.seen[key] = share.detach()
        return self.routers.coefficient * share

    def drop(self) -> None:
        """Nothing is made of this forward's sums."""
        self._sums = None

    def _taken(self) -> torch.Tensor:
        sums, self._sums = self._sums, None
        assert sums is not None
        return sums

    def _add(self, module: nn.Module, arguments: object, output: tuple[torch.Tensor, ...]) -> None:
        """A router has chosen. Where its block is computed again, so is this, for what autograd has kept of it."""
        if self._sums is None and not torch.is_grad_enabled():
            return  # text is written
        logits, routed = output[self.routers.output], self._routed()
        logits = logits if self._trains else logits.detach()
        likelihoods = F.softmax(logits, dim=-1)
        chosen = torch.topk(likelihoods, self.routers.choices, dim=-1).indices
        both = torch.cat([torch.zeros_like(likelihoods).scatter_(-1, chosen, 1.0), likelihoods], dim=-1).float()
        if routed is not None:
            both = both.view(len(routed.lengths), -1, both.shape[-1])
            counted = torch.arange(both.shape[1], device=both.device) < routed.lengths.unsqueeze(1)
            both = both * counted.unsqueeze(2)
        if self._sums is not None:
            self._sums = self._sums + both.view(len(self._sums), -1, both.shape[-1]).sum(1)


class _Split(torch.autograd.Function):
    """Hidden states and sums of what was joined. In a narrow dtype the sums are bits of fp32, with which nothing may compute: so
    autograd is given no operation that would."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, routers: Routers) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.routers = routers
        return _split(x, routers)

    @staticmethod
    def backward(ctx: Any, hidden: torch.Tensor, sums: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _joined(hidden, sums, ctx.routers), None


class _Join(torch.autograd.Function):
    """The reverse of ``_Split``."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, sums: torch.Tensor, routers: Routers) -> torch.Tensor:
        ctx.routers = routers
        return _joined(hidden, sums, routers)

    @staticmethod
    def backward(ctx: Any, joined: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        hidden, sums = _split(joined, ctx.routers)
        return hidden.contiguous(), sums, None


def _joined(hidden: torch.Tensor, sums: torch.Tensor, routers: Routers) -> torch.Tensor:
    rows, length, width = hidden.shape
    result = hidden.new_zeros((rows, length + routers.places(width), width))
    result[:, :length] = hidden
    bits = sums.float().contiguous().view(hidden.dtype)
    result[:, length:].view(rows, -1)[:, : bits.shape[1]] = bits
    return result


def _split(x: torch.Tensor, routers: Routers) -> tuple[torch.Tensor, torch.Tensor]:
    rows, _, width = x.shape
    length = x.shape[1] - routers.places(width)
    numbers = 2 * routers.experts * _SUM_BYTES // x.dtype.itemsize
    bits = x[:, length:].reshape(rows, -1)[:, :numbers]
    return x[:, :length], bits.clone(memory_format=torch.contiguous_format).view(torch.float32)
