"""Costs of a model, layer by layer, as plain numbers: all that planning knows about a model.

The chain of *layers* is ``embedding, block 0, ..., block L-1, head`` (head = final norm + output projection), indexed 0 .. L+1.
A stage holds the layers ``[first, last)``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hetero_mpi.planning.types.sizes import (
    COPY_BYTES,
    DTYPE_BYTES,
    EMBEDDING,
    GRADIENT_BYTES,
    HEAD,
    HEAD_TOKENS,
    in_slices,
    sent_bytes,
)
from hetero_mpi.util.display import Displayed


@dataclass(frozen=True)
class LayerCost:
    """Cost of one layer of the chain, independent of the device that runs it."""

    kind: str
    """``"embedding"``, ``"head"`` or a block kind (blocks with equal shapes and attention type share one kind)."""
    parameters: int
    """Number of parameters, including a tied head's matrix, which the head's rank holds too."""
    trainable_parameters: int
    """Parameters whose gradients and optimizer state are on the layer's rank; a tied head's matrix is trained on the
    embedding's rank."""
    parameter_bytes: int
    """Bytes of the parameters in the compute dtype, plus the gradient of a tied head's matrix."""
    activation_bytes_per_token: float
    """Bytes per token kept from forward until backward, on the device that keeps the fewest (see ``activation_ratio``)."""
    workspace_bytes_per_token: float
    """Bytes per token of the micro-batch used only while this layer runs (for the head: logits and their gradient)."""
    boundary_bytes_per_token: int
    """Bytes per token of this layer's output when sent, and of its gradient; 0 for the head."""
    deferred_bytes_per_token: float = 0.0
    """Bytes per token kept between the parts of a split backward: inputs and output gradients of the matrices."""
    workspace_bytes: int = 0
    """Bytes used only while this layer runs, for any number of tokens (one matrix unpacked from 4 bits, or all experts)."""
    matrix_bytes: int = 0
    """Part of ``workspace_bytes`` used by a layer without any of its experts."""
    moments_saving_bytes: float = 0.0
    """Bytes of optimizer state saved relative to AdamW's fp32 moments."""
    divided_parameters: int = 0
    """Part of ``parameters`` sharded by tensor parallelism; the rest is replicated."""
    divided_trainable: int = 0
    expert_parameters: int = 0
    """Part of ``divided_parameters`` in experts, which may be sharded in other proportions than heads."""
    expert_trainable: int = 0
    divided_activations: float = 0.0
    """Fraction of the activations kept from forward until backward that is sharded."""
    divided_workspace: float = 0.0
    """Fraction of the workspace that is sharded."""
    divided_scale_bytes: int = 0
    """Bytes by which sharded NF4 weights exceed the full ones: shards keep fp32 scales instead of double quantisation."""
    logits_bytes_per_token: float = 0.0
    """Bytes of a head's logits, included in ``activation_bytes_per_token``; 0 if unknown, as for custom layers."""
    group_sums: int = 0
    """All-reduces of hidden states per forward and per backward in a tensor-parallel group (embedding: forward only; head:
    backward only)."""

    def part(self, share: float, experts: float) -> LayerCost:
        """Return the cost on a tensor-parallel rank with these shares of heads and experts."""
        stored = _held_share(self.parameters, self.divided_parameters, self.expert_parameters, share, experts)
        trained = _held_share(self.trainable_parameters, self.divided_trainable, self.expert_trainable, share, experts)
        saved, used = (1 - (1 - share) * divided for divided in (self.divided_activations, self.divided_workspace))
        of_experts = max(self.matrix_bytes, experts * self.workspace_bytes)
        workspace = of_experts if self.expert_parameters else used * self.workspace_bytes
        return replace(
            self,
            parameters=math.ceil(stored * self.parameters),
            trainable_parameters=math.ceil(trained * self.trainable_parameters),
            parameter_bytes=math.ceil(stored * self.parameter_bytes + max(share, experts) * self.divided_scale_bytes),
            activation_bytes_per_token=saved * self.activation_bytes_per_token,
            workspace_bytes_per_token=used * self.workspace_bytes_per_token,
            workspace_bytes=math.ceil(workspace),
            logits_bytes_per_token=used * self.logits_bytes_per_token,
            moments_saving_bytes=trained * self.moments_saving_bytes,
        )


