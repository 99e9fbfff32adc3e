"""Name, find and prune checkpoint and shard files.

A *shard*, ``RUN/copies/rank-0002/step-00000120.5f2c09aa.h5``, is the part of a version (``state.State``) that one rank writes to
its host's disk if a supervisor can restart the run. It contains the rank's own tensors and those of the ranks whose peer it is. If
a machine is lost together with its disk and the checkpoints on it, the peers' disks still hold its ranks' tensors. All shards
of a version share its id, so shards of different steps, or of a step that ran twice, are never combined.
"""

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

from hetero_mpi.rundir.line_files import METRICS_NAME, STEPS_NAME
from hetero_mpi.rundir.logs import say
from hetero_mpi.rundir.run_directory import START_VARIABLE
from hetero_mpi.state.hdf5 import CheckpointError
from hetero_mpi.state.reader import CheckpointReader, verify
from hetero_mpi.util.errors import UserError

_LOG = logging.getLogger(__name__)
LATEST = "latest"
"""``--resume latest``: resume from the newest state in the run directory."""
ANY = "any"
"""Like ``LATEST``, but start from scratch if there is no state; used by the supervisor."""
_NAME = re.compile(r"step-(\d{8,})\.h5")
SHARDS_NAME = "copies"
_SHARD = re.compile(r"step-(\d{8,})\.([0-9a-f]{8})\.h5")


def checkpoint_path(directory: Path, step: int) -> Path:
    """Return the path of a checkpoint, such as ``DIRECTORY/step-00000120.h5`` for step 120."""
    return directory / f"step-{step:08d}.h5"


def newest_good(directory: Path) -> tuple[Path | None, list[tuple[Path, str]]]:
    """Return the newest valid checkpoint, or None, and the invalid newer ones with the reason why each was skipped.

    Every candidate is read completely to verify its checksums.
    """
    skipped: list[tuple[Path, str]] = []
    for path in _newest_first(directory):
        reason = verify(path)
        if reason is None:
            return path, skipped
        skipped.append((path, reason))
    return None, skipped


def find_checkpoint(run_dir: Path, choice: str) -> Path:
    """Find the checkpoint to resume from. ``choice``: ``LATEST``, ``ANY`` or a path. Raises UserError if none is valid."""
    if choice not in (LATEST, ANY):
        path = Path(choice)
        with CheckpointReader(path) as reader:
            reader.check_all()
        return path
    directory = run_dir / "checkpoints"
    newest, skipped = newest_good(directory)
    if newest is None:
        detail = "; ".join(f"skipped {path}: {reason}" for path, reason in skipped) or "it contains none"
        raise UserError(
            "checkpoint.none_whole",
            f"{directory}: no valid checkpoint to resume from ({detail}); start without resuming",
        )
    return newest


def newest_readable(directory: Path) -> Path | None:
    """Return the newest checkpoint with readable metadata, or None. The tensors are not verified."""
    for path in _newest_first(directory):
        with contextlib.suppress(CheckpointError), CheckpointReader(path) as reader:
            if reader.metadata:
                return path
    return None


def prune(directory: Path, keep: int, keep_best: int = 0, just_written: Path | None = None) -> list[Path]:
    """Remove old checkpoints and return their paths.

    Keeps the ``keep`` newest checkpoints, the ``keep_best`` with the lowest known evaluation loss, and the newest valid one.
    Checkpoints are verified only if there are some to remove; ``just_written`` is known to be valid.
    """
    assert keep >= 1, keep
    checkpoints = _newest_first(directory)
    if len(checkpoints) <= keep:
        return []
    newest_valid = just_written if just_written in checkpoints else newest_good(directory)[0]
    best = lowest_held_out(directory)[:keep_best] if keep_best else []
    retained = {*checkpoints[:keep], *best, newest_valid}
    removed = [path for path in checkpoints if path not in retained]
    _remove(removed)
    return removed


