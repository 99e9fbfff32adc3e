"""A Hugging Face model directory: what is in it is known from headers alone; tensors are read one at a time.

Only safetensors files are read, never a pickle. Their layout (https://huggingface.co/docs/safetensors): 8 bytes, the
length of the header (little-endian); the header, JSON of name -> dtype, shape, byte range; then the tensors' bytes.
Importing this module, and everything but ``read``, needs no torch.
"""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero_mpi.errors import UserError

if TYPE_CHECKING:
    import torch

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
AGAIN = "Download it again."

_LONGEST_HEADER_BYTES = 100_000_000
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


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: ``bytes`` bytes from ``offset`` in ``file``. ``dtype`` is torch's name (``bfloat16``)."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


class ModelFiles:
    """``config.json`` and the weights beside it.

    Raises UserError, on construction, when the directory or ``config.json`` is missing or unreadable (near names are
    given), and on first use of the weights when they are missing, pickled only, truncated or corrupt.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise UserError(_no_directory(self.directory))
        self.config: dict[str, Any] = _read_json(
            self.directory / "config.json",
            "A Hugging Face model directory holds config.json and *.safetensors.",
        )

    @cached_property
    def names(self) -> Mapping[str, StoredTensor]:
        """Tensor name, as in the files -> where it lies. Reads headers only."""
        index = self.weight_map
        found: dict[str, StoredTensor] = {}
        for file in self.files:
            for name, tensor in _read_header(self.directory / file).items():
                if index is None or index.get(name) == file:
                    found[name] = tensor
        missing = sorted(set(index or ()) - set(found))
        if missing:
            raise UserError(
                f"{self.directory / INDEX}: {len(missing)} of its {len(index or ())} tensors are not in the files that "
                f"it names, e.g. {', '.join(missing[:3])}. They are of different models: download them again."
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
            raise UserError(self._no_weights())
        weight_map = _read_json(path, AGAIN).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UserError(f"{path}: the index has no weight_map (tensor name -> file name). {AGAIN}")
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise UserError(
                    f"{path}: {name} is said to be in {file!r}, which is not the name of a file here. {AGAIN}"
                )
        absent = sorted({file for file in weight_map.values() if not (self.directory / file).is_file()})
        if absent:
            raise UserError(
                f"{self.directory}: {len(absent)} of the {len(set(weight_map.values()))} files in {INDEX} are missing: "
                f"{', '.join(absent)}. Download them into this directory."
            )
        return weight_map

    def check(self) -> None:
        """Compare index, headers and file lengths with each other; raises UserError at the first contradiction."""
        assert self.names is not None

    def read(self, name: str) -> torch.Tensor:
        """One tensor, in host memory of its own: nothing else of the file is read or kept."""
        import torch

        stored = self.names[name]
        tensor = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
        if stored.bytes:
            with open(stored.file, "rb") as file:
                file.seek(stored.offset)
                got = file.readinto(tensor.reshape(-1).view(torch.uint8).numpy())
            if got != stored.bytes:
                raise UserError(f"{stored.file}: ends inside of {name} ({got} of {stored.bytes} bytes). {AGAIN}")
        return tensor

    def _no_weights(self) -> str:
        if any(self.directory.glob("pytorch_model*.bin*")):
            return (
                f"{self.directory}: the weights are pickled (pytorch_model*.bin); a pickle, which can run any code, is "
                "not read. If you trust it, convert it: AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW)."
            )
        others = sorted(path.name for path in self.directory.glob("*.safetensors"))
        seen = f"only {', '.join(others[:5])}" if others else "no *.safetensors at all"
        return f"{self.directory}: neither {WEIGHTS} nor {INDEX} is here ({seen}). Download the weights into it."


def _read_json(path: Path, remedy: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, os.listdir(path.parent), n=3)
        raise UserError(f"{path} does not exist{_or_near(near)}. {remedy}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as JSON ({error}). {AGAIN}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} holds {type(content).__name__}, not an object of keys and values. {AGAIN}")
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


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """Parse a safetensors header and hold the file's length against it."""
    actual = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if actual < 8 or length > _LONGEST_HEADER_BYTES or actual < 8 + length:
            raise UserError(
                f"{path}: truncated or not a safetensors file: {actual} bytes are here, its header alone would take "
                f"{8 + length}. {AGAIN}"
            )
        raw = file.read(length)
    try:
        header: dict[str, Any] = json.loads(raw)
        header.pop("__metadata__", None)
        tensors = {name: _entry(path, 8 + length, entry) for name, entry in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path}: the header is corrupt ({type(error).__name__}: {error}). {AGAIN}") from None
    expected = max((tensor.offset + tensor.bytes for tensor in tensors.values()), default=8 + length)
    if actual != expected:
        raise UserError(
            f"{path}: {'truncated' if actual < expected else 'too long'}: {expected} bytes expected by its "
            f"header, {actual} bytes are here. {AGAIN}"
        )
    return tensors


def _entry(path: Path, data: int, entry: dict[str, Any]) -> StoredTensor:
    if entry["dtype"] not in _DTYPES:
        raise ValueError(f"unknown dtype {entry['dtype']!r}")
    dtype, item_bytes = _DTYPES[entry["dtype"]]
    shape = tuple(int(size) for size in entry["shape"])
    first, last = entry["data_offsets"]
    if first < 0 or min(shape, default=0) < 0 or last - first != math.prod(shape) * item_bytes:
        raise ValueError(f"{entry['dtype']} of shape {list(shape)} in {last - first} bytes")
    return StoredTensor(path, dtype, shape, data + first, last - first)
