"""Decode on one stage, with a KV cache for each text and layer.

transformers derives the size of attention masks from the first cache layer of each kind of attention. On later stages that layer
belongs to another rank and would be empty; therefore cache layers of other stages count tokens without storing them.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from copy import deepcopy
from functools import lru_cache
from itertools import accumulate, cycle
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from hetero_mpi.comm.ranks.world import World
from hetero_mpi.inference.adapter_switch import OPENED, AdapterSwitch
from hetero_mpi.model.stage import Stage
from hetero_mpi.model.streamed_stage import StreamedStage
from hetero_mpi.model.transformers.chain import TransformersChain, language
from hetero_mpi.model.transformers.packed_records import TextStates, depends_on_length, hand_texts, install_expansion
from hetero_mpi.util.errors import UserError

OWN_CACHE = ("minimax",)
"""Families with a cache class of their own, which cannot be split over stages."""
_SWITCHING_ROTARY = ("phi3", "phimoe")
"""Families whose rotary embedding changes at a certain length, at which their ``generate`` recomputes the whole text."""
_SELECTING_KEYS = ("doge",)
"""Families without an indexer (``index_topk``) whose attention nevertheless selects keys by score."""
_PROMPT_TOKENS = 256
"""Tokens of a pass of prompts in which other sizes are not used unless they give the same bits."""
_PROMPT_SIZES = (32, 48, 64, 96, 128, 192, _PROMPT_TOKENS, 384, 512)  # above 32, padding is at most a third
_TRIED_TOKENS = 16


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
    return not (_selects_keys(config) or depends_on_length(config))


def _selects_keys(config: PreTrainedConfig) -> bool:
    return config.model_type in _SELECTING_KEYS or hasattr(config, "index_topk")


def reason_against_batches(config: PreTrainedConfig, model: nn.Module) -> str | None:
    """Return why texts cannot be packed into one pass, where each token attends only to its text's keys; None if they can.

    This requires that the only states are keys and values, and that attention calls transformers' ``sdpa`` with all cached keys.
    """
    if config._attn_implementation != "sdpa":
        return f"the model's attention implementation is {config._attn_implementation}, not sdpa"
    if _selects_keys(config):
        return "the model's attention selects keys"
    if "kv_lora_rank" in config.to_dict() and not any(hasattr(module, "expand_kv") for module in model.modules()):
        return "the model has latent attention of an unknown form"
    if not {type(layer) for layer in DynamicCache(config=config).layers} <= {DynamicLayer, DynamicSlidingWindowLayer}:
        return "the model has linear attention, or other states than keys and values"
    return None


def mixes_adapters(config: PreTrainedConfig) -> bool:
    """Whether texts with different adapters can be packed into one pass; latent attention expands each text's cache separately."""
    return "kv_lora_rank" not in config.to_dict()


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
        self._empty_cache = _Cache(stage)
        self._cache_keyword = cache_keyword(stage.model)
        self.adapters = AdapterSwitch(stage)
        install_expansion(stage.model)

    def __enter__(self) -> Decoder:
        self.stage.model.train(False)
        return self

    def __exit__(self, *_: object) -> None:
        self.adapters.turn_to(OPENED)
        self.stage.model.train(True)
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
        cache = self._cache(text)
        logit_rows = rows or torch.arange(0, device=x.device)
        self.adapters.turn_to(adapter)
        y = self._apply(x, cache.pass_on(x.shape[1]), cache.layers, logit_rows)
        return y[0, -rows:].float() if self.stage.is_last else y

    @torch.no_grad()
    def step_packed(
        self, x: torch.Tensor, texts: Sequence[int], lengths: Sequence[int], rows: int, adapters: Sequence[str]
    ) -> torch.Tensor:
        """Process the next tokens of several texts, packed into one sequence of N tokens.

        Args:
            x: token ids (1, N) int64 on the first stage, else (1, N, D): those of each text, then padding.
            lengths: number of tokens of each text.
            rows: number of rows of the logits, at least the number of texts.
            adapters: the adapter of each text.

        Returns (1, N, D), or on the last stage fp32 logits (``rows``, V) after each text's last token, then padding.
        """
        caches = [self._cache(text) for text in texts]
        positions = [p for cache, length in zip(caches, lengths, strict=True) for p in cache.pass_on(length)]
        padding = x.shape[1] - len(positions)
        batch_cache = _BatchCache([cache.layers for cache in caches], [*lengths, padding])
        lasts = [end - 1 for end in accumulate(lengths)] + [0] * (rows - len(texts))
        with self.adapters.of_texts(adapters, [*lengths, padding]):
            y = self._apply(x, [*positions, *[0] * padding], batch_cache, torch.tensor(lasts, device=x.device))
        assert not any(batch_cache.handed)
        return y[0].float() if self.stage.is_last else y

    def _cache(self, text: int) -> _Cache:
        if text not in self._caches:
            self._caches[text] = deepcopy(self._empty_cache)
        return self._caches[text]

    def _apply(
        self, x: torch.Tensor, positions: Sequence[int], cache: DynamicCache, rows: int | torch.Tensor
    ) -> torch.Tensor:
        keywords: dict[str, Any] = {"logits_to_keep": rows} if self.stage.is_last else {}
        keywords |= {self._cache_keyword: cache, "position_ids": torch.tensor([positions], device=x.device)}
        return self.stage.apply(x, packed=isinstance(cache, _BatchCache), use_cache=True, **keywords)

    def packed_sizes(self, width: int, adapter: str) -> tuple[list[int], list[int]]:
        """Test with random inputs in which passes a text's bits depend on neither their size, its place, nor other texts.

        They may, because products sum in an order that depends on their number of rows, and because some kernels compute the last
        elements of a tensor, or of a thread's part, differently. Returns the sizes with the bits of ``width`` single tokens, and
        those with the bits of ``_PROMPT_TOKENS`` tokens of prompts; none if that size fails.

        ``adapter``: the text's; the other texts have all adapters in turn, if they can be in its pass.
        """
        stage, generator = self.stage, torch.Generator().manual_seed(0)
        config, experts = stage.model.config, any("expert" in name for name, _ in stage.model.named_modules())

        def inputs(count: int) -> torch.Tensor:
            if stage.first == 0:
                return torch.randint(config.vocab_size, (1, count), generator=generator).to(stage.backend.device)
            x = torch.randn((1, count, config.hidden_size), generator=generator)
            return x.to(stage.dtype).to(stage.backend.device)

        def outputs(size: int, *pieces: torch.Tensor) -> list[torch.Tensor]:
            """Return the outputs of pieces of texts that have one token in their caches."""
            self._caches = {text: deepcopy(cache) for text in range(len(pieces))}
            lengths, other_adapters = [piece.shape[1] for piece in pieces], cycle(names)
            adapters = [adapter if piece is token or piece is prompt else next(other_adapters) for piece in pieces]
            x = torch.cat([*pieces, inputs(size - sum(lengths))], 1)
            y = self.step_packed(x, [*self._caches], lengths, min(size, width), adapters)
            return [*y[: len(pieces)].split(1)] if stage.is_last else [*y.split([*lengths, size - sum(lengths)], 1)]

        def is_alike(size: int) -> bool:
            """Whether ``token`` has the same bits in each place and, with experts, next to any number of its copies."""
            batches = [[token] * count + neighbours[count:size] for count in (1, size)]
            batches += [[token] * count + neighbours[:1] * (size - count) for count in range(1, size) if experts]
            pairs = [pair for batch in batches for pair in zip(outputs(size, *batch), batch, strict=False)]
            return all(torch.equal(output, reference) for output, piece in pairs if piece is token)

        names = sorted(self.adapters.names) if mixes_adapters(config) else [adapter]
        token, prompt, neighbours = inputs(1), inputs(_TRIED_TOKENS), [*inputs(width).split(1, 1)]
        resident = not isinstance(stage, StreamedStage)  # each pass of the others reads all weights
        with self:
            self.step(inputs(1), adapter=adapter)
            cache = self._caches[0]
            reference = outputs(width, *[token] * width)[0]
            sizes = [size for size in range(1, width + 1) if width % size == 0 and (resident or size == width)]
            widths = [size for size in sizes if is_alike(size)]
            if width not in widths or experts:
                return (widths if width in widths else []), []
            reference = outputs(_PROMPT_TOKENS, prompt)[0]
            longest = getattr(config, "max_position_embeddings", None) or max(_PROMPT_SIZES)
            sizes = [*_PROMPT_SIZES] if resident else [_PROMPT_TOKENS]
            fillers = {size: inputs(min(size - _TRIED_TOKENS, longest - 1)) for size in sizes}
            prompts = [s for s, filler in fillers.items() if torch.equal(outputs(s, filler, prompt)[1], reference)]
            return widths, prompts if _PROMPT_TOKENS in prompts else []


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

    def pass_on(self, length: int) -> range:
        """Count the next ``length`` tokens and return their positions."""
        for layer in self._counting:
            layer.cumulative_length = self._passed
        self._passed += length
        return range(self._passed - length, self._passed)


