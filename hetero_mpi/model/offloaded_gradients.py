"""Gradients of a streamed stage whose fp32 sums are in host memory. A layer's are on the device while its backward computes.

They come before it (from a step's second micro-batch on) and leave after it, beside what the device computes. So they are added up
in the order of a stage that keeps them on its device, and the host's processor adds nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

import torch
from torch import nn

from hetero_mpi.device.backend import Backend, Copied
from hetero_mpi.planning.types.sizes import STREAMED_LAYERS

_ALIGNMENT = 16
"""Floats: every gradient in a flat buffer starts at a cache line."""


def flat_layout(sizes: Iterable[int]) -> tuple[list[int], int]:
    """(where gradients of so many numbers begin in one flat buffer, its length): the same wherever a layer is held."""
    starts, length = [], 0
    for size in sizes:
        starts.append(length)
        length += -(-size // _ALIGNMENT) * _ALIGNMENT
    return starts, length


class OffloadedGradients:
    """The gradients of a stage, in buffers of host memory.

    Attributes:
        flat: layer -> the gradients of its trained parameters, one after the other.
        views: name -> a parameter's gradient in there.
        tied: of the head's copy of a tied matrix; None without one.
    """

    def __init__(
        self, backend: Backend, layers: Mapping[int, Mapping[str, nn.Parameter]], tied_head: nn.Parameter | None
    ) -> None:
        """``layers``: layer -> name -> trained parameter."""
        self.flat: dict[int, torch.Tensor] = {}
        self.views: dict[str, torch.Tensor] = {}
        self.tied: torch.Tensor | None = None
        self._parts: dict[int, list[torch.Tensor]] = {}
        """Layer -> buffers that follow each other in its slot on the device."""
        for layer, parameters in layers.items():
            starts, length = flat_layout(parameter.numel() for parameter in parameters.values())
            self.flat[layer] = backend.host_buffer((length,), torch.float32).zero_()
            self._parts[layer] = [self.flat[layer]]
            for (name, parameter), start in zip(parameters.items(), starts, strict=True):
                self.views[name] = self.flat[layer][start : start + parameter.numel()].view(parameter.shape)
                parameter.register_post_accumulate_grad_hook(partial(self._take, start))
        if tied_head is not None:
            self.tied = backend.host_buffer(tied_head.shape, torch.float32).zero_()
            last = max(layers)
            tied_head.register_post_accumulate_grad_hook(partial(self._take, len(self.flat[last])))
            self._parts[last].append(self.tied.view(-1))
        self._copying = backend.copying()  # one queue: what leaves a slot goes before what comes into it
        longest = max((sum(map(len, parts)) for parts in self._parts.values()), default=0)
        self._slots = [torch.zeros(longest, dtype=torch.float32, device=backend.device) for _ in range(STREAMED_LAYERS)]
        self._in_slot: list[int | None] = [None] * STREAMED_LAYERS
        self._copied = [Copied()] * STREAMED_LAYERS
        """The last copy of every slot."""
        self._computing = 0
        self._fresh = set(self._parts)
        """Layers that have no gradients yet in this step."""

    def zero(self) -> None:
        """All gradients are zero: a step has ended."""
        self._fresh = set(self._parts)

    def begin(self, layer: int) -> None:
        """The backward of a layer begins; that of the one before it comes next."""
        if layer not in self._in_slot:
            self._fetch(layer)
        self._computing = self._in_slot.index(layer)
        self._copied[self._computing].hold_compute()
        if layer in self._fresh:
            self._slots[self._computing].zero_()
        if layer - 1 in self._parts:
            self._fetch(layer - 1)

    def end(self, layer: int) -> None:
        """The backward of a layer has been given to the device."""
        self._copying.after_compute()
        self._copy(layer, self._computing, leaves=True)
        self._fresh.discard(layer)
        self._in_slot[self._computing] = None

    def wait(self, newest: bool = True) -> None:
        """Return when all gradients are in host memory; or all but those of the layer that ended last."""
        for slot, copied in enumerate(self._copied):
            if newest or slot != self._computing:
                copied.wait()

    def _fetch(self, layer: int) -> None:
        slot = (self._computing + 1) % STREAMED_LAYERS
        self._in_slot[slot] = layer
        if layer not in self._fresh:
            self._copy(layer, slot, leaves=False)

    def _copy(self, layer: int, slot: int, leaves: bool) -> None:
        begin = 0
        for buffer in self._parts.get(layer, ()):
            there = self._slots[slot][begin : begin + len(buffer)]
            self._copied[slot] = self._copying.copy(*((buffer, there) if leaves else (there, buffer)))
            begin += len(buffer)

    def _take(self, start: int, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        self._slots[self._computing][start : start + parameter.numel()].view(parameter.shape).add_(parameter.grad)
        parameter.grad = None
