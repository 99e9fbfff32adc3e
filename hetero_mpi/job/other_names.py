"""Counterparts of the names that people know from other tools: keys, values, commands and options.

``other_names.toml`` lists usual names, and ``other_tools.toml`` the keys of the tools whose configs ``init --from`` converts.
"""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import json
import re
import shlex
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from hetero_mpi.job.rules import broken_keys, field_metadata, override_value, rule_text
from hetero_mpi.job.schema import TABLES
from hetero_mpi.job.training_tables import Unit
from hetero_mpi.util import toml

KEYS = {f"{table}.{key}": field for table, model in TABLES.items() for key, field in model.model_fields.items()}
"""Maps each dotted key of a job, such as ``train.steps``, to its field."""
_TOOLS = ("trainer", "trl", "llamafactory", "axolotl")
_SIZES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_BOOLS = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)


class _Typed(str):
    """A value in the form in which it was typed, such as ``1e-4``."""


_UNCLEAR = "VALUE"
"""Stands for a value that the user has to find."""
Settings = list[tuple[str, Any]]
"""Dotted keys of a job and the values to write for them."""


@cache
def read_names(file: str = "other_names.toml") -> dict[str, Any]:
    """Return the content of a file of names in this folder."""
    return toml.loads(Path(__file__).with_name(file).read_text(encoding="utf-8"))


def instead_of_key(name: str, value: Any, as_options: bool, table_name: str = "") -> str:
    """Return what to write for a key that a job does not have, or "" if the name is unknown.

    The answer is in ``--set`` options, or else in lines of a job file. ``value``: value given with the name, or None.
    ``table_name``: table in which the name was found.
    """
    name = name if len(name) == 1 else name.lower().replace("-", "_")
    name = name if name in KEYS else name.rpartition(".")[2]
    homes = [dotted for dotted in KEYS if name in (dotted, dotted.partition(".")[2])]
    tools, names = read_names("other_tools.toml"), read_names()
    targets = [target for tool in _TOOLS if (target := tools[tool]["keys"].get(name, "")) in KEYS]
    entry = names["keys"].get(name) or (homes if len(homes) == 1 else targets or [""])[0]
    if name in names["advice"] and (not entry or str(value).endswith(".toml")):
        return str(names["advice"][name].replace("{}", "N" if value is None else str(value)))
    if "=" in entry and value in (False, "false", "False"):
        return "leave it out"
    if entry:
        settings = [setting for text in entry.split() for setting in _settings(text, value)]
        unclear = [rule_text(KEYS[dotted]) for dotted, setting_value in settings if setting_value == _UNCLEAR]
        note = "; ".join(unclear) or names["notes"].get(entry, "")
        return f"write {written(settings, as_options)}" + (f" ({note})" if note else "")
    for table in () if homes else (tools[tool] for tool in _TOOLS):
        if name in table["keys"]:
            return f"see {tools['parts'][table['keys'][name][1:]]}".replace("`", "")
        for group in table["left"]:
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in group["keys"]):
                return f"leave it out: {group['reason']}"
    keys = sorted(KEYS, key=lambda key: key.startswith(f"{table_name}."))
    own_keys = {key.partition(".")[2]: key for key in keys if not homes}
    close_keys = difflib.get_close_matches(name, own_keys, n=1, cutoff=0.7)
    settings = _settings(own_keys[close_keys[0]], value) if close_keys else []
    return f"did you mean {written(settings, as_options)}?" if settings else ""


def instead_of_option(command: str, name: str, value: str | None) -> str:
    """Return what to write for an option that a command does not have, or "" if the name is unknown."""
    name = name if len(name) == 1 else name.lower().replace("-", "_")
    text = str(read_names()["options"].get(command, {}).get(name, ""))
    text = text.replace("{}", "N" if value is None else shlex.quote(value))
    if not text and command == "launch" and (text := instead_of_key(name, value, True)).startswith("write"):
        return f"after the command, {text}"
    return f"write {text}" if text.startswith("-") else text


