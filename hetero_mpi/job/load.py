"""The user's intent: ``job.toml``, or tables given by a Python program -> ``JobConfig``, validated. Never derived values.

What a job may say is in ``job/schema.py``; here it is read, from a file or not, and all its problems are told at once.
"""

from __future__ import annotations

import glob
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Literal

from hetero_mpi.job.contradictions import Known, contradictions
from hetero_mpi.job.rules import as_toml, broken_keys, may_be_empty, unknown_table
from hetero_mpi.job.schema import TABLES, JobConfig
from hetero_mpi.util import toml
from hetero_mpi.util.disk import require_regular
from hetero_mpi.util.errors import Problem, UserError
from hetero_mpi.util.shipped import profile_file


@dataclass(frozen=True)
class LoadedJob:
    """A job and where it came from."""

    job: JobConfig
    path: Path
    """The job file; of a job that was built in Python, words that say so."""
    name: str
    """The job file's name without ``.toml``."""
    directory: Path
    """Absolute directory of the job file: where relative paths of the job start."""

    def resolve(self, path_text: str) -> Path:
        """A path of the job file as an absolute path: ``{stdlib}`` and ``~`` expanded, relative to the job file."""
        return self.directory / Path(path_text.replace("{stdlib}", _stdlib())).expanduser()

    def profile_file(self, text: str) -> Path:
        """A profile that the job names: by its path, as ``resolve``, or by the name of a shipped one. Raises as that function."""
        return profile_file(text, self.resolve(text))

    def patterns(self, key: Literal["text", "records", "evaluation"]) -> tuple[str, ...]:
        """This key of ``[data]`` as absolute glob patterns, none where it is empty; the job file's own directory is escaped, as it
        is no pattern.
        """
        return tuple(map(self._pattern, getattr(self.job.data, key) or ()))

    def evaluation_sets(self) -> dict[str, tuple[str, ...]]:
        """The same of each set of ``[data.evaluation_sets]``."""
        found = self.job.data.evaluation_sets or {}
        return {name: tuple(map(self._pattern, patterns)) for name, patterns in found.items()}

    def _pattern(self, text: str) -> str:
        if text.startswith("hf:"):  # a data set of the hub
            return text
        expanded = Path(text.removeprefix("!").replace("{stdlib}", glob.escape(_stdlib()))).expanduser()
        return ("!" if text.startswith("!") else "") + str(Path(glob.escape(str(self.directory))) / expanded)


def job_to_dict(job: JobConfig) -> dict[str, Any]:
    """The job as JSON-able values, to be broadcast or stored in a checkpoint."""
    return job.model_dump(mode="json")


def job_from_dict(values: Mapping[str, Any]) -> JobConfig:
    """The inverse of :func:`job_to_dict`."""
    return JobConfig.model_validate(dict(values))


def run_directory(loaded: LoadedJob, override: str | Path | None = None) -> Path:
    """The run directory, absolute: ``override`` (``--run-dir``) or the job's ``output.run_dir``; ``{name}`` filled in.

    A relative ``output.run_dir`` that leads out of the working directory is refused by :func:`load_job`: a job file
    from somebody else should not write just anywhere. Absolute paths, and ``--run-dir``, are meant as they are.
    """
    text = loaded.job.output.run_dir if override is None else str(override)
    if not text.strip():
        raise UserError("job.run_directory", "--run-dir must name a directory; it is empty")
    return Path.cwd() / Path(text.replace("{name}", loaded.name)).expanduser()


def load_job(path: str | Path, overrides: Sequence[str] = (), settings: Mapping[str, Any] | None = None) -> LoadedJob:
    """Read and validate a job file, with changes applied to it first.

    Args:
        overrides: ``table.key=value`` each, of ``--set``: the value is TOML, a bare word is a string.
        settings: the same from a Python program, ``{"train.steps": 6}``; None empties a key.

    Raises:
        UserError: with *all* problems, one per line: ``file: [table] key = value: rule``.
    """
    path = Path(path)
    draft = _Draft(_read_toml(path), str(path))
    draft.settle(settings or {}, overrides)
    return LoadedJob(draft.validated(path.stem), path, path.stem, path.absolute().parent)


def job_of_tables(
    tables: Mapping[str, Mapping[str, Any]],
    name: str,
    directory: str | Path,
    settings: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
) -> LoadedJob:
    """A job from values instead of a file: table name -> key -> value, as a TOML file has them; None empties a key.

    Args:
        name: what the job is called, a file's name without ``.toml``.
        directory: where relative paths of the job start.
        settings, overrides: as for ``load_job``.

    Raises:
        UserError: as ``load_job``.
    """
    if not name or name != Path(name).name:
        raise UserError(
            "job.name", f"a job's name names its run directory: it is one word without slashes, not {name!r}"
        )
    draft = _Draft(_as_values(tables), f"job {name!r}")
    draft.settle(settings or {}, overrides)
    return LoadedJob(
        draft.validated(name), Path(f"{name} (built in Python)"), name, Path(directory).expanduser().absolute()
    )