@dataclass(frozen=True, repr=False)
class ModelCost(Displayed):
    """A model as planning sees it."""

    model_type: str
    """The family's name in transformers (``llama``, ``qwen3``, ...)."""
    dtype: str
    """Compute dtype: ``fp32``, ``bf16`` or ``fp16``."""
    sequence_length: int
    """Tokens per sequence for which activation bytes and times hold (attention is not linear in it)."""
    tied: bool
    """Whether head and embedding share one matrix, whose gradients are then summed every step."""
    state_bytes_per_trainable_parameter: float
    """Bytes of gradient, AdamW's fp32 moments and, if the compute dtype is narrower, the fp32 master weight."""
    layers: tuple[LayerCost, ...]
    """The chain: embedding, blocks, head."""
    tied_bytes: int = 0
    """Bytes of the fp32 gradient exchanged between the tied ends; 0 if they are not tied."""
    heads: int | None = None
    """Key/value heads of every block, sharded as whole heads; None rules out tensor parallelism."""
    experts: int | None = None
    """Experts per layer with experts if they can be sharded, else None."""
    optimizer: str = "adamw"
    """Value of ``[train] optimizer``."""
    adapter_rank: int | None = None
    """Value of ``[adapter] rank``; None for full fine-tuning, or if unknown."""
    wire: str | None = None
    """Dtype of messages between stages: ``int8``, or None for the compute dtype."""

    @cached_property
    def stage_tables(self) -> StageTables:
        return StageTables(self)

    @cached_property
    def trained_whole(self) -> bool:
        """True for full fine-tuning, False for adapters."""
        inner = [layer for layer in self.layers if layer.kind not in (EMBEDDING, HEAD) and layer.parameters]
        return any(2 * layer.trainable_parameters > layer.parameters for layer in inner or self.layers)

    def state_bytes(self, first: int, last: int) -> float:
        """Bytes of gradients, moments and master weights of the layers [first, last)."""
        each = self.state_bytes_per_trainable_parameter
        return sum(each * layer.trainable_parameters - layer.moments_saving_bytes for layer in self.layers[first:last])

    def owned_bytes(self, first: int, last: int) -> float:
        """Bytes of moments and master weights of the layers [first, last), each owned by one of a parameter's holders."""
        return float(self.stage_tables.owned[first, last])

    @property
    def copy_bytes_per_trainable_parameter(self) -> float:
        """Mean bytes per trainable parameter of a copy of the trained state."""
        trained = sum(layer.trainable_parameters for layer in self.layers)
        saved = sum(layer.moments_saving_bytes for layer in self.layers) / max(1, trained)
        return COPY_BYTES - saved

    def sent_bytes_per_token(self, layer: int) -> int:
        """Bytes per token of a layer's output as sent, and of its gradient."""
        return sent_bytes(self.layers[layer].boundary_bytes_per_token, self.dtype, self.wire)

    @property
    def most_sent_bytes_per_token(self) -> int:
        """Maximum of ``sent_bytes_per_token`` over layers."""
        return max(self.sent_bytes_per_token(layer) for layer in range(len(self.layers)))

    def streamed_bytes(self, index: int) -> int:
        """Bytes of an offloaded layer's parameters copied to the device: all, or with adapters only frozen ones."""
        layer = self.layers[index]
        stays = self._tied_bytes(index) if self.trained_whole else layer.trainable_parameters * DTYPE_BYTES[self.dtype]
        return max(0, layer.parameter_bytes - stays)

    def gradient_bytes(self, layer: int) -> int:
        """Bytes of a layer's fp32 gradients, including a tied head's."""
        return GRADIENT_BYTES * self.layers[layer].trainable_parameters + self._tied_bytes(layer)

    def _tied_bytes(self, layer: int) -> int:
        return self.tied_bytes if layer == len(self.layers) - 1 else 0

    def keeping(self, ratio: float) -> ModelCost:
        """Return the costs on a device whose blocks keep ``ratio`` times as many activation bytes."""
        return self if ratio == 1.0 else _keeping(self, ratio)

    def sliced(self, tokens: int) -> ModelCost:
        """Return the costs for ``tokens`` tokens; a head that computes logits in slices needs memory for one slice."""
        return self._sliced if in_slices(self.layers[-1].logits_bytes_per_token, tokens) else self

    @cached_property
    def _sliced(self) -> ModelCost:
        head = self.layers[-1]
        logits = head.logits_bytes_per_token
        sliced = replace(
            head,
            activation_bytes_per_token=max(0.0, head.activation_bytes_per_token - logits),
            divided_activations=0.0,
            workspace_bytes_per_token=0.0,
            workspace_bytes=head.workspace_bytes + math.ceil((logits + head.workspace_bytes_per_token) * HEAD_TOKENS),
            logits_bytes_per_token=0.0,
        )
        return replace(self, layers=(*self.layers[:-1], sliced))

    def part(self, share: float, experts: float) -> ModelCost:
        return self if share == experts == 1.0 else _part(self, share, experts)


