"""``now.json``, which shows the current activity of each rank. Rank 0 writes it twice a second, and finally with the outcome.

If the file is outdated, it shows the last known activity of each rank.
"""

import contextlib
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from hetero_mpi.util import units
from hetero_mpi.util.disk import require_regular, write_atomic
from hetero_mpi.util.display import Displayed

PRESENT_NAME = "now.json"
NICENESS = 10
"""Nice value of processes that render displays. On a busy machine they get a tenth of a rank's share of the CPU."""
LIFELESS_S = 20.0
"""A run that writes nothing for this long is considered dead. The limit allows for clocks that differ by a few seconds."""
_MAX_SILENCE_S = 3.0
"""A rank that does not report for this long may be dead or disconnected. Ranks report twice a second."""
_ACTION = re.compile(r"\d+([A-Z_]+)(\d*)")
_NAMES = {
    "F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients", "STEP": "optimizer",
    "SEND_F": "sends activations", "SEND_B": "sends gradients", "RECV_F": "takes activations", "RECV_B": "takes gradients",
    "REDUCE": "gradient all-reduce",
}  # fmt: skip
_LONG_S = 10.0
"""A rank's line shows the duration of an activity that has lasted this long."""


@dataclass(frozen=True)
class Standing:
    """The current activity of a rank, as reported by the rank."""

    at: str
    """Activity and action, such as ``training step 18, 1RECV_F2``."""
    still_s: float = 0.0
    """Seconds since the activity last changed."""
    waits_for: str | None = None
    busy: bool = False
    """Whether the rank is in a block that may take long (``World.busy``)."""
    computed: float | None = None
    """Share of its last step that the rank spent computing, or None if unknown."""
    memory_bytes: int = 0
    sensors: Mapping[str, float] = field(default_factory=dict)
    """Readings from ``Backend.sensors``."""
    sending: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Maps each receiving rank to the (messages, bytes) in transit to it."""
    silent_s: float = 0.0
    """Seconds since the rank's last report."""

    def line(self) -> str:
        waits = f", waits for {self.waits_for}" if self.waits_for else ""
        return f"{self.at}, {'busy' if self.busy else 'unchanged'} for {units.seconds(self.still_s)}{waits}"

    @property
    def text(self) -> str:
        """Short description, such as ``forward 3`` (for micro-batch 3) or ``waits for rank 0 to send, for 12.0 s``."""
        activity = self.at.rsplit(", ", 1)[-1]
        action = _ACTION.fullmatch(activity)
        text = f"{_NAMES.get(action[1], activity)} {action[2]}".rstrip() if action else activity
        text = f"waits for {self.waits_for}" if self.waits_for else text
        if self.silent_s > _MAX_SILENCE_S:
            return f"silent for {units.seconds(self.silent_s)}; last report: {text}"
        return f"{text}, for {units.seconds(self.still_s)}" if self.still_s >= _LONG_S else text


@dataclass(frozen=True, repr=False)
class Present(Displayed):
    """The contents of ``now.json``."""

    unix_s: float
    doing: str
    """The current activity of rank 0, such as ``training step 18``."""
    ended: str | None = None
    """Why the run ended, or "" if it succeeded. None while the run is active."""
    ranks: Mapping[str, Standing] = field(default_factory=dict)

    @property
    def alive(self) -> bool:
        return self.ended is None and time.time() - self.unix_s < LIFELESS_S


_ADAPTER = TypeAdapter(Present)


def write_present(directory: Path, present: Present) -> None:
    with contextlib.suppress(OSError):  # other files report a full disk
        write_atomic(directory / PRESENT_NAME, json.dumps(asdict(present)))


def read_present(directory: Path) -> Present | None:
    """Read ``now.json``. Returns None if it is missing or malformed; raises UserError if it is not a regular file."""
    require_regular(directory / PRESENT_NAME)
    with contextlib.suppress(OSError, ValueError):
        return _ADAPTER.validate_json((directory / PRESENT_NAME).read_bytes())
    return None
