"""Weights of a streamed stage, layer by layer: they are kept in host memory, the device holds few layers at a time.

A layer's tensors lie in one block of bytes, so that one copy brings them to the device. Blocks for which there is no memory are
files of the rank's own, mapped into memory, and read ahead for a GPU. On a rank that computes in host memory (a CPU) nothing is
copied: all its blocks are such files, and the system reads them and keeps of them what there is room for. (Where all weights are
trained, such a rank has no blocks.)
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hetero_mpi.device.backend import HOST, Backend, Copied, Copying
from hetero_mpi.model.layer.quantize import is_empty
from hetero_mpi.planning.types.sizes import STREAMED_LAYERS
from hetero_mpi.util.background import Background
from hetero_mpi.util.disk import SPARE_BYTES, free_bytes
from hetero_mpi.util.errors import UserError

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
        self, modules: Iterable[nn.Module], backend: Backend, folder: Path | None, frozen: bool = False, more: int = 0
    ) -> None:
        """Move the modules' tensors to host memory.

        ``folder``: where to put the mapped file; None: ordinary memory. ``frozen``: those that are not trained. ``more``: so many
        files as large are to follow.

        :raises UserError: the folder cannot be written to, or its disk is too full.
        """
        self.places: list[_Place] = []
        self.bytes = 0
        for holder, attribute in _tensors(modules, frozen):
            tensor = getattr(holder, attribute)
            self.places.append(_Place(holder, attribute, self.bytes, tensor.dtype, tuple(tensor.shape)))
            self.bytes = -(-self.places[-1].end // _ALIGNMENT) * _ALIGNMENT
        self._file: mmap.mmap | None = None
        self._descriptor = -1
        self.block = self._mapped(folder, more) if folder is not None and self.bytes else self._copied(backend)
        self.attach(self.block)

    def attach(self, block: torch.Tensor) -> None:
        """The modules' tensors are those in ``block`` from now on."""
        for place in self.places:
            place.attach(block)

    def read(self, to: torch.Tensor) -> None:
        """Fill the beginning of ``to`` from the file. From any thread. Raises OSError."""
        into, at = memoryview(to.numpy())[: self.bytes], 0
        while at < self.bytes:
            count = os.preadv(self._descriptor, [into[at:]], at)
            if count == 0:
                raise OSError(f"a streamed layer's file ends after {at:,} of {self.bytes:,} bytes")
            at += count

    def _copied(self, backend: Backend) -> torch.Tensor:
        block = backend.host_buffer((self.bytes,), torch.uint8)
        for place in self.places:
            block[place.begin : place.end].copy_(_bytes_of(getattr(place.holder, place.attribute)))
        return block

    def _mapped(self, folder: Path, more: int) -> torch.Tensor:
        """A file that has no name any more: nobody else can change it, and it goes with the process."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            needed = (1 + more) * self.bytes
            if free_bytes(folder) < needed + SPARE_BYTES:
                raise UserError(
                    "offload.disk_full",
                    f"{folder}: streamed layers are to be kept there, {needed:,} bytes, and {free_bytes(folder):,} bytes are "
                    f"free: make room, or set another [model] shard_cache",
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
                self._descriptor = os.dup(file.fileno())
                weakref.finalize(self, os.close, self._descriptor)
        except OSError as error:
            raise UserError(
                "offload.unwritable",
                f"{folder}: streamed layers cannot be kept there ({error.strerror}): choose another [model] shard_cache",
            ) from error
        return torch.frombuffer(self._file, dtype=torch.uint8)


_Begun = Callable[[], Copied | None]
"""Waits until a copy has begun, and returns it."""


class ReadAhead:
    """Layers in files on their way to the device. Threads read them into buffers, in the order in which they are needed."""

    def __init__(self, layers: Mapping[int, HostLayer], backend: Backend) -> None:
        self.layers, longest = layers, max(layer.bytes for layer in layers.values())
        self._free: list[tuple[torch.Tensor, _Begun]] = [
            (backend.host_buffer((longest,), torch.uint8), Copied) for _ in range(STREAMED_LAYERS)
        ]
        """Buffers, and the last copy from each."""
        self._read: dict[int, tuple[torch.Tensor, Background[None]]] = {}
        self._last: Background[None] | None = None

    def begin(self, layer: int) -> None:
        """Begin to read a layer, where there is a buffer."""
        if layer not in self.layers or layer in self._read or not self._free:
            return
        (buffer, leaving), source = self._free.pop(0), self.layers[layer]
        # What has been waited for is forgotten: it holds what it waited for itself.
        waits = [leaving, *([self._last.finish] if self._last is not None else ())]

        def read() -> None:
            while waits:  # one layer is read at a time, into a buffer that the one before has left
                if (copied := waits.pop()()) is not None:
                    copied.wait()
            source.read(buffer)

        self._last = Background("reading a layer", read)
        self._read[layer] = buffer, self._last

    def copy(self, layer: int, to: torch.Tensor, copying: Copying) -> _Begun:
        """Copy a layer to the device as soon as it has been read. What is returned raises OSError."""
        if layer not in self._read and not self._free:  # another one was expected
            self._free.append((self._read.popitem()[1][0], Copied))
        self.begin(layer)
        buffer, reading = self._read.pop(layer)

        def begin() -> Copied:
            reading.finish()
            return copying.copy(to, buffer[: len(to)])

        begun = Background("reading a layer", begin).finish
        self._free.append((buffer, begun))
        return begun


class HostWeights:
    """The layers of a streamed stage; ``layers``: number of the layer -> its block in host memory. ``on_disk``: those for which
    there is no memory."""

    def __init__(self, layers: Mapping[int, HostLayer], backend: Backend, on_disk: Collection[int] = ()) -> None:
        self.layers = layers
        self._copying = backend.copying() if backend.device != HOST and layers else None
        self._slots: list[torch.Tensor] = []
        self._in_slot: list[int | None] = [None] * STREAMED_LAYERS
        self._coming: dict[int, _Begun] = {}
        self._copied = [Copied()] * STREAMED_LAYERS
        """The last copy of every slot."""
        self._computing: int | None = None
        if self._copying is not None:
            largest = max(layer.bytes for layer in layers.values())
            self._slots = [
                torch.empty(largest, dtype=torch.uint8, device=backend.device) for _ in range(STREAMED_LAYERS)
            ]
        filed = {layer: layers[layer] for layer in on_disk if self._copying is not None}
        self._reading = ReadAhead(filed, backend) if filed else None

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
            (self._coming.pop(layer)() or Copied()).hold_compute()
        self.layers[layer].attach(self._slots[self._in_slot.index(layer)])
        self._computing = layer

    def prefetch(self, layer: int, keeping: int) -> None:
        """The layer is needed after ``keeping``, which computes now."""
        if layer in self.layers and self._copying is not None and layer not in self._in_slot:
            self._begin_copy(layer, keeping)
        if self._reading is not None:
            order = range(min(self.layers), 1 + max(self.layers))[:: layer - keeping]
            # Most passes go back the way of the one before, and find the last layers on the device.
            for one in (*order[1 + order.index(keeping) :], *order[::-1][STREAMED_LAYERS:]):
                if one not in self._in_slot:
                    self._reading.begin(one)

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
            self._coming.pop(before, Copied)()  # one that was not needed after all
            self.layers[before].attach(self.layers[before].block)
        host = self.layers[layer]
        self._in_slot[slot] = layer
        self._copying.after_compute()  # the slot's former layer has been computed with until now
        to, reading = self._slots[slot][: host.bytes], self._reading
        if reading is not None and layer in reading.layers:
            self._coming[layer] = reading.copy(layer, to, self._copying)
        else:
            copied = self._copied[slot] = self._copying.copy(to, host.block)
            self._coming[layer] = lambda: copied


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
