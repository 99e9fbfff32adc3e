"""Looks at a user's layers once, on rank 0: shapes, and whether splitting them over ranks and micro-batches keeps the numbers.

Layers are built one at a time and run on two real samples on the CPU, so that what would go wrong later, on another rank or
unnoticed, is said before anything is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from hetero_mpi.model.custom.custom_chain import REMEDY, LayerShape, build_layer, sampled, shapes_of, unlike
from hetero_mpi.model.custom.layered_model import Builder, LayeredModel, check_not_shared, shared
from hetero_mpi.model.layer.interface import as_input, embedding_matrices, seeded
from hetero_mpi.util.errors import UserError

_ALIKE = 1e-4
"""Relative difference below which two ways to compute the same count as equal."""
Pair = tuple[NDArray[Any], NDArray[Any]]


def checked_layers(model: LayeredModel, pairs: tuple[Pair, Pair], seed: int) -> tuple[LayerShape, ...]:
    """Each layer's description.

    :raises UserError: with the layer, the rule it breaks and what to do.
    """
    _check_names(model)
    if model.existing:
        check_not_shared(model)
    x, targets = (as_input(np.stack(arrays)) for arrays in zip(*pairs, strict=True))
    shapes = []
    names = list(model.named_layers())
    for name, builder in model.named_layers().items():
        if not model.existing:
            _check_built_inside(name, model, seed)
        shape, x = _look(name, builder, x, seed, last=name == names[-1])
        if model.existing:  # builders have the buffers' values only
            shape = replace(shape, start={inner: shape.start[inner] for inner in shape.buffers})
        shapes.append(shape)
    _check_loss(model, x, targets)
    return tuple(shapes)


def _check_names(model: LayeredModel) -> None:
    layers = model.named_layers()
    if len(layers) < 2:
        raise UserError(
            "custom.too_few_layers",
            f"LayeredModel.layers has {len(layers)} layer(s): a chain that can be cut has at least two",
        )
    taken = nn.Sequential()
    for name, builder in layers.items():
        if not isinstance(name, str) or not name or "." in name or hasattr(taken, name):
            raise UserError(
                "custom.layer_name",
                f"LayeredModel.layers: {name!r} cannot be the name of a layer: choose a word without dots",
            )
        if isinstance(builder, nn.Module) or not callable(builder):
            raise UserError(
                "custom.builder_result",
                f"LayeredModel.layers: layer {name!r} is a {type(builder).__name__}: give a function that builds it, such as "
                f"lambda: torch.nn.Linear(8, 8), so that each rank builds only its own layers; or hand over a model that is there "
                f"already as a whole, as one torch.nn.Sequential",
            )


def _check_built_inside(name: str, model: LayeredModel, seed: int) -> None:
    """Every call of the builder must make the layer anew, and with the same start values."""
    builders = model.named_layers()
    one, other = (build_layer(name, builders[name], seed) for _ in range(2))
    addresses = {parameter.data_ptr() for parameter in one.parameters() if parameter.numel()}
    outside = next((inner for inner, parameter in other.named_parameters() if parameter.data_ptr() in addresses), None)
    if outside is not None:
        for second in builders.keys() - {name}:
            for inner, parameter in build_layer(second, builders[second], seed).named_parameters():
                if parameter.data_ptr() in addresses:
                    raise shared(name, second, inner)
        raise UserError(
            "custom.builder_repeats",
            f"layer {name!r} was built outside its builder: parameter {outside} is the same tensor at every call, so each process "
            f"would start from weights of its own. {REMEDY}",
        )
    drawn = unlike(sampled(one), sampled(other))
    if drawn is not None:
        raise UserError(
            "custom.builder_repeats",
            f"layer {name!r} starts from other values at every call of its builder ({drawn}): runs could not be repeated, and "
            f"ranks would differ. {REMEDY}",
        )


def _look(name: str, builder: Builder, x: torch.Tensor, seed: int, last: bool) -> tuple[LayerShape, torch.Tensor]:
    """The layer's shape, and what it makes of two samples ``x``."""
    layer = build_layer(name, builder, seed)
    if any(isinstance(module, _BatchNorm) for module in layer.modules()):
        raise UserError(
            "custom.batch_dependent",
            f"layer {name!r} normalises over the batch: its result would depend on the size of the micro-batches, which the "
            f"plan decides. Use torch.nn.GroupNorm, LayerNorm or InstanceNorm2d instead",
        )
    buffers = {inner: buffer.clone() for inner, buffer in layer.named_buffers()}
    given = x.clone()
    version = given._version
    y, draws = _run(name, layer, given, seed)
    if given._version != version:
        raise UserError(
            "custom.in_place",
            f"layer {name!r} changes its input in place: the tensor may have come from another rank. Its first operation must "
            f"make a new one (inplace=False)",
        )
    _check_output(name, y, last)
    if any(not torch.equal(buffer, buffers[inner]) for inner, buffer in layer.named_buffers()):
        raise UserError(
            "custom.buffers",
            f"layer {name!r} changes its buffers in forward: every rank would have its own statistics. Leave them constant "
            f"(track_running_stats=False), or make them parameters",
        )
    if draws:
        layer.eval()
        y, _ = _run(name, layer, x.clone(), seed)
    alone, _ = _run(name, layer, x[:1].clone(), seed)
    if not _alike(alone, y[:1]):
        raise UserError(
            "custom.batch_dependent",
            f"layer {name!r} makes something else of a sample when another one is beside it: its result would depend on the size "
            f"of the micro-batches, which the plan decides. Each sample must be computed by itself",
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
    """The layer's output, and whether it drew random numbers."""
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


def _check_output(name: str, y: Any, last: bool) -> None:
    if not isinstance(y, torch.Tensor):
        raise UserError(
            "custom.layer_output",
            f"layer {name!r} gives a {type(y).__name__}: every layer takes one tensor and gives one tensor",
        )
    if y.ndim == 0 or len(y) != 2:
        raise UserError(
            "custom.layer_output",
            f"layer {name!r} makes a tensor of shape {tuple(y.shape)} of two samples: the first dimension must count samples",
        )
    if not last and y.dtype != torch.float32:
        raise UserError(
            "custom.layer_output", f"layer {name!r} gives {y.dtype}: tensors between layers are torch.float32"
        )


def _check_loss(model: LayeredModel, outputs: torch.Tensor, targets: torch.Tensor) -> None:
    with torch.no_grad():
        try:
            total, *single = (
                model.loss(outputs[rows], targets[rows]) for rows in (slice(0, 2), slice(0, 1), slice(1, 2))
            )
        except Exception as error:  # as above
            raise UserError(
                "custom.loss",
                f"LayeredModel.loss fails on outputs of shape {tuple(outputs.shape)} and targets of shape {tuple(targets.shape)} "
                f"({targets.dtype}): {type(error).__name__}: {error}",
            ) from error
    if not isinstance(total, torch.Tensor) or total.ndim != 0 or not total.is_floating_point():
        raise UserError(
            "custom.loss",
            'LayeredModel.loss must give a scalar tensor: the sum of the samples\' losses (reduction="sum")',
        )
    if not _alike(total, single[0] + single[1]):
        raise UserError(
            "custom.loss",
            f"LayeredModel.loss must be the sum of the samples' losses: it is {float(total):.6g} for two samples and "
            f'{float(single[0]):.6g} and {float(single[1]):.6g} for each alone; use reduction="sum"',
        )


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    scale = max(float(one.abs().max()), float(other.abs().max())) if one.numel() else 0.0
    return one.shape == other.shape and bool(((one - other).abs() <= _ALIKE * scale + 1e-7).all())
