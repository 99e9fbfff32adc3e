"""Writing a checkpoint: a tensor at a time, invisible until it is whole."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from pathlib import Path
from types import TracebackType
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

import hetero_mpi
from hetero_mpi.checkpoint.errors import CheckpointError
from hetero_mpi.checkpoint.format import FORMAT, FORMAT_VERSION, KINDS, LIBVER, METADATA, STORAGE, crc32, file_type

# Names the temporary files of this process: whatever carries another mark was left behind by a run that died.
_PROCESS_MARK = secrets.token_hex(4)

DESCRIPTION = (
    "Parameters and AdamW moments of a training run, keyed by transformers' parameter names. "
    "Each dataset's attribute crc32 is the CRC-32 of its little-endian bytes in C order."
)


class CheckpointWriter:
    """Writes one checkpoint; used as a context manager.

    The file appears under ``path`` in one step, when the block ends without an exception: marked finished, flushed to
    disk and renamed. Until then the former file of that name, if any, is untouched. On an exception nothing remains.
    A directory of checkpoints belongs to one run: temporary files that other processes left in it are removed.

    ``metadata`` must hold ``step`` (int). Values: bool, int and float become attributes of the group ``metadata``, str
    a text, numpy arrays (the losses) a dataset; everything else that JSON can hold becomes JSON text.

    Raises CheckpointError when the file cannot be written (disk full, no permission), with the file and the reason.
    """

    def __init__(self, path: str | os.PathLike[str], metadata: dict[str, Any]) -> None:
        assert isinstance(metadata.get("step"), int), "a checkpoint's metadata must hold its step"
        self.path = Path(path)
        self.metadata = metadata
        self._temporary = self.path.with_name(f".{self.path.name}.tmp-{_PROCESS_MARK}")
        self._file: Any = None

    def __enter__(self) -> CheckpointWriter:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(self.path.parent)
            self._file = h5py.File(self._temporary, "w", libver=LIBVER, locking="best-effort")
            for kind in (*KINDS, METADATA):
                self._file.create_group(kind)
            _write_header(self._file)
            for key, value in self.metadata.items():
                _write_metadata(self._file[METADATA], key, value)
        except OSError as error:
            self._discard()
            raise self._error(error) from error
        except BaseException:
            self._discard()
            raise
        return self

    def write(self, kind: str, name: str, array: NDArray[Any], dtype: str) -> None:
        """Store one tensor.

        ``kind``: ``parameters``, ``moments1`` or ``moments2``. ``name``: the parameter's name, dots included, once per
        kind. ``array``: of the tensor's shape, in the numpy dtype that holds its bits (``uint16`` for ``bfloat16``).
        """
        assert self._file is not None, "write() outside of the with block"
        assert kind in KINDS and "/" not in name and name not in ("", "."), (kind, name)
        assert array.dtype == STORAGE[dtype], f"{name}: {dtype} is stored from {STORAGE[dtype]}, not from {array.dtype}"
        try:
            _write_array(self._file[kind], name, array, dtype)
        except OSError as error:
            raise self._error(error) from error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._discard()
            return
        try:
            self._file.attrs["finished"] = np.uint8(1)
            self._file.close()
            self._file = None
            sync(self._temporary)
            os.replace(self._temporary, self.path)
            sync(self.path.parent)
        except (OSError, RuntimeError) as failure:  # h5py reports a failed close as RuntimeError
            self._discard()
            raise self._error(failure) from failure

    def _discard(self) -> None:
        """Close and remove the temporary file. A close that fails stays silent: the reason is already on its way."""
        if self._file is not None:
            with contextlib.suppress(OSError, RuntimeError):
                self._file.close()
            self._file = None
        self._temporary.unlink(missing_ok=True)

    def _error(self, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: the checkpoint could not be written ({error}); checkpoints written before are untouched. "
            "Free space or set output.run_dir to a directory that can be written, then resume."
        )


def sync(path: Path) -> None:
    """fsync a file or a directory (the latter makes a rename durable)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_leftovers(directory: Path) -> None:
    for leftover in directory.glob(".*.h5.tmp-*"):
        if not leftover.name.endswith(_PROCESS_MARK):
            leftover.unlink(missing_ok=True)


def _write_header(file: Any) -> None:
    file.attrs["format"] = np.bytes_(FORMAT)
    file.attrs["format_version"] = np.int64(FORMAT_VERSION)
    file.attrs["program_version"] = np.bytes_(hetero_mpi.__version__)
    file.attrs["description"] = np.bytes_(DESCRIPTION)


def _write_metadata(group: Any, key: str, value: Any) -> None:
    if isinstance(value, np.ndarray):
        _write_array(group, key, value, value.dtype.name)
    elif isinstance(value, (bool, float)) or (isinstance(value, int) and abs(value) < 2**63):
        group.attrs[key] = np.asarray(value)
    elif isinstance(value, str):
        _write_text(group, key, value, "text")
    else:
        _write_text(group, key, json.dumps(value, ensure_ascii=False), "json")


def _write_array(group: Any, name: str, array: NDArray[Any], dtype: str) -> None:
    array = np.asarray(array, order="C").astype(STORAGE[dtype], copy=False)
    kind = file_type(dtype)
    space = h5py.h5s.create_simple(array.shape) if array.shape else h5py.h5s.create(h5py.h5s.SCALAR)
    dataset = h5py.Dataset(h5py.h5d.create(group.id, name.encode(), kind, space))
    if array.size:
        dataset.id.write(h5py.h5s.ALL, h5py.h5s.ALL, array, kind)
    dataset.attrs["crc32"] = np.uint32(crc32(array))


def _write_text(group: Any, key: str, text: str, content: str) -> None:
    """A text as one string of fixed length, padded to length 1 where empty (HDF5 has no strings of length 0)."""
    raw = text.encode()
    assert b"\0" not in raw, f"{key}: HDF5 strings end at the first NUL"
    dataset = group.create_dataset(key, data=raw or b"\0", dtype=h5py.string_dtype("utf-8", max(1, len(raw))))
    dataset.attrs["content"] = np.bytes_(content)
    dataset.attrs["crc32"] = np.uint32(crc32(np.frombuffer(raw, np.uint8)))
