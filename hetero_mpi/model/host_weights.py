"""Weights of an offloaded stage: stored in host memory by layer, with a few layers at a time on the device.

A layer's tensors form one block of bytes, so that a single copy moves them to the device. Blocks that do not fit in host memory are
memory-mapped temporary files, which a GPU rank reads ahead. A CPU rank copies nothing: all its blocks are mapped files, which the
operating system caches as memory allows. (In full fine-tuning a CPU rank has no blocks.)
"""

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
from hetero_mpi.planning.types.sizes import OFFLOADED_LAYER_COUNT
from hetero_mpi.util.background import Background
from hetero_mpi.util.disk import SPARE_BYTES, free_bytes
from hetero_mpi.util.errors import UserError

_ALIGNMENT_BYTES = 256
"""Alignment of tensors in a block, in bytes; suitable for all kernels."""


@dataclass(frozen=True)
class _TensorSlot:
    """A tensor's holder (object and attribute) and its byte range in the layer's block."""

    holder: Any
    attribute: str
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def end_offset(self) -> int:
        return self.offset + self.dtype.itemsize * int(torch.Size(self.shape).numel())

    def attach(self, block: torch.Tensor) -> None:
        """Point the holder's attribute at the tensor in ``block``."""
        setattr(self.holder, self.attribute, block[self.offset : self.end_offset].view(self.dtype).view(self.shape))


def large_files_folder() -> Path:
    """Return the directory for large temporary files: ``TMPDIR``, or /var/tmp, since /tmp is often in memory."""
    large = Path("/var/tmp")
    return large if "TMPDIR" not in os.environ and large.is_dir() else Path(tempfile.gettempdir())


_TensorInLayer = tuple[int, torch.dtype, int, torch.Size, tuple[int, ...]]
"""A tensor in a layer's block: (layer, dtype, offset in elements, shape, strides)."""


