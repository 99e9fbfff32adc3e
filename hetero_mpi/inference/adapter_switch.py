"""Adapters of a stage that decodes: one for all rows of a pass, or a separate one for each text.

In addition to the adapter with which it was built, a stage can have further adapters. In a pass of texts with different adapters,
the base model's products are computed once. Each adapter's products are computed for all rows, because the bits of a product
depend on its number of rows, and are used only in the rows of its texts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from hetero_mpi.model.layer.interface import ADAPTER_NAME
from hetero_mpi.model.stage import Stage
from hetero_mpi.model.tuning import Tuning, inject

OPENED = ADAPTER_NAME
"""Name of the adapter with which the stage was built, if any. The name "" selects no adapter."""


def add_adapter(stage: Stage, name: str, tuning: Tuning) -> dict[str, nn.Parameter]:
    """Add an adapter to a stage; returns its zero-initialised tensors on this stage by their names in adapter files."""
    assert tuning.adapter is not None and not tuning.parameters
    modules = tuning.modules_in(stage.first, stage.last)
    zeros = lambda tensor_name: torch.zeros(tuning.trainable[tensor_name].shape)  # noqa: E731
    parameters = inject(stage.model, tuning.adapter, modules, [], stage.backend.device, zeros, name)
    for parameter in parameters.values():
        parameter.data = parameter.data.to(stage.dtype)
    return parameters


class AdapterSwitch:
    """Selects the active adapters of a stage. Modules for which an adapter has no tensors compute as the base model."""

    def __init__(self, stage: Stage) -> None:
        self._layers = [module for module in stage.model.modules() if hasattr(module, "lora_A")]
        self._device = stage.backend.device
        self._now: str | None = None

    @property
    def names(self) -> set[str]:
        return {OPENED}.union(*(layer.lora_A for layer in self._layers))

    def turn_to(self, name: str) -> None:
        """Activate an adapter, or none for ""."""
        if name != self._now:
            for layer in self._layers:
                layer._active_adapter = name  # peft's ``set_adapter`` would also change what requires gradients
            self._now = name

    @contextlib.contextmanager
    def of_texts(self, adapters: Sequence[str], lengths: Sequence[int]) -> Iterator[None]:
        """Return a context in which the stage computes packed texts with the adapter of each.

        ``lengths``: number of tokens of each text, then of padding.
        """
        names = [*dict.fromkeys(adapters)]
        if len(names) == 1:
            self.turn_to(names[0])
            yield
            return
        of_rows = [name for name, length in zip([*adapters, ""], lengths, strict=True) for _ in range(length)]
        masks = torch.tensor([[[name == of_row] for of_row in of_rows] for name in names], device=self._device)
        row_masks = dict(zip(names, masks, strict=True))
        self._now = None
        with contextlib.ExitStack() as replaced:
            for layer in self._layers:
                replaced.enter_context(_forward_by(layer, partial(_forward_mixed, layer, layer.forward, row_masks)))
            yield


def _forward_mixed(
    layer: Any, forward: Callable[..., torch.Tensor], row_masks: Mapping[str, torch.Tensor], x: torch.Tensor
) -> torch.Tensor:
    """Compute a LoRA layer: each row has the bits of ``forward`` with its adapter active, but the base layer computes once.

    ``row_masks`` maps each adapter to the rows that use it, (N, 1).
    """
    base = y = layer.base_layer(x)
    with _forward_by(layer.base_layer, lambda _: base.clone()):  # cloned, because ``layer.lora`` adds to it in place
        for name, mask in row_masks.items():
            if name in layer.lora_A:
                assert y.shape[:-1].numel() == len(mask)
                layer._active_adapter = name
                y = torch.where(mask, forward(x), y)
    return y


@contextlib.contextmanager
def _forward_by(module: nn.Module, forward: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Replace a module's ``forward`` in the context."""
    attributes = vars(module)  # those of the instance: a class's ``forward`` is not among them
    before = attributes.get("forward")
    attributes["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del attributes["forward"]
        else:
            attributes["forward"] = before
