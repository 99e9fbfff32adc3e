"""A directory of checkpoints: their names, the newest whole one, and which may go. And local shards, ``RUN/copies/rank-0002/
step-00000120.5f2c09aa.h5``: copies of the trained state on the disks of hosts.

A *version* is all ranks' trained parameters and moments after one step. A checkpoint is a version in one file. A *shard* is the
part of a version that one rank writes, in the same format: the rank's own part, and those of the ranks whose peer it is. All shards
of a version, and no others, bear its id, so shards of different moments, or of the same step taken twice, never make one whole.
This module knows names, headers and removal only. ``state.stored_state`` writes shards and reads versions.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any

from hetero_mpi.state.checkpoint.format import CheckpointError
from hetero_mpi.state.checkpoint.reader import CheckpointReader, verify

_NAME = re.compile(r"step-(\d{8,})\.h5")
SHARDS_NAME = "copies"
_RANK = re.compile(r"rank-(\d{4,})")
_SHARD = re.compile(r"step-(\d{8,})\.([0-9a-f]{8})\.h5")
_RUN_NUMBER = re.compile(r"(\d{12})-")
_LEFTOVER = re.compile(r"\..*\.h5\.tmp-.*")


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
    for path in removed:
        with contextlib.suppress(OSError):  # such as a directory of that name
            path.unlink(missing_ok=True)
    return removed


def set_aside(directory: Path, step: int) -> Path | None:
    """Move checkpoints of later steps than ``step`` out of the way; return the directory they are in now, if any.

    They belong to a run that this one does not continue, and would count as its newest.
    """
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
class Part:
    """One rank's part of a version, which it can read: a checkpoint, which is all of it, a shard, or copies in its memory."""

    rank: int
    """The rank that can read it."""
    path: Path | None
    """None: in the rank's memory."""
    version_id: str
    """Equal in all parts of a version, and in no others; "": a checkpoint."""
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

    def to_row(self) -> list[Any]:
        """JSON-able."""
        path = str(self.path) if self.path is not None else None
        return [self.rank, path, self.version_id, self.step, self.begun, self.writer, sorted(self.names)]

    @classmethod
    def from_row(cls, row: Sequence[Any]) -> Part:
        rank, path, version_id, step, begun, writer, names = row
        own = Path(path) if path is not None else None
        return cls(rank, own, version_id, step, begun, writer, frozenset(names))


def newest_version(parts: Sequence[Part], needed: Collection[str]) -> list[Part]:
    """The parts of the newest version that together hold all ``needed`` names; empty: no version is whole.

    Newest is the latest step of the run that began last; of versions of one step, the first in ``parts``.
    """
    versions: dict[tuple[str, int, str], list[Part]] = {}
    for part in parts:
        versions.setdefault((part.begun, part.step, part.version_id), []).append(part)
    for key in sorted(versions, key=lambda key: key[:2], reverse=True):
        if set(needed) <= set().union(*(part.names for part in versions[key])):
            return versions[key]
    return []


def new_run_id(earlier: Iterable[str] = ()) -> str:
    """The id of a run that begins now, larger than those of the ``earlier`` runs. ``--resume`` passes it from start to start.

    It counts runs, since clocks of hosts differ. They decide only between runs that have seen nothing of each other.
    """
    numbers = [int(found[1]) for one in earlier if (found := _RUN_NUMBER.match(one))]
    return f"{1 + max(numbers, default=0):012d}-{int(time.time()):012d}-{token_hex(4)}"


def new_version_id() -> str:
    """A random id for the shards of one version."""
    return token_hex(4)


def shard_path(run_dir: Path, rank: int, step: int, version_id: str) -> Path:
    return run_dir / SHARDS_NAME / f"rank-{rank:04}" / f"step-{step:08d}.{version_id}.h5"


def shards_on_disk(run_dir: Path, rank: int = 0) -> tuple[list[Part], list[str]]:
    """The shards on the host of ``rank`` whose headers can be read, and remarks about the others."""
    found, remarks = [], []
    for path, _ in sorted(_named(run_dir)):
        try:
            with CheckpointReader(path) as reader:
                said = reader.metadata
                own = said["version_id"], said["step"], said["begun"] or "", said["rank"], frozenset(said["names"])
                found.append(Part(rank, path, *own))
        except CheckpointError as error:
            remarks.append(f"passed over {path}: {error}")
        except (KeyError, TypeError):
            remarks.append(f"passed over {path}: a checkpoint, but no shard of a copy")
    return found, remarks


def keep_versions(run_dir: Path, kept: Collection[str], sweep: bool = False) -> None:
    """Remove this host's shards of all versions but ``kept``. Any number of ranks may do so at once, with the same ``kept``.

    ``sweep``: also remove what dead processes were writing; only while nobody writes.
    """
    for path, name in list(_named(run_dir)):
        if name[2] not in kept:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
    if sweep:
        for leftover, _ in _named(run_dir, _LEFTOVER):
            with contextlib.suppress(OSError):
                leftover.unlink(missing_ok=True)


def remove_shards(run_dir: Path) -> None:
    """Remove all shards on this host: the run is over, or another one begins. Any number of ranks may do so at once."""
    keep_versions(run_dir, (), sweep=True)
    for folder in (*_folders(run_dir), run_dir / SHARDS_NAME):
        with contextlib.suppress(OSError):  # not there, or something of somebody else's in it
            folder.rmdir()


def _named(run_dir: Path, pattern: re.Pattern[str] = _SHARD) -> Iterator[tuple[Path, re.Match[str]]]:
    """Files in the ranks' folders whose names match ``pattern``, with the match; of a shard: (step, version id)."""
    for folder in _folders(run_dir):
        for path in _listed(folder):
            name = pattern.fullmatch(path.name)
            if name is not None:
                yield path, name


def _folders(run_dir: Path) -> list[Path]:
    return [folder for folder in _listed(run_dir / SHARDS_NAME) if _RANK.fullmatch(folder.name)]


def _listed(folder: Path) -> list[Path]:
    """The entries of a folder; none where it does not exist, or another rank of the host removes it meanwhile."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []
