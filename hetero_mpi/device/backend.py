"""One small interface over torch's backends: where tensors live, how they reach host memory, what the device can do.

Every rank has one ``Backend``. Nothing outside this room asks which vendor it is.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import torch

from hetero_mpi.comm import pages
from hetero_mpi.device.cgroup import cgroup_free_bytes
from hetero_mpi.device.copying import Copying, StreamCopying
from hetero_mpi.errors import UserError

DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HOST = torch.device("cpu")


@dataclass(frozen=True)
class Memory:
    """Bytes a rank may use, and how that came about in words."""

    usable_bytes: int
    reason: str


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

    def description(self) -> str:
        """The device's name as a person knows it."""
        return _processor_name()

    def dtypes(self) -> tuple[str, ...]:
        """Compute dtypes this device can train in."""
        return ("fp32", "bf16", "fp16")

    def memory(self, ranks_on_host: int = 1) -> Memory:
        """Memory for one rank, now, when ``ranks_on_host`` ranks divide the host's own memory among themselves."""
        host = host_memory()
        shared = f", shared by {ranks_on_host} ranks" if ranks_on_host > 1 else ""
        return Memory(host.usable_bytes // max(1, ranks_on_host), host.reason + shared)

    def shares_host_memory(self) -> bool:
        """Does the device compute in the host's own memory (CPUs, integrated GPUs)?"""
        return True

    def synchronize(self) -> None:
        """Return when all work given to the device is done."""

    def finish_compute(self) -> None:
        """Return when the device has computed what this thread gave it; copies beside it (``copying``) may go on."""
        self.synchronize()

    def copying(self) -> Copying:
        """A new queue of copies between host memory and the device."""
        return Copying()

    def peak_bytes(self) -> int:
        """Highest memory of this rank so far: resident set of the process on the CPU, allocated device memory elsewhere."""
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if platform.system() == "Darwin" else peak * 1024

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
        memory = pages.empty(math.prod(shape) * dtype.itemsize)
        if memory.size == 0:  # torch cannot view nothing as another type
            return torch.empty(tuple(shape), dtype=dtype)
        return torch.from_numpy(memory).view(dtype).view(tuple(shape))

    def fused_optimizer(self) -> bool:
        """Does torch's AdamW have a fused kernel here?"""
        return True


class _Accelerator(Backend):
    """Backends that have their own memory and a ``torch.<type>`` module with the usual functions."""

    @property
    def _module(self):  # type: ignore[no-untyped-def]
        return getattr(torch, self.torch_type)

    def description(self) -> str:
        return str(self._module.get_device_name(self.device))

    def memory(self, ranks_on_host: int = 1) -> Memory:
        free, total = self._module.mem_get_info(self.device)
        own = self._module.memory_reserved(self.device)
        others = max(0, total - free - own)
        reason = f"{_gigabytes(free + own)} free of {_gigabytes(total)} on the device"
        if others > total // 100:
            reason += f", {_gigabytes(others)} taken by its runtime and by other programs"
        return Memory(int(free + own), reason)

    def shares_host_memory(self) -> bool:
        # An integrated GPU with more memory than the system sees was given it for good (by the firmware), beside the system's own.
        integrated = bool(getattr(self._module.get_device_properties(self.device), "is_integrated", False))
        return integrated and self._module.mem_get_info(self.device)[1] <= psutil.virtual_memory().total

    def synchronize(self) -> None:
        self._module.synchronize(self.device)

    def finish_compute(self) -> None:
        self._module.current_stream(self.device).synchronize()

    def copying(self) -> Copying:
        return StreamCopying(self._module, self.device)

    def peak_bytes(self) -> int:
        return int(self._module.max_memory_allocated(self.device))

    def host_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def seed(self, seed: int) -> None:
        super().seed(seed)
        self._module.manual_seed(seed)


class CudaBackend(_Accelerator):
    name = "cuda"
    torch_type = "cuda"

    def dtypes(self) -> tuple[str, ...]:
        # bf16 arithmetic starts with compute capability 8.0; older cards only emulate it, far too slowly to train with.
        capability = torch.cuda.get_device_capability(self.device)
        return ("fp32", "bf16", "fp16") if capability >= (8, 0) else ("fp32", "fp16")


class RocmBackend(_Accelerator):
    """AMD cards: torch's HIP build presents them under the name ``cuda``."""

    name = "rocm"
    torch_type = "cuda"


class XpuBackend(_Accelerator):
    name = "xpu"
    torch_type = "xpu"


class MpsBackend(Backend):
    """Apple GPUs share the host's memory."""

    name = "mps"
    torch_type = "mps"

    def description(self) -> str:
        return f"{_processor_name()} GPU"

    def memory(self, ranks_on_host: int = 1) -> Memory:
        limit = int(torch.mps.recommended_max_memory())
        host = super().memory(ranks_on_host)
        if limit < host.usable_bytes:
            return Memory(limit, f"{_gigabytes(limit)} recommended by Metal, of the host's memory")
        return host

    def synchronize(self) -> None:
        torch.mps.synchronize()

    def peak_bytes(self) -> int:
        return int(torch.mps.driver_allocated_memory())

    def seed(self, seed: int) -> None:
        super().seed(seed)
        torch.mps.manual_seed(seed)


_BACKENDS: dict[str, type[Backend]] = {b.name: b for b in (Backend, CudaBackend, RocmBackend, XpuBackend, MpsBackend)}


def _available() -> list[str]:
    """Backends this torch build and this machine offer, best first; the CPU is always last."""
    found = []
    if torch.cuda.is_available():
        found.append("rocm" if torch.version.hip else "cuda")
    if hasattr(torch, "xpu") and torch.xpu.is_available():
        found.append("xpu")
    if torch.backends.mps.is_available():
        found.append("mps")
    return [*found, "cpu"]


def _count(name: str) -> int:
    if name in ("cuda", "rocm"):
        return int(torch.cuda.device_count())
    if name == "xpu":
        return int(torch.xpu.device_count())
    return 1


def every_device() -> list[Backend]:
    """All accelerators of this process, best kind first, and the CPU."""
    return [_BACKENDS[name](index) for name in _available() for index in range(_count(name))]


def visible_cards(wanted: str) -> tuple[str, tuple[str, ...]]:
    """(backend that ``open_backend`` would take, what tells its cards from those that other ranks of this host see)."""
    name = _available()[0] if wanted == "auto" else wanted
    if name not in _available() or name in ("cpu", "mps"):
        return name, ()
    module = getattr(torch, _BACKENDS[name].torch_type)
    return name, tuple(str(getattr(module.get_device_properties(i), "uuid", i)) for i in range(_count(name)))


def open_backend(wanted: str, local_rank: int) -> Backend:
    """The backend for this rank: local rank i takes accelerator i; a rank beyond the last accelerator computes on the CPU.

    Args:
        wanted: ``auto`` or a backend's name.
        local_rank: index of this rank among the ranks of its host that see the same accelerators (``choice.card_of``).

    Raises:
        UserError: ``wanted`` is not to be had here.
    """
    available = _available()
    if wanted == "auto":
        name = available[0]
        return _BACKENDS[name](local_rank) if local_rank < _count(name) else Backend()
    if wanted not in available:
        raise UserError(
            f"device {wanted!r} is asked for, but this host's torch {torch.__version__} offers {', '.join(available)}; "
            f'install the torch build for that device, or set device = "auto" (in [cluster], or in hosts.toml)'
        )
    if wanted != "cpu" and local_rank >= _count(wanted):
        raise UserError(
            f"{wanted}:{local_rank} is this rank's device, but of {wanted} it sees {_count(wanted)}: start fewer ranks "
            f'on this host, or set device = "auto" so that further ranks use the CPU'
        )
    return _BACKENDS[wanted](local_rank)


def best_dtype(ranks: list[tuple[str, list[str]]]) -> tuple[str, str]:
    """(compute dtype for all ranks, the reason), from each rank's (backend name, dtypes).

    Accelerators decide: bf16 where all of them have it (CPUs always do), else fp16. CPUs alone compute in fp32, which most of them
    do faster than narrow types.
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


def own_cores() -> list[int]:
    """Numbers of the cores this process may run on (a launcher may have bound it to a few)."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def set_threads(threads: int) -> None:
    """Fix torch's CPU threads for this rank (bits of a matrix product may depend on their number)."""
    torch.set_num_threads(threads)


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
    limit = cgroup_free_bytes()
    if limit is not None and limit < memory.available:
        return Memory(limit, f"{_gigabytes(limit)} left under the control group's limit")
    return Memory(
        memory.available,
        f"{_gigabytes(memory.available)} free of {_gigabytes(memory.total)} on the host, after other programs",
    )


def _gigabytes(number: int) -> str:
    return f"{number / 1e9:.1f} GB"


def _processor_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
