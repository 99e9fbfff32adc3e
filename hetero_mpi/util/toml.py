"""TOML parsing with one error type for malformed texts and for texts beyond sane limits."""

from typing import Any

import tomli

MAX_NESTING_DEPTH = 64
"""Maximum nesting of tables and lists, which are walked recursively later."""
MAX_INTEGER_BITS = 4096
"""Python refuses to print integers of more than 4,300 digits (14,000 bits), even in an error message."""


class TomlError(ValueError):
    """A malformed TOML text, with the position."""


def loads(text: str) -> dict[str, Any]:
    """Parse a TOML text. Raises TomlError."""
    try:
        values = tomli.loads(text)
    except ValueError as error:  # from tomli, or from Python for a number with too many digits
        raise TomlError(str(error)) from None
    except RecursionError:
        raise TomlError(_TOO_DEEP) from None
    depth, level = 0, list[Any]([values])
    while level:
        depth += 1
        if depth > MAX_NESTING_DEPTH:
            raise TomlError(_TOO_DEEP)
        children = [value for node in level for value in (node.values() if isinstance(node, dict) else node)]
        if any(isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS for value in children):
            raise TomlError(f"a whole number has more than {MAX_INTEGER_BITS:,} bits")
        level = [value for value in children if isinstance(value, (dict, list))]
    return values


_TOO_DEEP = f"tables and lists are nested more than {MAX_NESTING_DEPTH} deep"
