"""The interface to a rank's device: tensor placement, copies to and from host memory, capabilities. Includes the CPU backend.

Every rank has one ``Backend``, so that code outside this package does not depend on the vendor. ``backends/`` has the GPU backends.
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
    """A rank's memory budget in bytes, and an explanation for the user."""

    usable_bytes: int
    reason: str


@dataclass(frozen=True)
class Mark:
    """A point in time in a device's work (``Backend.mark``). In this class, ``at`` is in seconds."""

    at: Any

    def seconds_since(self, earlier: Mark) -> float:
        """Return the seconds from an earlier mark of the same backend to this mark. Waits until the device reaches this mark."""
        return float(self.at - earlier.at)


class RecordedMark(Mark):
    """A mark that is a device event, which waits for the device only when its time is read."""

    def seconds_since(self, earlier: Mark) -> float:
        self.at.synchronize()
        return float(earlier.at.elapsed_time(self.at)) / 1e3


class Copied:
    """Handle of a copy between host memory and a device. This base class represents a completed copy."""

    def done(self) -> bool:
        """Return whether the copy is complete. Callable from any thread at any time."""
        return True

    def wait(self) -> None:
        """Wait until the copy is complete."""

    def hold_compute(self) -> None:
        """Delay device work that this thread submits later until the copy is complete."""


class Copying:
    """Copies synchronously, for CPU ranks and for devices with a single queue (MPS).

    Callers copy tensors in chunks, each as early as possible, while other chunks travel between hosts. No call waits until the
    whole device is idle.
    """

    overlaps = False
    """Whether copies overlap with computation and may be started from any thread."""

    def after_compute(self) -> None:
        """Delay later copies until the device work that this thread has submitted so far is complete."""

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> Copied:
        """Start copying a flat tensor. Keep both tensors alive until it is done. Host memory must come from ``host_buffer``."""
        to.copy_(source)
        return Copied()


