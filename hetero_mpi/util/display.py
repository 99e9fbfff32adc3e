"""Base class of the objects that Python programs and notebooks show: a short ``repr``, and tables."""

from collections.abc import Collection
from dataclasses import fields
from importlib import import_module
from typing import Any

MAX_REPR = 1000
"""Approximate number of characters of the longest ``repr``; the fields of an object share it equally."""


class Displayed:
    """A dataclass with ``repr=False`` whose ``repr`` abbreviates long fields, and so must not serve as a key."""

    def __repr__(self) -> str:
        return short_repr(self, [field.name for field in fields(self) if field.repr])  # type: ignore[arg-type]

    def _repr_html_(self) -> str | None:
        """Return a table for notebooks, or None if there is none for the class."""
        # By name, as rendering needs the packages above the one that defines the object.
        return str(text) if (text := import_module("hetero_mpi.notebook").html(self)) else None


def short_repr(value: object, names: Collection[str]) -> str:
    """Return the type of ``value`` and its fields ``names``; of long fields, only the type or the number of items."""
    width = (MAX_REPR - sum(len(name) + 3 for name in names)) // len(names)
    return f"{type(value).__name__}({', '.join(f'{name}={_short(getattr(value, name), width)}' for name in names)})"


def _short(value: Any, width: int) -> str:
    count = len(value) if isinstance(value, Collection) and not isinstance(value, str) else None
    text = repr(value) if count is None or 4 * count < width else ""  # saves the text of long collections
    if text and len(text) <= width:
        return text
    short = f"<{count} items>" if count is not None else f"{type(value).__name__}(...)"
    return f"{text[: width - 3]}..." if isinstance(value, str) else short
