"""A user-defined list of layers (``LayeredModel``) as a layer chain.

Rank 0 builds every layer once, one at a time, and runs it on two real samples (``checked_layers``). It sends the resulting
descriptions to all ranks, which then build only their own layers.
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
from hetero_mpi.util import units
from hetero_mpi.util.display import Displayed
from hetero_mpi.util.errors import UserError

REMEDY = (
    "Build the layer inside its function, using torch's random numbers only; or pass an existing model: LayeredModel(layers=net, "
    "...), where net is a torch.nn.Sequential, whose weights on rank 0 are then the initial weights"
)
_SAMPLES, _ALIKE = 8, 1e-3
"""Number of elements compared per tensor, and the relative tolerance, which is needed because CPUs round differently."""


@dataclass(frozen=True)
class LayerShape:
    """Description of a layer, so that other ranks need not build the layer."""

    name: str
    module: str
    """Class name of the layer's module."""
    output: tuple[int, ...]
    """Shape of the layer's output for one sample."""
    parameters: dict[str, tuple[int, ...]]
    """Maps parameter names within the layer to shapes, in the layer's order."""
    frozen: tuple[str, ...]
    """Names of the parameters that are not trained (``requires_grad`` is false)."""
    buffers: dict[str, tuple[int, ...]]
    """Maps the names of persistent and non-persistent buffers to shapes."""
    embeddings: tuple[str, ...]
    """Names of the parameters that are the matrix of a ``torch.nn.Embedding``."""
    draws: bool
    """Whether the layer draws random numbers in training."""
    start: dict[str, tuple[float, ...]]
    """A few initial values of parameters and buffers (``sampled``), if the builders of all ranks must agree on them."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LayerShape:
        """Inverse of ``dataclasses.asdict`` followed by conversion to JSON."""
        tuples = {
            table: {name: tuple(value) for name, value in values[table].items()}
            for table in ("parameters", "buffers", "start")
        }
        return cls(**{**values, **tuples, **{key: tuple(values[key]) for key in ("output", "frozen", "embeddings")}})

    def differences(self, layer: nn.Module) -> str | None:
        """Describe how a layer's names and shapes differ from this description; return None if they are equal."""
        for what, expected, actual in (
            ("parameters", self.parameters, shapes_of(layer.named_parameters())),
            ("buffers", self.buffers, shapes_of(layer.named_buffers())),
        ):
            if expected != actual:
                return f"has the {what} {actual} on this rank, but {expected}"
        return None


class CustomChain(LayerChain):
    """A user-defined model as a chain of layers.

    Args:
        existing: whether rank 0 sends the initial values because the builders do not provide them.
        loss: maps (outputs, targets) to the summed loss.
        sample: (input, target) of a real sample, for profiling.
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
        self.summary, self.start_is_sent = f"{name}, {units.plural(len(shapes), 'layer')}", existing
        self.embeddings = {f"{shape.name}.{inner}" for shape in shapes for inner in shape.embeddings}
        self.draws = any(shape.draws for shape in shapes)
        self._builders, self._loss, self._sample = builders, loss, sample
        self._layer_of = {shape.name: layer for layer, shape in enumerate(shapes)}
        # The planner uses these names for the first and last layer of every chain.
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
        """Whether weight decay applies: to tensors with at least two dimensions that are not biases."""
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
        """Build a layer in fp32 in host memory.

        Raises:
            UserError: The layer or its initial values differ from rank 0's.
        """
        shape = self.shapes[index]
        layer = build_layer(shape.name, self._builders[shape.name], seed)
        difference = shape.differences(layer)
        if difference is not None:
            raise UserError(
                "custom.builder_differs",
                f"{self.name}: layer {shape.name!r} {difference} on rank 0: a builder must return the same layer on every call "
                f"and on every rank",
            )
        name = unlike(shape.start, sampled(layer))
        if name is not None:
            raise UserError(
                "custom.builder_differs",
                f"{self.name}: layer {shape.name!r} has different initial values than on rank 0 ({name}): a builder must "
                f"give the same values on every rank. {REMEDY}",
            )
        return layer

    def restore_buffers(self, model: nn.Module, device: torch.device) -> None:
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(device)

    def recompute(self, model: nn.Module, enabled: bool) -> None:
        model.recompute = enabled

    def run(self, model: nn.Module, first: int, last: int, x: torch.Tensor, **keywords: Any) -> torch.Tensor:
        """Run the layers ``[first, last)`` on samples, or on the output of layer ``first - 1``."""
        y = x
        for index in range(first, last):
            layer = model.get_submodule(self.shapes[index].name)
            recomputed = (
                getattr(model, "recompute", False) and 0 < index < self.layer_count - 1 and torch.is_grad_enabled()
            )
            y = checkpoint(layer, y, use_reentrant=False) if recomputed else layer(y)
        # A view of the input (from a reshaping layer) would be overwritten with the input while it is sent.
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
        """Return the layer's buffers under their state-dict names. They are constant, so a newly built layer provides them."""
        shape, state = self.shapes[layer], self.built(layer, self.seed).state_dict()
        return {f"{shape.name}.{name}": value for name, value in state.items() if name not in shape.parameters}


