"""Backend for Apple GPUs."""

import os
import platform

import torch

from hetero_mpi.device.backend import Backend, Memory, gigabytes, host_memory, processor_name

PREFERENCE = 4


class MpsBackend(Backend):
    """Backend for Apple GPUs, which share the memory of the host."""

    name = "mps"
    torch_type = "mps"
    _peak_bytes = 0

    @classmethod
    def count(cls) -> int:
        return int(torch.backends.mps.is_available())

    def make_current(self) -> None:
        # Before macOS 26 bitsandbytes unpacks NF4 by plain torch functions, which would be recompiled for every shape.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

    def description(self) -> str:
        return f"{processor_name()} GPU"

    def architecture(self) -> str:
        return f"macOS {platform.mac_ver()[0]}"

    def _free_memory(self) -> Memory:
        limit, host = int(torch.mps.recommended_max_memory()), host_memory()
        metal = Memory(limit, f"{gigabytes(limit)} of host memory (Metal's recommended limit)")
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
        """Update the peak, as Metal reports only current usage. Every action of a step calls this through ``synchronize``."""
        self._peak_bytes = max(self._peak_bytes, self.used_bytes())

    def used_bytes(self) -> int:
        return int(torch.mps.driver_allocated_memory())

    def free_unused(self) -> None:
        super().free_unused()
        torch.mps.empty_cache()

    def seed(self, seed: int) -> None:
        super().seed(seed)
        torch.mps.manual_seed(seed)


BACKEND = MpsBackend
