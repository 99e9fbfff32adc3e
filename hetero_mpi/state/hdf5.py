"""The HDF5 files of checkpoints: names, types, checksums, and the checks on opening one. In prose: docs/internals/checkpoint.md.

Two decisions shape the format:

* Bytes are little-endian and contiguous, so that a dataset is read and written by one call without a copy, and each
  dataset carries the CRC-32 of exactly these bytes. HDF5's own fletcher32 filter would need chunks and takes more than
  twice the time of CRC-32 (figures: docs/internals/checkpoint.md).
* Files use HDF5 1.10's layout, in which every header, link and attribute lies under a checksum of HDF5's own. Texts are
  stored at fixed length because variable-length strings would lie in HDF5's global heap, which has no checksum.

The format needs four groups of datasets, and nothing else is opened. HDF5 itself offers far more, which a file may use against
its reader: links to other files (a named pipe would be waited for), data in other files (any file of this machine), compressed,
virtual and variable-length data (of any size), groups that hold themselves. All of it is refused here, and only here.
"""

from __future__ import annotations

import itertools
import math
import os
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from hetero_mpi.util.errors import UserError

FORMAT = "hetero_mpi checkpoint"
FORMAT_VERSION = 3
LIBVER = ("v110", "v110")
"""Lowest and highest HDF5 layout used in the file: HDF5 1.10 (2016) and everything since can read it."""

PIECE_BYTES = 8 << 20
"""Tensors are sent, written and checked in pieces of at most so many bytes, whatever their size."""

Piece = tuple[tuple[int, ...], tuple[int, ...]]
"""(first index, lengths) of a block of an array."""

KINDS = ("parameters", "moments1", "moments2", "absmax1", "absmax2")
"""Moments are fp32, or uint8: bitsandbytes' codes, with the scale of every block of ``MOMENT_BLOCK`` of them in ``absmax``."""
SCALES = ("absmax1", "absmax2")
SINCE = dict.fromkeys(SCALES, 2)
"""Kind -> the format in which files began to have its group, where that is not 1."""
METADATA = "metadata"

STORAGE: dict[str, np.dtype[Any]] = {
    "float64": np.dtype("<f8"),
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
    "int64": np.dtype("<i8"),
    "int32": np.dtype("<i4"),
    "int16": np.dtype("<i2"),
    "int8": np.dtype("i1"),
    "uint8": np.dtype("u1"),
}
"""Tensor dtype -> numpy dtype of the array that holds its bits (numpy has no bfloat16: its bits travel as uint16)."""

MOST_MEMBERS = 1 << 18
"""Datasets of one kind; the largest models of today have some 50,000 tensors."""
MOST_ATTRIBUTES = 1 << 10
LARGEST_ATTRIBUTE_BYTES = 1 << 12
TEXT = "text"
"""``Stored.dtype`` of a text of fixed length."""
_PLAIN = (h5py.h5t.INTEGER, h5py.h5t.FLOAT, h5py.h5t.ENUM, h5py.h5t.STRING)


class CheckpointError(UserError):
    """A checkpoint that cannot be used or written; the message names the file, where known the dataset, and why."""


@contextmanager
def damage_named(path: Path, place: str = "") -> Iterator[None]:
    """Whatever HDF5, numpy or a decoder says of a file becomes a CheckpointError with the names of file and place.

    Which exception that is depends on the layer that notices, and a crafted file chooses: so it may be any.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        where = f"dataset {place}: " if place else ""
        said = str(error) or type(error).__name__
        raise CheckpointError(
            "checkpoint.damaged", f"{path}: {where}damaged ({said}). Resume from an older checkpoint."
        ) from error


def _bfloat16() -> Any:
    """bfloat16 as a true HDF5 float: the upper half of an IEEE float32 (1 sign, 8 exponent, 7 mantissa bits)."""
    kind = h5py.h5t.IEEE_F32LE.copy()
    kind.set_fields(15, 7, 8, 0, 7)
    kind.set_ebias(127)
    kind.set_precision(16)
    kind.set_size(2)
    return kind


BFLOAT16 = _bfloat16()


def file_type(dtype: str) -> Any:
    """The HDF5 type under which a tensor dtype is stored; also the memory type, since the bits are never converted."""
    return BFLOAT16 if dtype == "bfloat16" else h5py.h5t.py_create(STORAGE[dtype])


def dtype_name(kind: Any) -> str | None:
    """The tensor dtype stored under this HDF5 type, or None for a type this format does not use."""
    return next((name for name in STORAGE if kind == file_type(name)), None)


def crc32(array: NDArray[Any], before: int = 0) -> int:
    """CRC-32 (as in zlib and gzip) of a C-contiguous array's bytes; ``before``: that of the bytes in front of them."""
    assert array.flags.c_contiguous
    return zlib.crc32(array.reshape(-1).view(np.uint8).data, before)


