"""Copies between host memory and a device, beside what the device computes.

A tensor is copied piece by piece, each as soon as it can be, while other pieces travel between hosts. Nothing here waits for the
whole device.
"""

from __future__ import annotations

from typing import Any

import torch


class Copied:
    """A copy that was begun; this one has ended."""

    def done(self) -> bool:
        """Has it ended? Any thread may ask, at any time."""
        return True

    def wait(self) -> None:
        """Return when it has ended."""

    def hold_compute(self) -> None:
        """What this thread gives the device from now on begins after it."""


class Copying:
    """Copies that have ended when they return: in host memory, and where a device has one queue for everything (MPS)."""

    beside = False
    """May any thread begin a copy, beside what the device computes?"""

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
