"""The doctor's end of a probe: starts it on a host through the launch agent, and sends it requests."""

from __future__ import annotations

import io
import json
import queue
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hetero_mpi.background import lines_of
from hetero_mpi.launch.doctor.probe import MARK, HostFacts
from hetero_mpi.launch.hosts.agent import Helper

if TYPE_CHECKING:
    from hetero_mpi.launch.wireguard.mesh import Mesh


@dataclass(frozen=True)
class Target:
    """A host, an entry of a hosts file, or a rank, that is to be examined."""

    title: str
    address: str
    """IPv4; "": it has none."""
    name: str
    """The name that the launch agent takes."""
    local: bool
    python: str = sys.executable
    prefix: str = ""
    """Directory where the launcher will look for MPI there; "": not checked."""
    directory: str = ""
    """Directory in which its ranks are to start; "": the path of the one here, if it exists there."""
    variables: Mapping[str, str] = field(default_factory=dict)
    ranks: int = 0
    """Ranks it is to hold; 0: not known."""
    device: str = "auto"
    """The device that a hosts file gives its ranks."""
    mesh: Mesh | None = None
    """The mesh of the hosts file, if the address lies in it."""


@dataclass(frozen=True)
class Examined(Target):
    """A target with the facts about it, or the reason why there are none."""

    facts: HostFacts | None = None
    complaint: str = ""
    """Where there are no facts: the last line of the launch agent, or of Python there."""


def answered(places: Sequence[Examined]) -> list[tuple[Examined, HostFacts]]:
    """The places that have answered, each with its facts."""
    return [(place, place.facts) for place in places if place.facts is not None]


class ProbeError(RuntimeError):
    """A probe did not answer; the text says what it printed instead."""


class Probe:
    """A probe that is running on a host. ``ask`` raises ``ProbeError`` if it ends or does not answer."""

    def __init__(self, target: Target, agent: Sequence[str]) -> None:
        self._helper = Helper(
            agent,
            target.name,
            target.local,
            target.python,
            "hetero_mpi.launch.doctor.probe",
            target.directory,
            target.variables,
            subprocess.PIPE,
        )
        process = self._helper.process
        self._lines = lines_of(process.stdout if process is not None and process.stdout is not None else io.BytesIO())

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *_: object) -> None:
        self._helper.close()

    def ask(self, what: str, timeout_s: float, **values: Any) -> dict[str, Any]:
        """Send a request and return the answer. Raises ProbeError."""
        self._helper.write(json.dumps({"ask": what, **values}).encode() + b"\n")
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise ProbeError(self._helper.complaint(f"no answer within {timeout_s:g} s")) from None
            if line is None:
                self._lines.put(None)
                self._helper.wait(max(0.0, deadline - time.monotonic()))
                raise ProbeError(self._helper.complaint("it ended without an answer"))
            if line.startswith(MARK.encode()):
                return dict(json.loads(line.decode(errors="replace").removeprefix(MARK)))
