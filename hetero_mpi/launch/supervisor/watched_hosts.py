"""The hosts that a supervisor watches: their agents' reports, silence, and the orders sent to the agents.

Only silence makes a host count as lost. A cable that is unplugged for twelve seconds and a machine without power look alike
until the cable is back, so no host is abandoned before ``timeout_s``.
"""

from __future__ import annotations

import secrets
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero_mpi.launch.hosts.agent import HostAgent
from hetero_mpi.launch.hosts.hostfile import HostEntry
from hetero_mpi.launch.hosts.interface import local_addresses, resolve, source_address
from hetero_mpi.launch.supervisor.host_reports import CALL_S, MAX_LINE_BYTES, RUN_STATE, NotAuthentic, seal, unseal
from hetero_mpi.util.background import Background

if TYPE_CHECKING:
    from hetero_mpi.launch.hosts.hosts_toml import Host

_POLL_S = 0.02
_RESTART_INTERVAL_S = 5.0
"""Minimum interval between attempts to replace an ended host agent while its host takes part."""
_MAX_SILENCE_S = 2.0
"""Maximum wait for a silent host if nothing depends on its answer."""
_LISTEN_POLL_S = 0.1
"""Maximum time until the server notices that it is closed."""
_CALLER_TIMEOUT_S = 2.0
"""Maximum wait for the next byte from a caller."""
_MAX_OWN_PAUSE_S = 2.0
"""If two checks are further apart, the supervisor itself was suspended."""


@dataclass
class WatchedHost:
    """A host and the last report of its agent. Times are from ``time.monotonic``."""

    number: int
    entry: HostEntry
    address: str
    local: bool
    agent_number: int = 0
    """Number of the current host agent; agents with lower numbers are ordered to leave."""
    agent: HostAgent | None = None
    started_s: float = 0.0
    heard_s: float = 0.0
    """Time of the current agent's last call; 0.0 if it has not called yet."""
    calls: int = 0
    """Number of the agent's last call."""
    swept: int = 0
    lock_attempt: int = 0
    locked: bool = False
    run: dict[str, int] = field(default_factory=dict)
    memory_kills: int = 0
    """Number of out-of-memory kills by the host's kernel, as of the last call."""
    folders: list[dict[str, Any]] = field(default_factory=list)
    """Free space in the host's folders (``disk.folder_space``), as of the last call."""

    @property
    def name(self) -> str:
        return self.entry.name

    def disk_problems(self) -> str:
        """List the folders in which ranks cannot write, with the reasons; "" if there are none."""
        return "; ".join(f"{folder['path']} {folder['problem']}" for folder in self.folders if folder["problem"])

    def complaint(self) -> str:
        """Return the last line that the launch agent or host agent wrote to stderr, or "no answer"."""
        return self.agent.complaint("no answer") if self.agent is not None else "no answer"

    def has_ended(self) -> bool:
        """Whether the host agent, or the connection that started it, has ended."""
        return self.agent is None or self.agent.has_ended()

    def close(self) -> None:
        """Close the local end of the connection that started the host agent; the agent does not need it."""
        if self.agent is not None:
            self.agent.close()
            self.agent = None


class _Server(socketserver.ThreadingTCPServer):
    """Listens on an ephemeral port of ``address`` ("" for all interfaces), with one thread per caller."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: str, answer: Callable[[bytes], bytes]) -> None:
        super().__init__((address, 0), socketserver.BaseRequestHandler)
        self._answer = answer
        self._listening = Background("listening to host agents", lambda: self.serve_forever(_LISTEN_POLL_S))

    def finish_request(self, request: Any, client_address: Any) -> None:
        request.settimeout(_CALLER_TIMEOUT_S)
        request.sendall(self._answer(request.makefile("rb").readline(MAX_LINE_BYTES)))

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore callers that disconnect or send invalid data."""

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._listening.finish()


