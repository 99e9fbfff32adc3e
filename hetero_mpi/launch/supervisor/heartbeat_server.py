"""The supervisor's end of the host agents: which hosts answer, which have fallen silent, and orders to the agents.

A machine is judged by its silence alone. A cable that is out for twelve seconds and a machine without power look alike until the
cable is back, so no host is given up sooner than ``timeout_s``.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero_mpi.launch.hosts.agent import Helper
from hetero_mpi.launch.hosts.authenticated import AuthenticatedServer
from hetero_mpi.launch.hosts.hostfile import HostEntry
from hetero_mpi.launch.hosts.interface import local_addresses, resolve, source_address
from hetero_mpi.launch.supervisor.host_agent import CALL_S, RUN_STATE, AgentOrders, as_line

if TYPE_CHECKING:
    from hetero_mpi.launch.hosts.hosts_toml import Host

_POLL_S = 0.02
_AGAIN_S = 5.0
"""Seconds between attempts to replace a host agent that has ended while its host takes part."""
_MUTE_S = 2.0
"""A host that has been silent for so long is not waited for where nothing depends on it."""
_CALLER_S = 2.0
"""Longest wait for a caller's next byte."""
_OWN_PAUSE_S = 2.0
"""A longer time between two looks means that the supervisor itself was stopped."""


@dataclass
class WatchedHost:
    """A host, and the last report of its host agent. Times are of ``time.monotonic``."""

    number: int
    entry: HostEntry
    address: str
    local: bool
    agent_number: int = 0
    """Number of its present host agent; earlier ones are told to leave."""
    helper: Helper | None = None
    started_s: float = 0.0
    heard_s: float = 0.0
    """When the present host agent last called; 0.0: never."""
    swept: int = 0
    tried: int = 0
    locked: bool = False
    run: dict[str, int] = field(default_factory=dict)
    memory_kills: int = 0
    """Processes that the host's kernel had killed for lack of memory, by the last call."""

    @property
    def name(self) -> str:
        return self.entry.name

    def complaint(self) -> str:
        """The last line that the launch agent, or the host agent, has written to stderr; else "no answer"."""
        return self.helper.complaint("no answer") if self.helper is not None else "no answer"

    def ended(self) -> bool:
        """Has the host agent ended, or the connection it was started through?"""
        return self.helper is None or self.helper.ended()

    def close(self) -> None:
        """Close our end of the connection that started the host agent, which does not need it."""
        if self.helper is not None:
            self.helper.close()
            self.helper = None


