"""Attention and rotary tables of packed sequences, computed separately for each record, and attention of batched generation.

Attention: transformers masks a packed sequence but computes all pairs of its tokens. This module calls attention once per record,
with the causal kernel if the mask is causal; results equal those with the mask. The host knows where records begin.

Rotary tables that depend on the length (longrope, dynamic): transformers chooses one table per call by the largest position, and
keeps the table of the longest sequence so far, so other records, padding and earlier sequences would change a record's result. Here
each record gets the table for its own length.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import PreTrainedConfig, masking_utils
from transformers.integrations import sdpa_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


class TextStates(NamedTuple):
    """Keys and values for the new tokens of one of several packed texts."""

    tokens: int
    """Number of new tokens T, which are the last of K."""
    keys: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor | None
    """(T, K); None for causal attention."""


_texts_by_key = WeakTensorKeyDictionary()
"""Maps the keys of the new tokens of packed texts to the list of their ``TextStates``."""

_UNKNOWN: Any = object()
_records_by_mask = WeakTensorKeyDictionary()
"""Maps each mask to (``MicroBatch.records``, size of the window or chunk of tokens that a token attends to, or None). Recomputation
in backward also finds this entry, on whichever thread it runs."""

_PLAIN, _SHARES_KEYS = ALL_ATTENTION_FUNCTIONS["sdpa"], sdpa_attention.use_gqa_in_sdpa
_PLAIN_MASK, _PLAIN_INDICES = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"], masking_utils.find_packed_sequence_indices
_lock, _active = threading.Lock(), Counter[str]()
"""Number of open ``attention`` contexts on all threads, by their arguments."""
_records: ContextVar[list[list[int]] | None] = ContextVar("records", default=_UNKNOWN)
"""The records of this thread's ``attention`` context."""


@contextlib.contextmanager
def attention(records: list[list[int]] | None, repeats: bool) -> Iterator[None]:
    """Return a context whose ``sdpa`` attention computes ``records`` separately; ``repeats`` repeats shared keys and values.

    transformers itself repeats them when it gets a mask. Within the context it does not search positions for records, which would
    wait for the device. When the last such context ends, transformers' own attention is restored.

    Args:
        records: record sizes of each sequence; empty for texts of ``hand_texts``; None if every sequence is one record.
    """
    token = _records.set(records)
    _count(1, records is not None, repeats)
    try:
        yield
    finally:
        _count(-1, -(records is not None), -repeats)
        _records.reset(token)


def _count(blocks: int, packed: int, repeats: int) -> None:
    with _lock:
        _active.update(blocks=blocks, packed=packed, repeats=repeats)
        ALL_ATTENTION_FUNCTIONS.register("sdpa", _attend if _active["packed"] else _PLAIN)
        ALL_MASK_ATTENTION_FUNCTIONS.register("sdpa", _mask if _active["packed"] else _PLAIN_MASK)
        sdpa_attention.use_gqa_in_sdpa = (lambda *_: False) if _active["repeats"] else _SHARES_KEYS
        masking_utils.find_packed_sequence_indices = _record_indices if _active["blocks"] else _PLAIN_INDICES


def _record_indices(positions: torch.Tensor) -> torch.Tensor | None:
    """Return the index of each token's record in its sequence, (B, T); None if every sequence is one record."""
    records = _records.get()
    if records is _UNKNOWN:
        return _PLAIN_INDICES(positions)
    if records is None or all(len(sizes) == 1 for sizes in records):
        return None
    return (positions.diff(dim=-1, prepend=positions[:, :1] - 1) != 1).cumsum(-1)


def _mask(**keywords: Any) -> torch.Tensor | None:
    records = _records.get()
    mask = _PLAIN_MASK(**keywords) if records != [] else None
    if mask is not None and records and records is not _UNKNOWN:
        _records_by_mask[mask] = records, 0 if keywords.get("use_vmap") else keywords.get("local_size")
    return mask


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    if key in _texts_by_key:
        return _attend_texts(module, query, _texts_by_key[key], **keywords), None
    if attention_mask is None or attention_mask not in _records_by_mask or "position_bias" in keywords:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **keywords)
    (records, window), outputs = _records_by_mask[attention_mask], []
    # Splits, not slices: the gradient of a slice is a tensor as large as all records.
    for sizes, mask, *row in zip(records, *(t.split(1) for t in (attention_mask, query, key, value)), strict=True):
        for last, *record in zip(accumulate(sizes), *(tensor.split(sizes, 2) for tensor in row), strict=True):
            span = slice(last - record[0].shape[2], last)
            record_mask = None if window is None or last - span.start <= window else mask[:, :, span, span]
            outputs.append(sdpa_attention_forward(module, *record, record_mask, **keywords)[0])
    output = torch.cat(outputs, dim=1)  # (1, B T, heads, D)
    return output.view(len(records), -1, *output.shape[2:]), None


