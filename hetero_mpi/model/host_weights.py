"""Weights of a streamed stage, layer by layer: they are kept in host memory, the device holds few layers at a time.

A layer's tensors lie in one block of bytes, so that one copy brings them to the device. On a rank that computes in host memory
(a CPU) nothing is copied: the block is a file of the rank's own, mapped into memory, and the system keeps of it what there is
room for. (Where all weights are trained, such a rank has no blocks.)
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hetero_mpi.device.backend import HOST, Backend, Copied
from hetero_mpi.disk import SPARE_BYTES, free_bytes
from hetero_mpi.errors import UserError
from hetero_mpi.model.layer.quantize import is_empty
from hetero_mpi.planning.types.cost import STREAMED_LAYERS

_ALIGNMENT = 256
"""Bytes: tensors start where every kernel reads well."""


@dataclass(frozen=True)
class _Place:
    """Where a tensor belongs, and where it lies in its layer's block."""

    holder: Any
    attribute: str
    begin: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.begin + self.dtype.itemsize * int(torch.Size(self.shape).numel())

    def attach(self, block: torch.Tensor) -> None:
        """From now on the holder's tensor is the one in ``block``."""
        setattr(self.holder, self.attribute, block[self.begin : self.end].view(self.dtype).view(self.shape))


def large_files_folder() -> Path:
    """Where large temporary files belong: ``TMPDIR``, or /var/tmp. (/tmp is often in memory.)"""
    large = Path("/var/tmp")
    return large if "TMPDIR" not in os.environ and large.is_dir() else Path(tempfile.gettempdir())


_InLayer = tuple[int, torch.dtype, int, torch.Size, tuple[int, ...]]
"""A tensor in a layer's block: the layer, dtype, offset in numbers, shape, strides."""


