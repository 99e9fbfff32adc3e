"""The operations that torch dispatches, counted on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Operations(TorchDispatchMode):
    """Name, shape of the last output, and bytes read and written of each operation but views."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[int, ...], int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, made)) if isinstance(leaf, torch.Tensor)]
        if not func.is_view:
            shape = tuple(tensors[-1].shape) if tensors else ()
            self.calls.append((func.overloadpacket.__name__, shape, sum(tensor.nbytes for tensor in tensors)))
        return made

    def count(self, name: str) -> int:
        return sum(called == name for called, _, _ in self.calls)

    @property
    def moved_bytes(self) -> int:
        return sum(moved for _, _, moved in self.calls)
