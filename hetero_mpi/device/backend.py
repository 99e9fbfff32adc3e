"""Device interface of a rank: tensor placement, copies to and from host memory, capabilities. This module has the CPU backend.

Every rank has one ``Backend``. Code outside this package does not depend on the vendor; ``backends/`` has the GPU backends.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from hetero_mpi.comm import huge_pages
from hetero_mpi.device.products import has_products
from hetero_mpi.util import host_limits

DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HOST = torch.device("cpu")


@dataclass(frozen=True)
class Memory:
    """Memory budget of a rank in bytes, and its derivation as text."""

    usable_bytes: int
    reason: str


@dataclass(frozen=True)
class Mark:
    """Point in time of a device's work (``Backend.mark``), here in seconds of a synchronised device."""

    at: Any

    def seconds_since(self, earlier: Mark) -> float:
        """Seconds from an earlier mark of the same backend to this mark; waits until the device reaches it."""
        return float(self.at - earlier.at)


class RecordedMark(Mark):
    """Device event, which waits for the device only when its time is read."""

    def seconds_since(self, earlier: Mark) -> float:
        self.at.synchronize()
        return float(earlier.at.elapsed_time(self.at)) / 1e3


class Copied:
    """Handle of a copy between host memory and a device; this base class is a completed copy."""

    def done(self) -> bool:
        """Whether the copy is complete. Callable from any thread at any time."""
        return True

    def wait(self) -> None:
        """Wait until the copy is complete."""

    def hold_compute(self) -> None:
        """Let later device work of this thread start only after the copy."""


class Copying:
    """Synchronous copies: in host memory, and on devices with a single queue (MPS).

    Tensors are copied in chunks, each as early as possible, while other chunks travel between hosts. No call waits for the whole
    device.
    """

    overlaps = False
    """Whether any thread may start copies that overlap with computation."""

    def after_compute(self) -> None:
        """Let later copies start only after the device work that this thread has submitted."""

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> Copied:
        """Start copying a flat tensor. Keep both alive until it is done; host memory must be a ``Backend.host_buffer``."""
        to.copy_(source)
        return Copied()


class StreamCopying(Copying):
    """Copies on a separate stream (CUDA, ROCm, XPU), by the GPU's copy engines with pinned host memory."""

    overlaps = True

    def __init__(self, module: Any, device: torch.device) -> None:
        self._module, self._device = module, device
        self._stream = module.Stream(device)

    def after_compute(self) -> None:
        self._stream.wait_stream(self._module.current_stream(self._device))

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> Copied:
        # Any thread may call this; without the device made current first, leaving the stream would open a context on device 0.
        with self._module.device(self._device), self._module.stream(self._stream):
            to.copy_(source, non_blocking=True)
            event = self._module.Event()
            event.record(self._stream)
        return _OnStream(self._module, self._device, event)


class _OnStream(Copied):
    def __init__(self, module: Any, device: torch.device, event: Any) -> None:
        self._module, self._device, self._event = module, device, event

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()

    def hold_compute(self) -> None:
        self._module.current_stream(self._device).wait_event(self._event)


class Backend:
    """CPU backend, and base class of all backends.

    ``name`` is ``cpu``, ``cuda``, ``rocm``, ``xpu`` or ``mps``; ``device`` is the torch device.
    """

    name = "cpu"
    torch_type = "cpu"

    def __init__(self, index: int = 0) -> None:
        self.index = index
        self.device = (
            torch.device(self.torch_type) if self.torch_type in ("cpu", "mps") else torch.device(self.torch_type, index)
        )

    @classmethod
    def count(cls) -> int:
        """Number of devices of this backend that torch sees on this host."""
        return 1

    @classmethod
    def unusable(cls) -> dict[int, str]:
        """Index of each device for which torch has no kernels -> reason and remedy."""
        return {}

    @classmethod
    def only_by_name(cls) -> set[int]:
        """Indices of devices that a rank uses only on explicit request."""
        return set()

    def make_current(self) -> None:
        """Make this device the default device of the calling thread."""

    def identity(self) -> str:
        """Unique name of the device on its host; equal for ranks that share the device."""
        return self.name

    def description(self) -> str:
        """Product name of the device."""
        return processor_name()

    def architecture(self) -> str:
        """Device generation and libraries below torch, which with torch's version determine the kernels."""
        return f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"

    def dtypes(self) -> tuple[str, ...]:
        """Compute dtypes that this device supports for training."""
        return ("fp32", "bf16", "fp16")

    def products(self, dtype: str) -> str:
        """Dtype of matrix products if a job computes in ``dtype``."""
        return dtype if self.name != "cpu" or has_products(dtype) else "fp32"

    def memory(self, sharing: int = 1) -> Memory:
        """Memory that is available now to one of ``sharing`` ranks on this device."""
        free = self._free_memory()
        if sharing <= 1:
            return free
        return Memory(free.usable_bytes // sharing, f"{free.reason}, shared by {sharing} ranks")

    def _free_memory(self) -> Memory:
        return host_memory()

    def shares_host_memory(self) -> bool:
        """Whether the device computes in host memory (CPUs, integrated GPUs)."""
        return True

    def synchronize(self) -> None:
        """Wait until the device has finished all submitted work."""

    def finish_compute(self) -> None:
        """Wait until the device has finished this thread's computation; copies (``copying``) may still run."""
        self.synchronize()

    def mark(self) -> Mark:
        """Mark when the device finishes this thread's submitted work. CPU: the thread's CPU time, without waits for a core."""
        self.finish_compute()
        # Also with several threads: this thread does its share of each parallel region and all serial work, which the mean over all
        # threads would undercount. Its CPU time stays within 10 % with 0 to 3 other busy processes.
        return Mark(time.thread_time())

    def copying(self) -> Copying:
        """Create a queue of copies between host memory and the device."""
        return Copying()

    def begin_peak(self) -> None:
        """Reset ``peak_bytes``, to exclude profiling and loading from the training's peak."""
        with contextlib.suppress(OSError):  # not Linux: the peak counts since the start of the process
            Path("/proc/self/clear_refs").write_text("5")

    def peak_bytes(self) -> int:
        """Peak memory since ``begin_peak``: resident set of the process on the CPU, allocated device memory on GPUs."""
        return _peak_resident_bytes()

    def used_bytes(self) -> int:
        """Current memory, measured like ``peak_bytes``. Callable from any thread."""
        return int(psutil.Process().memory_info().rss)

    def sensors(self) -> dict[str, float]:
        """Readings ``busy`` (a share), ``watts`` and ``celsius`` that the vendor's library provides."""
        return {}

    def free_unused(self) -> None:
        """Return unreferenced memory to the system.

        Stages and their hooks form reference cycles, which stay allocated until Python's garbage collector runs; device allocators
        do not run it before they raise out of memory.
        """
        gc.collect()
        return_freed_memory()

    def seed(self, seed: int) -> None:
        """Seed all random generators of this device."""
        torch.default_generator.manual_seed(seed)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor in contiguous host memory, without a copy on CPU ranks."""
        return tensor.detach().to(HOST).contiguous()

    def from_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a host tensor on the device, without a copy on CPU ranks."""
        return tensor.to(self.device)

    def host_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocate a long-lived, uninitialised host buffer for fast copies."""
        memory = huge_pages.empty(math.prod(shape) * dtype.itemsize)
        if memory.size == 0:  # torch cannot view an empty buffer as another type
            return torch.empty(tuple(shape), dtype=dtype)
        self._pin(memory)
        return torch.from_numpy(memory).view(dtype).view(tuple(shape))

    def shares_keys(self, dtype: torch.dtype) -> bool:
        """Whether attention supports shared keys and values (GQA) directly, without repeating them per head."""
        return True

    def _pin(self, memory: np.ndarray) -> None:
        """Pin ``memory`` for its lifetime, so that the device can copy directly."""


def host_bytes(tensor: torch.Tensor) -> np.ndarray:
    """View a contiguous host tensor as a flat ``uint8`` array, since numpy has no bfloat16."""
    return tensor.detach().view(-1).view(torch.uint8).numpy()


def return_freed_memory() -> None:
    """Return freed memory that glibc keeps to the system.

    Quantising weights frees many medium-sized blocks between small live ones; without this, the resident set of a rank doubles
    after loading NF4 weights.
    """
    with contextlib.suppress(OSError, AttributeError):  # other C libraries (musl, macOS) have no malloc_trim
        ctypes.CDLL(None).malloc_trim(0)


def host_memory() -> Memory:
    """Free memory of the host, for all its ranks together."""
    memory = psutil.virtual_memory()
    limit = host_limits.free_bytes()
    if limit is not None and limit < memory.available:
        return Memory(limit, f"{gigabytes(limit)} left under the cgroup limit")
    return Memory(
        memory.available,
        f"{gigabytes(memory.available)} free of {gigabytes(memory.total)} on the host, after other programs",
    )


def _peak_resident_bytes() -> int:
    """Peak resident bytes: on Linux since the last write to ``/proc/self/clear_refs``; elsewhere since the process started."""
    try:
        status = Path("/proc/self/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")) * 1024
    except (OSError, StopIteration):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if platform.system() == "Darwin" else peak * 1024


def gigabytes(number: int) -> str:
    """Format bytes as ``12.3 GB``."""
    return f"{number / 1e9:.1f} GB"


def processor_name() -> str:
    """Product name of the processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
