"""The loss by which routers learn to spread tokens over the experts, sequence by sequence and over all stages.

It is transformers' ``load_balancing_loss_func`` of a batch of one sequence: experts x the sum, over experts, of the share of
choices that fall on it times its mean probability. Both are means over the tokens of *all* layers, so their product is no sum over
layers. Each layer adds to sums of each sequence, which travel behind the hidden states from stage to stage; their gradients
travel back the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

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
    """What the loss counts of B sequences."""

    lengths: torch.Tensor
    """(B,) int64: tokens of each, from its first on; 0: it does not count."""
    weight: float
    """Of each sequence that counts."""

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
        """What the next stage receives."""
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
