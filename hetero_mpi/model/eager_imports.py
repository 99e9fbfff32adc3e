"""Importing torch and transformers as a rank needs them, which computes eagerly and talks by MPI.

transformers imports torch's compiler (``torch._dynamo``: 820 modules with sympy) for one class and three marks on functions, and
``torch.distributed.tensor`` wherever torch has it. No rank uses either, and the two are a quarter of a rank's start.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"
_MASKS = f"{_COMPILER}._trace_wrapped_higher_order_op"
"""The one module of the compiler's package that transformers' masks take a class from."""
_MARKS = {"allow_in_graph", "assume_constant_result", "disable", "graph_break"}
"""Words to the compiler, on a function or (AdamW's step) in the middle of one: no effect where nothing is compiled."""


@contextmanager
def eager_imports() -> Iterator[None]:
    """Imports in here take a third less time. The process gets to keep a stand-in for the compiler, which gives way to the real
    one at the first use (a user's model may call ``torch.compile``), and a transformers without ``torch.distributed``.
    """
    gc.disable()  # 2,000 modules are no garbage, yet collections would take a tenth of the time
    try:
        import torch

        if _COMPILER not in sys.modules:
            _stand_in(torch)
            _leave_out_distributed(torch)
        yield
    finally:
        gc.enable()
        gc.freeze()  # nor need later collections look at them


class _NotYet(ModuleType):
    """Stands for a module until more than its marks is asked of it."""

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(spec.name)
        self.__spec__, self.__file__ = spec, spec.origin

    def __getattr__(self, name: str) -> Any:
        if name in _MARKS:
            return _unmarked
        if (
            name.startswith("__") and name != "__path__"
        ):  # whoever looks at all modules; a path, who imports a part of this one
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def _unmarked(function: Any = None, *_: Any, **__: Any) -> Any:
    return _unmarked if function is None else function


def _stand_in(torch: ModuleType) -> None:
    """Another torch may have another compiler: then it is imported as ever."""
    compiler = PathFinder.find_spec(_COMPILER, torch.__path__)
    masks = PathFinder.find_spec(_MASKS, compiler.submodule_search_locations) if compiler is not None else None
    if compiler is None or masks is None or masks.loader is None:
        return
    sys.modules[_COMPILER] = _NotYet(compiler)
    sys.modules[_MASKS] = module = module_from_spec(masks)
    try:
        masks.loader.exec_module(module)
    except ImportError:
        del sys.modules[_COMPILER], sys.modules[_MASKS]


def _leave_out_distributed(torch: Any) -> None:
    """transformers asks once whether torch was built with it, and remembers the answer."""
    known, torch.distributed.is_available = torch.distributed.is_available, lambda: False
    try:
        from transformers.utils import is_torch_distributed_available

        is_torch_distributed_available()
    finally:
        torch.distributed.is_available = known
