"""Cross-entropy of a micro-batch, computed for a few rows of logits at a time, and the load-balancing loss of routers.

Logits are a head's largest tensor: 2,048 tokens with a vocabulary of 150,000 take 0.6 GB in bf16. torch's loss stores them in fp32
and needs twice as much again in backward. Computing in pieces stores only the logits and their gradient, both in the compute dtype.
Each row's loss is computed, and the losses are added, exactly as torch does, so results are bitwise equal.

The router loss is transformers' ``load_balancing_loss_func``, per sequence: number of experts x sum over experts of (fraction of
choices x mean probability). Both factors are means over the tokens of *all* layers, so the loss is not a sum over layers. Each
layer adds to running sums per sequence, which stages send on after the hidden states; their gradients are sent back.
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
"""Target value of a position without a loss."""
PIECE = 1 << 22
"""Logits per piece on the CPU (16 MB in fp32, which fits in caches); fewer logits than this are computed in one call."""
LARGEST_PIECE = 1 << 26
"""Maximum number of logits per piece on other devices, where each piece costs a dozen kernel launches."""


def summed_loss(logits: torch.Tensor, targets: torch.Tensor, piece: int | None = None) -> torch.Tensor:
    """Sum the losses of all targets that are not ``IGNORED``: a differentiable fp32 scalar.

    Args:
        logits: (B, T, V) in the compute dtype.
        targets: (B, T) int64.
        piece: number of logits to compute at a time, by default ``piece_size``; does not affect the result.
    """
    rows, words = logits.flatten(0, 1), targets.flatten()
    piece = piece or piece_size(rows.numel(), rows.is_cpu)
    if rows.numel() <= piece:
        return _cross_entropy(rows, words, "sum")
    return added_losses(_InPieces.apply(rows, words, max(1, piece // rows.shape[1])), words)


def added_losses(losses: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Add losses (N) in the order of torch's sum over targets (N), by treating each row as a vocabulary of one token."""
    return F.nll_loss(-losses.unsqueeze(1), words.clamp(max=0), ignore_index=IGNORED, reduction="sum")


