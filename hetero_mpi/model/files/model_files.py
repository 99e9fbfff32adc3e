"""Read Hugging Face model directories: a directory's contents from headers alone, tensors one at a time.

Only safetensors files are read, never pickles. Importing this module and reading headers does not require torch.
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
_IGNORED_KEYS = ("transformers_version", "_name_or_path")
"""Keys of config.json that differ between copies of the same model."""
_DTYPES = {
    "F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2), "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1), "I64": ("int64", 8), "I32": ("int32", 4), "I16": ("int16", 2), "I8": ("int8", 1),
    "U8": ("uint8", 1), "BOOL": ("bool", 1),
}  # fmt: skip
"""Maps each safetensors dtype to torch's name for it and its bytes per element."""
_ITEM_BYTES = dict(_DTYPES.values()) | {"complex64": 8}
_STORED = {name: stored for stored, (name, _) in _DTYPES.items()} | {"complex64": "C64"}
"""Maps torch's dtype names to those of safetensors. complex64 is only written, for buffers of custom layers."""


@dataclass(frozen=True)
class StoredTensor:
    """The tensor ``name`` in ``file``. ``dtype`` is torch's name, such as ``bfloat16``."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class ListedTensor:
    """An entry of ``DirectoryContents``; ``sample`` is a hash of some of the tensor's bytes."""

    dtype: str
    shape: tuple[int, ...]
    sample: str

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class DirectoryContents:
    """Description of a model directory that is small enough to send and sufficient to distinguish two models.

    File sizes and times do not identify a model: another fine-tuned model has the same sizes, and a copy may be sharded
    differently. Hashing all bytes would read the whole model at each start. Each tensor is therefore identified by its name, dtype,
    shape and a hash of two of its blocks, one in the middle and one at the end.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, ListedTensor]

    @cached_property
    def identity(self) -> str:
        """The hexadecimal SHA-256 hash of the description."""
        canonical = {"config": _telling(self.config), "tensors": self.to_dict()["tensors"]}
        return hashlib.sha256(json.dumps(canonical, sort_keys=True).encode()).hexdigest()

    def difference(self, second: DirectoryContents) -> str | None:
        """Describe the first way in which ``second`` differs; return None if both describe the same model."""
        if self.identity == second.identity:
            return None
        keys, second_keys = _telling(self.config), _telling(second.config)
        for key in sorted({*keys, *second_keys}):
            value, second_value = keys.get(key, "absent"), second_keys.get(key, "absent")
            if value != second_value:
                return f"{key} in config.json is {second_value!r}, not {value!r}"
        for name in sorted({*self.tensors, *second.tensors}):
            tensor, second_tensor = self.tensors.get(name), second.tensors.get(name)
            if tensor is None or second_tensor is None:
                return f"it {'lacks' if second_tensor is None else 'also has'} the tensor {name}"
            if (tensor.dtype, tensor.shape) != (second_tensor.dtype, second_tensor.shape):
                return f"{name} is {second_tensor.dtype} {list(second_tensor.shape)}, not {tensor.dtype} {list(tensor.shape)}"
            if tensor.sample != second_tensor.sample:
                return f"{name} has different values"
        raise AssertionError("other identities, but nothing differs")

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON values, in the order of the tensors."""
        tensors = {name: [t.dtype, list(t.shape), t.sample] for name, t in self.tensors.items()}
        return {"config": dict(self.config), "tensors": tensors}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DirectoryContents:
        listed = values["tensors"].items()
        tensors = {name: ListedTensor(dtype, tuple(shape), sample) for name, (dtype, shape, sample) in listed}
        return cls(values["config"], tensors)


def _telling(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in _IGNORED_KEYS}


