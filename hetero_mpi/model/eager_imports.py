"""Faster import of torch and transformers for ranks, which compute eagerly and communicate through MPI.

transformers imports torch's compiler (``torch._dynamo``: 820 modules, including sympy) for one class and three decorators, and
``torch.distributed.tensor`` if torch provides it. Ranks need neither, and the two take a quarter of a rank's start-up time.
"""

import functools
import gc
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from types import FunctionType, ModuleType
from typing import Any

_COMPILER = "torch._dynamo"
_PARTS = ("config", "_trace_wrapped_higher_order_op")
"""Compiler modules that are loaded anyway: activation checkpointing reads settings, and transformers' masks use a class."""
_MARKS = {"allow_in_graph", "assume_constant_result", "disable", "graph_break"}
"""Compiler directives, used as decorators or (in AdamW's step) as calls; they have no effect on eager code."""


@contextmanager
def eager_imports() -> Iterator[None]:
    """Return a context in which imports take a third less time.

    Afterwards the process has a lazy stand-in for the compiler, which imports the real one on first use (a user's model may call
    ``torch.compile``), and a transformers that does not use ``torch.distributed``.
    """
    gc.disable()  # 2,000 modules are not garbage, yet collections would take 10 % of the time
    try:
        import torch

        if _COMPILER not in sys.modules:
            _stand_in(torch)
            torch.compile = _compile_late(torch.compile)
            # transformers caches the answer that torch has no ``torch.distributed``.
            is_available, torch.distributed.is_available = torch.distributed.is_available, lambda: False
            try:
                from transformers.utils import is_torch_distributed_available

                is_torch_distributed_available()
            finally:
                torch.distributed.is_available = is_available
        yield
    finally:
        gc.enable()
        gc.freeze()  # later collections skip these modules


class _NotYet(ModuleType):
    """Stands in for a module until an attribute that is not a compiler directive is used."""

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(spec.name)
        self.__spec__, self.__file__ = spec, spec.origin

    def __getattr__(self, name: str) -> Any:
        if name in _MARKS:
            return _unmarked
        # Inspection asks all modules for such names; imports of submodules ask for ``__path__``.
        if name.startswith("__") and name != "__path__":
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def _compile_late(compile_now: Callable[..., Any]) -> Callable[..., Any]:
    """Defer torch's compilation of a function, and with it the compiler's import, to the function's first call.

    bitsandbytes compiles kernels on import, but each device uses only a few of them.
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
    """Install the stand-in for the compiler, unless this torch version's compiler package is laid out differently."""
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
