"""The doctor's side of the probes: starts one on a host through the launch agent, and asks it."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hetero_mpi.launch.agent import remote_command
from hetero_mpi.launch.probe import MARK

if TYPE_CHECKING:
    from hetero_mpi.launch.mesh import Mesh

_COMPLAINT_BYTES = 20_000


@dataclass
class Target:
    """A host, or an entry of a hosts file, to be looked at."""

    title: str
    address: str
    """IPv4."""
    name: str
    """What the launch agent is given."""
    local: bool
    python: str = sys.executable
    prefix: str = ""
    """Where the launcher will look for MPI there; "": not asked."""
    directory: str = ""
    """In which its ranks are to start; "": the path of the one here, if it is there."""
    variables: Mapping[str, str] = field(default_factory=dict)
    ranks: int = 0
    """Ranks it is to hold; 0: not known."""
    device: str = "auto"
    """For its ranks, as a hosts file says it."""
    mesh: Mesh | None = None
    """Of the hosts file, if its address lies in it."""


class ProbeError(RuntimeError):
    """A probe did not answer; the text says what was heard instead."""


class Probe:
    """A probe at work. Raises ``ProbeError`` from ``ask`` if it ends or stays silent."""

    def __init__(self, target: Target, agent: Sequence[str]) -> None:
        words = [target.python, "-m", "hetero_mpi.launch.probe"]
        directory = target.directory or os.getcwd()
        passed_on = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
        variables = {**passed_on, **target.variables}
        environment = {**os.environ, **variables}
        if not target.local:
            words = remote_command(agent, target.name, directory, variables, *words)
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115  (open as long as the probe)
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._process: subprocess.Popen[str] | None = None
        try:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._complaints,
                text=True,
                errors="replace",
                env=environment,
                cwd=directory if target.local and os.path.isdir(directory) else None,
                start_new_session=True,
            )
        except OSError as error:
            self._complaints.write(f"{words[0]}: {error.strerror}".encode())
            self._lines.put(None)
            return
        threading.Thread(target=self._read, name="probe", daemon=True).start()

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                with contextlib.suppress(OSError):
                    stream.close()  # type: ignore[union-attr]
        self._complaints.close()

    def ask(self, what: str, timeout_s: float, **values: Any) -> dict[str, Any]:
        """One answer. Raises ProbeError."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.write(json.dumps({"ask": what, **values}) + "\n")
                self._process.stdin.flush()
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise ProbeError(self._heard(f"no answer within {timeout_s:g} s")) from None
            if line is None:
                self._lines.put(None)
                raise ProbeError(self._heard("it ended without an answer"))
            if line.startswith(MARK):
                return dict(json.loads(line.removeprefix(MARK)))

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        with contextlib.suppress(ValueError, OSError):  # closed meanwhile
            for line in self._process.stdout:
                self._lines.put(line)
        self._process.wait()
        self._lines.put(None)

    def _heard(self, otherwise: str) -> str:
        """The last line of its complaints."""
        self._complaints.seek(0)
        text = self._complaints.read(_COMPLAINT_BYTES).decode(errors="replace")
        last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), otherwise)
        return "".join(letter for letter in last if letter.isprintable())[:300]