class HostLayer:
    """A layer's tensors in one block of host memory, which its modules use while the layer is not on the device."""

    def __init__(
        self, modules: Iterable[nn.Module], backend: Backend, folder: Path | None, frozen: bool = False, rest: int = 0
    ) -> None:
        """Move the modules' tensors to host memory.

        Args:
            folder: directory for a memory-mapped file; None for ordinary memory.
            frozen: whether to move only frozen tensors.
            rest: number of files of the same size still to be written, for the check of free disk space.

        Raises:
            UserError: The folder is not writable, or its disk is too full.
        """
        self.places: list[_TensorSlot] = []
        self.bytes = 0
        for holder, attribute in _tensors(modules, frozen):
            tensor = getattr(holder, attribute)
            self.places.append(_TensorSlot(holder, attribute, self.bytes, tensor.dtype, tuple(tensor.shape)))
            self.bytes = -(-self.places[-1].end_offset // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self._file: mmap.mmap | None = None
        self._descriptor = -1
        self.block = self._mapped(folder, rest) if folder is not None and self.bytes else self._copied(backend)
        self.attach(self.block)

    def attach(self, block: torch.Tensor) -> None:
        """Make the modules use the tensors in ``block``."""
        for slot in self.places:
            slot.attach(block)

    def read(self, target: torch.Tensor) -> None:
        """Read the file into the beginning of ``target``. Can be called from any thread. Raises OSError."""
        view, position = memoryview(target.numpy())[: self.bytes], 0
        while position < self.bytes:
            count = os.preadv(self._descriptor, [view[position:]], position)
            if count == 0:
                raise OSError(f"an offloaded layer's file ends after {position:,} of {self.bytes:,} bytes")
            position += count

    def _copied(self, backend: Backend) -> torch.Tensor:
        block = backend.host_buffer((self.bytes,), torch.uint8)
        for slot in self.places:
            block[slot.offset : slot.end_offset].copy_(_bytes_of(getattr(slot.holder, slot.attribute)))
        return block

    def _mapped(self, folder: Path, rest: int) -> torch.Tensor:
        """Write the block to an unnamed file, which no other process can change and which is deleted when this process ends."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            required_bytes = (1 + rest) * self.bytes
            if free_bytes(folder) < required_bytes + SPARE_BYTES:
                raise UserError(
                    "offload.disk_full",
                    f"{folder}: offloaded layers need {required_bytes:,} bytes there, and {free_bytes(folder):,} bytes are free: "
                    f"free disk space, or set another [model] shard_cache",
                )
            with tempfile.TemporaryFile(dir=folder) as file:
                for slot in self.places:
                    file.seek(slot.offset)
                    file.write(_bytes_of(getattr(slot.holder, slot.attribute).to(HOST)).numpy())
                file.truncate(self.bytes)
                file.flush()
                # Written through, since the system can only drop clean pages when memory is short.
                os.fsync(file.fileno())
                self._file = mmap.mmap(file.fileno(), self.bytes, access=mmap.ACCESS_COPY)
                self._descriptor = os.dup(file.fileno())
                weakref.finalize(self, os.close, self._descriptor)
        except OSError as error:
            raise UserError(
                "offload.unwritable",
                f"{folder}: offloaded layers cannot be stored there ({error.strerror}): choose another [model] shard_cache",
            ) from error
        return torch.frombuffer(self._file, dtype=torch.uint8)


_CopyStart = Callable[[], Copied | None]
"""Waits until a copy has started and returns the copy."""


class ReadAhead:
    """Reads layers ahead from files: threads read the layers into host buffers, in order of use."""

    def __init__(self, layers: Mapping[int, HostLayer], backend: Backend) -> None:
        self.layers, longest = layers, max(layer.bytes for layer in layers.values())
        self._free: list[tuple[torch.Tensor, _CopyStart]] = [
            (backend.host_buffer((longest,), torch.uint8), Copied) for _ in range(OFFLOADED_LAYER_COUNT)
        ]
        """(buffer, function that waits for the last copy from the buffer)."""
        self._read: dict[int, tuple[torch.Tensor, Background[None]]] = {}
        self._last: Background[None] | None = None

    def start_read(self, layer: int) -> None:
        """Start reading a layer if it is in a file and a buffer is free."""
        if layer not in self.layers or layer in self._read or not self._free:
            return
        (buffer, previous_copy), source = self._free.pop(0), self.layers[layer]
        # Completed waits are dropped, because each refers to the waits before it.
        waits = [previous_copy, *([self._last.finish] if self._last is not None else ())]

        def read() -> None:
            while waits:  # read one layer at a time, into a buffer whose previous layer has been copied
                if (copied := waits.pop()()) is not None:
                    copied.wait()
            source.read(buffer)

        self._last = Background("reading a layer", read)
        self._read[layer] = buffer, self._last

    def copy(self, layer: int, target: torch.Tensor, copying: Copying) -> _CopyStart:
        """Copy a layer to the device as soon as it has been read. The returned function may raise OSError."""
        if layer not in self._read and not self._free:  # a different layer was expected
            self._free.append((self._read.popitem()[1][0], Copied))
        self.start_read(layer)
        buffer, reading = self._read.pop(layer)

        def start_copy() -> Copied:
            reading.finish()
            return copying.copy(target, buffer[: len(target)])

        copy_start = Background("reading a layer", start_copy).finish
        self._free.append((buffer, copy_start))
        return copy_start


class HostWeights:
    """The layers of an offloaded stage. ``layers`` maps them to blocks; ``on_disk`` lists those that exceed host memory."""

    def __init__(self, layers: Mapping[int, HostLayer], backend: Backend, on_disk: Collection[int] = ()) -> None:
        self.layers = layers
        self._copying = backend.copying() if backend.device != HOST and layers else None
        self._slots: list[torch.Tensor] = []
        self._in_slot: list[int | None] = [None] * OFFLOADED_LAYER_COUNT
        self._started_copies: dict[int, _CopyStart] = {}
        self._copied = [Copied()] * OFFLOADED_LAYER_COUNT
        """The last copy into each slot."""
        self._computing: int | None = None
        if self._copying is not None:
            largest = max(layer.bytes for layer in layers.values())
            self._slots = [
                torch.empty(largest, dtype=torch.uint8, device=backend.device) for _ in range(OFFLOADED_LAYER_COUNT)
            ]
        layers_on_disk = {layer: layers[layer] for layer in on_disk if self._copying is not None}
        self._reading = ReadAhead(layers_on_disk, backend) if layers_on_disk else None

    @property
    def bytes(self) -> int:
        """Total size of all layers in host memory or mapped files."""
        return sum(layer.bytes for layer in self.layers.values())

    def need(self, layer: int) -> None:
        """Make the layer's weights available on the device for the computation that follows."""
        if self._copying is None or layer not in self.layers or layer == self._computing:
            return
        if layer not in self._in_slot:
            self._start_copy(layer, keeping=None)
        if layer in self._started_copies:
            (self._started_copies.pop(layer)() or Copied()).hold_compute()
        self.layers[layer].attach(self._slots[self._in_slot.index(layer)])
        self._computing = layer

    def prefetch(self, layer: int, keeping: int) -> None:
        """Start copying the layer that runs after the current layer, ``keeping``."""
        if layer in self.layers and self._copying is not None and layer not in self._in_slot:
            self._start_copy(layer, keeping)
        if self._reading is not None:
            layer_order = range(min(self.layers), 1 + max(self.layers))[:: layer - keeping]
            # Most passes run in the opposite direction of the previous pass and find its last layers on the device.
            for later_layer in (
                *layer_order[1 + layer_order.index(keeping) :],
                *layer_order[::-1][OFFLOADED_LAYER_COUNT:],
            ):
                if later_layer not in self._in_slot:
                    self._reading.start_read(later_layer)

    @contextlib.contextmanager
    def referred_to(self) -> Iterator[None]:
        """Return a context in which autograd saves weights by layer and offset, because slots are reused before backward."""
        if self._copying is None:
            yield
            return
        with torch.autograd.graph.saved_tensors_hooks(self._pack_tensor, self._unpack_tensor):
            yield

    def _pack_tensor(self, tensor: torch.Tensor) -> torch.Tensor | _TensorInLayer:
        slot = None if self._computing is None else self._slots[self._in_slot.index(self._computing)]
        if slot is None or tensor.untyped_storage().data_ptr() != slot.untyped_storage().data_ptr():
            return tensor
        assert self._computing is not None
        return self._computing, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()

    def _unpack_tensor(self, packed: torch.Tensor | _TensorInLayer) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        layer, dtype, *layout = packed
        slot = self._slots[self._in_slot.index(layer)]
        return torch.empty(0, dtype=dtype, device=slot.device).set_(slot.untyped_storage(), *layout)  # type: ignore[arg-type]

    def release(self) -> None:
        """Detach all layers from the device, so that their blocks can be written."""
        for layer, copied in zip(self._in_slot, self._copied, strict=True):
            if layer is not None:
                self.layers[layer].attach(self.layers[layer].block)
                copied.wait()
        self._in_slot, self._started_copies, self._computing = [None] * OFFLOADED_LAYER_COUNT, {}, None

    def _start_copy(self, layer: int, keeping: int | None) -> None:
        assert self._copying is not None
        slot = next(index for index, occupant in enumerate(self._in_slot) if occupant is None or occupant != keeping)
        previous_layer = self._in_slot[slot]
        if previous_layer is not None:
            self._started_copies.pop(previous_layer, Copied)()  # a prefetched layer that was not used
            self.layers[previous_layer].attach(self.layers[previous_layer].block)
        host = self.layers[layer]
        self._in_slot[slot] = layer
        self._copying.after_compute()  # the device may still use the slot's previous layer
        target, reading = self._slots[slot][: host.bytes], self._reading
        if reading is not None and layer in reading.layers:
            self._started_copies[layer] = reading.copy(layer, target, self._copying)
        else:
            copied = self._copied[slot] = self._copying.copy(target, host.block)
            self._started_copies[layer] = lambda: copied


def _tensors(modules: Iterable[nn.Module], frozen: bool) -> list[tuple[Any, str]]:
    """Return (holder, attribute) for every parameter, or only frozen ones, including the scales of NF4 weights."""
    tensors: list[tuple[Any, str]] = []
    parameters = dict.fromkeys(p for root in modules for p in root.parameters() if not is_empty(p))
    for parameter in (candidate for candidate in parameters if not (frozen and candidate.requires_grad)):
        tensors.append((parameter, "data"))
        packing = getattr(parameter, "quant_state", None)
        if packing is not None:
            tensors.append((packing, "absmax"))
            if packing.nested:
                tensors.append((packing.state2, "absmax"))
    return tensors


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
