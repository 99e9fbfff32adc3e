"""Decode on one stage, with a KV cache for each text and layer.

transformers derives the size of attention masks from the first cache layer of each kind of attention. On later stages that layer
belongs to another rank and would be empty; therefore cache layers of other stages count tokens without storing them.

In addition to the adapter with which it was built, a stage can have further adapters; one adapter is active at a time.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from hetero_mpi.model.layer.interface import ADAPTER_NAME
from hetero_mpi.model.layer.quantize import set_training
from hetero_mpi.model.stage import Stage
from hetero_mpi.model.transformers.chain import language
from hetero_mpi.model.transformers.packed_records import Rows, depends_on_length, hand_rows
from hetero_mpi.model.tuning import Tuning, inject
from hetero_mpi.util.errors import UserError

OPENED = ADAPTER_NAME
"""Name of the adapter with which the stage was built, if any. The name "" selects no adapter."""
OWN_CACHE = ("minimax",)
"""Families with a cache class of their own, which cannot be split over stages."""
_SWITCHING_ROTARY = ("phi3", "phimoe")
"""Families whose rotary embedding changes at a certain length, at which their ``generate`` recomputes the whole text."""
_SELECTING_KEYS = ("doge",)
"""Families without an indexer (``index_topk``) whose attention nevertheless selects keys by score."""


def require_decodable(config: PreTrainedConfig) -> None:
    """Raise ``UserError`` if the model's family can be trained but not decoded."""
    if config.model_type in OWN_CACHE:
        raise UserError(
            "model.undecodable",
            f"model_type {config.model_type!r} has its own cache class in transformers, which cannot be split over stages: "
            f"generate with transformers from the model directory",
        )


def begins_anew_at(config: PreTrainedConfig) -> int | None:
    """Return the length in tokens at which a text is recomputed, as the family's ``generate`` does; None if it never is."""
    if config.model_type not in _SWITCHING_ROTARY:
        return None
    original = getattr(config, "original_max_position_embeddings", None)
    return None if original is None else int(original) + 1


def takes_pieces(config: PreTrainedConfig) -> bool:
    """Whether processing a prompt in pieces, with the previous ones in the cache, yields the same logits as processing it whole.

    This fails if rotary embeddings depend on the length of the whole text, because the cached states of a shorter text differ, and
    if attention selects the keys with the highest scores, because the choice among ties depends on the number of keys.
    """
    if config.model_type in _SELECTING_KEYS or hasattr(config, "index_topk"):
        return False
    return not depends_on_length(config)


def takes_batches(config: PreTrainedConfig, model: nn.Module) -> bool:
    """Whether single tokens of several texts can be computed in a batch, where each row attends only to its text's keys.

    This requires that the only states are keys and values, and that attention calls transformers' ``sdpa`` with all cached keys
    (latent attention does not). It excludes experts, where the rows that an expert computes together depend on other rows.
    """
    if (
        config._attn_implementation != "sdpa"
        or config.model_type in _SELECTING_KEYS
        or "kv_lora_rank" in config.to_dict()
    ):
        return False
    kinds = {type(layer) for layer in DynamicCache(config=config).layers}
    has_experts = any("expert" in name for name, _ in model.named_modules())
    return kinds <= {DynamicLayer, DynamicSlidingWindowLayer} and not has_experts


def cache_keyword(model: PreTrainedModel) -> str:
    """Return the name of the cache argument of the model's ``forward``; a wrong name would be ignored silently.

    transformers before 5.24 uses ``past_key_values``, which later versions accept only for a transition period.
    """
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


