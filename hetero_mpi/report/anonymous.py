"""A run as it may be shown to anybody: hosts have numbers for names, paths only their last part, and no user is named."""

from __future__ import annotations

import getpass
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from hetero_mpi.report.past_run import PastRun
from hetero_mpi.report.run_files.line_files import objects

T = TypeVar("T")
_PATH = re.compile(r"""(?<![\w./~-])~?/(?:[^\s'"`,;:()\[\]{}<>|]*/)*([^\s'"`,;:()\[\]{}<>|/]*)""")
"""An absolute path within a text, or one of a home; its last part."""
_NAMED = ("host", "hosts", "name")
"""Fields that may hold a host's name alone."""


def anonymous(run: PastRun) -> PastRun:
    """The run without names of hosts and users, and without absolute paths. What a model wrote (``sample``) stays."""
    hosts = _hosts(run)
    users = {getpass.getuser(), *(path.parts[2] for path in _homes(run))}
    known = {name: f"host {number}" for number, name in enumerate(hosts)} | {
        user: "user" for user in users if user not in hosts
    }
    words = "|".join(re.escape(name) for name in sorted(known, key=len, reverse=True))
    named = re.compile(rf"(?<![\w.-])(?:{words})(?![\w-])")

    def of_text(text: str, field: str) -> str:
        if field in _NAMED and text in hosts:
            return known[text]
        if text.startswith(("/", "~")):  # a path alone may have spaces
            return f".../{Path(text).name}"
        if " " not in text and "/" not in text:
            return text  # a word of ours, such as "cpu", or a host's field
        text = _PATH.sub(lambda found: f".../{found[1]}", text)
        return named.sub(lambda found: known[found[0]], text)

    def of(value: Any, field: str) -> Any:
        if isinstance(value, str):
            return of_text(value, field)
        if isinstance(value, Mapping):
            return {key: of(inner, str(key)) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(of(inner, field) for inner in value)
        return without(value) if is_dataclass(value) and not isinstance(value, type) else value

    def without(value: T) -> T:
        changed = {one.name: of(getattr(value, one.name), one.name) for one in fields(value) if one.init}  # type: ignore[arg-type]
        return replace(value, **changed)  # type: ignore[type-var]

    return replace(
        run,
        name=of(run.name, ""),
        job=of(run.job, ""),
        report=of(run.report, ""),
        profile=of(run.profile, ""),
        happenings=of(run.happenings, ""),
    )


def _hosts(run: PastRun) -> list[str]:
    """The hosts of the run in the order of their ranks, then those that its events name."""
    found = [device.host for device in run.profile.devices] if run.profile is not None else []
    for _, event in objects(run.directory / "events.jsonl"):
        for key in ("host", "hosts", "present", "missing"):
            told = event.get(key, ())
            found += [told] if isinstance(told, str) else [name for name in told if isinstance(name, str)]
    # "titan#2" is another machine of the same name.
    return list(dict.fromkeys([*found, *(name.partition("#")[0] for name in found)]))


def _homes(run: PastRun) -> list[Path]:
    """Folders of users under which the run or its job's files lie."""
    texts = [str(run.directory.absolute()), *(word for word in re.split(r"""[\s'",\[\]]+""", str(run.job)))]
    paths = [Path(text) for text in texts if text.startswith(("/home/", "/Users/"))]
    return [path for path in paths if len(path.parts) > 2]
