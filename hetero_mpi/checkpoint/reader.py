"""Reading a checkpoint: nothing is believed before its checksum was compared."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from hetero_mpi.checkpoint.errors import CheckpointError
from hetero_mpi.checkpoint.format import (
    FORMAT,
    FORMAT_VERSION,
    KINDS,
    METADATA,
    PIECE_BYTES,
    STORAGE,
    crc32,
    dtype_name,
    piece_count,
    pieces,
)

# What h5py raises on damaged files: which one depends on the layer of HDF5 that notices.
_DAMAGE = (OSError, RuntimeError, KeyError, ValueError, TypeError, MemoryError, OverflowError)


class CheckpointReader:
    """A whole checkpoint, opened for reading; used as a context manager.

    Raises CheckpointError, on opening, for a file that is missing, truncated, unfinished, not HDF5, not a checkpoint of
    this program or of a newer format; on reading, for a dataset that is missing or whose checksum does not match.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file: Any = None
        self._metadata: dict[str, Any] | None = None

    def __enter__(self) -> CheckpointReader:
        if not self.path.is_file():
            raise CheckpointError(f"{self.path}: there is no such checkpoint. Name one with --resume PATH.")
        with self._damage_named():
            if not h5py.is_hdf5(self.path):
                raise CheckpointError(f"{self.path}: this is not an HDF5 file. Resume from another checkpoint.")
            self._file = h5py.File(self.path, "r", locking="best-effort")
        try:
            with self._damage_named():
                self._check_header()
        except CheckpointError:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def held_out_loss(self) -> float | None:
        """Held-out loss at the checkpoint's step, nats per token; None where it was not measured. Reads nothing else."""
        with self._damage_named(METADATA):
            value = self._file[METADATA].attrs.get("held_out_loss")
            return None if value is None else float(value)

    @property
    def metadata(self) -> dict[str, Any]:
        """What the writer was given as ``metadata``, with the same types (tuples come back as lists)."""
        if self._metadata is None:
            with self._damage_named(METADATA):
                group = self._file[METADATA]
                found: dict[str, Any] = {key: value.item() for key, value in group.attrs.items()}
                names = list(group)
            for name in names:
                found[name] = self._read_metadata(name)
            self._metadata = found
        return self._metadata

    def names(self, kind: str) -> tuple[str, ...]:
        """Names stored under ``parameters``, ``moments1`` or ``moments2``, sorted."""
        assert kind in KINDS, kind
        with self._damage_named(kind):
            return tuple(sorted(self._file[kind]))

    def shape(self, kind: str, name: str) -> tuple[int, ...]:
        """The tensor's shape; no data is read."""
        with self._damage_named(f"{kind}/{name}"):
            return tuple(self._dataset(kind, name).shape)

    def dtype(self, kind: str, name: str) -> str:
        """The tensor's dtype, e.g. ``bfloat16``; no data is read."""
        with self._damage_named(f"{kind}/{name}"):
            return _dtype_of(self._dataset(kind, name))

    @property
    def writer(self) -> str:
        """Program and format that wrote the file: ``hetero_mpi 0.1.0, format 1``."""
        with self._damage_named():
            attributes = self._file.attrs
            return f"hetero_mpi {attributes['program_version'].decode()}, format {int(attributes['format_version'])}"

    def read(self, kind: str, name: str) -> tuple[NDArray[Any], str]:
        """The tensor's bits and dtype, e.g. (float32 array, "float32") or (uint16 array, "bfloat16")."""
        with self._damage_named(f"{kind}/{name}"):
            dataset = self._dataset(kind, name)
            stored, dtype = dataset.id.get_type(), _dtype_of(dataset)
            array: NDArray[Any] = np.empty(dataset.shape, STORAGE[dtype])
            if array.size:
                dataset.id.read(h5py.h5s.ALL, h5py.h5s.ALL, array, stored)
            _compare_checksum(dataset, crc32(array))
        return array, dtype

    def check(self, kind: str, name: str) -> None:
        """Compare a tensor's checksum, in pieces: any tensor in the memory of one piece."""
        with self._damage_named(f"{kind}/{name}"):
            dataset = self._dataset(kind, name)
            _compare_checksum(dataset, _crc32_of(dataset, _dtype_of(dataset)))

    def _dataset(self, kind: str, name: str) -> Any:
        if name not in self._file[kind]:
            raise CheckpointError(f"{self.path}: dataset {kind}/{name} is missing: the checkpoint is of another model.")
        return self._file[kind][name]

    def _read_metadata(self, name: str) -> Any:
        with self._damage_named(f"{METADATA}/{name}"):
            dataset = self._file[METADATA][name]
            content = dataset.attrs.get("content")
            if content is None:
                return self.read(METADATA, name)[0]
            raw = dataset[()].rstrip(b"\0")
            _compare_checksum(dataset, crc32(np.frombuffer(raw, np.uint8)))
            return json.loads(raw) if content == b"json" else raw.decode()

    def _check_header(self) -> None:
        attributes = self._file.attrs
        if attributes.get("format") != FORMAT.encode():
            raise CheckpointError(f"{self.path}: an HDF5 file, but not a checkpoint of hetero_mpi.")
        version = int(attributes["format_version"])
        if version > FORMAT_VERSION:
            writer = attributes["program_version"].decode()
            raise CheckpointError(
                f"{self.path}: format version {version}, written by hetero_mpi {writer}; this program reads versions "
                f"up to {FORMAT_VERSION}. Install hetero_mpi {writer} or newer."
            )
        if "finished" not in attributes:
            raise CheckpointError(f"{self.path}: the checkpoint was never finished. Resume from an older one.")

    @contextmanager
    def _damage_named(self, dataset: str = "") -> Iterator[None]:
        """Turn whatever HDF5 says of damaged bytes into one CheckpointError with the names of file and dataset."""
        try:
            yield
        except CheckpointError:
            raise
        except _DAMAGE as error:
            where = f"dataset {dataset}: " if dataset else ""
            raise CheckpointError(
                f"{self.path}: {where}damaged or truncated ({error}). Resume from an older checkpoint."
            ) from error


