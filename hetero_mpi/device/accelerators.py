"""The kinds of devices, best first, and which device a rank opens."""

from __future__ import annotations

import torch

from hetero_mpi.device.backend import Backend
from hetero_mpi.util.errors import UserError
from hetero_mpi.util.plug_ins import plug_in, plug_in_names

FOLDER = "hetero_mpi.device.backends"
_MODULES = sorted((plug_in(FOLDER, name) for name in plug_in_names(FOLDER)), key=lambda module: module.PREFERENCE)
BACKENDS: dict[str, type[Backend]] = {kind.name: kind for kind in (*(module.BACKEND for module in _MODULES), Backend)}
"""Best first; the CPU is always last."""


def available() -> list[str]:
    """Backends this torch build and this machine offer, best first."""
    return [name for name in BACKENDS if usable(name)]


def usable(name: str) -> tuple[int, ...]:
    """Indices of the devices of a kind that ranks take unless told otherwise."""
    kind = BACKENDS[name]
    left_out = set(kind.unusable()) | kind.only_by_name()
    return tuple(index for index in range(kind.count()) if index not in left_out)


def visible_devices(wanted: str) -> tuple[str, dict[int, str]]:
    """(the backend that ``wanted`` means here, index of each of its usable GPUs -> what tells it from others of this host)."""
    name = available()[0] if wanted == "auto" else wanted
    if name == "cpu":
        return name, {}
    return name, {index: BACKENDS[name](index).identity() for index in usable(name)}


def open_backend(wanted: str, index: int | None = None) -> Backend:
    """The backend of this rank, its device made current in this thread.

    ``index``: the GPU's number (``choice.device_of``); None: there is none, or other ranks take all that there are.

    :raises UserError: ``wanted`` is not to be had here.
    """
    if wanted == "auto":
        wanted = available()[0] if index is not None else "cpu"
    kind, index = BACKENDS[wanted], 0 if wanted == "cpu" else index
    reasons = kind.unusable()
    if kind.count() == 0:
        raise UserError(
            "device.unavailable",
            f"device {wanted!r} is asked for, but this host's torch {torch.__version__} offers {', '.join(available())}; "
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