def _settings(text: str, value: Any) -> Settings:
    """Parse ``KEY``, which gets the given value, or ``KEY=VALUE``, where ``{}`` stands for it."""
    dotted, equals, template = text.partition("=")
    if equals:
        return [(dotted, override_value(template.replace("{}", _UNCLEAR if value is None else str(value))))]
    if value is None:
        return [(dotted, next(iter(_fitting(dotted, True)), _UNCLEAR))]
    if dotted == "data.records" and str(value).endswith((".txt", ".md", ".py")):
        dotted = "data.text"
    settings = settings_for(dotted, value) or [(dotted, _UNCLEAR)]
    with contextlib.suppress(toml.TomlError):
        if isinstance(value, str) and settings == [(dotted, override_value(value))]:
            return [(dotted, _Typed(value))]
    return settings


def settings_for(dotted: str, value: Any) -> Settings:
    """Return the settings that a value of a key stands for, such as ``["a.txt"]`` for ``"a.txt"``; empty if there are none."""
    word, tool_values = str(value).lower().removeprefix("torch."), read_names("other_tools.toml")["values"]
    schedules = {"train.schedule": tool_values["=schedule"]}
    tables = (read_names()["synonyms"], read_names()["values"], tool_values, schedules)
    alias = next((text for table in tables if (text := table.get(dotted, {}).get(word))), "")
    if "=" in alias:
        return [setting for text in alias.split() for setting in _settings(text, None)]
    candidates = [override_value(alias)] if alias else _candidates(dotted, value)
    return [(dotted, fitting) for fitting in _fitting(dotted, *candidates)][:1]


def _fitting(dotted: str, *candidates: Any) -> Iterator[Any]:
    """Yield the candidates that the key accepts."""
    table, _, key = dotted.partition(".")
    return (value for value in candidates if key not in broken_keys(TABLES[table], {key: value}))


def _candidates(dotted: str, value: Any) -> Iterator[Any]:
    """Yield values that may be meant by an invalid value, the likeliest first."""
    table, _, key = dotted.partition(".")
    text = str(value).strip()
    yield from (value, text)
    for choice in difflib.get_close_matches(text.lower(), _choices(KEYS[dotted].annotation), n=1, cutoff=0.7):
        yield from (choice, [choice])
    if isinstance(value, float) and value.is_integer():
        yield int(value)
    size = re.fullmatch(r"(\d[\d_]*(?:\.\d+)?) ?([kmgt]?i?)b?", text.lower())
    if size and size[2] in _SIZES and field_metadata(TABLES[table], Unit).get(key) == ["bytes"]:
        yield int(float(size[1]) * _SIZES[size[2]])
    if match := re.fullmatch(r"(\d+(?:\.\d+)?) ?%", text):
        yield float(match[1]) / 100
    yield from [_BOOLS[text.lower()]] if text.lower() in _BOOLS else []
    yield from [None] if text.lower() in ("none", "null", "unlimited") else []
    parts = [part.strip(" '\"") for part in text.strip("[]").split(",")] if isinstance(value, (str, int, float)) else []
    with contextlib.suppress(toml.TomlError):
        yield from (parts, [override_value(part) for part in parts], [value], override_value(text))


def _choices(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return [choice for choice in get_args(annotation) if isinstance(choice, str)]
    return [choice for part in get_args(annotation) for choice in _choices(part)]


def written(settings: Sequence[tuple[str, Any]], as_options: bool) -> str:
    """Write settings as on the command line, ``--set train.steps=6``, or as in a job file, ``[train] steps = 6``."""
    texts = []
    for dotted, value in settings:
        table, _, key = dotted.partition(".")
        text = json.dumps("" if value is None else value, ensure_ascii=False)
        bare = isinstance(value, _Typed) or (isinstance(value, str) and override_value(value) == value)
        option = f"--set {shlex.quote(f'{dotted}={value if bare else text}')}"
        texts.append(option if as_options else f"[{table}] {key} = {text}")
    return (" " if as_options else " and ").join(texts)
