"""``[model] factory``: the user's own Python function, imported on every rank, that returns a model made of layers.

Rank 0 has the data and inspects the layers. All ranks get the result, and check that their module is the same.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from hetero_mpi.comm.ranks.world import World
from hetero_mpi.data.dataset import Samples, pair
from hetero_mpi.device.backend import host_bytes
from hetero_mpi.job.load import LoadedJob
from hetero_mpi.model.custom.custom_chain import CustomChain, LayerShape
from hetero_mpi.model.custom.layer_check import checked_layers
from hetero_mpi.model.custom.layered_model import Builder, LayeredModel, builder_of, outline
from hetero_mpi.model.layer.interface import seeded
from hetero_mpi.util.errors import UserError


def read_factory(loaded: LoadedJob) -> tuple[dict[str, Any], Samples]:
    """(JSON-able description of the model, its data). On rank 0. Raises UserError: the module is missing, returns something else,
    or breaks a rule.
    """
    model, digest = _called(loaded)
    job = loaded.job
    data = _data(loaded, "data", model.data)
    evaluation = _data(loaded, "evaluation", model.evaluation) if model.evaluation is not None else None
    samples = Samples(data, evaluation, job.data.held_out, job.train.seed)
    pairs = pair(data, 0), pair(data, len(data) - 1)
    shapes = checked_layers(model, pairs, job.train.seed)
    layers = [asdict(shape) for shape in shapes]
    keys = {"factory": job.model.factory, "digest": digest, "existing": model.existing, "layers": layers}
    return keys, samples


def custom_chain(world: World, loaded: LoadedJob, keys: Mapping[str, Any], samples: Samples | None) -> CustomChain:
    """The chain of a factory's layers on every rank. Collective. Raises CollectiveUserError: a rank cannot import the module, or
    has another one.

    Args:
        keys: as ``read_factory`` gave them to rank 0.
        samples: the data, on rank 0.
    """
    sample = world.broadcast_arrays(samples.first() if samples is not None else None)
    with world.together("importing the model's factory"):
        model, digest = _called(loaded)
        shapes = tuple(LayerShape.from_dict(shape) for shape in keys["layers"])
        own = digest, model.existing, list(model.named_layers())
        if own != (keys["digest"], keys["existing"], [shape.name for shape in shapes]):
            raise UserError(
                "custom.module_differs",
                f"{_key(loaded)}: the module here is not the one on rank 0: bring the same file to all machines",
            )
    builders = _existing(world, loaded, model, shapes) if model.existing else model.named_layers()
    seed = loaded.job.train.seed
    return CustomChain(str(keys["factory"]), shapes, builders, model.existing, model.loss, (sample[0], sample[1]), seed)


def start_values(loaded: LoadedJob) -> dict[str, torch.Tensor]:
    """The start weights of a factory's existing model, by name. On rank 0. The caller holds the only references."""
    model, _ = _called(loaded)
    return {
        f"{name}.{inner}": parameter.detach()
        for name, layer in model.modules().items()
        for inner, parameter in layer.named_parameters()
    }


def _existing(
    world: World, loaded: LoadedJob, model: LayeredModel, shapes: tuple[LayerShape, ...]
) -> dict[str, Builder]:
    """Builders of the layers of an existing model, with rank 0's buffers and parameters without values. Collective."""
    modules = model.modules()
    with world.together("looking at the factory's model"):
        for shape in shapes:
            difference = shape.differences(modules[shape.name])
            if difference is not None:
                raise UserError(
                    "custom.module_differs",
                    f"{_key(loaded)}: layer {shape.name!r} {difference} on rank 0: the model has the same shapes everywhere",
                )
    outlines = {name: outline(layer) for name, layer in modules.items()}
    own = [buffer for layer in modules.values() for _, buffer in layer.named_buffers()]
    if not own:
        return {name: builder_of(layer, {}) for name, layer in outlines.items()}
    given = world.broadcast_arrays([host_bytes(buffer.contiguous()) for buffer in own] if world.rank == 0 else None)
    values = iter(given)
    return {
        name: builder_of(
            layer,
            {
                inner: torch.from_numpy(next(values)).view(buffer.dtype).view(buffer.shape)
                for inner, buffer in layer.named_buffers()
            },
        )
        for name, layer in outlines.items()
    }


def _called(loaded: LoadedJob) -> tuple[LayeredModel, str]:
    """The factory's return value, and a digest of its file."""
    text = loaded.job.model.factory
    assert text is not None
    name, _, function = text.partition(":")
    module = _imported(loaded, name)
    factory = getattr(module, function, None)
    if not callable(factory):
        raise UserError("custom.factory", f"{_key(loaded)}: {module.__file__} has no function {function}")
    with seeded(loaded.job.train.seed, "factory"):
        model = _own_code(loaded, factory)
    if not isinstance(model, LayeredModel):
        raise UserError(
            "custom.factory",
            f"{_key(loaded)} gives a {type(model).__name__}: it must return a hetero_mpi.LayeredModel (docs/python.md)",
        )
    source = Path(module.__file__) if module.__file__ is not None else None
    return model, hashlib.sha256(source.read_bytes()).hexdigest() if source is not None else ""


def _imported(loaded: LoadedJob, name: str) -> ModuleType:
    """The module, from the job's folder or the Python path."""
    folder = str(loaded.directory)
    if folder not in sys.path:
        sys.path.append(folder)  # last, so that it hides nothing; and it stays: the module may import others later
    top = name.partition(".")[0]
    try:
        with seeded(loaded.job.train.seed, "module"):
            module = _own_code(loaded, lambda: importlib.import_module(name))
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise UserError("custom.import", f"{_key(loaded)}: {error}; install it on every machine") from error
        raise UserError(
            "custom.import",
            f"{_key(loaded)}: there is no module {error.name} in {folder} nor on the Python path: "
            f"put the file beside the job file, on every machine, or set PYTHONPATH",
        ) from None
    own = [path for path in (loaded.directory / f"{top}.py", loaded.directory / top / "__init__.py") if path.exists()]
    loaded_from = getattr(sys.modules[top], "__file__", None)
    if own and loaded_from is not None and Path(loaded_from).resolve() != own[0].resolve():
        raise UserError(
            "custom.import", f"{_key(loaded)}: Python has another module {top} already, {loaded_from}: rename {own[0]}"
        )
    return module


def _data(loaded: LoadedJob, what: str, give: Any) -> Any:
    if not callable(give):
        raise UserError(
            "samples.factory",
            f"LayeredModel.{what} is a {type(give).__name__}: give a function that returns the samples",
        )
    data = _own_code(loaded, give)
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise UserError(
            "samples.factory",
            f"LayeredModel.{what} gives a {type(data).__name__}: it must have a length and give a pair (input, target) under each "
            f"number, as a list or a data set of torch does",
        )
    return data


def _own_code(loaded: LoadedJob, call: Any) -> Any:
    """Call the user's code. Its exceptions are reported as the user's, with the line."""
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
