"""A run directory that is used again: the files of the run before go to ``RUN/set-aside-1``, which is a run directory itself.

Every move is a rename within the directory, and what tells that there is a run (metrics, then checkpoints) moves last. So a
crash between two moves loses nothing: the next start goes on with the same target.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from hetero_mpi.errors import UserError

_COPIED = ("profile.toml", "plan.toml", "logs")
"""They serve the next run too, or are open."""
_EVENTS = "events.jsonl"
_MOVED = (
    *("adapter", "model", "sample.txt", "simulation", "tensorboard", "architecture.png", "architecture.svg"),
    *(
        "report.html",
        "trace.json",
        "used-profile.toml",
        "steps.jsonl",
        _EVENTS,
        "run.json",
        "metrics.jsonl",
        "checkpoints",
    ),
)


def holds_run(run_dir: Path) -> bool:
    """Has a run in this directory taken a step, of which something is left?"""
    metrics = run_dir / "metrics.jsonl"
    return (metrics.exists() and metrics.stat().st_size > 0) or any((run_dir / "checkpoints").glob("step-*.h5"))


def set_aside_run(run_dir: Path, read: Iterable[Path], own: Callable[[Mapping[str, Any]], bool]) -> Path | None:
    """Move the run that the directory holds out of the way of one that begins; returns where it is now, None: there was none.

    Args:
        read: what the new run reads.
        own: does an event belong to the new run?

    Raises:
        UserError: the new run reads files of the old one, or they cannot be moved.
    """
    if not holds_run(run_dir):
        return None
    used = next(
        (path for path in read for name in _MOVED if path.resolve().is_relative_to((run_dir / name).resolve())), None
    )
    if used is not None:
        raise UserError(
            f"a run that begins anew sets aside the run in its directory, {run_dir}, but this one reads {used} there: "
            "choose another directory with --run-dir, or go on with --resume."
        )
    moved, number = [name for name in _MOVED if (run_dir / name).exists()], 1
    while any((run_dir / f"set-aside-{number}" / name).exists() for name in moved):
        number += 1
    target = run_dir / f"set-aside-{number}"
    try:
        target.mkdir(exist_ok=True)
        for name in _COPIED:
            _copy(run_dir / name, target / name)
        for name in moved:
            (run_dir / name).rename(target / name)
            if name == _EVENTS:
                _bring_back(target / name, run_dir / name, own)
    except OSError as error:
        raise UserError(
            f"{run_dir} holds a run, which could not be moved to {target} ({error.strerror}): choose another directory with "
            "--run-dir, or go on with --resume."
        ) from None
    return target


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True)
    elif source.exists():
        shutil.copy2(source, target)


def _bring_back(source: Path, target: Path, own: Callable[[Mapping[str, Any]], bool]) -> None:
    """Events of the new run, such as its supervisor's start, which may write more of them at this moment."""

    def is_own(line: str) -> bool:
        try:
            values = json.loads(line)
        except ValueError:
            return False  # torn by a crash
        return isinstance(values, dict) and own(values)

    lines = source.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    if mine := [line for line in lines if is_own(line)]:
        with target.open("a", encoding="utf-8") as file:
            file.writelines(mine)
        draft = source.with_name(source.name + ".partial")
        draft.write_text("".join(line for line in lines if line not in mine), encoding="utf-8")
        draft.replace(source)
