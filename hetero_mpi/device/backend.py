"""The interface of a rank to its device: where tensors live, how they reach host memory, what the device can do. Here: of the CPU.

Every rank has one ``Backend``. Nothing outside this folder asks which vendor it is; GPUs are in ``backends/``.
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
    """Bytes a rank may use, and how that came about in words."""

    usable_bytes: int
    reason: str


@dataclass(frozen=True)
class Mark:
    """A moment of a device's work (``Backend.mark``); here of one that was waited for, in seconds."""

    at: Any

    def seconds_since(self, earlier: Mark) -> float:
        """From an earlier mark of the same backend to this one; waits until the device has come so far."""
        return float(self.at - earlier.at)


class RecordedMark(Mark):
    """An event in a device's queue: nobody waits for the device until the time is asked for."""

    def seconds_since(self, earlier: Mark) -> float:
        self.at.synchronize()
        return float(earlier.at.elapsed_time(self.at)) / 1e3


class Copied:
    """A copy between host memory and a device that was begun; this one has ended."""

    def done(self) -> bool:
        """True where it has ended. Any thread may ask, at any time."""
        return True

    def wait(self) -> None:
        """Return when it has ended."""

    def hold_compute(self) -> None:
        """Let what this thread gives the device from now on begin after it."""


class Copying:
    """Copies that have ended when they return: in host memory, and where a device has one queue for everything (MPS).

    A tensor is copied piece by piece, each as soon as it can be, while other pieces travel between hosts. Nothing here waits for
    the whole device.
    """

    beside = False
    """True where any thread may begin a copy, beside what the device computes."""

    def after_compute(self) -> None:
        """Copies from now on begin when the device has done what this thread gave it so far."""

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> Copied:
        """Begin to copy a flat tensor over another one. Both live until it is done; host memory is a ``Backend.host_buffer``."""
        to.copy_(source)
        return Copied()


