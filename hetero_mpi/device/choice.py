"""Which device a rank takes: what the job says, what its host says, and which GPUs its neighbours take. No torch here.

Local rank i takes GPU i of those that it sees. Ranks of one host may see different GPUs: two Pythons whose torch builds are
for different vendors, or a launcher that gives each rank a GPU of its own. So GPUs are counted among the ranks that see the
same ones.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetero_mpi.util.errors import UserError
from hetero_mpi.util.plug_ins import plug_in_names

DEVICE_VARIABLE = "HETERO_MPI_DEVICE"
"""Environment variable with the device of a host's ranks; goes before ``[cluster] device``, which is about all hosts."""
CORES_PER_GPU = 2.0
"""Its rank's two threads: one gives work to the GPU, the other moves messages."""
_GPUS = plug_in_names("hetero_mpi.device.backends")
DEVICE = re.compile(rf"auto|cpu|({'|'.join(_GPUS)})(:\d+)?")
DEVICE_RULE = ", ".join(f'"{name}"' for name in ("auto", "cpu", *_GPUS)) + ', or one GPU of them, such as "cuda:1"'


@dataclass(frozen=True)
class Wish:
    """A device that is asked for."""

    name: str
    """``auto`` or a backend's name."""
    gpu: int | None = None
    """Which one; None: the next that no lower rank takes."""


@dataclass(frozen=True)
class VisibleDevices:
    """The GPUs that a rank sees before it takes one."""

    host: str
    backend: str
    devices: tuple[tuple[int, str], ...]
    """Number of every GPU it may take -> what tells it from others of the host."""
    gpu: int | None
    """The number of the one it was told to take."""


def wish(job_device: str, environment: Mapping[str, str]) -> Wish:
    """The device that this rank shall compute on: ``DEVICE_VARIABLE`` of its environment, else the job's ``[cluster] device``.

    :raises UserError: the variable holds no device.
    """
    text = environment.get(DEVICE_VARIABLE) or job_device
    if not DEVICE.fullmatch(text):
        raise UserError(
            "device.environment", f"The environment variable {DEVICE_VARIABLE} must be {DEVICE_RULE}; it is {text!r}."
        )
    name, _, gpu = text.partition(":")
    return Wish(name, int(gpu) if gpu else None)


def device_of(rank: int, places: Sequence[VisibleDevices]) -> int | None:
    """The number of the GPU that ``rank`` takes, given what all ranks see; None where lower ranks take all of them."""
    own = places[rank]
    if own.gpu is not None:
        return own.gpu
    lower = sum(place == own for place in places[:rank])
    return own.devices[lower][0] if lower < len(own.devices) else None


@dataclass(frozen=True)
class Cores:
    """The cores that a rank may compute on."""

    host: str
    numbers: tuple[int, ...]
    """Numbers of the cores that it may run on (a launcher may have bound it to a few)."""
    quota: float | None
    """Cores' worth of time that its host's ranks may use together; None: no limit."""
    computes: bool
    """Its processor is its device; else it only feeds a GPU."""


def cores_of(rank: int, ranks: Sequence[Cores]) -> float:
    """The cores that ``rank`` can count on: every core counts 1 / the ranks of its host that may run on it, and less where a quota
    allows their cores not all of the time.

    A rank that feeds a GPU leaves what it has beyond ``CORES_PER_GPU`` to those ranks that compute on the same cores.
    """
    own = ranks[rank]
    users = Counter(core for one in ranks if one.host == own.host for core in one.numbers)
    allowed = 1.0 if own.quota is None else min(1.0, own.quota / len(users))
    alike = [one for one in ranks if (one.host, one.numbers) == (own.host, own.numbers)]
    computing = sum(one.computes for one in alike)
    equal = allowed * sum(1 / users[core] for core in own.numbers)
    if computing == 0:
        return equal
    spared = max(0.0, equal - CORES_PER_GPU)
    return equal + spared * (len(alike) - computing) / computing if own.computes else equal - spared
