"""A device with its own memory, as far as copies are concerned: they end later, in a thread of their own, in their order."""

import queue
import threading
import time

import torch

from hetero_mpi.device.backend import Backend, Copied, Copying

LATE_S = 1e-3
"""How long each copy takes."""


class _Late:
    def __init__(self) -> None:
        self.ended = threading.Event()

    def done(self) -> bool:
        return self.ended.is_set()

    def wait(self) -> None:
        assert self.ended.wait(60), "a copy that does not end"

    def hold_compute(self) -> None:
        self.wait()


class LateCopying(Copying):
    """Whoever reads too early reads 0xFF."""

    beside = True

    def __init__(self) -> None:
        self._begun: queue.SimpleQueue[tuple[torch.Tensor, torch.Tensor, _Late]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> Copied:
        late = _Late()
        to.fill_(255)
        self._begun.put((to, source, late))
        return late

    def _run(self) -> None:
        while True:
            to, source, late = self._begun.get()
            time.sleep(LATE_S)
            to.copy_(source)
            late.ended.set()


class LateBackend(Backend):
    """Computes on the CPU, but tensors that come and go are copied."""

    def __init__(self) -> None:
        super().__init__()
        self.device = torch.device("cpu", 0)  # another device than HOST

    def copying(self) -> Copying:
        return LateCopying()
