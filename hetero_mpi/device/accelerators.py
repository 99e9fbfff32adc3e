"""Backends by preference, and the device that a rank opens."""

from __future__ import annotations

import torch

from hetero_mpi.device.backend import Backend
from hetero_mpi.util.errors import UserError
from hetero_mpi.util.plug_ins import plug_in, plug_in_names

FOLDER = "hetero_mpi.device.backends"
_MODULES = sorted((plug_in(FOLDER, name) for name in plug_in_names(FOLDER)), key=lambda module: module.PREFERENCE)
BACKENDS: dict[str, type[Backend]] = {kind.name: kind for kind in (*(module.BACKEND for module in _MODULES), Backend)}
"""Name -> backend, best first; the CPU is always last."""


def available() -> list[str]:
    """Backends that this torch build and this machine support, best first."""
    return [name for name in BACKENDS if usable(name)]


def usable(name: str) -> tuple[int, ...]:
    """Indices of the devices of a backend that ranks use by default."""
    kind = BACKENDS[name]
    left_out = set(kind.unusable()) | kind.only_by_name()
    return tuple(index for index in range(kind.count()) if index not in left_out)


def visible_devices(wanted: str) -> tuple[str, dict[int, str]]:
    """Resolve ``wanted`` to a backend, and map the index of each of its usable GPUs to the GPU's identity on this host."""
    name = available()[0] if wanted == "auto" else wanted
    if name == "cpu":
        return name, {}
    return name, {index: BACKENDS[name](index).identity() for index in usable(name)}


def open_backend(wanted: str, index: int | None = None) -> Backend:
    """Open the backend of this rank and make its device current in this thread.

    ``index``: number of the GPU (``choice.device_of``); None if there is no GPU for this rank.

    Raises UserError: ``wanted`` is not available on this host.
    """
    if wanted == "auto":
        wanted = available()[0] if index is not None else "cpu"
    kind, index = BACKENDS[wanted], 0 if wanted == "cpu" else index
    reasons = kind.unusable()
    if kind.count() == 0:
        raise UserError(
            "device.unavailable",
            f"device {wanted!r} is not available: torch {torch.__version__} on this host supports {', '.join(available())}; "
            f'install the torch build for that device, or set device = "auto" (in [cluster], or in hosts.toml)',
        )
    if index in reasons or (index is None and not usable(wanted)):
        raise UserError("device.unusable", f"device {wanted!r} cannot be used: {'; '.join(reasons.values())}")
    if index is None or index >= kind.count():
        named = f"A {wanted} device" if index is None else f"{wanted}:{index}"
        raise UserError(
            "device.too_few",
            f"{named} is to be this rank's, but of {wanted} it sees {kind.count()}: start fewer ranks on this host, "
            f'or set device = "auto" so that further ranks use the CPU',
        )
    backend = kind(index)
    backend.make_current()
    return backend
