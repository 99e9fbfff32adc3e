"""The HDF5 format of checkpoints: names, types, checksums, and validation of opened files; documented in docs/checkpoint.md.

Two decisions shape the format:

* Data is little-endian and contiguous, so it is read and written without conversion, and each dataset has an attribute with the
  CRC-32 of exactly these bytes. HDF5's fletcher32 filter would require chunks and take more than twice as long as CRC-32
  (measurements: docs/checkpoint.md).
* Files use HDF5 1.10's layout, in which HDF5 checksums every header, link and attribute. Strings have a fixed length because
  HDF5 stores variable-length strings in its global heap, which has no checksum.

The format needs only a few groups of datasets, and nothing else is opened. A crafted file could use other features of HDF5 against
its reader: links to other files (opening a named pipe blocks), data in other files (any file on this machine), compressed, virtual
or variable-length data (of any size), and groups that contain themselves. This module rejects all of them.
"""

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
"""Lowest and highest HDF5 version of the layout: HDF5 1.10 (2016) and later can read the files."""

PIECE_BYTES = 8 << 20
"""Maximum size of the pieces in which tensors are sent, written and verified."""

Piece = tuple[tuple[int, ...], tuple[int, ...]]
"""(first index, lengths) of a block of an array."""

KINDS = ("parameters", "moments1", "moments2", "absmax1", "absmax2")
"""Kinds of tensors. Moments are fp32, or bitsandbytes' uint8 codes with one scale per ``MOMENT_BLOCK`` codes in ``absmax``."""
SCALES = ("absmax1", "absmax2")
SINCE = dict.fromkeys(SCALES, 2)
"""Maps kinds whose group is missing in format version 1 to the first version that has it."""
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
"""Maps each tensor dtype to a numpy dtype with the same bits (uint16 for bfloat16, which numpy does not have)."""

MAX_MEMBERS = 1 << 18
"""Maximum number of datasets per kind; today's largest models have some 50,000 tensors."""
MAX_ATTRIBUTES = 1 << 10
MAX_ATTRIBUTE_BYTES = 1 << 12
TEXT = "text"
"""``Stored.dtype`` of a fixed-length string."""
_PLAIN = (h5py.h5t.INTEGER, h5py.h5t.FLOAT, h5py.h5t.ENUM, h5py.h5t.STRING)


class CheckpointError(UserError):
    """Raised if a checkpoint cannot be used or written; the message names the file, the dataset if known, and the reason."""


@contextmanager
def damage_named(path: Path, dataset: str = "") -> Iterator[None]:
    """Convert any error of HDF5, numpy or a decoder to a CheckpointError that names the file and dataset.

    A crafted file can provoke exceptions of any type, so all of them are caught.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        where = f"dataset {dataset}: " if dataset else ""
        reason = str(error) or type(error).__name__
        raise CheckpointError(
            "checkpoint.damaged", f"{path}: {where}damaged ({reason}). Resume from an older checkpoint."
        ) from error


BFLOAT16 = h5py.h5t.IEEE_F32LE.copy()
"""HDF5 type of bfloat16: the upper half of an IEEE float32 (1 sign, 8 exponent, 7 mantissa bits)."""
BFLOAT16.set_fields(15, 7, 8, 0, 7)
BFLOAT16.set_ebias(127)
BFLOAT16.set_precision(16)
BFLOAT16.set_size(2)


def file_type(dtype: str) -> Any:
    """Return the HDF5 type of a tensor dtype, both in the file and in memory, since bits are never converted."""
    return BFLOAT16 if dtype == "bfloat16" else h5py.h5t.py_create(STORAGE[dtype])


def dtype_name(kind: Any) -> str | None:
    """Return the tensor dtype of an HDF5 type; None if the type is not part of this format."""
    return next((name for name in STORAGE if kind == file_type(name)), None)


def crc32(array: NDArray[Any], before: int = 0) -> int:
    """Compute the CRC-32 (as in zlib) of a C-contiguous array's bytes; ``before`` is the CRC-32 of the preceding bytes."""
    assert array.flags.c_contiguous
    return zlib.crc32(array.reshape(-1).view(np.uint8).data, before)


