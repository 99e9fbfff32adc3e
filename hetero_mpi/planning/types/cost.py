"""The costs of a model, layer by layer, as plain numbers: everything planning knows of a model.

The chain of *layers* is ``embedding, block 0, ..., block L-1, head`` (head = final norm + output projection), indexed
0 .. L+1. A stage holds the layers ``[first, last)``.
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


@dataclass(frozen=True)
class LayerCost:
    """Cost of one layer of the chain, independent of the device that runs it."""

    kind: str
    """``"embedding"``, ``"head"`` or a block kind (blocks with equal shapes and attention type share one kind)."""
    parameters: int
    """Number of parameters. A tied head counts its matrix here too, since its rank must hold it."""
    trainable_parameters: int
    """Number of parameters that receive gradients and optimizer state on the rank that holds this layer. A tied head's matrix is
    not among them: the embedding's rank trains it."""
    parameter_bytes: int
    """Bytes of the parameters as held for computing (compute dtype), and of the gradient of a tied head's matrix."""
    activation_bytes_per_token: float
    """Bytes kept from forward until backward, per token of the micro-batch, where the fewest are kept
    (``DeviceProfile.activation_ratio``)."""
    workspace_bytes_per_token: float
    """Bytes used only while this layer runs (logits and their gradient, for the head), per token of the micro-batch."""
    boundary_bytes_per_token: int
    """Bytes of this layer's output per token, were it sent on; the gradient coming back is as large. 0: head."""
    deferred_bytes_per_token: float = 0.0
    """Bytes kept from a split backward's input part until its weight part, per token of the micro-batch: inputs and
    output gradients of the matrices."""
    workspace_bytes: int = 0
    """Bytes used only while this layer runs, whatever the tokens (one matrix unpacked from 4 bits, or all experts)."""
    matrix_bytes: int = 0
    """Those of ``workspace_bytes`` that are used where the layer has none of its experts."""
    moments_saving_bytes: float = 0.0
    """Bytes by which what the optimizer keeps is smaller than AdamW's moments in fp32."""
    divided_parameters: int = 0
    """Those of ``parameters`` that the members of a group divide; the others each of them holds."""
    divided_trainable: int = 0
    """The same of ``trainable_parameters``."""
    expert_parameters: int = 0
    """Those of ``divided_parameters`` that are experts', which the members may divide otherwise than heads."""
    expert_trainable: int = 0
    """The same of ``divided_trainable``."""
    divided_activations: float = 0.0
    """The share that is divided likewise of what is kept from forward until backward."""
    divided_workspace: float = 0.0
    """The same of what is used only while the layer runs."""
    divided_scale_bytes: int = 0
    """Bytes by which the members' parts of NF4 weights, all together, are larger than the whole: they keep in fp32 the scales that
    double quantisation left."""
    logits_bytes_per_token: float = 0.0
    """Of a head: its logits, as counted in ``activation_bytes_per_token``; 0: not known, as of layers of one's own."""
    group_sums: int = 0
    """How often a group adds up as many numbers as the layer's hidden states have, in forward and in backward each; an embedding's
    in forward only, a head's in backward only."""

    def part(self, share: float, experts: float) -> LayerCost:
        """The layer on a member of a group that has this share of what is divided, and this one of the experts."""
        stored = _held_share(self.parameters, self.divided_parameters, self.expert_parameters, share, experts)
        trained = _held_share(self.trainable_parameters, self.divided_trainable, self.expert_trainable, share, experts)
        saved, used = (1 - (1 - share) * divided for divided in (self.divided_activations, self.divided_workspace))
        return replace(
            self,
            parameters=math.ceil(stored * self.parameters),
            trainable_parameters=math.ceil(trained * self.trainable_parameters),
            parameter_bytes=math.ceil(stored * self.parameter_bytes + max(share, experts) * self.divided_scale_bytes),
            activation_bytes_per_token=saved * self.activation_bytes_per_token,
            workspace_bytes_per_token=used * self.workspace_bytes_per_token,
            workspace_bytes=self._part_of_workspace(used, experts),
            logits_bytes_per_token=used * self.logits_bytes_per_token,
            moments_saving_bytes=trained * self.moments_saving_bytes,
        )

    def _part_of_workspace(self, used: float, experts: float) -> int:
        if self.expert_parameters:
            return math.ceil(max(self.matrix_bytes, experts * self.workspace_bytes))
        return math.ceil(used * self.workspace_bytes)