class StageTables:
    """Sums and maxima over the layers of every stage, indexed [first, last], in bytes (per token for activations).

    Layers are added from the first to the last, as ``sum`` does, so that floats are bit-identical.
    """

    def __init__(self, model: ModelCost) -> None:
        layers, numbers = model.layers, range(len(model.layers))
        outputs = [layer.boundary_bytes_per_token for layer in layers]
        saved = [layer.activation_bytes_per_token for layer in layers]
        inputs = [min(size, before) for size, before in zip(saved[1:-1], outputs, strict=False)]
        self.model, self._workspaces = model, dict[int, NDArray[np.int64]]()
        self.parameters = _over([layer.parameter_bytes for layer in layers])
        self.state = _over([model.state_bytes(i, i + 1) for i in numbers])
        gradients = _over([GRADIENT_BYTES * layer.trainable_parameters for layer in layers])
        self.owned = np.maximum(0.0, self.state - gradients)
        self.kept, self.most_kept = _over(saved), _over(saved, np.maximum)
        self.kept_recomputing = _over([saved[0], *inputs, *saved[1:][-1:]])
        """Bytes kept with recomputation, in which a block keeps only its input."""
        self.deferred = _over([layer.deferred_bytes_per_token for layer in layers])
        self.outputs, self.most_output = _over(outputs), _over(outputs, np.maximum)
        self.crossing = np.array([0, *outputs[:-1], 0])
        """Bytes per token that cross each boundary between layers, indexed by boundary."""
        streamed = [model.streamed_bytes(i) for i in numbers]
        self.streamed, self.most_streamed = _over(streamed), _over(streamed, np.maximum)
        self.most_gradients = _over([model.gradient_bytes(i) for i in numbers], np.maximum)

    def workspace(self, tokens: int) -> NDArray[np.int64]:
        if tokens not in self._workspaces:
            layers = self.model.layers
            sizes = [math.ceil(layer.workspace_bytes_per_token * tokens) + layer.workspace_bytes for layer in layers]
            self._workspaces[tokens] = _over(sizes, np.maximum)
        return self._workspaces[tokens]


def _over(values: Sequence[float], combine: np.ufunc = np.add) -> NDArray[Any]:
    table = np.zeros((len(values) + 1, len(values) + 1), np.asarray(values).dtype)
    table[:-1, 1:] = combine.accumulate(np.triu(np.broadcast_to(values, (len(values), len(values)))), axis=1)
    return table


def _held_share(parameters: int, divided: int, of_experts: int, share: float, experts: float) -> float:
    """Fraction of ``parameters`` that a tensor-parallel rank holds."""
    return 1 - ((1 - share) * (divided - of_experts) + (1 - experts) * of_experts) / max(1, parameters)


@lru_cache(maxsize=256)
def _part(model: ModelCost, share: float, experts: float) -> ModelCost:
    layers = tuple(layer.part(share, experts) for layer in model.layers)
    return replace(model, layers=layers, tied_bytes=math.ceil(share * model.tied_bytes))


@lru_cache(maxsize=64)
def _keeping(model: ModelCost, ratio: float) -> ModelCost:
    embedding, *blocks, head = model.layers

    def scaled(block: LayerCost) -> LayerCost:
        saved = block.activation_bytes_per_token
        workspace = block.workspace_bytes_per_token + (ratio - 1) * saved  # plus gradients
        return replace(block, activation_bytes_per_token=ratio * saved, workspace_bytes_per_token=workspace)

    return replace(model, layers=(embedding, *map(scaled, blocks), head))
