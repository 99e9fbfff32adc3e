"""Copies of the trained state on the disks of hosts: ``RUN/copies/rank-0002/step-00000120.5f2c09aa.h5``.

Each file is a *piece* of a generation: what one rank holds of one moment, its own part and those of the ranks whose peer it is,
in the format of checkpoints. All pieces of a generation bear its id and nothing else does, so pieces of different moments, or
of the same step taken twice, never make one whole. Only names, headers and removal are here; who writes what, and which
generation is whole, is known in ``training``.
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

SHELF_NAME = "copies"
_RANK = re.compile(r"rank-(\d{4,})")
_PIECE = re.compile(r"step-(\d{8,})\.([0-9a-f]{8})\.h5")
_LEFTOVER = re.compile(r"\..*\.h5\.tmp-.*")


@dataclass(frozen=True)
class Piece:
    """What a file says it holds, before anything but its header was compared."""

    path: Path
    generation: str
    """The id that all pieces of one moment share."""
    step: int
    begun: str
    """Which run it belongs to (``new_lineage``)."""
    writer: int
    """Rank that wrote it."""
    names: tuple[str, ...]
    """Parameters and constants of the model of which every tensor is in it."""


def new_lineage() -> str:
    """The id of a run that begins now. It passes from start to start by ``--resume``; of two, the run begun later is larger."""
    return f"{int(time.time()):012d}-{token_hex(4)}"


def new_generation() -> str:
    """An id for the pieces of one moment."""
    return token_hex(4)


def piece_path(run_dir: Path, rank: int, step: int, generation: str) -> Path:
    """Where a rank puts its piece."""
    return run_dir / SHELF_NAME / f"rank-{rank:04}" / f"step-{step:08d}.{generation}.h5"


def pieces_on_disk(run_dir: Path) -> tuple[list[Piece], list[str]]:
    """The pieces on this host whose headers can be read, and remarks that name the others."""
    found, remarks = [], []
    for path, _ in sorted(_named(run_dir)):
        try:
            with CheckpointReader(path) as reader:
                said = reader.metadata
                names = tuple(said["names"])
                found.append(
                    Piece(
                        path, str(said["generation"]), int(said["step"]), str(said["begun"]), int(said["rank"]), names
                    )
                )
        except CheckpointError as error:
            remarks.append(f"passed over {path}: {error}")
        except (KeyError, TypeError, ValueError):
            remarks.append(f"passed over {path}: a checkpoint, but no piece of a copy")
    return found, remarks


def keep_generations(run_dir: Path, kept: Collection[str], sweep: bool = False) -> None:
    """Remove this host's pieces of all other generations. Any number of ranks may do so at once, with the same ``kept``.

    ``sweep``: remove what dead processes were writing, too. Only while nobody writes.
    """
    for path, name in list(_named(run_dir)):
        if name[2] not in kept:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
    if sweep:
        for leftover, _ in _named(run_dir, _LEFTOVER):
            with contextlib.suppress(OSError):
                leftover.unlink(missing_ok=True)


def clear_shelf(run_dir: Path) -> None:
    """Remove all copies on this host: the run is over, or another one begins. Any number of ranks may do so at once."""
    keep_generations(run_dir, (), sweep=True)
    for folder in (*_folders(run_dir), run_dir / SHELF_NAME):
        with contextlib.suppress(OSError):  # not there, or something of somebody else's in it
            folder.rmdir()


def _named(run_dir: Path, pattern: re.Pattern[str] = _PIECE) -> Iterator[tuple[Path, re.Match[str]]]:
    """Files of ranks that bear such a name, with the match; of a piece: (step, generation)."""
    for folder in _folders(run_dir):
        for path in _listed(folder):
            name = pattern.fullmatch(path.name)
            if name is not None:
                yield path, name


def _folders(run_dir: Path) -> list[Path]:
    """Those of ranks."""
    return [folder for folder in _listed(run_dir / SHELF_NAME) if _RANK.fullmatch(folder.name)]


def _listed(folder: Path) -> list[Path]:
    """What lies there; nothing where there is no such folder, or another rank of the host removes it at this moment."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []
