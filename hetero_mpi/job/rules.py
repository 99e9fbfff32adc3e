"""Messages for validation errors: the rule of a key, the invalid value, and the closest valid name.

They work for any pydantic models, such as the tables of job files and of hosts files, which callers pass as an argument.
"""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from hetero_mpi.util import toml

ABSOLUTE_PATH_HINT = "write an absolute path for a location outside it"
EIGHT_BIT = "adamw_8bit"
"""Value of ``[train] optimizer`` for bitsandbytes' AdamW with 8-bit optimizer states."""
MAX_AUTO_MICRO_BATCH = 16
"""Largest micro-batch, in sequences, that "auto" may choose."""
MAX_MICRO_BATCHES = 8192
"""Maximum number per step, since the planner simulates each one many times and every rank lists its actions for a step."""


def is_outside(path: Path, base: Path) -> bool:
    """Return whether ``path``, with links resolved, is outside the directory ``base``. Neither needs to exist."""
    return not path.resolve().is_relative_to(base.resolve())


def speed_change(text: str) -> tuple[int, int, float] | None:
    """Parse ``rank 1 runs at 0.5 from step 20`` as (rank, step counted from 0, speed); return None if ``text`` is malformed."""
    match = re.fullmatch(r"rank (\d{1,9}) runs at (\d{1,9}(?:\.\d{1,9})?) from step (\d{1,9})", text.strip())
    if match is None or float(match[2]) == 0 or int(match[3]) == 0:
        return None
    return int(match[1]), int(match[3]) - 1, float(match[2])


_PLAIN = {str: "text in quotes", bool: "true or false"}


def rule_text(field: FieldInfo) -> str:
    """Describe the values that a field accepts, such as ``a whole number of at least 1 or "auto"``."""
    return _describe(field.annotation, _bounds(field.metadata))


def may_be_empty(field: FieldInfo) -> bool:
    """Return whether a key may be empty, that is, omitted or set to ``""``, since TOML has no null."""
    return type(None) in get_args(field.annotation)


def field_metadata(model: type[BaseModel], kind: type[str]) -> dict[str, list[str]]:
    """Map keys to their field metadata of one kind (``Unit``, ``Example``, ``OnlyIf``, ``OnResume``), omitting keys with none."""
    metadata = {
        key: [text for text in field.metadata if isinstance(text, kind)] for key, field in model.model_fields.items()
    }
    return {key: texts for key, texts in metadata.items() if texts}


def _describe(annotation: Any, bounds: Mapping[str, Any]) -> str:
    if get_origin(annotation) is Annotated:
        plain, *metadata = get_args(annotation)
        if described := [part.description for part in metadata if isinstance(part, FieldInfo) and part.description]:
            return described[0]
        inner = [entry for part in metadata for entry in (part.metadata if isinstance(part, FieldInfo) else [part])]
        return _describe(plain, {**bounds, **_bounds(inner)})
    if get_origin(annotation) in (Union, types.UnionType):
        parts = [_describe(part, bounds) for part in get_args(annotation) if part is not type(None)]
        empty = ['empty ("")'] if type(None) in get_args(annotation) else []
        return " or ".join(parts + empty)
    if get_origin(annotation) is Literal:
        return " or ".join(as_toml(choice) for choice in get_args(annotation))
    if get_origin(annotation) is list:
        min_length = bounds.get("min_length")
        (element,) = get_args(annotation)
        element_text = _describe(element, {})
        elements = "quoted strings" if element is str else element_text.removeprefix("a ").replace("number", "numbers")
        return f"a list of {elements}" + (f" (at least {min_length})" if min_length else "")
    if get_origin(annotation) is dict:
        key, value = get_args(annotation)
        if get_origin(key) is Literal:
            return f"a table of keys ({', '.join(get_args(key))})"
        return "a table of keys" if value is Any else f"a table ({_describe(key, {})} = {_describe(value, {})})"
    if annotation in (int, float):
        return ("a whole number" if annotation is int else "a number") + _range(bounds)
    return _PLAIN[annotation]


def _bounds(metadata: Iterable[Any]) -> dict[str, Any]:
    names = ("ge", "gt", "lt", "le", "min_length")
    return {name: getattr(entry, name) for entry in metadata for name in names if hasattr(entry, name)}


def _range(bounds: Mapping[str, Any]) -> str:
    words = [
        f"{word} {bounds[name]}"
        for name, word in (("ge", "of at least"), ("gt", "above"), ("lt", "below"), ("le", "at most"))
        if name in bounds
    ]
    return " " + " and ".join(words) if words else ""


def as_toml(value: Any) -> str:
    """Format a value as in a job file, on one line that is truncated to 60 characters."""
    text = toml.inline(value)
    return text if len(text) <= 60 else text[:57] + "..."


def override_value(text: str) -> Any:
    """Parse the value of ``--set``: TOML, or a bare word, which is a string. Raises TomlError for mistyped TOML."""
    try:
        parsed = toml.loads(f"value = {text}")
        return parsed["value"] if len(parsed) == 1 else text
    except toml.TomlError:
        if text[:1] in ("[", "{", '"', "'"):  # mistyped TOML rather than a bare word
            raise
        return text


def unknown_name(name: str, valid_names: Iterable[str], kind: str) -> str:
    """Explain that a name is not valid, with the closest valid one or all of them. ``kind``: "key", "table" or similar."""
    names = list(valid_names)
    close = difflib.get_close_matches(name, names, n=1)
    return f"unknown {kind}; did you mean {close[0]!r}?" if close else f"unknown {kind}; there are {', '.join(names)}"


def broken_keys(model: type[BaseModel], values: Mapping[str, Any]) -> dict[str, str]:
    """Validate one table and map each invalid key to the rule that it breaks.

    pydantic reports an error for each branch of a union and each element of a list. The messages are derived from the field
    instead, so that each key appears once.
    """
    try:
        model.model_validate(values)
    except ValidationError as error:
        broken: dict[str, str] = {}
        for entry in error.errors(include_url=False, include_context=False, include_input=False):
            key = str(entry["loc"][0])
            if entry["type"] == "extra_forbidden":
                broken[key] = unknown_name(key, model.model_fields, "key")
            elif entry["type"] == "missing":
                broken[key] = f"is required: {rule_text(model.model_fields[key])}"
            else:
                broken[key] = f"must be {rule_text(model.model_fields[key])}"
        return broken
    return {}
