"""A threaded HTTP server that limits connections, request times and access, whatever it serves. It never calls MPI.

It is based on ``http.server``. waitress 3.0.2 was rejected: it cannot both answer clients that have closed their sending side and
detect clients that leave before a response, has no time limit for slow request bodies, and resets clients that send too much.
uvicorn 0.54 was rejected because it has no time limit for slow request headers and disconnects clients that have closed their
sending side.

The server answers only to known host names. Browsers let any web page send requests to this machine and, using a host name that
resolves to it (DNS rebinding), read the responses. Such requests carry a foreign name in the Host or Origin header; programs other
than browsers are unaffected.
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
    """Host names in lower case: ``own_names`` are the server's names and addresses, ``extra_names`` were added by the user."""

    own_names: frozenset[str]
    extra_names: frozenset[str] = frozenset()

    @classmethod
    def for_address(cls, address: str, more: Iterable[str] = ()) -> Names:
        """Return the names for a server that listens on ``address``, with this machine's names unless it is a loopback address."""
        machine_names = _machine_names() if address not in LOCAL else ()
        return cls(frozenset(map(_normalized, (*LOCAL, address, *machine_names))), frozenset(map(_normalized, more)))

    def has_host(self, host: str) -> bool:
        """Return whether a Host header names this server."""
        match = _HOST.fullmatch(host)
        return match is not None and _normalized(match[1]) in self.own_names | self.extra_names

    def has_origin(self, origin: str, host: str) -> bool:
        """Return whether a page from ``origin`` may use this server. ``host`` is the Host header of the page's request."""
        try:
            address = urlsplit(origin)
            return address.netloc.lower() == host.lower() or (address.hostname or "") in self.extra_names
        except ValueError:
            return False


def _normalized(name: str) -> str:
    return name.strip("[]").partition("%")[0].rstrip(".").lower()


def _machine_names() -> list[str]:
    """Return this machine's host names and addresses."""
    name = socket.gethostname()
    addresses = [entry.address for entries in psutil.net_if_addrs().values() for entry in entries]
    return [name, name.partition(".")[0], f"{name.partition('.')[0]}.local", socket.getfqdn(), *addresses]


MAX_CONNECTIONS = 512
"""Maximum number of concurrent connections; further ones wait in the operating system's queue."""
_BACKLOG_SIZE = 1024
MAX_PENDING_BODY_BYTES = 256 << 20
"""Maximum total size of the request bodies in memory."""
_POLL_INTERVAL_S = 0.1
_LOG = logging.getLogger(__name__)


class HttpError(Exception):
    """An error response in OpenAI's format. Programs can test ``code``; ``allow`` lists the methods allowed after a 405."""

    def __init__(self, status: int, message: str, code: str | None = None, allow: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.allow = status, code, allow

    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}


def bound_socket(host: str, port: int) -> socket.socket:
    """Open a listening socket, on which clients wait until a server starts. Raises UserError if the port is not available."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG_SIZE)  # another program could take a port that is bound but not listening
    except (OSError, OverflowError) as error:
        listener.close()
        raise UserError(
            "serve.address", f"--host {host} --port {port} is not available: {error}; choose another (0: any free port)"
        ) from None
    return listener


class WebServer(ThreadingHTTPServer):
    """Answers requests with one thread per connection, from construction until ``stop``.

    Args:
        bound: The socket from ``bound_socket``; the server closes it.
        connection: The request handler, a subclass of ``Connection``.
        names: The host names of the server.
        keys: Maps client names to API keys; where the handler checks keys, a client must send one. If empty, access is open.
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
        self._free_slots = threading.Semaphore(max(1, min(MAX_CONNECTIONS, files // 2)))
        self._ending = False
        self._lock = threading.Lock()
        self._under_way = self._body_bytes = 0
        self._background = Background("answering requests", lambda: self.serve_forever(poll_interval=_POLL_INTERVAL_S))

    @property
    def url(self) -> str:
        host, port = (str(part) for part in self.server_address[:2])
        host = socket.gethostname() if host in ("0.0.0.0", "::") else host  # wildcard addresses cannot be opened
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def stop(self, patience_s: float) -> None:
        """Wait up to ``patience_s`` for active requests to finish, then stop accepting requests and close the socket."""
        deadline = time.monotonic() + patience_s
        while self._under_way and time.monotonic() < deadline:
            time.sleep(0.01)
        self._ending = True
        self.shutdown()
        self._background.finish()
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        while not self._free_slots.acquire(timeout=_POLL_INTERVAL_S):
            if self._ending:
                self.shutdown_request(request)
                return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread can be started
            self._free_slots.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free_slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log the exception as a bug unless the client has merely disconnected. Other connections continue."""
        if not isinstance(sys.exc_info()[1], OSError):
            _LOG.exception("answering %s", client_address)

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        with self._lock:
            self._under_way += 1
        try:
            yield
        finally:
            with self._lock:
                self._under_way -= 1

    @contextlib.contextmanager
    def receiving(self, length: int) -> Iterator[None]:
        """Reserve memory for a request body during the block. Raises HttpError if the pending bodies are too large."""
        with self._lock:
            if self._body_bytes + length > MAX_PENDING_BODY_BYTES:
                raise HttpError(503, f"{self._body_bytes:,} bytes of requests are being received; try again later")
            self._body_bytes += length
        try:
            yield
        finally:
            with self._lock:
                self._body_bytes -= length
