"""A directory of checkpoints: their names, the newest whole one, and which may go."""

from __future__ import annotations

import os
import re
from pathlib import Path

from hetero_mpi.checkpoint.reader import verify

_NAME = re.compile(r"step-(\d{8,})\.h5")


def checkpoint_path(directory: str | os.PathLike[str], step: int) -> Path:
    """``DIRECTORY/step-00000120.h5`` for step 120."""
    return Path(directory) / f"step-{step:08d}.h5"


def newest_good(directory: str | os.PathLike[str]) -> tuple[Path | None, list[tuple[Path, str]]]:
    """The newest checkpoint that is whole, and the newer ones that were passed over, each with the reason.

    Every candidate is read through to compare its checksums. Without any checkpoint it is ``(None, [])``.
    """
    skipped: list[tuple[Path, str]] = []
    for path in _newest_first(Path(directory)):
        reason = verify(path)
        if reason is None:
            return path, skipped
        skipped.append((path, reason))
    return None, skipped


def prune(directory: str | os.PathLike[str], keep: int) -> list[Path]:
    """Remove all but the ``keep`` newest checkpoints and the newest whole one; return what was removed.

    The newest are read through only when there is something to remove.
    """
    assert keep >= 1, keep
    surplus = _newest_first(Path(directory))[keep:]
    if not surplus:
        return []
    good, _ = newest_good(directory)
    removed = [path for path in surplus if path != good]
    for path in removed:
        path.unlink(missing_ok=True)
    return removed


def _newest_first(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    steps = {path: int(match[1]) for path in directory.iterdir() if (match := _NAME.fullmatch(path.name))}
    return sorted(steps, key=lambda path: steps[path], reverse=True)