def build_layer(name: str, builder: Builder, seed: int) -> nn.Module:
    """Build a layer with random numbers that depend on (seed, name), leaving the global generator unchanged.

    Raises:
        UserError: The builder fails, or does not return a module, or a parameter of the module is unsupported.
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
            f"the builder of layer {name!r} returns a {type(layer).__name__}: it must return a torch.nn.Module",
        )
    for inner, tensor in layer.named_parameters():
        if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
            raise UserError(
                "custom.builder_result",
                f"layer {name!r}: parameter {inner} is {tensor.dtype} on {tensor.device}: build layers in fp32 on the CPU; "
                f"they are moved to each rank's device",
            )
    shared_parameter_error = {inner for inner, _ in layer.named_parameters(remove_duplicate=False)} - {
        inner for inner, _ in layer.named_parameters()
    }
    if shared_parameter_error:
        raise UserError(
            "custom.shared_parameter",
            f"layer {name!r} has one parameter under two names ({sorted(shared_parameter_error)[0]}): give it one name",
        )
    return layer


def sampled(layer: nn.Module) -> dict[str, tuple[float, ...]]:
    """Map the name of each parameter and buffer to a few evenly spaced elements."""
    samples = {}
    for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().reshape(-1)
        places = torch.linspace(0, max(0, len(flat) - 1), min(_SAMPLES, len(flat))).long()
        samples[name] = tuple(flat[places].double().tolist())
    return samples


def unlike(expected: Mapping[str, Sequence[float]], actual: Mapping[str, Sequence[float]]) -> str | None:
    """Return the first name whose values in ``expected`` and ``actual`` differ; None if there is no difference."""
    for name, values in expected.items():
        allowed = _ALIKE * float(np.max(np.abs(values), initial=0.0))
        if not np.allclose(values, actual[name], rtol=0.0, atol=allowed, equal_nan=True):
            return name
    return None


def shapes_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors}


Builder = Callable[[], nn.Module]


@dataclass(frozen=True, repr=False)
class LayeredModel(Displayed):
    """A model that is a chain of layers and can be split between any two of them; each layer maps one tensor to one tensor.

    The first dimension of every tensor indexes samples, whose outputs must be independent of each other (no batch normalisation).
    Tensors between layers are fp32.
    """

    layers: Sequence[Builder] | Mapping[str, Builder] | nn.Sequential
    """At least two functions without arguments, each of which builds one layer. A rank builds only its own layers; random numbers
    depend on ``train.seed`` and the layer's name. Layer names are the mapping's keys, or 0, 1, 2 ...: parameters are named as in a
    ``torch.nn.Sequential`` of the layers.

    Alternatively, an existing model as a ``torch.nn.Sequential``: its modules are the layers, and rank 0 sends its weights to the
    other ranks as initial weights. The model is copied, never changed."""
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """Maps (the last layer's output, targets) to the *sum* of the samples' losses, a scalar."""
    data: Callable[[], Sequence[Any]]
    """Returns the training set; called on rank 0 only. It is a map-style torch dataset with a length, whose items are (input,
    target) pairs of arrays. Integers are passed to the model as int64, other numbers as fp32."""
    evaluation: Callable[[], Sequence[Any]] | None = None
    """Returns the evaluation set; if None, ``data.evaluation_fraction`` of ``data`` is split off as the evaluation set."""

    @property
    def existing(self) -> bool:
        return isinstance(self.layers, nn.Sequential)

    def modules(self) -> dict[str, nn.Module]:
        """Map names to the layers of an existing model."""
        assert isinstance(self.layers, nn.Sequential)
        return dict(self.layers._modules.items())  # type: ignore[arg-type]  # ``named_children`` leaves out repeated modules

    def named_layers(self) -> dict[str, Builder]:
        """Map names to builders; the builders for an existing model copy its layers."""
        if self.existing:
            return {name: _copier(layer) for name, layer in self.modules().items()}
        assert not isinstance(self.layers, nn.Sequential)
        if isinstance(self.layers, Mapping):
            return dict(self.layers)
        return {str(number): layer for number, layer in enumerate(self.layers)}


def _copier(layer: nn.Module) -> Builder:
    return lambda: copy.deepcopy(layer).train()


def outline(layer: nn.Module) -> nn.Module:
    """Copy the layer with its parameters and buffers on the meta device."""
    empty: dict[int, torch.Tensor] = {id(buffer): buffer.to("meta") for buffer in layer.buffers()}
    for parameter in layer.parameters():
        empty[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    return copy.deepcopy(layer, dict(empty))


def builder_of(layer: nn.Module, buffers: Mapping[str, torch.Tensor]) -> Builder:
    """Return a builder that recreates a layer in host memory from its outline, with given buffers and uninitialised parameters."""

    def build() -> nn.Module:
        built = copy.deepcopy(layer).to_empty(device="cpu").train()
        for name, buffer in built.named_buffers(remove_duplicate=False):
            buffer.copy_(buffers[name])
        return built

    return build


def check_not_shared(model: LayeredModel) -> None:
    """Check that no two layers share a parameter, even under different names; raise UserError naming both places if they do."""
    places: dict[int, tuple[str, str]] = {}
    for name, layer in model.modules().items():
        for inner, parameter in layer.named_parameters():
            first_use = places.setdefault(parameter.data_ptr(), (name, inner))
            if first_use[0] != name and parameter.numel():
                raise shared_parameter_error(first_use[0], name, inner)


def shared_parameter_error(layer: str, other_layer: str, parameter: str) -> UserError:
    return UserError(
        "custom.shared_parameter",
        f"layers {layer!r} and {other_layer!r} share a parameter ({parameter} of {other_layer!r}): each would train a copy. "
        f"Put all uses of it into one layer, or give each layer its own parameter",
    )
