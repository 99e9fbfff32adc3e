"""Token ids of data, kept on rank 0's machine and mapped into memory: a second start reads and tokenises nothing.

An entry is a sealed folder of ``$XDG_CACHE_HOME/hetero_mpi/tokens`` (``~/.cache`` without the variable). Its name is a hash of all
that decides its content. The entries that were not used for longest go when all together are larger than ``MOST_BYTES``. The folder
may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from hetero_mpi.data.batch import IGNORED
from hetero_mpi.data.dataset import Dataset, Rows, mapped, parts_of_rows
from hetero_mpi.data.text_sequences import REMEDY, STREAM, overlapping
from hetero_mpi.util.disk import cache_folder, require_regular, write_errors
from hetero_mpi.util.sealed import load_sealed, store_folder

MOST_BYTES = 20_000_000_000
_LAYOUT = 5
"""Changes with what an entry holds, and with how text becomes tokens."""
_SAMPLES, _SAMPLE_BYTES = 16, 65_536
"""Parts of a file that are looked at; all of a file that is not larger than these."""
_ABANDONED_S = 86_400.0
_COLUMNS = {"tokens": np.int32, "targets": np.int32, "positions": np.int32, "answers": np.uint8, "weights": np.float32}
T = TypeVar("T")


def file_marks(paths: Sequence[Path]) -> list[Any]:
    """Marks that tell files' content from another: name, size, time of change, and a hash of all of it or of samples.

    Raises UserError: one is no regular file.
    """
    found = []
    for path in paths:
        require_regular(path)
        try:
            found.append([str(path), *_mark_of(path)])
        except OSError as error:  # whoever reads it says so
            found.append([str(path), str(error)])
    return found


def _mark_of(path: Path) -> tuple[int, int, str]:
    with path.open("rb") as file:
        stat, digest = os.fstat(file.fileno()), hashlib.blake2b(digest_size=16)
        steps = _SAMPLES if stat.st_size > _SAMPLES * _SAMPLE_BYTES else 1
        for step in range(steps):
            file.seek(step * (stat.st_size - _SAMPLE_BYTES) // (_SAMPLES - 1) if steps > 1 else 0)
            digest.update(file.read(_SAMPLE_BYTES if steps > 1 else -1))
    return stat.st_size, stat.st_mtime_ns, digest.hexdigest()


def kept(
    key: Sequence[Any] | None,
    fill: Callable[[Path], Any],
    read: Callable[[Path, Any], T],
    tell: Callable[[str], object],
) -> tuple[T, bool]:
    """The content of the folder that ``fill`` has filled, now or in an earlier run with an equal ``key``: (it, was it there?).

    Args:
        key: JSON values; None: nothing is kept. What ``read`` maps from the folder stays readable.
        fill: writes files, and returns values (JSON) to keep with them.
        read: returns the content, from the folder and those values.
        tell: gets a sentence about an entry that was damaged.

    Raises UserError: the files cannot be written.
    """
    if key is None or (root := _root()) is None:
        with tempfile.TemporaryDirectory(prefix="hetero_mpi-tokens-") as folder:
            return read(Path(folder), fill(Path(folder))), False
    libraries = [version(name) for name in ("tokenizers", "transformers", "jinja2")]
    place = root / hashlib.sha256(json.dumps([_LAYOUT, libraries, *key], sort_keys=True).encode()).hexdigest()[:32]
    contents = [content for content in (load_sealed(place, read, tell),) if content is not None]

    def fill_and_read(folder: Path) -> Any:  # before another program can remove it
        values = fill(folder)
        contents.append(read(folder, values))
        return values

    if not (there := bool(contents)):
        store_folder(place, fill_and_read, REMEDY)
    with contextlib.suppress(OSError):
        os.utime(place)
        _make_room(root, place)
    return contents[0], there


def _root() -> Path | None:
    """The folder of all entries; None where it cannot be made."""
    root = cache_folder("tokens")
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return root if os.access(root, os.W_OK | os.X_OK) else None


def _make_room(root: Path, used: Path) -> None:
    """Remove what dead runs left, and the oldest entries of too many."""
    entries = []
    for folder in root.iterdir():
        with contextlib.suppress(OSError):
            age = folder.stat().st_mtime
            if folder.name.startswith(".") and time.time() - age > _ABANDONED_S:
                shutil.rmtree(folder, ignore_errors=True)
            elif not folder.name.startswith("."):
                entries.append((age, folder, sum(file.stat().st_size for file in folder.rglob("*"))))
    left = sum(size for _, _, size in entries)
    for _, folder, size in sorted(entries):
        if left > MOST_BYTES and folder != used:
            shutil.rmtree(folder, ignore_errors=True)
            left -= size


def write_dataset(folder: Path, dataset: Dataset, told: dict[str, Any]) -> dict[str, Any]:
    """Put a dataset into files of a folder; returns what is to be kept with them, and with it what else is ``told`` of the data
    (JSON values). A stream lies there already. Raises UserError: the disk is full."""
    stream = (folder / STREAM).exists()
    names = ("train", "held_out") if stream else ("train", "held_out", *_COLUMNS)
    with write_errors(folder.parent, REMEDY):
        for name in names:
            if (column := getattr(dataset, name)) is not None and not (folder / f"{name}.npy").exists():
                np.save(folder / f"{name}.npy", column)
    values = {name: getattr(dataset, name) for name in ("found", "notes", "parts", "seed")}
    length = dataset.tokens.shape[1] if stream else None
    return {**values, "fingerprint": dataset.fingerprint(), "stream": length, "told": told}


def read_dataset(folder: Path, values: dict[str, Any], ids: int) -> tuple[Dataset, dict[str, Any]]:
    """The inverse of ``write_dataset``; the sequences are mapped from the files. Raises ValueError, or what numpy raises: they are
    no dataset of token ids below ``ids``."""
    if values["stream"] is not None:
        rows = Rows(*overlapping(mapped(folder / STREAM), values["stream"]))
    else:
        columns: dict[str, Any] = {
            name: mapped(path) if (path := folder / f"{name}.npy").exists() else None for name in _COLUMNS
        }
        rows = Rows(**columns)
    rows = replace(rows, found=values["found"], notes=tuple(values["notes"]))
    shares = {name: np.load(folder / f"{name}.npy") for name in ("train", "held_out")}
    parts = tuple((size, take) for size, take in values["parts"])
    known = values["fingerprint"]
    dataset = Dataset(**vars(rows), **shares, seed=values["seed"], parts=parts, known_fingerprint=known)
    _check(dataset, ids)
    return dataset, values["told"]


def _check(dataset: Dataset, ids: int) -> None:
    for name, dtype in _COLUMNS.items():
        column = getattr(dataset, name)
        if column is not None and (column.dtype, column.shape, column.ndim) != (dtype, dataset.tokens.shape, 2):
            raise ValueError(f"{name} are {column.dtype} {list(column.shape)}")
    rows = len(dataset.tokens)
    limits = {"tokens": (0, ids), "targets": (IGNORED, ids), "train": (0, rows), "held_out": (0, rows)}
    for name, (least, limit) in limits.items():
        for _, part in parts_of_rows(getattr(dataset, name)):
            if part.size and not least <= part.min() <= part.max() < limit:
                raise ValueError(f"{name} are numbers from {part.min()} to {part.max()}")
