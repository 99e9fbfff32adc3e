"""Local checkpoint shards: copies of the trained state on the disks of hosts, ``RUN/copies/rank-0002/step-00000120.5f2c09aa.h5``.

A *version* is all ranks' trained parameters and moments after one step. A *shard* is the part of a version that one rank writes, in
the format of checkpoints: the rank's own part, and those of the ranks whose peer it is. All shards of a version, and no others,
bear its id, so shards of different moments, or of the same step taken twice, never make one whole. This module knows names, headers
and removal only. ``state`` writes shards, and ``runtime.local_versions`` finds out which version is whole.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

from hetero_mpi.checkpoint.checkpoint_error import CheckpointError
from hetero_mpi.checkpoint.reader import CheckpointReader

SHARDS_NAME = "copies"
_RANK = re.compile(r"rank-(\d{4,})")
_SHARD = re.compile(r"step-(\d{8,})\.([0-9a-f]{8})\.h5")
_LEFTOVER = re.compile(r"\..*\.h5\.tmp-.*")


@dataclass(frozen=True)
class Shard:
    """A shard's header. Its tensors have not been read yet."""

    path: Path
    version_id: str
    """The id of its version."""
    step: int
    begun: str
    """The id of its run (``new_run_id``)."""
    writer: int
    """The rank that wrote it."""
    names: tuple[str, ...]
    """Parameters and constants of the model of which every tensor is in it."""


def new_run_id() -> str:
    """The id of a run that begins now. ``--resume`` passes it from start to start. Of two ids, that of the run begun later is
    larger.
    """
    return f"{int(time.time()):012d}-{token_hex(4)}"


def new_version_id() -> str:
    """A random id for the shards of one version."""
    return token_hex(4)


def shard_path(run_dir: Path, rank: int, step: int, version_id: str) -> Path:
    """The path of a rank's shard."""
    return run_dir / SHARDS_NAME / f"rank-{rank:04}" / f"step-{step:08d}.{version_id}.h5"


def shards_on_disk(run_dir: Path) -> tuple[list[Shard], list[str]]:
    """The shards on this host whose headers can be read, and remarks about the others."""
    found, remarks = [], []
    for path, _ in sorted(_named(run_dir)):
        try:
            with CheckpointReader(path) as reader:
                said = reader.metadata
                names = tuple(said["names"])
                found.append(
                    Shard(
                        path, str(said["version_id"]), int(said["step"]), str(said["begun"]), int(said["rank"]), names
                    )
                )
        except CheckpointError as error:
            remarks.append(f"passed over {path}: {error}")
        except (KeyError, TypeError, ValueError):
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
    """The folders of ranks."""
    return [folder for folder in _listed(run_dir / SHARDS_NAME) if _RANK.fullmatch(folder.name)]


def _listed(folder: Path) -> list[Path]:
    """The entries of a folder; none where it does not exist, or another rank of the host removes it meanwhile."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []
