"""Backend for Intel GPUs."""

import re

from hetero_mpi.device.backends import Accelerator

PREFERENCE = 3


class XpuBackend(Accelerator):
    name = "xpu"
    compiles_by_default = True
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
        # Before torch 2.13 only the name tells: "Arc(TM) A770 Graphics" has dedicated memory, "Arc(TM) Graphics" does not.
        name = self.description()
        return "Graphics" in name and re.search(r"\b[AB]\d{2,3}", name) is None


BACKEND = XpuBackend