@dataclass(frozen=True)
class ModelCost:
    """A model as planning sees it."""

    model_type: str
    """The family's name in transformers (``llama``, ``qwen3``, ...)."""
    dtype: str
    """Compute dtype: ``fp32``, ``bf16`` or ``fp16``."""
    sequence_length: int
    """Tokens per sequence for which activation bytes and times hold (attention is not linear in it)."""
    tied: bool
    """The head's matrix is the embedding's: gradients of both ends are summed every step."""
    state_bytes_per_trainable_parameter: float
    """Gradient + AdamW's fp32 moments (+ fp32 master weight, if the compute dtype is narrower) per trainable parameter."""
    layers: tuple[LayerCost, ...]
    """The chain: embedding, blocks, head."""
    tied_bytes: int = 0
    """Bytes of the fp32 gradient exchanged between both ends when tied, else 0."""
    heads: int | None = None
    """Key/value heads of every block, by whose whole numbers a group of ranks shares its layers; None: it cannot."""
    experts: int | None = None
    """Experts of each layer that has some, where a group of ranks can share them; None: there are none."""
    optimizer: str = "adamw"
    """As ``[train] optimizer`` names it."""
    wire: str | None = None
    """``int8``: so activations and gradients travel from stage to stage; None: as they are computed."""

    @cached_property
    def stage_tables(self) -> StageTables:
        return StageTables(self)

    @cached_property
    def trained_whole(self) -> bool:
        """True where layers are trained themselves, rather than adapters over them."""
        inner = [layer for layer in self.layers if layer.kind not in (EMBEDDING, HEAD) and layer.parameters]
        return any(2 * layer.trainable_parameters > layer.parameters for layer in inner or self.layers)

    def state_bytes(self, first: int, last: int) -> float:
        """Gradients, moments and master weights of the layers [first, last)."""
        each = self.state_bytes_per_trainable_parameter
        return sum(each * layer.trainable_parameters - layer.moments_saving_bytes for layer in self.layers[first:last])

    def owned_bytes(self, first: int, last: int) -> float:
        """The moments and master weights of these, which one of the ranks that hold a parameter keeps."""
        if (first, last) not in self._owned_bytes:
            gradients = GRADIENT_BYTES * sum(layer.trainable_parameters for layer in self.layers[first:last])
            self._owned_bytes[first, last] = max(0.0, self.state_bytes(first, last) - gradients)
        return self._owned_bytes[first, last]

    @cached_property
    def _owned_bytes(self) -> dict[tuple[int, int], float]:
        return {}

    @property
    def copy_bytes_per_trainable_parameter(self) -> float:
        """Bytes of a copy of the trained state, on average."""
        trained = sum(layer.trainable_parameters for layer in self.layers)
        saved = sum(layer.moments_saving_bytes for layer in self.layers) / max(1, trained)
        return COPY_BYTES - saved

    def sent_bytes_per_token(self, layer: int) -> int:
        """Bytes of a layer's output per token on its way to another rank; the gradient coming back is as large."""
        return sent_bytes(self.layers[layer].boundary_bytes_per_token, self.dtype, self.wire)

    @property
    def most_sent_bytes_per_token(self) -> int:
        """The same of the layer whose output is the longest message."""
        return max(self.sent_bytes_per_token(layer) for layer in range(len(self.layers)))

    def streamed_bytes(self, index: int) -> int:
        """Bytes of a layer's parameters that come to the device where it is streamed: all, or what is frozen beside adapters."""
        layer = self.layers[index]
        stays = self._tied_bytes(index) if self.trained_whole else layer.trainable_parameters * DTYPE_BYTES[self.dtype]
        return max(0, layer.parameter_bytes - stays)

    def gradient_bytes(self, layer: int) -> int:
        """Bytes of a layer's fp32 gradients, a tied head's included."""
        return GRADIENT_BYTES * self.layers[layer].trainable_parameters + self._tied_bytes(layer)

    def _tied_bytes(self, layer: int) -> int:
        return self.tied_bytes if layer == len(self.layers) - 1 else 0

    def keeping(self, ratio: float) -> ModelCost:
        """The costs on a device whose blocks keep so many times as much from forward to backward."""
        return self if ratio == 1.0 else _keeping(self, ratio)

    def sliced(self, tokens: int) -> ModelCost:
        """The costs of so many tokens: of a head whose logits are computed in slices, those of a slice in place of all."""
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
        """The costs on a member of a group that has this share of what is divided, and this one of the experts."""
        return self if share == experts == 1.0 else _part(self, share, experts)


class StageTables:
    """Sums and maxima over the layers of every stage, indexed [first, last]; bytes, of what a micro-batch keeps per token.

    Layers are added up from the first one on, as ``sum`` does: the same floats to the last bit.
    """

    def __init__(self, model: ModelCost) -> None:
        layers, numbers = model.layers, range(len(model.layers))
        outputs = [layer.boundary_bytes_per_token for layer in layers]
        saved = [layer.activation_bytes_per_token for layer in layers]
        inputs = [min(size, before) for size, before in zip(saved[1:-1], outputs, strict=False)]
        self.model, self._workspaces = model, dict[int, NDArray[np.int64]]()
        self.parameters = _over([layer.parameter_bytes for layer in layers])
        self.state = _over([model.state_bytes(i, i + 1) for i in numbers])
        self.kept, self.most_kept = _over(saved), _over(saved, np.maximum)
        self.kept_recomputing = _over([saved[0], *inputs, *saved[1:][-1:]])
        """A block that is recomputed keeps its input only."""
        self.deferred = _over([layer.deferred_bytes_per_token for layer in layers])
        self.outputs, self.most_output = _over(outputs), _over(outputs, np.maximum)
        self.crossing = np.array([0, *outputs[:-1], 0])
        """By cut, no table."""
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
    """The part of ``parameters`` parameters that a member of a group holds."""
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
