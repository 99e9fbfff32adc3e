"""Load a job from ``job.toml`` or from the tables of a Python program into a validated ``JobConfig``.

``job/schema.py`` defines the keys. This module reports all problems of a job at once and adds no derived values.
"""

from __future__ import annotations

import difflib
import glob
import shlex
import sys
import sysconfig
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from os import PathLike
from pathlib import Path, PurePath
from typing import Any, Literal

from hetero_mpi.job.contradictions import JobValues, contradictions
from hetero_mpi.job.other_names import instead_of_key, read_names, settings_for, written
from hetero_mpi.job.rules import as_toml, broken_keys, may_be_empty, override_value, unknown_name
from hetero_mpi.job.schema import TABLES, JobConfig
from hetero_mpi.util import toml
from hetero_mpi.util.disk import require_regular
from hetero_mpi.util.display import Displayed
from hetero_mpi.util.errors import Problem, UserError, require
from hetero_mpi.util.shipped import profile_file, require_kind, shipped_folder
from hetero_mpi.util.terminal import write_text

_PLUG_IN_KEYS = "plan.schedule", "train.preference", "cluster.device", "report.trackers"
_tell_once = cache(write_text)  # a command may read the job several times


@dataclass(frozen=True, repr=False)
class LoadedJob(Displayed):
    """A validated job and where it was loaded from."""

    job: JobConfig
    path: Path
    """Path of the job file, or a label if the job was built in Python."""
    name: str
    """Name of the job file without ``.toml``."""
    directory: Path
    """Absolute directory of the job file, to which the job's paths are relative."""
    lost: tuple[str, ...] = ()
    """Keys of a stored job whose plug-ins have no file any more; they have their defaults."""

    def resolve(self, path_text: str) -> Path:
        """Make a path from the job absolute, expanding ``{stdlib}`` and ``~``."""
        return self.directory / Path(path_text.replace("{stdlib}", _stdlib())).expanduser()

    def profile_file(self, text: str) -> Path:
        """Return the path of the profile ``text``, a path or a shipped profile's name. Raises the errors of ``profile_file``."""
        return profile_file(text, self.resolve(text))

    def patterns(self, key: Literal["text", "records", "evaluation"]) -> tuple[str, ...]:
        """Return the absolute glob patterns of a key of ``[data]``, or an empty tuple if the key is empty."""
        return tuple(map(self._pattern, getattr(self.job.data, key) or ()))

    def evaluation_sets(self) -> dict[str, tuple[str, ...]]:
        """Map the name of each set in ``[data.evaluation_sets]`` to its absolute glob patterns."""
        patterns_by_set = self.job.data.evaluation_sets or {}
        return {name: tuple(map(self._pattern, patterns)) for name, patterns in patterns_by_set.items()}

    def _pattern(self, text: str) -> str:
        if text.startswith("hf:"):  # a dataset of the Hugging Face Hub
            return text
        expanded = Path(text.removeprefix("!").replace("{stdlib}", glob.escape(_stdlib()))).expanduser()
        return ("!" if text.startswith("!") else "") + str(Path(glob.escape(str(self.directory))) / expanded)


def job_to_dict(job: JobConfig) -> dict[str, Any]:
    """Convert a job to JSON-serialisable values, for broadcasts and checkpoints."""
    return job.model_dump(mode="json")


def job_from_dict(values: Mapping[str, Any]) -> JobConfig:
    """Restore a job from the result of :func:`job_to_dict`."""
    return JobConfig.model_validate(dict(values))


def run_directory(loaded: LoadedJob, override: str | Path | None = None) -> Path:
    """Return the absolute run directory: ``override`` (``--run-dir``) or else ``output.run_dir``, with ``{name}`` expanded.

    :func:`load_job` rejects a relative ``output.run_dir`` outside the working directory, so that a job file from a third party
    cannot write to arbitrary places. Absolute paths and ``--run-dir`` are not restricted.
    """
    text = loaded.job.output.run_dir if override is None else str(override)
    if not text.strip():
        raise UserError("job.run_directory", "--run-dir must name a directory; it is empty")
    return Path.cwd() / Path(text.replace("{name}", loaded.name)).expanduser()


