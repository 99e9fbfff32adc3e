"""Reading a checkpoint: nothing is believed before its checksum was compared, and nothing opened before it was looked at."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from hetero_mpi.planning.types import moments
from hetero_mpi.state import hdf5
from hetero_mpi.state.hdf5 import (
    KINDS,
    METADATA,
    PIECE_BYTES,
    SCALES,
    STORAGE,
    TEXT,
    CheckpointError,
    Stored,
    damage_named,
)

MAX_METADATA_BYTES = 64 << 20
"""Largest size of all texts and arrays of the metadata together; a profile with every link between 256 ranks has some 26 MB."""
MAX_JSON_VALUES = 1 << 22
"""Largest number of values in a JSON text: in memory each takes up to a hundred times its length."""
_REQUIRED = ("step", "updates", "losses", "loss_scale", "job")
"""Keys of every checkpoint: without them nothing can go on from it."""
_REQUIRED_OF_SHARDS = (*_REQUIRED, "begun", "rank", "names", "skipped", "skips_in_a_row", "higher_in_a_row")
"""Keys of every local shard, which is recognised by its ``version_id``."""


@dataclass(frozen=True)
class CheckpointContents:
    """The content of a file that is whole, counted."""

    tensors: int
    """Number of all kinds."""
    parameters: int
    """Tensors that are parameters."""
    numbers: int
    """In all parameters."""
    dtypes: frozenset[str]


class CheckpointReader:
    """A whole checkpoint, opened for reading; used as a context manager.

    Raises CheckpointError, on opening, for a file that is missing, truncated, unfinished, not HDF5, not a checkpoint of
    this program or of a newer format; on reading, for a dataset that is missing, is not laid out as this format does it, whose
    checksum does not match, or from whose numbers no run can go on. Whatever a file holds, it raises nothing else.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file: Any = None
        self._file_bytes = 0
        self.writer = ""
        """Program and format that wrote the file: ``hetero_mpi 0.1.0, format 1``."""
        self._metadata: dict[str, Any] | None = None
        self._groups: dict[str, Any] = {}

    def __enter__(self) -> CheckpointReader:
        with damage_named(self.path):
            self._file = hdf5.open_file(self.path)
            try:
                self._check_header()
            except BaseException:
                self.close()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._groups = {}
        if self._file is not None:
            self._file.close()
            self._file = None

    def held_out_loss(self) -> float | None:
        """Held-out loss at the checkpoint's step, nats per token; None where it was not measured. Reads nothing else."""
        with damage_named(self.path, METADATA):
            value = hdf5.attribute(self._groups[METADATA], "held_out_loss")
            return None if value is None else float(value)

    @property
    def metadata(self) -> dict[str, Any]:
        """The writer's ``metadata``, with the same types (tuples come back as lists)."""
        if self._metadata is None:
            with damage_named(self.path, METADATA):
                group = self._groups[METADATA]
                found, names = hdf5.attributes(group), hdf5.names(group)
                opened = {name: hdf5.open_dataset(group, name, self._file_bytes) for name in names}
                if sum(stored.bytes for stored in opened.values()) > MAX_METADATA_BYTES:
                    raise ValueError(f"more than {MAX_METADATA_BYTES:,} bytes of metadata")
            for name, stored in opened.items():
                with damage_named(self.path, f"{METADATA}/{name}"):
                    found[name] = _metadata_value(stored)
            with damage_named(self.path, METADATA):
                _check_metadata(found)
            self._metadata = found
        return self._metadata

    def told(self, key: str) -> Any:
        """An entry of the metadata. Raises CheckpointError where there is none."""
        if key not in self.metadata:
            raise CheckpointError(
                "checkpoint.metadata_missing",
                f"{self.path}: {key} is missing from the metadata. Take another checkpoint.",
            )
        return self.metadata[key]

    def names(self, kind: str) -> tuple[str, ...]:
        """Names stored under one of ``KINDS``, sorted."""
        assert kind in KINDS, kind
        with damage_named(self.path, kind):
            return hdf5.names(self._groups[kind]) if kind in self._groups else ()

    def shape(self, kind: str, name: str) -> tuple[int, ...]:
        """The tensor's shape; no data is read."""
        with damage_named(self.path, f"{kind}/{name}"):
            return self._tensor(kind, name).shape

    def dtype(self, kind: str, name: str) -> str:
        """The tensor's dtype, e.g. ``bfloat16``; no data is read."""
        with damage_named(self.path, f"{kind}/{name}"):
            return self._tensor(kind, name).dtype

    def read(self, kind: str, name: str) -> tuple[NDArray[Any], str]:
        """The tensor's bits and dtype, e.g. (float32 array, "float32") or (uint16 array, "bfloat16")."""
        with damage_named(self.path, f"{kind}/{name}"):
            stored = self._tensor(kind, name)
            array: NDArray[Any] = np.empty(stored.shape, STORAGE[stored.dtype])
            self._compare(kind, name, stored, _read(stored, array.reshape(-1)))
        return array, stored.dtype

    def check_all(self) -> CheckpointContents:
        """Read everything once, in the memory of one piece. Raises CheckpointError unless a run can go on from it."""
        names = {kind: self.names(kind) for kind in KINDS}
        with damage_named(self.path):
            told = self.metadata["job"]["train"]
            ways = {moments.TWO, moments.EIGHT_BIT, *moments.OF_OPTIMIZER.get(told.get("optimizer", "adamw"), ())}
            alike = len(ways) > 2 or names["moments1"] == names["moments2"]
            if not alike or not {*names["moments1"], *names["moments2"]} <= {*names["parameters"]}:
                raise ValueError("the moments are not those of the parameters")
            packed = [
                tuple(n for n in names[kind] if self.dtype(kind, n) == "uint8") for kind in ("moments1", "moments2")
            ]
            if packed != [names[kind] for kind in SCALES]:
                raise ValueError("the scales are not those of the moments in 8 bits")
        left, found = self._file_bytes, dict[tuple[str, str], Stored]()
        for kind, of_kind in names.items():
            for name in of_kind:
                with damage_named(self.path, f"{kind}/{name}"):
                    found[kind, name] = stored = self._tensor(kind, name)
                    left -= stored.bytes
                    if left < 0:
                        raise ValueError("the datasets together are larger than the file")
                    own = found["parameters", name].shape
                    fitting = [moments.kept(way, own).get(kind, (None, "")) for way in ways]
                    if kind != "parameters" and stored.shape not in [shape for shape, _ in fitting]:
                        raise ValueError("its shape is not that of the parameter")
        for (kind, name), stored in found.items():
            with damage_named(self.path, f"{kind}/{name}"):
                self._compare(kind, name, stored, _read(stored))
        numbers = sum(math.prod(stored.shape) for (kind, _), stored in found.items() if kind == "parameters")
        dtypes = frozenset(stored.dtype for stored in found.values())
        return CheckpointContents(len(found), len(names["parameters"]), numbers, dtypes)

    def _tensor(self, kind: str, name: str) -> Stored:
        try:
            stored = hdf5.open_dataset(self._groups[kind], name, self._file_bytes)
        except LookupError:
            raise CheckpointError(
                "checkpoint.dataset_missing",
                f"{self.path}: dataset {kind}/{name} is missing: the checkpoint is of another model.",
            ) from None
        if stored.dtype == TEXT:
            raise TypeError("a text instead of numbers")
        return stored

    def _compare(self, kind: str, name: str, stored: Stored, summary: hdf5.Summary) -> None:
        _compare_checksum(stored, summary.crc32)
        trained = kind != "parameters" or name in {*self.names("moments1"), *self.names("moments2")}
        problem = summary.problem(kind, trained)
        if problem is not None:
            raise ValueError(problem)

    def _check_header(self) -> None:
        place = self._file.id
        if hdf5.attribute(place, "format") != hdf5.FORMAT.encode():
            raise CheckpointError(
                "checkpoint.foreign_hdf5", f"{self.path}: an HDF5 file, but not a checkpoint of hetero_mpi."
            )
        version = int(hdf5.attribute(place, "format_version"))
        program = f"hetero_mpi {hdf5.attribute(place, 'program_version').decode()}"
        self.writer = f"{program}, format {version}"
        if version > hdf5.FORMAT_VERSION:
            raise CheckpointError(
                "checkpoint.version",
                f"{self.path}: format version {version}, written by {program}; this program reads versions "
                f"up to {hdf5.FORMAT_VERSION}. Install {program} or newer.",
            )
        if hdf5.attribute(place, "finished") is None:
            raise CheckpointError(
                "checkpoint.unfinished", f"{self.path}: the checkpoint was never finished. Resume from an older one."
            )
        hdf5.names(place)
        self._groups = {
            name: hdf5.open_group(place, name) for name in (*KINDS, METADATA) if version >= hdf5.SINCE.get(name, 1)
        }
        self._file_bytes = place.get_filesize()


