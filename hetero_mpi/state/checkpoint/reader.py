"""Reading a checkpoint: nothing is believed before its checksum was compared, and nothing opened before it was looked at."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from hetero_mpi.planning.types import moments
from hetero_mpi.state.checkpoint import opening
from hetero_mpi.state.checkpoint.format import (
    FORMAT,
    FORMAT_VERSION,
    KINDS,
    METADATA,
    MOST_BYTES,
    PIECE_BYTES,
    SCALES,
    SINCE,
    STORAGE,
    CheckpointError,
    Summary,
    check_metadata,
    check_size,
    crc32,
    piece_count,
    pieces,
)
from hetero_mpi.state.checkpoint.opening import TEXT, Stored, damage_named


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
            self._file = opening.open_file(self.path)
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
            value = opening.attribute(self._groups[METADATA], "held_out_loss")
            return None if value is None else float(value)

    @property
    def metadata(self) -> dict[str, Any]:
        """The writer's ``metadata``, with the same types (tuples come back as lists)."""
        if self._metadata is None:
            with damage_named(self.path, METADATA):
                group = self._groups[METADATA]
                found, names = opening.attributes(group), opening.names(group)
                opened = {name: opening.open_dataset(group, name, self._file_bytes) for name in names}
                if sum(stored.bytes for stored in opened.values()) > MOST_BYTES:
                    raise ValueError(f"more than {MOST_BYTES:,} bytes of metadata")
            for name, stored in opened.items():
                with damage_named(self.path, f"{METADATA}/{name}"):
                    found[name] = _metadata_value(stored)
            with damage_named(self.path, METADATA):
                check_metadata(found)
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
            return opening.names(self._groups[kind]) if kind in self._groups else ()

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
            stored = opening.open_dataset(self._groups[kind], name, self._file_bytes)
        except LookupError:
            raise CheckpointError(
                "checkpoint.dataset_missing",
                f"{self.path}: dataset {kind}/{name} is missing: the checkpoint is of another model.",
            ) from None
        if stored.dtype == TEXT:
            raise TypeError("a text instead of numbers")
        return stored

    def _compare(self, kind: str, name: str, stored: Stored, summary: Summary) -> None:
        _compare_checksum(stored, summary.crc32)
        trained = kind != "parameters" or name in {*self.names("moments1"), *self.names("moments2")}
        problem = summary.problem(kind, trained)
        if problem is not None:
            raise ValueError(problem)

    def _check_header(self) -> None:
        place = self._file.id
        if opening.attribute(place, "format") != FORMAT.encode():
            raise CheckpointError(
                "checkpoint.foreign_hdf5", f"{self.path}: an HDF5 file, but not a checkpoint of hetero_mpi."
            )
        version = int(opening.attribute(place, "format_version"))
        program = f"hetero_mpi {opening.attribute(place, 'program_version').decode()}"
        self.writer = f"{program}, format {version}"
        if version > FORMAT_VERSION:
            raise CheckpointError(
                "checkpoint.version",
                f"{self.path}: format version {version}, written by {program}; this program reads versions "
                f"up to {FORMAT_VERSION}. Install {program} or newer.",
            )
        if opening.attribute(place, "finished") is None:
            raise CheckpointError(
                "checkpoint.unfinished", f"{self.path}: the checkpoint was never finished. Resume from an older one."
            )
        opening.names(place)
        self._groups = {
            name: opening.open_group(place, name) for name in (*KINDS, METADATA) if version >= SINCE.get(name, 1)
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
    content = opening.attribute(stored.id, "content")
    if content is None:
        array: NDArray[Any] = np.empty(stored.shape, STORAGE[stored.dtype])
        _compare_checksum(stored, _read(stored, array.reshape(-1)).crc32)
        return array
    if stored.dtype != TEXT or stored.shape:
        raise TypeError("it is not a single text")
    text = np.empty((), f"S{stored.bytes}")
    stored.id.read(h5py.h5s.ALL, h5py.h5s.ALL, text, stored.type)
    raw: bytes = text.item()  # without the padding
    _compare_checksum(stored, crc32(np.frombuffer(raw, np.uint8)))
    if content != b"json":
        return raw.decode()
    check_size(raw)
    return json.loads(raw)


def _read(stored: Stored, flat: NDArray[Any] | None = None) -> Summary:
    """Read a dataset in pieces, into ``flat``, or each into the place of the one before it."""
    space, item, summary = stored.id.get_space(), STORAGE[stored.dtype], Summary(stored.dtype)
    buffer: NDArray[Any] = np.empty(max(1, PIECE_BYTES // item.itemsize), item) if flat is None else flat
    begin = 0
    for piece in pieces(stored.shape, item.itemsize):
        part = buffer[begin : begin + piece_count(piece)]
        begin += 0 if flat is None else part.size
        memory = h5py.h5s.create_simple(part.shape) if stored.shape else h5py.h5s.create(h5py.h5s.SCALAR)
        if stored.shape:
            space.select_hyperslab(*piece)
        stored.id.read(memory, space, part, stored.type)
        summary.add(part)
    return summary


def _compare_checksum(stored: Stored, actual: int) -> None:
    expected = opening.attribute(stored.id, "crc32")
    if type(expected) is not int:
        raise TypeError("it bears no CRC-32")
    if actual != expected:
        raise ValueError(f"its CRC-32 is {actual:08x}, and {expected:08x} was written")
