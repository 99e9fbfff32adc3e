"""Reports of a host agent to the supervisor of ``launch --elastic``, several per second, and the orders in the answers.

A report is a new TCP connection with one line each way::

    host agent  {"host": 1, "number": 3, "call": 40, "swept": 4, "tried": 2, "locked": false, "memory_kills": 0,
                 "folders": [{"path": "/tmp", "free_bytes": 1000000000, "problem": ""}, ...],
                 "run": {"step": 17, "base": 8, "file": 9321, "checkpoint": 15, "copies": 16}}
    supervisor  {"to": [1, 3, 40], "sweep": 5, "keep": null, "try_lock": 2, "leave": false}

* Connections are new because TCP retries ever more slowly after packet loss. After an outage of 12 s a connection may stay silent
  for 25 s, and a host that is back would count as lost. For this reason reports do not use the launch agent.
* Every line is authenticated (``seal``) with a token from the agent's orders, but not encrypted; the token itself is never sent.
  Replays are rejected: an agent's calls are numbered, and an answer contains the call's number.
* ``sweep``: increases when processes must be ended: those of all starts of this supervisor except ``keep``. ``swept`` is the last
  completed number.
* ``try_lock``: increases when the supervisor asks whether a run holds the run directory; ``tried`` is the last answered number.
* ``leave``: whether the host agent must end.
* ``folders``: space in the folder for temporary files and in the run directory (``disk.folder_space``).
* ``run``: state of the run directory on this host, which may be missing on the supervisor's host.

A host agent that gets no answer for longer than the supervisor's timeout (or finds the port closed) ends the job's processes on
its host and exits, because the job continues without them.
"""

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
"""Interval between calls in seconds."""
CALL_S = 0.5
"""Timeout of a call in seconds."""
FENCE_DELAY_S = 1.0
"""Time beyond the supervisor's timeout after which a host agent ends the job's processes on its host."""
MAX_REFUSED_S = 3.0
"""Once connections are refused for this long, the supervisor counts as ended although its machine answers."""
MAX_LINE_BYTES = 4096
"""Maximum length of a line in bytes."""
_CHECKPOINT = re.compile(r"step-(\d{8,})\.h5")
_COPY = re.compile(r"step-(\d{8,})\.[0-9a-f]{8}\.h5")
_TAIL_BYTES = 4096
RUN_STATE = ("step", "base", "last", "file", "checkpoint", "copies")
"""Keys of ``run``, whose integers describe the run directory on this host."""
_DAEMONS = ("prted", "prterun", "orted", "hydra_pmi_proxy", "hydra_bstrap_proxy")
"""Remote programs of launchers: parents of ranks that may not have the environment variable."""
_KILL_TIMEOUT_S = 5.0
"""Maximum time for which SIGKILL is sent repeatedly."""
Role = Literal["caller", "listener"]


class NotAuthentic(ValueError):
    """A line was sent without the token, or was modified."""


def seal(token: str, role: Role, value: Any) -> bytes:
    """Format a JSON value as ``MAC JSON``; the MAC is HMAC-SHA256, under the token, of the sender's role and the JSON."""
    text = json.dumps(value)
    return f"{_mac(token, role, text)} {text}\n".encode()


def unseal(token: str, role: Role, line: bytes) -> Any:
    """Return the value of a line that was sealed by the other end in ``role``. Raises NotAuthentic."""
    mac, _, text = line.decode(errors="replace").removesuffix("\n").partition(" ")
    if not line.endswith(b"\n") or not hmac.compare_digest(mac.encode(), _mac(token, role, text).encode()):
        raise NotAuthentic("the line is not from the other end")
    return json.loads(text)


def _mac(token: str, role: Role, text: str) -> str:
    return hmac.new(token.encode(), f"{role} {text}".encode(), "sha256").hexdigest()


