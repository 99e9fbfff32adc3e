"""A Hugging Face model directory: what is in it is known from headers alone; tensors are read one at a time.

Only safetensors files are read, never a pickle. Importing this module, and reading headers, needs no torch.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from hetero_mpi.util.disk import require_regular
from hetero_mpi.util.errors import UserError

if TYPE_CHECKING:
    import torch

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
GENERATION = "generation_config.json"
AGAIN = "Download it again."

_FILE_NAME = re.compile(r"[\w.+= -]{1,200}\.safetensors")
_SAMPLE_BYTES, _PIECE = 4096, 1 << 22
_SAYS_NOTHING = ("transformers_version", "_name_or_path")
"""Keys of a config.json that differ between copies of one model."""
_DTYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
"""safetensors dtype -> torch's name for it, bytes per element."""
_ITEM_BYTES = dict(_DTYPES.values()) | {"complex64": 8}
_STORED = {name: stored for stored, (name, _) in _DTYPES.items()} | {"complex64": "C64"}
"""torch's name of a dtype -> safetensors'; with one that is written but not read: a buffer of a user's layer."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of ``file``, which calls it ``name``. ``dtype`` is torch's name (``bfloat16``)."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class ListedTensor:
    """A tensor as ``DirectoryContents`` lists it; ``sample`` is a hash of some of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    sample: str

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class DirectoryContents:
    """The contents of a model directory, without its tensors: so little that it can be sent, enough to tell two models apart.

    Sizes and times of files say nothing (the next fine-tuning of a model has files of the same size, and a copy may be cut into
    other files); hashing all bytes would read the whole model at each start. So every tensor is known by its name,
    dtype, shape and a hash of two blocks of its bytes, in its middle and at its end.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, ListedTensor]

    @cached_property
    def identity(self) -> str:
        """sha256, in hexadecimal, of all that is known."""
        canonical = {"config": _telling(self.config), "tensors": self.to_dict()["tensors"]}
        return hashlib.sha256(json.dumps(canonical, sort_keys=True).encode()).hexdigest()

    def difference(self, other: DirectoryContents) -> str | None:
        """The first thing in which ``other`` differs, in words; None where both are of the same model."""
        if self.identity == other.identity:
            return None
        here, there = _telling(self.config), _telling(other.config)
        for key in sorted({*here, *there}):
            mine, its = here.get(key, "absent"), there.get(key, "absent")
            if mine != its:
                return f"{key} in config.json is {its!r}, not {mine!r}"
        for name in sorted({*self.tensors, *other.tensors}):
            own, foreign = self.tensors.get(name), other.tensors.get(name)
            if own is None or foreign is None:
                return f"it {'lacks' if foreign is None else 'also has'} the tensor {name}"
            if (own.dtype, own.shape) != (foreign.dtype, foreign.shape):
                return f"{name} is {foreign.dtype} {list(foreign.shape)}, not {own.dtype} {list(own.shape)}"
            if own.sample != foreign.sample:
                return f"{name} has other values"
        raise AssertionError("other identities, but nothing differs")

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it; the order of the tensors is kept."""
        tensors = {name: [t.dtype, list(t.shape), t.sample] for name, t in self.tensors.items()}
        return {"config": dict(self.config), "tensors": tensors}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DirectoryContents:
        """The inverse of ``to_dict``."""
        listed = values["tensors"].items()
        tensors = {name: ListedTensor(dtype, tuple(shape), sample) for name, (dtype, shape, sample) in listed}
        return cls(values["config"], tensors)


def _telling(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in _SAYS_NOTHING}


