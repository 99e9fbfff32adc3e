"""GPU backends, one module per vendor; ``[cluster] device`` accepts the name of any module in this folder.

A module defines ``BACKEND``, a subclass of ``Backend`` (usually of ``Accelerator``) named like the module. Every rank imports all
modules, whatever its torch build, so only methods may use vendor-specific parts of torch, and ``count`` returns 0 if these are
missing. "auto" chooses the backend with the lowest ``PREFERENCE`` that has a device. The CPU (``Backend`` itself) comes last.
"""

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
"""Maps each reading to a file in the device's folder and its unit. The amdgpu driver has all of these files, others some."""


class Accelerator(Backend):
    """Base class for backends whose ``torch.<type>`` module has the functions of ``torch.cuda``."""

    visibility: tuple[str, ...] = ()
    """Environment variables that list the devices visible to a process."""
    other_kernels = ""
    """Hint for the user about other kernels that may run on an unsupported device."""
    _refused = False
    """Whether a failure to pin memory has already been reported."""

    @classmethod
    def module(cls) -> Any:
        """Return ``torch.cuda`` or its counterpart for this backend."""
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
        """Describe the device if this torch build has no kernels for it; otherwise return None."""
        return None

    def _properties(self) -> Any:
        return self.module().get_device_properties(self.device)

    def make_current(self) -> None:
        self.module().set_device(self.device)
        # Neither TF32 nor accumulation in reduced precision: GPUs differ from CPUs by rounding only.
        torch.backends.cudnn.allow_tf32 = False
        products = torch.backends.cuda.matmul
        products.allow_tf32 = False
        products.allow_bf16_reduced_precision_reduction = False
        products.allow_fp16_reduced_precision_reduction = False

    def identity(self) -> str:
        properties = self._properties()
        uuid, bus = (str(getattr(properties, name, "")) for name in ("uuid", "pci_bus_id"))
        hidden = [f"{name}={os.environ[name]}" for name in self.visibility if name in os.environ]
        # MIG slices may share the GPU's uuid, and some GPUs have none (GPU-XX): visibility distinguishes them.
        doubtful = not uuid or "XX" in uuid or any("MIG" in text for text in hidden)
        visibility = [str(self.index), *hidden] if doubtful else []
        return " ".join(filter(None, [self.name, uuid, bus, *visibility]))

    def description(self) -> str:
        return str(self.module().get_device_name(self.device))

    def architecture(self) -> str:
        properties = self._properties()
        names = ("gcnArchName", "architecture", "driver_version")  # AMD; Intel
        return ", ".join(str(getattr(properties, name)) for name in names if hasattr(properties, name))

    def _total_and_free(self) -> tuple[int, int]:
        total = int(self._properties().total_memory)
        try:
            free, total = self.module().mem_get_info(self.device)
        except RuntimeError:  # Intel's integrated GPUs (torch 2.7 to 2.14: pytorch#159728)
            free = total - self.module().memory_reserved(self.device)
        return int(total), int(free)

    def _free_memory(self) -> Memory:
        (total, free), reserved = self._total_and_free(), int(self.module().memory_reserved(self.device))
        if self.shares_host_memory():
            host = host_memory()  # the driver counts the system's file cache as used (vllm#40295); the system does not
            return host if host.usable_bytes < total else Memory(total, f"{gigabytes(total)} on the device")
        foreign = max(0, total - free - reserved)
        reason = f"{gigabytes(free + reserved)} free of {gigabytes(total)} on the device"
        if foreign > total // 100:
            reason += f", {gigabytes(foreign)} used by its runtime and other programs"
        return Memory(free + reserved, reason)

    def _integrated(self) -> bool:
        return bool(getattr(self._properties(), "is_integrated", False))

    def shares_host_memory(self) -> bool:
        # An integrated GPU with more memory than the system has dedicated memory, reserved by the firmware.
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
        # From the vendor's library through torch (pynvml, amdsmi), else from the driver's files. Both are optional and may be slow,
        # so they are not read in the critical path of a step.
        module, readings = self.module(), dict[str, float]()
        units = {"busy": 0.01, "watts": 1e-3 if self.name == "cuda" else 1.0, "celsius": 1.0}
        for figure, function in _LIBRARY.items():
            with contextlib.suppress(Exception):  # no library, no such function of this vendor, a slice of a GPU
                readings[figure] = units[figure] * getattr(module, function)(self.device)
        if len(readings) < len(_FILES):
            with contextlib.suppress(Exception):  # no PCI device, or torch does not know its address
                of = module.get_device_properties(self.device)
                folder = PCI_DEVICES / f"{of.pci_domain_id:04x}:{of.pci_bus_id:02x}:{of.pci_device_id:02x}.0"
                readings = _read_sensor_files(folder) | readings
        return readings

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
        with self.module().device(self.device):  # else the call would open a context on device 0
            error = int(self.module().cudart().cudaHostRegister(address, memory.nbytes, 0))
            if error == 0:
                weakref.finalize(memory, self._unpin, address).atexit = False
                return
            # The next kernel of this thread raises the pending error.
            with contextlib.suppress(RuntimeError):
                torch.ones(1, device=self.device)
        if not self._refused:
            text = "%s of host memory could not be pinned (cudaHostRegister error %d): copies between %s and it take longer"
            _LOG.warning(text, gigabytes(memory.nbytes), error, self.device)
        self._refused = True

    def _unpin(self, address: int) -> None:
        with self.module().device(self.device):
            self.module().cudart().cudaHostUnregister(address)

    def shares_keys(self, dtype: torch.dtype) -> bool:
        # Without flash attention (CUDA below 8.0, fp32, many AMD GPUs) torch 2.13 has a memory-efficient kernel only for equal
        # numbers of query and key heads. torch itself reports which kernel it would use.
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


def _read_sensor_files(folder: Path) -> dict[str, float]:
    """Read the sensors from the driver's files in ``folder``."""
    readings = dict[str, float]()
    for figure, (pattern, unit) in _FILES.items():
        for path in sorted(folder.glob(pattern)):
            with contextlib.suppress(OSError, ValueError):
                readings.setdefault(figure, unit * int(path.read_text()))
    return readings