class _BatchCache(DynamicCache):
    """Cache of packed texts, which passes the keys and values of each to the cache of its text.

    Its own layers stay empty, and transformers creates no mask: each token attends to keys that its text's cache returns.
    """

    def __init__(self, texts: Sequence[DynamicCache], lengths: Sequence[int]) -> None:
        super().__init__()
        self._texts, self._lengths = texts, [*lengths]
        self.handed: list[list[TextStates]] = []
        """Keys and values of each text per layer; the layer's attention empties its entry."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **keywords: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        texts, (keys, values) = [], (states.split(self._lengths, 2) for states in (key_states, value_states))
        for text, length, key, value in zip(self._texts, self._lengths, keys, values, strict=False):
            layer = text.layers[layer_idx]
            all_keys, all_values = layer.update(key, value)
            mask = _mask_of(length, all_keys.shape[2], getattr(layer, "sliding_window", None), key.device)
            texts.append(TextStates(length, all_keys, all_values, mask))
        self.handed.append(texts)
        return hand_texts(key_states, texts), value_states


@lru_cache(2)  # most texts and layers of a pass have the same
def _mask_of(queries: int, keys: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Return which of the ``keys`` the last ``queries`` tokens attend to, (T, K); None if causal attention alone decides."""
    if queries == 1 or (queries == keys and keys <= (window or keys)):
        return None
    ages = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)
    return (ages >= 0) & (ages < (window or keys))


