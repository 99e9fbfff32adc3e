"""Choice of a rank's device from the job, its host and the GPUs of other local ranks. Does not import torch.

Local rank i uses GPU i of its visible GPUs. Ranks of one host may see different GPUs: torch builds for different vendors, or a
launcher that assigns one GPU per rank. So GPUs are counted among the ranks that see the same GPUs.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetero_mpi.util.errors import UserError
from hetero_mpi.util.plug_ins import plug_in_names

DEVICE_VARIABLE = "HETERO_MPI_DEVICE"
"""Environment variable with the device of a host's ranks; overrides ``[cluster] device``, which applies to all hosts."""
MIN_CORES_PER_GPU = 2.0
"""Cores of a GPU rank's two threads: one submits work to the GPU, the other communicates."""
_GPUS = plug_in_names("hetero_mpi.device.backends")
DEVICE = re.compile(rf"auto|cpu|({'|'.join(_GPUS)})(:\d+)?")
DEVICE_RULE = ", ".join(f'"{name}"' for name in ("auto", "cpu", *_GPUS)) + ', or a single GPU, such as "cuda:1"'


@dataclass(frozen=True)
class DeviceSpec:
    """A requested device."""

    name: str
    """``auto`` or a backend's name."""
    gpu: int | None = None
    """Number of the GPU; None: the next one without a lower rank."""


@dataclass(frozen=True)
class VisibleDevices:
    """GPUs visible to a rank."""

    host: str
    backend: str
    devices: tuple[tuple[int, str], ...]
    """Pairs of the number of a usable GPU and its identity on the host."""
    gpu: int | None
    """Number of the explicitly requested GPU."""


def device_spec(job_device: str, environment: Mapping[str, str]) -> DeviceSpec:
    """Requested device of this rank: ``DEVICE_VARIABLE`` of its environment, else the job's ``[cluster] device``.

    Raises UserError: the value of the variable is not a device.
    """
    text = environment.get(DEVICE_VARIABLE) or job_device
    if not DEVICE.fullmatch(text):
        raise UserError(
            "device.environment", f"The environment variable {DEVICE_VARIABLE} must be {DEVICE_RULE}; got {text!r}."
        )
    name, _, gpu = text.partition(":")
    return DeviceSpec(name, int(gpu) if gpu else None)


def gpu_of(rank: int, devices: Sequence[VisibleDevices]) -> int | None:
    """Number of the GPU for ``rank``, given the visible GPUs of all ranks; None if lower ranks use all of them."""
    device = devices[rank]
    if device.gpu is not None:
        return device.gpu
    lower = sum(lower_rank == device for lower_rank in devices[:rank])
    return device.devices[lower][0] if lower < len(device.devices) else None


@dataclass(frozen=True)
class Cores:
    """CPU cores available to a rank."""

    host: str
    numbers: tuple[int, ...]
    """Numbers of the cores in its affinity mask (a launcher may bind it to a few)."""
    quota: float | None
    """CPU quota of the host's ranks together, in cores; None: no limit."""
    computes: bool
    """Whether the CPU is its device; else the rank only feeds a GPU."""


def cores_of(rank: int, ranks: Sequence[Cores]) -> float:
    """Number of cores for ``rank``: each core counts 1 / (ranks that may run on it), scaled down by a quota.

    A GPU rank leaves its cores beyond ``MIN_CORES_PER_GPU`` to the CPU ranks on the same cores.
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
