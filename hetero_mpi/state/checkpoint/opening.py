"""HDF5 files of anybody's: every object is looked at before it is opened, and whatever is wrong becomes one kind of error.

The format needs four groups of datasets, and nothing else is opened. HDF5 itself offers far more, which a file may use against
its reader: links to other files (a named pipe would be waited for), data in other files (any file of this machine), compressed,
virtual and variable-length data (of any size), groups that hold themselves. All of it is refused here, and only here.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hetero_mpi.state.checkpoint.format import CheckpointError, dtype_name

MOST_MEMBERS = 1 << 18
"""Datasets of one kind; the largest models of today have some 50,000 tensors."""
MOST_ATTRIBUTES = 1 << 10
LARGEST_ATTRIBUTE_BYTES = 1 << 12
TEXT = "text"
"""``Stored.dtype`` of a text of fixed length."""
_PLAIN = (h5py.h5t.INTEGER, h5py.h5t.FLOAT, h5py.h5t.ENUM, h5py.h5t.STRING)


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
