"""GPUs behind the interface of ``Backend``: CUDA, ROCm, XPU (Intel) and MPS (Apple), and which device a rank takes."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import platform
import re
import sys
import weakref
from collections.abc import Sequence
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
    processor_name,
)
from hetero_mpi.device.sensors import sensors
from hetero_mpi.device.shortage import OTHER_KERNELS, has_kernels
from hetero_mpi.util.errors import UserError

os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # CUDA's own order is by speed; nvidia-smi numbers them so

_LOG = logging.getLogger(__name__)


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
        return sensors(self.module(), self.device, self.name)

    def free_unused(self) -> None:
        super().free_unused()
        self.module().empty_cache()  # other ranks and programs may need it

    def host_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        # torch rounds pinned blocks up to a power of two and never returns them; XPU has no other way to pin.
        if math.prod(shape) * dtype.itemsize < huge_pages.SMALLEST_BYTES or not hasattr(self.module(), "cudart"):
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


class CudaBackend(Accelerator):
    name = "cuda"
    torch_type = "cuda"
    visibility = ("CUDA_VISIBLE_DEVICES",)

    @classmethod
    def count(cls) -> int:
        return 0 if torch.version.hip else super().count()

    def make_current(self) -> None:
        super().make_current()
        # With a mask its backward gives gradients that are no numbers, from torch 2.11 on (pytorch#196678).
        torch.backends.cuda.enable_cudnn_sdp(False)
        settled = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys()  # the second before torch 2.9
        if sys.platform == "linux" and not settled:
            self._expand_segments()

    def _expand_segments(self) -> None:
        """Let blocks of memory grow: batches of changing length leave pieces else, which fit no later one."""
        settings = getattr(torch._C, "_accelerator_setAllocatorSettings", None)  # from torch 2.9 on
        settings = settings or torch.cuda.memory._set_allocator_settings
        settings("expandable_segments:True")
        try:
            torch.empty(1, device=self.device)
        except RuntimeError:  # WSL and some virtual GPUs have no such memory
            settings("expandable_segments:False")

    def _without_kernels(self) -> str | None:
        capability = torch.cuda.get_device_capability(self.index)
        if has_kernels(capability, torch.cuda.get_arch_list()):
            return None
        return f"{torch.cuda.get_device_name(self.index)} has compute capability {'.'.join(map(str, capability))}"

    def architecture(self) -> str:
        major, minor = torch.cuda.get_device_capability(self.device)
        return f"sm_{major}{minor}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"

    def dtypes(self) -> tuple[str, ...]:
        # bf16 arithmetic starts with compute capability 8.0; older GPUs only emulate it, far too slowly to train with.
        capability = torch.cuda.get_device_capability(self.device)
        return ("fp32", "bf16", "fp16") if capability >= (8, 0) else ("fp32", "fp16")


def _set_precision() -> None:
    """fp32 means fp32, and sums of narrow products are in fp32, in parts too: so a GPU differs from a CPU by rounding alone. By
    default torch convolves fp32 in TF32 (10 bits of mantissa) and lets cuBLAS add parts of a narrow product in its own dtype."""
    torch.backends.cudnn.allow_tf32 = False
    products = torch.backends.cuda.matmul
    products.allow_tf32 = False
    products.allow_bf16_reduced_precision_reduction = False
    products.allow_fp16_reduced_precision_reduction = False


class RocmBackend(Accelerator):
    """AMD GPUs: torch's HIP build presents them under the name ``cuda``."""

    name = "rocm"
    torch_type = "cuda"
    visibility = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
    other_kernels = OTHER_KERNELS

    @classmethod
    def count(cls) -> int:
        return super().count() if torch.version.hip else 0

    def chip(self) -> str:
        """Such as ``gfx1100``; "" where torch does not tell."""
        return str(getattr(self._properties(), "gcnArchName", "")).split(":")[0]

    def dtypes(self) -> tuple[str, ...]:
        # Older ones have no bf16 products; torch says that all have.
        native = re.match(r"gfx(908|90a|94|950|11|12)", self.chip())
        return ("fp32", "bf16", "fp16") if native else ("fp32", "fp16")

    def _without_kernels(self) -> str | None:
        built, own = torch.cuda.get_arch_list(), self.chip()
        return f"{self.description()} is a {own}" if built and own and own not in built else None

    def architecture(self) -> str:
        return f"{super().architecture()}, HIP {torch.version.hip}"

    @classmethod
    def only_by_name(cls) -> set[int]:
        """The processor's own GPU beside a discrete one: too slow to take a rank that could have the processor."""
        integrated = {index for index in range(cls.count()) if cls(index)._integrated()}
        return integrated if len(integrated) < cls.count() else set()


