"""Write checkpoints piece by piece; a file becomes visible only when it is complete.

HDF5 does not survive a full disk: a failing close leaves objects in the library that crash the process at exit (seen with HDF5 2.0:
a segmentation fault in H5D_close after a successful run). Therefore HDF5 writes to a ``Sink``, which reports success for every
write and records the first error; the writer checks for it and discards the file.

Memory may be nearly full during training. Dirty pages cannot be dropped and count towards the control group's memory limit, so
writing a large file could get a process killed. The file is therefore flushed to disk in windows of limited size.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

import hetero_mpi
from hetero_mpi.state import hdf5
from hetero_mpi.state.hdf5 import KINDS, METADATA, STORAGE, CheckpointError, Summary, crc32, cut, file_type, pieces
from hetero_mpi.util.disk import PROCESS_MARK, atomic_write

DESCRIPTION = (
    "Parameters and AdamW moments of a training run, keyed by transformers' parameter names. "
    "Each dataset's attribute crc32 is the CRC-32 of its little-endian bytes in C order."
)


class CheckpointWriter:
    """Writes one checkpoint, as a context manager.

    If the block ends without an exception, the file is marked finished, flushed to disk and renamed to ``path`` atomically. Until
    then, an existing file of that name is untouched; after an exception, no temporary file remains. A checkpoint directory
    belongs to one run, so temporary files of other processes in it are removed.

    ``metadata`` must have ``step`` (int). Booleans, ints and floats become attributes of the group ``metadata``; strings and numpy
    arrays (such as the losses) become datasets; any other JSON value is stored as a JSON string.

    Raises CheckpointError with the file and the reason if the file cannot be written (disk full, no permission), or if training
    could not continue from a tensor (``hdf5.Summary.problem``).
    """

    def __init__(self, path: str | os.PathLike[str], metadata: dict[str, Any]) -> None:
        assert isinstance(metadata.get("step"), int), "a checkpoint's metadata must hold its step"
        self.path = Path(path)
        self.metadata = metadata
        self._atomic_file = contextlib.ExitStack()
        self._sink: Sink | None = None
        self._file: Any = None
        self._infinite: dict[str, Summary] = {}
        """Parameters that contain infinities, which are allowed unless the parameter is trained."""

    def __enter__(self) -> CheckpointWriter:
        with self._discard_on_error():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            for leftover in self.path.parent.glob(".*.h5.tmp-*"):
                if not leftover.name.endswith(PROCESS_MARK):
                    leftover.unlink(missing_ok=True)
            self._sink = Sink(self._atomic_file.enter_context(atomic_write(self.path, durable=True)))
            self._file = h5py.File(self._sink, "w", libver=hdf5.LIBVER)
            for kind in (*KINDS, METADATA):
                self._file.create_group(kind)
            self._file.attrs["format"] = np.bytes_(hdf5.FORMAT)
            self._file.attrs["format_version"] = np.int64(hdf5.FORMAT_VERSION)
            self._file.attrs["program_version"] = np.bytes_(hetero_mpi.__version__)
            self._file.attrs["description"] = np.bytes_(DESCRIPTION)
            for key, value in self.metadata.items():
                _write_metadata(self._file[METADATA], key, value)
            self._sink.raise_error()
        return self

    def write(self, kind: str, name: str, array: NDArray[Any], dtype: str) -> None:
        """Store one tensor.

        ``kind``: one of ``KINDS``. ``name``: the parameter's name, unique within its kind. ``array``: the tensor's values, in its
        ``STORAGE`` dtype (``uint16`` for ``bfloat16``). ``dtype``: the tensor's dtype.
        """
        assert array.dtype == STORAGE[dtype], f"{name}: {dtype} is stored from {STORAGE[dtype]}, not from {array.dtype}"
        flat = np.asarray(array, order="C").reshape(-1)
        self.write_pieces(kind, name, array.shape, dtype, cut(flat, array.shape))

    def write_pieces(
        self, kind: str, name: str, shape: tuple[int, ...], dtype: str, arrays: Iterable[NDArray[Any]]
    ) -> None:
        """Store one tensor from flat arrays, one for each of ``hdf5.pieces(shape, item bytes)``."""
        assert self._file is not None and self._sink is not None, "write outside the with block"
        assert kind in KINDS and "/" not in name and name not in ("", "."), (kind, name)
        try:
            summary = _write_array(self._file[kind], name, shape, dtype, arrays)
            self._sink.raise_error()
        except OSError as error:
            raise self._error(error) from error
        self._reject(kind, name, summary.problem(kind, trained=kind != "parameters"))
        if summary.problem(kind, trained=True) is not None:
            self._infinite[name] = summary

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            self._discard(error)
            return
        with self._discard_on_error():
            assert self._sink is not None
            for name, summary in self._infinite.items():
                self._reject("parameters", name, summary.problem("parameters", self._is_trained(name)))
            self._file.attrs["finished"] = np.uint8(1)
            self._file.close()
            self._file = None
            self._sink.sync()
            self._sink.close()
            self._atomic_file.close()

    def _is_trained(self, name: str) -> bool:
        return any(name in self._file[kind] for kind in ("moments1", "moments2"))

    @contextlib.contextmanager
    def _discard_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._discard(error)
            if isinstance(error, OSError):
                raise self._error(error) from error
            raise

    def _reject(self, kind: str, name: str, problem: str | None) -> None:
        if problem is not None:
            raise CheckpointError(
                "checkpoint.not_finite",
                f"{self.path}: the checkpoint was not written because training cannot continue from {kind}/{name}: {problem}; "
                "earlier checkpoints are untouched. A lower [train] learning_rate may help.",
            )

    def _discard(self, error: BaseException) -> None:
        """Close and remove the temporary file."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._sink is not None:
            self._sink.close()
        self._atomic_file.__exit__(type(error), error, None)

    def _error(self, error: Exception) -> CheckpointError:
        return CheckpointError(
            "checkpoint.unwritable",
            f"{self.path}: the checkpoint could not be written ({error}); earlier checkpoints are untouched. "
            "Free space or set output.run_dir to a writable directory, then resume.",
        )


def _write_metadata(group: Any, key: str, value: Any) -> None:
    if isinstance(value, np.ndarray):
        flat = np.asarray(value, order="C").astype(STORAGE[value.dtype.name], copy=False).reshape(-1)
        _write_array(group, key, value.shape, value.dtype.name, cut(flat, value.shape))
    elif isinstance(value, (bool, float)) or (isinstance(value, int) and abs(value) < 2**63):
        group.attrs[key] = np.asarray(value)
    elif isinstance(value, str):
        _write_text(group, key, value, "text")
    else:
        _write_text(group, key, json.dumps(value), "json")  # in ASCII, which can represent lone surrogates


def _write_array(group: Any, name: str, shape: tuple[int, ...], dtype: str, arrays: Iterable[NDArray[Any]]) -> Summary:
    """Write a dataset piece by piece and store its checksum as an attribute."""
    kind = file_type(dtype)
    space = h5py.h5s.create_simple(shape) if shape else h5py.h5s.create(h5py.h5s.SCALAR)
    dataset = h5py.Dataset(h5py.h5d.create(group.id, name.encode(), kind, space))
    summary = Summary(dtype)
    for (first, count), array in zip(pieces(shape, STORAGE[dtype].itemsize), arrays, strict=True):
        memory = h5py.h5s.create_simple(array.shape) if shape else h5py.h5s.create(h5py.h5s.SCALAR)
        if shape:
            space.select_hyperslab(first, count)
        dataset.id.write(memory, space, array, kind)
        summary.add(array)
    dataset.attrs["crc32"] = np.uint32(summary.crc32)
    return summary


def _write_text(group: Any, key: str, text: str, content: str) -> None:
    """Write a fixed-length string; an empty one is padded to length 1, since HDF5 has no strings of length 0."""
    raw = text.encode()
    assert b"\0" not in raw, f"{key}: HDF5 strings end at the first NUL"
    dataset = group.create_dataset(key, data=raw or b"\0", dtype=h5py.string_dtype("utf-8", max(1, len(raw))))
    dataset.attrs["content"] = np.bytes_(content)
    dataset.attrs["crc32"] = np.uint32(crc32(np.frombuffer(raw, np.uint8)))


WINDOW_BYTES = 64 << 20
"""Number of bytes written between two flushes of a file to disk."""


class Sink(io.FileIO):
    """The file object to which h5py writes. Apart from ``sync``, it raises OSError only if the file cannot be created.

    Attributes:
        error: the first error of a write, or None.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, "w+")
        self._window = 0
        """Bytes written since the last flush."""
        self.error: OSError | None = None

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = super().readinto(view) or 0
        view[count:] = bytes(len(view) - count)  # the part that could not be written
        return len(view)

    def write(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        begin, written = self.tell(), 0
        with self._recording_error():
            while written < len(view) and self.error is None:
                written += os.pwrite(self.fileno(), view[written:], begin + written)
        self.seek(begin + len(view))
        self._window += written
        if self._window >= WINDOW_BYTES and self.error is None:
            self._window = 0
            with self._recording_error():
                os.fsync(self.fileno())
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(self.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        with self._recording_error():
            return super().truncate(size)
        return size or 0

    def sync(self) -> None:
        """Flush everything to disk. Raises OSError if that or any earlier write fails."""
        self.raise_error()
        os.fsync(self.fileno())

    def raise_error(self) -> None:
        if self.error is not None:
            raise self.error

    @contextlib.contextmanager
    def _recording_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.error = self.error or error
