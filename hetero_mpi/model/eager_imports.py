"""Importing torch and transformers as a rank needs them, which computes eagerly and talks by MPI.

transformers imports torch's compiler (``torch._dynamo``: 820 modules with sympy) for one class and three marks on functions, and
``torch.distributed.tensor`` wherever torch has it. No rank uses either, and the two are a quarter of a rank's start.
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
"""Modules of the compiler's package that need nothing else of it: torch's recomputing asks its settings, transformers' masks take a
class."""
_MARKS = {"allow_in_graph", "assume_constant_result", "disable", "graph_break"}
"""Words to the compiler, on a function or (AdamW's step) in the middle of one: no effect where nothing is compiled."""

logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
"""It would warn, on its import by peft, of a package with faster 4-bit products, whether or not there are any."""


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
            torch.compile = _compile_late(torch.compile)
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


def _compile_late(compile_now: Callable[..., Any]) -> Callable[..., Any]:
    """torch's ``compile`` looks at a function when that is first called, and imports the compiler at once; this one, only then.
    bitsandbytes compiles some kernels as it is imported, most of which no device uses.
    """

    @functools.wraps(compile_now)
    def compile_(model: Any = None, **options: Any) -> Any:
        if model is None:
            return lambda function: compile_(function, **options)
        if not isinstance(model, FunctionType):
            return compile_now(model, **options)
        made = functools.cache(lambda: compile_now(model, **options))
        return functools.wraps(model)(lambda *arguments, **named: made()(*arguments, **named))

    return compile_


def _unmarked(function: Any = None, *_: Any, **__: Any) -> Any:
    return _unmarked if function is None else function


def _stand_in(torch: ModuleType) -> None:
    """Another torch may have another compiler: then it is imported as ever."""
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
    """transformers asks once whether torch was built with it, and remembers the answer."""
    known, torch.distributed.is_available = torch.distributed.is_available, lambda: False
    try:
        from transformers.utils import is_torch_distributed_available

        is_torch_distributed_available()
    finally:
        torch.distributed.is_available = known
