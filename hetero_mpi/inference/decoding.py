"""One stage's part in writing texts: own layers with a KV cache for each, and the choice of a token from the last stage's logits.

transformers sizes its attention masks by one layer of the cache, the first of each kind of attention. On a later stage that layer
is another rank's and holds nothing; so here the layers of other stages count the tokens that have passed, without keeping them.

Also here: several adapters in one stage, of which one computes at a time: those beside the one that the stage was built with.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from hetero_mpi.device.backend import HOST
from hetero_mpi.model.layer.interface import ADAPTER_NAME, seed_from
from hetero_mpi.model.layer.quantize import set_training
from hetero_mpi.model.stage import Stage
from hetero_mpi.model.transformers.chain import language
from hetero_mpi.model.transformers.packed_records import depends_on_length
from hetero_mpi.model.tuning import Tuning, inject
from hetero_mpi.util.errors import UserError

OPENED = ADAPTER_NAME
"""The adapter that a stage was built with, if any. Every other name is another adapter's; that of none is ""."""
NOT_A_NUMBER = -1
"""The number that ``pick`` gives instead of a token when the model's output is not a number."""
OWN_CACHE = ("minimax",)
"""Families that bring a cache class of their own, whose layers cannot be told which of them are elsewhere."""
_TWO_ROTARIES = ("phi3", "phimoe")
"""Families whose rotary embedding changes at a length, where their ``generate`` computes the whole text again."""
_OWN_CHOICE_OF_KEYS = ("doge",)
"""Families that choose keys by their scores, beside those with an indexer (``index_topk``)."""


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen."""

    temperature: float = 0.0
    """0: the most likely token (greedy)."""
    top_p: float = 1.0
    """Draw from the fewest tokens that together have this probability (nucleus sampling, arXiv:1904.09751)."""
    seed: int = 0
    top_k: int = 0
    """Draw from so many of the most likely tokens, and those as likely as the last of them; 0: from all."""
    min_p: float = 0.0
    """Draw from the tokens that have at least this share of the most likely one's probability (arXiv:2407.01082)."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of all tokens that the text has already, and multiplies the negative ones (arXiv:1909.05858)."""


def pick(
    logits: torch.Tensor,
    sampling: Sampling,
    position: int,
    known: Sequence[int] = (),
    forbidden: Sequence[int] = (),
) -> int:
    """The token at ``position`` of the text; ``NOT_A_NUMBER`` when there is none to choose.

    What is left to choose from is what transformers' ``generate`` leaves, by the same steps in the same order.

    Random numbers are drawn on the host from (seed, position), so that they depend neither on the device nor on the partition.

    ``logits``: (V,) fp32, on any device. ``known``: the text's tokens, for a penalty. ``forbidden``: tokens that are not chosen.
    """
    if sampling.repetition_penalty != 1 and known:
        seen = torch.tensor(sorted(set(known)), device=logits.device)
        of_seen, penalty = logits[seen], sampling.repetition_penalty
        logits = logits.index_copy(0, seen, torch.where(of_seen < 0, of_seen * penalty, of_seen / penalty))
    if forbidden:
        logits = logits.index_fill(0, torch.tensor(forbidden, device=logits.device), -torch.inf)
    if not torch.isfinite(logits.max()):  # NaN, an overflow, or -inf everywhere; -inf in places only forbids tokens
        return NOT_A_NUMBER
    if sampling.temperature == 0:
        return int(torch.argmax(logits))
    scaled = logits.to(HOST).double()
    scaled = (scaled - scaled.max()) / sampling.temperature
    likely, tokens = torch.softmax(scaled, 0).sort(descending=True, stable=True)
    if 0 < sampling.top_k < len(likely):
        likely = likely.masked_fill(likely < likely[sampling.top_k - 1], 0.0)
        likely = likely / likely.sum()
    before = likely.cumsum(0) - likely  # of the tokens that are likelier: the first is always kept
    dropped = (before >= sampling.top_p) | (likely < sampling.min_p * likely[0])
    generator = torch.Generator().manual_seed(seed_from(sampling.seed, "token", position))
    chosen = torch.multinomial(likely.masked_fill(dropped, 0.0), 1, generator=generator)
    return int(tokens[chosen])


@dataclass(frozen=True)
class Scored:
    """A token of a text with its log-likelihood behind the tokens before it, by the model itself: before temperature, penalties
    and the like."""

    token: int
    likelihood: float
    likeliest: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens at its place with theirs, the likeliest first."""


def scored(logits: torch.Tensor, tokens: Sequence[int], count: int) -> torch.Tensor:
    """Log-likelihoods of tokens as (K, 1 + 2 ``count``) fp64 on the host: the token's, then the likeliest tokens, then theirs.
    ``logits``: (K, V) fp32, of which each row is of the token's place.
    """
    likelihoods = torch.log_softmax(logits, dim=1)
    own = likelihoods.gather(1, torch.tensor(tokens, device=logits.device).unsqueeze(1))
    most, words = likelihoods.topk(min(count, logits.shape[1]), dim=1)
    return torch.cat([part.to(HOST).double() for part in (own, words, most)], dim=1)


def require_decodable(config: PreTrainedConfig) -> None:
    """Raise ``UserError`` for a family that can be trained but not decoded here."""
    if config.model_type in OWN_CACHE:
        raise UserError(
            "model.undecodable",
            f"model_type {config.model_type!r} has a cache of its own in transformers, which cannot be divided over stages: "
            f"generate with transformers from the model directory",
        )


def begins_anew_at(config: PreTrainedConfig) -> int | None:
    """The length (tokens) at which a text is computed again from its beginning, as the family's ``generate`` does it."""
    if config.model_type not in _TWO_ROTARIES:
        return None
    original = getattr(config, "original_max_position_embeddings", None)
    return None if original is None else int(original) + 1


