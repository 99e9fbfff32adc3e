"""On PYTHONPATH, every Python finds the stand-in where it looks for GPUs: those that the program starts too."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

GPUS = "hetero_mpi.device.accelerators"


class _Installing:
    """Finds the module that knows the kinds of GPUs, and installs the stand-in once it is loaded."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != GPUS:
            return None
        spec = PathFinder.find_spec(name, path)  # type: ignore[arg-type]
        assert spec is not None and spec.loader is not None
        load = spec.loader.exec_module

        def load_and_install(module: ModuleType) -> None:
            load(module)
            from tests.stand_in_gpu.backend import install

            install()

        spec.loader.exec_module = load_and_install  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Installing())