class HostLayer:
    """The tensors of one layer in a block of host memory, to which its modules refer as long as it is not on the device."""

    def __init__(
        self, modules: Iterable[nn.Module], backend: Backend, folder: Path | None, frozen: bool = False
    ) -> None:
        """Move the modules' tensors to host memory.

        ``folder``: where to put the mapped file on a rank that computes in host memory; None: ordinary memory. ``frozen``: those
        that are not trained.

        :raises UserError: the folder cannot be written to, or its disk is too full.
        """
        self.places: list[_Place] = []
        self.bytes = 0
        for holder, attribute in _tensors(modules, frozen):
            tensor = getattr(holder, attribute)
            self.places.append(_Place(holder, attribute, self.bytes, tensor.dtype, tuple(tensor.shape)))
            self.bytes = -(-self.places[-1].end // _ALIGNMENT) * _ALIGNMENT
        self._file: mmap.mmap | None = None
        self.block = self._mapped(folder) if folder is not None and self.bytes else self._copied(backend)
        self.attach(self.block)

    def attach(self, block: torch.Tensor) -> None:
        """The modules' tensors are those in ``block`` from now on."""
        for place in self.places:
            place.attach(block)

    def prefetch(self) -> None:
        """Have the system read the mapped file, since the layer is needed soon."""
        if self._file is not None and hasattr(mmap, "MADV_WILLNEED"):
            self._file.madvise(mmap.MADV_WILLNEED)

    def _copied(self, backend: Backend) -> torch.Tensor:
        block = backend.host_buffer((self.bytes,), torch.uint8)
        for place in self.places:
            block[place.begin : place.end].copy_(_bytes_of(getattr(place.holder, place.attribute)))
        return block

    def _mapped(self, folder: Path) -> torch.Tensor:
        """A file that has no name any more: nobody else can change it, and it goes with the process."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if free_bytes(folder) < self.bytes + SPARE_BYTES:
                raise UserError(
                    f"{folder}: a streamed layer is to be kept there, {self.bytes:,} bytes, and {free_bytes(folder):,} bytes are "
                    f"free: make room, or set another [model] shard_cache"
                )
            with tempfile.TemporaryFile(dir=folder) as file:
                for place in self.places:
                    file.seek(place.begin)
                    file.write(_bytes_of(getattr(place.holder, place.attribute).to(HOST)).numpy())
                file.truncate(self.bytes)
                file.flush()
                # Written through, since only clean pages can be dropped when memory is short.
                os.fsync(file.fileno())
                self._file = mmap.mmap(file.fileno(), self.bytes, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise UserError(
                f"{folder}: streamed layers cannot be kept there ({error.strerror}): choose another [model] shard_cache"
            ) from error
        return torch.frombuffer(self._file, dtype=torch.uint8)


class HostWeights:
    """The layers of a streamed stage; ``layers``: number of the layer -> its block in host memory."""

    def __init__(self, layers: Mapping[int, HostLayer], backend: Backend) -> None:
        self.layers = layers
        self._copying = backend.copying() if backend.device != HOST and layers else None
        self._slots: list[torch.Tensor] = []
        self._in_slot: list[int | None] = [None] * STREAMED_LAYERS
        self._coming: dict[int, Copied] = {}
        self._copied = [Copied()] * STREAMED_LAYERS
        """The last copy of every slot."""
        self._computing: int | None = None
        if self._copying is not None:
            largest = max(layer.bytes for layer in layers.values())
            self._slots = [
                torch.empty(largest, dtype=torch.uint8, device=backend.device) for _ in range(STREAMED_LAYERS)
            ]

    @property
    def bytes(self) -> int:
        """Host memory, or mapped files, of all layers together."""
        return sum(layer.bytes for layer in self.layers.values())

    def need(self, layer: int) -> None:
        """Computing from now on finds the layer's weights on the device."""
        if self._copying is None or layer not in self.layers or layer == self._computing:
            return
        if layer not in self._in_slot:
            self._begin_copy(layer, keeping=None)
        if layer in self._coming:
            self._coming.pop(layer).hold_compute()
        self.layers[layer].attach(self._slots[self._in_slot.index(layer)])
        self._computing = layer

    def prefetch(self, layer: int, keeping: int) -> None:
        """The layer is needed after ``keeping``, which computes now."""
        if layer not in self.layers:
            return
        if self._copying is None:
            self.layers[layer].prefetch()
        elif layer not in self._in_slot:
            self._begin_copy(layer, keeping)

    @contextlib.contextmanager
    def referred_to(self) -> Iterator[None]:
        """A graph that is made meanwhile refers to a layer's weights by their place in the layer: until its backward, other layers'
        lie where they are now."""
        if self._copying is None:
            yield
            return
        with torch.autograd.graph.saved_tensors_hooks(self._place_of, self._found_at):
            yield

    def _place_of(self, tensor: torch.Tensor) -> torch.Tensor | _InLayer:
        slot = None if self._computing is None else self._slots[self._in_slot.index(self._computing)]
        if slot is None or tensor.untyped_storage().data_ptr() != slot.untyped_storage().data_ptr():
            return tensor
        assert self._computing is not None
        return self._computing, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()

    def _found_at(self, place: torch.Tensor | _InLayer) -> torch.Tensor:
        if isinstance(place, torch.Tensor):
            return place
        layer, dtype, *where = place
        slot = self._slots[self._in_slot.index(layer)]
        return torch.empty(0, dtype=dtype, device=slot.device).set_(slot.untyped_storage(), *where)  # type: ignore[arg-type]

    def release(self) -> None:
        """No layer is on the device any more: blocks may be written to."""
        for layer, copied in zip(self._in_slot, self._copied, strict=True):
            if layer is not None:
                self.layers[layer].attach(self.layers[layer].block)
                copied.wait()
        self._in_slot, self._coming, self._computing = [None] * STREAMED_LAYERS, {}, None

    def _begin_copy(self, layer: int, keeping: int | None) -> None:
        assert self._copying is not None
        slot = next(place for place, held in enumerate(self._in_slot) if held is None or held != keeping)
        before = self._in_slot[slot]
        if before is not None:
            self._coming.pop(before, None)
            self.layers[before].attach(self.layers[before].block)
        host = self.layers[layer]
        self._in_slot[slot] = layer
        self._copying.after_compute()  # the slot's former layer has been computed with until now
        self._copied[slot] = self._coming[layer] = self._copying.copy(self._slots[slot][: host.bytes], host.block)


def _tensors(modules: Iterable[nn.Module], frozen: bool) -> list[tuple[Any, str]]:
    """(holder, attribute) of every parameter, or of the frozen ones; of packed weights also of the scales."""
    found: list[tuple[Any, str]] = []
    every = dict.fromkeys(p for root in modules for p in root.parameters() if not is_empty(p))
    for parameter in (one for one in every if not (frozen and one.requires_grad)):
        found.append((parameter, "data"))
        packing = getattr(parameter, "quant_state", None)
        if packing is not None:
            found.append((packing, "absmax"))
            if packing.nested:
                found.append((packing.state2, "absmax"))
    return found


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
