"""Weight gradients of linear layers that wait: the backward of a micro-batch in two parts.

The input part computes what the previous stage waits for, and with it the gradients of everything that is not a matrix of a
linear layer. The weight part, at any later time, computes the matrices' gradients (Qi et al. 2023, arXiv:2401.10241, whose
WeightGradStore this is in other words). Matrices used in another way, such as fused experts, simply belong to the input part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial, reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hetero_mpi.model.layer.gradient_ready import Finished

Entry = tuple[nn.Parameter, torch.Tensor, torch.Tensor]
"""(weight (O, I), input (..., I), gradient of the output (..., O))"""


class WeightGradients:
    """What the weight parts of a stage's micro-batches still need."""

    def __init__(self, recompute: bool = False) -> None:
        """``recompute``: the layers lie in blocks that run again in backward."""
        self.recompute = recompute
        self.adders: dict[nn.Parameter, Callable[[torch.Tensor], object]] = {}
        """Parameters whose gradients are not added to their ``grad`` but given to a function."""
        self._kept: dict[int, dict[int, list[Entry]]] = {}
        self._running: dict[int, list[Entry]] = {}

    def watch(self, module: nn.Linear, layer: int) -> None:
        """From now on keep what the weight gradient of ``module``, part of ``layer``, needs instead of computing it."""
        # The attribute of the instance stands before the method of the class; the module's parameters and names stay as they are.
        module.forward = partial(self._forward, module, layer)

    def begin(self, index: int) -> None:
        """The input part of a micro-batch starts: what is kept from here on is its own."""
        assert index not in self._kept, f"the weight part of micro-batch {index} has not run"
        self._running = self._kept[index] = {}

    def detach_from(self, borrowed: Iterable[torch.Tensor | None]) -> None:
        """Copy what the running micro-batch keeps of buffers that their owner overwrites after the input part."""
        buffers = {tensor.untyped_storage().data_ptr() for tensor in borrowed if tensor is not None}
        copies: dict[tuple[int, torch.Size, tuple[int, ...]], torch.Tensor] = {}

        def own(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.untyped_storage().data_ptr() not in buffers:
                return tensor
            key = (tensor.data_ptr(), tensor.shape, tensor.stride())
            if key not in copies:
                copies[key] = tensor.clone()
            return copies[key]

        for entries in self._running.values():
            entries[:] = [(weight, own(x), own(dy)) for weight, x, dy in entries]

    def forget(self) -> None:
        """Drop what is kept: the weight parts will not come."""
        self._kept.clear()
        self._running = {}

    def compute(self, index: int, finished: Finished | None = None) -> None:
        """The weight part of a micro-batch, last layer first; frees what it needed layer by layer."""
        layers = self._kept.pop(index, {})
        for layer in sorted(layers, reverse=True):
            uses: dict[nn.Parameter, list[tuple[torch.Tensor, torch.Tensor]]] = {}
            for weight, x, dy in layers.pop(layer):
                uses.setdefault(weight, []).append((x, dy))
            for weight, pairs in uses.items():
                # A layer called several times: its shares are added before they are accumulated, in autograd's order.
                gradient = reduce(torch.add, (dy.flatten(0, -2).t().mm(x.flatten(0, -2)) for x, dy in pairs))
                self._accumulate(weight, gradient)
            if finished is not None:
                finished(layer)

    def _accumulate(self, weight: nn.Parameter, gradient: torch.Tensor) -> None:
        """As autograd does it: at once, while the gradient is in the processor's cache."""
        if weight in self.adders:
            self.adders[weight](gradient)
        elif weight.grad is None:
            weight.grad = gradient
        else:
            weight.grad.add_(gradient)

    def bytes_by_layer(self) -> dict[int, int]:
        """Bytes that wait now, of all micro-batches, by layer; a storage shared by several layers counts once."""
        storages = {
            tensor.untyped_storage().data_ptr(): (layer, tensor.untyped_storage().nbytes())
            for layers in self._kept.values()
            for layer, entries in layers.items()
            for _, x, dy in entries
            for tensor in (x, dy)
        }
        holders = {layer for layer, _ in storages.values()}
        return {layer: sum(size for holder, size in storages.values() if holder == layer) for layer in holders}

    def _forward(self, module: nn.Linear, layer: int, x: torch.Tensor) -> torch.Tensor:
        """The layer in torch's own way, on a weight that needs no gradient: input and bias have theirs to the usual bit."""
        if not (torch.is_grad_enabled() and x.requires_grad):
            return F.linear(x, module.weight, module.bias)
        y = F.linear(x, module.weight.detach(), module.bias)
        if self.recompute:
            return _Keep.apply(y, x.detach(), (self, layer, module))
        kept = x.detach()
        y.register_hook(lambda dy: self.keep(layer, (module.weight, kept, dy)))
        return y

    def keep(self, layer: int, entry: Entry) -> None:
        """Called by backward."""
        self._running.setdefault(layer, []).append(entry)


class _Keep(torch.autograd.Function):
    """The identity of a linear layer's output, whose backward hands (input, gradient of the output) to the store.

    A hook on the output does so in less time, but its input would stay in memory when a block is recomputed. Here the input is
    saved as autograd saves things.
    """

    @staticmethod
    def forward(
        ctx: Any, y: torch.Tensor, x: torch.Tensor, place: tuple[WeightGradients, int, nn.Linear]
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.place = place
        return y.detach()  # not ``y`` itself: layers may change a linear layer's output in place

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        store, layer, module = ctx.place
        store.keep(layer, (module.weight, ctx.saved_tensors[0], dy))
        return dy, None, None
