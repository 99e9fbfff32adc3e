"""Custom models (``[model] factory``): a user's Python function, imported on every rank, that returns a layered model.

Rank 0 reads the data and inspects the layers. All ranks receive the result and check that their module is the same.
"""

import hashlib
import importlib
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from hetero_mpi.comm.ranks.world import World
from hetero_mpi.data.batch import Batch
from hetero_mpi.data.dataset import Samples, gather_samples
from hetero_mpi.device.backend import host_bytes
from hetero_mpi.job.load import LoadedJob
from hetero_mpi.model.custom.custom_chain import (
    REMEDY,
    Builder,
    CustomChain,
    LayeredModel,
    LayerShape,
    build_layer,
    builder_of,
    check_not_shared,
    outline,
    sampled,
    shapes_of,
    shared_parameter_error,
    unlike,
)
from hetero_mpi.model.layer.interface import as_input, embedding_matrices, seeded
from hetero_mpi.util.errors import UserError


def read_factory(loaded: LoadedJob) -> tuple[dict[str, Any], Samples]:
    """Return (JSON description of the model, its data) on rank 0. Raises UserError if the module is missing or breaks a rule."""
    model, digest = _call_factory(loaded)
    job = loaded.job
    data = _data(loaded, "data", model.data)
    evaluation = _data(loaded, "evaluation", model.evaluation) if model.evaluation is not None else None
    samples = Samples(data, evaluation, job.data.evaluation_fraction, job.train.seed)
    ends = gather_samples(data, (0, len(data) - 1), samples.shapes)
    shapes = checked_layers(model, ends, job.train.seed)
    layers = [asdict(shape) for shape in shapes]
    keys = {"factory": job.model.factory, "digest": digest, "existing": model.existing, "layers": layers}
    return keys, samples


def custom_chain(world: World, loaded: LoadedJob, keys: Mapping[str, Any], samples: Samples | None) -> CustomChain:
    """Build the chain of a factory's layers on every rank. Collective.

    Args:
        keys: the description that ``read_factory`` returned on rank 0.
        samples: the data on rank 0; None on other ranks.

    Raises:
        CollectiveUserError: A rank cannot import the module or has a different version of it.
    """
    sample = world.broadcast_arrays(samples.first() if samples is not None else None)
    with world.collective_errors("importing the model's factory"):
        model, digest = _call_factory(loaded)
        shapes = tuple(LayerShape.from_dict(shape) for shape in keys["layers"])
        local_model = digest, model.existing, list(model.named_layers())
        if local_model != (keys["digest"], keys["existing"], [shape.name for shape in shapes]):
            raise UserError(
                "custom.module_differs",
                f"{_key(loaded)}: the module on this rank differs from rank 0's: copy the same file to all machines",
            )
    builders = _existing(world, loaded, model, shapes) if model.existing else model.named_layers()
    seed = loaded.job.train.seed
    return CustomChain(str(keys["factory"]), shapes, builders, model.existing, model.loss, (sample[0], sample[1]), seed)


def start_values(loaded: LoadedJob) -> dict[str, torch.Tensor]:
    """Return the weights of a factory's existing model by name on rank 0. The caller holds the only references to them."""
    model, _ = _call_factory(loaded)
    return {
        f"{name}.{inner}": parameter.detach()
        for name, layer in model.modules().items()
        for inner, parameter in layer.named_parameters()
    }


def _existing(
    world: World, loaded: LoadedJob, model: LayeredModel, shapes: tuple[LayerShape, ...]
) -> dict[str, Builder]:
    """Return builders for the layers of an existing model, with rank 0's buffers but without parameter values. Collective."""
    modules = model.modules()
    with world.collective_errors("checking the factory's model"):
        for shape in shapes:
            difference = shape.differences(modules[shape.name])
            if difference is not None:
                raise UserError(
                    "custom.module_differs",
                    f"{_key(loaded)}: layer {shape.name!r} {difference} on rank 0: all ranks must have the same shapes",
                )
    outlines = {name: outline(layer) for name, layer in modules.items()}
    buffers = [buffer for layer in modules.values() for _, buffer in layer.named_buffers()]
    if not buffers:
        return {name: builder_of(layer, {}) for name, layer in outlines.items()}
    sent = [host_bytes(buffer.contiguous()) for buffer in buffers] if world.rank == 0 else None
    values, builders = iter(world.broadcast_arrays(sent)), {}
    for name, layer in outlines.items():
        start = {}
        for inner, buffer in layer.named_buffers():
            start[inner] = torch.from_numpy(next(values)).view(buffer.dtype).view(buffer.shape)
        builders[name] = builder_of(layer, start)
    return builders


