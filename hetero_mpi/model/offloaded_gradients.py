"""Gradients of an offloaded stage: fp32 sums in host memory that are on the device only during a layer's backward.

The sums are copied to the device before a layer's backward (from a step's second micro-batch on) and back afterwards; both copies
overlap with computation. Gradients are therefore added in the same order as in a resident stage, and never on the CPU.
"""

from collections.abc import Iterable, Mapping
from functools import partial

import torch
from torch import nn

from hetero_mpi.device.backend import Backend, Copied
from hetero_mpi.planning.types.sizes import OFFLOADED_LAYER_COUNT

_ALIGNED_FLOAT_COUNT = 16
"""Alignment of gradients in a flat buffer, in floats: one cache line."""


def flat_layout(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Return (offsets of gradients with the given ``sizes`` in a flat buffer, its length), in floats; equal on all ranks."""
    starts, length = [], 0
    for size in sizes:
        starts.append(length)
        length += -(-size // _ALIGNED_FLOAT_COUNT) * _ALIGNED_FLOAT_COUNT
    return starts, length


class OffloadedGradients:
    """A stage's gradients in host memory.

    Attributes:
        flat: maps each layer to the flat buffer that holds the gradients of its trained parameters.
        views: maps each parameter name to a view of the parameter's gradient.
        tied: gradient of the head's copy of a tied matrix; None if the stage has no such copy.
    """

    def __init__(
        self, backend: Backend, layers: Mapping[int, Mapping[str, nn.Parameter]], tied_head: nn.Parameter | None
    ) -> None:
        """Allocate the buffers. ``layers`` maps each layer to its trained parameters by name."""
        self.flat: dict[int, torch.Tensor] = {}
        self.views: dict[str, torch.Tensor] = {}
        self.tied: torch.Tensor | None = None
        self._parts: dict[int, list[torch.Tensor]] = {}
        """Maps each layer to the buffers that are copied, one after the other, to its slot on the device."""
        for layer, parameters in layers.items():
            starts, length = flat_layout(parameter.numel() for parameter in parameters.values())
            self.flat[layer] = backend.host_buffer((length,), torch.float32).zero_()
            self._parts[layer] = [self.flat[layer]]
            for (name, parameter), start in zip(parameters.items(), starts, strict=True):
                self.views[name] = self.flat[layer][start : start + parameter.numel()].view(parameter.shape)
                parameter.register_post_accumulate_grad_hook(partial(self._add_gradient, start))
        if tied_head is not None:
            self.tied = backend.host_buffer(tied_head.shape, torch.float32).zero_()
            last = max(layers)
            tied_head.register_post_accumulate_grad_hook(partial(self._add_gradient, len(self.flat[last])))
            self._parts[last].append(self.tied.view(-1))
        self._copying = backend.copying()  # one stream: a slot is copied out before it is overwritten
        longest = max((sum(map(len, parts)) for parts in self._parts.values()), default=0)
        self._slots = [
            torch.zeros(longest, dtype=torch.float32, device=backend.device) for _ in range(OFFLOADED_LAYER_COUNT)
        ]
        self._in_slot: list[int | None] = [None] * OFFLOADED_LAYER_COUNT
        self._copied = [Copied()] * OFFLOADED_LAYER_COUNT
        """The last copy into or out of each slot."""
        self._computing = 0
        self._layers_without_gradients = set(self._parts)
        """Layers that have no gradients yet in this step."""

    def zero(self) -> None:
        """Treat all gradients as zero; called at the end of a step."""
        self._layers_without_gradients = set(self._parts)

    def start_layer(self, layer: int) -> None:
        """Make a layer's sums available for its backward, and prefetch those of the previous layer, whose backward is next."""
        if layer not in self._in_slot:
            self._fetch(layer)
        self._computing = self._in_slot.index(layer)
        self._copied[self._computing].hold_compute()
        if layer in self._layers_without_gradients:
            self._slots[self._computing].zero_()
        if layer - 1 in self._parts:
            self._fetch(layer - 1)

    def finish_layer(self, layer: int) -> None:
        """Start copying a layer's sums to the host, once its backward has been submitted to the device."""
        self._copying.after_compute()
        self._copy(layer, self._computing, leaves=True)
        self._layers_without_gradients.discard(layer)
        self._in_slot[self._computing] = None

    def wait(self, newest: bool = True) -> None:
        """Wait until all gradients are in host memory; with ``newest=False``, do not wait for the last finished layer."""
        for slot, copied in enumerate(self._copied):
            if newest or slot != self._computing:
                copied.wait()

    def _fetch(self, layer: int) -> None:
        slot = (self._computing + 1) % OFFLOADED_LAYER_COUNT
        self._in_slot[slot] = layer
        if layer not in self._layers_without_gradients:
            self._copy(layer, slot, leaves=False)

    def _copy(self, layer: int, slot: int, leaves: bool) -> None:
        begin = 0
        for buffer in self._parts.get(layer, ()):
            slot_view = self._slots[slot][begin : begin + len(buffer)]
            self._copied[slot] = self._copying.copy(*((buffer, slot_view) if leaves else (slot_view, buffer)))
            begin += len(buffer)

    def _add_gradient(self, start: int, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        self._slots[self._computing][start : start + parameter.numel()].view(parameter.shape).add_(parameter.grad)
        parameter.grad = None
