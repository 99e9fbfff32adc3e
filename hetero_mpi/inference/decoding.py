"""Decoding on one stage: a KV cache for each of its layers, and sampling of a token from the last stage's logits.

transformers sizes its attention masks by one cache layer, the first of each kind of attention. On a later stage that layer belongs
to another rank and is empty; so the cache layers of other stages count the tokens that have passed, without storing them.

Also here: several adapters on one stage, one active at a time, in addition to the adapter that the stage was built with.
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
"""Name of the adapter that the stage was built with, if any. Other adapters have other names; "": no adapter."""
NOT_A_NUMBER = -1
"""Returned by ``pick`` instead of a token when the model's output is not a number."""
OWN_CACHE = ("minimax",)
"""Families with their own cache class, whose layers cannot be told which of them are on other stages."""
_SWITCHING_ROTARY = ("phi3", "phimoe")
"""Families whose rotary embedding switches at a length, where their ``generate`` recomputes the whole text."""
_SELECTING_KEYS = ("doge",)
"""Families that select keys by score, in addition to those with an indexer (``index_topk``)."""


@dataclass(frozen=True)
class Sampling:
    """Sampling settings."""

    temperature: float = 0.0
    """0: the most likely token (greedy)."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens with this total probability (nucleus sampling, arXiv:1904.09751)."""
    seed: int = 0
    top_k: int = 0
    """Sample from this many most likely tokens, and those as likely as the last of them; 0: from all."""
    min_p: float = 0.0
    """Sample from tokens with at least this share of the most likely token's probability (arXiv:2407.01082)."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of all tokens in the text, and multiplies the negative ones (arXiv:1909.05858)."""


def pick(
    logits: torch.Tensor,
    sampling: Sampling,
    position: int,
    text_tokens: Sequence[int] = (),
    forbidden: Sequence[int] = (),
) -> int:
    """Sample the token at ``position`` of the text; ``NOT_A_NUMBER`` if the logits are invalid.

    The candidates are those of transformers' ``generate``, filtered by the same steps in the same order. Random numbers are drawn
    on the host from (seed, position), so they depend neither on the device nor on the partition.

    ``logits``: (V,) fp32, on any device. ``text_tokens``: the text's tokens, for the penalty. ``forbidden``: excluded tokens.
    """
    if sampling.repetition_penalty != 1 and text_tokens:
        used = torch.tensor(sorted(set(text_tokens)), device=logits.device)
        used_logits, penalty = logits[used], sampling.repetition_penalty
        logits = logits.index_copy(0, used, torch.where(used_logits < 0, used_logits * penalty, used_logits / penalty))
    if forbidden:
        logits = logits.index_fill(0, torch.tensor(forbidden, device=logits.device), -torch.inf)
    if not torch.isfinite(logits.max()):  # NaN, an overflow, or -inf everywhere; a single -inf only forbids a token
        return NOT_A_NUMBER
    if sampling.temperature == 0:
        return int(torch.argmax(logits))
    scaled = logits.to(HOST).double()
    scaled = (scaled - scaled.max()) / sampling.temperature
    likely, tokens = torch.softmax(scaled, 0).sort(descending=True, stable=True)
    if 0 < sampling.top_k < len(likely):
        likely = likely.masked_fill(likely < likely[sampling.top_k - 1], 0.0)
        likely = likely / likely.sum()
    before = likely.cumsum(0) - likely  # of more likely tokens: the first token is always kept
    excluded = (before >= sampling.top_p) | (likely < sampling.min_p * likely[0])
    generator = torch.Generator().manual_seed(seed_from(sampling.seed, "token", position))
    sampled = torch.multinomial(likely.masked_fill(excluded, 0.0), 1, generator=generator)
    return int(tokens[sampled])


@dataclass(frozen=True)
class Scored:
    """A token of a text with its log-probability given the preceding tokens, before temperature, penalties and filters."""

    token: int
    likelihood: float
    likeliest: tuple[tuple[int, float], ...] = ()
    """The most likely tokens at its position with their log-probabilities, in descending order."""


def scored(logits: torch.Tensor, tokens: Sequence[int], count: int) -> torch.Tensor:
    """Log-probabilities of tokens as (K, 1 + 2 ``count``) fp64 on the host: the token's, then the most likely tokens, then theirs.

    ``logits``: (K, V) fp32, one row per token.
    """
    likelihoods = torch.log_softmax(logits, dim=1)
    token_scores = likelihoods.gather(1, torch.tensor(tokens, device=logits.device).unsqueeze(1))
    most, words = likelihoods.topk(min(count, logits.shape[1]), dim=1)
    return torch.cat([part.to(HOST).double() for part in (token_scores, words, most)], dim=1)


def require_decodable(config: PreTrainedConfig) -> None:
    """Raise ``UserError`` for a family that can be trained but not decoded."""
    if config.model_type in OWN_CACHE:
        raise UserError(
            "model.undecodable",
            f"model_type {config.model_type!r} has its own cache class in transformers, which cannot be split over stages: "
            f"generate with transformers from the model directory",
        )