def target_losses(logits: torch.Tensor, targets: torch.Tensor, piece: int | None = None) -> torch.Tensor:
    """Return the loss of each target, (B, T) in fp32, differentiable; 0 for ``IGNORED``. Arguments: see ``summed_loss``."""
    rows, words = logits.flatten(0, 1), targets.flatten()
    piece = piece or piece_size(rows.numel(), rows.is_cpu)
    if rows.numel() <= piece:
        return _cross_entropy(rows, words, "none").view_as(targets)
    losses: torch.Tensor = _InPieces.apply(rows, words, max(1, piece // rows.shape[1]))
    return losses.view_as(targets)


def likeliest(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the number of targets that have the largest logit, a scalar. Arguments: see ``summed_loss``."""
    return (logits.argmax(-1) == targets).sum()


def piece_size(logits: int, cpu: bool) -> int:
    """Return the number of logits to compute at a time, out of ``logits`` in total.

    With an eighth of all logits per piece, the three fp32 tensors of backward take no more memory than the gradient, as
    ``model_cost`` assumes.
    """
    return PIECE if cpu else min(max(PIECE, logits // 8), LARGEST_PIECE)


def _cross_entropy(logits: torch.Tensor, targets: torch.Tensor, reduction: str) -> torch.Tensor:
    return F.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction=reduction)


class _InPieces(torch.autograd.Function):
    """Losses of all targets. Backward recomputes each piece's softmax, which would take as much memory to store as the logits."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, rows: int) -> torch.Tensor:
        ctx.save_for_backward(logits, targets)
        ctx.rows = rows
        return torch.cat([_cross_entropy(logits[p], targets[p], "none") for p in _pieces(len(logits), rows)])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, targets = ctx.saved_tensors
        result = torch.empty_like(logits)
        for piece in _pieces(len(logits), ctx.rows):
            # A function call, to free its tensors before the next piece.
            result[piece] = _gradient(logits[piece], targets[piece], gradient[piece])
        return result, None, None


def _gradient(logits: torch.Tensor, targets: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Return (softmax - one-hot) x factor per row in fp32, using torch's backward kernel; 0 for ``IGNORED`` targets."""
    likelihoods, words = F.log_softmax(logits, 1, dtype=torch.float32), targets.unsqueeze(1)
    of_words = torch.zeros_like(likelihoods).scatter_(1, words.clamp(min=0), -factors.unsqueeze(1) * (words != IGNORED))
    return torch.ops.aten._log_softmax_backward_data(of_words, likelihoods, 1, torch.float32)


def _pieces(length: int, rows: int) -> Iterator[slice]:
    return (slice(first, first + rows) for first in range(0, length, rows))


_SUM_BYTES = 4
_NARROWEST_BYTES = 2


@dataclass(frozen=True)
class Routers:
    """A model's routers that have a load-balancing loss.

    Attributes:
        names: names of the router modules.
        output: index of the logits among a router's outputs.
        experts, choices: number of experts per layer, and number of experts chosen per token.
        coefficient: coefficient of the loss.
    """

    names: tuple[str, ...]
    output: int
    experts: int
    choices: int
    coefficient: float

    def places(self, width: int) -> int:
        """Return the number of rows of ``width`` elements that a sequence's sums need in any dtype; nearly always 1."""
        return math.ceil(2 * self.experts * _SUM_BYTES / _NARROWEST_BYTES / width)


@dataclass(frozen=True)
class Routed:
    """The part of B sequences that counts towards the router loss."""

    lengths: torch.Tensor
    """(B,) int64: number of leading tokens that count; 0 excludes the sequence."""
    weight: float
    """Weight of each counted sequence."""

    def of_rows(self, rows: slice) -> Routed:
        return Routed(self.lengths[rows], self.weight)


class RouterLoss:
    """The router loss on one stage. Between ``enter`` and ``leave`` (or ``loss``), the stage's routers add to the sums.

    Attributes:
        seen: maps (micro-batch, its first sequence) to the weighted loss of its sequences, before the coefficient is applied.
    """

    def __init__(
        self, routers: Routers, modules: Iterable[nn.Module], routed: Callable[[], Routed | None], trains: bool = True
    ) -> None:
        """Register hooks on the stage's routers.

        Args:
            modules: routers of the stage's layers.
            routed: returns the ``Routed`` of the sequences being computed or recomputed.
            trains: whether the loss has a gradient here; false on tensor-parallel ranks other than the leader.
        """
        self.routers, self._routed, self._trains = routers, routed, trains
        self.seen: dict[tuple[int, int], torch.Tensor] = {}
        self._sums: torch.Tensor | None = None
        for module in modules:
            module.register_forward_hook(self._add)

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Split a stage's input into hidden states, which are returned, and sums. Token ids are returned unchanged."""
        if not x.is_floating_point():
            self._sums = torch.zeros((len(x), 2 * self.routers.experts), device=x.device)
            return x
        hidden: torch.Tensor
        hidden, self._sums = _Split.apply(x, self.routers)
        return hidden

    def leave(self, hidden: torch.Tensor) -> torch.Tensor:
        """Append the sums to the hidden states, as output for the next stage."""
        joined: torch.Tensor = _Join.apply(hidden, self._pop_sums(), self.routers)
        return joined

    def loss(self, key: tuple[int, int]) -> torch.Tensor:
        """Return the sequences' share of the loss, a differentiable fp32 scalar, and record it in ``seen``."""
        sums, routed = self._pop_sums(), self._routed()
        assert routed is not None
        tokens = (routed.lengths * len(self.routers.names)).clamp(min=1).unsqueeze(1)
        choices, likelihoods = (sums / tokens).chunk(2, dim=1)
        share = self.routers.experts * (choices * likelihoods).sum() * routed.weight
        self.seen[key] = share.detach()
        return self.routers.coefficient * share

    def drop(self) -> None:
        """Discard the sums of this forward pass."""
        self._sums = None

    def _pop_sums(self) -> torch.Tensor:
        sums, self._sums = self._sums, None
        assert sums is not None
        return sums

    def _add(self, module: nn.Module, arguments: object, output: tuple[torch.Tensor, ...]) -> None:
        """Forward hook of routers: add their choices and probabilities to the sums. Also runs during recomputation."""
        if self._sums is None and not torch.is_grad_enabled():
            return  # text generation
        logits, routed = output[self.routers.output], self._routed()
        logits = logits if self._trains else logits.detach()
        likelihoods = F.softmax(logits, dim=-1)
        choices = torch.topk(likelihoods, self.routers.choices, dim=-1).indices
        statistics = torch.cat([torch.zeros_like(likelihoods).scatter_(-1, choices, 1.0), likelihoods], dim=-1).float()
        if routed is not None:
            statistics = statistics.view(len(routed.lengths), -1, statistics.shape[-1])
            counted = torch.arange(statistics.shape[1], device=statistics.device) < routed.lengths.unsqueeze(1)
            statistics = statistics * counted.unsqueeze(2)
        if self._sums is not None:
            self._sums = self._sums + statistics.view(len(self._sums), -1, statistics.shape[-1]).sum(1)


class _Split(torch.autograd.Function):
    """Splits a joined tensor into hidden states and sums; in 16-bit dtypes autograd must not process the sums' raw fp32 bits."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, routers: Routers) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.routers = routers
        return _split(x, routers)

    @staticmethod
    def backward(ctx: Any, hidden: torch.Tensor, sums: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _joined(hidden, sums, ctx.routers), None


class _Join(torch.autograd.Function):
    """The inverse of ``_Split``."""

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