def _call_factory(loaded: LoadedJob) -> tuple[LayeredModel, str]:
    """Call the factory; returns its model and a digest of its source file."""
    text = loaded.job.model.factory
    assert text is not None
    name, _, function = text.partition(":")
    module = _import_module(loaded, name)
    factory = getattr(module, function, None)
    if not callable(factory):
        raise UserError("custom.factory", f"{_key(loaded)}: {module.__file__} has no function {function}")
    with seeded(loaded.job.train.seed, "factory"):
        model = _call_user_code(loaded, factory)
    if not isinstance(model, LayeredModel):
        raise UserError(
            "custom.factory",
            f"{_key(loaded)} returns a {type(model).__name__}: it must return a hetero_mpi.LayeredModel (docs/python.md)",
        )
    source = Path(module.__file__) if module.__file__ is not None else None
    return model, hashlib.sha256(source.read_bytes()).hexdigest() if source is not None else ""


def _import_module(loaded: LoadedJob, name: str) -> ModuleType:
    """Import the module from the job's folder or the Python path."""
    folder = str(loaded.directory)
    if folder not in sys.path:
        sys.path.append(folder)  # last, so that it hides nothing; and it stays: the module may import others later
    top = name.partition(".")[0]
    try:
        with seeded(loaded.job.train.seed, "module"):
            module = _call_user_code(loaded, lambda: importlib.import_module(name))
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise UserError("custom.import", f"{_key(loaded)}: {error}; install it on every machine") from error
        raise UserError(
            "custom.import",
            f"{_key(loaded)}: there is no module {error.name} in {folder} or on the Python path: put the file next to the job "
            f"file on every machine, or set PYTHONPATH",
        ) from None
    local = [path for path in (loaded.directory / f"{top}.py", loaded.directory / top / "__init__.py") if path.exists()]
    loaded_from = getattr(sys.modules[top], "__file__", None)
    if local and loaded_from is not None and Path(loaded_from).resolve() != local[0].resolve():
        raise UserError(
            "custom.import",
            f"{_key(loaded)}: Python has already loaded another module {top}, {loaded_from}: rename {local[0]}",
        )
    return module


def _data(loaded: LoadedJob, what: str, give: Any) -> Any:
    if not callable(give):
        raise UserError(
            "samples.factory",
            f"LayeredModel.{what} is a {type(give).__name__}: pass a function that returns the samples",
        )
    data = _call_user_code(loaded, give)
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise UserError(
            "samples.factory",
            f"LayeredModel.{what} returns a {type(data).__name__}: it must return a map-style dataset, such as a list or a torch "
            f"Dataset, with a length and a pair (input, target) for each index",
        )
    return data


def _call_user_code(loaded: LoadedJob, call: Any) -> Any:
    """Call the user's code and convert its exceptions to a UserError that names the failing line."""
    try:
        return call()
    except (UserError, ModuleNotFoundError):
        raise
    except Exception as error:  # it may raise anything
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise UserError(
            "custom.factory_failed",
            f"{_key(loaded)}: {type(error).__name__}: {error} ({frame.filename}, line {frame.lineno})",
        ) from error


def _key(loaded: LoadedJob) -> str:
    return f'[model] factory = "{loaded.job.model.factory}"'


_MAX_DIFFERENCE_RATIO = 1e-4
"""Maximum relative difference at which results count as equal."""


