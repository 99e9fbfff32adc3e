"""An HTTP server on threads beside the main one: how many connections, how long a request may take, who may ask. It never calls
MPI, and knows nothing of what is answered.

It stands on ``http.server``. waitress 3.0.2 was tried: it either answers clients that have closed their sending side or notices
those that leave before anything is sent, has no time limit for a request whose bytes drip, and resets who sends too much.

It is asked under known names only. Browsers let every page of the web send requests to this machine, and by a name of its own
that points here (DNS rebinding) read the answers. Such requests carry another name in Host, or the page's in Origin; programs that
are no browsers are not hindered.
"""

from __future__ import annotations

import contextlib
import logging
import re
import resource
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

import psutil

from hetero_mpi.util.background import Background
from hetero_mpi.util.errors import UserError

LOCAL = ("127.0.0.1", "::1", "localhost")
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\s:/?#@\[\]]+)(:\d*)?", re.IGNORECASE)


@dataclass(frozen=True)
class Names:
    """``own``: names and addresses in small letters. ``more``: those that the user has named besides."""

    own: frozenset[str]
    more: frozenset[str] = frozenset()

    @classmethod
    def of(cls, address: str, more: Iterable[str] = ()) -> Names:
        """For a server that listens on ``address``: those of this machine where it can be reached from others."""
        wider = _machine() if address not in LOCAL else ()
        return cls(frozenset(map(_plain, (*LOCAL, address, *wider))), frozenset(map(_plain, more)))

    def has_host(self, host: str) -> bool:
        """``host``: the value of a Host header."""
        found = _HOST.fullmatch(host)
        return found is not None and _plain(found[1]) in self.own | self.more

    def has_origin(self, origin: str, host: str) -> bool:
        """True if a page of ``origin`` comes from here. ``host``: the Host of its request."""
        try:
            address = urlsplit(origin)
            return address.netloc.lower() == host.lower() or (address.hostname or "") in self.more
        except ValueError:
            return False


def _plain(name: str) -> str:
    return name.strip("[]").partition("%")[0].rstrip(".").lower()


def _machine() -> list[str]:
    """This machine's names and addresses."""
    name = socket.gethostname()
    addresses = [one.address for some in psutil.net_if_addrs().values() for one in some]
    return [name, name.partition(".")[0], f"{name.partition('.')[0]}.local", socket.getfqdn(), *addresses]


MOST_CONNECTIONS = 512
"""At once; further ones wait in the system's queue until one has ended."""
_QUEUE = 1024
MOST_BODY_BYTES = 256 << 20
"""Bodies of all requests that are being received."""
_LOOK_S = 0.1
_LOG = logging.getLogger(__name__)


class HttpError(Exception):
    """An answer other than 200, in the form of OpenAI's API. ``code``: for programs; ``allow``: of a 405, the methods to use."""

    def __init__(self, status: int, message: str, code: str | None = None, allow: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.allow = status, code, allow

    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket that holds the port: it listens, and who connects waits for a server to take it. Raises UserError: the port cannot
    be had.
    """
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
        found.listen(_QUEUE)  # a port that is bound only can be taken by another who reuses addresses
    except (OSError, OverflowError) as error:
        found.close()
        raise UserError(
            "serve.address", f"--host {host} --port {port} cannot be had: {error}; name another (0: any free port)"
        ) from None
    return found


class WebServer(ThreadingHTTPServer):
    """Answers requests from its construction until ``stop``, each connection on a thread of its own.

    Args:
        bound: what ``bound_socket`` returned; the server closes it.
        connection: what answers: a ``Connection``.
        names: under which it may be asked.
        keys: name -> key, of which clients must show one where ``connection`` asks for it; none: nothing.
    """

    daemon_threads = True

    def __init__(
        self,
        bound: socket.socket,
        connection: type[BaseHTTPRequestHandler],
        names: Names,
        keys: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(bound.getsockname(), connection, bind_and_activate=False)
        self.socket.close()
        self.socket = bound
        self.names, self.keys = names, keys
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._free = threading.Semaphore(max(1, min(MOST_CONNECTIONS, files // 2)))
        self._ending = False
        self._counting = threading.Lock()
        self._under_way = self._body_bytes = 0
        self._serving = Background("answering requests", lambda: self.serve_forever(poll_interval=_LOOK_S))

    @property
    def url(self) -> str:
        host, port = (str(part) for part in self.server_address[:2])
        host = socket.gethostname() if host in ("0.0.0.0", "::") else host  # these are no address to open
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def stop(self, patience_s: float) -> None:
        """Take no more requests, and give those under way so long to tell their clients."""
        deadline = time.monotonic() + patience_s
        while self._under_way and time.monotonic() < deadline:
            time.sleep(0.01)
        self._ending = True
        self.shutdown()
        self._serving.finish()
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        while not self._free.acquire(timeout=_LOOK_S):
            if self._ending:
                self.shutdown_request(request)
                return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread can be started
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """While one request was answered, its client has gone, or a defect was met: the others go on."""
        if not isinstance(sys.exc_info()[1], OSError):
            _LOG.exception("answering %s", client_address)

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        with self._counting:
            self._under_way += 1
        try:
            yield
        finally:
            with self._counting:
                self._under_way -= 1

    @contextlib.contextmanager
    def receiving(self, length: int) -> Iterator[None]:
        """A block that holds a body. Raises HttpError: there is no room for it."""
        with self._counting:
            if self._body_bytes + length > MOST_BODY_BYTES:
                raise HttpError(503, f"requests of {self._body_bytes:,} bytes are being received; try again later")
            self._body_bytes += length
        try:
            yield
        finally:
            with self._counting:
                self._body_bytes -= length
