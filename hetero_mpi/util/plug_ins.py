"""Finds plug-ins, which are modules in certain folders of the package, by name. docs/CONTRIBUTING.md lists the folders."""

import importlib
import pkgutil
from functools import cache
from importlib.util import find_spec
from typing import Any


@cache
def plug_in_names(folder: str) -> tuple[str, ...]:
    """Return the sorted names of the modules in a package without importing them, as they may need torch."""
    spec = find_spec(folder)
    assert spec is not None, folder
    return tuple(sorted(module.name for module in pkgutil.iter_modules(spec.submodule_search_locations)))


def plug_in(folder: str, name: str) -> Any:
    """Import and return the module ``name`` of the package ``folder``."""
    return importlib.import_module(f"{folder}.{name}")