def checked_layers(model: LayeredModel, samples: Batch, seed: int) -> tuple[LayerShape, ...]:
    """Inspect all layers and the loss on two samples; returns each layer's description. Raises UserError if one breaks a rule."""
    _check_names(model)
    if model.existing:
        check_not_shared(model)
    x, targets = as_input(samples.tokens), as_input(samples.targets)
    shapes = []
    names = list(model.named_layers())
    for name, builder in model.named_layers().items():
        if not model.existing:
            _check_built_inside(name, model, seed)
        shape, x = _inspect(name, builder, x, seed, last=name == names[-1])
        if model.existing:  # builders have the buffers' values only
            shape = replace(shape, start={inner: shape.start[inner] for inner in shape.buffers})
        shapes.append(shape)
    with torch.no_grad():
        try:
            total, *single = (model.loss(x[rows], targets[rows]) for rows in (slice(0, 2), slice(0, 1), slice(1, 2)))
        except Exception as error:  # as above
            raise UserError(
                "custom.loss",
                f"LayeredModel.loss fails on outputs of shape {tuple(x.shape)} and targets of shape {tuple(targets.shape)} "
                f"({targets.dtype}): {type(error).__name__}: {error}",
            ) from error
    if not isinstance(total, torch.Tensor) or total.ndim != 0 or not total.is_floating_point():
        raise UserError(
            "custom.loss",
            'LayeredModel.loss must return a scalar tensor: the sum of the samples\' losses (reduction="sum")',
        )
    if not torch.isfinite(total):
        raise UserError(
            "custom.loss",
            f"LayeredModel.loss is {float(total)} for the data's first and last sample: check their targets, and that it masks NaN",
        )
    if not _all_close(total, single[0] + single[1]):
        raise UserError(
            "custom.loss",
            f"LayeredModel.loss must be the sum of the samples' losses: it is {float(total):.6g} for two samples and "
            f'{float(single[0]):.6g} and {float(single[1]):.6g} for each alone; use reduction="sum"',
        )
    return tuple(shapes)


def _check_names(model: LayeredModel) -> None:
    layers = model.named_layers()
    if len(layers) < 2:
        raise UserError(
            "custom.too_few_layers",
            f"LayeredModel.layers must have at least two layers, so that it can be split; it has {len(layers)}",
        )
    reserved_names = nn.Sequential()
    for name, builder in layers.items():
        if not isinstance(name, str) or not name or "." in name or hasattr(reserved_names, name):
            raise UserError(
                "custom.layer_name",
                f"LayeredModel.layers: {name!r} cannot be the name of a layer: dots and attributes of torch.nn.Module are not "
                f"allowed",
            )
        if isinstance(builder, nn.Module) or not callable(builder):
            raise UserError(
                "custom.builder_result",
                f"LayeredModel.layers: layer {name!r} is a {type(builder).__name__}: pass a function that builds it, such as "
                f"lambda: torch.nn.Linear(8, 8), so that each rank builds only its own layers; or pass an existing model as one "
                f"torch.nn.Sequential",
            )


def _check_built_inside(name: str, model: LayeredModel, seed: int) -> None:
    """Check that every call of a layer's builder makes a new layer with the same initial values. Raises UserError."""
    builders = model.named_layers()
    built, second_build = (build_layer(name, builders[name], seed) for _ in range(2))
    addresses = {parameter.data_ptr() for parameter in built.parameters() if parameter.numel()}
    repeated = [inner for inner, parameter in second_build.named_parameters() if parameter.data_ptr() in addresses]
    for outside in repeated[:1]:
        for second in builders.keys() - {name}:
            for inner, parameter in build_layer(second, builders[second], seed).named_parameters():
                if parameter.data_ptr() in addresses:
                    raise shared_parameter_error(name, second, inner)
        raise UserError(
            "custom.builder_repeats",
            f"layer {name!r} was built outside its builder: parameter {outside} is the same tensor on every call, so each process "
            f"would start from different weights. {REMEDY}",
        )
    drawn = unlike(sampled(built), sampled(second_build))
    if drawn is not None:
        raise UserError(
            "custom.builder_repeats",
            f"layer {name!r} has different initial values on every call of its builder ({drawn}): runs would not be reproducible, "
            f"and ranks would differ. {REMEDY}",
        )


