"""Rotary tables that depend on a text's length (longrope, dynamic), record by record.

transformers chooses one table for all that it computes at once, by the largest position in it, and keeps the table of the longest
text so far. So a record would be computed by the length of what stands beside it: other records, padding, or an earlier text. Here
each record has the table that it has by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

_LONG = "longrope"
_DYNAMIC = "dynamic"


def depends_on_length(config: PreTrainedConfig) -> bool:
    """Does the model turn keys and queries by a table that depends on the length of the text?"""
    rope = getattr(config, "rope_parameters", None) or {}
    of_kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    return any(_by_length(one.get("rope_type")) for one in of_kinds)


def install(model: nn.Module) -> None:
    """Let the model's rotary embeddings compute record by record where their tables depend on the length."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if any(_by_length(kind) for kind in (kinds.values() if isinstance(kinds, dict) else [kinds])):
            module.forward = _Rotary(module, module.forward)


def _by_length(kind: Any) -> bool:
    return isinstance(kind, str) and (kind == _LONG or _DYNAMIC in kind)


class _Rotary:
    """The ``forward`` of a rotary embedding."""

    def __init__(self, module: Any, whole: Callable[..., Any]) -> None:
        self._module, self._whole = module, whole

    def __call__(self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None) -> Any:
        module, prefix = self._module, "" if layer_type is None else f"{layer_type}_"
        keywords = {} if layer_type is None else {"layer_type": layer_type}
        kind = module.rope_type if layer_type is None else module.rope_type[layer_type]
        if not _by_length(kind):
            return self._whole(x, position_ids, **keywords)
        lengths = record_lengths(position_ids)
        if kind == _LONG:
            rope = module.config.rope_parameters
            limit = (rope if layer_type is None else rope[layer_type])["original_max_position_embeddings"]
            tables = (lengths > limit).long()
        else:
            tables = lengths.clamp(min=module.original_max_seq_len)
        found: Any = None
        for table in tables.unique().tolist():
            if kind != _LONG:
                self._reset(prefix)
            mine = tables == table
            given = self._whole(x, torch.where(mine, position_ids, 0), **keywords)
            of_tokens = (
                mine if mine.ndim == 2 else mine[0]
            )  # texts have the same positions in all three dimensions of a picture
            found = given if found is None else _chosen(of_tokens, given, found)
        return found

    def _reset(self, prefix: str) -> None:
        """Forget the longest text so far."""
        module = self._module
        module.register_buffer(f"{prefix}inv_freq", getattr(module, f"{prefix}original_inv_freq"), persistent=False)
        setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)


def record_lengths(positions: torch.Tensor) -> torch.Tensor:
    """For each token (..., T) the length of its record, of which positions go up one by one."""
    count = positions.shape[-1]
    places = torch.arange(count, device=positions.device).expand_as(positions)
    ends = torch.ones_like(positions, dtype=torch.bool)
    ends[..., :-1] = positions.diff(dim=-1) != 1
    last = torch.where(ends, places, count).flip(-1).cummin(-1).values.flip(-1)
    return positions.gather(-1, last) + 1


def _chosen(mine: torch.Tensor, given: Any, others: Any) -> Any:
    """What is given for some tokens, and others for the rest: (B, T, ...), or tuples of such."""
    if isinstance(given, torch.Tensor):
        return torch.where(mine.view(*mine.shape, *[1] * (given.ndim - 2)), given, others)
    return tuple(_chosen(mine, one, other) for one, other in zip(given, others, strict=True))
