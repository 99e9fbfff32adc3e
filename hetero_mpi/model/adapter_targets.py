"""Which modules the settings of an adapter reach, and with which rank and alpha: by peft's own rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from hetero_mpi.model.eager_imports import imported_peft


def reaches(
    module: str,
    targets: str | Iterable[str],
    layers: list[int] | None = None,
    layers_pattern: list[str] | str | None = None,
    exclude: str | list[str] | None = None,
) -> bool:
    """Whether the settings of an adapter reach the module of this name, by peft's own rules."""
    imported_peft()
    from peft.tuners.tuners_utils import check_target_module_exists

    settings = SimpleNamespace(
        target_modules=targets,
        target_parameters=None,
        exclude_modules=exclude,
        layers_to_transform=layers,
        layers_pattern=layers_pattern,
    )
    return bool(check_target_module_exists(settings, module))


def of_pattern(patterns: Mapping[str, Any], name: str, default: Any) -> Any:
    """The value of ``rank_pattern`` or ``alpha_pattern`` for a module, or a parameter of fused experts. By peft's own rules."""
    imported_peft()
    from peft.utils.other import get_pattern_key

    return patterns.get(get_pattern_key(patterns, name), default)
