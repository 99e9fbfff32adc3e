"""Computations on a shard that depend on the full layer: adapters' dropout masks, DoRA's row norms, and norms over all heads."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hetero_mpi.model.group.exchanges import GroupLink, entered, left
from hetero_mpi.model.group.tensor_division import Division
from hetero_mpi.model.layer.interface import ADAPTER_NAME


def adapted_across(model: nn.Module, divisions: Mapping[str, Division]) -> Iterator[tuple[str, Any, Division]]:
    """Yield (name, peft's layer, sharding) of each row-parallel adapted layer in a stage's model."""
    for path, module in model.named_modules():
        division = divisions.get(f"{path}.weight")
        if hasattr(module, "lora_dropout") and division is not None and division.cut and division.dim:
            yield path, module, division


def join_adapter(adapted: Any, division: Division, link: GroupLink) -> None:
    """Make an adapted layer use the dropout masks of its full input and the norms of its full rows."""
    dropout = adapted.lora_dropout[ADAPTER_NAME]
    if isinstance(dropout, nn.Dropout):
        adapted.lora_dropout[ADAPTER_NAME] = _DividedDropout(dropout.p, division.bounds, link.member)
    for layer in adapted.lora_magnitude_vector.values():
        layer.get_weight_norm = partial(_row_lengths, link)


def start_magnitude(adapted: Any, link: GroupLink) -> torch.Tensor | None:
    """Return an adapted layer's initial DoRA magnitudes, (out) in fp32: the norms of full rows; None if it uses no DoRA."""
    from peft.utils.integrations import dequantize_module_weight

    if ADAPTER_NAME not in adapted.lora_magnitude_vector:
        return None
    weight = dequantize_module_weight(adapted.base_layer).detach()
    return _row_lengths(link, weight, torch.zeros_like(weight), 0.0).float()


class _DividedDropout(nn.Module):
    """Dropout of columns [bounds[member], bounds[member + 1]) of a layer's input, bitwise equal to dropout of the full input."""

    def __init__(self, rate: float, bounds: tuple[int, ...], member: int) -> None:
        super().__init__()
        self._rate, self._first, self._end, self._width = rate, *bounds[member : member + 2], bounds[-1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        masked = F.dropout(F.pad(x, (self._first, self._width - self._end)), self._rate)
        return masked[..., self._first : self._end].contiguous()  # frees the rest


@torch.no_grad()
def _row_lengths(
    link: GroupLink, weight: torch.Tensor, lora_weight: torch.Tensor, scaling: float, adapter_name: str | None = None
) -> torch.Tensor:
    """Compute row norms as peft's ``get_weight_norm`` does, for rows that are sharded across the group."""
    squares = (weight + scaling * lora_weight).float().square().sum(1)
    return link.sum(squares).sqrt().to(weight.dtype)


def norm_over_members(norm: Any, width: int, link: GroupLink, narrow: bool, x: torch.Tensor) -> torch.Tensor:
    """Apply an RMSNorm over ``width`` elements; the last dimension of ``x`` holds this rank's shard.

    Args:
        narrow: apply the weight in the dtype of ``x`` (as Llama), else in fp32 (as OLMo 2).
    """
    wide = x.float()
    squares = entered(left(wide.square().sum(-1, keepdim=True), link), link)
    scaled = wide * torch.rsqrt(squares / width + norm.variance_epsilon)
    return norm.weight * scaled.to(x.dtype) if narrow else (norm.weight * scaled).to(x.dtype)
