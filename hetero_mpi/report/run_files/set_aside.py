"""Moves the files of an earlier run aside when its directory is used again: to ``RUN/set-aside-1``, which is a run directory
itself.

Every move is a rename within the directory. The files by which a run is recognised (metrics, then checkpoints) move last. So a
crash between two moves loses nothing: the next start goes on with the same target.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero_mpi.disk import write_whole
from hetero_mpi.errors import UserError
from hetero_mpi.report.run_files.line_files import objects

_PLANNED = ("profile.toml", "plan.toml", "architecture.png", "architecture.svg")
_LOGS = "logs"
_EVENTS = "events.jsonl"
_MOVED = (
    "adapter", "model", "sample.txt", "simulation", "tensorboard", "wandb", "report.html", "trace.json", "used-profile.toml",
    "steps.jsonl", _EVENTS, "run.json", "metrics.jsonl", "checkpoints",
)  # fmt: skip


def holds_run(run_dir: Path) -> bool:
    """Is there a run that has taken a step?"""
    metrics = run_dir / "metrics.jsonl"
    has_metrics = metrics.exists() and metrics.stat().st_size > 0
    return has_metrics or any((run_dir / "checkpoints").glob("step-*.h5"))


@dataclass(frozen=True)
class EarlierRun:
    """A run in a directory in which another run is to begin."""

    run_dir: Path

    @classmethod
    def found(cls, run_dir: Path, read: Iterable[Path]) -> EarlierRun | None:
        """The earlier run, if there is one.

        ``read``: the paths that the new run reads. Raises UserError: the new run reads files of the earlier one.
        """
        if not holds_run(run_dir):
            return None
        used = next(
            (path for path in read for name in _MOVED if path.resolve().is_relative_to((run_dir / name).resolve())),
            None,
        )
        if used is not None:
            raise UserError(
                f"a run that begins anew sets aside the run in its directory, {run_dir}, but this one reads {used} there: "
                "choose another directory with --run-dir, or go on with --resume."
            )
        return cls(run_dir)

    def set_aside(self, own: Callable[[Mapping[str, Any]], bool]) -> Path:
        """Move the earlier run's files; returns where they are now.

        ``own``: does an event belong to the new run? Raises UserError: its files cannot be moved.
        """
        run_dir = self.run_dir
        moved, number = [name for name in _MOVED if (run_dir / name).exists()], 1
        while any((run_dir / f"set-aside-{number}" / name).exists() for name in moved):
            number += 1
        target = run_dir / f"set-aside-{number}"
        try:
            target.mkdir(exist_ok=True)
            for name in _PLANNED:  # the new run may have been planned by them
                if (run_dir / name).exists():
                    shutil.copy2(run_dir / name, target / name)
            if (run_dir / _LOGS).is_dir():  # open, and the new run's too
                shutil.copytree(run_dir / _LOGS, target / _LOGS, dirs_exist_ok=True)
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


def _bring_back(source: Path, target: Path, own: Callable[[Mapping[str, Any]], bool]) -> None:
    """Bring the new run's events back, such as its supervisor's start. The supervisor may write more at this moment."""
    if mine := [line for line, values in objects(source) if own(values)]:
        lines = source.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        with target.open("a", encoding="utf-8") as file:
            file.writelines(mine)
        write_whole(source, "".join(line for line in lines if line not in mine))