def set_later_aside(run_dir: Path, step: int) -> None:
    """Archive checkpoints of steps after ``step`` with a copy of the metrics, and report the new directory.

    They do not belong to the resumed run, but would be taken for its newest. Raises UserError if they cannot be moved.
    """
    number = 1
    while (target := run_dir / f"checkpoints-set-aside-{number}").exists():
        number += 1
    try:
        later = [path for path in _newest_first(run_dir / "checkpoints") if step_of(path) > step]
        if not later:
            return
        target.mkdir()
        for path in later:
            path.rename(target / path.name)
    except OSError as error:
        raise UserError(
            "resume.not_archived",
            f"{run_dir} contains checkpoints after step {step}, which could not be archived ({error.strerror}): free space "
            f"there, or move them yourself",
        ) from None
    for name in (METRICS_NAME, STEPS_NAME):
        with contextlib.suppress(OSError):  # missing, or no space for a copy
            shutil.copy2(run_dir / name, target / name)
    say(f"Moved checkpoints of an earlier run after step {step} to {target}")


def lowest_held_out(directory: Path) -> list[Path]:
    """List the checkpoints with a known evaluation loss, lowest first and newest first among equals; skips damaged ones."""
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
    return sorted((path for path in directory.iterdir() if _NAME.fullmatch(path.name)), key=step_of, reverse=True)


def step_of(path: Path) -> int:
    """Return the step of a checkpoint by its name."""
    match = _NAME.fullmatch(path.name)
    assert match is not None, path
    return int(match[1])


@dataclass(frozen=True)
class Source:
    """A part of a version that one rank can read."""

    rank: int
    """The rank that can read the source."""
    path: Path | None
    """A checkpoint (which has the complete version) or a shard; None for copies in the rank's memory."""
    version_id: str
    """Id of the version; "" for a checkpoint."""
    step: int
    run_id: str
    """Id of the run (``new_run_id``); "" if unknown."""
    writer: int
    """The rank that wrote the source."""
    names: frozenset[str]
    """Parameters and constants whose tensors are all in this source."""

    @property
    def is_shard(self) -> bool:
        return self.path is not None and self.version_id != ""


def shard_path(run_dir: Path, rank: int, step: int, version_id: str) -> Path:
    return run_dir / SHARDS_NAME / f"rank-{rank:04}" / f"step-{step:08d}.{version_id}.h5"


def shards_on_disk(run_dir: Path, rank: int = 0) -> tuple[list[Source], list[tuple[Path, str]]]:
    """Return the readable shards on this host, as sources of ``rank``, and the unreadable ones with the reason for each."""
    shards: list[Source] = []
    skipped: list[tuple[Path, str]] = []
    for path, _ in _shards(run_dir):
        try:
            with CheckpointReader(path) as reader:
                head = reader.metadata
            meta = head["version_id"], head["step"], head["begun"] or "", head["rank"], frozenset(head["names"])
            shards.append(Source(rank, path, *meta))
        except CheckpointError as error:
            skipped.append((path, str(error)))
        except KeyError:
            skipped.append((path, "a checkpoint, but not a shard"))
    return shards, skipped


def keep_versions(run_dir: Path, version_ids: Collection[str], sweep: bool = False) -> None:
    """Remove this host's shards of all versions except ``version_ids``. Safe to call concurrently with equal ``version_ids``.

    ``sweep`` also removes temporary files that dead processes left behind; allowed only while no rank is writing.
    """
    _remove(path for path, version_id in _shards(run_dir) if version_id not in version_ids)
    if sweep:
        _remove(_in_shard_folders(run_dir, ".*.h5.tmp-*"))


def remove_shards(run_dir: Path) -> None:
    """Remove all shards on this host when the run ends or a new one starts. Ranks may call it concurrently."""
    keep_versions(run_dir, (), sweep=True)
    for folder in (*_in_shard_folders(run_dir, ""), run_dir / SHARDS_NAME):
        with contextlib.suppress(OSError):  # missing, or contains foreign files
            folder.rmdir()


def _shards(run_dir: Path) -> list[tuple[Path, str]]:
    """List (path, version id) of the shards on this host."""
    matches = [(path, _SHARD.fullmatch(path.name)) for path in _in_shard_folders(run_dir, "step-*.h5")]
    return sorted((path, name[2]) for path, name in matches if name is not None)


def _in_shard_folders(run_dir: Path, pattern: str) -> list[Path]:
    """List matching files in the ranks' folders; ignores folders that are missing or are being removed by another rank."""
    return [Path(path) for path in glob.glob(f"{glob.escape(str(run_dir / SHARDS_NAME))}/rank-*/{pattern}")]


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):  # e.g. a directory of that name
            path.unlink(missing_ok=True)


def supervised() -> bool:
    """Whether a supervisor (``launch --elastic``) started this run and can restart it."""
    return START_VARIABLE in os.environ
