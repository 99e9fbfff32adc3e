"""Tells, while backward still runs, which layers' gradients are whole: their sums over the pipelines may start."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from hetero_mpi.model.layer.interface import LayerChain

Finished = Callable[[int], None]
"""Is told the number of a layer whose parameters' gradients are whole. On accelerators autograd calls it from a thread of its own,
in which work for the device follows that of the gradients; the caller of backward waits meanwhile."""


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
    """Reports each of ``layers`` once, the last first."""

    def __init__(self, layers: Iterable[int], finished: Finished) -> None:
        self._waiting = sorted(layers)
        self._finished = finished

    def follow(self, nodes: Mapping[int, Node]) -> None:
        """Report while the backward through ``nodes`` runs."""
        for layer, node in nodes.items():
            node.register_prehook(lambda gradients, layer=layer: self.down_to(layer))

    def down_to(self, layer: int) -> None:
        """Everything from ``layer`` on is whole."""
        while self._waiting and self._waiting[-1] >= layer:
            self._finished(self._waiting.pop())