@dataclass
class HostReports:
    """Calls the supervisor until it orders the agent to leave or has not answered for too long."""

    token: str
    address: str
    """Address of the supervisor."""
    port: int
    host: int
    number: int
    """``host`` and ``number`` identify the host and the agent on it."""
    supervisor: str
    """Identifier of the supervisor, which the job's processes have in their environment."""
    timeout_s: float
    """Time after which the supervisor treats a silent host as lost."""
    run_dir: str

    def __post_init__(self) -> None:
        self.swept = self.lock_attempt = self.calls = 0
        self.locked = False
        self._run = RunDirectory(Path(self.run_dir))

    def report(self) -> str:
        """Report until the end and return the reason for ending."""
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
                    return "the supervisor has ended" if gone else "the supervisor has not answered for too long"
                # A closed port fails at once; a timeout has taken its time already.
                time.sleep(max(0.0, CALL_INTERVAL_S - (time.monotonic() - call_start_s)))
                continue
            last_answer_s = closed_since = time.monotonic()
            if answer["sweep"] > self.swept:
                end_starts(self.supervisor, answer["keep"])
                self.swept = int(answer["sweep"])
            elif answer["try_lock"] > self.lock_attempt:
                self.locked, self.lock_attempt = self._run.locked(), int(answer["try_lock"])
            elif answer["leave"]:
                return "asked to leave"
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
    """Reads the state of a run directory for the supervisor."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._file = self._base = 0

    def state(self) -> dict[str, int]:
        """Return the values of ``RUN_STATE``; 0 means none.

        ``step`` is the step in the last line of metrics.jsonl, ``file`` its inode (a resumed run starts a new file), and
        ``base`` the step from which the run continued in that file. ``last`` is the final step; ``checkpoint`` and ``copies``
        are the newest steps saved.
        """
        step, run = self._last_step(), self._run()
        checkpoint, copies, last = _newest(self.directory / "checkpoints", _CHECKPOINT), 0, run.get("last_step")
        with contextlib.suppress(OSError):
            copies = max((_newest(folder, _COPY) for folder in (self.directory / "copies").iterdir()), default=0)
        values = step, self._base, last if type(last) is int else 0, self._file, checkpoint, copies
        return dict(zip(RUN_STATE, values, strict=True))

    def locked(self) -> bool:
        """Whether a run holds the directory, here or on another host. Call only while no run is starting."""
        path = self.directory / LOCK_NAME
        if path.is_symlink() or not path.is_file():  # a run rejects links, and only its files are opened
            return False
        try:
            with path.open("a") as file:
                lock(file)
        except BlockingIOError:
            return True
        except OSError:
            return False  # the run itself reports unreadable files
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
        """Read ``run.json``, which the run writes before its metrics."""
        with contextlib.suppress(UserError):
            return run_json(self.directory / RUN_NAME)
        return {}


def _newest(directory: Path, pattern: re.Pattern[str]) -> int:
    """Return the highest step in the file names of a directory, or 0 if there is none."""
    try:
        names = [path.name for path in directory.iterdir()]
    except OSError:
        return 0
    return max((int(match[1]) for name in names if (match := pattern.fullmatch(name))), default=0)


def last_step(tail: bytes) -> int:
    """Return the step of the last complete line that has one in a metrics file, or 0 if there is none."""
    lines = (object_of(line.decode(errors="replace")) or {} for line in reversed(tail.split(b"\n")[:-1]))
    return next((step for values in lines if type(step := values.get("step")) is int), 0)


def end_starts(supervisor: str, keep: str | None = None) -> None:
    """Kill every process of the supervisor's starts on this machine, except those of the start ``keep``.

    An environment variable identifies them. A launcher that is killed or loses its connections leaves ranks behind that hold
    devices and ports. A process in uninterruptible sleep (state D) may survive; it is abandoned after five seconds.
    """
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    while (processes := set(_start_processes(supervisor, keep))) and time.monotonic() <= deadline:
        for process in processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, 9)
        time.sleep(0.02)


def _start_processes(supervisor: str, keep: str | None) -> Iterator[int]:
    """Yield the ids of the starts' processes and of the launcher daemons that started them, except zombies."""
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
            continue  # just ended, or another user's
