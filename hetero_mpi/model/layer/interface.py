"""The interface of a model for stages, the benchmark, the planner's costs and a run: a chain of layers that is cut between any two.

Two kinds of model answer. ``TransformersChain`` is transformers' language models: embedding, blocks, head. ``CustomChain`` is a
list of a user's own layers. What travels between layers is one tensor, whose first dimension counts sequences (or samples).

Also here: random numbers as functions of names and positions, never of the partition.
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
    """A block whose random numbers on the host are functions of ``parts``; the program's own generator stays as it is."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed_from(*parts))
        yield


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """A block whose sums have the same bits on ranks with other numbers of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


ADAPTER_NAME = "default"
"""peft's name of the only adapter; it is part of module names but not of the names in adapter files."""
WRAPPED = ".base_layer"
"""The part that peft's wrappers put into the names of what they wrap; so the adapters of a module's parameters are told apart."""


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
    """Stands where a foreign layer was and hands its input on."""

    def forward(self, hidden_states: torch.Tensor, *arguments: object, **keywords: object) -> torch.Tensor:
        return hidden_states


Example = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""(input of a stage, targets on the last one, gradient of the output on the others)."""


class LayerChain(ABC):
    """Names, shapes and kinds of a model's layers, and how they are built and run.

    Attributes:
        name: of the model's family.
        summary: the model in a few words.
        layer_count: number of layers, the embedding and the head among them.
        kinds: kind of each layer; layers of one kind cost the same.
        parameters: name -> ``ParameterSpec``, in the model's own order, each tensor that can be trained once.
        constants: name -> ``ParameterSpec`` of what belongs to the model but is never trained.
        embeddings: names of parameters that are the matrix of a ``torch.nn.Embedding``.
        draws: does any layer draw random numbers in training?
        tied: (head's name, embedding's name) when the last layer's matrix *is* the first one's, else None.
        start_is_sent: the start weights are rank 0's, which sends them; no other rank has them.
        logits: numbers per token of which the loss needs the gradient too; None: no more than other activations.
        routers: those whose choices the loss counts, too; None: there are none.
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
        """Rows of a boundary at the end of each sequence that are no hidden vectors."""
        return self.boundary(0, 1, 0)[1] if self.routers is not None else 0

    def specs(self, first: int, last: int) -> list[ParameterSpec]:
        """Parameters of layers ``[first, last)``."""
        return [spec for spec in self.parameters.values() if first <= spec.layer < last]

    def constant_specs(self, first: int, last: int) -> list[ParameterSpec]:
        """Constants of layers ``[first, last)``."""
        return [spec for spec in self.constants.values() if first <= spec.layer < last]

    def dtype_of(self, name: str, compute: torch.dtype) -> torch.dtype:
        """The dtype a tensor has where ``compute`` is the model's."""
        return compute

    def changed_since(self, described: Mapping[str, Any]) -> str | None:
        """Values that are in no checkpoint and others than when ``to_dict`` gave ``described``, in words; None: nothing."""
        return None

    @abstractmethod
    def decays(self, name: str) -> bool:
        """Whether weight decay is applied to a trained tensor."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """The model's description, for checkpoints, as JSON-able values."""

    @abstractmethod
    def module_names(self, layer: int) -> tuple[str, ...]:
        """Qualified names of the modules that make up a layer."""

    @abstractmethod
    def layer_of(self, name: str) -> int:
        """Index of the layer that holds the parameter or module ``name``."""

    @abstractmethod
    def frame(self) -> nn.Module:
        """The whole model without memory, under the names of its modules."""

    @abstractmethod
    def vacate(self, model: nn.Module, layer: int) -> None:
        """Give a layer of a frame modules with memory (fp32, host), whose values are still to be filled in."""

    @abstractmethod
    def initialise(self, model: nn.Module, layer: int, seed: int) -> None:
        """Give a layer of a frame its start values (fp32, host), which are functions of the seed and of names."""

    @abstractmethod
    def restore_buffers(self, model: nn.Module, device: torch.device) -> None:
        """Bring the buffers of all layers that are there to the device."""

    @abstractmethod
    def recompute(self, model: nn.Module, enabled: bool) -> None:
        """From now on, run the forward of the inner layers again in backward instead of keeping their activations, or do not."""

    @abstractmethod
    def run(self, model: nn.Module, first: int, last: int, x: torch.Tensor, **keywords: Any) -> torch.Tensor:
        """The layers ``[first, last)`` on ``x``; ``keywords`` are the model's own."""

    def attention(self, packed: bool, repeats: bool) -> contextlib.AbstractContextManager[None]:
        """A block of ``run``, or of its backward. ``packed``: of several records in a sequence; ``repeats``: with keys and values
        repeated for the heads that share them."""
        return contextlib.nullcontext()

    def isolation(self, x: torch.Tensor, positions: torch.Tensor | None) -> dict[str, Any]:
        """The keywords of ``run`` by which the records of a sequence do not see each other.

        Args:
            x: what ``run`` is given.
            positions: (B, T) int64, each token's place in its own record; None: a sequence is one text.
        """
        assert positions is None, f"{self.name} is no language model"
        return {}

    @abstractmethod
    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Sum of the losses of all targets, a scalar (fp32), differentiable. ``outputs``: the last layer's."""

    def sliced_head(self, model: nn.Module, dtype: str, share: Any) -> Any:
        """``HeadSlices`` of a model whose logits may take more memory than all else; None: they are computed at once."""
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
        """The number of targets by which the summed loss of a batch is divided."""


class Start(Protocol):
    """Where start weights come from."""

    def fill(self, chain: Any, model: Any, layer: int) -> None:
        """Give a layer of a chain's frame its values, fp32 in host memory. Some starts know one kind of chain only."""
        ...


def embedding_matrices(module: nn.Module) -> set[str]:
    """Names of the matrices of all ``torch.nn.Embedding`` in a module."""
    return {f"{name}.weight".lstrip(".") for name, one in module.named_modules() if isinstance(one, nn.Embedding)}


def as_input(array: NDArray[Any]) -> torch.Tensor:
    """A batch's array as models take it: whole numbers are int64, all others fp32."""
    tensor = torch.from_numpy(array)
    return tensor.float() if np.issubdtype(array.dtype, np.floating) else tensor.long()