class _Draft:
    """The values of a job in the making, and what is wrong with them."""

    def __init__(self, values: dict[str, Any], source: str) -> None:
        self.values, self.source = values, source
        self._problems: list[Problem] = []
        self._changed: dict[str, str] = {}
        """Key (``train.steps``) -> who has laid another value over the source's."""
        self._broken: set[str] = set()

    def settle(self, settings: Mapping[str, Any], overrides: Sequence[str]) -> None:
        """Lay the values of ``--set`` over the source's, and those of a Python program."""
        for text in overrides:
            if text != text.encode("utf-8", "replace").decode():  # bytes of another encoding on the command line
                self._add("job.set", f"--set {text!a}: must be UTF-8")
                continue
            dotted, equals, value = text.partition("=")
            keys = [part.strip() for part in dotted.split(".")]
            if not equals or not _is_key(keys):
                self._add("job.set", f"--set {text}: must be table.key=value, such as --set train.steps=6")
                continue
            try:
                self._put("--set", text, keys, _override_value(value.strip()))
            except toml.TomlError as error:
                self._add("job.set", f"--set {text}: the value is no TOML value: {error}")
        for dotted, value in settings.items():
            keys = [part.strip() for part in dotted.split(".")]
            if _is_key(keys):
                self._put("set", repr(dotted), keys, _as_values(value))
            else:
                self._add("job.set", f"set {dotted!r}: must be table.key, such as train.steps")

    def _add(self, kind: str, text: str) -> None:
        self._problems.append(Problem(kind, text))

    def _put(self, by: str, shown: str, keys: Sequence[str], value: Any) -> None:
        table = self.values
        for depth, key in enumerate(keys[:-1], start=1):
            table = table.setdefault(key, {})
            if not isinstance(table, dict):
                what = f"{'.'.join(keys[:depth])} = {as_toml(table)}"
                self._add("job.set", f"{by} {shown}: {what} in the job file is no table to set a key of")
                return
        table[keys[-1]] = value
        self._changed[".".join(keys[:2])] = by

    def validated(self, name: str) -> JobConfig:
        """The job called ``name``. Raises: ``UserError``, as ``load_job``."""
        values = self.values
        for unknown in [table for table in values if table not in TABLES]:
            shown = as_toml(values.pop(unknown))
            self._add("job.table", f"{self.source}: {unknown} = {shown}: {unknown_table(unknown, TABLES)}")
        for table in TABLES:
            self._check_table(table)
        for dotted, rule in [*contradictions(Known(values, self._broken, TABLES), name)]:
            self._report(dotted, rule)
        if self._problems:
            raise UserError("job.invalid", "\n".join(map(str, self._problems)), problems=self._problems)
        if values["model"].get("factory") is not None:  # a sample counts as one token, and layers are fp32
            values["data"]["sequence_length"], values["train"]["dtype"] = 1, "fp32"
        return JobConfig.model_validate(values)

    def _check_table(self, name: str) -> None:
        table, model = self.values.setdefault(name, {}), TABLES[name]
        if not isinstance(table, dict):
            rule = f"must be a table; write [{name}] and its keys below it"
            self._add("job.table", f"{self.source}: {name} = {as_toml(table)}: {rule}")
            self.values[name] = {}
            self._broken |= {f"{name}.{key}" for key in model.model_fields}
            return
        for key, field in model.model_fields.items():
            if table.get(key) == "" and may_be_empty(field):
                table[key] = None
        for key, rule in broken_keys(name, model, table, TABLES).items():
            self._report(f"{name}.{key}", rule)

    def _report(self, dotted: str, rule: str) -> None:
        table, _, key = dotted.partition(".")
        shown = f" = {as_toml(self.values[table][key])}" if key in self.values.get(table, {}) else ""
        self._add(f"job.{dotted}", f"{self._changed.get(dotted, self.source)}: [{table}] {key}{shown}: {rule}")
        self._broken.add(dotted)


def _read_toml(path: Path) -> dict[str, Any]:
    require_regular(path)
    try:
        # utf-8-sig: some editors put a byte order mark at the start, which TOML does not allow.
        return toml.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise UserError("job.missing", f"{path}: there is no such job file (looked from {Path.cwd()})") from None
    except OSError as error:
        raise UserError("job.unreadable", f"{path}: the job file cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError("job.encoding", f"{path}: a job file must be TOML in UTF-8; this one is not UTF-8") from None
    except toml.TomlError as error:
        raise UserError("job.toml", f"{path}: a job file must be TOML: {error}") from None


def _is_key(keys: Sequence[str]) -> bool:
    return 2 <= len(keys) <= toml.MAX_NESTING_DEPTH and all(keys)


def _override_value(text: str) -> Any:
    try:
        parsed = toml.loads(f"value = {text}")
        return parsed["value"] if len(parsed) == 1 else text
    except toml.TomlError:
        if text[:1] in ("[", "{", '"', "'"):  # meant as TOML, and mistyped
            raise
        return text


def _as_values(value: Any) -> Any:
    """A Python program's value as a job file would have it: paths are texts, tuples are lists, None is empty."""
    if isinstance(value, Mapping):
        return {str(key): _as_values(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_values(inner) for inner in value]
    if isinstance(value, PurePath):
        return str(value)
    return "" if value is None else value


def _stdlib() -> str:
    return sysconfig.get_path("stdlib")
