"""The shard cache: what a rank without the model directory has received, kept on its own disk for the next start.

    PATH/3f9a.../layer-00004.safetensors      the tensors of layer 4, as they came
    PATH/3f9a.../layer-00004.json             its manifest: sha256 of that file, identity of the model

The sub-directory's name begins the model's identity (``Contents.identity``). An entry is used only if all of its bytes
give the manifest's hash and its tensors are those wanted; else it is removed, with a remark, and the tensors are received
again. Files appear under their names only when they are whole, the manifest last, so ranks may share a directory and a
run may be ended at any time. Nothing is ever removed for being old: a person may delete anything here.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hetero_mpi.disk import SPARE_BYTES, atomic_write, free_bytes, write_whole
from hetero_mpi.errors import UserError
from hetero_mpi.model.files.model_files import ListedTensor, StoredTensor, read_header, read_tensor, write_tensors

if TYPE_CHECKING:
    import torch

_CHUNK_BYTES = 1 << 20


class ShardCache:
    """The entries of one model on this rank.

    Attributes:
        remarks: entries that were found not to match, in words.
    """

    def __init__(self, root: Path, identity: str) -> None:
        """:raises UserError: ``root`` cannot be a directory."""
        self.directory = root / identity[:16]
        self.identity = identity
        self.remarks: list[str] = []
        self._found: dict[int, Mapping[str, StoredTensor]] = {}
        with self._usable():
            self.directory.mkdir(parents=True, exist_ok=True)

    def holds(self, layer: int, wanted: Mapping[str, ListedTensor]) -> bool:
        """True: there is a sound entry with exactly these tensors. Reads all of it; what does not match is removed."""
        path, manifest = self._paths(layer)
        if not manifest.exists():  # never written, or its writer was ended in between
            return False
        try:
            problem = self._problem(path, manifest, layer, wanted)
        except (OSError, ValueError, TypeError, KeyError) as error:
            problem = f"it cannot be read: {type(error).__name__} {error}"
        if problem is None:
            return True
        self.remarks.append(f"the shard cache's {path} does not match ({problem}): removed, to be received again")
        with self._usable():
            manifest.unlink(missing_ok=True)
            path.unlink(missing_ok=True)
        return False

    def read(self, layer: int, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """The tensors of an entry that ``holds`` has found sound."""
        found = self._found[layer]
        return {name: read_tensor(name, found[name]) for name in names}

    def prepare(self, coming_bytes: int) -> None:
        """Make sure, before anything is sent, that so much can be kept.

        :raises UserError: the directory is not writable, or the disk too full.
        """
        with self._usable():
            write_whole(self.directory / "trial", b"x")
        (self.directory / "trial").unlink(missing_ok=True)
        free = free_bytes(self.directory)
        if free < coming_bytes + SPARE_BYTES:
            raise UserError(
                f"the shard cache {self.directory} is to keep {coming_bytes:,} bytes, and {free:,} bytes are free there: "
                f"delete what is old in {self.directory.parent}, or set another [model] shard_cache"
            )

    def keep(self, layer: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write an entry.

        :raises UserError: it cannot be written.
        """
        path, manifest = self._paths(layer)
        with self._usable():  # nothing is forced to the disk: what a power loss spoils is found by its hash
            with atomic_write(path) as temporary:
                write_tensors(temporary, tensors)
            described = {
                "sha256": _sha256(path),
                "model": self.identity,
                "layer": layer,
                "bytes": path.stat().st_size,
            }
            write_whole(manifest, json.dumps(described, indent=2) + "\n")

    def _problem(self, path: Path, manifest: Path, layer: int, wanted: Mapping[str, ListedTensor]) -> str | None:
        described = json.loads(manifest.read_bytes())
        if (described["model"], described["layer"]) != (self.identity, layer):
            return "its manifest is of another model or layer"
        if not path.exists():
            return "the file is gone"
        size = path.stat().st_size
        if size != described["bytes"]:
            return f"{size} bytes, and its manifest says {described['bytes']}"
        if _sha256(path) != described["sha256"]:
            return "its bytes do not give the manifest's sha256"
        found = read_header(path)
        if {n: (t.dtype, t.shape) for n, t in found.items()} != {n: (t.dtype, t.shape) for n, t in wanted.items()}:
            return "it holds other tensors than are needed now"
        self._found[layer] = found
        return None

    def _paths(self, layer: int) -> tuple[Path, Path]:
        stem = self.directory / f"layer-{layer:05d}"
        return stem.with_suffix(".safetensors"), stem.with_suffix(".json")

    @contextlib.contextmanager
    def _usable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"[model] shard_cache must be a directory that this rank can write to; {self.directory.parent} cannot be used: "
                f"{error}. Choose another, or leave it empty to keep nothing."
            ) from None


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
