"""A directory of checkpoints: their names, the newest whole one, and which may go."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

from hetero_mpi.checkpoint.checkpoint_error import CheckpointError
from hetero_mpi.checkpoint.reader import CheckpointReader, verify

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


def prune(
    directory: str | os.PathLike[str], keep: int, keep_best: int = 0, just_written: Path | None = None
) -> list[Path]:
    """Remove all checkpoints but the ones below; return what was removed.

    What stays: the ``keep`` newest, the ``keep_best`` with the lowest held-out loss of those that know theirs, and the newest
    whole one. To find the last, the newest are read through, and only when there is something to remove; ``just_written``
    names one that this process has just written, and which therefore is whole.
    """
    assert keep >= 1, keep
    found = _newest_first(Path(directory))
    if len(found) <= keep:
        return []
    good = just_written if just_written in found else newest_good(directory)[0]
    best = lowest_held_out(directory)[:keep_best] if keep_best else []
    stays = {*found[:keep], *best, good}
    removed = [path for path in found if path not in stays]
    for path in removed:
        path.unlink(missing_ok=True)
    return removed


def set_aside(directory: str | os.PathLike[str], step: int) -> Path | None:
    """Move checkpoints of later steps than ``step`` out of the way; return the directory they are in now, if any.

    They belong to a run that this one does not continue, and would count as its newest.
    """
    directory = Path(directory)
    later = [path for path in _newest_first(directory) if _step_of(path) > step]
    if not later:
        return None
    number = 1
    while (target := directory.with_name(f"{directory.name}-set-aside-{number}")).exists():
        number += 1
    target.mkdir()
    for path in later:
        path.rename(target / path.name)
    return target


def lowest_held_out(directory: str | os.PathLike[str]) -> list[Path]:
    """Checkpoints that know their held-out loss, the lowest first, the newest first among equals; damaged ones do not count."""
    losses: list[tuple[float, Path]] = []
    for path in _newest_first(Path(directory)):
        try:
            with CheckpointReader(path) as reader:
                loss = reader.held_out_loss()
        except CheckpointError:
            continue
        if loss is not None and math.isfinite(loss):
            losses.append((loss, path))
    return [path for _, path in sorted(losses, key=lambda pair: pair[0])]


def _newest_first(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    return sorted((path for path in directory.iterdir() if _NAME.fullmatch(path.name)), key=_step_of, reverse=True)


def _step_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None, path
    return int(match[1])
