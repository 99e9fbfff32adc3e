"""When a layer's gradients are whole, so that their sums over the pipelines may start while backward still runs; and weight
gradients of linear layers that wait: the backward of a micro-batch in two parts.

The input part computes what the previous stage waits for, and with it the gradients of everything that is not a matrix of a
linear layer. The weight part, at any later time, computes the matrices' gradients (Qi et al. 2023, arXiv:2401.10241, whose
WeightGradStore this is in other words). Matrices used in another way, such as fused experts, simply belong to the input part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial, reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import Node

from hetero_mpi.model.layer.interface import LayerChain

Finished = Callable[[int], None]
"""A function that is told the number of a layer whose parameters' gradients are whole. On accelerators autograd calls it from a
thread of its own, in which work for the device follows that of the gradients; the caller of backward waits meanwhile."""


class Beginnings:
    """Notes where in autograd's graph each layer of a stage begins.

    The node that made a layer's input runs in backward when nothing later in the forward is left to do, since autograd runs
    ready nodes in the reverse order of their making. So the layer's gradients are whole then, whatever took part in them.
    """

    def __init__(self, chain: LayerChain, model: nn.Module, first: int, last: int) -> None:
        """Watch the layers ``[first, last)``; the first one ends with backward itself."""
        self._nodes: dict[int, Node] | None = None
        for layer in range(first + 1, last):
            for name in chain.module_names(layer):
                module = model.get_submodule(name)
                module.register_forward_pre_hook(partial(self._note, layer), with_kwargs=True)

    def start(self) -> None:
        """A forward begins. (What runs outside of one, such as recomputation, is not noted.)"""
        self._nodes = {}

    def stop(self) -> dict[int, Node]:
        """The forward is over: layer -> the node that made its input."""
        nodes, self._nodes = self._nodes, None
        assert nodes is not None
        return nodes

    def _note(self, layer: int, module: nn.Module, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        if self._nodes is None or layer in self._nodes:
            return
        x = arguments[0] if arguments else keywords.get("hidden_states")
        if isinstance(x, torch.Tensor) and x.grad_fn is not None:
            self._nodes[layer] = x.grad_fn


class GradientReadyHooks:
    """Reports each of ``layers`` once, the last first; where ``finished`` is None, to nobody."""

    def __init__(self, layers: Iterable[int], finished: Finished | None) -> None:
        self._waiting = sorted(layers) if finished is not None else []
        self._finished = finished

    def follow(self, nodes: Mapping[int, Node]) -> None:
        """Report while the backward through ``nodes`` runs."""
        for layer, node in nodes.items() if self._waiting else ():
            node.register_prehook(lambda gradients, layer=layer: self.down_to(layer))

    def down_to(self, layer: int) -> None:
        """Everything from ``layer`` on is whole."""
        while self._finished is not None and self._waiting and self._waiting[-1] >= layer:
            self._finished(self._waiting.pop())


Entry = tuple[nn.Parameter, torch.Tensor, torch.Tensor]
"""(weight (O, I), input (..., I), gradient of the output (..., O))"""


class WeightGradients:
    """The tensors that the weight parts of a stage's micro-batches still need."""

    def __init__(self) -> None:
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
        return _Keep.apply(y, x.detach(), (self, layer, module))

    def keep(self, layer: int, entry: Entry) -> None:
        """Called by backward."""
        self._running.setdefault(layer, []).append(entry)


class _Keep(torch.autograd.Function):
    """The identity of a linear layer's output, whose backward hands (input, gradient of the output) to the store.

    The input is saved as autograd saves things, so that it does not stay in memory when a block is recomputed.
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