class Summary:
    """CRC-32 and value range of a tensor, accumulated piece by piece while each piece is in the CPU cache.

    Attributes:
        crc32: CRC-32 of the pieces added so far.
        lowest, highest: range of the numbers added so far; NaN if one of them is NaN.
    """

    def __init__(self, dtype: str) -> None:
        self.crc32 = 0
        self.lowest, self.highest = math.inf, -math.inf
        self._dtype = dtype

    def add(self, array: NDArray[Any]) -> None:
        """Add a C-contiguous piece whose dtype is the ``STORAGE`` dtype of the tensor."""
        self.crc32 = crc32(array, self.crc32)
        if not array.size or not (self._dtype == "bfloat16" or self._dtype.startswith("float")):
            return
        numbers = (array.astype(np.uint32) << 16).view(np.float32) if self._dtype == "bfloat16" else array
        with np.errstate(invalid="ignore"):
            self.lowest = float(np.minimum(self.lowest, numbers.min()))
            self.highest = float(np.maximum(self.highest, numbers.max()))

    def problem(self, kind: str, trained: bool) -> str | None:
        """Return the reason why training cannot continue from these numbers; None if it can.

        ``trained``: whether the tensor is trained. Other tensors, such as masks, may contain infinities.
        """
        if math.isnan(self.lowest):
            return "it contains NaN"
        if kind == "moments2" and self.lowest < 0:
            return f"it contains negative second moments ({self.lowest:g})"
        if kind.startswith("absmax") and self.lowest < 0:
            return f"it contains negative scales ({self.lowest:g})"
        if trained and math.inf in (self.highest, -self.lowest):
            return "it contains infinities"
        return None


