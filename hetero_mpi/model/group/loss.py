"""Cross-entropy where each member of a group has the logits of some words only.

Of every target the members exchange three numbers: the largest logit, the sum of the exponentials, and the target's own logit.
The gradient of the logits needs no exchange.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from hetero_mpi.model.group.link import GroupLink
from hetero_mpi.model.layer.loss import IGNORED, piece_size


def divided_summed_loss(logits: torch.Tensor, targets: torch.Tensor, first: int, link: GroupLink) -> torch.Tensor:
    """Sum of the losses of all targets that are not ``IGNORED``, a scalar (fp32), differentiable; the same on all members.

    Args:
        logits: (B, T, V'), of this member's words.
        targets: (B, T) int64, words of the whole vocabulary.
        first: this member's first word.
    """
    losses = divided_target_losses(logits, targets, first, link).flatten()
    # The order of additions of ``summed_loss``: each row is a vocabulary of one word.
    words = targets.flatten().clamp(max=0)
    return F.nll_loss(-losses.unsqueeze(1), words, ignore_index=IGNORED, reduction="sum")


def divided_target_losses(logits: torch.Tensor, targets: torch.Tensor, first: int, link: GroupLink) -> torch.Tensor:
    """Loss of each target, (B, T) in fp32, differentiable; 0 where it is ``IGNORED``. Takes what ``divided_summed_loss`` does."""
    losses: torch.Tensor = _Losses.apply(logits.flatten(0, 1), targets.flatten(), first, link)
    return losses.view_as(targets)


class _Losses(torch.autograd.Function):
    """The losses of all targets, a few rows of logits at a time (``layer.loss``)."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, first: int, link: GroupLink) -> torch.Tensor:
        largest = torch.full((len(logits),), -torch.inf, device=logits.device)
        for rows in _rows(logits):
            largest[rows] = logits[rows].max(1).values.float()
        largest = link.maximum(largest)
        exponentials, of_targets = torch.zeros_like(largest), torch.zeros_like(largest)
        words, here = _own_words(targets, first, logits.shape[1])
        for rows in _rows(logits):
            shifted = logits[rows].float() - largest[rows].unsqueeze(1)
            of_targets[rows] = shifted.gather(1, words[rows].unsqueeze(1)).squeeze(1) * here[rows]
            exponentials[rows] = shifted.exp_().sum(1)
        summed, of_targets = link.sum(torch.stack((exponentials, of_targets))).unbind()
        logarithms = summed.log()
        ctx.save_for_backward(logits, words, here, targets, largest + logarithms)
        return torch.where(targets == IGNORED, 0.0, logarithms - of_targets)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logits, words, here, targets, norms = ctx.saved_tensors
        factors = (gradient * (targets != IGNORED)).unsqueeze(1)
        result = torch.empty_like(logits)
        for rows in _rows(logits):
            likelihoods = (logits[rows].float() - norms[rows].unsqueeze(1)).exp_().mul_(factors[rows])
            likelihoods.scatter_add_(1, words[rows].unsqueeze(1), -factors[rows] * here[rows].unsqueeze(1))
            result[rows] = likelihoods
        return result, None, None, None


def _own_words(targets: torch.Tensor, first: int, words: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(each target's place among this member's words, any place for a word of another one; is it this member's?)"""
    places = targets - first
    return places.clamp(0, words - 1), (places >= 0) & (places < words)


def _rows(logits: torch.Tensor) -> Iterator[slice]:
    """Rows that are computed at once; none of a member without words."""
    if logits.shape[1] == 0:
        return
    size = max(1, piece_size(logits.numel(), logits.is_cpu) // logits.shape[1])
    yield from (slice(begin, begin + size) for begin in range(0, len(logits), size))
