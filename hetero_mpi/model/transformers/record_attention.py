"""Attention record by record, where records packed into one sequence do not see each other.

transformers makes one mask of a packed sequence, and then computes every pair of its tokens, also those that are masked. Here each
record is a call of its own, of the causal kernel where the mask says no more than that. The numbers are those of the mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

Record = tuple[int, int, bool]
"""[first, last) within a sequence, and whether its mask is just causal."""

_known = WeakTensorKeyDictionary()
"""Mask -> the records of each of its sequences: one serves all layers of a micro-batch, and finding them waits for the device."""


def install() -> None:
    """From now on transformers' ``sdpa`` attention is this one."""
    ALL_ATTENTION_FUNCTIONS.register("sdpa", _attend)


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
    if attention_mask not in _known:
        _known[attention_mask] = _records(attention_mask, positions)
    rows = []
    for row, records in enumerate(_known[attention_mask]):
        outputs = []
        for first, last, causal in records:
            own = [tensor[row : row + 1, :, first:last] for tensor in (query, key, value)]
            mask = None if causal else attention_mask[row : row + 1, :, first:last, first:last]
            outputs.append(sdpa_attention_forward(module, *own, mask, **keywords)[0])
        rows.append(torch.cat(outputs, dim=1))
    return torch.cat(rows), None


def _packed(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor | None) -> bool:
    """Are there positions of every token, and a mask of every pair of tokens that all heads share?"""
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
    places = positions.cpu()
    seen = mask[:, 0].cpu()
    causal = torch.ones((length, length), dtype=torch.bool).tril()
    found = []
    for row in range(len(places)):
        starts = [0, *(torch.nonzero(places[row].diff() != 1).flatten() + 1).tolist()]
        bounds = zip(starts, [*starts[1:], length], strict=True)
        found.append([(a, b, torch.equal(seen[row, a:b, a:b], causal[a:b, a:b])) for a, b in bounds])
    return found
