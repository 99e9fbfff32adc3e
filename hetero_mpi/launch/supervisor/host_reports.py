"""Reports of a host agent to the supervisor of ``launch --elastic``, several times a second, and the orders in the answers.

A report is a new TCP connection each time, a line each way::

    host agent  {"host": 1, "number": 3, "call": 40, "swept": 4, "tried": 2, "locked": false, "memory_kills": 0,
                 "folders": [{"path": "/tmp", "free_bytes": 1000000000, "problem": ""}, ...],
                 "run": {"step": 17, "base": 8, "file": 9321, "checkpoint": 15, "copies": 16}}
    supervisor  {"to": [1, 3, 40], "sweep": 5, "keep": null, "try_lock": 2, "leave": false}

* Connections are new, because an old one that has lost packets waits longer and longer between its attempts. After an outage of 12
  s it may stay silent for 25 s, and a host that is back would count as dead. So nothing of this goes over the launch agent, by
  which the orders came.
* Every line is sealed (``seal``) with a token that is in the orders. Nothing is encrypted, and the token itself is never sent. What
  was recorded cannot be sent again: an agent's calls are numbered, and an answer says to which call it belongs.
* ``sweep``: a number that grows when processes are to be ended: those of all starts of this supervisor but ``spare_start``. ``swept`` is
  the last number done.
* ``try_lock``: a number that grows when the supervisor wants to know whether a run holds the run directory.
* ``leave``: the host agent ends.
* ``folders``: the room in the folder for temporary files and in the run directory (``disk.folder_space``).
* ``run``: what the run directory on this host holds; the supervisor's own host may not have it.

A host agent that hears nothing for longer than the supervisor waits (or finds its port closed) ends the job's processes on its host
and leaves, because the job goes on without them.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hetero_mpi.device.shortage import memory_kills
from hetero_mpi.rundir.line_files import METRICS_NAME, object_of
from hetero_mpi.rundir.run_directory import LOCK_NAME, RUN_NAME, START_VARIABLE, run_json, run_starts
from hetero_mpi.util.disk import folder_space, lock, require_regular, temporary_folder
from hetero_mpi.util.errors import UserError

CALL_INTERVAL_S = 0.25
"""Seconds between calls."""
CALL_S = 0.5
"""Time limit of a call, seconds."""
FENCE_DELAY_S = 1.0
"""Seconds that a host agent waits longer than the supervisor before it ends the job's processes on its host."""
MAX_REFUSED_S = 3.0
"""Seconds that the supervisor's port may be closed: after that its process is gone, though its machine answers."""
MAX_LINE_BYTES = 4096
"""Longest line."""
_CHECKPOINT = re.compile(r"step-(\d{8,})\.h5")
_COPY = re.compile(r"step-(\d{8,})\.[0-9a-f]{8}\.h5")
_TAIL_BYTES = 4096
RUN_STATE = ("step", "base", "last", "file", "checkpoint", "copies")
"""Keys of ``run``: whole numbers about the run directory on this host."""
_DAEMONS = ("prted", "prterun", "orted", "hydra_pmi_proxy", "hydra_bstrap_proxy")
"""Parents of ranks that may lack the variable: the programs that launchers start on other machines."""
_KILL_TIMEOUT_S = 5.0
"""Longest that processes are sent SIGKILL again and again, seconds."""
Role = Literal["caller", "listener"]


class NotAuthentic(ValueError):
    """A line of somebody who does not know the token, or that was tampered with."""


def seal(token: str, role: Role, value: Any) -> bytes:
    """A JSON value as the line ``MAC JSON``; the MAC is HMAC-SHA256 under the token, of the sender's role and the text."""
    text = json.dumps(value)
    return f"{_mac(token, role, text)} {text}\n".encode()


def unseal(token: str, role: Role, line: bytes) -> Any:
    """The value in a line of the end that has this role. Raises NotAuthentic."""
    mac, _, text = line.decode(errors="replace").removesuffix("\n").partition(" ")
    if not line.endswith(b"\n") or not hmac.compare_digest(mac.encode(), _mac(token, role, text).encode()):
        raise NotAuthentic("a line that the other end did not write")
    return json.loads(text)


def _mac(token: str, role: Role, text: str) -> str:
    return hmac.new(token.encode(), f"{role} {text}".encode(), "sha256").hexdigest()


