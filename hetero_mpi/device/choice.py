"""Chooses a rank's device from the job, the environment and the GPUs of other ranks on its host. Does not import torch.

Local rank i uses the i-th of its visible GPUs. Ranks on the same host may see different GPUs, because their torch builds are for
different vendors or the launcher assigns one GPU per rank. Only ranks that see the same GPUs are therefore counted together.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetero_mpi.util.errors import UserError
from hetero_mpi.util.plug_ins import plug_in_names

DEVICE_VARIABLE = "HETERO_MPI_DEVICE"
"""Environment variable with the device for the ranks on a host. It overrides ``[cluster] device``, which applies to all hosts."""
MIN_CORES_PER_GPU = 2.0
"""Cores that a GPU rank needs for its two threads, one of which submits work to the GPU while the other communicates."""
_GPUS = plug_in_names("hetero_mpi.device.backends")
DEVICE = re.compile(rf"auto|cpu|({'|'.join(_GPUS)})(:\d+)?")
DEVICE_RULE = ", ".join(f'"{name}"' for name in ("auto", "cpu", *_GPUS)) + ', or a single GPU, such as "cuda:1"'


@dataclass(frozen=True)
class DeviceSpec:
    """The device that a rank requests."""

    name: str
    """``auto`` or the name of a backend."""
    gpu: int | None = None
    """Number of the GPU, or None for the next GPU that no lower rank uses."""


@dataclass(frozen=True)
class VisibleDevices:
    """The GPUs that a rank can see."""

    host: str
    backend: str
    devices: tuple[tuple[int, str], ...]
    """(number, identity on the host) of each usable GPU."""
    gpu: int | None
    """Number of the GPU that the rank requests explicitly, if any."""


def device_spec(job_device: str, environment: Mapping[str, str]) -> DeviceSpec:
    """Return the device requested by ``DEVICE_VARIABLE`` or, if that is not set, by the job's ``[cluster] device``.

    Raises UserError if the value is not a device.
    """
    text = environment.get(DEVICE_VARIABLE) or job_device
    if not DEVICE.fullmatch(text):
        raise UserError(
            "device.environment", f"The environment variable {DEVICE_VARIABLE} must be {DEVICE_RULE}; got {text!r}."
        )
    name, _, gpu = text.partition(":")
    return DeviceSpec(name, int(gpu) if gpu else None)


def gpu_of(rank: int, devices: Sequence[VisibleDevices]) -> int | None:
    """Return the number of the GPU for ``rank``, given the visible GPUs of all ranks, or None if lower ranks use them all."""
    device = devices[rank]
    if device.gpu is not None:
        return device.gpu
    lower = sum(lower_rank == device for lower_rank in devices[:rank])
    return device.devices[lower][0] if lower < len(device.devices) else None


@dataclass(frozen=True)
class Cores:
    """The CPU cores on which a rank may run."""

    host: str
    numbers: tuple[int, ...]
    """Numbers of the cores in the rank's affinity mask. A launcher may bind the rank to a few cores."""
    quota: float | None
    """CPU quota shared by the ranks of the host, in cores, or None if there is no quota."""
    computes: bool
    """Whether the rank computes on the CPU rather than on a GPU."""


def cores_of(rank: int, ranks: Sequence[Cores]) -> float:
    """Return the number of cores available to ``rank``. Each core is shared equally by its ranks and scaled down by a quota.

    A GPU rank leaves all but ``MIN_CORES_PER_GPU`` of its share to the CPU ranks that may run on the same cores.
    """
    cores = ranks[rank]
    users = Counter(core for entry in ranks if entry.host == cores.host for core in entry.numbers)
    allowed = 1.0 if cores.quota is None else min(1.0, cores.quota / len(users))
    sharers = [entry for entry in ranks if (entry.host, entry.numbers) == (cores.host, cores.numbers)]
    computing = sum(entry.computes for entry in sharers)
    equal = allowed * sum(1 / users[core] for core in cores.numbers)
    if computing == 0:
        return equal
    spared = max(0.0, equal - MIN_CORES_PER_GPU)
    return equal + spared * (len(sharers) - computing) / computing if cores.computes else equal - spared
