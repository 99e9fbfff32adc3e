"""TOML parsing with a single error type for malformed documents and for documents that exceed sane limits."""

from typing import Any

import tomli

MAX_NESTING_DEPTH = 64
"""Maximum nesting depth of tables and lists, which are later traversed recursively."""
MAX_INTEGER_BITS = 4096
"""Maximum size of integers. Python cannot print integers with more than 4,300 digits (14,000 bits), even in error messages."""


class TomlError(ValueError):
    """Raised for a malformed TOML document; a syntax error has its position."""


def loads(text: str) -> dict[str, Any]:
    """Parse a TOML document. Raises TomlError."""
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