@dataclass
class HostReports:
    """Calls the supervisor until told to leave, or until the supervisor has been silent for too long."""

    token: str
    address: str
    """The supervisor's address."""
    port: int
    host: int
    number: int
    """``host`` and ``number`` say which host, and which of its agents, is calling."""
    supervisor: str
    """The supervisor's name in the environment of the job's processes."""
    timeout_s: float
    """Silence after which the supervisor takes a host for dead."""
    run_dir: str

    def __post_init__(self) -> None:
        self.swept = self.lock_attempt = self.calls = 0
        self.locked = False
        self._run = RunDirectory(Path(self.run_dir))

    def report(self) -> str:
        """Run to the end; returns the reason for it."""
        last_answer_s = closed_since = time.monotonic()
        while True:
            call_start_s = time.monotonic()
            try:
                answer = self._call()
            except (OSError, ValueError) as error:
                closed_since = closed_since if isinstance(error, ConnectionRefusedError) else call_start_s
                gone = call_start_s - closed_since > MAX_REFUSED_S
                if gone or call_start_s - last_answer_s > self.timeout_s + FENCE_DELAY_S:
                    end_starts(self.supervisor)
                    return "the supervisor has gone" if gone else "the supervisor was not heard of for too long"
                # A closed port answers at once; silence has taken its time already.
                time.sleep(max(0.0, CALL_INTERVAL_S - (time.monotonic() - call_start_s)))
                continue
            last_answer_s = closed_since = time.monotonic()
            if answer["sweep"] > self.swept:
                end_starts(self.supervisor, answer["keep"])
                self.swept = int(answer["sweep"])
            elif answer["try_lock"] > self.lock_attempt:
                self.locked, self.lock_attempt = self._run.locked(), int(answer["try_lock"])
            elif answer["leave"]:
                return "told to leave"
            else:
                time.sleep(CALL_INTERVAL_S)

    def _call(self) -> dict[str, Any]:
        self.calls += 1
        sender = {"host": self.host, "number": self.number, "call": self.calls}
        report = {**sender, "run": self._run.state(), "memory_kills": memory_kills()}
        report["folders"] = [folder_space(temporary_folder(), must_exist=True), folder_space(Path(self.run_dir))]
        report |= {"swept": self.swept, "tried": self.lock_attempt, "locked": self.locked}
        with socket.create_connection((self.address, self.port), CALL_S) as connection:
            connection.sendall(seal(self.token, "caller", report))
            line = connection.makefile("rb").readline(MAX_LINE_BYTES)
        answer: dict[str, Any] = unseal(self.token, "listener", line)
        if answer["to"] != list(sender.values()):
            raise NotAuthentic("an answer to another call")
        return answer


class RunDirectory:
    """A run directory as the supervisor needs to know it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._file = self._base = 0

    def state(self) -> dict[str, int]:
        """``step``: of the last line of metrics.jsonl; ``file``: its inode (a resumed run begins a new file); ``base``: the step
        that the run went on from when it began that file; ``last``: the step that it ends with; ``checkpoint``, ``copies``: step of
        the newest one. 0: none."""
        step, run = self._last_step(), self._run()
        checkpoint, copies, last = _newest(self.directory / "checkpoints", _CHECKPOINT), 0, run.get("last_step")
        with contextlib.suppress(OSError):
            copies = max((_newest(folder, _COPY) for folder in (self.directory / "copies").iterdir()), default=0)
        values = step, self._base, last if type(last) is int else 0, self._file, checkpoint, copies
        return dict(zip(RUN_STATE, values, strict=True))

    def locked(self) -> bool:
        """True where a run holds the directory, here or (where it is shared) elsewhere. To be called while nobody claims it."""
        path = self.directory / LOCK_NAME
        if path.is_symlink() or not path.is_file():  # a run refuses links, and its files alone are opened
            return False
        try:
            with path.open("a") as file:
                lock(file)
        except BlockingIOError:
            return True
        except OSError:
            return False  # the run itself will say what it cannot open
        return False

    def _last_step(self) -> int:
        try:
            require_regular(self.directory / METRICS_NAME)
            with (self.directory / METRICS_NAME).open("rb") as file:
                inode, size = os.fstat(file.fileno()).st_ino, file.seek(0, 2)
                if inode != self._file:
                    starts = reversed(run_starts(self._run()))
                    self._file, self._base = inode, next((start["step"] for start in starts), 0)
                file.seek(max(0, size - _TAIL_BYTES))
                return last_step(file.read())
        except (OSError, UserError):
            self._file = 0
            return 0

    def _run(self) -> dict[str, Any]:
        """``run.json``, which the run writes before it begins its metrics."""
        with contextlib.suppress(UserError):
            return run_json(self.directory / RUN_NAME)
        return {}


def _newest(directory: Path, pattern: re.Pattern[str]) -> int:
    """The largest step in the names of a directory; 0: there is none."""
    try:
        names = [path.name for path in directory.iterdir()]
    except OSError:
        return 0
    return max((int(match[1]) for name in names if (match := pattern.fullmatch(name))), default=0)


def last_step(tail: bytes) -> int:
    """The step of the last whole line of a metrics file that has one; 0 without."""
    lines = (object_of(line.decode(errors="replace")) or {} for line in reversed(tail.split(b"\n")[:-1]))
    return next((step for values in lines if type(step := values.get("step")) is int), 0)


def end_starts(supervisor: str, keep: str | None = None) -> None:
    """Kill every process on this machine of the supervisor's starts, except those of the start ``spare_start``.

    They are found by an environment variable. A launcher that is killed, or that lost its connections, leaves ranks behind which
    hold devices and ports. A process that the kernel holds (state D) may stay; after five seconds it is given up.
    """
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    while (processes := set(_start_processes(supervisor, keep))) and time.monotonic() <= deadline:
        for process in processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, 9)
        time.sleep(0.02)


def _start_processes(supervisor: str, keep: str | None) -> Iterator[int]:
    """Ids of those processes, and of the launchers' daemons above them. Zombies are not among them."""
    import psutil

    for process in psutil.process_iter():
        try:
            name = process.environ().get(START_VARIABLE)
            if name is None or name == keep or name.partition(".")[0] != supervisor or process.pid == os.getpid():
                continue
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            yield process.pid
            parent = process.parent()
            if parent is not None and parent.name() in _DAEMONS:
                yield parent.pid
        except (psutil.Error, OSError):
            continue  # it has just gone, or belongs to somebody else
