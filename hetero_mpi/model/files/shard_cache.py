"""The shard cache: what a rank without the model directory has received, kept on its own disk for the next start.

    PATH/3f9a.../layer-00004/tensors.safetensors      the tensors of layer 4, as they came

The sub-directory's name begins the model's identity (``Contents.identity``). Each layer is a sealed folder (``sealed.py``). It is
used only if it is whole, of this model, and has the tensors that are wanted; else it is removed, with a remark, and the tensors
are received again. Ranks may share a directory, and a run may be ended at any time. Nothing is ever removed for being old: a person
may delete anything here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero_mpi.model.files.model_files import ListedTensor, StoredTensor, read_header, read_tensors, write_tensors
from hetero_mpi.util.disk import SPARE_BYTES, free_bytes, write_whole, writing
from hetero_mpi.util.errors import UserError
from hetero_mpi.util.sealed import opened, store

if TYPE_CHECKING:
    import torch

_NAME = "tensors.safetensors"
_REMEDY = "choose another [model] shard_cache, or leave it empty to keep nothing"


class ShardCache:
    """The entries of one model on this rank.

    Attributes:
        remarks: entries that were damaged, in words.
    """

    def __init__(self, root: Path, identity: str) -> None:
        """:raises UserError: ``root`` cannot be a directory."""
        self.directory = root / identity[:16]
        self.identity = identity
        self.remarks: list[str] = []
        self._headers: dict[int, Mapping[str, StoredTensor]] = {}
        with writing(self.directory, _REMEDY):
            self.directory.mkdir(parents=True, exist_ok=True)

    def holds(self, layer: int, wanted: Mapping[str, ListedTensor]) -> bool:
        """True: there is a sound entry with exactly these tensors. Reads all of it; what does not match is removed."""

        def read(place: Path, origin: Any) -> Mapping[str, StoredTensor]:
            header = read_header(place / _NAME)
            if origin != [self.identity, layer]:
                raise ValueError("it is of another model or layer")
            if {n: (t.dtype, t.shape) for n, t in header.items()} != {n: (t.dtype, t.shape) for n, t in wanted.items()}:
                raise ValueError("it holds other tensors than are needed now")
            return header

        header = opened(self._place(layer), read, self.remarks.append)
        if header is not None:
            self._headers[layer] = header
        return header is not None

    def read(self, layer: int, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """The tensors of an entry that ``holds`` has found sound."""
        return read_tensors({name: self._headers[layer][name] for name in names})

    def prepare(self, coming_bytes: int) -> None:
        """Make sure, before anything is sent, that so much can be kept.

        :raises UserError: the directory is not writable, or the disk too full.
        """
        with writing(self.directory, _REMEDY):
            write_whole(self.directory / "trial", b"x")
        (self.directory / "trial").unlink(missing_ok=True)
        free = free_bytes(self.directory)
        if free < coming_bytes + SPARE_BYTES:
            raise UserError(
                "shard_cache.full",
                f"the shard cache {self.directory} is to keep {coming_bytes:,} bytes, and {free:,} bytes are free there: "
                f"delete what is old in {self.directory.parent}, or set another [model] shard_cache",
            )

    def keep(self, layer: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write an entry.

        :raises UserError: it cannot be written.
        """

        def fill(folder: Path) -> list[Any]:
            with writing(self.directory, _REMEDY):
                write_tensors(folder / _NAME, tensors)
            return [self.identity, layer]

        # Nothing is forced to the disk: what a power loss damages is found by its seal.
        store(self._place(layer), fill, _REMEDY, durable=False)

    def _place(self, layer: int) -> Path:
        return self.directory / f"layer-{layer:05d}"