def load_job(path: str | Path, overrides: Sequence[str] = (), settings: Mapping[str, Any] | None = None) -> LoadedJob:
    """Read a job file, apply overrides and validate the result.

    Args:
        overrides: ``table.key=value`` strings from ``--set``. The value is TOML; a bare word is a string.
        settings: overrides from a Python program, such as ``{"train.steps": 6}``. None empties a key.

    Raises:
        UserError: If the job is invalid. Lists all problems, one per line, as ``file: [table] key = value: rule``.
    """
    path = Path(path)
    require_kind(tables := _read_toml(path), "job", str(path))
    draft = _Draft(tables, str(path))
    draft.apply(settings or {}, overrides)
    return LoadedJob(draft.validated(path.stem), path, path.stem, path.absolute().parent)


def job_from_tables(
    tables: Mapping[str, Mapping[str, Any]],
    name: str,
    directory: str | Path,
    settings: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
) -> LoadedJob:
    """Build a job from Python values instead of a file.

    Args:
        tables: table name -> key -> value, as in a TOML file. None empties a key.
        name: name of the job, like a job file's name without ``.toml``.
        directory: directory to which the job's paths are relative.
        settings, overrides: as in ``load_job``.

    Raises:
        UserError: As in ``load_job``.
    """
    require(isinstance(tables, Mapping), "api.argument", "tables", 'a dict, such as {"train": {"steps": 6}}', tables)
    require(isinstance(directory, (str, PathLike)), "api.argument", "directory", "the path of a directory", directory)
    if not isinstance(name, str) or not name or name != Path(name).name:
        raise UserError("job.name", f"job name {name!r} must be a name without slashes, as it names the run directory")
    draft = _Draft(_as_values(tables), f"job {name!r}")
    draft.apply(settings or {}, overrides)
    label = Path(f"{name} (built in Python)")
    return LoadedJob(draft.validated(name), label, name, Path(directory).expanduser().absolute())


def stored_job(
    tables: Mapping[str, Mapping[str, Any]], name: str, directory: str | Path, overrides: Sequence[str] = ()
) -> LoadedJob:
    """Restore a job that a run has stored, and apply overrides from ``--set``. Raises UserError as in ``load_job``.

    Setup resolved its values, so together they may break rules for job files, such as ``train.steps`` along with ``train.epochs``.
    """
    source, values = f"job {name!r}", _as_values(tables)
    lost = _lost_plug_ins(values, [text.partition("=")[0].strip() for text in overrides])
    values = job_to_dict(_Draft(values, source).validated(name, None))
    draft, accepted = _Draft(values, source), {*contradictions(JobValues(values, set(), TABLES), name)}
    draft.apply({}, overrides)
    job = draft.validated(name, accepted)
    return LoadedJob(job, Path(f"{name} (a run's job)"), name, Path(directory).absolute(), lost)


def _lost_plug_ins(values: dict[str, Any], overridden: Collection[str]) -> tuple[str, ...]:
    """Return the keys that name a plug-in without a file, such as a deleted schedule, and set them to their defaults."""
    lost = []
    for dotted in _PLUG_IN_KEYS:
        name, _, key = dotted.partition(".")
        table = values.get(name)
        if isinstance(table, dict) and key in table and key in broken_keys(TABLES[name], table):
            lost.append(dotted)
            default, value = TABLES[name].model_fields[key].default, as_toml(table.pop(key))
            instead = "" if dotted in overridden else f"; {as_toml(default)} stands in for it"
            _tell_once(f"the run's [{name}] {key} = {value}: its file is gone{instead}\n", sys.stderr)
    return tuple(lost)


