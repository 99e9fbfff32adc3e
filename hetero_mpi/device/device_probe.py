"""``python -m hetero_mpi.device.device_probe`` prints one line of JSON about torch and its devices in this environment.

It runs in a separate process, because a torch build that does not match its driver may crash the importing process.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetero_mpi.device.backend import Backend

_WSL_CUDA = Path("/usr/lib/wsl/lib/libcuda.so.1")
"""File that Windows provides in WSL if NVIDIA's driver is installed. ``/dev/dxg`` exists for GPUs of every vendor."""


def devices_seen() -> dict[str, Any]:
    """Return torch's ``version``, its backends (``builds``), the ``devices``, and ``errors`` by backend or device (``cuda:1``)."""
    import torch

    from hetero_mpi.device.accelerators import BACKENDS, available, usable

    accelerator = "rocm" if torch.version.hip else "cuda" if torch.version.cuda else None
    builds = [accelerator] if accelerator is not None else []
    builds += ["xpu"] if getattr(torch.version, "xpu", None) else []
    builds += ["mps"] if torch.backends.mps.is_built() else []
    devices, errors = [], {}
    for name in available():
        for index in usable(name):
            try:  # a device that is full, or used by another program, must not hide other devices
                devices.append(_describe(BACKENDS[name](index)))
            except Exception as error:
                errors[f"{name}:{index}"] = " ".join(str(error).split())
    for name, kind in BACKENDS.items():
        errors |= {f"{name}:{index}": reason for index, reason in kind.unusable().items()}
    working = {device["backend"] for device in devices}
    errors |= {name: _error(name) for name in builds if name not in working}
    return {"version": torch.__version__, "builds": builds, "devices": devices, "errors": errors}


def _describe(backend: Backend) -> dict[str, Any]:
    memory = backend.memory()
    return {
        "backend": backend.name,
        "index": backend.index,
        "name": backend.description(),
        "memory_bytes": memory.usable_bytes,
        "memory": memory.reason,
        "dtypes": list(backend.dtypes()),
    }


def _error(name: str) -> str:
    """Start a backend that has no working device and return torch's error message, or "" if there is no error."""
    import torch

    if name == "mps":
        return ""
    try:
        (torch.xpu if name == "xpu" else torch.cuda).init()
    except Exception as error:  # whatever a driver may say
        return " ".join(str(error).split())
    return ""


def drivers() -> dict[str, str]:
    """Map the loaded kernel drivers (``nvidia``, ``amdgpu``, ``intel``) to their versions, or "yes" if unknown. Without torch."""
    versions = {}
    for name, file in (("nvidia", "/sys/module/nvidia/version"), ("amdgpu", "/sys/module/amdgpu/version")):
        try:
            versions[name] = Path(file).read_text().strip()
        except OSError:
            if Path(file).parent.is_dir():
                versions[name] = "yes"
    if any(Path("/sys/module", name).is_dir() for name in ("xe", "i915")) and Path("/dev/dri").is_dir():
        versions["intel"] = "yes"
    if "nvidia" not in versions and _WSL_CUDA.exists():
        versions["nvidia"] = "of WSL"
    return versions


def main() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        print(json.dumps(devices_seen()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