class StreamCopying(Copying):
    """Copies on a separate stream (CUDA, ROCm, XPU), using the GPU's copy engines and pinned host memory."""

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
    """The CPU backend, which is also the base class of all backends.

    ``name`` is ``cpu``, ``cuda``, ``rocm``, ``xpu`` or ``mps``, and ``device`` is the torch device.
    """

    name = "cpu"
    torch_type = "cpu"
    compiles_by_default = False
    """Whether ``[train] compile`` compiles blocks on this backend if it is "auto" or "accelerators"."""

    def __init__(self, index: int = 0) -> None:
        self.index = index
        self.device = (
            torch.device(self.torch_type) if self.torch_type in ("cpu", "mps") else torch.device(self.torch_type, index)
        )

    @classmethod
    def count(cls) -> int:
        """Return the number of devices of this backend that torch sees on this host."""
        return 1

    @classmethod
    def unusable(cls) -> dict[int, str]:
        """Map the index of each device for which torch has no kernels to the reason and a remedy."""
        return {}

    @classmethod
    def only_by_name(cls) -> set[int]:
        """Return the indices of devices that a rank uses only if the user requests them explicitly."""
        return set()

    def make_current(self) -> None:
        """Make this device the default device of the calling thread."""

    def identity(self) -> str:
        """Return a name that is unique on the host. Ranks that share the device get the same name."""
        return self.name

    def description(self) -> str:
        """Return the product name of the device."""
        return processor_name()

    def architecture(self) -> str:
        """Return the device generation and the libraries below torch. With torch's version, they determine the kernels."""
        return f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"

    def dtypes(self) -> tuple[str, ...]:
        """Return the compute dtypes that this device supports for training."""
        return ("fp32", "bf16", "fp16")

    def products(self, dtype: str) -> str:
        """Return the dtype that this device uses for matrix products when a job computes in ``dtype``."""
        return dtype if self.name != "cpu" or has_products(dtype) else "fp32"

    def memory(self, sharing: int = 1) -> Memory:
        """Return the memory now available to each of the ``sharing`` ranks on this device."""
        free = self._free_memory()
        if sharing <= 1:
            return free
        return Memory(free.usable_bytes // sharing, f"{free.reason}, shared by {sharing} ranks")

    def _free_memory(self) -> Memory:
        return host_memory()

    def shares_host_memory(self) -> bool:
        """Return whether the device computes in host memory, as CPUs and integrated GPUs do."""
        return True

    def synchronize(self) -> None:
        """Wait until the device has finished all submitted work."""

    def finish_compute(self) -> None:
        """Wait until the device has finished this thread's computation. Copies from ``copying`` may still be running."""
        self.synchronize()

    def mark(self) -> Mark:
        """Mark the time when the device finishes this thread's work. On a CPU, time is the thread's CPU time."""
        self.finish_compute()
        # Also with several threads: this thread does its share of each parallel region and all serial work, which the mean over all
        # threads would undercount. Its CPU time stays within 10 % with 0 to 3 other busy processes.
        return Mark(time.thread_time())

    def copying(self) -> Copying:
        """Create a queue for copies between host memory and the device."""
        return Copying()

    def begin_peak(self) -> None:
        """Reset ``peak_bytes``, so that the peak of training does not include profiling and loading."""
        with contextlib.suppress(OSError):  # not Linux: the peak counts since the start of the process
            Path("/proc/self/clear_refs").write_text("5")

    def peak_bytes(self) -> int:
        """Return the peak memory since ``begin_peak``: the resident set of the process, or the allocated memory of a GPU."""
        return _peak_resident_bytes()

    def used_bytes(self) -> int:
        """Return the memory in use now, measured like ``peak_bytes``. Callable from any thread."""
        return int(psutil.Process().memory_info().rss)

    def sensors(self) -> dict[str, float]:
        """Return the readings ``busy`` (share of time), ``watts`` and ``celsius``, as far as the device provides them."""
        return {}

    def free_unused(self) -> None:
        """Return unreferenced memory to the system.

        Stages and their hooks form reference cycles, which stay allocated until Python's garbage collector runs. Device allocators
        do not run it before they raise an out-of-memory error.
        """
        gc.collect()
        return_freed_memory()

    def seed(self, seed: int) -> None:
        """Seed all random number generators that this device uses."""
        torch.default_generator.manual_seed(seed)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor in contiguous host memory. On a CPU rank, a contiguous tensor is not copied."""
        return tensor.detach().to(HOST).contiguous()

    def from_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Move a host tensor to the device. On a CPU rank, it is not copied."""
        return tensor.to(self.device)

    def host_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocate a long-lived, uninitialised buffer in host memory that allows fast copies."""
        memory = huge_pages.empty(math.prod(shape) * dtype.itemsize)
        if memory.size == 0:  # torch cannot view an empty buffer as another type
            return torch.empty(tuple(shape), dtype=dtype)
        self._pin(memory)
        return torch.from_numpy(memory).view(dtype).view(tuple(shape))

    def shares_keys(self, dtype: torch.dtype) -> bool:
        """Return whether attention supports grouped keys and values (GQA) directly, without repeating them for each head."""
        return True

    def _pin(self, memory: np.ndarray) -> None:
        """Pin ``memory`` for its lifetime, so that the device can access it directly."""


def host_bytes(tensor: torch.Tensor) -> np.ndarray:
    """View a contiguous host tensor as a flat ``uint8`` array, because numpy has no bfloat16."""
    return tensor.detach().view(-1).view(torch.uint8).numpy()


def return_freed_memory() -> None:
    """Return memory that has been freed, but is still held by glibc, to the system.

    Quantising weights frees many medium-sized blocks between small blocks in use. Without this call, the resident set of a rank
    doubles after loading NF4 weights.
    """
    with contextlib.suppress(OSError, AttributeError):  # other C libraries (musl, macOS) have no malloc_trim
        ctypes.CDLL(None).malloc_trim(0)


def keep_freed_memory() -> None:
    """Let glibc keep up to 1 GiB of freed memory: fetching its pages anew took 5 to 9 % of steps of full training in bf16."""
    with contextlib.suppress(OSError, AttributeError):
        for parameter, size_bytes in ((-1, 1 << 30), (-3, 32 << 20)):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            ctypes.CDLL(None).mallopt(parameter, size_bytes)


def host_memory() -> Memory:
    """Return the free memory of the host, which all of its ranks share."""
    memory = psutil.virtual_memory()
    limit = host_limits.free_bytes()
    if limit is not None and limit < memory.available:
        return Memory(limit, f"{gigabytes(limit)} left under the cgroup limit")
    sizes = f"{gigabytes(memory.available)} free of {gigabytes(memory.total)}"
    return Memory(memory.available, f"{sizes} on the host, after other programs")


def _peak_resident_bytes() -> int:
    """Return the peak resident bytes since the last write to ``/proc/self/clear_refs`` (Linux) or the start of the process."""
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
    """Return the product name of the processor."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
