"""``python -m hetero_mpi.device.look``: one JSON line about torch and the devices it offers in this environment.

A process of its own, because a torch build that does not fit its driver may end the process that imports it.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetero_mpi.device.backend import Backend


def look() -> dict[str, Any]:
    """``version``; ``builds``: backends this torch was built for; ``devices``; ``errors``: backend, or one device of it such as
    ``cuda:1`` -> why it does not start."""
    import torch

    from hetero_mpi.device.accelerators import BACKENDS, available, usable

    accelerator = "rocm" if torch.version.hip else "cuda" if torch.version.cuda else None
    builds = [accelerator] if accelerator is not None else []
    builds += ["xpu"] if getattr(torch.version, "xpu", None) else []
    builds += ["mps"] if torch.backends.mps.is_built() else []
    devices, errors = [], {}
    for name in available():
        for index in usable(name):
            try:  # a device that is full, or held by another program, must not hide the others
                devices.append(_seen(BACKENDS[name](index)))
            except Exception as error:
                errors[f"{name}:{index}"] = " ".join(str(error).split())
    for name, kind in BACKENDS.items():
        errors |= {f"{name}:{index}": reason for index, reason in kind.unusable().items()}
    found = {device["backend"] for device in devices}
    errors |= {name: _error(name) for name in builds if name not in found}
    return {"version": torch.__version__, "builds": builds, "devices": devices, "errors": errors}


def _seen(backend: Backend) -> dict[str, Any]:
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
    """What torch says when the backend is started all the same; "" if it says nothing."""
    import torch

    if name == "mps":
        return ""
    try:
        (torch.xpu if name == "xpu" else torch.cuda).init()
    except Exception as error:  # whatever a driver may say
        return " ".join(str(error).split())
    return ""


def main() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        print(json.dumps(look()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
