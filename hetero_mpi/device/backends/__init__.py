"""GPUs behind the interface of ``Backend``, a module for each kind: ``[cluster] device`` takes the name of any file in this folder.

A module holds ``BACKEND``, a class of a ``Backend`` that is named as the module, mostly of an ``Accelerator``. It is imported on
every rank, whatever torch is installed: what its torch lacks may be asked for in methods alone, and ``count`` is 0 then.
"auto" takes the kind of the lowest ``PREFERENCE`` that has a device; the CPU, which is ``Backend`` itself, comes last.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch.nn.attention import SDPBackend

from hetero_mpi.comm import huge_pages
from hetero_mpi.device.backend import (
    Backend,
    Copying,
    Mark,
    Memory,
    RecordedMark,
    StreamCopying,
    gigabytes,
    host_memory,
)

_LOG = logging.getLogger(__name__)
PCI_DEVICES = Path("/sys/bus/pci/devices")
_LIBRARY = {"busy": "utilization", "watts": "power_draw", "celsius": "temperature"}
_FILES = {
    "busy": ("gpu_busy_percent", 0.01),
    "watts": ("hwmon/hwmon*/power1_[ai]*", 1e-6),
    "celsius": ("hwmon/hwmon*/temp1_input", 1e-3),
}
"""Figure -> the driver's file below the device (amdgpu, and what of it others have), and its unit."""