class Summary:
    """The CRC-32 of a tensor's bytes and the range of its numbers, piece by piece: each is looked at while it is in the cache.

    Attributes:
        crc32: of all pieces so far.
        lowest, highest: of all numbers so far; NaN where one of them is.
    """

    def __init__(self, dtype: str) -> None:
        self.crc32 = 0
        self.lowest, self.highest = math.inf, -math.inf
        self._dtype = dtype

    def add(self, array: NDArray[Any]) -> None:
        """The next piece, C-contiguous, in the numpy dtype that holds its bits."""
        self.crc32 = crc32(array, self.crc32)
        if not array.size or not (self._dtype == "bfloat16" or self._dtype.startswith("float")):
            return
        numbers = (array.astype(np.uint32) << 16).view(np.float32) if self._dtype == "bfloat16" else array
        with np.errstate(invalid="ignore"):
            self.lowest = float(np.minimum(self.lowest, numbers.min()))
            self.highest = float(np.maximum(self.highest, numbers.max()))

    def problem(self, kind: str, trained: bool) -> str | None:
        """Why no run can go on from such numbers, in words; None: it can.

        ``trained``: the tensor has moments. Others may hold infinities (a mask does).
        """
        if math.isnan(self.lowest):
            return "it holds numbers that are none (NaN)"
        if kind == "moments2" and self.lowest < 0:
            return f"it holds means of squares that are negative ({self.lowest:g})"
        if kind.startswith("absmax") and self.lowest < 0:
            return f"it holds largest absolute values that are negative ({self.lowest:g})"
        if trained and math.inf in (self.highest, -self.lowest):
            return "it holds infinite numbers"
        return None


