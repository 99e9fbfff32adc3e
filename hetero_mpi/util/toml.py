"""TOML texts -> values, where every text that is no TOML, or goes beyond anything meant, is the same error."""

from __future__ import annotations

from typing import Any

import tomli

MAX_NESTING_DEPTH = 64
"""Tables and lists within one another; what is made of them is walked recursively."""
MAX_INTEGER_BITS = 4096
"""Limit of a whole number: Python refuses to write ones of more than 4,300 digits (14,000 bits), even into an error's text."""


class TomlError(ValueError):
    """A text that is no TOML, and where."""


def loads(text: str) -> dict[str, Any]:
    """The tables of a TOML text. Raises TomlError."""
    try:
        values = tomli.loads(text)
    except ValueError as error:  # of tomli, and of Python for a number of very many digits
        raise TomlError(str(error)) from None
    except RecursionError:
        raise TomlError(_TOO_DEEP) from None
    _check_limits(values)
    return values


_TOO_DEEP = f"tables and lists are nested more than {MAX_NESTING_DEPTH} deep"


def _check_limits(values: Any) -> None:
    """Raises TomlError for what goes beyond the limits; without recursion, and without looking deeper than ``MAX_NESTING_DEPTH``."""
    depth, level = 0, [values]
    while level:
        depth += 1
        if depth > MAX_NESTING_DEPTH:
            raise TomlError(_TOO_DEEP)
        children = [
            value for container in level for value in (container.values() if isinstance(container, dict) else container)
        ]
        if any(isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS for value in children):
            raise TomlError(f"a whole number has more than {MAX_INTEGER_BITS:,} bits")
        level = [value for value in children if isinstance(value, (dict, list))]