class _Draft:
    """The values of a job before validation, and the problems found in them."""

    def __init__(self, values: dict[str, Any], source: str) -> None:
        self.values, self.source = values, source
        self._problems: list[Problem] = []
        self._sources: dict[str, str] = {}
        """Maps an overridden key, such as ``train.steps``, to the source of the override: ``--set`` or ``set``."""
        self._broken: set[str] = set()

    def apply(self, settings: Mapping[str, Any], overrides: Sequence[str]) -> None:
        """Apply the overrides from ``--set``, then those from a Python program."""
        for text in overrides:
            if text != text.encode("utf-8", "replace").decode():  # bytes of another encoding on the command line
                self._add("job.set", f"--set {text!a}: must be UTF-8")
                continue
            dotted, equals, value = text.partition("=")
            keys = [part.strip() for part in dotted.split(".")]
            if not equals or not _is_key(keys):
                example = instead_of_key(keys[-1], value.strip() if equals else None, True)
                rule = "must be table.key=value"
                self._add("job.set", f"--set {text}: {rule}; {example or 'such as --set train.steps=6'}")
                continue
            try:
                self._put("--set", text, keys, override_value(value.strip()))
            except toml.TomlError as error:
                self._add("job.set", f"--set {text}: the value is not valid TOML: {error}")
        require(isinstance(settings, Mapping), "api.argument", "set", 'a dict, such as {"train.steps": 6}', settings)
        for dotted, value in settings.items():
            keys = [part.strip() for part in str(dotted).split(".")]
            if _is_key(keys):
                self._put("set", repr(dotted), keys, _as_values(value))
            else:
                self._add("job.set", f"set {dotted!r}: must be table.key, such as train.steps")

    def _add(self, kind: str, text: str) -> None:
        self._problems.append(Problem(kind, text))

    def _put(self, source: str, label: str, keys: Sequence[str], value: Any) -> None:
        table = self.values
        for depth, key in enumerate(keys[:-1], start=1):
            table = table.setdefault(key, {})
            if not isinstance(table, dict):
                parent = f"{'.'.join(keys[:depth])} = {as_toml(table)}"
                self._add("job.set", f"{source} {label}: {parent} in the job file is not a table, so it has no keys")
                return
        table[keys[-1]] = value
        self._sources[".".join(keys[:2])] = source

    def validated(self, name: str, accepted: Collection[tuple[str, str]] | None = ()) -> JobConfig:
        """Validate a job named ``name``, but no contradictions in ``accepted`` (None: all). Raises UserError as in ``load_job``."""
        values = self.values
        for unknown in [table for table in values if table not in TABLES]:
            value = values.pop(unknown)
            hints = [
                instead_of_key(*entry, False)
                for entry in (value if isinstance(value, dict) else {unknown: value}).items()
            ]
            kind = "unknown table; " if isinstance(value, dict) else "a key outside a table; "
            hint = read_names()["tables"].get(unknown.lower()) or "; ".join(dict.fromkeys(filter(None, hints)))
            rule = kind + hint if hint else unknown_name(f"[{unknown}]", [f"[{table}]" for table in TABLES], "table")
            self._add("job.table", f"{self.source}: {unknown} = {as_toml(value)}: {rule}")
        for table in TABLES:
            self._check_table(table)
        problems = [] if accepted is None else [*contradictions(JobValues(values, self._broken, TABLES), name)]
        for dotted, rule in [problem for problem in problems if problem not in (accepted or ())]:
            self._report(dotted, rule)
        if self._problems:
            raise UserError("job.invalid", "\n".join(map(str, self._problems)), problems=self._problems)
        if values["model"].get("factory") is not None:  # custom models: one token per sample, fp32 layers
            values["data"]["sequence_length"], values["train"]["dtype"] = 1, "fp32"
        return JobConfig.model_validate(values)

    def _check_table(self, name: str) -> None:
        table, model = self.values.setdefault(name, {}), TABLES[name]
        if not isinstance(table, dict):
            rule = f"must be a table: write [{name}], and its keys in the lines below"
            self._add("job.table", f"{self.source}: {name} = {as_toml(table)}: {rule}")
            self.values[name] = {}
            self._broken |= {f"{name}.{key}" for key in model.model_fields}
            return
        for key, field in model.model_fields.items():
            if table.get(key) == "" and may_be_empty(field):
                table[key] = None
            other_spellings = read_names()["synonyms"].get(f"{name}.{key}", {})
            if (word := str(table.get(key)).lower().removeprefix("torch.")) in other_spellings:
                table[key] = other_spellings[word]
        for key, rule in broken_keys(model, table).items():
            self._report(f"{name}.{key}", rule, table)

    def _report(self, dotted: str, rule: str, table: Mapping[str, Any] | None = None) -> None:
        """Add a problem of a key. ``table`` has its value if one of the two is invalid in itself; then say what to write."""
        name, _, key = dotted.partition(".")
        source = self._sources.get(dotted, self.source)
        if table is not None and key in TABLES[name].model_fields:
            settings = settings_for(dotted, table.get(key))
            rule += f"; write {written(settings, source == '--set')}" if key in table and settings else ""
        elif table is not None:
            hint = f"[{key}] is a table" if key in TABLES else instead_of_key(key, table[key], source == "--set", name)
            rule = f"unknown key; {hint}" if hint else rule
        value_text = f" = {as_toml(self.values[name][key])}" if key in self.values.get(name, {}) else ""
        self._add(f"job.{dotted}", f"{source}: [{name}] {key}{value_text}: {rule}")
        self._broken.add(dotted)