class ModelFiles:
    """``config.json`` and the weights of a model directory.

    Raises:
        UserError: On construction if the directory or ``config.json`` is missing or unreadable; on first use of the weights if they
            are missing, pickled, truncated or corrupt.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise UserError("model.missing", _no_directory(self.directory))
        self.config: dict[str, Any] = read_json(
            self.directory / "config.json", "A Hugging Face model directory holds config.json and *.safetensors."
        )

    @cached_property
    def names(self) -> Mapping[str, StoredTensor]:
        """Maps each tensor name in the files to its stored tensor; reads headers only."""
        index = self.weight_map
        stored_tensors: dict[str, StoredTensor] = {}
        for file in self.files:
            for name, tensor in read_header(self.directory / file).items():
                if index is None or index.get(name) == file:
                    stored_tensors[name] = tensor
        missing = sorted(set(index or ()) - set(stored_tensors))
        if missing:
            raise UserError(
                "model.files_missing",
                f"{self.directory / INDEX}: {len(missing)} of its {len(index or ())} tensors are missing in its files, e.g. "
                f"{', '.join(missing[:3])}. Index and files belong to different models: download them again.",
            )
        return stored_tensors

    @cached_property
    def files(self) -> tuple[str, ...]:
        """Sorted names of the safetensors files in use."""
        return (WEIGHTS,) if self.weight_map is None else tuple(sorted(set(self.weight_map.values())))

    @cached_property
    def weight_map(self) -> dict[str, str] | None:
        """Maps tensor names to file names, as in the index; None if ``model.safetensors`` holds all weights."""
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
                    f"{path}: {file!r}, listed for {name!r}, must name a safetensors file in this directory. {AGAIN}",
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
        """Check that index, headers and file lengths are consistent; raise UserError at the first contradiction."""
        assert self.names is not None

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor, and nothing else of its file, into newly allocated host memory."""
        return self.read_layer(0, [name])[name]

    def read_layer(self, layer: int, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Read the tensors of one layer of the chain (see ``TensorSource`` in weights.py)."""
        return read_tensors({name: self.names[name] for name in names})

    def contents(self) -> DirectoryContents:
        """Describe the directory, reading only headers and two blocks of every tensor."""
        tensors = {}
        for file in dict.fromkeys(tensor.file for tensor in self.names.values()):
            with safe_open(file, "pt") as opened:
                for name in (name for name, tensor in self.names.items() if tensor.file == file):
                    stored = self.names[name]
                    tensors[name] = ListedTensor(stored.dtype, stored.shape, _sample(opened.get_tensor(name)))
        return DirectoryContents(self.config, tensors)

    def _no_weights(self) -> str:
        if any(self.directory.glob("pytorch_model*.bin*")):
            return (
                f"{self.directory}: the weights are pickled (pytorch_model*.bin), and loading a pickle can run arbitrary code. If "
                f"you trust it, convert it: AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW)."
            )
        safetensors = sorted(path.name for path in self.directory.glob("*.safetensors"))
        files_text = f"only {', '.join(safetensors[:5])}" if safetensors else "no *.safetensors at all"
        return f"{self.directory}: contains neither {WEIGHTS} nor {INDEX} ({files_text}). Download the weights into it."


def read_tensors(stored: Mapping[str, StoredTensor]) -> dict[str, torch.Tensor]:
    """Read tensors into newly allocated host memory, keyed by the given names; each file is opened once.

    Files are not memory-mapped, because a file that is modified meanwhile would kill the process with a bus error.

    Raises:
        UserError: A file is missing or no longer matches its header.
    """
    tensors: dict[str, torch.Tensor] = {}
    for file in dict.fromkeys(tensor.file for tensor in stored.values()):
        try:
            with safe_open(file, "pt", backend="pread") as opened:
                tensors |= {
                    name: opened.get_tensor(tensor.name) for name, tensor in stored.items() if tensor.file == file
                }
        except (OSError, SafetensorError) as error:
            raise UserError("model.unreadable", f"{file}: can no longer be read ({error}). {AGAIN}") from None
    return {name: tensors[name] for name in stored}


def have_same_numbers(a: StoredTensor, b: StoredTensor) -> bool:
    """Return whether two stored tensors have equal values, comparing them piece by piece up to the first difference."""
    import torch

    if a.shape != b.shape:
        return False
    with safe_open(a.file, "pt") as first, safe_open(b.file, "pt") as second:
        tensors = (opened.get_tensor(stored.name).view(-1) for opened, stored in ((first, a), (second, b)))
        return all(
            torch.equal(x, y.to(x.dtype)) and torch.equal(x.to(y.dtype), y)
            for x, y in zip(*(tensor.split(_PIECE) for tensor in tensors), strict=True)
        )


def _sample(tensor: torch.Tensor) -> str:
    """Hash two blocks of the bytes of a memory-mapped tensor."""
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
        siblings = os.listdir(path.parent) if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, siblings, n=3)
        raise UserError("model.file_missing", f"{path} does not exist{_or_near(near)}. {remedy}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError("model.json", f"{path} cannot be read as JSON ({error}). {AGAIN}") from None
    if not isinstance(content, dict):
        raise UserError("model.json", f"{path} contains a {type(content).__name__}, not a JSON object. {AGAIN}")
    return content


def _no_directory(directory: Path) -> str:
    if directory.exists():
        return f"{directory} is a file; a model is a directory with config.json and *.safetensors. Pass the directory."
    parent = directory.parent
    siblings = [entry.name for entry in parent.iterdir() if entry.is_dir()] if parent.is_dir() else []
    near = [str(parent / name) for name in difflib.get_close_matches(directory.name, siblings, n=3)]
    # A path that was meant from the working directory, not from the job file.
    tails = (Path(*directory.parts[n:]) for n in range(len(directory.parts)))
    near += [str(tail.resolve()) for tail in tails if tail.is_dir()][:1]
    absolute_text = "" if directory.is_absolute() else f" (looked for as {directory.absolute()})"
    is_result = directory.name == "model" and parent.parent.name == "runs"
    first = f"Train jobs/{parent.name}.toml first, if its result is meant. " if is_result else ""
    return (
        f"The model directory {directory}{absolute_text} does not exist{_or_near(near)}. {first}"
        "Nothing is downloaded: pass a local directory with config.json and *.safetensors."
    )


def _or_near(near: list[str]) -> str:
    return f"; similar names: {', '.join(near)}" if near else ""


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file, in file order.

    Raises:
        UserError: The file is not a safetensors file, or its header is inconsistent with itself or the file's length.
    """
    require_regular(path)
    try:
        with safe_open(path, "numpy") as file:  # reads the header only
            slices = {name: file.get_slice(name) for name in file.offset_keys()}
            listed = {
                name: (slice_of_tensor.get_dtype(), tuple(slice_of_tensor.get_shape()))
                for name, slice_of_tensor in slices.items()
            }
    except SafetensorError as error:
        size, reason = path.stat().st_size, str(error).removeprefix("Error while deserializing header: ")
        raise UserError(
            "model.damaged",
            f"{path}: truncated, damaged, or not a safetensors file ({reason}; {size:,} bytes). {AGAIN}",
        ) from None
    if strange := sorted({dtype for dtype, _ in listed.values()} - _DTYPES.keys()):
        raise UserError(
            "model.dtype",
            f"{path}: tensors of dtype {', '.join(strange)} are not supported. Use another copy of the model.",
        )
    return {name: StoredTensor(path, name, _DTYPES[dtype][0], shape) for name, (dtype, shape) in listed.items()}


def header_of(tensors: Mapping[str, tuple[str, Iterable[int]]]) -> tuple[bytes, dict[str, int]]:
    """Return (safetensors header, offset of each tensor) for the given dtypes and shapes, ordered to align all tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets, end = {}, 0
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda entry: -_ITEM_BYTES[entry[1][0]]):
        offsets[name], end = end, end + math.prod(shape) * _ITEM_BYTES[dtype]
        header[name] = {"dtype": _STORED[dtype], "shape": list(shape), "data_offsets": [offsets[name], end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, {name: 8 + len(text) + offset for name, offset in offsets.items()}


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write host tensors to a safetensors file without copying them. Raises OSError."""
    from safetensors.torch import save_file

    path.touch()
    mode = path.stat().st_mode  # of the umask; ``save_file`` replaces the file by one that only its owner may read
    try:
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path, {"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from None
    path.chmod(mode)
