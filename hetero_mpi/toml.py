"""TOML texts -> values, where every text that is no TOML, or nests deeper than anything meant, is the same error."""

from __future__ import annotations

from typing import Any

import tomli

DEEPEST = 64
"""Tables and lists within one another; what is made of them is walked recursively."""


class TomlError(ValueError):
    """A text that is no TOML, and where."""


def loads(text: str) -> dict[str, Any]:
    """The tables of a TOML text. Raises TomlError."""
    try:
        values = tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        raise TomlError(str(error)) from None
    except RecursionError:
        values = None
    if values is None or _depth(values) > DEEPEST:
        raise TomlError(f"tables and lists are nested more than {DEEPEST} deep")
    return values


def _depth(values: Any) -> int:
    """How deep containers nest, found without recursion and without looking deeper than ``DEEPEST``."""
    depth, level = 0, [values]
    while level and depth <= DEEPEST:
        depth += 1
        inner = [value for holder in level for value in (holder.values() if isinstance(holder, dict) else holder)]
        level = [value for value in inner if isinstance(value, (dict, list))]
    return depth
