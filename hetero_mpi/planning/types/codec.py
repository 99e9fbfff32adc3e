"""Convert dataclasses to and from dictionaries of plain values by their type hints, collecting all problems.

Supports ``str``, ``int``, ``float``, ``bool``, ``tuple[X, ...]`` (or a sequence), ``dict[str, X]`` and ``dict[int, X]`` (or a
mapping, also keyed by tuples of integers), ``X | None`` and dataclasses of these. Only integers are coerced, to floats.
"""

import dataclasses
import difflib
import functools
import math
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from hetero_mpi.util.errors import UserError

T = TypeVar("T")


def encode(value: Any, infinity_as_text: bool = False) -> Any:
    """Convert ``value`` to dictionaries, lists and scalars; with ``infinity_as_text``, infinity becomes ``"inf"``."""
    if dataclasses.is_dataclass(value):
        values = {field: getattr(value, field.name) for field in dataclasses.fields(value)}
        # TOML has no null: unknown values are left out, as are empty remarks (fields that comparisons ignore).
        stated = {field.name: item for field, item in values.items() if item is not None and (item or field.compare)}
        return {name: encode(item, infinity_as_text) for name, item in stated.items()}
    if isinstance(value, Mapping):
        return {_key_text(key): encode(item, infinity_as_text) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [encode(item, infinity_as_text) for item in value]
    if infinity_as_text and isinstance(value, float) and math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return float(value) if isinstance(value, float) else value  # numpy's floats print differently


def decode(kind: type[T], data: Any, where: str) -> T:
    """Decode plain values into a ``kind``; one ``UserError`` lists all problems. ``where`` names their source (a file)."""
    problems: list[str] = []
    value: T = decoded(kind, data, "", problems)
    raise_all(where, problems)
    return value


def raise_all(where: str, problems: list[str]) -> None:
    """Raise a ``UserError`` with all ``problems``, one per line after ``where``, if there are any."""
    if problems:
        raise UserError("file.invalid", "\n".join(f"{where}: {problem}" for problem in problems))


def decoded(kind: Any, data: Any, path: str, problems: list[str]) -> Any:
    """Decode plain values into a ``kind``, or add to ``problems`` (with keys below ``path``) and return None."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        if isinstance(data, kind):
            return data
        return _decode_record(kind, data, path, problems)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (tuple, Sequence):
        if not isinstance(data, (list, tuple)):
            return _refuse(path, data, "must be a list", problems)
        return tuple(decoded(arguments[0], item, f"{path}[{i}]", problems) for i, item in enumerate(data))
    if origin in (dict, Mapping):
        if not isinstance(data, dict):
            return _refuse(path, data, "must be a table", problems)
        return {
            _key(arguments[0], key): decoded(arguments[1], item, _join(path, key), problems)
            for key, item in data.items()
        }
    if isinstance(kind, types.UnionType):
        return decoded(next(of for of in arguments if of is not type(None)), data, path, problems)
    if kind is float:
        if isinstance(data, str) and data in ("inf", "-inf"):
            return float(data)
        if isinstance(data, (int, float)) and not isinstance(data, bool) and not math.isnan(data):
            return float(data)
        return _refuse(path, data, "must be a number", problems)
    if type(data) is kind:
        return data
    words = {int: "a whole number without a decimal point", str: "a string in quotes", bool: "true or false"}
    return _refuse(path, data, f"must be {words[kind]}", problems)


def _key_text(key: object) -> str:
    """Format ``(0, 1)`` as ``0,1``."""
    return ",".join(map(str, key)) if isinstance(key, tuple) else str(key)


def _key(kind: Any, text: str) -> Any:
    return tuple(map(int, text.split(","))) if typing.get_origin(kind) is tuple else kind(text)


def _decode_record(kind: type, data: Any, path: str, problems: list[str]) -> Any:
    if not isinstance(data, dict):
        return _refuse(path, data, "must be a table", problems)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    hints = _hints(kind)
    before = len(problems)
    for key in data.keys() - fields.keys():
        nearest = difflib.get_close_matches(key, fields.keys() - data.keys(), n=1)
        advice = f"did you mean {nearest[0]}?" if nearest else f"known keys: {', '.join(fields)}"
        problems.append(f"{_join(path, key)} = {_shown(data[key])}: unknown key; {advice}")
    values = {}
    for name, field in fields.items():
        if name in data:
            values[name] = decoded(hints[name], data[name], _join(path, name), problems)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            problems.append(f"{_join(path, name)}: missing key")
    if len(problems) > before:
        return None
    try:
        return kind(**values)
    except UserError as error:
        return _refuse(path, data, str(error), problems)


_hints = functools.cache(typing.get_type_hints)
"""Cached: a large cluster's profile has tens of thousands of links."""


def _refuse(path: str, data: Any, rule: str, problems: list[str]) -> None:
    problems.append(f"{path or 'the whole file'} = {_shown(data)}: {rule}")


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _shown(data: Any) -> str:
    text = repr(data)
    return text if len(text) <= 80 else text[:77] + "..."
