"""The interface of a model to stages, profiling, planning and runs: a layer chain that can be split after any layer.

``TransformersChain`` implements it for transformers' language models (embedding, blocks, head), and ``CustomChain`` for a
user-defined list of layers. Each layer passes one tensor to the next; its first dimension is sequences (or samples).

Random numbers depend only on names and positions (``seed_from``), not on the partition.
"""

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
    """Return a 63-bit seed derived from any parts, such as (seed, parameter name) or (seed, step, first sample, layer)."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


@contextlib.contextmanager
def seeded(*parts: int | str) -> Iterator[None]:
    """Return a context in which the host's random numbers depend only on ``parts``; the global generator is unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed_from(*parts))
        yield


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Return a context that uses one thread, so that sums do not depend on a rank's number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


ADAPTER_NAME = "default"
"""peft's name for the only adapter; it is part of module names, but not of names in adapter files."""
WRAPPED = ".base_layer"
"""Substring of the names of modules that peft wraps; it distinguishes the adapters of one module's parameters."""


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter of the whole model, with the layer that holds it and its shape."""

    name: str
    layer: int
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        return math.prod(self.shape)


class PassThrough(nn.Module):
    """Replaces a layer of another rank and returns its input unchanged."""

    def forward(self, hidden_states: torch.Tensor, *arguments: object, **keywords: object) -> torch.Tensor:
        return hidden_states


Example = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""(input of a stage, targets on the last stage, gradient of the output on other stages)."""


class LayerChain(ABC):
    """The names, shapes and kinds of a model's layers, and methods to build and run them.

    Attributes:
        name: name of the model's family.
        summary: short description of the model.
        layer_count: number of layers, including embedding and head.
        kinds: kind of each layer; layers of the same kind have the same cost.
        parameters: maps the name of each trainable tensor to its ``ParameterSpec``, in the model's order; tied tensors appear once.
        constants: maps the name of each tensor that is never trained to its ``ParameterSpec``.
        embeddings: names of the parameters that are the matrix of a ``torch.nn.Embedding``.
        draws: whether any layer draws random numbers in training.
        tied: (head's name, embedding's name) if both share one matrix, else None.
        start_is_sent: whether only rank 0 has the initial weights and sends them to the other ranks.
        logits: vocabulary size, for the memory of logits and their gradient; None if outputs are as small as other activations.
        routers: routers with a load-balancing loss; None if there is no such loss.
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
        """Number of rows appended to each sequence of a boundary tensor that are not hidden vectors."""
        return self.boundary(0, 1, 0)[1] if self.routers is not None else 0

    def specs(self, first: int, last: int) -> list[ParameterSpec]:
        """Return the trainable parameters of layers ``[first, last)``."""
        return [spec for spec in self.parameters.values() if first <= spec.layer < last]

    def constant_specs(self, first: int, last: int) -> list[ParameterSpec]:
        return [spec for spec in self.constants.values() if first <= spec.layer < last]

    def dtype_of(self, name: str, compute: torch.dtype) -> torch.dtype:
        """Return a tensor's dtype for the compute dtype ``compute``."""
        return compute

    def changed_since(self, described: Mapping[str, Any]) -> str | None:
        """Name a value outside checkpoints that has changed since ``to_dict`` returned ``described``; None if none has."""
        return None

    @abstractmethod
    def decays(self, name: str) -> bool:
        """Return whether weight decay applies to a trained tensor."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Describe the model as JSON values, for checkpoints."""

    @abstractmethod
    def module_names(self, layer: int) -> tuple[str, ...]:
        """Return the qualified names of the modules that form a layer."""

    @abstractmethod
    def layer_of(self, name: str) -> int:
        """Return the index of the layer that holds the parameter or module ``name``."""

    @abstractmethod
    def frame(self) -> nn.Module:
        """Build the whole model on the meta device, to be filled layer by layer."""

    @abstractmethod
    def vacate(self, model: nn.Module, layer: int) -> None:
        """Allocate uninitialised fp32 tensors in host memory for one layer of ``model``."""

    @abstractmethod
    def initialise(self, model: nn.Module, layer: int, seed: int) -> None:
        """Initialise one layer of ``model`` in fp32 host memory; values depend only on the seed and names."""

    @abstractmethod
    def restore_buffers(self, model: nn.Module, device: torch.device) -> None:
        """Move the buffers of all local layers to the device."""

    @abstractmethod
    def recompute(self, model: nn.Module, enabled: bool) -> None:
        """Enable or disable activation checkpointing of the inner layers."""

    @abstractmethod
    def run(self, model: nn.Module, first: int, last: int, x: torch.Tensor, **keywords: Any) -> torch.Tensor:
        """Run the layers ``[first, last)`` on ``x``, passing ``keywords`` to the model."""

    def attention(self, records: list[list[int]] | None, repeats: bool) -> contextlib.AbstractContextManager[None]:
        """Return the context for ``run`` and its backward, which repeats shared keys and values if ``repeats`` is true."""
        return contextlib.nullcontext()

    def isolation(self, x: torch.Tensor, positions: torch.Tensor | None) -> dict[str, Any]:
        """Return keywords for ``run`` that prevent attention between the packed records of a sequence.

        Args:
            x: input of ``run``.
            positions: (B, T) int64, each token's position in its record; None if no records are packed.
        """
        assert positions is None, f"{self.name} is not a language model"
        return {}

    @abstractmethod
    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the summed loss of all targets, a differentiable fp32 scalar. ``outputs`` is the last layer's output."""

    def sliced_head(self, model: nn.Module, dtype: str, share: Any) -> Any:
        """Return ``HeadSlices`` for a model with large logits; None if the logits can be computed all at once."""
        return None

    @abstractmethod
    def boundary(self, layer: int, rows: int, length: int) -> tuple[int, ...]:
        """Return the shape of the layer's output for ``rows`` sequences of ``length`` tokens."""

    @abstractmethod
    def example(self, first: int, last: int, rows: int, length: int, dtype: torch.dtype) -> Example:
        """Return an example input for the layers ``[first, last)``, in host memory."""

    @abstractmethod
    def length(self, inputs: NDArray[Any]) -> int:
        """Return the number of tokens per sequence in a batch's inputs."""

    @abstractmethod
    def counted(self, targets: NDArray[Any]) -> int:
        """Return the number of targets by which a batch's summed loss is divided."""


class Start(Protocol):
    """A source of initial weights."""

    def fill(self, chain: Any, model: Any, layer: int) -> None:
        """Fill one layer of ``model`` in fp32 host memory. Some implementations support only one kind of chain."""


def embedding_matrices(module: nn.Module) -> set[str]:
    """Return the names of the matrices of all ``torch.nn.Embedding`` modules within a module."""
    return {
        f"{name}.weight".lstrip(".")
        for name, submodule in module.named_modules()
        if isinstance(submodule, nn.Embedding)
    }


def as_input(array: NDArray[Any]) -> torch.Tensor:
    """Convert a batch's array to a model input: integers to int64, other numbers to fp32."""
    tensor = torch.from_numpy(array)
    return tensor.float() if np.issubdtype(array.dtype, np.floating) else tensor.long()