def verify(path: str | os.PathLike[str]) -> str | None:
    """Read everything once and compare all checksums. None: the checkpoint is whole; else the reason why it is not."""
    try:
        with CheckpointReader(path) as reader:
            assert isinstance(reader.metadata, dict)
            for kind in KINDS:
                for name in reader.names(kind):
                    reader.check(kind, name)
    except CheckpointError as error:
        return str(error)
    return None


def _dtype_of(dataset: Any) -> str:
    """The tensor dtype of a dataset that is laid out as this format does it.

    Other layouts (compressed, virtual, in other files) may claim any size, and would be believed until memory runs out.
    """
    dtype = dtype_name(dataset.id.get_type())
    if dtype is None:
        raise TypeError(f"unknown number type {dataset.dtype}")
    created = dataset.id.get_create_plist()
    if created.get_layout() != h5py.h5d.CONTIGUOUS or created.get_external_count():
        raise TypeError("its bytes do not lie in one place of this file")
    if (
        dataset.size
        and dataset.id.get_offset() + dataset.size * STORAGE[dtype].itemsize > dataset.file.id.get_filesize()
    ):
        raise ValueError("it is larger than the file")
    return dtype


def _crc32_of(dataset: Any, dtype: str) -> int:
    """CRC-32 of a dataset's bytes, read in pieces into one buffer."""
    stored, space, item = dataset.id.get_type(), dataset.id.get_space(), STORAGE[dtype]
    buffer: NDArray[Any] = np.empty(max(1, PIECE_BYTES // item.itemsize), item)
    checksum = 0
    for piece in pieces(dataset.shape, item.itemsize):
        part = buffer[: piece_count(piece)]
        memory = h5py.h5s.create_simple(part.shape) if dataset.shape else h5py.h5s.create(h5py.h5s.SCALAR)
        if dataset.shape:
            space.select_hyperslab(*piece)
        dataset.id.read(memory, space, part, stored)
        checksum = crc32(part, checksum)
    return checksum


def _compare_checksum(dataset: Any, actual: int) -> None:
    expected = int(dataset.attrs["crc32"])
    if actual != expected:
        raise ValueError(f"its CRC-32 is {actual:08x}, and {expected:08x} was written")
