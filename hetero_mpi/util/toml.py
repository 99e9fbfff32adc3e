"""TOML: parsing with a single error type for malformed documents and for documents that exceed sane limits, and formatting."""

import json
import re
from collections.abc import Mapping
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
        raise TomlError(_with_both_lines(str(error), text)) from None
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
_KEY = re.compile(r"[\s\[]*(?:[\w.-]+\.)?([\w-]+)\s*[\]=]")
"""Matches a line that sets a key or begins a table; the group is the last part of its name."""


def _with_both_lines(error: str, text: str) -> str:
    """Name also the earlier of two lines that set a key, such as a forgotten ``links = []``; tomli names the later one only."""
    match = re.match(r"Cannot .*\(at (?:line (\d+)|end)", error)
    lines = text.splitlines()[: int(match[1] or len(text)) if match else 0]
    keys = [(_KEY.match(line) or [""] * 2)[1] for line in lines]
    at = max((n for n, key in enumerate(keys[:-1]) if key and key == keys[-1]), default=None)
    both = "" if at is None else f"lines {at + 1} ({lines[at].strip()[:60]}) and {len(keys)} both set {keys[-1]}"
    return f"{both}: delete one of them" if both else error


def inline(value: Any) -> str:
    """Format a value as TOML on one line. None, which TOML does not have, becomes an empty string."""
    if isinstance(value, Mapping):
        items = [f"{key_text(str(key))} = {inline(item)}" for key, item in value.items()]
        return f"{{ {', '.join(items)} }}" if items else "{}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(inline, value)) + "]"
    if value is None or isinstance(value, str | bool):
        # A JSON string is a TOML basic string, except that TOML wants the DEL character escaped.
        return json.dumps("" if value is None else value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value)  # Python writes ints and floats (1e-05, inf) as TOML does


def key_text(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else inline(key)
