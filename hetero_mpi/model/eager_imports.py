"""Faster import of torch and transformers for ranks, which compute eagerly and communicate by MPI.

transformers imports torch's compiler (``torch._dynamo``: 820 modules with sympy) for one class and three decorators, and
``torch.distributed.tensor`` if torch has it. No rank uses either, and both take a quarter of a rank's start.
"""

from __future__ import annotations

import functools
import gc
import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from types import FunctionType, ModuleType
from typing import Any

_COMPILER = "torch._dynamo"
_PARTS = ("config", "_trace_wrapped_higher_order_op")
"""Independent modules of the compiler's package: activation checkpointing reads its settings, transformers' masks use a class."""
_MARKS = {"allow_in_graph", "assume_constant_result", "disable", "graph_break"}
"""Compiler directives, as decorators or (in AdamW's step) calls; without effect in eager code."""

logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
"""Silences an irrelevant hint at a package with faster 4-bit products when peft imports bitsandbytes."""


@contextmanager
def eager_imports() -> Iterator[None]:
    """Context in which imports take a third less time.

    Afterwards the process has a lazy stand-in for the compiler, which imports the real one on first use (a user's model may call
    ``torch.compile``), and a transformers without ``torch.distributed``.
    """
    gc.disable()  # 2,000 modules are not garbage, yet collections would take 10 % of the time
    try:
        import torch

        if _COMPILER not in sys.modules:
            _stand_in(torch)
            torch.compile = _compile_late(torch.compile)
            _leave_out_distributed(torch)
        yield
    finally:
        gc.enable()
        gc.freeze()  # later collections skip these modules


class _NotYet(ModuleType):
    """Stand-in for a module until an attribute other than its directives is used."""

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(spec.name)
        self.__spec__, self.__file__ = spec, spec.origin

    def __getattr__(self, name: str) -> Any:
        if name in _MARKS:
            return _unmarked
        if (
            name.startswith("__") and name != "__path__"
        ):  # asked of all modules by inspection; ``__path__`` by imports of submodules
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def _compile_late(compile_now: Callable[..., Any]) -> Callable[..., Any]:
    """Defer torch's ``compile`` of a function, and with it the compiler's import, to the function's first call.

    bitsandbytes compiles kernels on import, and devices use few of them.
    """

    @functools.wraps(compile_now)
    def compile_(model: Any = None, **options: Any) -> Any:
        if model is None:
            return lambda function: compile_(function, **options)
        if not isinstance(model, FunctionType):
            return compile_now(model, **options)
        compiled = functools.cache(lambda: compile_now(model, **options))
        return functools.wraps(model)(lambda *arguments, **named: compiled()(*arguments, **named))

    return compile_


def _unmarked(function: Any = None, *_: Any, **__: Any) -> Any:
    return _unmarked if function is None else function


def _stand_in(torch: ModuleType) -> None:
    """Install the stand-in for the compiler, unless this version of torch has a different compiler."""
    compiler = PathFinder.find_spec(_COMPILER, torch.__path__)
    if compiler is None:
        return
    names = {part: f"{_COMPILER}.{part}" for part in _PARTS}
    sys.modules[_COMPILER] = package = _NotYet(compiler)
    try:
        for part, name in names.items():
            spec = PathFinder.find_spec(name, compiler.submodule_search_locations)
            if spec is None or spec.loader is None:
                raise ImportError(name)
            sys.modules[name] = module = module_from_spec(spec)
            spec.loader.exec_module(module)
            setattr(package, part, module)
    except ImportError:
        for name in (_COMPILER, *names.values()):
            sys.modules.pop(name, None)


def _leave_out_distributed(torch: ModuleType) -> None:
    """Make transformers cache the answer that torch has no ``torch.distributed``."""
    is_available, torch.distributed.is_available = torch.distributed.is_available, lambda: False
    try:
        from transformers.utils import is_torch_distributed_available

        is_torch_distributed_available()
    finally:
        torch.distributed.is_available = is_available
