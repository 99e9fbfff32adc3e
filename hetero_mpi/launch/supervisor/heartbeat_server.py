"""The supervisor's end of the host agents: which hosts answer, which have fallen silent, and orders to the agents.

A machine is judged by its silence alone. A cable that is out for twelve seconds and a machine without power look alike until the
cable is back, so no host is given up sooner than ``timeout_s``.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero_mpi.launch.hosts.agent import Helper
from hetero_mpi.launch.hosts.authenticated import AuthenticatedLines, AuthenticatedServer
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
        homes: name -> entry of the hosts file, for hosts whose Python or directory is not as here.
    """

    def __init__(
        self,
        hosts: Sequence[HostEntry],
        agent: Sequence[str],
        supervisor: str,
        timeout_s: float,
        run_dir: Path,
        homes: Mapping[str, Host] | None = None,
    ) -> None:
        own = {item.address for item in local_addresses()}
        self.posts = []
        for number, entry in enumerate(hosts):
            address = resolve(entry.name)
            self.posts.append(WatchedHost(number, entry, address, address in own or address.startswith("127.")))
        self.timeout_s = timeout_s
        self._agent, self._supervisor, self._run_dir = tuple(agent), supervisor, run_dir
        self._homes = homes or {}
        self._lock = threading.Lock()
        self._sweep, self._keep, self._try_lock, self._leave = 0, "", 0, False
        self._looked_s = time.monotonic()
        # Callers without the token get no answer, so the port may be open to networks that hosts are yet to come from.
        address = "127.0.0.1" if all(post.local for post in self.posts) else ""
        self._server = AuthenticatedServer(address, self._serve, _CALLER_S)

    def __enter__(self) -> HeartbeatServer:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait a moment for the host agents to hear that they may leave."""
        self._leave = True
        deadline = time.monotonic() + 2 * CALL_S
        while not all(post.ended() for post in self.posts) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        for post in self.posts:
            post.close()
        self._server.close()

    def probe(self, given_up: Iterable[int], patience_s: float) -> list[WatchedHost]:
        """The hosts that answer now, in the order of the list. Host agents are started where none is known to run.

        Returns as soon as each host has answered or its launch agent has ended without an answer; at the latest after
        ``patience_s``. Hosts ``given_up`` (numbers) are asked too, but not waited for.
        """
        began, abandoned = time.monotonic(), set(given_up)
        for post in self.posts:
            if post.number in abandoned or not self._listening(post):
                self._start_agent(post)
        while True:
            answered = [post for post in self.posts if post.heard_s > began]
            waited_for = [p for p in self.posts if p not in answered and p.number not in abandoned and not p.ended()]
            if not waited_for or time.monotonic() > began + patience_s:
                return answered
            time.sleep(_POLL_S)

    def silent(self, posts: Sequence[WatchedHost]) -> list[WatchedHost]:
        """The hosts of ``posts`` not heard of for ``timeout_s``; to be called often. Replaces host agents that have ended."""
        now = time.monotonic()
        pause_s, self._looked_s = now - self._looked_s, now
        if pause_s > _OWN_PAUSE_S:  # this process was stopped, or its machine asleep: nobody could be heard
            for post in posts:
                post.heard_s += pause_s
        for post in posts:
            if post.ended() and now > max(post.started_s, post.heard_s) + _AGAIN_S:
                heard = post.heard_s
                self._start_agent(post)
                post.heard_s = heard
        return [post for post in posts if now - post.heard_s > self.timeout_s]

    def sweep(self, posts: Sequence[WatchedHost], patience_s: float) -> list[WatchedHost]:
        """End the job's processes on all of ``posts``; returns the hosts that did not confirm it.

        A host that says nothing at all is not waited for: its agent ends the processes when it hears of this, or by itself.
        """
        with self._lock:
            self._sweep += 1
            self._keep = ""
        deadline = time.monotonic() + patience_s
        while True:
            now = time.monotonic()
            left = [post for post in posts if post.swept < self._sweep]
            if now > deadline or not any(now - post.heard_s < _MUTE_S for post in left):
                return left
            time.sleep(_POLL_S)

    def locked(self, post: WatchedHost) -> bool:
        """Does a run hold the run directory, as this host sees it? To be called while no start is under way."""
        with self._lock:
            self._try_lock += 1
        deadline = time.monotonic() + _MUTE_S
        while post.tried < self._try_lock and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return post.locked

    def keep(self, start: str) -> None:
        """From now on, sweeping spares this start. A host that comes back ends all others and leaves this one alone."""
        with self._lock:
            self._keep = start

    def _listening(self, post: WatchedHost) -> bool:
        return not post.ended() and time.monotonic() - post.heard_s < _MUTE_S

    def _start_agent(self, post: WatchedHost) -> None:
        post.close()
        with self._lock:
            post.agent_number, post.heard_s, post.swept, post.tried = post.agent_number + 1, 0.0, 0, 0
            post.started_s = time.monotonic()
        home = self._homes.get(post.name)
        python, directory = (home.executable, home.directory or "") if home is not None else (sys.executable, "")
        post.helper = Helper(
            self._agent, post.name, post.local, python, "hetero_mpi.launch.supervisor.host_agent", directory
        )
        post.helper.write(as_line(self._orders(post)))

    def _orders(self, post: WatchedHost) -> AgentOrders:
        return AgentOrders(
            token=self._server.token,
            address=("127.0.0.1" if post.local else source_address(post.address)) or "127.0.0.1",
            port=self._server.port,
            host=post.number,
            number=post.agent_number,
            supervisor=self._supervisor,
            timeout_s=self.timeout_s,
            run_dir=str(self._run_dir),
        )

    def _serve(self, _: socket.socket, lines: AuthenticatedLines) -> None:
        lines.write(self._answer(lines.read()))

    def _answer(self, report: dict[str, Any]) -> dict[str, Any]:
        """The answer to a caller that has the token."""
        with self._lock:
            post = self.posts[int(report["host"])]
            if int(report["number"]) != post.agent_number:
                # Of a host that was given up: it may still have to end what runs there.
                return self._orders_now(leave=True)
            post.heard_s = time.monotonic()
            post.swept, post.tried, post.locked = int(report["swept"]), int(report["tried"]), bool(report["locked"])
            post.run = {key: int(report["run"][key]) for key in RUN_STATE}
            post.memory_kills = int(report["memory_kills"])
            return self._orders_now(self._leave)

    def _orders_now(self, leave: bool) -> dict[str, Any]:
        return {"sweep": self._sweep, "keep": self._keep or None, "try_lock": self._try_lock, "leave": leave}
