"""Checkpoints and shards as files: their names, the newest whole checkpoint, which may go, and the writer of shards.

A *shard*, ``RUN/copies/rank-0002/step-00000120.5f2c09aa.h5``, is the part of a version (``state.State``) that one rank writes to
its host's disk while a supervisor may have to start the run again: the rank's own part, and those of the ranks whose peer it is.
So if a machine is lost with its disk, checkpoints included, its ranks' parts are on the disks of their peers. All shards of a
version, and no others, bear its id, so shards of different moments, or of the same step taken twice, never make one whole.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import math
import os
import re
import shutil
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hetero_mpi.rundir.line_files import METRICS_NAME, STEPS_NAME
from hetero_mpi.rundir.logs import say
from hetero_mpi.rundir.run_directory import START_VARIABLE
from hetero_mpi.state.hdf5 import CheckpointError
from hetero_mpi.state.reader import CheckpointReader, verify
from hetero_mpi.util.errors import UserError

if TYPE_CHECKING:
    pass

_LOG = logging.getLogger(__name__)
LATEST = "latest"
"""``--resume latest``: from the newest state in the run directory."""
ANY = "any"
"""Like ``LATEST``, or from the beginning where there is no state; the supervisor uses it."""
_NAME = re.compile(r"step-(\d{8,})\.h5")
SHARDS_NAME = "copies"
_SHARD = re.compile(r"step-(\d{8,})\.([0-9a-f]{8})\.h5")


def checkpoint_path(directory: Path, step: int) -> Path:
    """``DIRECTORY/step-00000120.h5`` for step 120."""
    return directory / f"step-{step:08d}.h5"


def newest_good(directory: Path) -> tuple[Path | None, list[tuple[Path, str]]]:
    """The newest checkpoint that is whole, and the newer ones that were passed over, each with the reason.

    Every candidate is read through to compare its checksums. Without any checkpoint it is ``(None, [])``.
    """
    skipped: list[tuple[Path, str]] = []
    for path in _newest_first(directory):
        reason = verify(path)
        if reason is None:
            return path, skipped
        skipped.append((path, reason))
    return None, skipped


def find_checkpoint(run_dir: Path, wanted: str) -> Path:
    """The checkpoint to resume from. ``wanted``: ``LATEST`` (or ``ANY``), or the path of a checkpoint file. Raises UserError: no
    whole checkpoint is there.
    """
    if wanted not in (LATEST, ANY):
        path = Path(wanted)
        if not path.exists():
            raise UserError(
                "checkpoint.missing",
                f"{path}: no such checkpoint; `--resume latest` takes the newest one of the run directory",
            )
        damage = verify(path)
        if damage is not None:
            raise UserError("checkpoint.damaged", damage)
        return path
    directory = run_dir / "checkpoints"
    newest, skipped = newest_good(directory)
    if newest is None:
        detail = "; ".join(f"passed over {path}: {reason}" for path, reason in skipped) or "it holds none"
        raise UserError(
            "checkpoint.none_whole",
            f"{directory}: no whole checkpoint to resume from ({detail}); start without --resume",
        )
    return newest


def newest_readable(directory: Path) -> Path | None:
    """The newest checkpoint whose metadata can be read; whether it is whole is not looked at."""
    for path in _newest_first(directory):
        with contextlib.suppress(CheckpointError), CheckpointReader(path) as reader:
            if reader.metadata:
                return path
    return None


def prune(directory: Path, keep: int, keep_best: int = 0, just_written: Path | None = None) -> list[Path]:
    """Remove all checkpoints but the ones below; return what was removed.

    What stays: the ``keep`` newest, the ``keep_best`` with the lowest held-out loss of those that know theirs, and the newest
    whole one. To find the last, the newest are read through, and only when there is something to remove; ``just_written``
    names one that this process has just written, and which therefore is whole.
    """
    assert keep >= 1, keep
    found = _newest_first(directory)
    if len(found) <= keep:
        return []
    good = just_written if just_written in found else newest_good(directory)[0]
    best = lowest_held_out(directory)[:keep_best] if keep_best else []
    stays = {*found[:keep], *best, good}
    removed = [path for path in found if path not in stays]
    _remove(removed)
    return removed


def set_later_aside(run_dir: Path, step: int) -> None:
    """Move checkpoints of steps after ``step`` out of the way, with a copy of the metrics of those steps; report where they are.

    They belong to a run that this one does not continue, and would count as its newest. Raises UserError: they cannot be moved.
    """
    number = 1
    while (target := run_dir / f"checkpoints-set-aside-{number}").exists():
        number += 1
    try:
        later = [path for path in _newest_first(run_dir / "checkpoints") if _step_of(path) > step]
        if not later:
            return
        target.mkdir()
        for path in later:
            path.rename(target / path.name)
    except OSError as error:
        raise UserError(
            "resume.not_archived",
            f"{run_dir} holds checkpoints of after step {step}, which could not be moved aside ({error.strerror}): make room "
            f"there, or move them yourself",
        ) from None
    for name in (METRICS_NAME, STEPS_NAME):
        with contextlib.suppress(OSError):  # not there, or no room for a copy
            shutil.copy2(run_dir / name, target / name)
    say(f"Checkpoints of an earlier run from after step {step} are in {target} now")


def lowest_held_out(directory: Path) -> list[Path]:
    """Checkpoints that know their held-out loss, the lowest first, the newest first among equals; damaged ones do not count."""
    losses: list[tuple[float, Path]] = []
    for path in _newest_first(directory):
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


@dataclass(frozen=True)
class Source:
    """The part of a version that one rank can read."""

    rank: int
    """The rank that can read it."""
    path: Path | None
    """A checkpoint, which is all of the version, or a shard; None: copies in the rank's memory."""
    version_id: str
    """Equal in all sources of a version, and in no others; "": a checkpoint."""
    step: int
    begun: str
    """The id of its run (``new_run_id``); "": not known."""
    writer: int
    """The rank that wrote it."""
    names: frozenset[str]
    """Parameters and constants of the model of which every tensor is in it."""

    @property
    def is_shard(self) -> bool:
        return self.path is not None and self.version_id != ""


