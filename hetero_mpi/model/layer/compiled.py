"""Compiled blocks: ``torch.compile`` of each block's forward, with compiled code shared by equal blocks (regional compilation).

    micro-batches of 1 sequence     one graph
    micro-batches of 2, 3, ...      one graph for any number of sequences, with kernels chosen for ``_HINT_ROW_COUNT``
    packed records                  eager, because record bounds are tensor values

Kernels depend only on shapes, not on measurements or earlier micro-batches, so equal blocks give bitwise equal results in any plan.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

_LOG = logging.getLogger(__name__)
_HINT_ROW_COUNT = 8
_MAX_GRAPHS = 64
"""Maximum number of graphs, for different sizes, kinds of layers and masks, and for training and evaluation."""
_OPTIONS = "deterministic", "fallback_random"
"""Options of torch's compiler: choose kernels without measurements, and draw the random numbers of eager blocks."""


class CompiledForward:
    """A block's ``forward``, compiled at its first call. ``failure`` says why it runs eagerly; empty if it is compiled."""

    def __init__(self, forward: Callable[..., Any], is_packed: Callable[[], bool]) -> None:
        """Prepare compilation. ``is_packed`` returns whether the current micro-batch has packed records."""
        # Only attributes of ``torch``, because ``eager_imports`` defers the import of the compiler to their use.
        torch._dynamo.config.recompile_limit = _MAX_GRAPHS
        supported = torch._inductor.list_options()
        options: dict[str, Any] = {name: True for name in _OPTIONS if name in supported}
        self.failure, self._forward, self._is_packed = "", forward, is_packed
        self._compiled = torch.compile(forward, fullgraph=True, dynamic=False, options=options)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        if self.failure or self._is_packed():
            return self._forward(*arguments, **keywords)
        leaves = torch.utils._pytree.tree_leaves((arguments, keywords))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim]
        for tensor in tensors:
            if len(tensor) == len(tensors[0]) > 1:
                torch._dynamo.mark_dynamic(tensor, 0, hint_override=_HINT_ROW_COUNT)
        try:
            return self._compiled(*arguments, **keywords)
        except (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit) as error:
            self.failure = compiler_failure(error)
            _LOG.warning("a block runs eagerly from now on, because compiling it failed: %s", self.failure)
        return self._forward(*arguments, **keywords)


def compiler_failure(error: BaseException) -> str:
    """Return the type and the first line of a compiler error."""
    inner = getattr(error, "inner_exception", error)
    return f"{type(inner).__name__}: {str(inner).strip().partition(chr(10))[0]}"