def _tensor_bytes(value: Any) -> int:
    """Return the total bytes of all tensors in ``value``, which may be a tensor or a nested list or dictionary."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return sum(map(_tensor_bytes, inner))


def common_sizes(
    members: World, chain: TransformersChain, decoders: Sequence[Decoder], width: int
) -> tuple[list[int], list[int], str]:
    """Return the ``Decoder.packed_sizes`` of all stages and adapters on all ranks, and their description. Collective."""
    reason = reason_against_batches(chain.config, chain.model)
    if width == 1 or reason is not None:
        return [], [], "each computed separately" + (f", as {reason}" if width > 1 else "")
    own_sizes = [decoder.packed_sizes(width, name) for decoder in decoders for name in decoder.adapters.names]
    every = [sizes for of_rank in members.all_gather_json(own_sizes) for sizes in of_rank]
    widths, prompts = (sorted(set.intersection(*map(set, of_kind))) for of_kind in zip(*every, strict=True))
    if not widths:
        return [], [], "each computed separately, as some kernel would let its last bits depend on the other answers"
    prompts = prompts if takes_pieces(chain.config) else []
    passes = f"in passes of up to {prompts[-1]} tokens" if prompts else "one by one"
    return widths, prompts, f"in batches of up to {width} rows; prompts {passes}"