class WatchedHosts:
    """Listens to the agents of all hosts; a context manager that orders them to leave when it exits.

    Args:
        timeout_s: Time after which a silent host counts as lost.
        entries: Host name -> entry of the hosts file, for hosts with their own Python or directory.
    """

    def __init__(
        self,
        hosts: Sequence[HostEntry],
        agent: Sequence[str],
        supervisor: str,
        timeout_s: float,
        run_dir: Path,
        entries: Mapping[str, Host] | None = None,
    ) -> None:
        local_ips = {item.address for item in local_addresses()}
        self.watched = []
        for number, entry in enumerate(hosts):
            address = resolve(entry.name)
            self.watched.append(WatchedHost(number, entry, address, address in local_ips or address.startswith("127.")))
        self.timeout_s = timeout_s
        self._agent, self._supervisor, self._run_dir = tuple(agent), supervisor, run_dir
        self._entries = entries or {}
        self.token = secrets.token_hex(16)
        self._lock = threading.Lock()
        self._sweep, self._keep, self._try_lock, self._leave = 0, "", 0, False
        self._looked_s = time.monotonic()
        # Callers without the token get no answer, so the port may be open to all networks.
        address = "127.0.0.1" if all(host.local for host in self.watched) else ""
        self._server = _Server(address, self._answer)
        self.port = int(self._server.server_address[1])

    def __enter__(self) -> WatchedHosts:
        return self

    def __exit__(self, *_: object) -> None:
        """Order the host agents to leave and wait briefly until they have ended."""
        self._leave = True
        deadline = time.monotonic() + 2 * CALL_S
        while not all(host.has_ended() for host in self.watched) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        for host in self.watched:
            host.close()
        self._server.close()

    def probe(self, given_up: Iterable[int], patience_s: float) -> list[WatchedHost]:
        """Start host agents where none seems to be running, and return the hosts that answer, in list order.

        Returns as soon as each host has answered or its launch agent has ended without an answer, at the latest after
        ``patience_s``. The hosts numbered in ``given_up`` are probed too, but not waited for.
        """
        start_s, abandoned = time.monotonic(), set(given_up)
        for host in self.watched:
            if host.number in abandoned or host.has_ended() or time.monotonic() - host.heard_s >= _MAX_SILENCE_S:
                self._start_agent(host)
        while True:
            answers = [host for host in self.watched if host.heard_s > start_s]
            pending = [p for p in self.watched if p not in answers and p.number not in abandoned and not p.has_ended()]
            if not pending or time.monotonic() > start_s + patience_s:
                return answers
            time.sleep(_POLL_S)

    def silent(self, watched: Sequence[WatchedHost]) -> list[WatchedHost]:
        """Return the hosts that are silent for ``timeout_s``, and replace ended host agents. Call it often."""
        now = time.monotonic()
        pause_s, self._looked_s = now - self._looked_s, now
        if pause_s > _MAX_OWN_PAUSE_S:  # this process, or its machine, was suspended: it could receive nothing
            for host in watched:
                host.heard_s += pause_s
        for host in watched:
            if host.has_ended() and now > max(host.started_s, host.heard_s) + _RESTART_INTERVAL_S:
                last_heard_s = host.heard_s
                self._start_agent(host)
                host.heard_s = last_heard_s
        return [host for host in watched if now - host.heard_s > self.timeout_s]

    def sweep(self, watched: Sequence[WatchedHost], patience_s: float) -> list[WatchedHost]:
        """End the job's processes on all hosts in ``watched``; return those that did not confirm.

        Silent hosts are not waited for: their agents end the processes when they receive the order, or after their own timeout.
        """
        with self._lock:
            self._sweep += 1
            self._keep = ""
        deadline = time.monotonic() + patience_s
        while True:
            now = time.monotonic()
            unconfirmed = [host for host in watched if host.swept < self._sweep]
            if now > deadline or not any(now - host.heard_s < _MAX_SILENCE_S for host in unconfirmed):
                return unconfirmed
            time.sleep(_POLL_S)

    def locked(self, host: WatchedHost) -> bool:
        """Whether a run holds the run directory, as seen by ``host``. Call only while no start is active."""
        with self._lock:
            self._try_lock += 1
        deadline = time.monotonic() + _MAX_SILENCE_S
        while host.lock_attempt < self._try_lock and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return host.locked

    def spare_start(self, start: str) -> None:
        """Exclude a start from sweeps; a host that comes back ends the processes of all other starts."""
        with self._lock:
            self._keep = start

    def _start_agent(self, host: WatchedHost) -> None:
        host.close()
        with self._lock:
            host.agent_number, host.heard_s = host.agent_number + 1, 0.0
            host.swept = host.lock_attempt = host.calls = 0
            host.started_s = time.monotonic()
        entry = self._entries.get(host.name)
        python, directory = (entry.executable, entry.directory or "") if entry is not None else (sys.executable, "")
        host.agent = HostAgent(self._agent, host.name, host.local, python, directory)
        host.agent.send(
            "report",
            token=self.token,
            address=("127.0.0.1" if host.local else source_address(host.address)) or "127.0.0.1",
            port=self.port,
            host=host.number,
            number=host.agent_number,
            supervisor=self._supervisor,
            timeout_s=self.timeout_s,
            run_dir=str(self._run_dir),
        )

    def _answer(self, line: bytes) -> bytes:
        """Answer an authentic call. Raises NotAuthentic if the caller lacks the token or repeats a call."""
        report = unseal(self.token, "caller", line)
        with self._lock:
            host, sender = self.watched[int(report["host"])], [report["host"], report["number"], report["call"]]
            leave = self._leave
            if int(report["number"]) != host.agent_number:
                leave = True  # an abandoned host: its agent may still have to end processes
            elif int(report["call"]) <= host.calls:
                raise NotAuthentic("a repeated call")
            else:
                host.calls, host.heard_s = int(report["call"]), time.monotonic()
                host.swept, host.lock_attempt = int(report["swept"]), int(report["tried"])
                host.locked = bool(report["locked"])
                host.run = {key: int(report["run"][key]) for key in RUN_STATE}
                host.memory_kills, host.folders = int(report["memory_kills"]), list(report["folders"])
            orders = {"sweep": self._sweep, "keep": self._keep or None, "try_lock": self._try_lock, "leave": leave}
        return seal(self.token, "listener", {"to": sender, **orders})