def shard_path(run_dir: Path, rank: int, step: int, version_id: str) -> Path:
    return run_dir / SHARDS_NAME / f"rank-{rank:04}" / f"step-{step:08d}.{version_id}.h5"


def shards_on_disk(run_dir: Path, rank: int = 0) -> tuple[list[Source], list[tuple[Path, str]]]:
    """The shards on the host of ``rank`` whose headers can be read; and the others, each with the reason."""
    found: list[Source] = []
    skipped: list[tuple[Path, str]] = []
    for path, _ in _shards(run_dir):
        try:
            with CheckpointReader(path) as reader:
                said = reader.metadata
            own = said["version_id"], said["step"], said["begun"] or "", said["rank"], frozenset(said["names"])
            found.append(Source(rank, path, *own))
        except CheckpointError as error:
            skipped.append((path, str(error)))
        except KeyError:
            skipped.append((path, "a checkpoint, but no shard of a copy"))
    return found, skipped


def keep_versions(run_dir: Path, kept: Collection[str], sweep: bool = False) -> None:
    """Remove this host's shards of all versions but ``kept``. Any number of ranks may do so at once, with the same ``kept``.

    ``sweep``: also remove what dead processes were writing; only while nobody writes.
    """
    _remove(path for path, version_id in _shards(run_dir) if version_id not in kept)
    if sweep:
        _remove(_in_shard_folders(run_dir, ".*.h5.tmp-*"))


def remove_shards(run_dir: Path) -> None:
    """Remove all shards on this host: the run is over, or another one begins. Any number of ranks may do so at once."""
    keep_versions(run_dir, (), sweep=True)
    for folder in (*_in_shard_folders(run_dir, ""), run_dir / SHARDS_NAME):
        with contextlib.suppress(OSError):  # not there, or something of somebody else's in it
            folder.rmdir()


def _shards(run_dir: Path) -> list[tuple[Path, str]]:
    """(path, version id) of the shards on this host."""
    matches = [(path, _SHARD.fullmatch(path.name)) for path in _in_shard_folders(run_dir, "step-*.h5")]
    return sorted((path, name[2]) for path, name in matches if name is not None)


def _in_shard_folders(run_dir: Path, pattern: str) -> list[Path]:
    """Files of the ranks' folders; none where a folder does not exist, or another rank of the host removes it meanwhile."""
    return [Path(path) for path in glob.glob(f"{glob.escape(str(run_dir / SHARDS_NAME))}/rank-*/{pattern}")]


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):  # such as a directory of that name
            path.unlink(missing_ok=True)


def supervised() -> bool:
    """Was this run started by a supervisor (``launch --elastic``) that can start it again?"""
    return START_VARIABLE in os.environ
