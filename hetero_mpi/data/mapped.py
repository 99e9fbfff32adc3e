"""Arrays in files, mapped into memory, and arrays looked at in parts: what was looked at takes no memory for longer than that."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
_PART_BYTES = 16_000_000


def mapped(path: Path) -> Array:
    """The array of a ``.npy`` file, or else a file of int32 numbers; read-only."""
    if path.suffix == ".npy":
        return np.load(path, mmap_mode="r") if path.stat().st_size > 128 else np.load(path)
    return np.memmap(path, np.int32, "r") if path.stat().st_size else np.empty(0, np.int32)


def parts_of_rows(array: Array) -> Iterator[tuple[int, Array]]:
    """The array in runs of rows: (number of the first, the rows). Of a mapped one, memory holds one run at a time."""
    rows = max(1, _PART_BYTES // max(1, array.nbytes // max(1, len(array))))
    for first in range(0, len(array), rows):
        yield first, array[first : first + rows]
        _release(array)


def joined(arrays: Sequence[Array], path: Path) -> Array:
    """The arrays one after the other; in a new file ``path`` (``.npy``) if one of them is mapped."""
    if all(_mapping(array) is None for array in arrays):
        return np.concatenate(arrays)
    shape = (sum(len(array) for array in arrays), *arrays[0].shape[1:])
    whole, place = np.lib.format.open_memmap(path, "w+", arrays[0].dtype, shape), 0
    for array in arrays:
        for _, part in parts_of_rows(array):
            whole[place : place + len(part)] = part
            place += len(part)
            _release(whole)
    whole.flush()
    return mapped(path)


def _release(array: Array) -> None:
    mapping = _mapping(array)
    if mapping is not None and hasattr(mmap, "MADV_DONTNEED"):
        mapping.madvise(mmap.MADV_DONTNEED)


def _mapping(array: Any) -> mmap.mmap | None:
    """The mapped file behind an array or a view of one."""
    while array is not None and not isinstance(array, mmap.mmap):
        array = getattr(array, "base", None)
    return array
