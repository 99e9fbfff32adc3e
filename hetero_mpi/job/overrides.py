"""A job file as raw TOML values, with ``--set table.key=value``, or what a Python program sets, laid over them.

What the values may be is ``job.py``'s matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from hetero_mpi import toml
from hetero_mpi.errors import UserError
from hetero_mpi.job.rules import as_toml


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a job file. Raises UserError when there is no such file or it is not TOML."""
    try:
        # utf-8-sig: some editors put a byte order mark at the start, which TOML does not allow.
        return toml.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such job file (looked from {Path.cwd()})") from None
    except OSError as error:
        raise UserError(f"{path}: the job file cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: a job file must be TOML in UTF-8; this one is not UTF-8") from None
    except toml.TomlError as error:
        raise UserError(f"{path}: a job file must be TOML: {error}") from None


def apply_override(values: dict[str, Any], text: str, problems: list[str]) -> tuple[str, ...] | None:
    """Put one ``table.key=value`` into the file's values; returns the dotted key, or None with a problem noted."""
    if text != text.encode("utf-8", "replace").decode():  # bytes of another encoding on the command line
        problems.append(f"--set {text!a}: must be UTF-8")
        return None
    dotted, equals, value_text = text.partition("=")
    keys = tuple(part.strip() for part in dotted.split("."))
    if not equals or not 2 <= len(keys) <= toml.DEEPEST or not all(keys):
        problems.append(f"--set {text}: must be table.key=value, such as --set train.steps=6")
        return None
    try:
        value = _override_value(value_text.strip())
    except toml.TomlError as error:
        problems.append(f"--set {text}: the value is no TOML value: {error}")
        return None
    return _put(values, keys, value, problems, f"--set {text}")


def apply_setting(
    values: dict[str, Any], dotted: str, value: Any, problems: list[str], by: str
) -> tuple[str, ...] | None:
    """The same with a value that is one already, and the key it is for: ``train.steps``."""
    keys = tuple(part.strip() for part in dotted.split("."))
    if not 2 <= len(keys) <= toml.DEEPEST or not all(keys):
        problems.append(f"{by} {dotted!r}: must be table.key, such as train.steps")
        return None
    return _put(values, keys, value, problems, f"{by} {dotted!r}")


def as_values(value: Any) -> Any:
    """What a Python program gives as a job file would have it: paths are texts, tuples are lists, None is empty."""
    if isinstance(value, Mapping):
        return {str(key): as_values(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_values(inner) for inner in value]
    if isinstance(value, PurePath):
        return str(value)
    return "" if value is None else value


def _put(
    values: dict[str, Any], keys: tuple[str, ...], value: Any, problems: list[str], label: str
) -> tuple[str, ...] | None:
    table = values
    for depth, key in enumerate(keys[:-1], start=1):
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            problems.append(
                f"{label}: {'.'.join(keys[:depth])} = {as_toml(table)} in the job file is no table to set a key of"
            )
            return None
    table[keys[-1]] = value
    return keys


def _override_value(text: str) -> Any:
    try:
        parsed = toml.loads(f"value = {text}")
        return parsed["value"] if len(parsed) == 1 else text
    except toml.TomlError:
        if text[:1] in ("[", "{", '"', "'"):  # meant as TOML, and mistyped
            raise
        return text