def takes_pieces(config: PreTrainedConfig) -> bool:
    """May a prompt pass in pieces, each behind the cache of those before it, with the logits of the whole?

    Not where rotary embeddings depend on the length of the whole text: what a shorter text left in the cache would differ. Not
    where attention takes the keys with the highest scores: which of equal scores are taken depends on how many keys there are.
    """
    if config.model_type in _OWN_CHOICE_OF_KEYS or hasattr(config, "index_topk"):
        return False
    return not depends_on_length(config)


def cache_keyword(model: PreTrainedModel) -> str:
    """The name of the cache in the model's ``forward``: a wrong name would be taken for another model's option and ignored.

    transformers before 5.24 says ``past_key_values``; later versions translate that for a while only.
    """
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


class Decoder:
    """Continues texts through a stage's layers, each with a cache of its own; a context manager, inside which the stage is in
    evaluation mode. A text is named by a number.

    Parameters, gradients and random generators are left as they are.
    """

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self._caches: dict[int, _Cache] = {}
        self._cache_keyword = cache_keyword(stage.model)
        self._adapters = AdapterSwitch(stage)

    def __enter__(self) -> Decoder:
        set_training(self.stage.model, False)
        return self

    def __exit__(self, *_: object) -> None:
        self._adapters.turn_to(OPENED)
        set_training(self.stage.model, True)
        self._caches.clear()

    def forget(self, text: int = 0) -> None:
        """Drop a text's cache: its next tokens begin it anew."""
        self._caches.pop(text, None)

    def cached_bytes(self, text: int = 0) -> int:
        """Memory of a text's keys, values and other states on this stage."""
        return sum(_tensor_bytes(vars(layer)) for layer in self._caches[text].layers.layers)

    @torch.no_grad()
    def step(self, x: torch.Tensor, text: int = 0, rows: int = 1, adapter: str = OPENED) -> torch.Tensor:
        """The next tokens of a text.

        ``x``: token ids (1, T) int64 on the first stage, else the previous stage's output (1, T, D). ``adapter``: the one that
        computes, the same at every call for a text.

        Returns: Output (1, T, D); on the last stage the logits (``rows``, V) after each of so many last tokens, fp32.
        """
        if text not in self._caches:
            self._caches[text] = _Cache(self.stage)
        cache = self._caches[text]
        self._adapters.turn_to(adapter)
        positions = cache.pass_on(x.shape[1], x.device)
        last: dict[str, Any] = {"logits_to_keep": rows} if self.stage.is_last else {}
        past = {self._cache_keyword: cache.layers}
        y = self.stage.apply(x, position_ids=positions, use_cache=True, **past, **last)
        return y[0, -rows:].float() if self.stage.is_last else y


class _Counting(DynamicLayer):
    """The cache of a full-attention layer that another stage holds: as long as the layer's, and empty."""

    cumulative_length = 0

    def get_seq_length(self) -> int:
        return self.cumulative_length


class _Cache:
    """A stage's memory of a text: transformers' cache for the model, and how many tokens have passed."""

    def __init__(self, stage: Stage) -> None:
        self.layers = DynamicCache(config=stage.model.config)
        self._counting: list[Any] = []
        """Those of its layers that only count."""
        self._passed = 0
        blocks = stage.model.get_submodule(language(stage.chain).blocks_name)
        own = {getattr(module, "layer_idx", None) for module in blocks.modules()}  # a block may have several
        for index, layer in enumerate(self.layers.layers):
            if index in own or not isinstance(layer, DynamicLayer):
                continue
            if not isinstance(layer, DynamicSlidingWindowLayer):  # which counts by itself
                layer = self.layers.layers[index] = _Counting()
            self._counting.append(layer)

    def pass_on(self, length: int, device: torch.device) -> torch.Tensor:
        """Positions (1, T) of the next tokens, which are about to pass."""
        for layer in self._counting:
            layer.cumulative_length = self._passed
        self._passed += length
        return torch.arange(self._passed - length, self._passed, device=device).unsqueeze(0)


def _tensor_bytes(value: Any) -> int:
    """Bytes of all tensors in ``value``: a tensor, or a list or dictionary that may hold some."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return sum(map(_tensor_bytes, inner))


def add_adapter(stage: Stage, name: str, tuning: Tuning) -> dict[str, nn.Parameter]:
    """Give a stage one more adapter; returns its tensors here, by their names in adapter files, yet to be filled."""
    assert tuning.adapter is not None and not tuning.parameters
    modules = tuning.modules_in(stage.first, stage.last)
    zeros = lambda own: torch.zeros(tuning.trainable[own].shape)  # noqa: E731
    found = inject(stage.model, tuning.adapter, modules, [], stage.backend.device, zeros, name)
    for parameter in found.values():
        parameter.data = parameter.data.to(stage.dtype)
    return found


class AdapterSwitch:
    """Which adapter of a stage computes."""

    def __init__(self, stage: Stage) -> None:
        self._modules = [module for module in stage.model.modules() if hasattr(module, "lora_A")]
        self._now: str | None = None

    def turn_to(self, name: str) -> None:
        """``name``: of an adapter, of which a module may have no tensors; then, and for "", it computes as the base does."""
        if name != self._now:
            for module in self._modules:
                if module.active_adapters != [name]:
                    module.set_adapter(name)
            self._now = name