def _read_toml(path: Path) -> dict[str, Any]:
    if path.is_dir():
        text = f"{path}: must be a job file, but is a directory"
        raise UserError("file.not_regular", text + _instead_of_file(path))
    require_regular(path)
    try:
        # utf-8-sig: some editors put a byte order mark at the start, which TOML does not allow.
        return toml.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        text = f"{path}: job file not found (working directory: {Path.cwd()})"
        raise UserError("job.missing", text + _instead_of_file(path)) from None
    except OSError as error:
        raise UserError("job.unreadable", f"{path}: cannot read the job file: {error.strerror}") from None
    except UnicodeDecodeError:
        text = f"{path}: the job file is not UTF-8; save it as TOML in UTF-8"
        raise UserError("job.encoding", text + _instead_of_file(path)) from None
    except toml.TomlError as error:
        text = f"{path}: the job file is not valid TOML: {error}"
        raise UserError("job.toml", text + _instead_of_file(path)) from None


def _instead_of_file(path: Path) -> str:
    """Return what to type instead of a file that is not a job, or does not exist."""
    quoted = shlex.quote(str(path))
    if path.suffix in (".yml", ".yaml", ".json", ".sh"):
        return f"; convert another tool's config with `hetero-mpi init --from {quoted}`"
    if path.suffix == ".py":
        return f"; start a Python program with `mpirun -np N python {quoted}` (docs/python.md)"
    if path.suffix in (".jsonl", ".parquet", ".csv", ".txt", ".gz"):
        return f"; data files need a job: {instead_of_key('data', str(path), True)} after a job file"
    folders = [path] if path.is_dir() else [] if path.exists() else [path.parent, Path("jobs")]
    nearby = [str(file) for folder in folders for file in sorted(folder.glob("*.toml"))]
    nearby = [file for file in nearby if not file.endswith(("plan.toml", "profile.toml"))]
    if (path / "run.json").exists():
        return f"; `train JOB --resume latest --run-dir {quoted}` continues its run; {quoted}/run.json names JOB (`job_file`)"
    if path.exists():
        return f"; job files: {', '.join(nearby)}" if nearby else ""
    if similar := difflib.get_close_matches(str(path), nearby, n=1, cutoff=0.5):
        return f"; did you mean {similar[0]}?"
    is_shipped = (shipped_folder("jobs") / path.name).exists()
    return f"; `hetero-mpi init {path.stem if is_shipped else 'quickstart'}` copies an example job"


def _is_key(keys: Sequence[str]) -> bool:
    return 2 <= len(keys) <= toml.MAX_NESTING_DEPTH and all(keys)


def _as_values(value: Any) -> Any:
    """Convert a Python value to its form in a job file: a path to a string, a tuple to a list, None to ``""``."""
    if isinstance(value, Mapping):
        return {str(key): _as_values(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_values(inner) for inner in value]
    if isinstance(value, PurePath):
        return str(value)
    return "" if value is None else value


def _stdlib() -> str:
    return sysconfig.get_path("stdlib")
