"""Parts of a layer of which a member holds nothing: they give zeros, and backward reaches the exchanges before them even so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def replace_forward(module: nn.Module, zeros: Callable[[torch.Tensor], torch.Tensor], pair: bool = False) -> None:
    """From now on ``module`` gives ``zeros`` of what it is given first. ``pair``: with attention's weights, which are None."""

    def forward(*arguments: Any, **keywords: Any) -> Any:
        x = arguments[0] if arguments else keywords["hidden_states"]
        output = anchored(zeros(x), x, *module.parameters())
        return (output, None) if pair else output

    module.forward = forward  # type: ignore[method-assign]


def anchored(output: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """``output`` as it is, with (further) gradients of zero to those of ``others`` that have any: so every member reaches the
    exchanges before them in backward, though it computes nothing of them."""
    trained = [other for other in others if other.requires_grad]
    result: torch.Tensor = _Anchored.apply(output, *trained)
    return result


class _Anchored(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        ctx.shapes = [(other.shape, other.dtype, other.device) for other in others]
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        zeros = (torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.shapes)
        return gradient, *zeros
