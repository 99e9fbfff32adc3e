"""Plug-in points: a module in a plug-in folder of the package is found by name; docs/CONTRIBUTING.md lists the folders."""

import importlib
import pkgutil
from functools import cache
from importlib.util import find_spec
from typing import Any


@cache
def plug_in_names(folder: str) -> tuple[str, ...]:
    """Sorted names of the modules in a package (``hetero_mpi.objectives``). None is imported, as it may need torch."""
    spec = find_spec(folder)
    assert spec is not None, folder
    return tuple(sorted(module.name for module in pkgutil.iter_modules(spec.submodule_search_locations)))


def plug_in(folder: str, name: str) -> Any:
    """Import the module ``name`` of a package."""
    return importlib.import_module(f"{folder}.{name}")
