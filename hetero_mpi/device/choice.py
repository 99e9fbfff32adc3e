"""Which device a rank takes: what the job says, what its host says, and which cards its neighbours take. No torch here.

Local rank i takes card i of those that it sees. Ranks of one host may see different cards: two Pythons whose torch builds are
for different vendors, or a launcher that gives each rank a card of its own. So cards are counted among the ranks that see the
same ones.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetero_mpi.errors import UserError

DEVICE_VARIABLE = "HETERO_MPI_DEVICE"
"""Environment variable with the device of a host's ranks; goes before ``[cluster] device``, which is about all hosts."""
DEVICE = re.compile(r"auto|cpu|mps|(cuda|rocm|xpu)(:\d+)?")
DEVICE_RULE = '"auto", "cpu", "cuda", "rocm", "xpu", "mps", or one card of them, such as "cuda:1"'


@dataclass(frozen=True)
class Wish:
    """A device that is asked for."""

    name: str
    """``auto`` or a backend's name."""
    card: int | None = None
    """Which one; None: the next that no lower rank takes."""


@dataclass(frozen=True)
class Place:
    """What a rank sees before it takes a GPU."""

    host: str
    backend: str
    devices: tuple[tuple[int, str], ...]
    """Number of every GPU it may take -> what tells it from others of the host."""
    card: int | None
    """The number of the one it was told to take."""


def wish(job_device: str, environment: Mapping[str, str]) -> Wish:
    """What this rank shall compute on: ``DEVICE_VARIABLE`` of its environment, else the job's ``[cluster] device``.

    :raises UserError: the variable holds no device.
    """
    text = environment.get(DEVICE_VARIABLE) or job_device
    if not DEVICE.fullmatch(text):
        raise UserError(f"The environment variable {DEVICE_VARIABLE} must be {DEVICE_RULE}; it is {text!r}.")
    name, _, card = text.partition(":")
    return Wish(name, int(card) if card else None)


def device_of(rank: int, places: Sequence[Place]) -> int | None:
    """The number of the GPU that ``rank`` takes, given what all ranks see; None where lower ranks take all of them.

    >>> two_vendors = [Place("box", "cuda", ((0, "a"),), None), Place("box", "rocm", ((0, "b"),), None)]
    >>> device_of(0, two_vendors), device_of(1, two_vendors)
    (0, 0)
    >>> without_the_first = [Place("box", "cuda", ((1, "b"), (2, "c")), None)] * 3
    >>> [device_of(rank, without_the_first) for rank in range(3)]
    [1, 2, None]
    """
    own = places[rank]
    if own.card is not None:
        return own.card
    lower = sum(place == own for place in places[:rank])
    return own.devices[lower][0] if lower < len(own.devices) else None
