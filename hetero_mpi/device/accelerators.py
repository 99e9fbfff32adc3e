"""The backends in order of preference, and the function with which a rank opens its device."""

import torch

from hetero_mpi.device.backend import Backend
from hetero_mpi.util import units
from hetero_mpi.util.errors import UserError
from hetero_mpi.util.plug_ins import plug_in, plug_in_names

FOLDER = "hetero_mpi.device.backends"
_MODULES = sorted((plug_in(FOLDER, name) for name in plug_in_names(FOLDER)), key=lambda module: module.PREFERENCE)
BACKENDS: dict[str, type[Backend]] = {kind.name: kind for kind in (*(module.BACKEND for module in _MODULES), Backend)}
"""Maps names to backend classes, best first. The CPU is always last."""


def available() -> list[str]:
    """Return the names of the backends that this torch build and machine support, best first."""
    return [name for name in BACKENDS if usable(name)]


def usable(name: str) -> tuple[int, ...]:
    """Return the indices of a backend's devices that ranks use by default."""
    kind = BACKENDS[name]
    left_out = set(kind.unusable()) | kind.only_by_name()
    return tuple(index for index in range(kind.count()) if index not in left_out)


def visible_devices(device: str) -> tuple[str, dict[int, str]]:
    """Resolve ``device`` to a backend; return its name and the identity on this host of each usable GPU, by index."""
    name = available()[0] if device == "auto" else device
    if name == "cpu":
        return name, {}
    return name, {index: BACKENDS[name](index).identity() for index in usable(name)}


def open_backend(name: str, index: int | None = None) -> Backend:
    """Open the backend for this rank and make its device current in this thread.

    ``index`` is the number of the GPU (``choice.gpu_of``), or None if there is no GPU for this rank.

    Raises UserError if the device is not available on this host or cannot be used.
    """
    if name == "auto":
        name = available()[0] if index is not None else "cpu"
    kind, index = BACKENDS[name], 0 if name == "cpu" else index
    reasons = kind.unusable()
    if kind.count() == 0:
        raise UserError(
            "device.unavailable",
            f"device {name!r} is not available: torch {torch.__version__} on this host supports {', '.join(available())}; "
            f'install the torch build for that device, or set device = "auto" (in [cluster], or in hosts.toml)',
        )
    if index in reasons or (index is None and not usable(name)):
        raise UserError("device.unusable", f"device {name!r} cannot be used: {'; '.join(reasons.values())}")
    if index is None or index >= kind.count():
        named = f"a {name} device" if index is None else f"{name}:{index}"
        raise UserError(
            "device.too_few",
            f"this rank needs {named}, but {name} has {units.plural(kind.count(), 'device')} on this host: start fewer ranks, "
            f'or set device = "auto" so that the other ranks use the CPU',
        )
    backend = kind(index)
    backend.make_current()
    return backend


def best_dtype(ranks: list[tuple[str, list[str]]], faster_in_bf16: bool = False) -> tuple[str, str]:
    """Choose the compute dtype for all ranks from the (backend name, dtypes) of each. Returns the dtype and the reason.

    With accelerators, the dtype is bf16 if all of them support it, otherwise fp16. CPU ranks use the same dtype, if necessary with
    matrix products in fp32 (``Backend.products``). CPU-only jobs use fp32, so that losses do not depend on the processors.

    Args:
        faster_in_bf16: Whether every CPU multiplies matrices faster in bf16 than in fp32. The reason then says how to use bf16.
    """
    accelerators = [(rank, name, dtypes) for rank, (name, dtypes) in enumerate(ranks) if name != "cpu"]
    if not accelerators:
        hint = '; a new run with [train] dtype = "bf16" would take 0.4 to 0.9 of the time on these processors'
        return "fp32", f"all ranks are CPUs{hint * faster_in_bf16}"
    without = [f"rank {rank} ({name})" for rank, name, dtypes in accelerators if "bf16" not in dtypes]
    if not without:
        return "bf16", "every device supports it"
    if all("fp16" in dtypes for _, _, dtypes in accelerators):
        return "fp16", f"{', '.join(without)} cannot compute in bf16"
    return "fp32", "the devices have no 16-bit type in common"
