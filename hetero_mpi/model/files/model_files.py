"""A Hugging Face model directory: what is in it is known from headers alone; tensors are read one at a time.

Only safetensors files are read, never a pickle, by safetensors' own reader, which maps them: a tensor takes memory when it is read.
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
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hetero_mpi.disk import require_regular
from hetero_mpi.errors import UserError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
GENERATION = "generation_config.json"
AGAIN = "Download it again."

_FILE_NAME = re.compile(r"[\w.+= -]{1,200}\.safetensors")
_SAMPLE_BYTES = 4096
_SAYS_NOTHING = ("transformers_version", "_name_or_path")
"""Keys of a config.json that differ between copies of one model."""
_DTYPES = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
}
"""Those that are read."""


@dataclass(frozen=True)
class ListedTensor:
    """A tensor as ``DirectoryContents`` lists it; ``sample`` is a hash of some of its bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    sample: str

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def kind(self) -> str:
        """``bfloat16 [5]``."""
        return f"{dtype_name(self.dtype)} {list(self.shape)}"


@dataclass(frozen=True)
class DirectoryContents:
    """What a model directory holds, without its tensors: so little that it can be sent, enough to tell two models apart.

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
            if own.kind != foreign.kind:
                return f"{name} is {foreign.kind}, not {own.kind}"
            if own.sample != foreign.sample:
                return f"{name} has other values"
        raise AssertionError("other identities, but nothing differs")

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it; the order of the tensors is kept."""
        tensors = {name: [dtype_name(t.dtype), list(t.shape), t.sample] for name, t in self.tensors.items()}
        return {"config": dict(self.config), "tensors": tensors}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DirectoryContents:
        """The inverse of ``to_dict``."""
        listed = values["tensors"].items()
        tensors = {
            name: ListedTensor(getattr(torch, dtype), tuple(shape), sample) for name, (dtype, shape, sample) in listed
        }
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
            raise UserError(_no_directory(self.directory))
        self.config: dict[str, Any] = read_json(
            self.directory / "config.json",
            "A Hugging Face model directory holds config.json and *.safetensors.",
        )

    @cached_property
    def names(self) -> Mapping[str, torch.Tensor]:
        """Tensor name, as in the files -> the tensor, mapped (``read_tensors``)."""
        index = self.weight_map
        found: dict[str, torch.Tensor] = {}
        for file in self.files:
            for name, tensor in read_tensors(self.directory / file).items():
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
        weight_map = read_json(path, AGAIN).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UserError(f"{path}: the index has no weight_map (tensor name -> file name). {AGAIN}")
        for name, file in weight_map.items():
            if not isinstance(file, str) or not _FILE_NAME.fullmatch(file):
                raise UserError(
                    f"{path}: {name!r} is said to be in {file!r}, which is not the name of a safetensors file here. {AGAIN}"
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
        return self.names[name].clone()

    def read_layer(self, layer: int, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """The tensors of one layer of the chain (see ``TensorSource`` in weights.py)."""
        return {name: self.read(name) for name in names}

    def contents(self) -> DirectoryContents:
        """What is here, known from headers and a few blocks of every tensor."""
        listed = {name: ListedTensor(one.dtype, tuple(one.shape), _sample(one)) for name, one in self.names.items()}
        return DirectoryContents(self.config, listed)

    def _no_weights(self) -> str:
        if any(self.directory.glob("pytorch_model*.bin*")):
            return (
                f"{self.directory}: the weights are pickled (pytorch_model*.bin); a pickle, which can run any code, is "
                "not read. If you trust it, convert it: AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW)."
            )
        others = sorted(path.name for path in self.directory.glob("*.safetensors"))
        seen = f"only {', '.join(others[:5])}" if others else "no *.safetensors at all"
        return f"{self.directory}: neither {WEIGHTS} nor {INDEX} is here ({seen}). Download the weights into it."


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of somebody's safetensors file, as ``map_tensors``.

    :raises UserError: besides, a tensor has a dtype that is not read here.
    """
    tensors = map_tensors(path)
    odd = next((name for name, tensor in tensors.items() if tensor.dtype not in _DTYPES), None)
    if odd is not None:
        known = ", ".join(sorted(map(dtype_name, _DTYPES)))
        raise UserError(f"{path}: {odd} is {dtype_name(tensors[odd].dtype)}; read are {known}")
    return tensors


def map_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, mapped: only its header is read. Whoever keeps one for long clones it. A file that shrinks
    while it is mapped ends the process.

    :raises UserError: it is damaged.
    :raises OSError: it is not there.
    """
    require_regular(path)
    try:
        file: Any = safe_open(path, "pt")
        names = file.keys()
        return {name: file.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise UserError(
            f"{path}: truncated, too long or not a safetensors file: {path.stat().st_size} bytes are here ({error}). {AGAIN}"
        ) from None


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Make a safetensors file of host tensors. Raises OSError."""
    path.touch()
    mode = path.stat().st_mode  # safetensors' own files can be read by nobody but their owner
    try:
        save_file({name: one.detach().contiguous() for name, one in tensors.items()}, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from error
    path.chmod(mode)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _sample(tensor: torch.Tensor) -> str:
    content = tensor.reshape(-1).view(torch.uint8)
    size = min(len(content), _SAMPLE_BYTES)
    digest = hashlib.blake2b(digest_size=8)
    for start in ((len(content) - size) // 2, len(content) - size):
        digest.update(content[start : start + size].numpy())
    return digest.hexdigest()


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    require_regular(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        beside = os.listdir(path.parent) if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, beside, n=3)
        raise UserError(f"{path} does not exist{_or_near(near)}. {remedy}") from None
    except (OSError, ValueError, RecursionError) as error:
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
