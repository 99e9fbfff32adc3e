"""``now.json``: what the ranks do at this moment. Rank 0 writes it twice a second while a run goes on, and at its end how it ended.
One that is old tells where each rank stood at last.
"""

from __future__ import annotations

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

PRESENT_NAME = "now.json"
NICENESS = 10
"""Of processes that draw what is shown, beside rank 0: on a busy machine they get a tenth of what a rank gets."""
LIFELESS_S = 20.0
"""A run that writes nothing for so long shows no sign of life. Clocks of two machines may differ by a few seconds."""
_SILENT_S = 3.0
"""A rank that has said nothing for so long may be dead, or cut off; it speaks twice a second."""
_ACTION = re.compile(r"\d+([A-Z_]+)(\d*)")
_NAMES = {
    "F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients", "STEP": "optimizer",
    "SEND_F": "sends activations", "SEND_B": "sends gradients", "RECV_F": "takes activations", "RECV_B": "takes gradients",
    "REDUCE": "gradient all-reduce",
}  # fmt: skip
_LONG_S = 10.0
"""Seconds in one place after which a rank's line shows the time."""


@dataclass(frozen=True)
class Standing:
    """Where a rank stands, as it reports it."""

    at: str
    """Activity and action, such as ``training step 18, 1RECV_F2``."""
    still_s: float = 0.0
    """Seconds without a change."""
    waits_for: str | None = None
    busy: bool = False
    """It is in a block that may last long (``World.busy``)."""
    computed: float | None = None
    """Share of its last step in which it computed; None: not known."""
    memory_bytes: int = 0
    sensors: Mapping[str, float] = field(default_factory=dict)
    """As of ``device.backend``."""
    sending: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Rank -> (messages, bytes) that are under way to it."""
    silent_s: float = 0.0
    """Seconds since it was heard of."""

    def line(self) -> str:
        waits = f", waits for {self.waits_for}" if self.waits_for else ""
        return f"{self.at}, {'at work' if self.busy else 'there'} for {units.seconds(self.still_s)}{waits}"

    @property
    def text(self) -> str:
        """``forward 3`` (of micro-batch 3), or ``waits for rank 0 to send, for 12.0 s``."""
        place = self.at.rsplit(", ", 1)[-1]
        action = _ACTION.fullmatch(place)
        text = f"{_NAMES.get(action[1], place)} {action[2]}".rstrip() if action else place
        text = f"waits for {self.waits_for}" if self.waits_for else text
        if self.silent_s > _SILENT_S:
            return f"not heard of for {units.seconds(self.silent_s)}; before that: {text}"
        return f"{text}, for {units.seconds(self.still_s)}" if self.still_s >= _LONG_S else text


@dataclass(frozen=True)
class Present:
    """The contents of ``now.json``."""

    unix_s: float
    doing: str
    """Of rank 0, such as ``training step 18``."""
    ended: str | None = None
    """How the run ended, in words; empty: well. None: it goes on."""
    ranks: Mapping[str, Standing] = field(default_factory=dict)

    @property
    def alive(self) -> bool:
        return self.ended is None and time.time() - self.unix_s < LIFELESS_S


_FORM = TypeAdapter(Present)


def write_present(directory: Path, present: Present) -> None:
    with contextlib.suppress(OSError):  # a full disk, of which other files tell
        write_atomic(directory / PRESENT_NAME, json.dumps(asdict(present)))


def read_present(directory: Path) -> Present | None:
    """None: there is none, or it is of another form. Raises UserError: it is no regular file."""
    require_regular(directory / PRESENT_NAME)
    with contextlib.suppress(OSError, ValueError):
        return _FORM.validate_json((directory / PRESENT_NAME).read_bytes())
    return None