def pieces(shape: tuple[int, ...], item_bytes: int, limit_bytes: int = PIECE_BYTES) -> Iterator[Piece]:
    """Cut an array into blocks of at most ``limit_bytes`` (but one element) that lie one after the other in C order.

    All axes behind the cut one are whole, all before it are taken index by index: so every block is one hyperslab of the
    dataset and one run of bytes in memory. An array of no elements has no blocks.

    >>> list(pieces((3, 4), 1, 8))
    [((0, 0), (2, 4)), ((2, 0), (1, 4))]
    """
    if not shape:
        yield (), ()
        return
    inner = [math.prod(shape[axis + 1 :]) * item_bytes for axis in range(len(shape))]
    cut = next((axis for axis, size in enumerate(inner) if size <= limit_bytes), len(shape) - 1)
    step = max(1, limit_bytes // max(1, inner[cut]))
    whole = (0,) * (len(shape) - cut - 1)
    if 0 in shape:
        return
    for outer in itertools.product(*(range(length) for length in shape[:cut])):
        for first in range(0, shape[cut], step):
            count = min(step, shape[cut] - first)
            yield (*outer, first, *whole), ((1,) * cut + (count,) + shape[cut + 1 :])


def piece_count(piece: Piece) -> int:
    """Elements of a block."""
    return math.prod(piece[1])


def cut(flat: NDArray[Any], shape: tuple[int, ...]) -> Iterator[NDArray[Any]]:
    """The blocks (``pieces``) of a flat array of that shape, as views."""
    begin = 0
    for piece in pieces(shape, flat.itemsize):
        end = begin + piece_count(piece)
        yield flat[begin:end]
        begin = end


# ----------------------------------------------------------------------------------------------------------- guards
@dataclass(frozen=True)
class Stored:
    """A dataset whose bytes lie in one run within the file."""

    id: Any
    """h5py's ``DatasetID``."""
    type: Any
    """h5py's ``TypeID``, as the file has it."""
    shape: tuple[int, ...]
    dtype: str
    """The tensor dtype, or ``TEXT``."""
    bytes: int


def open_file(path: Path) -> Any:
    """An h5py file, for reading. Raises CheckpointError for what is no regular file, and what is no HDF5."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise CheckpointError(
            "checkpoint.missing", f"{path}: there is no such checkpoint. Name one with --resume PATH."
        ) from None
    except OSError as error:
        raise CheckpointError(
            "checkpoint.unreadable", f"{path}: cannot be read ({error.strerror}). Check the path."
        ) from None
    if not stat.S_ISREG(mode):
        raise CheckpointError(
            "checkpoint.not_a_file", f"{path}: not a regular file, so not a checkpoint. Name one with --resume PATH."
        )
    if not os.access(path, os.R_OK):
        raise CheckpointError("checkpoint.permission", f"{path}: may not be read by this user. Change its permissions.")
    if not h5py.is_hdf5(path):
        raise CheckpointError(
            "checkpoint.not_hdf5", f"{path}: this is not an HDF5 file. Resume from another checkpoint."
        )
    return h5py.File(path, "r", locking=False)  # whole files are never written again


def open_group(parent: Any, name: str) -> Any:
    """A group of a group. Raises LookupError if there is none, ValueError if it is something else."""
    return h5py.h5g.open(parent, _looked_at(parent, name, h5py.h5o.TYPE_GROUP))


def open_dataset(parent: Any, name: str, file_bytes: int) -> Stored:
    """A dataset of a group that is laid out as this format does it; nothing of its contents is read.

    Raises LookupError if there is none, and ValueError or TypeError if it is something else.

    ``file_bytes``: of the file: no dataset is larger.
    """
    opened = h5py.h5d.open(parent, _looked_at(parent, name, h5py.h5o.TYPE_DATASET))
    created = opened.get_create_plist()
    # Before anything else is asked of it: the shape of a virtual dataset may depend on other files.
    if created.get_layout() != h5py.h5d.CONTIGUOUS or created.get_external_count():
        raise TypeError("its bytes do not lie in one place of this file")
    kind = opened.get_type()
    dtype = TEXT if kind.get_class() == h5py.h5t.STRING and not kind.is_variable_str() else dtype_name(kind)
    if dtype is None:
        raise TypeError("numbers or texts of a type that this format does not use")
    space = opened.get_space()
    if space.get_simple_extent_type() == h5py.h5s.NULL:
        raise TypeError("it has no shape")
    shape = tuple(space.get_simple_extent_dims())
    size = math.prod(shape) * kind.get_size()
    offset = opened.get_offset()
    if size and (offset is None or offset + size > file_bytes):
        raise ValueError("it is larger than the file")
    return Stored(opened, kind, shape, dtype, size)


def names(group: Any) -> tuple[str, ...]:
    """Names of a group's members, sorted, none of which is a link that leads elsewhere."""
    if group.get_num_objs() > MOST_MEMBERS:
        raise ValueError(f"more than {MOST_MEMBERS:,} members")
    found = list(group)
    for name in found:
        _refuse_link(group, name)
    return tuple(sorted(name.decode() for name in found))


def attribute(place: Any, name: str) -> Any:
    """An attribute of a group or dataset as bool, int, float or bytes; None where there is none.

    Raises TypeError for anything but a single number, truth value or short text of fixed length.
    """
    raw = name.encode()
    return _value(h5py.h5a.open(place, raw)) if h5py.h5a.exists(place, raw) else None


def attributes(place: Any) -> dict[str, Any]:
    """All of them, as ``attribute`` gives them."""
    count = h5py.h5a.get_num_attrs(place)
    if count > MOST_ATTRIBUTES:
        raise ValueError(f"more than {MOST_ATTRIBUTES:,} attributes")
    opened = [h5py.h5a.open(place, index=index) for index in range(count)]
    return {one.name.decode(): _value(one) for one in opened}


def _looked_at(parent: Any, name: str, kind: int) -> bytes:
    """A member's name as HDF5 takes it, after it was seen that the member lies in this file and is of that kind."""
    raw = name.encode()
    if not parent.links.exists(raw):
        raise LookupError(f"{name} is missing")
    _refuse_link(parent, raw)
    if h5py.h5o.get_info(parent, raw).type != kind:
        raise ValueError("it is not a group" if kind == h5py.h5o.TYPE_GROUP else "it is not a dataset")
    return raw


def _refuse_link(group: Any, name: bytes) -> None:
    if group.links.get_info(name).type != h5py.h5l.TYPE_HARD:
        raise ValueError(f"{name.decode(errors='replace')} is a link that leads elsewhere")


def _value(opened: Any) -> Any:
    kind = opened.get_type()
    plain = kind.get_class() in _PLAIN and kind.get_size() <= LARGEST_ATTRIBUTE_BYTES
    if plain and kind.get_class() == h5py.h5t.STRING:
        plain = not kind.is_variable_str()
    if not plain or opened.get_space().get_simple_extent_type() != h5py.h5s.SCALAR:
        raise TypeError(f"attribute {opened.name!r} is neither a number nor a text of fixed length")
    array = np.empty((), kind.dtype)
    opened.read(array)
    value = array.item()
    if not isinstance(value, (bool, int, float, bytes)):
        raise TypeError(f"attribute {opened.name!r} is of a type that this format does not use")
    return value
