"""Read and write profiles and plans as editable TOML files or plain values for JSON; reading reports all problems.

Profiles have a shorthand for models of equal blocks and clusters of equal GPUs: ``count = 32`` in a ``[[model.layers]]`` table
repeats the layer; ``like = 4`` in a ``[[devices]]`` table copies missing keys from that earlier rank. Files are written in
shorthand.
"""

import hashlib
import itertools
import os
from pathlib import Path
from typing import Any

from hetero_mpi.planning.types import plan as plan_types
from hetero_mpi.planning.types import profile as profile_types
from hetero_mpi.planning.types.codec import decode, decoded, encode, raise_all
from hetero_mpi.planning.types.plan import Plan, PlanReport
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.profile_rules import number_problems, profile_problems
from hetero_mpi.util import toml
from hetero_mpi.util.disk import require_regular, write_atomic
from hetero_mpi.util.errors import UserError
from hetero_mpi.util.shipped import file_of_run, profile_file, require_kind

PROFILE_HEADING = """\
# Profile of a cluster: measured speeds of every rank and every directed link, and the costs of the measured model, so that
# planning needs no other file. Edit it to ask "what if?". Seconds end in _s, bytes in _bytes, speeds in _per_s; a message of n
# bytes takes latency_s + n / bytes_per_s on a link. A device's layers have seconds per micro-batch by its number of tokens:
# forward_s, backward_s, recompute_s (backward with recomputation), input_s and weight_s (split backward), for a rank with a
# core for each of its threads; planning lengthens the times of CPU ranks that share cores. Samples are only informative: the
# measurements to which lines were fitted. count = n: n equal items in a row; like = r: keys that a device omits are rank r's.
"""
PLAN_HEADING = """\
# Plan of a run. Stages hold the layers [first, last) of the chain embedding = 0, blocks = 1 to layers - 2, head = last.
# Edit it and pass it with --plan: the predictions in [report] are recomputed, and may be omitted.
"""
MAX_INLINE_COLUMNS = 120
MAX_ITEMS = 10_000
_OWN_KEYS = ("rank", "host")


def profile_to_dict(profile: ClusterProfile) -> dict[str, Any]:
    """Convert a profile to plain values for JSON (infinity becomes ``"inf"``)."""
    return encode(profile, infinity_as_text=True)


def profile_from_dict(data: dict[str, Any], where: str = "profile") -> ClusterProfile:
    """Inverse of ``profile_to_dict``; a ``UserError`` lists all problems."""
    _check_version(data, profile_types.SCHEMA_VERSION, "profile", where)
    problems = number_problems(data)
    data = _expand_shorthand(data, where)
    try:
        profile = decode(ClusterProfile, data, where)
    except UserError as error:
        # Whether ranks, links and kinds belong together cannot be said of a file with such problems; its numbers can be judged.
        raise UserError(
            "profile.invalid", "\n".join([str(error), *(f"{where}: {problem}" for problem in problems)])
        ) from error
    raise_all(where, [*problems, *profile_problems(profile)])
    return profile


def _with_shorthand(data: dict[str, Any]) -> dict[str, Any]:
    """Return the profile in shorthand, without modifying ``data``."""
    runs = [(layer, len([*equal])) for layer, equal in itertools.groupby(data["model"]["layers"])]
    layers = [layer if n == 1 else {"kind": layer["kind"], "count": n, **layer} for layer, n in runs]
    return {**data, "model": {**data["model"], "layers": layers}, "devices": _with_likes(data["devices"])}


