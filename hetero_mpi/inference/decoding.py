"""Decoding on one stage: a KV cache for each text and layer.

transformers sizes its attention masks by one cache layer, the first of each kind of attention. On a later stage that layer belongs
to another rank and is empty; so the cache layers of other stages count the tokens that have passed, without storing them.

Also here: several adapters on one stage, one active at a time, in addition to the adapter that the stage was built with.
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
"""Name of the adapter that the stage was built with, if any. Other adapters have other names; "" is no adapter."""
OWN_CACHE = ("minimax",)
"""Families with their own cache class, whose layers cannot be told which of them are on other stages."""
_SWITCHING_ROTARY = ("phi3", "phimoe")
"""Families whose rotary embedding switches at a length, where their ``generate`` recomputes the whole text."""
_SELECTING_KEYS = ("doge",)
"""Families that select keys by score, in addition to those with an indexer (``index_topk``)."""


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


def takes_batches(config: PreTrainedConfig, model: nn.Module) -> bool:
    """Whether single tokens of several texts can be computed in a batch, each row with the keys and values of its text.

    Not with other states than keys and values, nor if attention does not call transformers' ``sdpa`` with all cached keys (latent
    attention computes them from the cache). Not with experts: the rows that an expert computes at once depend on the other rows.
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

        Returns (1, T, D), or on the last stage fp32 logits (``rows``, V) of the last tokens: for 0 rows the head is skipped.
        """
        if text not in self._caches:
            self._caches[text] = _Cache(self.stage)
        cache = self._caches[text]
        first = cache.pass_on(x.shape[1])
        y = self._apply(x, [range(first, first + x.shape[1])], cache.layers, rows, adapter)
        return y[0, -rows:].float() if self.stage.is_last else y

    @torch.no_grad()
    def step_batch(self, x: torch.Tensor, texts: Sequence[int], adapter: str = OPENED) -> torch.Tensor:
        """Process the next tokens of several texts that have begun, one each, in a batch of W rows.

        Args:
            x: token ids (W, 1) int64 on the first stage, else (W, 1, D); the rows after those of ``texts`` are dummies.

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
        """Whether a row's bits depend neither on its place in a batch nor on the other rows, as tried with random inputs.

        They may: some kernels compute the last elements of a tensor, or of a thread's share, in another way.
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

    def pass_on(self, length: int) -> int:
        """Position of the first of the next ``length`` tokens; counts them."""
        for layer in self._counting:
            layer.cumulative_length = self._passed
        self._passed += length
        return self._passed - length


class _BatchCache(DynamicCache):
    """The cache of a batch: passes each row's keys and values to the cache of its text.

    Its own layers stay empty, so that transformers makes no mask: each row attends to all that its text's cache returns.
    """

    def __init__(self, texts: Sequence[DynamicCache]) -> None:
        super().__init__()
        self._texts = texts
        self.handed: list[Rows] = []
        """Keys and values of each layer; emptied by its attention."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **keywords: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = key_states.split(1), value_states.split(1)
        states = zip(self._texts, keys, values, strict=False)
        rows = [text.layers[layer_idx].update(key, value) for text, key, value in states]
        self.handed.append(rows)
        return hand_rows(key_states, rows), value_states


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