def verify(path: str | os.PathLike[str]) -> str | None:
    """Read everything once, and compare checksums and values. None: a run can go on from it; else the reason why not."""
    try:
        with CheckpointReader(path) as reader:
            reader.check_all()
    except CheckpointError as error:
        return str(error)
    return None


def _metadata_value(stored: Stored) -> Any:
    """An array, a text or what a JSON text says."""
    content = hdf5.attribute(stored.id, "content")
    if content is None:
        array: NDArray[Any] = np.empty(stored.shape, STORAGE[stored.dtype])
        _compare_checksum(stored, _read(stored, array.reshape(-1)).crc32)
        return array
    if stored.dtype != TEXT or stored.shape:
        raise TypeError("it is not a single text")
    text = np.empty((), f"S{stored.bytes}")
    stored.id.read(h5py.h5s.ALL, h5py.h5s.ALL, text, stored.type)
    raw: bytes = text.item()  # without the padding
    _compare_checksum(stored, hdf5.crc32(np.frombuffer(raw, np.uint8)))
    if content != b"json":
        return raw.decode()
    if raw.count(b",") + raw.count(b"[") + raw.count(b"{") > MAX_JSON_VALUES:
        raise ValueError(f"more than {MAX_JSON_VALUES:,} values")
    return json.loads(raw)