class HeartbeatServer:
    """Listens to the host agents of all hosts. A context manager: on leaving, it tells them to leave.

    Args:
        timeout_s: silence after which a host counts as dead.
        entries: name -> entry of the hosts file, for hosts whose Python or directory is not as here.
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
        own = {item.address for item in local_addresses()}
        self.watched = []
        for number, entry in enumerate(hosts):
            address = resolve(entry.name)
            self.watched.append(WatchedHost(number, entry, address, address in own or address.startswith("127.")))
        self.timeout_s = timeout_s
        self._agent, self._supervisor, self._run_dir = tuple(agent), supervisor, run_dir
        self._entries = entries or {}
        self._lock = threading.Lock()
        self._sweep, self._keep, self._try_lock, self._leave = 0, "", 0, False
        self._looked_s = time.monotonic()
        # Callers without the token get no answer, so the port may be open to networks that hosts are yet to come from.
        address = "127.0.0.1" if all(host.local for host in self.watched) else ""
        self._server = AuthenticatedServer(address, lambda _, lines: lines.write(self._answer(lines.read())), _CALLER_S)

    def __enter__(self) -> HeartbeatServer:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait a moment for the host agents to hear that they may leave."""
        self._leave = True
        deadline = time.monotonic() + 2 * CALL_S
        while not all(host.ended() for host in self.watched) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        for host in self.watched:
            host.close()
        self._server.close()

    def probe(self, given_up: Iterable[int], patience_s: float) -> list[WatchedHost]:
        """The hosts that answer now, in the order of the list. Host agents are started where none is known to run.

        Returns as soon as each host has answered or its launch agent has ended without an answer; at the latest after
        ``patience_s``. Hosts ``given_up`` (numbers) are asked too, but not waited for.
        """
        began, abandoned = time.monotonic(), set(given_up)
        for host in self.watched:
            if host.number in abandoned or host.ended() or time.monotonic() - host.heard_s >= _MUTE_S:
                self._start_agent(host)
        while True:
            answered = [host for host in self.watched if host.heard_s > began]
            waited_for = [p for p in self.watched if p not in answered and p.number not in abandoned and not p.ended()]
            if not waited_for or time.monotonic() > began + patience_s:
                return answered
            time.sleep(_POLL_S)

    def silent(self, watched: Sequence[WatchedHost]) -> list[WatchedHost]:
        """The hosts of ``watched`` not heard of for ``timeout_s``; to be called often. Replaces host agents that have ended."""
        now = time.monotonic()
        pause_s, self._looked_s = now - self._looked_s, now
        if pause_s > _OWN_PAUSE_S:  # this process was stopped, or its machine asleep: nobody could be heard
            for host in watched:
                host.heard_s += pause_s
        for host in watched:
            if host.ended() and now > max(host.started_s, host.heard_s) + _AGAIN_S:
                heard = host.heard_s
                self._start_agent(host)
                host.heard_s = heard
        return [host for host in watched if now - host.heard_s > self.timeout_s]

    def sweep(self, watched: Sequence[WatchedHost], patience_s: float) -> list[WatchedHost]:
        """End the job's processes on all of ``watched``; returns the hosts that did not confirm it.

        A host that says nothing at all is not waited for: its agent ends the processes when it hears of this, or by itself.
        """
        with self._lock:
            self._sweep += 1
            self._keep = ""
        deadline = time.monotonic() + patience_s
        while True:
            now = time.monotonic()
            left = [host for host in watched if host.swept < self._sweep]
            if now > deadline or not any(now - host.heard_s < _MUTE_S for host in left):
                return left
            time.sleep(_POLL_S)

    def locked(self, host: WatchedHost) -> bool:
        """Does a run hold the run directory, as this host sees it? To be called while no start is under way."""
        with self._lock:
            self._try_lock += 1
        deadline = time.monotonic() + _MUTE_S
        while host.tried < self._try_lock and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return host.locked

    def keep(self, start: str) -> None:
        """From now on, sweeping spares this start. A host that comes back ends all others and leaves this one alone."""
        with self._lock:
            self._keep = start

    def _start_agent(self, host: WatchedHost) -> None:
        host.close()
        with self._lock:
            host.agent_number, host.heard_s, host.swept, host.tried = host.agent_number + 1, 0.0, 0, 0
            host.started_s = time.monotonic()
        entry = self._entries.get(host.name)
        python, directory = (entry.executable, entry.directory or "") if entry is not None else (sys.executable, "")
        host.helper = Helper(
            self._agent, host.name, host.local, python, "hetero_mpi.launch.supervisor.host_agent", directory
        )
        orders = AgentOrders(
            token=self._server.token,
            address=("127.0.0.1" if host.local else source_address(host.address)) or "127.0.0.1",
            port=self._server.port,
            host=host.number,
            number=host.agent_number,
            supervisor=self._supervisor,
            timeout_s=self.timeout_s,
            run_dir=str(self._run_dir),
        )
        host.helper.write(as_line(orders))

    def _answer(self, report: dict[str, Any]) -> dict[str, Any]:
        """The answer to a caller that has the token."""
        with self._lock:
            host = self.watched[int(report["host"])]
            if int(report["number"]) != host.agent_number:
                # Of a host that was given up: it may still have to end what runs there.
                return self._orders_now(leave=True)
            host.heard_s = time.monotonic()
            host.swept, host.tried, host.locked = int(report["swept"]), int(report["tried"]), bool(report["locked"])
            host.run = {key: int(report["run"][key]) for key in RUN_STATE}
            host.memory_kills = int(report["memory_kills"])
            return self._orders_now(self._leave)

    def _orders_now(self, leave: bool) -> dict[str, Any]:
        return {"sweep": self._sweep, "keep": self._keep or None, "try_lock": self._try_lock, "leave": leave}
