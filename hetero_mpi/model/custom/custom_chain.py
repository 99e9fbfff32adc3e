"""A user's list of layers (``LayeredModel``) as a chain of layers.

Rank 0 builds every layer once, one at a time, and sees what it makes of two real samples (``checked_layers``); what it has seen
goes to all ranks, which build only their own.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.checkpoint import checkpoint

from hetero_mpi.model.layer.interface import Example, LayerChain, ParameterSpec, PassThrough, as_input, seeded
from hetero_mpi.planning.types.sizes import EMBEDDING, HEAD
from hetero_mpi.util.errors import UserError

REMEDY = (
    "Build the layer inside its function, with torch's random numbers only; or hand over a model that is there already as a whole: "
    "LayeredModel(layers=net, ...) with net a torch.nn.Sequential, whose weights on rank 0 are then the start"
)
_SAMPLES, _ALIKE = 8, 1e-3
"""Numbers of a tensor that are compared, and by how much of its size they may differ: processors round differently."""


@dataclass(frozen=True)
class LayerShape:
    """A layer's description, which is known without building it again."""

    name: str
    module: str
    """Its class."""
    output: tuple[int, ...]
    """Shape of what it makes of one sample."""
    parameters: dict[str, tuple[int, ...]]
    """Name within the layer -> shape, in the layer's order."""
    frozen: tuple[str, ...]
    """Names of parameters that are not trained (``requires_grad`` is false)."""
    buffers: dict[str, tuple[int, ...]]
    """The same of its buffers, saved or not."""
    embeddings: tuple[str, ...]
    """Names of parameters that are the matrix of a ``torch.nn.Embedding``."""
    draws: bool
    """It draws random numbers in training."""
    start: dict[str, tuple[float, ...]]
    """A few numbers of what parameters and buffers start from (``sampled``), where every rank's builder must give the same."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LayerShape:
        """From what ``dataclasses.asdict`` and JSON have made of one."""
        tuples = {
            table: {name: tuple(own) for name, own in values[table].items()}
            for table in ("parameters", "buffers", "start")
        }
        return cls(**{**values, **tuples, **{key: tuple(values[key]) for key in ("output", "frozen", "embeddings")}})

    def differences(self, layer: nn.Module) -> str | None:
        """In what a layer is another one, in words; None: it is this one, as far as names and shapes tell."""
        for what, own, found in (
            ("parameters", self.parameters, shapes_of(layer.named_parameters())),
            ("buffers", self.buffers, shapes_of(layer.named_buffers())),
        ):
            if own != found:
                return f"has the {what} {found} here and had {own}"
        return None


class CustomChain(LayerChain):
    """The chain of a user's layers.

    Args:
        existing: the builders give no start values; they are brought from rank 0.
        loss: (outputs, targets) -> summed losses.
        sample: (input, target) of a real sample, for the benchmark.
    """

    def __init__(
        self,
        name: str,
        shapes: tuple[LayerShape, ...],
        builders: Mapping[str, Builder],
        existing: bool,
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        sample: tuple[NDArray[Any], NDArray[Any]],
        seed: int,
    ) -> None:
        self.name, self.shapes, self.layer_count, self.seed = name, shapes, len(shapes), seed
        self.summary, self.start_is_sent = f"{name}, {len(shapes)} layers", existing
        self.embeddings = {f"{shape.name}.{inner}" for shape in shapes for inner in shape.embeddings}
        self.draws = any(shape.draws for shape in shapes)
        self._builders, self._loss, self._sample = builders, loss, sample
        self._layer_of = {shape.name: layer for layer, shape in enumerate(shapes)}
        # Planning calls the ends of every chain by these names.
        self.kinds = (EMBEDDING, *(f"layer_{shape.name}" for shape in shapes[1:-1]), HEAD)
        listed = [
            (ParameterSpec(f"{shape.name}.{inner}", layer, size), inner in shape.frozen)
            for layer, shape in enumerate(shapes)
            for inner, size in shape.parameters.items()
        ]
        self.parameters = {spec.name: spec for spec, frozen in listed if not frozen}
        self.constants = {spec.name: spec for spec, frozen in listed if frozen}

    def to_dict(self) -> dict[str, Any]:
        return {"factory": self.name, "layers": [asdict(shape) for shape in self.shapes]}

    def changed_since(self, described: Mapping[str, Any]) -> str | None:
        for then, now in zip(described["layers"], self.shapes, strict=True):
            buffers = {name: then["start"][name] for name in now.buffers if name in then.get("start", {})}
            name = unlike(buffers, now.start)
            if name is not None:
                return f"buffer {name} of layer {now.name!r}"
        return None

    def decays(self, name: str) -> bool:
        """Not to what has fewer than two dimensions, as norms, nor to what is called a bias."""
        return len(self.parameters[name].shape) >= 2 and not name.endswith("bias")

    def module_names(self, layer: int) -> tuple[str, ...]:
        return (self.shapes[layer].name,)

    def layer_of(self, name: str) -> int:
        return self._layer_of[name.partition(".")[0]]

    def frame(self) -> nn.Module:
        return nn.Sequential(OrderedDict((shape.name, PassThrough()) for shape in self.shapes))

    def vacate(self, model: nn.Module, layer: int) -> None:
        self.initialise(model, layer, self.seed)

    def initialise(self, model: nn.Module, layer: int, seed: int) -> None:
        model.set_submodule(self.shapes[layer].name, self.built(layer, seed))

    def built(self, index: int, seed: int) -> nn.Module:
        """The layer as its builder makes it (fp32, host).

        :raises UserError: it is not the layer that rank 0 has seen, or starts from other values.
        """
        shape = self.shapes[index]
        layer = build_layer(shape.name, self._builders[shape.name], seed)
        difference = shape.differences(layer)
        if difference is not None:
            raise UserError(
                "custom.builder_differs",
                f"{self.name}: layer {shape.name!r} {difference} when rank 0 looked at it: a builder gives the same layer whenever "
                f"and wherever it is called",
            )
        other = unlike(shape.start, sampled(layer))
        if other is not None:
            raise UserError(
                "custom.builder_differs",
                f"{self.name}: layer {shape.name!r} starts from other values here than on rank 0 ({other}): a builder gives the "
                f"same values on every rank. {REMEDY}",
            )
        return layer

    def restore_buffers(self, model: nn.Module, device: torch.device) -> None:
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(device)

    def recompute(self, model: nn.Module, enabled: bool) -> None:
        model.recompute = enabled

    def run(self, model: nn.Module, first: int, last: int, x: torch.Tensor, **keywords: Any) -> torch.Tensor:
        """A batch of samples, or what layer ``first - 1`` makes of them, to what layer ``last - 1`` does."""
        y = x
        for index in range(first, last):
            layer = model.get_submodule(self.shapes[index].name)
            again = getattr(model, "recompute", False) and 0 < index < self.layer_count - 1 and torch.is_grad_enabled()
            y = checkpoint(layer, y, use_reentrant=False) if again else layer(y)
        # A view of the input (of a layer that only reshapes) would be overwritten with it while it is being sent.
        alias = first > 0 and y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        return y.clone() if alias else y

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self._loss(outputs, targets)

    def boundary(self, layer: int, rows: int, length: int) -> tuple[int, ...]:
        return rows, *self.shapes[layer].output

    def example(self, first: int, last: int, rows: int, length: int, dtype: torch.dtype) -> Example:
        inputs, targets = (as_input(np.stack([array] * rows)) for array in self._sample)
        if first > 0:
            inputs = torch.linspace(0, 1, rows * int(np.prod(self.shapes[first - 1].output)), dtype=dtype)
            inputs = inputs.view(self.boundary(first - 1, rows, length))
        if last == self.layer_count:
            return inputs, targets, None
        return inputs, None, torch.full(self.boundary(last - 1, rows, length), 1e-3, dtype=dtype)

    def length(self, inputs: NDArray[Any]) -> int:
        return 1

    def counted(self, targets: NDArray[Any]) -> int:
        return len(targets)

    def buffers(self, layer: int) -> dict[str, torch.Tensor]:
        """The layer's buffers under their names in a state dict: they never change, so the builder has them."""
        shape, state = self.shapes[layer], self.built(layer, self.seed).state_dict()
        return {f"{shape.name}.{name}": value for name, value in state.items() if name not in shape.parameters}