def hand_texts(key: torch.Tensor, texts: list[TextStates]) -> torch.Tensor:
    """Make the attention of ``key`` (1, H, N, D) use these keys and values for its first tokens; others are padding."""
    _texts_by_key[key] = texts
    return key


def install_expansion(model: nn.Module) -> None:
    """Patch latent attention to expand each packed text's latents, which ``hand_texts`` got, separately."""
    for module in model.modules():
        if hasattr(module, "expand_kv"):
            vars(module).update(expand_kv=partial(_expand, partial(type(module).expand_kv, module)))


def _expand(expand: Callable[..., Any], latents: torch.Tensor, rotated: torch.Tensor) -> Any:
    if latents not in _texts_by_key:
        return expand(latents, rotated)
    texts = _texts_by_key[latents]
    for index, text in enumerate(texts):
        keys, values = expand(text.keys, text.values)
        texts[index] = text._replace(keys=keys, values=values)
    return hand_texts(latents.view_as(latents), texts), rotated


def _attend_texts(
    module: torch.nn.Module, query: torch.Tensor, texts: list[TextStates], scaling: float | None = None, **keywords: Any
) -> torch.Tensor:
    """Compute attention (1, N, H, D) of each text separately, and empty ``texts``, which are used only once."""
    shared = getattr(module, "num_key_value_groups", 1) > 1
    outputs, first = list[torch.Tensor](), 0
    for tokens, key, value, mask in texts:
        queries = query[:, :, first : first + tokens]
        first += tokens
        if shared and not sdpa_attention.use_gqa_in_sdpa(mask, key, value):
            attended, _ = sdpa_attention_forward(module, queries, key, value, mask, scaling=scaling, **keywords)
            outputs.append(attended.transpose(1, 2))
        else:  # without transformers' work for masks, which takes as long as the attention of a short text
            options: Any = {"is_causal": mask is None and tokens > 1, "scale": scaling, "enable_gqa": shared}
            outputs.append(nn.functional.scaled_dot_product_attention(queries, key, value, mask, **options))
    texts.clear()
    padding = query.shape[2] - first
    outputs.append(torch.zeros_like(outputs[0][:, :, :1]).expand(-1, -1, padding, -1))
    return torch.cat(outputs, 2).transpose(1, 2).contiguous()


_LONG, _DYNAMIC = "longrope", "dynamic"


def depends_on_length(config: PreTrainedConfig) -> bool:
    """Return whether the model's rotary embeddings depend on the length of the sequence."""
    rope = getattr(config, "rope_parameters", None) or {}
    of_kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    return any(_by_length(parameters.get("rope_type")) for parameters in of_kinds)


def install_rotary(model: nn.Module) -> None:
    """Patch rotary embeddings whose cos/sin tables depend on sequence length to handle each record separately."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if any(_by_length(kind) for kind in (kinds.values() if isinstance(kinds, dict) else [kinds])):
            module.forward = _Rotary(module, module.forward)


def _by_length(kind: Any) -> bool:
    return isinstance(kind, str) and (kind == _LONG or _DYNAMIC in kind)


class _Rotary:
    """Replaces the ``forward`` of a rotary embedding."""

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
            # Texts have the same positions in all three dimensions of a picture.
            of_tokens = uses_table if uses_table.ndim == 2 else uses_table[0]
            embeddings = table_embeddings if embeddings is None else _where(of_tokens, table_embeddings, embeddings)
        return embeddings

    def _reset(self, prefix: str) -> None:
        """Reset the table to the one for the original length."""
        module = self._module
        module.register_buffer(f"{prefix}inv_freq", getattr(module, f"{prefix}original_inv_freq"), persistent=False)
        setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)


def record_lengths(positions: torch.Tensor) -> torch.Tensor:
    """Return the length of each token's record (..., T); positions within a record are consecutive."""
    count = positions.shape[-1]
    places = torch.arange(count, device=positions.device).expand_as(positions)
    ends = torch.ones_like(positions, dtype=torch.bool)
    ends[..., :-1] = positions.diff(dim=-1) != 1
    last = torch.where(ends, places, count).flip(-1).cummin(-1).values.flip(-1)
    return positions.gather(-1, last) + 1


def _where(mask: torch.Tensor, values: Any, fallback: Any) -> Any:
    """Select ``values`` where ``mask`` is true and ``fallback`` elsewhere: (B, T, ...), or tuples of such tensors."""
    if isinstance(values, torch.Tensor):
        return torch.where(mask.view(*mask.shape, *[1] * (values.ndim - 2)), values, fallback)
    return tuple(_where(mask, value, fallback_value) for value, fallback_value in zip(values, fallback, strict=True))
