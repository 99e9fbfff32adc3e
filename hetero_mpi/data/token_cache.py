"""Memory-mapped cache of tokenised data on rank 0's machine, so that a restart need not read or tokenise the data again.

An entry is a sealed folder of ``$XDG_CACHE_HOME/hetero_mpi/tokens`` (default ``~/.cache``), named by a hash of everything that
determines its content. Beyond ``MOST_BYTES``, the least recently used entries are removed. The cache may be deleted at any time.
"""

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
_VERSION = 6
"""Version of the cache format; increment it when the content of entries or the tokenisation changes."""
_SAMPLES, _SAMPLE_BYTES = 16, 65_536
"""Number and size of the blocks of a file that are hashed; smaller files are hashed completely."""
_ABANDONED_S = 86_400.0
_COLUMNS = {"tokens": np.int32, "targets": np.int32, "positions": np.int32, "answers": np.uint8, "weights": np.float32}
T = TypeVar("T")


def file_marks(paths: Sequence[Path]) -> list[Any]:
    """Compute fingerprints of files: name, size, modification time, and a hash of the complete or sampled content.

    Raises UserError if a path is not a regular file.
    """
    fingerprints = []
    for path in paths:
        require_regular(path)
        try:
            fingerprints.append([str(path), *_mark_of(path)])
        except OSError as error:  # reported when the file is read
            fingerprints.append([str(path), str(error)])
    return fingerprints


def _mark_of(path: Path) -> tuple[int, int, str]:
    with path.open("rb") as file:
        stat, digest = os.fstat(file.fileno()), hashlib.blake2b(digest_size=16)
        steps = _SAMPLES if stat.st_size > _SAMPLES * _SAMPLE_BYTES else 1
        for step in range(steps):
            file.seek(step * (stat.st_size - _SAMPLE_BYTES) // (_SAMPLES - 1) if steps > 1 else 0)
            digest.update(file.read(_SAMPLE_BYTES if steps > 1 else -1))
    return stat.st_size, stat.st_mtime_ns, digest.hexdigest()


def cached_or_build(
    key: Sequence[Any] | None,
    fill: Callable[[Path], Any],
    read: Callable[[Path, Any], T],
    tell: Callable[[str], object],
) -> tuple[T, bool]:
    """Return the content cached under ``key``, building it if necessary, and whether it was cached.

    Args:
        key: JSON values that determine the content. If it is None, the content is built in a temporary folder and not cached.
        fill: writes files into the folder and returns JSON values to store with them.
        read: returns the content, given the folder and the stored values.
        tell: called with a message if an entry is damaged.

    Raises UserError if the files cannot be written.
    """
    if key is None or (root := _root()) is None:
        with tempfile.TemporaryDirectory(prefix="hetero_mpi-tokens-") as folder:
            return read(Path(folder), fill(Path(folder))), False
    libraries = [version(name) for name in ("tokenizers", "transformers", "jinja2")]
    entry = root / hashlib.sha256(json.dumps([_VERSION, libraries, *key], sort_keys=True).encode()).hexdigest()[:32]
    contents = [content for content in (load_sealed(entry, read, tell),) if content is not None]

    def fill_and_read(folder: Path) -> Any:  # read before another program can remove the entry
        values = fill(folder)
        contents.append(read(folder, values))
        return values

    if not (was_cached := bool(contents)):
        store_folder(entry, fill_and_read, REMEDY)
    with contextlib.suppress(OSError):
        os.utime(entry)
        _evict(root, entry)
    return contents[0], was_cached


def _root() -> Path | None:
    """Return the cache folder; None if it cannot be created or written to."""
    root = cache_folder("tokens")
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return root if os.access(root, os.W_OK | os.X_OK) else None


def _evict(root: Path, protected: Path) -> None:
    """Remove what aborted runs left behind, then the least recently used entries until the cache fits in ``MOST_BYTES``."""
    entries = []
    for folder in root.iterdir():
        with contextlib.suppress(OSError):
            age = folder.stat().st_mtime
            if folder.name.startswith(".") and time.time() - age > _ABANDONED_S:
                shutil.rmtree(folder, ignore_errors=True)
            elif not folder.name.startswith("."):
                entries.append((age, folder, sum(file.stat().st_size for file in folder.rglob("*"))))
    total_bytes = sum(size for _, _, size in entries)
    for _, folder, size in sorted(entries):
        if total_bytes > MOST_BYTES and folder != protected:
            shutil.rmtree(folder, ignore_errors=True)
            total_bytes -= size


def write_dataset(folder: Path, dataset: Dataset, extra: dict[str, Any]) -> dict[str, Any]:
    """Write a dataset into a folder, which may already hold its token stream, and return the values for ``read_dataset``.

    ``extra``: additional JSON values to store with the data. Raises UserError if the files cannot be written.
    """
    stream = (folder / STREAM).exists()
    names = ("train", "held_out") if stream else ("train", "held_out", *_COLUMNS)
    with write_errors(folder.parent, REMEDY):
        for name in names:
            if (column := getattr(dataset, name)) is not None and not (folder / f"{name}.npy").exists():
                np.save(folder / f"{name}.npy", column)
    values = {name: getattr(dataset, name) for name in ("source_counts", "notes", "parts", "seed")}
    length = dataset.tokens.shape[1] if stream else None
    return {**values, "fingerprint": dataset.fingerprint(), "stream": length, "told": extra}


def read_dataset(folder: Path, values: dict[str, Any], ids: int) -> tuple[Dataset, dict[str, Any]]:
    """Memory-map a dataset written by ``write_dataset``. Raises ValueError or a numpy error if it or a token id is invalid."""
    if values["stream"] is not None:
        rows = Rows(*overlapping(mapped(folder / STREAM), values["stream"]))
    else:
        columns: dict[str, Any] = {
            name: mapped(path) if (path := folder / f"{name}.npy").exists() else None for name in _COLUMNS
        }
        rows = Rows(**columns)
    rows = replace(rows, source_counts=values["source_counts"], notes=tuple(values["notes"]))
    shares = {name: np.load(folder / f"{name}.npy") for name in ("train", "held_out")}
    parts = tuple((size, take) for size, take in values["parts"])
    fingerprint = values["fingerprint"]
    dataset = Dataset(**vars(rows), **shares, seed=values["seed"], parts=parts, known_fingerprint=fingerprint)
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
