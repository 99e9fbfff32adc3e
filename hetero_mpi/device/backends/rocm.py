"""Backend for AMD GPUs."""

import re

import torch

from hetero_mpi.device.backends import Accelerator
from hetero_mpi.device.self_test import OTHER_KERNELS

PREFERENCE = 2


class RocmBackend(Accelerator):
    """Backend for AMD GPUs, which the HIP build of torch calls ``cuda``."""

    name = "rocm"
    compiles_by_default = True
    torch_type = "cuda"
    visibility = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
    other_kernels = OTHER_KERNELS

    @classmethod
    def count(cls) -> int:
        return super().count() if torch.version.hip else 0

    def chip(self) -> str:
        """Return the GPU's architecture, such as ``gfx1100``, or "" if it is unknown."""
        return str(getattr(self._properties(), "gcnArchName", "")).split(":")[0]

    def dtypes(self) -> tuple[str, ...]:
        # Older GPUs have no bf16 matrix products, although torch claims support.
        native = re.match(r"gfx(908|90a|94|950|11|12)", self.chip())
        return ("fp32", "bf16", "fp16") if native else ("fp32", "fp16")

    def _without_kernels(self) -> str | None:
        built, chip = torch.cuda.get_arch_list(), self.chip()
        return f"{self.description()} is a {chip}" if built and chip and chip not in built else None

    def architecture(self) -> str:
        return f"{super().architecture()}, HIP {torch.version.hip}"

    @classmethod
    def only_by_name(cls) -> set[int]:
        """Return the integrated GPUs if there is also a discrete GPU. As a rank they are slower than the CPU."""
        integrated = {index for index in range(cls.count()) if cls(index)._integrated()}
        return integrated if len(integrated) < cls.count() else set()


BACKEND = RocmBackend
