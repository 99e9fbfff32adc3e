"""The summed cross-entropy of a micro-batch, a few rows of logits at a time.

Logits are a head's largest tensor: with 150,000 words, 2,048 tokens of them take 0.6 GB in bf16. torch's own function keeps them
in fp32 and needs as much again, twice, in backward. In pieces, only the logits themselves and their gradient exist, both in the
compute dtype. Each row is computed as torch does it whole and the rows' losses are added as torch adds them, so the pieces
change no bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

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
            result[own] = _gradient(logits[own], targets[own], gradient[own])
        return result, None, None


def _gradient(logits: torch.Tensor, targets: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """(softmax - one-hot) x the row's factor (fp32), by the kernel that torch's own backward ends in; 0 where nothing is learnt."""
    likelihoods, words = F.log_softmax(logits, 1, dtype=torch.float32), targets.unsqueeze(1)
    of_words = torch.zeros_like(likelihoods).scatter_(1, words.clamp(min=0), -factors.unsqueeze(1) * (words != IGNORED))
    return torch.ops.aten._log_softmax_backward_data(of_words, likelihoods, 1, torch.float32)


def _pieces(length: int, rows: int) -> Iterator[slice]:
    return (slice(first, first + rows) for first in range(0, length, rows))