def pieces(shape: tuple[int, ...], item_bytes: int, limit_bytes: int = PIECE_BYTES) -> Iterator[Piece]:
    """Cut an array into blocks of at most ``limit_bytes`` (or one element), consecutive in C order.

    Blocks span all axes after the one that is cut and a single index of each axis before it, so every block is one hyperslab of
    the dataset and contiguous in memory. An empty array has no blocks.

    >>> list(pieces((3, 4), 1, 8))
    [((0, 0), (2, 4)), ((2, 0), (1, 4))]
    """
    if not shape:
        yield (), ()
        return
    inner = [math.prod(shape[axis + 1 :]) * item_bytes for axis in range(len(shape))]
    cut = next((axis for axis, size in enumerate(inner) if size <= limit_bytes), len(shape) - 1)
    step = max(1, limit_bytes // max(1, inner[cut]))
    inner_zeros = (0,) * (len(shape) - cut - 1)
    if 0 in shape:
        return
    for outer in itertools.product(*(range(length) for length in shape[:cut])):
        for first in range(0, shape[cut], step):
            count = min(step, shape[cut] - first)
            yield (*outer, first, *inner_zeros), ((1,) * cut + (count,) + shape[cut + 1 :])


def piece_count(piece: Piece) -> int:
    """Return the number of elements in a block."""
    return math.prod(piece[1])


def cut(flat: NDArray[Any], shape: tuple[int, ...]) -> Iterator[NDArray[Any]]:
    """Yield views of the blocks (``pieces``) of an array with the given shape, flattened as ``flat``."""
    begin = 0
    for piece in pieces(shape, flat.itemsize):
        end = begin + piece_count(piece)
        yield flat[begin:end]
        begin = end


# ----------------------------------------------------------------------------------------------------------- guards
@dataclass(frozen=True)
class Stored:
    """An opened dataset that is contiguous in the file."""

    id: Any
    """h5py's ``DatasetID``."""
    type: Any
    """h5py's ``TypeID`` from the file."""
    shape: tuple[int, ...]
    dtype: str
    """The tensor dtype, or ``TEXT``."""
    bytes: int


def open_file(path: Path) -> Any:
    """Open an HDF5 file for reading. Raises CheckpointError unless it is a regular HDF5 file."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        rule = "`--resume latest`, in scripts resume_from_checkpoint=True, resumes from the newest one in the run directory"
        raise CheckpointError("checkpoint.missing", f"{path}: no such checkpoint; {rule}") from None
    except OSError as error:
        text = f"{path}: cannot be read ({error.strerror}). Check the path."
        raise CheckpointError("checkpoint.unreadable", text) from None
    if not stat.S_ISREG(mode):
        text = f"{path}: not a regular file. Pass a checkpoint file with --resume PATH."
        raise CheckpointError("checkpoint.not_a_file", text)
    if not os.access(path, os.R_OK):
        raise CheckpointError("checkpoint.permission", f"{path}: permission denied. Change the permissions.")
    if not h5py.is_hdf5(path):
        text = f"{path}: this is not an HDF5 file. Resume from another checkpoint."
        raise CheckpointError("checkpoint.not_hdf5", text)
    return h5py.File(path, "r", locking=False)  # a finished file is never modified


def open_group(parent: Any, name: str) -> Any:
    """Open a subgroup. Raises LookupError if it is missing, ValueError if it is not a group."""
    return h5py.h5g.open(parent, _checked_name(parent, name, h5py.h5o.TYPE_GROUP))


def open_dataset(parent: Any, name: str, file_bytes: int) -> Stored:
    """Open a dataset without reading its contents, and check that its layout conforms to this format.

    ``file_bytes``: size of the file, which limits the size of the dataset. Raises LookupError if the dataset is missing, and
    ValueError or TypeError if its layout does not conform.
    """
    opened = h5py.h5d.open(parent, _checked_name(parent, name, h5py.h5o.TYPE_DATASET))
    created = opened.get_create_plist()
    # Check the layout first: the shape of a virtual dataset may depend on other files.
    if created.get_layout() != h5py.h5d.CONTIGUOUS or created.get_external_count():
        raise TypeError("its bytes are not contiguous in this file")
    kind = opened.get_type()
    dtype = TEXT if kind.get_class() == h5py.h5t.STRING and not kind.is_variable_str() else dtype_name(kind)
    if dtype is None:
        raise TypeError("its type is not supported")
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
    """Return the sorted names of a group's members. Raises ValueError if one is a link that leaves the group."""
    if group.get_num_objs() > MAX_MEMBERS:
        raise ValueError(f"more than {MAX_MEMBERS:,} members")
    members = list(group)
    for name in members:
        _reject_link(group, name)
    return tuple(sorted(name.decode() for name in members))


def attribute(owner: Any, name: str) -> Any:
    """Read an attribute of a group or dataset as bool, int, float or bytes; returns None if it is missing.

    Raises TypeError unless it is a single number, boolean or short fixed-length string.
    """
    raw = name.encode()
    return _attribute_value(h5py.h5a.open(owner, raw)) if h5py.h5a.exists(owner, raw) else None


def attributes(owner: Any) -> dict[str, Any]:
    """Read all attributes of a group or dataset, as ``attribute`` does."""
    count = h5py.h5a.get_num_attrs(owner)
    if count > MAX_ATTRIBUTES:
        raise ValueError(f"more than {MAX_ATTRIBUTES:,} attributes")
    opened = [h5py.h5a.open(owner, index=index) for index in range(count)]
    return {entry.name.decode(): _attribute_value(entry) for entry in opened}


def _checked_name(parent: Any, name: str, kind: int) -> bytes:
    """Encode the name of a member after checking that the member is in this file and of the given kind."""
    raw = name.encode()
    if not parent.links.exists(raw):
        raise LookupError(f"{name} is missing")
    _reject_link(parent, raw)
    if h5py.h5o.get_info(parent, raw).type != kind:
        raise ValueError("it is not a group" if kind == h5py.h5o.TYPE_GROUP else "it is not a dataset")
    return raw


def _reject_link(group: Any, name: bytes) -> None:
    if group.links.get_info(name).type != h5py.h5l.TYPE_HARD:
        raise ValueError(f"{name.decode(errors='replace')} is a link that points outside its group")


def _attribute_value(opened: Any) -> Any:
    kind = opened.get_type()
    plain = kind.get_class() in _PLAIN and kind.get_size() <= MAX_ATTRIBUTE_BYTES
    if plain and kind.get_class() == h5py.h5t.STRING:
        plain = not kind.is_variable_str()
    if not plain or opened.get_space().get_simple_extent_type() != h5py.h5s.SCALAR:
        raise TypeError(f"attribute {opened.name!r} is neither a number nor a fixed-length string")
    array = np.empty((), kind.dtype)
    opened.read(array)
    value = array.item()
    if not isinstance(value, (bool, int, float, bytes)):
        raise TypeError(f"attribute {opened.name!r} has an unsupported type")
    return value