def begins_anew_at(config: PreTrainedConfig) -> int | None:
    """The length (tokens) at which a text is recomputed from its start, as the family's ``generate`` does; None: never."""
    if config.model_type not in _SWITCHING_ROTARY:
        return None
    original = getattr(config, "original_max_position_embeddings", None)
    return None if original is None else int(original) + 1


def takes_pieces(config: PreTrainedConfig) -> bool:
    """Whether a prompt can be processed in pieces, each after the cache of the previous ones, with the logits of the whole.

    Not if rotary embeddings depend on the length of the whole text, as cached states of a shorter text would differ. Not if
    attention selects the keys with the highest scores, as the choice among equal scores depends on the number of keys.
    """
    if config.model_type in _SELECTING_KEYS or hasattr(config, "index_topk"):
        return False
    return not depends_on_length(config)


def cache_keyword(model: PreTrainedModel) -> str:
    """The cache argument of the model's ``forward``: another name would be silently ignored as a model option.

    transformers before 5.24 uses ``past_key_values``; later versions accept it only temporarily.
    """
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


class Decoder:
    """Continues texts through a stage's layers, each with its own cache. A context manager that sets the stage to evaluation mode.

    Texts are identified by numbers. Parameters, gradients and random generators are unchanged.
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
        """Drop a text's cache; its next tokens start it again."""
        self._caches.pop(text, None)

    def cached_bytes(self, text: int = 0) -> int:
        """Memory of a text's keys, values and other states on this stage."""
        return sum(_tensor_bytes(vars(layer)) for layer in self._caches[text].layers.layers)

    @torch.no_grad()
    def step(self, x: torch.Tensor, text: int = 0, rows: int = 1, adapter: str = OPENED) -> torch.Tensor:
        """Process the next tokens of a text.

        Args:
            x: token ids (1, T) int64 on the first stage, else the previous stage's output (1, T, D).
            adapter: the active adapter, the same in every call for a text.

        Returns (1, T, D), or on the last stage fp32 logits (``rows``, V) after each of the last ``rows`` tokens.
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


class _CountingLayer(DynamicLayer):
    """The empty cache of a full-attention layer on another stage, which counts tokens only."""

    cumulative_length = 0

    def get_seq_length(self) -> int:
        return self.cumulative_length


class _Cache:
    """A stage's state of a text: transformers' cache for the model, and the number of processed tokens."""

    def __init__(self, stage: Stage) -> None:
        self.layers = DynamicCache(config=stage.model.config)
        self._counting: list[Any] = []
        """Layers that only count."""
        self._passed = 0
        blocks = stage.model.get_submodule(language(stage.chain).blocks_name)
        own_layers = {getattr(module, "layer_idx", None) for module in blocks.modules()}  # a block may have several
        for index, layer in enumerate(self.layers.layers):
            if index in own_layers or not isinstance(layer, DynamicLayer):
                continue
            if not isinstance(layer, DynamicSlidingWindowLayer):  # which counts tokens anyway
                layer = self.layers.layers[index] = _CountingLayer()
            self._counting.append(layer)

    def pass_on(self, length: int, device: torch.device) -> torch.Tensor:
        """Positions (1, T) of the next ``length`` tokens; counts them."""
        for layer in self._counting:
            layer.cumulative_length = self._passed
        self._passed += length
        return torch.arange(self._passed - length, self._passed, device=device).unsqueeze(0)


def _tensor_bytes(value: Any) -> int:
    """Bytes of all tensors in ``value``: a tensor, or a list or dictionary of values."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return sum(map(_tensor_bytes, inner))


def add_adapter(stage: Stage, name: str, tuning: Tuning) -> dict[str, nn.Parameter]:
    """Add an adapter to a stage; returns its tensors on this stage by their names in adapter files, to be filled."""
    assert tuning.adapter is not None and not tuning.parameters
    modules = tuning.modules_in(stage.first, stage.last)
    zeros = lambda tensor_name: torch.zeros(tuning.trainable[tensor_name].shape)  # noqa: E731
    parameters = inject(stage.model, tuning.adapter, modules, [], stage.backend.device, zeros, name)
    for parameter in parameters.values():
        parameter.data = parameter.data.to(stage.dtype)
    return parameters


class AdapterSwitch:
    """Selects the active adapter of a stage."""

    def __init__(self, stage: Stage) -> None:
        self._modules = [module for module in stage.model.modules() if hasattr(module, "lora_A")]
        self._now: str | None = None

    def turn_to(self, name: str) -> None:
        """Activate an adapter. A module without tensors of it, or any module for "", computes as the base model."""
        if name != self._now:
            for module in self._modules:
                if module.active_adapters != [name]:
                    module.set_adapter(name)
            self._now = name