class Decoder:
    """Decodes texts, each with its own cache, on a stage. A context manager that switches the stage to evaluation mode.

    Texts are identified by number. Parameters, gradients and random generators are unchanged.
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
        """Drop the cache of a text; the next tokens passed for it start a new one."""
        self._caches.pop(text, None)

    def cached_bytes(self, text: int = 0) -> int:
        """Return the bytes that a text's keys, values and other states occupy on this stage."""
        return sum(_tensor_bytes(vars(layer)) for layer in self._caches[text].layers.layers)

    @torch.no_grad()
    def step(self, x: torch.Tensor, text: int = 0, rows: int = 1, adapter: str = OPENED) -> torch.Tensor:
        """Process the next tokens of a text.

        Args:
            x: token ids (1, T) int64 on the first stage, else the previous stage's output (1, T, D).
            rows: number of last tokens whose logits are needed; if it is 0, the head is skipped.
            adapter: the active adapter, the same in every call for a text.

        Returns (1, T, D), or on the last stage fp32 logits (``rows``, V).
        """
        if text not in self._caches:
            self._caches[text] = _Cache(self.stage)
        cache = self._caches[text]
        first = cache.pass_on(x.shape[1])
        y = self._apply(x, [range(first, first + x.shape[1])], cache.layers, rows, adapter)
        return y[0, -rows:].float() if self.stage.is_last else y

    @torch.no_grad()
    def step_batch(self, x: torch.Tensor, texts: Sequence[int], adapter: str = OPENED) -> torch.Tensor:
        """Process one further token of each of several texts in a batch of W rows.

        Args:
            x: token ids (W, 1) int64 on the first stage, else (W, 1, D); rows beyond the number of ``texts`` are padding.

        Returns (W, 1, D), or on the last stage fp32 logits (W, V).
        """
        caches = [self._caches[text] for text in texts]
        positions = [[cache.pass_on(1)] for cache in caches] + [[0]] * (len(x) - len(texts))
        batch_cache = _BatchCache([cache.layers for cache in caches])
        y = self._apply(x, positions, batch_cache, 1, adapter)
        assert not any(batch_cache.handed)
        return y[:, 0].float() if self.stage.is_last else y

    def _apply(
        self, x: torch.Tensor, positions: Sequence[Sequence[int]], cache: DynamicCache, rows: int, adapter: str
    ) -> torch.Tensor:
        self._adapters.turn_to(adapter)
        logit_rows = rows or torch.arange(0, device=x.device)
        last: dict[str, Any] = {"logits_to_keep": logit_rows} if self.stage.is_last else {}
        position_ids = torch.tensor(positions, device=x.device)
        return self.stage.apply(x, position_ids=position_ids, use_cache=True, **{self._cache_keyword: cache}, **last)

    def rows_are_alike(self, width: int) -> bool:
        """Test with random inputs whether a row's result is bitwise independent of its place in a batch and of the other rows.

        It may not be, because some kernels compute the last elements of a tensor, or of a thread's part, differently.
        """
        stage, generator = self.stage, torch.Generator().manual_seed(0)
        config = stage.model.config

        def inputs(rows: int) -> torch.Tensor:
            if stage.first == 0:
                return torch.randint(config.vocab_size, (rows, 1), generator=generator)
            return torch.randn((rows, 1, config.hidden_size), generator=generator).to(stage.dtype)

        first, row, neighbours = (inputs(rows).to(stage.backend.device) for rows in (1, 1, width))
        outputs = []
        with self:
            self.step(first)
            cache = self._caches[0]
            for batch in (row.expand_as(neighbours), torch.cat([row, neighbours[1:]])):
                self._caches.update((text, deepcopy(cache)) for text in range(width))
                outputs.append(self.step_batch(batch.contiguous(), range(width)))
        alike, mixed = outputs
        return all(torch.equal(alike[0], output) for output in (*alike, mixed[0]))


class _CountingLayer(DynamicLayer):
    """Cache of a full-attention layer on another stage, which only counts tokens."""

    cumulative_length = 0

    def get_seq_length(self) -> int:
        return self.cumulative_length


class _Cache:
    """A stage's state for one text: the model's cache in transformers' format, and the number of processed tokens."""

    def __init__(self, stage: Stage) -> None:
        self.layers = DynamicCache(config=stage.model.config)
        self._counting: list[Any] = []
        """Cache layers of other stages, which only count tokens."""
        self._passed = 0
        blocks = stage.model.get_submodule(language(stage.chain).blocks_name)
        own_layers = {getattr(module, "layer_idx", None) for module in blocks.modules()}  # a block may have several
        for index, layer in enumerate(self.layers.layers):
            if index in own_layers or not isinstance(layer, DynamicLayer):
                continue
            if not isinstance(layer, DynamicSlidingWindowLayer):  # which counts tokens anyway
                layer = self.layers.layers[index] = _CountingLayer()
            self._counting.append(layer)

    def pass_on(self, length: int) -> int:
        """Count the next ``length`` tokens and return the position of the first of them."""
        for layer in self._counting:
            layer.cumulative_length = self._passed
        self._passed += length
        return self._passed - length


class _BatchCache(DynamicCache):
    """Cache of a batch, which passes each row's keys and values to the cache of its text.

    Its own layers stay empty so that transformers creates no mask: each row attends to all keys that its text's cache returns.
    """

    def __init__(self, texts: Sequence[DynamicCache]) -> None:
        super().__init__()
        self._texts = texts
        self.handed: list[Rows] = []
        """Keys and values of each row per layer; the layer's attention empties its entry."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **keywords: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = key_states.split(1), value_states.split(1)
        states = zip(self._texts, keys, values, strict=False)
        rows = [text.layers[layer_idx].update(key, value) for text, key, value in states]
        self.handed.append(rows)
        return hand_rows(key_states, rows), value_states


def _tensor_bytes(value: Any) -> int:
    """Return the total bytes of all tensors in ``value``, which may be a tensor or a nested list or dictionary."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return sum(map(_tensor_bytes, inner))


def add_adapter(stage: Stage, name: str, tuning: Tuning) -> dict[str, nn.Parameter]:
    """Add an adapter to a stage; returns its zero-initialised tensors on this stage by their names in adapter files."""
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
        """Activate an adapter, or none for "". Modules for which the adapter has no tensors compute as the base model."""
        if name != self._now:
            for module in self._modules:
                if module.active_adapters != [name]:
                    module.set_adapter(name)
            self._now = name
