"""Attention and rotary tables of packed sequences, computed separately for each record.

Attention: transformers masks a packed sequence, but computes all pairs of its tokens. This module calls attention per record, with
the causal kernel if the mask is causal; results equal those of the mask.

Rotary tables that depend on the length (longrope, dynamic): transformers chooses one table per call by the largest position, and
keeps the table of the longest text seen, so other records, padding and earlier texts would change a record's result. Here each
record gets the table of its own length.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import PreTrainedConfig
from transformers.integrations import sdpa_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

Record = tuple[int, int, bool]
"""[first, last) within a sequence, and whether its mask is just causal."""

_records_by_mask = WeakTensorKeyDictionary()
"""Mask -> the records of each of its sequences: one serves all layers of a micro-batch, and finding them waits for the device."""


_PLAIN, _SHARES_KEYS = ALL_ATTENTION_FUNCTIONS["sdpa"], sdpa_attention.use_gqa_in_sdpa
_lock, _active = threading.Lock(), Counter[str]()
"""The blocks of ``attention`` that are under way, on all threads, by their arguments."""


@contextlib.contextmanager
def attention(packed: bool, repeats: bool) -> Iterator[None]:
    """A block whose ``sdpa`` attention computes ``packed`` records separately and ``repeats`` shared keys and values.

    transformers repeats them itself when it gets a mask. After the last such block, its own attention is restored.
    """
    _count(packed, repeats)
    try:
        yield
    finally:
        _count(-packed, -repeats)


def _count(packed: int, repeats: int) -> None:
    with _lock:
        _active.update(packed=packed, repeats=repeats)
        ALL_ATTENTION_FUNCTIONS.register("sdpa", _attend if _active["packed"] else _PLAIN)
        sdpa_attention.use_gqa_in_sdpa = (lambda *_: False) if _active["repeats"] else _SHARES_KEYS


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    positions = keywords.get("position_ids")
    if attention_mask is None or not _packed(query, key, attention_mask, positions) or "position_bias" in keywords:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **keywords)
    if attention_mask not in _records_by_mask:
        _records_by_mask[attention_mask] = _records(attention_mask, positions)
    rows = []
    for row, records in enumerate(_records_by_mask[attention_mask]):
        outputs = []
        for first, last, causal in records:
            record_tensors = [tensor[row : row + 1, :, first:last] for tensor in (query, key, value)]
            mask = None if causal else attention_mask[row : row + 1, :, first:last, first:last]
            outputs.append(sdpa_attention_forward(module, *record_tensors, mask, **keywords)[0])
        rows.append(torch.cat(outputs, dim=1))
    return torch.cat(rows), None


def _packed(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor | None) -> bool:
    """Whether there are positions of every token, and a mask of every pair of tokens that all heads share."""
    rows, length = query.shape[0], query.shape[2]
    return (
        positions is not None
        and positions.shape == (rows, length)
        and key.shape[2] == length
        and mask.dtype == torch.bool
        and mask.shape == (rows, 1, length, length)
    )


def _records(mask: torch.Tensor, positions: torch.Tensor) -> list[list[Record]]:
    length = mask.shape[-1]
    row_positions = positions.cpu()
    visible = mask[:, 0].cpu()
    causal = torch.ones((length, length), dtype=torch.bool).tril()
    records_by_row = []
    for row in range(len(row_positions)):
        starts = [0, *(torch.nonzero(row_positions[row].diff() != 1).flatten() + 1).tolist()]
        bounds = zip(starts, [*starts[1:], length], strict=True)
        records_by_row.append([(a, b, torch.equal(visible[row, a:b, a:b], causal[a:b, a:b])) for a, b in bounds])
    return records_by_row


_LONG = "longrope"
_DYNAMIC = "dynamic"


def depends_on_length(config: PreTrainedConfig) -> bool:
    """Whether the model turns keys and queries by a table that depends on the length of the text."""
    rope = getattr(config, "rope_parameters", None) or {}
    of_kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    return any(_by_length(parameters.get("rope_type")) for parameters in of_kinds)


def install_rotary(model: nn.Module) -> None:
    """Let the model's rotary embeddings compute record by record where their tables depend on the length."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if any(_by_length(kind) for kind in (kinds.values() if isinstance(kinds, dict) else [kinds])):
            module.forward = _Rotary(module, module.forward)


def _by_length(kind: Any) -> bool:
    return isinstance(kind, str) and (kind == _LONG or _DYNAMIC in kind)


class _Rotary:
    """The ``forward`` of a rotary embedding."""

    def __init__(self, module: Any, original_forward: Callable[..., Any]) -> None:
        self._module, self._original_forward = module, original_forward

    def __call__(self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None) -> Any:
        module, prefix = self._module, "" if layer_type is None else f"{layer_type}_"
        keywords = {} if layer_type is None else {"layer_type": layer_type}
        kind = module.rope_type if layer_type is None else module.rope_type[layer_type]
        if not _by_length(kind):
            return self._original_forward(x, position_ids, **keywords)
        lengths = record_lengths(position_ids)
        if kind == _LONG:
            rope = module.config.rope_parameters
            limit = (rope if layer_type is None else rope[layer_type])["original_max_position_embeddings"]
            tables = (lengths > limit).long()
        else:
            tables = lengths.clamp(min=module.original_max_seq_len)
        embeddings: Any = None
        for table in tables.unique().tolist():
            if kind != _LONG:
                self._reset(prefix)
            uses_table = tables == table
            table_embeddings = self._original_forward(x, torch.where(uses_table, position_ids, 0), **keywords)
            of_tokens = (
                uses_table if uses_table.ndim == 2 else uses_table[0]
            )  # texts have the same positions in all three dimensions of a picture
            embeddings = table_embeddings if embeddings is None else _where(of_tokens, table_embeddings, embeddings)
        return embeddings

    def _reset(self, prefix: str) -> None:
        """Reset the table to that of the original length."""
        module = self._module
        module.register_buffer(f"{prefix}inv_freq", getattr(module, f"{prefix}original_inv_freq"), persistent=False)
        setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)


def record_lengths(positions: torch.Tensor) -> torch.Tensor:
    """Length of each token's record (..., T); positions within a record are consecutive."""
    count = positions.shape[-1]
    places = torch.arange(count, device=positions.device).expand_as(positions)
    ends = torch.ones_like(positions, dtype=torch.bool)
    ends[..., :-1] = positions.diff(dim=-1) != 1
    last = torch.where(ends, places, count).flip(-1).cummin(-1).values.flip(-1)
    return positions.gather(-1, last) + 1


def _where(mask: torch.Tensor, values: Any, fallback: Any) -> Any:
    """The values given for some tokens, and others for the rest: (B, T, ...), or tuples of such."""
    if isinstance(values, torch.Tensor):
        return torch.where(mask.view(*mask.shape, *[1] * (values.ndim - 2)), values, fallback)
    return tuple(_where(mask, value, fallback_value) for value, fallback_value in zip(values, fallback, strict=True))
