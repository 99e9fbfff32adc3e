"""One connection of the HTTP server: requests are received within a time, guarded, and answered whole or piece by piece."""

from __future__ import annotations

import contextlib
import hmac
import io
import json
import logging
import select
import socket
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any

from hetero_mpi.serve.web.server import HttpError, WebServer

RECEIVE_S = 20.0
"""A request's line and headers arrive within this time, and its body within as much again..."""
SLOWEST_BYTES_S = 50_000
"""...and what its bytes take at this rate."""
SILENT_S = 60.0
"""A client that takes nothing of its answer for so long has gone."""
_LINGER_S, _LINGER_BYTES = 2.0, 32 << 20
"""A client that is answered before all of its request has come may go on sending for so long, and so much."""
_PROBE_S = 1.0
"""A client that has closed its sending side is asked after this time whether it still listens."""
_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPALIVE": 15, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 3}
"""Options by which the system asks whether the system of a silent client is there: after 15 s, three times (Linux, macOS)."""
_MAX_AHEAD_BYTES = 1 << 20
"""Bytes behind a request that are kept for the next one while the request is answered."""
_LOG = logging.getLogger(__name__)


class Connection(BaseHTTPRequestHandler):
    """A connection whose requests ``answer`` answers. Its helpers raise HttpError, which becomes the answer."""

    protocol_version = "HTTP/1.1"
    server_version = "hetero_mpi"
    disable_nagle_algorithm = True
    timeout = SILENT_S
    server: WebServer
    _deadline = 0.0
    _closed_at: float | None = None
    """When the client's closed side was seen."""
    _may_probe = True
    _begun = False
    """The answer is under way: no other can take its place."""

    def answer(self) -> None:
        """Send an answer to ``self.command`` (GET, HEAD or POST), ``self.headers``, ``self.route`` and ``self.body``.

        :raises HttpError: is sent instead.
        """
        raise NotImplementedError

    @property
    def route(self) -> str:
        return self.path.partition("?")[0].rstrip("/")

    def check_key(self) -> str:
        """The name of the key that the client shows; "" where none is asked for. The time that it takes tells nothing of keys."""
        keys = self.server.keys
        scheme, _, shown = self.headers.get("Authorization", "").strip().partition(" ")
        found = [name for name, key in keys.items() if hmac.compare_digest(shown.strip().encode(), key.encode())]
        if keys and not (found and scheme.lower() == "bearer"):
            raise HttpError(401, "wrong or missing API key (Authorization: Bearer ...)", code="invalid_api_key")
        return found[0] if found else ""

    @contextlib.contextmanager
    def body(self, kind: str, largest: int) -> Iterator[bytes]:
        """The body, which must be of the type ``kind`` and may have ``largest`` bytes. It counts until the block's end."""
        found = self.headers.get_content_type() if "Content-Type" in self.headers else "none"
        if found != kind:
            raise HttpError(415, f"the body must be of the type {kind} (Content-Type), not {found[:60]}")
        text = ",".join(self.headers.get_all("Content-Length", []))
        if not text.isascii() or not text.isdigit() or "Transfer-Encoding" in self.headers:
            raise HttpError(411, "a request needs one Content-Length, and no Transfer-Encoding")
        length = int(text[:18])
        if len(text) > 18 or length > largest:
            raise HttpError(413, f"a request may have {largest:,} bytes, this one has {text[:18]}")
        with self.server.receiving(length):
            self._deadline = time.monotonic() + RECEIVE_S + length / SLOWEST_BYTES_S
            try:
                content = self.rfile.read(length)
            except TimeoutError:
                raise HttpError(408, f"the {length:,} bytes of the body took too long") from None
            if len(content) < length:
                raise HttpError(400, f"the body ended after {len(content):,} of {length:,} bytes (Content-Length)")
            yield content

    def alive(self) -> bool:
        """True while the client is there. One that has closed its sending side may be, or may have gone. It is told to continue,
        which every client of HTTP/1.1 takes before its answer, and which the system of one that has gone refuses.

        The end of its bytes comes behind all of them, so those are read.
        """
        if self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            return False
        looking = select.poll()
        looking.register(self.connection, select.POLLIN)
        if not looking.poll(0) or self._arriving.read_ahead():
            self.close_connection |= self._arriving.overrun
            return True
        now = time.monotonic()
        self._closed_at = now if self._closed_at is None else self._closed_at
        if now - self._closed_at > _PROBE_S and self._may_probe and self.request_version != "HTTP/1.0":
            self._may_probe = False
            self.connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        return True

    def send(self, value: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> None:
        """A JSON object."""
        self.send_content(json.dumps(value).encode(), "application/json", headers, status)

    def send_content(self, content: bytes, kind: str, headers: dict[str, str] | None = None, status: int = 200) -> None:
        self._head(status, kind, {"Content-Length": str(len(content)), **(headers or {})}, content)

    @contextlib.contextmanager
    def events(self) -> Iterator[Callable[[str], None]]:
        """An answer of server-sent events; yields what sends one. An HttpError of the block is one of them.

        After an error of the block, as after the death of this process, the last chunk is missing: the client sees that the answer
        is cut. HTTP/1.0 has no chunks: there an answer ends with its connection, and a cut one looks like a whole one.
        """
        chunked = self.request_version >= "HTTP/1.1"
        self.close_connection = self.close_connection or not chunked
        coding = {"Transfer-Encoding": "chunked"} if chunked else {}
        self._head(200, "text/event-stream", {"Cache-Control": "no-cache", **coding})

        def send(content: bytes) -> None:
            self.wfile.write(b"%x\r\n%b\r\n" % (len(content), content) if chunked else content)

        def tell(data: str) -> None:
            send(f"data: {data}\n\n".encode())

        try:
            yield tell
        except HttpError as error:
            tell(json.dumps(error.body()))
            raise
        send(b"")

    def do_GET(self) -> None:
        if "Content-Length" in self.headers or "Transfer-Encoding" in self.headers:
            self.close_connection = True  # the body is not read, and must not be taken for the next request
        self._guarded(self.answer)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self._guarded(self.answer)

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name in _KEEPALIVE.keys() & vars(socket).keys():
            self.connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), _KEEPALIVE[name])
        self.rfile.close()
        self._arriving = _Arriving(self.connection, lambda: self._deadline)
        self.rfile = io.BufferedReader(self._arriving)

    def handle_one_request(self) -> None:
        self._deadline = time.monotonic() + RECEIVE_S
        self._closed_at = None
        self._may_probe, self._begun = True, False
        super().handle_one_request()

    def parse_request(self) -> bool:
        """And whether it may be answered, whatever its method and path."""
        return super().parse_request() and self._guarded(self._check_names)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """The answer to what ``http.server`` refuses by itself."""
        self.close_connection = True
        self.send(HttpError(code, message or HTTPStatus(code).phrase).body(), code)

    def finish(self) -> None:
        """Read what a refused client still sends: closed on unread bytes, the connection would be reset, and the answer lost."""
        deadline, left = time.monotonic() + _LINGER_S, _LINGER_BYTES
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            while left > 0 and (rest_s := deadline - time.monotonic()) > 0:
                self.connection.settimeout(rest_s)
                if not (got := len(self.connection.recv(1 << 16))):
                    break
                left -= got
        super().finish()

    def log_message(self, format: str, *arguments: Any) -> None:
        _LOG.info("%s: " + format, self.client_address[0], *arguments)

    def _check_names(self) -> None:
        names, hosts = self.server.names, self.headers.get_all("Host", [])
        if len(hosts) != 1:
            raise HttpError(400, f"a request names one Host, this one {len(hosts)}")
        if not names.has_host(hosts[0]):
            raise HttpError(
                403,
                f"this server is not asked under the name {hosts[0][:100]!r} (Host); start it with --allow-host NAME "
                f"if that is one of its names",
                code="foreign_host",
            )
        for origin in self.headers.get_all("Origin", []):
            if not names.has_origin(origin, hosts[0]):
                raise HttpError(
                    403,
                    f"pages of {origin[:100]!r} (Origin) may not ask this server; start it with --allow-host NAME, the "
                    f"name of that site, if they may",
                    code="foreign_origin",
                )

    def _guarded(self, action: Callable[[], None]) -> bool:
        with self.server.answering():
            try:
                action()
                return True
            except HttpError as error:
                self.close_connection = True  # its body may not have been read
                if not self._begun:
                    self.send(error.body(), error.status, {"Allow": error.allow} if error.allow else None)
                return False
            except Exception as error:  # a defect, which the server logs
                self.close_connection = True
                if not self._begun and not isinstance(error, OSError):
                    self.send(HttpError(500, "this request met a defect of the server; its log has more").body(), 500)
                raise

    def _head(self, status: int, kind: str, more: dict[str, str], content: bytes = b"") -> None:
        """Status and headers, and ``content`` with them: one write, one packet."""
        self._may_probe, self._begun = False, True
        if self.request_version == "HTTP/0.9":  # also what is no HTTP at all: it is told so
            self.request_version = "HTTP/1.0"
        lines = {"Content-Type": kind, **more, **({"Connection": "close"} if self.close_connection else {})}
        self.log_request(status)
        self.send_response_only(status, HTTPStatus(status).phrase)
        for name, value in {"X-Content-Type-Options": "nosniff", **lines}.items():
            self.send_header(name, value)
        self._headers_buffer.append(b"\r\n" + (b"" if self.command == "HEAD" else content))  # type: ignore[attr-defined]
        self.flush_headers()


class _Arriving(io.RawIOBase):
    """The bytes that a client sends, up to a deadline: however few come at a time, they end."""

    def __init__(self, connection: socket.socket, deadline: Callable[[], float]) -> None:
        self._connection, self._deadline = connection, deadline
        self._ahead, self.overrun = bytearray(), False  # overrun: bytes are lost, so that no request can follow

    def readable(self) -> bool:
        return True

    def read_ahead(self) -> bool:
        """Read what has come, without waiting where something has; returns False at the end of all bytes."""
        content = self._connection.recv(1 << 16)
        self.overrun |= len(self._ahead) + len(content) > _MAX_AHEAD_BYTES
        if not self.overrun:
            self._ahead += content
        return bool(content)

    def readinto(self, buffer: Any, /) -> int:
        if count := min(len(buffer), len(self._ahead)):
            buffer[:count] = self._ahead[:count]
            del self._ahead[:count]
            return count
        left_s = self._deadline() - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the request took too long")
        self._connection.settimeout(left_s)
        try:
            return self._connection.recv_into(buffer)
        finally:
            self._connection.settimeout(SILENT_S)
