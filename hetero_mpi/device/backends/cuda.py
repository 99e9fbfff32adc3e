"""Backend for NVIDIA GPUs."""

import os
import re
import sys
from collections.abc import Sequence

import torch

from hetero_mpi.device.backends import Accelerator

PREFERENCE = 1
os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # the order of nvidia-smi; CUDA's default is by speed


class CudaBackend(Accelerator):
    name = "cuda"
    compiles_by_default = True
    torch_type = "cuda"
    visibility = ("CUDA_VISIBLE_DEVICES",)

    @classmethod
    def count(cls) -> int:
        return 0 if torch.version.hip else super().count()

    def make_current(self) -> None:
        super().make_current()
        # From torch 2.11 on, cuDNN's masked attention produces NaN gradients (pytorch#196678).
        torch.backends.cuda.enable_cudnn_sdp(False)
        settled = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys()  # the second before torch 2.9
        if sys.platform == "linux" and not settled:
            # Batches of varying length fragment a memory without expandable segments.
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


def has_kernels(capability: tuple[int, int], built: Sequence[str]) -> bool:
    """Return whether a CUDA build for the architectures ``built`` supports a GPU of this compute capability.

    Machine code needs a GPU with the same major and at least the same minor number; intermediate code (``compute_``) any later GPU.

    >>> has_kernels((6, 1), ["sm_75", "sm_80", "compute_120"]), has_kernels((8, 6), ["sm_75", "sm_80"])
    (False, True)
    """
    for architecture in built:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)[a-z]?", architecture)
        if match is None:
            continue
        version = int(match[2]), int(match[3])
        if (match[1] == "compute" or version[0] == capability[0]) and version <= tuple(capability):
            return True
    return not built


BACKEND = CudaBackend