class XpuBackend(Accelerator):
    name = "xpu"
    torch_type = "xpu"
    visibility = ("ZE_AFFINITY_MASK",)

    def dtypes(self) -> tuple[str, ...]:
        bf16 = getattr(self._properties(), "has_bfloat16_conversions", True)
        return ("fp32", "bf16", "fp16") if bf16 else ("fp32", "fp16")

    def _integrated(self) -> bool:
        properties = self._properties()
        for name in ("is_integrated", "is_integrated_gpu"):
            if hasattr(properties, name):
                return bool(getattr(properties, name))
        # Before torch 2.13 only the name tells: "Arc(TM) A770 Graphics" has memory of its own, "Arc(TM) Graphics" has not.
        name = self.description()
        return "Graphics" in name and re.search(r"\b[AB]\d{2,3}", name) is None


class MpsBackend(Backend):
    """Apple GPUs share the host's memory."""

    name = "mps"
    torch_type = "mps"
    _peak_bytes = 0

    @classmethod
    def count(cls) -> int:
        return int(torch.backends.mps.is_available())

    def make_current(self) -> None:
        # Before macOS 26 bitsandbytes unpacks NF4 by plain torch functions, which would be compiled anew for every shape.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

    def description(self) -> str:
        return f"{processor_name()} GPU"

    def architecture(self) -> str:
        return f"macOS {platform.mac_ver()[0]}"

    def _free_memory(self) -> Memory:
        limit, host = int(torch.mps.recommended_max_memory()), host_memory()
        metal = Memory(limit, f"{gigabytes(limit)} recommended by Metal, of the host's memory")
        return metal if limit < host.usable_bytes else host

    def synchronize(self) -> None:
        torch.mps.synchronize()
        self._look()

    def begin_peak(self) -> None:
        self._peak_bytes = 0
        self._look()

    def peak_bytes(self) -> int:
        self._look()
        return self._peak_bytes

    def _look(self) -> None:
        """Metal tells what is in use now only; every action of a step ends with ``synchronize``."""
        self._peak_bytes = max(self._peak_bytes, self.used_bytes())

    def used_bytes(self) -> int:
        return int(torch.mps.driver_allocated_memory())

    def free_unused(self) -> None:
        super().free_unused()
        torch.mps.empty_cache()

    def seed(self, seed: int) -> None:
        super().seed(seed)
        torch.mps.manual_seed(seed)


BACKENDS: dict[str, type[Backend]] = {b.name: b for b in (CudaBackend, RocmBackend, XpuBackend, MpsBackend, Backend)}
"""Best first; the CPU is always last."""


def available() -> list[str]:
    """Backends this torch build and this machine offer, best first."""
    return [name for name in BACKENDS if usable(name)]


def usable(name: str) -> tuple[int, ...]:
    """Indices of the devices of a kind that ranks take unless told otherwise."""
    kind = BACKENDS[name]
    left_out = set(kind.unusable()) | kind.only_by_name()
    return tuple(index for index in range(kind.count()) if index not in left_out)


def visible_devices(wanted: str) -> tuple[str, dict[int, str]]:
    """(the backend that ``wanted`` means here, index of each of its usable GPUs -> what tells it from others of this host)."""
    name = available()[0] if wanted == "auto" else wanted
    if name == "cpu":
        return name, {}
    return name, {index: BACKENDS[name](index).identity() for index in usable(name)}


def open_backend(wanted: str, index: int | None = None) -> Backend:
    """The backend of this rank, its device made current in this thread.

    ``index``: the GPU's number (``choice.device_of``); None: there is none, or other ranks take all that there are.

    :raises UserError: ``wanted`` is not to be had here.
    """
    if wanted == "auto":
        wanted = available()[0] if index is not None else "cpu"
    kind, index = BACKENDS[wanted], 0 if wanted == "cpu" else index
    reasons = kind.unusable()
    if kind.count() == 0:
        raise UserError(
            "device.unavailable",
            f"device {wanted!r} is asked for, but this host's torch {torch.__version__} offers {', '.join(available())}; "
            f'install the torch build for that device, or set device = "auto" (in [cluster], or in hosts.toml)',
        )
    if index in reasons or (index is None and not usable(wanted)):
        raise UserError("device.unusable", f"device {wanted!r} cannot be used: {'; '.join(reasons.values())}")
    if index is None or index >= kind.count():
        named = f"A {wanted} device" if index is None else f"{wanted}:{index}"
        raise UserError(
            "device.too_few",
            f"{named} is to be this rank's, but of {wanted} it sees {kind.count()}: start fewer ranks on this host, "
            f'or set device = "auto" so that further ranks use the CPU',
        )
    backend = kind(index)
    backend.make_current()
    return backend