def _read(stored: Stored, flat: NDArray[Any] | None = None) -> hdf5.Summary:
    """Read a dataset in pieces, into ``flat``, or each into the place of the one before it."""
    space, item, summary = stored.id.get_space(), STORAGE[stored.dtype], hdf5.Summary(stored.dtype)
    buffer: NDArray[Any] = np.empty(max(1, PIECE_BYTES // item.itemsize), item) if flat is None else flat
    begin = 0
    for piece in hdf5.pieces(stored.shape, item.itemsize):
        part = buffer[begin : begin + hdf5.piece_count(piece)]
        begin += 0 if flat is None else part.size
        memory = h5py.h5s.create_simple(part.shape) if stored.shape else h5py.h5s.create(h5py.h5s.SCALAR)
        if stored.shape:
            space.select_hyperslab(*piece)
        stored.id.read(memory, space, part, stored.type)
        summary.add(part)
    return summary


def _compare_checksum(stored: Stored, actual: int) -> None:
    expected = hdf5.attribute(stored.id, "crc32")
    if type(expected) is not int:
        raise TypeError("it bears no CRC-32")
    if actual != expected:
        raise ValueError(f"its CRC-32 is {actual:08x}, and {expected:08x} was written")


# ---------------------------------------------------------------------------------------------------------------- metadata
def _check_metadata(found: Mapping[str, Any]) -> None:
    """Check all keys. Raises ValueError with the key, its value and the rule."""
    missing_keys = [key for key in (_REQUIRED_OF_SHARDS if "version_id" in found else _REQUIRED) if key not in found]
    if missing_keys:
        raise ValueError(f"{', '.join(missing_keys)} missing from the metadata")
    for keys, (fits, rule) in _RULES.items():
        for key in keys.split():
            if key in found and not fits(found[key]):
                raise _broken_rule(key, found[key], rule)
    for key in ("train", "data"):
        if not isinstance(found["job"].get(key), dict):
            raise _broken_rule(f"job.{key}", found["job"].get(key), "a table")
    step, updates, losses = found["step"], found["updates"], len(found["losses"])
    if updates > step or losses != step:
        raise ValueError(f"step = {step} with {updates} updates and {losses} losses: must have as many losses")


def _broken_rule(key: str, value: Any, rule: str) -> ValueError:
    said = repr(value)
    return ValueError(f"{key} = {said if len(said) < 80 else said[:77] + '...'}: must be {rule}")


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


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "step updates skipped skips_in_a_row higher_in_a_row rank": (_is_count, "a whole number, 0 or more"),
    # Infinite or NaN: steps skipped.
    "losses": (lambda value: _is_array(value, np.float64, 1), "a list of float64 numbers"),
    "reference": (lambda value: value is None or _is_array(value, np.float32, 2), "a table of float32 numbers"),
    "loss_scale": (_is_scale, "a positive number and a count"),
    "held_out_loss": (_is_number, "a number"),
    "lowest_loss": (lambda value: value is None or _is_number(value), "a number, or nothing"),
    "job model_config generation_config versions": (lambda value: isinstance(value, dict), "a table"),
    "data_fingerprint version_id": (lambda value: isinstance(value, str), "a text"),
    "base_model run begun newest_checkpoint good_checkpoint": (
        lambda value: value is None or isinstance(value, str),
        "a text, or nothing",
    ),
    "names": (_is_names, "a list of texts"),
}
"""Keys -> (test of their values, the rule in words)."""