def _inspect(name: str, builder: Builder, x: torch.Tensor, seed: int, last: bool) -> tuple[LayerShape, torch.Tensor]:
    """Run a layer on two samples ``x``; returns its description and output. Raises UserError if it breaks a rule."""
    layer = build_layer(name, builder, seed)
    if any(isinstance(module, _BatchNorm) for module in layer.modules()):
        raise UserError(
            "custom.batch_dependent",
            f"layer {name!r} normalises over the batch: its result would depend on the micro-batch size, which the plan decides. "
            f"Use torch.nn.GroupNorm, LayerNorm or InstanceNorm2d instead",
        )
    buffers = {inner: buffer.clone() for inner, buffer in layer.named_buffers()}
    layer_input = x.clone()
    version = layer_input._version
    y, draws = _run(name, layer, layer_input, seed)
    if layer_input._version != version:
        raise UserError(
            "custom.in_place",
            f"layer {name!r} changes its input in place: the tensor may be a message from another rank. Its first operation must "
            f"create a new tensor (inplace=False)",
        )
    if not isinstance(y, torch.Tensor):
        raise UserError(
            "custom.layer_output",
            f"layer {name!r} returns a {type(y).__name__}: every layer must take one tensor and return one tensor",
        )
    if y.ndim == 0 or len(y) != 2:
        raise UserError(
            "custom.layer_output",
            f"layer {name!r} returns a tensor of shape {tuple(y.shape)} for two samples: the first dimension must be the batch",
        )
    if not last and y.dtype != torch.float32:
        raise UserError(
            "custom.layer_output", f"layer {name!r} returns {y.dtype}: tensors between layers must be torch.float32"
        )
    if any(not torch.equal(buffer, buffers[inner]) for inner, buffer in layer.named_buffers()):
        raise UserError(
            "custom.buffers",
            f"layer {name!r} changes its buffers in forward: every rank would have different statistics. Keep them constant "
            f"(track_running_stats=False), or make them parameters",
        )
    if draws:
        layer.eval()
        y, _ = _run(name, layer, x.clone(), seed)
    alone, _ = _run(name, layer, x[:1].clone(), seed)
    if not _all_close(alone, y[:1]):
        raise UserError(
            "custom.batch_dependent",
            f"layer {name!r} gives a different output for a sample if the batch contains other samples: results would depend on "
            f"the micro-batch size, which the plan decides. Compute each sample independently of the others",
        )
    shape = LayerShape(
        name,
        type(layer).__name__,
        tuple(y.shape[1:]),
        shapes_of(layer.named_parameters()),
        tuple(inner for inner, parameter in layer.named_parameters() if not parameter.requires_grad),
        shapes_of(layer.named_buffers()),
        tuple(sorted(embedding_matrices(layer))),
        draws,
        sampled(layer),
    )
    return shape, y


def _run(name: str, layer: Callable[[torch.Tensor], Any], x: torch.Tensor, seed: int) -> tuple[Any, bool]:
    """Run a layer; returns its output and whether it drew random numbers."""
    with seeded(seed, name, "look"), torch.no_grad():
        before = torch.default_generator.get_state()
        try:
            y = layer(x)
        except Exception as error:  # the user's code may raise anything
            raise UserError(
                "custom.layer_failed",
                f"layer {name!r} fails on an input of shape {tuple(x.shape)} ({x.dtype}): {type(error).__name__}: {error}",
            ) from error
        return y, not torch.equal(before, torch.default_generator.get_state())


def _all_close(first: torch.Tensor, second: torch.Tensor) -> bool:
    scale = max(float(first.abs().max()), float(second.abs().max())) if first.numel() else 0.0
    return first.shape == second.shape and bool(((first - second).abs() <= _MAX_DIFFERENCE_RATIO * scale + 1e-7).all())
