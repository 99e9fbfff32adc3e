"""Token ids of data, kept on rank 0's machine and mapped into memory: a second start reads and tokenises nothing.

An entry is a folder of ``$XDG_CACHE_HOME/hetero_mpi/tokens`` (``~/.cache`` without the variable), made beside its place and then
renamed, so that several runs may make the same one. Its name is a hash of all that decides its content. The entries that were not
used for longest go when all together are larger than ``MOST_BYTES``. The folder may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from hetero_mpi.data.dataset import Dataset, Rows, mapped
from hetero_mpi.data.text_sequences import STREAM, overlapping
from hetero_mpi.disk import cache_folder, require_regular
from hetero_mpi.errors import UserError

MOST_BYTES = 20_000_000_000
_LAYOUT = 5
"""Changes with what an entry holds, and with how text becomes tokens."""
_SAMPLES, _SAMPLE_BYTES = 16, 65_536
"""Parts of a file that are looked at; all of a file that is not larger than these."""
_ABANDONED_S = 86_400.0
_TOLD = "told.json"
_COLUMNS = ("tokens", "targets", "positions", "answers", "weights")


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


@contextlib.contextmanager
def entry(key: Sequence[Any] | None, fill: Callable[[Path], None]) -> Iterator[tuple[Path, bool]]:
    """A context with a folder that ``fill`` has filled, now or in an earlier run with an equal ``key`` (JSON values): (folder, was
    it there?). Where nothing can be kept, or ``key`` is None, it is gone at the end; what was mapped from it stays readable.
    """
    if key is None or (root := _root()) is None:
        with tempfile.TemporaryDirectory(prefix="hetero_mpi-tokens-") as folder:
            fill(Path(folder))
            yield Path(folder), False
        return
    libraries = [version(name) for name in ("tokenizers", "transformers", "jinja2")]
    name = hashlib.sha256(json.dumps([_LAYOUT, libraries, *key], sort_keys=True).encode()).hexdigest()[:32]
    there = (root / name).is_dir()
    if not there:
        made = root / f".{name}.{secrets.token_hex(8)}"
        try:
            made.mkdir()
            fill(made)
            with contextlib.suppress(OSError):  # another run was first
                made.rename(root / name)
        except OSError as error:
            raise UserError(
                f"{root}: token ids cannot be written ({error.strerror}). Make room there, name another folder by "
                f"XDG_CACHE_HOME, or set data.cache = false, which takes the folder for temporary files"
            ) from error
        finally:
            shutil.rmtree(made, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.utime(root / name)
    yield root / name, there
    _make_room(root, root / name)


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


def write_dataset(folder: Path, dataset: Dataset, told: dict[str, Any]) -> None:
    """Put a dataset, and what else is ``told`` of it (JSON values), into an entry. A stream lies there already."""
    values = {"found": dataset.found, "notes": dataset.notes, "parts": dataset.parts, "seed": dataset.seed}
    stream = folder / STREAM
    if not stream.exists():
        for name in _COLUMNS:
            if (column := getattr(dataset, name)) is not None and not (folder / f"{name}.npy").exists():
                np.save(folder / f"{name}.npy", column)
    for name in ("train", "held_out"):
        np.save(folder / f"{name}.npy", getattr(dataset, name))
    length = dataset.tokens.shape[1] if stream.exists() else None
    values |= {"fingerprint": dataset.fingerprint(), "stream": length, "told": told}
    (folder / _TOLD).write_text(json.dumps(values))


def read_dataset(folder: Path) -> tuple[Dataset, dict[str, Any]]:
    """The inverse of ``write_dataset``; the sequences are mapped from its files."""
    values = json.loads((folder / _TOLD).read_text())
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
    return Dataset(**vars(rows), **shares, seed=values["seed"], parts=parts, known_fingerprint=known), values["told"]
