"""LoRA layers in 16 bits as one autograd function: y = W x + s B (A d(x)), where d is dropout.

peft writes the product with B, its scaled copy and the sum to separate tensors, and clones products of packed weights. Here the
product with B is added to the base layer's output in place, and only tensors as narrow as the adapter's rank are scaled.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import nn

from hetero_mpi.model.layer.interface import ADAPTER_NAME
from hetero_mpi.model.layer.quantize import unpacked


def join_products(model: nn.Module) -> None:
    """Replace peft's forward of plain LoRA on linear layers by ``_LoraProduct``; DoRA and adapters of experts keep peft's."""
    for layer in model.modules():
        if getattr(layer, "lora_variant", None) == {} and type(layer.base_layer).__name__ in ("Linear", "Linear4bit"):
            layer.forward = partial(_forward, layer)


def _forward(layer: Any, x: torch.Tensor) -> torch.Tensor:
    a, b = layer.lora_A[ADAPTER_NAME].weight, layer.lora_B[ADAPTER_NAME].weight
    if x.dtype != a.dtype or layer.active_adapters != [ADAPTER_NAME]:  # `serve` switches between adapters
        return type(layer).forward(layer, x)
    dropped = layer.lora_dropout[ADAPTER_NAME](x)
    return cast(torch.Tensor, _LoraProduct.apply(x, None if dropped is x else dropped, a, b, layer))


class _LoraProduct(torch.autograd.Function):
    """Computes a LoRA layer. ``dropped`` is the input of A; None if it equals ``x``."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, dropped: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor, layer: Any
    ) -> torch.Tensor:
        rows = (x if dropped is None else dropped).flatten(0, -2)
        inner = rows @ a.t()
        y: torch.Tensor = layer.base_layer(x)
        y.view(-1, y.shape[-1]).addmm_(inner, b.t(), alpha=layer.scaling[ADAPTER_NAME])
        ctx.save_for_backward(rows, inner, a, b)
        ctx.layer, ctx.shape = layer, x.shape
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        rows, inner, a, b = ctx.saved_tensors
        scale, base, requested = ctx.layer.scaling[ADAPTER_NAME], ctx.layer.base_layer, ctx.needs_input_grad
        dy = dy.flatten(0, -2)
        d_inner = (dy @ b).mul_(scale)
        da, db = d_inner.t() @ rows if requested[2] else None, (dy.t() @ inner).mul_(scale) if requested[3] else None
        dx, d_dropped = None, (d_inner @ a).view(ctx.shape) if requested[1] else None
        if requested[0]:
            # Read now: an offloaded layer's weights may have moved since the forward.
            dx = dy @ (base.weight if type(base) is nn.Linear else unpacked(base.weight, dy.dtype))
            dx = (dx if requested[1] else dx.addmm_(d_inner, a)).view(ctx.shape)
        return dx, d_dropped, da, db, None
