"""Profiles and plans as TOML files that a person reads and edits, and as plain values for JSON messages.

Reading lists all problems of a file at once.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from hetero_mpi import toml
from hetero_mpi.disk import write_whole
from hetero_mpi.errors import UserError
from hetero_mpi.planning.types import plan as plan_types
from hetero_mpi.planning.types import profile as profile_types
from hetero_mpi.planning.types.codec import decode, encode, raise_all
from hetero_mpi.planning.types.plan import Plan
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.profile_rules import number_problems, profile_problems
from hetero_mpi.planning.types.shorthand import expanded, shortened
from hetero_mpi.shipped import no_such_profile, profile_file

PROFILE_HEADING = """\
# Profile of a cluster: what every rank and every directed link was measured to do, and the model it was measured with.
# Edit it to ask "what if?". Seconds end in _s, bytes in _bytes, speeds in _per_s; a message of n bytes takes
# latency_s + n / bytes_per_s on a link. Under a device's layers are seconds per micro-batch of so many tokens: forward_s,
# backward_s, recompute_s (backward that repeats the forward), input_s and weight_s (backward in two parts). Samples of links
# and spreads are for the reader. The model's costs are part of the file, so that planning needs nothing else. count = n: so
# many equal items follow each other; like = r: what a device does not say itself is as rank r says.
"""
PLAN_HEADING = """\
# Plan of a run. Stages hold the items [first, last) of the chain embedding = 0, blocks = 1 to items - 2, head = last.
# Edit it and give it back with --plan: predictions, memory and reasons are worked out again.
"""
INLINE_COLUMNS = 120


def profile_to_dict(profile: ClusterProfile) -> dict[str, Any]:
    """Plain values that survive JSON (infinity as ``"inf"``)."""
    return encode(profile, infinity_as_text=True)


def profile_from_dict(data: dict[str, Any], where: str = "profile") -> ClusterProfile:
    """Inverse of ``profile_to_dict``. Raises ``UserError`` with all problems."""
    _check_version(data, profile_types.SCHEMA_VERSION, "profile", where)
    problems = number_problems(data)
    data = expanded(data, where)
    try:
        profile = decode(ClusterProfile, data, where)
    except UserError as error:
        # Whether ranks, links and kinds belong together cannot be said of a file with such problems; its numbers can be judged.
        raise UserError("\n".join([str(error), *(f"{where}: {problem}" for problem in problems)])) from error
    raise_all(where, [*problems, *profile_problems(profile)])
    return profile


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """Plain values that survive JSON, with the layout's version."""
    return {"schema_version": plan_types.SCHEMA_VERSION, **encode(plan, infinity_as_text=True)}


def plan_from_dict(data: dict[str, Any], where: str = "plan") -> Plan:
    """Inverse of ``plan_to_dict``. Raises ``UserError`` with all problems."""
    _check_version(data, plan_types.SCHEMA_VERSION, "plan", where)
    plan = decode(Plan, {key: value for key, value in data.items() if key != "schema_version"}, where)
    empty = [] if plan.pipelines else ["pipelines = []: a plan has a pipeline"]
    for p, pipeline in enumerate(plan.pipelines):
        empty += [] if pipeline.stages else [f"pipelines[{p}].stages = []: a pipeline has a stage"]
        for s, stage in enumerate(pipeline.stages):
            empty += [] if stage.ranks else [f"pipelines[{p}].stages[{s}].ranks = []: a stage is held by a rank"]
    raise_all(where, empty)
    return plan


def save_profile(profile: ClusterProfile, path: str | os.PathLike[str]) -> None:
    """Writes ``path`` in one step; its folder is made where it is missing."""
    write_whole(Path(path), PROFILE_HEADING + to_toml(shortened(encode(profile))), make_folder=True)


def load_profile(path: str | os.PathLike[str]) -> ClusterProfile:
    """The profile at a path, or the shipped one of that name. Raises ``UserError`` when it cannot be read or is not valid."""
    file = profile_file(path)
    if not file.exists():
        raise no_such_profile(file)
    return profile_from_dict(_read(file), str(file))


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Writes ``path`` in one step; its folder is made where it is missing."""
    data = {"schema_version": plan_types.SCHEMA_VERSION, **encode(plan)}
    write_whole(Path(path), PLAN_HEADING + to_toml(data), make_folder=True)


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Raises ``UserError`` when the file is not a plan; whether it fits a model is for ``planner.complete_plan``."""
    return plan_from_dict(_read(Path(path)), str(path))


def to_toml(table: dict[str, Any]) -> str:
    """TOML text: scalars and lists of scalars first, short tables on one line, the rest under headings."""
    return "\n".join(_table_lines(table, "")).strip("\n") + "\n"


def _table_lines(table: dict[str, Any], prefix: str) -> list[str]:
    """The lines of one table whose dotted name is ``prefix``; nested tables follow their parent's own keys."""
    lines: list[str] = []
    below: list[str] = []
    for key, value in table.items():
        name = f"{prefix}.{_key(key)}" if prefix else _key(key)
        if isinstance(value, dict):
            line = f"{_key(key)} = {_value(value)}"
            if prefix and value and _is_leaf(value) and len(line) <= INLINE_COLUMNS:
                lines.append(line)
            else:
                inner = _table_lines(value, name)
                # A table of nothing but sub-tables needs no heading of its own.
                below += inner if inner and not inner[0] else ["", f"[{name}]", *inner]
        elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            for item in value:
                below += ["", f"[[{name}]]", *_table_lines(item, name)]
        elif isinstance(value, list) and value and all(isinstance(item, str) and len(item) > 20 for item in value):
            lines += [f"{_key(key)} = [", *(f"    {_value(item)}," for item in value), "]"]
        else:
            lines.append(f"{_key(key)} = {_value(value)}")
    return lines + below


def _is_leaf(table: dict[str, Any]) -> bool:
    """No tables inside."""
    inside = [item for value in table.values() for item in (value if isinstance(value, list) else [value])]
    return not any(isinstance(item, dict) for item in inside)


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _text(key)


def _text(text: str) -> str:
    # A JSON string is a TOML basic string, except that TOML wants the DEL character escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    return repr(value)  # Python writes ints and floats (1e-05, inf) as TOML does.


def _read(path: Path) -> dict[str, Any]:
    try:
        return toml.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check the path") from error
    except (toml.TomlError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a TOML file ({error}); correct it at that place") from error


def _check_version(data: Any, expected: int, what: str, where: str) -> None:
    found = data.get("schema_version") if isinstance(data, dict) else None
    if found != expected:
        raise UserError(
            f"{where}: schema_version = {'(missing)' if found is None else found}: "
            f"this program reads {what} files of version {expected}; make the {what} again"
        )
