"""The interface of a model for stages, profiling, planning and runs: a chain of layers that can be split between any two layers.

``TransformersChain`` implements it for transformers' language models (embedding, blocks, head), ``CustomChain`` for a user's own
layers. One tensor is passed from layer to layer; its first dimension is sequences (or samples).

Random numbers are functions of names and positions (``seed_from``), so that they do not depend on the partition.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from hetero_mpi.model.layer.loss import Routers


def seed_from(*parts: int | str) -> int:
    """A 63-bit seed from any parts, such as (seed, parameter name) or (seed, step, first sample, layer)."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


@contextlib.contextmanager
def seeded(*parts: int | str) -> Iterator[None]:
    """Context in which the host's random numbers are functions of ``parts``; the global generator is not changed."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed_from(*parts))
        yield


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Context with one thread, so that sums do not depend on a rank's number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


ADAPTER_NAME = "default"
"""peft's name of the only adapter; part of module names but not of the names in adapter files."""
WRAPPED = ".base_layer"
"""Part of the names of modules that peft wraps; distinguishes the adapters of a module's parameters."""


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter of the whole model: the layer that holds it and its shape."""

    name: str
    layer: int
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        return math.prod(self.shape)


class PassThrough(nn.Module):
    """Replaces another rank's layer and returns its input."""

    def forward(self, hidden_states: torch.Tensor, *arguments: object, **keywords: object) -> torch.Tensor:
        return hidden_states


Example = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""(input of a stage, targets on the last stage, gradient of the output on other stages)."""


class LayerChain(ABC):
    """Names, shapes and kinds of a model's layers, and methods to build and run them.

    Attributes:
        name: name of the model's family.
        summary: short description of the model.
        layer_count: number of layers, including embedding and head.
        kinds: kind of each layer; layers of one kind cost the same.
        parameters: name -> ``ParameterSpec`` of each trainable tensor, once, in the model's order.
        constants: name -> ``ParameterSpec`` of each tensor of the model that is never trained.
        embeddings: names of parameters that are the matrix of a ``torch.nn.Embedding``.
        draws: whether any layer draws random numbers in training.
        tied: (head's name, embedding's name) if both share one matrix, else None.
        start_is_sent: only rank 0 has the initial weights and sends them.
        logits: vocabulary size, for the memory of logits and their gradient; None if outputs are as small as other activations.
        routers: routers with a load-balancing loss; None without.
    """

    name: str
    summary: str
    layer_count: int
    kinds: tuple[str, ...]
    parameters: dict[str, ParameterSpec]
    constants: dict[str, ParameterSpec]
    embeddings: set[str]
    draws: bool
    tied: tuple[str, str] | None = None
    start_is_sent: bool = False
    logits: int | None = None
    routers: Routers | None = None

    @property
    def appended_rows(self) -> int:
        """Number of rows at the end of each sequence of a boundary tensor that are not hidden vectors."""
        return self.boundary(0, 1, 0)[1] if self.routers is not None else 0

    def specs(self, first: int, last: int) -> list[ParameterSpec]:
        """Parameters of layers ``[first, last)``."""
        return [spec for spec in self.parameters.values() if first <= spec.layer < last]

    def constant_specs(self, first: int, last: int) -> list[ParameterSpec]:
        """Constants of layers ``[first, last)``."""
        return [spec for spec in self.constants.values() if first <= spec.layer < last]

    def dtype_of(self, name: str, compute: torch.dtype) -> torch.dtype:
        """Dtype of a tensor if the compute dtype is ``compute``."""
        return compute

    def changed_since(self, described: Mapping[str, Any]) -> str | None:
        """Description of values outside checkpoints that changed since ``to_dict`` returned ``described``; None if none."""
        return None

    @abstractmethod
    def decays(self, name: str) -> bool:
        """Whether weight decay is applied to a trained tensor."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Description of the model for checkpoints, as JSON values."""

    @abstractmethod
    def module_names(self, layer: int) -> tuple[str, ...]:
        """Qualified names of the modules that make up a layer."""

    @abstractmethod
    def layer_of(self, name: str) -> int:
        """Index of the layer that holds the parameter or module ``name``."""

    @abstractmethod
    def frame(self) -> nn.Module:
        """The whole model on the meta device, with its module names."""

    @abstractmethod
    def vacate(self, model: nn.Module, layer: int) -> None:
        """Allocate uninitialised tensors (fp32, host) for a layer of a frame."""

    @abstractmethod
    def initialise(self, model: nn.Module, layer: int, seed: int) -> None:
        """Initialise a layer of a frame (fp32, host) as a function of seed and names."""

    @abstractmethod
    def restore_buffers(self, model: nn.Module, device: torch.device) -> None:
        """Move the buffers of all local layers to the device."""

    @abstractmethod
    def recompute(self, model: nn.Module, enabled: bool) -> None:
        """Enable or disable activation checkpointing of the inner layers."""

    @abstractmethod
    def run(self, model: nn.Module, first: int, last: int, x: torch.Tensor, **keywords: Any) -> torch.Tensor:
        """Run the layers ``[first, last)`` on ``x``; ``keywords`` are passed to the model."""

    def attention(self, packed: bool, repeats: bool) -> contextlib.AbstractContextManager[None]:
        """Context of ``run`` and its backward. ``packed``: rows hold several records; ``repeats``: repeat keys and values."""
        return contextlib.nullcontext()

    def isolation(self, x: torch.Tensor, positions: torch.Tensor | None) -> dict[str, Any]:
        """Keywords of ``run`` that prevent attention between the records of a sequence.

        Args:
            x: input of ``run``.
            positions: (B, T) int64, each token's position in its record; None if a sequence is one text.
        """
        assert positions is None, f"{self.name} is no language model"
        return {}

    @abstractmethod
    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Sum of the losses of all targets: a differentiable fp32 scalar. ``outputs``: output of the last layer."""

    def sliced_head(self, model: nn.Module, dtype: str, share: Any) -> Any:
        """``HeadSlices`` of a model with large logits; None to compute them at once."""
        return None

    @abstractmethod
    def boundary(self, layer: int, rows: int, length: int) -> tuple[int, ...]:
        """Shape of the layer's output for ``rows`` sequences of ``length`` tokens."""

    @abstractmethod
    def example(self, first: int, last: int, rows: int, length: int, dtype: torch.dtype) -> Example:
        """Example input for the layers ``[first, last)``, in host memory."""

    @abstractmethod
    def length(self, inputs: NDArray[Any]) -> int:
        """Tokens per sequence of a batch's inputs."""

    @abstractmethod
    def counted(self, targets: NDArray[Any]) -> int:
        """Number of targets by which the summed loss of a batch is divided."""


class Start(Protocol):
    """Source of initial weights."""

    def fill(self, chain: Any, model: Any, layer: int) -> None:
        """Fill a layer of a chain's frame, fp32 in host memory. Some implementations support one kind of chain only."""
        ...


def embedding_matrices(module: nn.Module) -> set[str]:
    """Names of the matrices of all ``torch.nn.Embedding`` modules in a module."""
    return {
        f"{name}.weight".lstrip(".")
        for name, submodule in module.named_modules()
        if isinstance(submodule, nn.Embedding)
    }


def as_input(array: NDArray[Any]) -> torch.Tensor:
    """Convert a batch's array to a model input: int64 for integers, else fp32."""
    tensor = torch.from_numpy(array)
    return tensor.float() if np.issubdtype(array.dtype, np.floating) else tensor.long()