def build_layer(name: str, builder: Builder, seed: int) -> nn.Module:
    """A layer, with the random numbers of (seed, name); the program's own generator stays as it is.

    :raises UserError: the builder gives no module, or one with parameters that cannot be trained here.
    """
    with seeded(seed, name):
        try:
            layer = builder()
        except Exception as error:  # the user's code may raise anything
            raise UserError(
                "custom.builder_failed", f"layer {name!r} cannot be built: {type(error).__name__}: {error}"
            ) from error
    if not isinstance(layer, nn.Module):
        raise UserError(
            "custom.builder_result",
            f"the builder of layer {name!r} gives a {type(layer).__name__}: it must give a torch.nn.Module",
        )
    for inner, tensor in layer.named_parameters():
        if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
            raise UserError(
                "custom.builder_result",
                f"layer {name!r}: parameter {inner} is {tensor.dtype} on {tensor.device}: build layers in fp32 on the CPU; "
                f"they are brought to each rank's device",
            )
    shared = {inner for inner, _ in layer.named_parameters(remove_duplicate=False)} - {
        inner for inner, _ in layer.named_parameters()
    }
    if shared:
        raise UserError(
            "custom.shared_parameter",
            f"layer {name!r} has one parameter under two names ({sorted(shared)[0]}): give it one name",
        )
    return layer