def _with_likes(devices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    first: dict[str, int] = {}
    shortened = []
    for device in devices:
        content = repr({key: value for key, value in device.items() if key not in _OWN_KEYS})
        earlier = first.setdefault(content, device["rank"])
        identity = {key: device[key] for key in _OWN_KEYS}
        shortened.append(device if earlier == device["rank"] else {**identity, "like": earlier})
    return shortened


def _expand_shorthand(data: Any, where: str) -> Any:
    """Expand the shorthand, leaving other data to the decoder; a ``UserError`` lists all problems."""
    problems: list[str] = []
    if not isinstance(data, dict):
        return data
    data, model = dict(data), data.get("model")
    if isinstance(model, dict) and isinstance(model.get("layers"), list):
        data["model"] = {**model, "layers": _expand_counts(model["layers"], problems)}
    if isinstance(data.get("devices"), list):
        data["devices"] = _expand_likes(data["devices"], problems)
    raise_all(where, problems)
    return data


def _expand_counts(layers: list[Any], problems: list[str]) -> list[Any]:
    expanded: list[Any] = []
    for index, layer in enumerate(layers):
        count = layer.get("count", 1) if isinstance(layer, dict) else 1
        if type(count) is not int or not 1 <= count <= MAX_ITEMS:
            problems.append(f"model.layers[{index}].count = {count!r}: must be a whole number from 1 to {MAX_ITEMS:,}")
        elif isinstance(layer, dict):
            expanded += [{key: value for key, value in layer.items() if key != "count"}] * count
        else:
            expanded.append(layer)
    return expanded


def _expand_likes(devices: list[Any], problems: list[str]) -> list[Any]:
    expanded: list[Any] = []
    for index, device in enumerate(devices):
        if isinstance(device, dict) and "like" in device:
            like = device["like"]
            if type(like) is not int or not 0 <= like < index or not isinstance(expanded[like], dict):
                problems.append(f"devices[{index}].like = {like!r}: must be the rank of an earlier device")
                like = None
            earlier = {} if like is None else expanded[like]
            device = {**earlier, **{key: value for key, value in device.items() if key != "like"}}
        expanded.append(device)
    return expanded


def plan_to_dict(plan: Plan | PlanReport, infinity_as_text: bool = True) -> dict[str, Any]:
    """Convert to plain values: schema version, plan, and a report's prediction under ``report``."""
    version = {"schema_version": plan_types.SCHEMA_VERSION}
    if isinstance(plan, Plan):
        return {**version, **encode(plan, infinity_as_text)}
    report = encode(plan, infinity_as_text)
    report.pop("similar", None)
    return {**version, **report.pop("plan"), "report": {**report, "plan_digest": _digest(plan.plan)}}


def _digest(plan: Plan) -> str:
    """Hash a plan, so that a report can be told from one of the plan before it was edited."""
    return hashlib.sha256(repr(encode(plan)).encode()).hexdigest()[:16]


def plan_from_dict(data: dict[str, Any], where: str = "plan") -> Plan:
    """Read the plan from values of ``plan_to_dict``; a ``UserError`` lists all problems."""
    return _plan_file(data, where)[0]


def report_from_dict(data: dict[str, Any], where: str = "plan") -> PlanReport:
    """Read the plan and its prediction from values of ``plan_to_dict``; a ``UserError`` lists all problems."""
    report = _plan_file(data, where)[1]
    if report is None:
        raise UserError(
            "plan.no_report",
            f"{where}: has no [report] of this plan (edited plans have none); use `plan --profile PROFILE --plan FILE`",
        )
    return report


def _plan_file(data: dict[str, Any], where: str) -> tuple[Plan, PlanReport | None]:
    _check_version(data, plan_types.SCHEMA_VERSION, "plan", where)
    problems: list[str] = []
    decision = {key: value for key, value in data.items() if key not in ("schema_version", "report")}
    plan: Plan | None = decoded(Plan, decision, "", problems)
    for p, pipeline in enumerate(plan.pipelines if plan is not None else ()):
        if pipeline.micro_batch < 1:
            problems.append(f"pipelines[{p}].micro_batch = {pipeline.micro_batch}: must be at least 1")
        problems += [] if pipeline.stages else [f"pipelines[{p}].stages = []: a pipeline needs at least one stage"]
        for s, stage in enumerate(pipeline.stages):
            problems += [] if stage.ranks else [f"pipelines[{p}].stages[{s}].ranks = []: a stage needs a rank"]
    if plan is not None and not plan.pipelines:
        problems.append("pipelines = []: a plan needs at least one pipeline")
    report, digest = None, ""
    if "report" in data:
        table = data["report"]
        fields = {**table, "plan": plan or Plan((), 0, 0, 0)} if isinstance(table, dict) else table
        digest = fields.pop("plan_digest", "") if isinstance(table, dict) else ""
        report = decoded(PlanReport, fields, "report", problems)
    raise_all(where, problems)
    assert plan is not None
    return plan, report if digest == _digest(plan) else None


def save_profile(profile: ClusterProfile, path: str | os.PathLike[str]) -> None:
    """Write ``path`` atomically, creating its folder."""
    write_atomic(Path(path), PROFILE_HEADING + to_toml(_with_shorthand(encode(profile))), make_folder=True)


def load_profile(path: str | os.PathLike[str]) -> ClusterProfile:
    """Load a profile by its path or, if it is shipped, by name; raise ``UserError`` if it is unreadable or invalid."""
    file = profile_file(path)
    return profile_from_dict(_read(file), str(file))


def save_plan(plan: Plan | PlanReport, path: str | os.PathLike[str]) -> None:
    """Write a plan, or a report with its prediction, to ``path`` atomically, creating its folder."""
    write_atomic(Path(path), PLAN_HEADING + to_toml(plan_to_dict(plan, infinity_as_text=False)), make_folder=True)


def load_plan_file(path: str | os.PathLike[str]) -> tuple[Plan, PlanReport | None]:
    """Load a plan, and its report unless the plan was edited, from a file or run directory; ``complete_plan`` checks plans."""
    file = file_of_run(Path(path), "plan.toml") if Path(path).is_dir() else Path(path)
    return _plan_file(_read(file), str(file))


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Load a plan without its report; see ``load_plan_file``."""
    return load_plan_file(path)[0]


def load_report(path: str | os.PathLike[str]) -> PlanReport:
    """Load a plan with its prediction; raise ``UserError`` if the file is not a plan, or has no report of this plan."""
    return report_from_dict(_read(Path(path)), str(path))


def to_toml(table: dict[str, Any]) -> str:
    """Format a table as TOML: scalars and lists of scalars first, short tables on one line, the rest under headings."""
    return "\n".join(_table_lines(table, "")).strip("\n") + "\n"


def _table_lines(table: dict[str, Any], prefix: str) -> list[str]:
    """Format the table with dotted name ``prefix`` as lines; nested tables follow their parent's own keys."""
    lines: list[str] = []
    below: list[str] = []
    for key, value in table.items():
        name = f"{prefix}.{toml.key_text(key)}" if prefix else toml.key_text(key)
        if isinstance(value, dict):
            line = f"{toml.key_text(key)} = {toml.inline(value)}"
            if prefix and value and _is_leaf(value) and len(line) <= MAX_INLINE_COLUMNS:
                lines.append(line)
            else:
                inner = _table_lines(value, name)
                # A table of nothing but sub-tables needs no heading.
                below += inner if inner and not inner[0] else ["", f"[{name}]", *inner]
        elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            for item in value:
                below += ["", f"[[{name}]]", *_table_lines(item, name)]
        elif isinstance(value, list) and value and all(isinstance(item, str) and len(item) > 20 for item in value):
            lines += [f"{toml.key_text(key)} = [", *(f"    {toml.inline(item)}," for item in value), "]"]
        else:
            lines.append(f"{toml.key_text(key)} = {toml.inline(value)}")
    return lines + below


def _is_leaf(table: dict[str, Any]) -> bool:
    """Whether a table contains no other tables."""
    inside = [item for value in table.values() for item in (value if isinstance(value, list) else [value])]
    return not any(isinstance(item, dict) for item in inside)


def _read(path: Path) -> dict[str, Any]:
    require_regular(path)
    try:
        return toml.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError("file.unreadable", f"{path}: cannot be read ({error.strerror}); check the path") from error
    except (toml.TomlError, UnicodeDecodeError) as error:
        raise UserError("file.toml", f"{path}: not valid TOML ({error}); correct the file") from error


def _check_version(data: Any, expected: int, file_kind: str, where: str) -> None:
    require_kind(data, file_kind, where)
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != expected:
        raise UserError(
            "file.version",
            f"{where}: schema_version = {'(missing)' if version is None else version}: "
            f"this program reads {file_kind} files of version {expected}; create the {file_kind} again",
        )
