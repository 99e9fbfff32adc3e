"""Read and verify checkpoints. Objects are validated before they are opened, and data is used only if its checksum matches."""

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
"""Maximum total size of the metadata; a profile of every link between 256 ranks takes some 26 MB."""
MAX_JSON_VALUES = 1 << 22
"""Maximum number of values in a JSON string, since a parsed value may take a hundred times as much memory as its text."""
_REQUIRED = ("step", "updates", "losses", "loss_scale", "job")
"""Keys that every checkpoint must have for training to continue from it."""
_REQUIRED_OF_SHARDS = (*_REQUIRED, "begun", "rank", "names", "skipped", "skips_in_a_row", "higher_in_a_row")
"""Keys that every shard must have; shards are recognised by the key ``version_id``."""


@dataclass(frozen=True)
class CheckpointContents:
    """Summary of the contents of a valid checkpoint."""

    tensors: int
    """Number of tensors of all kinds."""
    parameters: int
    numbers: int
    """Number of elements in all parameters."""
    dtypes: frozenset[str]


class CheckpointReader:
    """An open checkpoint, as a context manager.

    Opening raises CheckpointError if the file is missing, truncated, unfinished, not HDF5, not a checkpoint of this program or of a
    newer format version. Reading a dataset raises it if the dataset is missing, has another layout, fails its checksum, or has
    numbers from which training cannot continue. Malformed files never cause any other exception.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file: Any = None
        self._file_bytes = 0
        self.writer = ""
        """Program and format version that wrote the file, such as ``hetero_mpi 0.1.0, format 1``."""
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
        """Return the evaluation loss at the checkpoint's step in nats per token; None if it was not measured."""
        with damage_named(self.path, METADATA):
            value = hdf5.attribute(self._groups[METADATA], "held_out_loss")
            return None if value is None else float(value)

    @property
    def metadata(self) -> dict[str, Any]:
        """The ``metadata`` that was passed to the writer, with the same types, except that tuples become lists."""
        if self._metadata is None:
            with damage_named(self.path, METADATA):
                group = self._groups[METADATA]
                values, names = hdf5.attributes(group), hdf5.names(group)
                opened = {name: hdf5.open_dataset(group, name, self._file_bytes) for name in names}
                if sum(stored.bytes for stored in opened.values()) > MAX_METADATA_BYTES:
                    raise ValueError(f"more than {MAX_METADATA_BYTES:,} bytes of metadata")
            for name, stored in opened.items():
                with damage_named(self.path, f"{METADATA}/{name}"):
                    values[name] = _metadata_value(stored)
            with damage_named(self.path, METADATA):
                _check_metadata(values)
            self._metadata = values
        return self._metadata

    def required(self, key: str) -> Any:
        """Return an entry of the metadata. Raises CheckpointError if it is missing."""
        if key not in self.metadata:
            raise CheckpointError(
                "checkpoint.metadata_missing",
                f"{self.path}: {key} is missing from the metadata. Use another checkpoint.",
            )
        return self.metadata[key]

    def names(self, kind: str) -> tuple[str, ...]:
        """Return the sorted names of the tensors of one of ``KINDS``."""
        assert kind in KINDS, kind
        with damage_named(self.path, kind):
            return hdf5.names(self._groups[kind]) if kind in self._groups else ()

    def shape(self, kind: str, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading its data."""
        with damage_named(self.path, f"{kind}/{name}"):
            return self._tensor(kind, name).shape

    def dtype(self, kind: str, name: str) -> str:
        """Return the dtype of a tensor, such as ``bfloat16``, without reading its data."""
        with damage_named(self.path, f"{kind}/{name}"):
            return self._tensor(kind, name).dtype

    def read(self, kind: str, name: str) -> tuple[NDArray[Any], str]:
        """Read a tensor: returns its bits and its dtype, such as (float32 array, "float32") or (uint16 array, "bfloat16")."""
        with damage_named(self.path, f"{kind}/{name}"):
            stored = self._tensor(kind, name)
            array: NDArray[Any] = np.empty(stored.shape, STORAGE[stored.dtype])
            self._check_tensor(kind, name, stored, _read_pieces(stored, array.reshape(-1)))
        return array, stored.dtype

    def check_all(self) -> CheckpointContents:
        """Verify the complete file piece by piece. Raises CheckpointError unless training can continue from it."""
        names = {kind: self.names(kind) for kind in KINDS}
        with damage_named(self.path):
            train = self.metadata["job"]["train"]
            forms = {moments.TWO, moments.EIGHT_BIT, *moments.OF_OPTIMIZER.get(train.get("optimizer", "adamw"), ())}
            is_consistent = len(forms) > 2 or names["moments1"] == names["moments2"]
            if not is_consistent or not {*names["moments1"], *names["moments2"]} <= {*names["parameters"]}:
                raise ValueError("the moments do not match the parameters")
            packed = [
                tuple(n for n in names[kind] if self.dtype(kind, n) == "uint8") for kind in ("moments1", "moments2")
            ]
            if packed != [names[kind] for kind in SCALES]:
                raise ValueError("the scales do not match the 8-bit moments")
        bytes_left, datasets = self._file_bytes, dict[tuple[str, str], Stored]()
        for kind, of_kind in names.items():
            for name in of_kind:
                with damage_named(self.path, f"{kind}/{name}"):
                    datasets[kind, name] = stored = self._tensor(kind, name)
                    bytes_left -= stored.bytes
                    if bytes_left < 0:
                        raise ValueError("the datasets are larger in total than the file")
                    parameter_shape = datasets["parameters", name].shape
                    expected = [moments.moment_tensors(form, parameter_shape).get(kind, (None, "")) for form in forms]
                    if kind != "parameters" and stored.shape not in [shape for shape, _ in expected]:
                        raise ValueError("its shape does not match the parameter")
        for (kind, name), stored in datasets.items():
            with damage_named(self.path, f"{kind}/{name}"):
                self._check_tensor(kind, name, stored, _read_pieces(stored))
        numbers = sum(math.prod(stored.shape) for (kind, _), stored in datasets.items() if kind == "parameters")
        dtypes = frozenset(stored.dtype for stored in datasets.values())
        return CheckpointContents(len(datasets), len(names["parameters"]), numbers, dtypes)

    def _tensor(self, kind: str, name: str) -> Stored:
        try:
            stored = hdf5.open_dataset(self._groups[kind], name, self._file_bytes)
        except LookupError:
            raise CheckpointError(
                "checkpoint.dataset_missing",
                f"{self.path}: dataset {kind}/{name} is missing: the checkpoint belongs to another model, or is damaged.",
            ) from None
        if stored.dtype == TEXT:
            raise TypeError("text instead of numbers")
        return stored

    def _check_tensor(self, kind: str, name: str, stored: Stored, summary: hdf5.Summary) -> None:
        _check_crc32(stored, summary.crc32)
        trained = kind != "parameters" or name in {*self.names("moments1"), *self.names("moments2")}
        problem = summary.problem(kind, trained)
        if problem is not None:
            raise ValueError(problem)

    def _check_header(self) -> None:
        root = self._file.id
        if hdf5.attribute(root, "format") != hdf5.FORMAT.encode():
            raise CheckpointError(
                "checkpoint.foreign_hdf5", f"{self.path}: an HDF5 file, but not a hetero_mpi checkpoint."
            )
        version = int(hdf5.attribute(root, "format_version"))
        program = f"hetero_mpi {hdf5.attribute(root, 'program_version').decode()}"
        self.writer = f"{program}, format {version}"
        if version > hdf5.FORMAT_VERSION:
            raise CheckpointError(
                "checkpoint.version",
                f"{self.path}: format version {version}, written by {program}; this program reads versions "
                f"up to {hdf5.FORMAT_VERSION}. Install {program} or newer.",
            )
        if hdf5.attribute(root, "finished") is None:
            raise CheckpointError(
                "checkpoint.unfinished", f"{self.path}: the checkpoint is incomplete. Resume from an older one."
            )
        hdf5.names(root)
        self._groups = {
            name: hdf5.open_group(root, name) for name in (*KINDS, METADATA) if version >= hdf5.SINCE.get(name, 1)
        }
        self._file_bytes = root.get_filesize()


def verify(path: str | os.PathLike[str]) -> str | None:
    """Verify a complete checkpoint. Returns None if training can continue from it, else the reason why not."""
    try:
        with CheckpointReader(path) as reader:
            reader.check_all()
    except CheckpointError as error:
        return str(error)
    return None


def _metadata_value(stored: Stored) -> Any:
    """Read an entry of the metadata: an array, a string or parsed JSON."""
    content = hdf5.attribute(stored.id, "content")
    if content is None:
        array: NDArray[Any] = np.empty(stored.shape, STORAGE[stored.dtype])
        _check_crc32(stored, _read_pieces(stored, array.reshape(-1)).crc32)
        return array
    if stored.dtype != TEXT or stored.shape:
        raise TypeError("it is not a single string")
    text = np.empty((), f"S{stored.bytes}")
    stored.id.read(h5py.h5s.ALL, h5py.h5s.ALL, text, stored.type)
    raw: bytes = text.item()  # without the padding
    _check_crc32(stored, hdf5.crc32(np.frombuffer(raw, np.uint8)))
    if content != b"json":
        return raw.decode()
    if raw.count(b",") + raw.count(b"[") + raw.count(b"{") > MAX_JSON_VALUES:
        raise ValueError(f"more than {MAX_JSON_VALUES:,} values")
    return json.loads(raw)


def _read_pieces(stored: Stored, flat: NDArray[Any] | None = None) -> hdf5.Summary:
    """Read a dataset in pieces, into ``flat`` if given, else into one reused buffer, and summarise it."""
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


def _check_crc32(stored: Stored, actual: int) -> None:
    expected = hdf5.attribute(stored.id, "crc32")
    if type(expected) is not int:
        raise TypeError("it has no CRC-32")
    if actual != expected:
        raise ValueError(f"its CRC-32 is {actual:08x}, expected {expected:08x}")


# ---------------------------------------------------------------------------------------------------------------- metadata
def _check_metadata(metadata: Mapping[str, Any]) -> None:
    """Validate all metadata. Raises ValueError with the first invalid key, its value and the rule."""
    missing_keys = [
        key for key in (_REQUIRED_OF_SHARDS if "version_id" in metadata else _REQUIRED) if key not in metadata
    ]
    if missing_keys:
        raise ValueError(f"{', '.join(missing_keys)} missing from the metadata")
    for keys, (fits, rule) in _RULES.items():
        for key in keys.split():
            if key in metadata and not fits(metadata[key]):
                raise _broken_rule(key, metadata[key], rule)
    for key in ("train", "data"):
        if not isinstance(metadata["job"].get(key), dict):
            raise _broken_rule(f"job.{key}", metadata["job"].get(key), "a table")
    step, updates, losses = metadata["step"], metadata["updates"], len(metadata["losses"])
    if updates > step or losses != step:
        raise ValueError(f"step = {step} with {updates} updates and {losses} losses: must have one loss per step")


def _broken_rule(key: str, value: Any, rule: str) -> ValueError:
    text = repr(value)
    return ValueError(f"{key} = {text if len(text) < 80 else text[:77] + '...'}: must be {rule}")


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


_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "step updates skipped skips_in_a_row higher_in_a_row rank": (_is_count, "a whole number, 0 or more"),
    # Infinite or NaN in skipped steps.
    "losses": (lambda value: _is_array(value, np.float64, 1), "a list of float64 numbers"),
    "reference": (lambda value: value is None or _is_array(value, np.float32, 2), "a table of float32 numbers"),
    "loss_scale": (_is_scale, "a positive number and a counter"),
    "held_out_loss": (_is_number, "a number"),
    "lowest_loss": (lambda value: value is None or _is_number(value), "a number, or null"),
    "job model_config generation_config versions": (lambda value: isinstance(value, dict), "a table"),
    "data_fingerprint version_id": (lambda value: isinstance(value, str), "a text"),
    "base_model run begun newest_checkpoint good_checkpoint": (
        lambda value: value is None or isinstance(value, str),
        "a string, or null",
    ),
    "names": (
        lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
        "a list of strings",
    ),
}
"""Maps space-separated keys to (check of their values, description of the rule)."""
