"""Gradient-ready hooks, which start reducing a layer's gradients while backward still runs, and the split backward.

The input part of a split backward computes the gradient that the previous stage waits for, and all other gradients except those of
linear layers' weight matrices. The weight part computes these at any later time (Qi et al. 2023, arXiv:2401.10241; see its
WeightGradStore). Matrices that are not used by linear layers, such as fused experts, belong to the input part.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial, reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import Node

from hetero_mpi.model.layer.interface import LayerChain

Finished = Callable[[int], None]
"""Called with the index of a layer whose gradients are final. On accelerators autograd calls it on its own thread, where device
work is ordered after the gradients, while the caller of backward waits."""


class Beginnings:
    """Records the autograd node at which each layer of a stage begins.

    Autograd runs ready nodes in the reverse order of their creation. When backward runs the node that created a layer's input, all
    nodes created later are done, so the layer's gradients are final.
    """

    def __init__(self, chain: LayerChain, model: nn.Module, first: int, last: int) -> None:
        """Watch the layers ``[first, last)``. The first layer needs no node: it is done when backward ends."""
        self._nodes: dict[int, Node] | None = None
        for layer in range(first + 1, last):
            for name in chain.module_names(layer):
                module = model.get_submodule(name)
                module.register_forward_pre_hook(partial(self._note, layer), with_kwargs=True)

    def start(self) -> None:
        """Start recording before a forward; recomputation is not recorded."""
        self._nodes = {}

    def stop(self) -> dict[int, Node]:
        """Stop recording and return a map from each layer to the node that created its input."""
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
    """Reports each of ``layers`` once to ``finished``, in reverse order. If ``finished`` is None, nothing is reported."""

    def __init__(self, layers: Iterable[int], finished: Finished | None) -> None:
        self._waiting = sorted(layers) if finished is not None else []
        self._finished = finished

    def follow(self, nodes: Mapping[int, Node]) -> None:
        """Report layers while backward runs through ``nodes``."""
        for layer, node in nodes.items() if self._waiting else ():
            node.register_prehook(lambda gradients, layer=layer: self.down_to(layer))

    def down_to(self, layer: int) -> None:
        """Report ``layer`` and all later layers."""
        while self._finished is not None and self._waiting and self._waiting[-1] >= layer:
            self._finished(self._waiting.pop())


Entry = tuple[nn.Parameter, torch.Tensor, torch.Tensor]
"""(weight (O, I), input (..., I), gradient of the output (..., O))."""


class WeightGradients:
    """The tensors that the weight parts of a stage's micro-batches still need."""

    def __init__(self) -> None:
        self.adders: dict[nn.Parameter, Callable[[torch.Tensor], object]] = {}
        """Maps a parameter to the function that receives its gradients instead of ``grad``."""
        self._kept: dict[int, dict[int, list[Entry]]] = {}
        self._running: dict[int, list[Entry]] = {}

    def watch(self, module: nn.Linear, layer: int) -> None:
        """Make backward defer the weight gradient of ``module``, which belongs to ``layer``."""
        # The instance attribute takes precedence over the class's method and leaves parameters and names unchanged.
        module.forward = partial(self._forward, module, layer)

    def start_micro_batch(self, index: int) -> None:
        """Start the input part of a micro-batch; entries stored from now on belong to it."""
        assert index not in self._kept, f"the weight part of micro-batch {index} has not run"
        self._running = self._kept[index] = {}

    def detach_from(self, borrowed: Iterable[torch.Tensor | None]) -> None:
        """Copy entries of the current micro-batch that use ``borrowed`` buffers, which are overwritten after the input part."""
        buffers = {tensor.untyped_storage().data_ptr() for tensor in borrowed if tensor is not None}
        copies: dict[tuple[int, torch.Size, tuple[int, ...]], torch.Tensor] = {}

        def with_own_buffer(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.untyped_storage().data_ptr() not in buffers:
                return tensor
            key = (tensor.data_ptr(), tensor.shape, tensor.stride())
            if key not in copies:
                copies[key] = tensor.clone()
            return copies[key]

        for entries in self._running.values():
            entries[:] = [(weight, with_own_buffer(x), with_own_buffer(dy)) for weight, x, dy in entries]

    def forget(self) -> None:
        """Drop all entries; their weight parts will not run."""
        self._kept.clear()
        self._running = {}

    def compute(self, index: int, finished: Finished | None = None) -> None:
        """Run a micro-batch's weight part in reverse layer order, freeing its entries layer by layer."""
        layers = self._kept.pop(index, {})
        for layer in sorted(layers, reverse=True):
            uses: dict[nn.Parameter, list[tuple[torch.Tensor, torch.Tensor]]] = {}
            for weight, x, dy in layers.pop(layer):
                uses.setdefault(weight, []).append((x, dy))
            for weight, pairs in uses.items():
                # The gradients of a layer that is called several times are added before accumulation, as in autograd.
                gradient = reduce(torch.add, (dy.flatten(0, -2).t().mm(x.flatten(0, -2)) for x, dy in pairs))
                # At once, while the gradient is in the cache.
                if weight in self.adders:
                    self.adders[weight](gradient)
                elif weight.grad is None:
                    weight.grad = gradient
                else:
                    weight.grad.add_(gradient)
            if finished is not None:
                finished(layer)

    def bytes_by_layer(self) -> dict[int, int]:
        """Map each layer to the bytes of its entries over all micro-batches; a storage used by several layers counts once."""
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
        """Run a linear layer with a detached weight; the gradients of input and bias equal autograd's bitwise."""
        if not (torch.is_grad_enabled() and x.requires_grad):
            return F.linear(x, module.weight, module.bias)
        y = F.linear(x, module.weight.detach(), module.bias)
        return _StoreGradient.apply(y, x.detach(), (self, layer, module))

    def store_entry(self, layer: int, entry: Entry) -> None:
        """Add an entry to the current micro-batch; called by backward."""
        self._running.setdefault(layer, []).append(entry)


class _StoreGradient(torch.autograd.Function):
    """Identity on a linear layer's output, whose backward passes (input, gradient of the output) to the store.

    Saving the input through autograd lets activation checkpointing free it.
    """

    @staticmethod
    def forward(
        ctx: Any, y: torch.Tensor, x: torch.Tensor, destination: tuple[WeightGradients, int, nn.Linear]
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.destination = destination
        return y.detach()  # not ``y`` itself: layers may change a linear layer's output in place

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        store, layer, module = ctx.destination
        store.store_entry(layer, (module.weight, ctx.saved_tensors[0], dy))
        return dy, None, None