class Accelerator(Backend):
    """Devices behind a ``torch.<type>`` module with the functions of ``torch.cuda``, most of them with memory of their own."""

    visibility: tuple[str, ...] = ()
    """Environment variables that choose which devices a process sees."""
    other_kernels = ""
    """Words about another way to kernels for such a device."""
    _refused = False
    """True once the driver has refused to pin memory, which is told once."""

    @classmethod
    def module(cls) -> Any:
        """``torch.cuda`` or its like."""
        return getattr(torch, cls.torch_type)

    @classmethod
    def count(cls) -> int:
        module = getattr(torch, cls.torch_type, None)
        return int(module.device_count()) if module is not None and module.is_available() else 0

    @classmethod
    def unusable(cls) -> dict[int, str]:
        facts = {index: cls(index)._without_kernels() for index in range(cls.count())}
        return {
            index: f"{fact}, and torch {torch.__version__} has kernels for {', '.join(torch.cuda.get_arch_list())} only; install a "
            f"build that has them (docs/devices.md, Which torch for which GPU){cls.other_kernels}"
            for index, fact in facts.items()
            if fact is not None
        }

    def _without_kernels(self) -> str | None:
        """Which device it is, where torch has no kernels for it."""
        return None

    def _properties(self) -> Any:
        return self.module().get_device_properties(self.device)

    def make_current(self) -> None:
        self.module().set_device(self.device)
        _set_precision()

    def identity(self) -> str:
        properties = self._properties()
        uuid, bus = (str(getattr(properties, name, "")) for name in ("uuid", "pci_bus_id"))
        hidden = [f"{name}={os.environ[name]}" for name in self.visibility if name in os.environ]
        # Slices of one GPU may share the GPU's uuid, some GPUs have none (GPU-XX): what the process was shown tells them apart.
        doubtful = not uuid or "XX" in uuid or any("MIG" in text for text in hidden)
        own = [str(self.index), *hidden] if doubtful else []
        return " ".join(filter(None, [self.name, uuid, bus, *own]))

    def description(self) -> str:
        return str(self.module().get_device_name(self.device))

    def architecture(self) -> str:
        properties = self._properties()
        names = ("gcnArchName", "architecture", "driver_version")  # of AMD's; of Intel's
        return ", ".join(str(getattr(properties, name)) for name in names if hasattr(properties, name))

    def _total_and_free(self) -> tuple[int, int]:
        total = int(self._properties().total_memory)
        try:
            free, total = self.module().mem_get_info(self.device)
        except RuntimeError:  # Intel's integrated GPUs cannot be asked (torch 2.7 to 2.14: pytorch#159728)
            free = total - self.module().memory_reserved(self.device)
        return int(total), int(free)

    def _free_memory(self) -> Memory:
        (total, free), own = self._total_and_free(), int(self.module().memory_reserved(self.device))
        if self.shares_host_memory():
            host = host_memory()  # the driver counts the system's file cache as used (vllm#40295); the system does not
            return host if host.usable_bytes < total else Memory(total, f"{gigabytes(total)} on the device")
        others = max(0, total - free - own)
        reason = f"{gigabytes(free + own)} free of {gigabytes(total)} on the device"
        if others > total // 100:
            reason += f", {gigabytes(others)} taken by its runtime and by other programs"
        return Memory(free + own, reason)

    def _integrated(self) -> bool:
        return bool(getattr(self._properties(), "is_integrated", False))

    def shares_host_memory(self) -> bool:
        # An integrated GPU with more memory than the system sees was given it for good (by the firmware), beside the system's own.
        return self._integrated() and self._total_and_free()[0] <= psutil.virtual_memory().total

    def synchronize(self) -> None:
        self.module().synchronize(self.device)

    def finish_compute(self) -> None:
        self.module().current_stream(self.device).synchronize()

    def mark(self) -> Mark:
        event = self.module().Event(enable_timing=True)
        event.record(self.module().current_stream(self.device))
        return RecordedMark(event)

    def copying(self) -> Copying:
        return StreamCopying(self.module(), self.device)

    def begin_peak(self) -> None:
        self.module().reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> int:
        return int(self.module().max_memory_allocated(self.device))

    def used_bytes(self) -> int:
        return int(self.module().memory_allocated(self.device))

    def sensors(self) -> dict[str, float]:
        # The vendor's library is asked, by torch's own calls (pynvml, amdsmi), and where that tells nothing the driver's files.
        # Neither is required, and either may take long: nobody reads them on the path of a step.
        module, found = self.module(), dict[str, float]()
        units = {"busy": 0.01, "watts": 1e-3 if self.name == "cuda" else 1.0, "celsius": 1.0}
        for figure, function in _LIBRARY.items():
            with contextlib.suppress(Exception):  # no library, no such function of this vendor, a slice of a GPU
                found[figure] = units[figure] * getattr(module, function)(self.device)
        if len(found) < len(_FILES):
            with contextlib.suppress(Exception):  # no PCI device, or torch does not tell which
                of = module.get_device_properties(self.device)
                place = PCI_DEVICES / f"{of.pci_domain_id:04x}:{of.pci_bus_id:02x}:{of.pci_device_id:02x}.0"
                found = _from_files(place) | found
        return found

    def free_unused(self) -> None:
        super().free_unused()
        self.module().empty_cache()  # other ranks and programs may need it

    def host_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        # torch rounds pinned blocks up to a power of two and never returns them; XPU has no other way to pin.
        if math.prod(shape) * dtype.itemsize < huge_pages.MIN_HUGE_PAGE_BYTES or not hasattr(self.module(), "cudart"):
            return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)
        return super().host_buffer(shape, dtype)

    def _pin(self, memory: np.ndarray) -> None:
        address = memory.ctypes.data
        with self.module().device(self.device):  # without a device of its own the call would open a context on device 0
            error = int(self.module().cudart().cudaHostRegister(address, memory.nbytes, 0))
            if error == 0:
                weakref.finalize(memory, self._unpin, address).atexit = False
                return
            # The error waits for the next kernel of this thread, which would raise it.
            with contextlib.suppress(RuntimeError):
                torch.ones(1, device=self.device)
        if not self._refused:
            text = "%s of host memory could not be pinned (error %d of cudaHostRegister): copies between %s and it take longer"
            _LOG.warning(text, gigabytes(memory.nbytes), error, self.device)
        self._refused = True

    def _unpin(self, address: int) -> None:
        with self.module().device(self.device):
            self.module().cudart().cudaHostUnregister(address)

    def shares_keys(self, dtype: torch.dtype) -> bool:
        # Without flash attention (CUDA below 8.0, fp32 everywhere, many of AMD's GPUs) torch has a kernel that keeps no scores of
        # all pairs of tokens for as many heads of keys as of queries only (torch 2.13). It says itself which kernel it would take.
        queries, shared = (torch.empty((1, heads, 128, 64), dtype=dtype, device=self.device) for heads in (2, 1))
        fused, fused_repeated = (
            torch._fused_sdp_choice(queries, keys, keys, None, 0.0, True, enable_gqa=keys is shared)
            != SDPBackend.MATH.value
            for keys in (shared, queries)
        )
        return fused or not fused_repeated

    def seed(self, seed: int) -> None:
        super().seed(seed)
        # manual_seed() means the thread's current device.
        self.module().default_generators[self.index].manual_seed(seed)


def _set_precision() -> None:
    """fp32 means fp32, and sums of narrow products are in fp32, in parts too: so a GPU differs from a CPU by rounding alone. By
    default torch convolves fp32 in TF32 (10 bits of mantissa) and lets cuBLAS add parts of a narrow product in its own dtype."""
    torch.backends.cudnn.allow_tf32 = False
    products = torch.backends.cuda.matmul
    products.allow_tf32 = False
    products.allow_bf16_reduced_precision_reduction = False
    products.allow_fp16_reduced_precision_reduction = False


def _from_files(place: Path) -> dict[str, float]:
    """Figures by the driver's files below ``place``."""
    found = dict[str, float]()
    for figure, (pattern, unit) in _FILES.items():
        for path in sorted(place.glob(pattern)):
            with contextlib.suppress(OSError, ValueError):
                found.setdefault(figure, unit * int(path.read_text()))
    return found