class ModelFiles:
    """``config.json`` and the weights beside it.

    Raises UserError, on construction, when the directory or ``config.json`` is missing or unreadable (near names are
    given), and on first use of the weights when they are missing, pickled only, truncated or corrupt.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise UserError("model.missing", _no_directory(self.directory))
        self.config: dict[str, Any] = read_json(
            self.directory / "config.json",
            "A Hugging Face model directory holds config.json and *.safetensors.",
        )

    @cached_property
    def names(self) -> Mapping[str, StoredTensor]:
        """Tensor name, as in the files -> which file has it. Reads headers only."""
        index = self.weight_map
        found: dict[str, StoredTensor] = {}
        for file in self.files:
            for name, tensor in read_header(self.directory / file).items():
                if index is None or index.get(name) == file:
                    found[name] = tensor
        missing = sorted(set(index or ()) - set(found))
        if missing:
            raise UserError(
                "model.files_missing",
                f"{self.directory / INDEX}: {len(missing)} of its {len(index or ())} tensors are not in the files that "
                f"it names, e.g. {', '.join(missing[:3])}. They are of different models: download them again.",
            )
        return found

    @cached_property
    def files(self) -> tuple[str, ...]:
        """Names of the safetensors files in use, sorted."""
        return (WEIGHTS,) if self.weight_map is None else tuple(sorted(set(self.weight_map.values())))

    @cached_property
    def weight_map(self) -> dict[str, str] | None:
        """Tensor name -> file name from the index; None when all weights are in the one file ``model.safetensors``."""
        if (self.directory / WEIGHTS).is_file():
            return None
        path = self.directory / INDEX
        if not path.is_file():
            raise UserError("model.no_weights", self._no_weights())
        weight_map = read_json(path, AGAIN).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UserError("model.index", f"{path}: the index has no weight_map (tensor name -> file name). {AGAIN}")
        for name, file in weight_map.items():
            if not isinstance(file, str) or not _FILE_NAME.fullmatch(file):
                raise UserError(
                    "model.index",
                    f"{path}: {name!r} is said to be in {file!r}, which is not the name of a safetensors file here. {AGAIN}",
                )
        absent = sorted({file for file in weight_map.values() if not (self.directory / file).is_file()})
        if absent:
            raise UserError(
                "model.files_missing",
                f"{self.directory}: {len(absent)} of the {len(set(weight_map.values()))} files in {INDEX} are missing: "
                f"{', '.join(absent)}. Download them into this directory.",
            )
        return weight_map

    def check(self) -> None:
        """Compare index, headers and file lengths with each other; raises UserError at the first contradiction."""
        assert self.names is not None

    def read(self, name: str) -> torch.Tensor:
        """One tensor, in host memory of its own: nothing else of the file is read or kept."""
        return self.read_layer(0, [name])[name]

    def read_layer(self, layer: int, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """The tensors of one layer of the chain (see ``TensorSource`` in weights.py)."""
        return read_tensors({name: self.names[name] for name in names})

    def contents(self) -> DirectoryContents:
        """The contents, known from headers and a few blocks of every tensor."""
        tensors = {}
        for file in dict.fromkeys(one.file for one in self.names.values()):
            with safe_open(file, "pt") as opened:
                for name in (name for name, one in self.names.items() if one.file == file):
                    stored = self.names[name]
                    tensors[name] = ListedTensor(stored.dtype, stored.shape, _sample(opened.get_tensor(name)))
        return DirectoryContents(self.config, tensors)

    def _no_weights(self) -> str:
        if any(self.directory.glob("pytorch_model*.bin*")):
            return (
                f"{self.directory}: the weights are pickled (pytorch_model*.bin); a pickle, which can run any code, is "
                "not read. If you trust it, convert it: AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW)."
            )
        others = sorted(path.name for path in self.directory.glob("*.safetensors"))
        seen = f"only {', '.join(others[:5])}" if others else "no *.safetensors at all"
        return f"{self.directory}: neither {WEIGHTS} nor {INDEX} is here ({seen}). Download the weights into it."


def read_tensors(stored: Mapping[str, StoredTensor]) -> dict[str, torch.Tensor]:
    """Tensors by the same names, in host memory of their own. Each file is opened once.

    Files are read, not mapped: of one that changes meanwhile, a mapping would end the process by a bus error.

    :raises UserError: a file is gone, or no longer what its header said.
    """
    found: dict[str, torch.Tensor] = {}
    for file in dict.fromkeys(one.file for one in stored.values()):
        try:
            with safe_open(file, "pt", backend="pread") as opened:
                found |= {name: opened.get_tensor(one.name) for name, one in stored.items() if one.file == file}
        except (OSError, SafetensorError) as error:
            raise UserError("model.unreadable", f"{file}: cannot be read any more ({error}). {AGAIN}") from None
    return {name: found[name] for name in stored}


def have_same_numbers(one: StoredTensor, other: StoredTensor) -> bool:
    """Compare tensors of files, in pieces up to the first that differs."""
    import torch

    if one.shape != other.shape:
        return False
    with safe_open(one.file, "pt") as first, safe_open(other.file, "pt") as second:
        tensors = (opened.get_tensor(stored.name).view(-1) for opened, stored in ((first, one), (second, other)))
        return all(
            torch.equal(left, right.to(left.dtype)) and torch.equal(left.to(right.dtype), right)
            for left, right in zip(*(tensor.split(_PIECE) for tensor in tensors), strict=True)
        )


def _sample(tensor: torch.Tensor) -> str:
    """A hash of two blocks of the bytes of a mapped tensor."""
    import torch

    digest = hashlib.blake2b(digest_size=8)
    flat = tensor.view(-1).view(torch.uint8)
    size = min(len(flat), _SAMPLE_BYTES)
    for start in ((len(flat) - size) // 2, len(flat) - size):
        digest.update(flat[start : start + size].numpy().tobytes())
    return digest.hexdigest()


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    require_regular(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        beside = os.listdir(path.parent) if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, beside, n=3)
        raise UserError("model.file_missing", f"{path} does not exist{_or_near(near)}. {remedy}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError("model.json", f"{path} cannot be read as JSON ({error}). {AGAIN}") from None
    if not isinstance(content, dict):
        raise UserError(
            "model.json", f"{path} holds {type(content).__name__}, not an object of keys and values. {AGAIN}"
        )
    return content


def _no_directory(directory: Path) -> str:
    if directory.exists():
        return f"{directory} is a file; a model is a directory with config.json and *.safetensors. Name the directory."
    parent = directory.parent
    siblings = [entry.name for entry in parent.iterdir() if entry.is_dir()] if parent.is_dir() else []
    near = [str(parent / name) for name in difflib.get_close_matches(directory.name, siblings, n=3)]
    return (
        f"The model directory {directory} (looked for as {directory.absolute()}) does not exist{_or_near(near)}. "
        "Nothing is downloaded: give a local directory with config.json and *.safetensors."
    )


def _or_near(near: list[str]) -> str:
    return f"; near it: {', '.join(near)}" if near else ""


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, in the order in which they lie there.

    :raises UserError: it is another file, or its header contradicts itself or the file's length.
    """
    require_regular(path)
    try:
        with safe_open(path, "numpy") as file:  # nothing but the header is looked at
            slices = {name: file.get_slice(name) for name in file.offset_keys()}
            listed = {name: (one.get_dtype(), tuple(one.get_shape())) for name, one in slices.items()}
    except SafetensorError as error:
        size, said = path.stat().st_size, str(error).removeprefix("Error while deserializing header: ")
        raise UserError(
            "model.damaged", f"{path}: truncated, damaged, or no safetensors file ({said}; {size} bytes). {AGAIN}"
        ) from None
    if strange := sorted({dtype for dtype, _ in listed.values()} - _DTYPES.keys()):
        raise UserError(
            "model.dtype",
            f"{path}: tensors of dtype {', '.join(strange)} are not read here. Take another copy of the model.",
        )
    return {name: StoredTensor(path, name, _DTYPES[dtype][0], shape) for name, (dtype, shape) in listed.items()}


def header_of(tensors: Mapping[str, tuple[str, Iterable[int]]]) -> tuple[bytes, dict[str, int]]:
    """How a safetensors file with such tensors (torch's name of the dtype, shape) begins, and where in it each of them does, in
    the order in which they lie there: so that each is aligned."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    places, end = {}, 0
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda one: -_ITEM_BYTES[one[1][0]]):
        places[name], end = end, end + math.prod(shape) * _ITEM_BYTES[dtype]
        header[name] = {"dtype": _STORED[dtype], "shape": list(shape), "data_offsets": [places[name], end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, {name: 8 + len(text) + place for name, place in places.items()}


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Make a safetensors file of host tensors, without a second copy of any. Raises OSError."""
    from safetensors.torch import save_file

    path.touch()
    mode = path.stat().st_mode  # by the umask; ``save_file`` puts a file in its place that only its owner may read
    try:
        save_file({name: one.detach().contiguous() for name, one in tensors.items()}, path, {"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from None
    path.chmod(mode)