def sampled(layer: nn.Module) -> dict[str, tuple[float, ...]]:
    """Name of each parameter and buffer -> a few of its numbers, from the first to the last."""
    found = {}
    for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().reshape(-1)
        places = torch.linspace(0, max(0, len(flat) - 1), min(_SAMPLES, len(flat))).long()
        found[name] = tuple(flat[places].double().tolist())
    return found


def unlike(one: Mapping[str, Sequence[float]], other: Mapping[str, Sequence[float]]) -> str | None:
    """The first name under which ``one`` has other numbers than ``other``; None: there is none."""
    for name, values in one.items():
        allowed = _ALIKE * float(np.max(np.abs(values), initial=0.0))
        if not np.allclose(values, other[name], rtol=0.0, atol=allowed, equal_nan=True):
            return name
    return None


def shapes_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors}


Builder = Callable[[], nn.Module]


@dataclass(frozen=True)
class LayeredModel:
    """A model that is a chain of layers, each of which takes one tensor and gives one. It may be cut between any two.

    The first dimension of every tensor counts samples, and what a layer makes of a sample may not depend on the others (no batch
    normalisation). Tensors between layers are fp32.
    """

    layers: Sequence[Builder] | Mapping[str, Builder] | nn.Sequential
    """Functions without arguments, each of which builds one layer, at least two of them. A rank calls those of the layers that
    it holds; random numbers drawn by a call are functions of ``train.seed`` and the layer's name. Names are keys, or 0, 1, 2 ...:
    parameters are called as in ``torch.nn.Sequential`` of the layers.

    Or a model that is there already, as ``torch.nn.Sequential``: its parts are the layers, and its weights on rank 0 are the
    start, which is sent to the other ranks. It is copied, never changed."""
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """(the last layer's output, targets) -> the losses of the samples, *summed*: a scalar."""
    data: Callable[[], Sequence[Any]]
    """Gives what is learnt from, on rank 0 only: it has a length and gives under each number a pair (input, target) of arrays,
    as data sets of torch do. Whole numbers reach the model as int64, others as fp32."""
    evaluation: Callable[[], Sequence[Any]] | None = None
    """The same, never learnt from; None: ``data.held_out`` is a share of ``data``."""

    @property
    def existing(self) -> bool:
        return isinstance(self.layers, nn.Sequential)

    def modules(self) -> dict[str, nn.Module]:
        """Name -> layer of a model that is there already."""
        assert isinstance(self.layers, nn.Sequential)
        return dict(self.layers._modules.items())  # type: ignore[arg-type]  # ``named_children`` leaves out repeated modules

    def named_layers(self) -> dict[str, Builder]:
        """Name -> builder; of a model that is there already, of a copy."""
        if self.existing:
            return {name: _copier(layer) for name, layer in self.modules().items()}
        assert not isinstance(self.layers, nn.Sequential)
        if isinstance(self.layers, Mapping):
            return dict(self.layers)
        return {str(number): layer for number, layer in enumerate(self.layers)}


def _copier(layer: nn.Module) -> Builder:
    return lambda: copy.deepcopy(layer).train()


def outline(layer: nn.Module) -> nn.Module:
    """A copy of the layer whose parameters and buffers are on the meta device."""
    empty: dict[int, torch.Tensor] = {id(buffer): buffer.to("meta") for buffer in layer.buffers()}
    for parameter in layer.parameters():
        empty[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    return copy.deepcopy(layer, dict(empty))


def builder_of(layer: nn.Module, buffers: Mapping[str, torch.Tensor]) -> Builder:
    """Builds a layer from its outline: the buffers have their values, the parameters none yet (host)."""

    def build() -> nn.Module:
        built = copy.deepcopy(layer).to_empty(device="cpu").train()
        for name, buffer in built.named_buffers(remove_duplicate=False):
            buffer.copy_(buffers[name])
        return built

    return build


def check_not_shared(model: LayeredModel) -> None:
    """Refuse a parameter that two layers have, be it under other names or in another shape.

    :raises UserError: with both places.
    """
    places: dict[int, tuple[str, str]] = {}
    for name, layer in model.modules().items():
        for inner, parameter in layer.named_parameters():
            other = places.setdefault(parameter.data_ptr(), (name, inner))
            if other[0] != name and parameter.numel():
                raise shared(other[0], name, inner)


def shared(one: str, other: str, parameter: str) -> UserError:
    return UserError(
        "custom.shared_parameter",
        f"layers {one!r} and {other!r} share a parameter ({parameter} of {other!r}): each would train a copy of its own. "
        f"Put all that uses it into one layer, or give each a parameter of its own",
    )
