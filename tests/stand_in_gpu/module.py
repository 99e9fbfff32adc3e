"""``torch.standin``: the functions that the program asks of ``torch.cuda``, over ``device.cpp``, with torch.cuda's habits.

Import it once per process, before the first tensor is made on the device.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

from tests.stand_in_gpu.build import NAME, built

TYPE = "standin"
MEMORY_BYTES = 4_000_000_000


def _extension() -> Any:
    spec = importlib.util.spec_from_file_location(NAME, built())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


device = _extension()
"""The C++ side: delays, limits, counters."""
_kernels = torch.library.Library("aten", "IMPL")


def _counted(values: torch.Tensor, bins: int = 100, *ends: float, **named: float) -> torch.Tensor:
    """``histc``, which GPUs have for whole numbers and processors have not."""
    return torch.histc(values.cpu().float(), bins, *ends, **named).to(values.device, values.dtype)


_kernels.impl("histc", _counted, "PrivateUse1")
seeded: list[tuple[int, int]] = []
"""(device, seed) of every generator that was seeded so far."""


def index_of(wanted: Any = None) -> int:
    """A device's number; None: the current one."""
    if wanted is None:
        return int(device.current_device())
    if isinstance(wanted, int):
        return wanted
    index = torch.device(wanted).index
    return int(device.current_device()) if index is None else int(index)


class Stream:
    """A queue of a device. ``number``: of one that exists; None makes a new one."""

    def __init__(self, wanted: Any = None, number: int | None = None) -> None:
        self.device_index = index_of(wanted)
        self.device = torch.device(TYPE, self.device_index)
        self.number = device.new_stream(self.device_index) if number is None else number

    def wait_stream(self, other: Stream) -> None:
        device.wait_for(self.number, other.number, device.added(other.number))

    def wait_event(self, event: Event) -> None:
        device.wait_for(self.number, event.number, event.position)

    def synchronize(self) -> None:
        device.wait(self.number, device.added(self.number))

    def query(self) -> bool:
        return bool(device.is_done(self.number, device.added(self.number)))


class Event:
    """A place in a stream's work."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.number = self.position = 0
        self._timed, self._stamp = enable_timing, lambda: 0.0

    def record(self, stream: Stream | None = None) -> None:
        self.number = (stream or current_stream()).number
        if self._timed:
            self._stamp = device.stamp(self.number)
        self.position = device.added(self.number)

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event to another one; both must have been reached."""
        assert self._timed and end._timed and self.query() and end.query()
        return 1e3 * float(end._stamp() - self._stamp())

    def query(self) -> bool:
        return bool(device.is_done(self.number, self.position))

    def synchronize(self) -> None:
        device.wait(self.number, self.position)


def current_stream(wanted: Any = None) -> Stream:
    index = index_of(wanted)
    return Stream(index, device.current_stream(index))


def set_stream(stream: Stream) -> None:
    """As torch.cuda's: the stream's device becomes the current one, for good, and gets a context."""
    if device.current_device() != stream.device_index:
        device.set_device(stream.device_index)
    device.set_stream(stream.device_index, stream.number)


@contextlib.contextmanager
def _stream(stream: Stream) -> Iterator[None]:
    """As torch.cuda.StreamContext: leaving it makes the device current that was so before, by ``set_stream``."""
    before = current_stream()
    there = current_stream(stream.device_index) if before.device_index != stream.device_index else None
    set_stream(stream)
    try:
        yield
    finally:
        if there is not None:
            set_stream(there)
        set_stream(before)


@contextlib.contextmanager
def _device(wanted: Any) -> Iterator[None]:
    """As torch.cuda.device: leaving it makes no context on the device before."""
    before = device.current_device()
    device.set_device(index_of(wanted))
    try:
        yield
    finally:
        device.maybe_set_device(before)


class _Generator:
    """The device's random numbers come from the host's generator, as its operators are the host's; only seeding is noted."""

    def __init__(self, index: int) -> None:
        self.index = index

    def manual_seed(self, seed: int) -> None:
        seeded.append((self.index, seed))


class _Cudart:
    """``torch.cuda.cudart()``: the calls of the driver that torch passes on. They belong to the current device."""

    @staticmethod
    def cudaHostRegister(address: int, size_bytes: int, flags: int) -> int:
        device.set_device(device.current_device())
        return int(device.register_host(address, size_bytes))

    @staticmethod
    def cudaHostUnregister(address: int) -> int:
        device.set_device(device.current_device())
        return int(device.unregister_host(address))


def _mem_get_info(wanted: Any = None) -> tuple[int, int]:
    return MEMORY_BYTES - device.reserved(index_of(wanted)), MEMORY_BYTES


def _properties(wanted: Any = None) -> types.SimpleNamespace:
    own = {"uuid": f"stand-in-{index_of(wanted)}", "architecture": "host memory"}
    return types.SimpleNamespace(**own, is_integrated=0, total_memory=MEMORY_BYTES)


def _install() -> None:
    torch.utils.rename_privateuse1_backend(TYPE)
    device.register_hooks()
    module: Any = types.ModuleType(f"torch.{TYPE}")
    generators = tuple(_Generator(index) for index in range(device.DEVICES))
    functions: dict[str, Any] = {
        "Stream": Stream,
        "Event": Event,
        "current_stream": current_stream,
        "set_stream": set_stream,
        "stream": _stream,
        "device": _device,
        "current_device": device.current_device,
        "set_device": lambda wanted: device.set_device(index_of(wanted)),
        "synchronize": lambda wanted=None: device.synchronize(index_of(wanted)),
        "default_generators": generators,
        "manual_seed": lambda seed: generators[device.current_device()].manual_seed(seed),
        "manual_seed_all": lambda seed: [generator.manual_seed(seed) for generator in generators],
        "device_count": lambda: device.DEVICES,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
        "get_device_name": lambda wanted=None: f"stand-in GPU {index_of(wanted)}",
        "get_device_properties": _properties,
        "get_rng_state": lambda wanted=None: torch.get_rng_state(),
        "set_rng_state": lambda state, wanted=None: torch.set_rng_state(state),
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "mem_get_info": _mem_get_info,
        "cudart": lambda: _Cudart,
        "memory_reserved": lambda wanted=None: device.reserved(index_of(wanted)),
        "memory_allocated": lambda wanted=None: device.used(index_of(wanted)),
        "max_memory_allocated": lambda wanted=None: device.peak(index_of(wanted)),
        "reset_peak_memory_stats": lambda wanted=None: device.reset_peak(index_of(wanted)),
        "empty_cache": lambda: [device.empty_cache(index) for index in range(device.DEVICES)],
    }
    for name, value in functions.items():
        setattr(module, name, value)
    torch._register_device_module(TYPE, module)
    sys.modules[f"torch.{TYPE}"] = module
    torch.utils.generate_methods_for_privateuse1_backend()


_install()
