"""The file format: names, HDF5 types, checksums and the rules for metadata. In prose: docs/checkpoint.md.

Two decisions shape it:

* Bytes are little-endian and contiguous, so that a dataset is read and written by one call without a copy, and each
  dataset carries the CRC-32 of exactly these bytes. HDF5's own fletcher32 filter would need chunks and takes more than
  twice the time of CRC-32 (figures: docs/checkpoint.md).
* Files use HDF5 1.10's layout, in which every header, link and attribute lies under a checksum of HDF5's own. Texts are
  stored at fixed length because variable-length strings would lie in HDF5's global heap, which has no checksum.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
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


class CheckpointError(UserError):
    """A checkpoint that cannot be used or written; the message names the file, where known the dataset, and why."""


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


# ---------------------------------------------------------------------------------------------------------------- metadata
MOST_BYTES = 64 << 20
"""Largest size of all texts and arrays of the metadata together; a profile with every link between 256 ranks has some 26 MB."""
MOST_VALUES = 1 << 22
"""Largest number of values in a JSON text: in memory each takes up to a hundred times its length."""
REQUIRED = ("step", "updates", "losses", "loss_scale", "job")
"""Keys of every checkpoint: without them nothing can go on from it."""
REQUIRED_OF_SHARDS = ("begun", "rank", "names", "training_state")
"""Further keys of a local shard, which is told by its ``version_id``."""


def check_size(text: bytes) -> None:
    """Refuse a JSON text with more values than any checkpoint has. Raises ValueError."""
    if text.count(b",") + text.count(b"[") + text.count(b"{") > MOST_VALUES:
        raise ValueError(f"more than {MOST_VALUES:,} values")


def check_metadata(found: Mapping[str, Any]) -> None:
    """Check all keys. Raises ValueError with the key, its value and the rule."""
    required = (*REQUIRED, *(REQUIRED_OF_SHARDS if "version_id" in found else ()))
    lacking = [key for key in required if key not in found]
    if lacking:
        raise ValueError(f"{', '.join(lacking)} missing from the metadata")
    _check(found, "", {key: rule for key, rule in _RULES.items() if key in found})
    _check(found["job"], "job.", {"train": _TABLE, "data": _TABLE})
    if "training_state" in found:
        _check(found["training_state"], "training_state.", _TRAINING_STATE)
    step, updates, losses = found["step"], found["updates"], len(found["losses"])
    if updates > step or losses != step:
        raise ValueError(f"step = {step} with {updates} updates and {losses} losses: must have as many losses")


_Rule = tuple[Callable[[Any], bool], str]


def _check(found: Mapping[str, Any], before: str, rules: Mapping[str, _Rule]) -> None:
    for key, (fits, rule) in rules.items():
        if not fits(found.get(key)):
            said = repr(found.get(key))
            raise ValueError(f"{before}{key} = {said if len(said) < 80 else said[:77] + '...'}: must be {rule}")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < 2**63)


def _is_scale(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != 2:
        return False
    return _is_number(value[0]) and 0 < value[0] < math.inf and _is_count(value[1])


def _is_array(value: Any, dtype: type[np.generic], dimensions: int) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == dtype and value.ndim == dimensions


_COUNT: _Rule = _is_count, "a whole number, 0 or more"
_TABLE: _Rule = lambda value: isinstance(value, dict), "a table"
_TEXT: _Rule = lambda value: isinstance(value, str), "a text"
_TEXT_OR_NONE: _Rule = lambda value: value is None or isinstance(value, str), "a text, or nothing"
_NUMBER_OR_NONE: _Rule = lambda value: value is None or _is_number(value), "a number, or nothing"
_RULES: dict[str, _Rule] = {
    "step": _COUNT,
    "updates": _COUNT,
    "losses": (
        lambda value: _is_array(value, np.float64, 1),
        "a list of float64 numbers",
    ),  # infinite or NaN: steps skipped
    "loss_scale": (_is_scale, "a positive number and a count"),
    "held_out_loss": (_is_number, "a number"),
    "lowest_loss": _NUMBER_OR_NONE,
    "higher_in_a_row": _COUNT,
    "reference": (lambda value: value is None or _is_array(value, np.float32, 2), "a table of float32 numbers"),
    "job": _TABLE,
    "model_config": _TABLE,
    "generation_config": _TABLE,
    "versions": _TABLE,
    "base_model": _TEXT_OR_NONE,
    "data_fingerprint": _TEXT,
    "run": _TEXT_OR_NONE,
    "begun": _TEXT_OR_NONE,
    "version_id": _TEXT,
    "rank": _COUNT,
    "names": (lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value), "a list of texts"),
    "training_state": _TABLE,
}
_TRAINING_STATE: dict[str, _Rule] = {
    "step": _COUNT,
    "updates": _COUNT,
    "loss_scale": (lambda value: value is None or _is_scale(value), "a positive number and a count"),
    "skipped": _COUNT,
    "skips_in_a_row": _COUNT,
    "lowest_loss": _NUMBER_OR_NONE,
    "higher_in_a_row": _COUNT,
    "last_checkpoint": _TEXT_OR_NONE,
    "good_checkpoint": _TEXT_OR_NONE,
}