class StreamCopying(Copying):
    """Copies on a stream of their own (CUDA, ROCm, XPU), with pinned host memory by the GPU's copy engines."""

    beside = True

    def __init__(self, module: Any, device: torch.device) -> None:
        self._module, self._device = module, device
        self._stream = module.Stream(device)

    def after_compute(self) -> None:
        self._stream.wait_stream(self._module.current_stream(self._device))

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> Copied:
        # Any thread may come here: without its device made current first, leaving the stream would open a context on device 0.
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
    """The CPU, and what all backends have in common.

    ``name`` is ``cpu``, ``cuda``, ``rocm``, ``xpu`` or ``mps``; ``device`` is torch's device.
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
        """Devices of this kind that torch sees on this host."""
        return 1

    @classmethod
    def unusable(cls) -> dict[int, str]:
        """Index of every device that torch sees but has no kernels for -> why, and what to do."""
        return {}

    @classmethod
    def only_by_name(cls) -> set[int]:
        """Indices of devices that a rank takes only where it is told to."""
        return set()

    def make_current(self) -> None:
        """Calls of this thread that name no device mean this one from now on."""

    def identity(self) -> str:
        """A name that tells the device from others of its host; equal for two ranks that share one."""
        return self.name

    def description(self) -> str:
        """The device's name as a person knows it."""
        return processor_name()

    def architecture(self) -> str:
        """Facts that decide, with torch's version, which kernels run: the device's generation, and the libraries below torch."""
        return f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"

    def dtypes(self) -> tuple[str, ...]:
        """Compute dtypes this device can train in."""
        return ("fp32", "bf16", "fp16")

    def products(self, dtype: str) -> str:
        """The dtype in which matrices are multiplied where a job computes in ``dtype``."""
        return dtype if self.name != "cpu" or has_products(dtype) else "fp32"

    def memory(self, sharing: int = 1) -> Memory:
        """Memory for one rank, now, when ``sharing`` ranks divide the device's memory among themselves."""
        free = self._free_memory()
        if sharing <= 1:
            return free
        return Memory(free.usable_bytes // sharing, f"{free.reason}, shared by {sharing} ranks")

    def _free_memory(self) -> Memory:
        return host_memory()

    def shares_host_memory(self) -> bool:
        """True where the device computes in the host's own memory (CPUs, integrated GPUs)."""
        return True

    def synchronize(self) -> None:
        """Return when all work given to the device is done."""

    def finish_compute(self) -> None:
        """Return when the device has computed what this thread gave it; copies beside it (``copying``) may go on."""
        self.synchronize()

    def mark(self) -> Mark:
        """The moment at which the device has computed what this thread gave it so far; in general it lies ahead. On the CPU by the
        thread's processor time: what it waits for a core is no work."""
        self.finish_compute()
        # Of a rank with several threads too: this one takes its share of every parallel region and does what is not parallel, which
        # the time of all threads over their number counts by half. Beside 0 to 3 busy processes it stays within a tenth.
        return Mark(time.thread_time())

    def copying(self) -> Copying:
        """A new queue of copies between host memory and the device."""
        return Copying()

    def begin_peak(self) -> None:
        """``peak_bytes`` counts from now on: what came before (profiling, loading) does not belong to the training."""
        with contextlib.suppress(OSError):  # no Linux: the peak counts since the process began
            Path("/proc/self/clear_refs").write_text("5")

    def peak_bytes(self) -> int:
        """Highest memory since ``begin_peak``: resident set of the process on the CPU, allocated device memory elsewhere."""
        return _peak_resident_bytes()

    def used_bytes(self) -> int:
        """The same memory now. From any thread."""
        return int(psutil.Process().memory_info().rss)

    def sensors(self) -> dict[str, float]:
        """``busy`` (a share), ``watts`` and ``celsius`` of an accelerator, as far as its vendor's library tells."""
        return {}

    def free_unused(self) -> None:
        """Give memory that nobody refers to any more back to the system.

        Stages and their hooks refer to each other, so what is dropped lies about until Python's collector comes by; allocators
        of devices do not call it before they say that memory is short.
        """
        gc.collect()
        return_freed_memory()

    def seed(self, seed: int) -> None:
        """Seed every generator a module on this device may draw from."""
        torch.default_generator.manual_seed(seed)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in host memory, contiguous; the tensor itself where it is already there (no copy on CPU ranks)."""
        return tensor.detach().to(HOST).contiguous()

    def from_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host tensor on the device; the tensor itself on CPU ranks."""
        return tensor.to(self.device)

    def host_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised host memory that lasts, of the kind that is copied into fastest."""
        memory = huge_pages.empty(math.prod(shape) * dtype.itemsize)
        if memory.size == 0:  # torch cannot view nothing as another type
            return torch.empty(tuple(shape), dtype=dtype)
        self._pin(memory)
        return torch.from_numpy(memory).view(dtype).view(tuple(shape))

    def shares_keys(self, dtype: torch.dtype) -> bool:
        """True where attention takes keys and values that several heads share as they are; else they are repeated before."""
        return True

    def _pin(self, memory: np.ndarray) -> None:
        """Let the device copy by itself from and to ``memory``, as long as that lives."""


def best_dtype(ranks: list[tuple[str, list[str]]]) -> tuple[str, str]:
    """(compute dtype for all ranks, the reason), from each rank's (backend name, dtypes).

    Accelerators decide: bf16 where all of them have it, else fp16; CPUs follow, if need be with products in fp32
    (``Backend.products``). CPUs alone compute in fp32, which most of them do faster than narrow types.
    """
    accelerators = [(rank, name, dtypes) for rank, (name, dtypes) in enumerate(ranks) if name != "cpu"]
    if not accelerators:
        return "fp32", "all ranks are CPUs, and most of these are slower in narrow types"
    without = [f"rank {rank} ({name})" for rank, name, dtypes in accelerators if "bf16" not in dtypes]
    if not without:
        return "bf16", "every rank can compute in it"
    if all("fp16" in dtypes for _, _, dtypes in accelerators):
        return "fp16", f"{', '.join(without)} cannot compute in bf16"
    return "fp32", f"{', '.join(without)} can compute neither in bf16 nor in fp16"


def host_bytes(tensor: torch.Tensor) -> np.ndarray:
    """The memory of a contiguous host tensor as a flat ``uint8`` array, without a copy (numpy has no bfloat16)."""
    return tensor.detach().view(-1).view(torch.uint8).numpy()


def return_freed_memory() -> None:
    """Give memory freed inside the process back to the system, where the C library keeps it (glibc).

    Packing weights frees many medium-sized blocks between small ones that stay; without this the resident set of a rank is
    twice its share after loading NF4 weights.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library (musl, macOS) decides by itself
        ctypes.CDLL(None).malloc_trim(0)


def host_memory() -> Memory:
    """The host's memory that is free now, for all its ranks together."""
    memory = psutil.virtual_memory()
    limit = host_limits.free_bytes()
    if limit is not None and limit < memory.available:
        return Memory(limit, f"{gigabytes(limit)} left under the control group's limit")
    return Memory(
        memory.available,
        f"{gigabytes(memory.available)} free of {gigabytes(memory.total)} on the host, after other programs",
    )


def _peak_resident_bytes() -> int:
    """Linux counts it since ``/proc/self/clear_refs`` was written; ``getrusage`` never forgets."""
    try:
        status = Path("/proc/self/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")) * 1024
    except (OSError, StopIteration):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if platform.system() == "Darwin" else peak * 1024


def gigabytes(number: int) -> str:
    """For people: ``12.3 GB``."""
    return f"{number / 1e9:.1f} GB"


def processor_name() -> str:
    """The processor's name as a person knows it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
