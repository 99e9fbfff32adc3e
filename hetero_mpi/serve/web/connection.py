"""One HTTP connection: receives requests within a time limit, checks access, and sends complete or streamed responses."""

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

RECEIVE_TIMEOUT_S = 20.0
"""Time limit for receiving the request line and headers; also the fixed part of the time limit for the body."""
MIN_BYTES_PER_S = 50_000
"""The time limit for a body also includes its transfer time at this rate."""
SEND_TIMEOUT_S = 60.0
"""A client that reads nothing of its response for this long is considered disconnected."""
_LINGER_S, _LINGER_BYTES = 2.0, 32 << 20
"""Limits on reading the rest of a request that was answered before it had arrived completely."""
_PROBE_DELAY_S = 1.0
"""Delay before probing whether a client that has closed its sending side is still listening."""
_KEEPALIVE_OPTIONS = {"TCP_KEEPIDLE": 15, "TCP_KEEPALIVE": 15, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 3}
"""TCP keep-alive options: probe the host of a silent client after 15 s, three times (Linux, macOS)."""
_MAX_AHEAD_BYTES = 1 << 20
"""Maximum number of bytes of the next request to buffer while a response is being sent."""
_LOG = logging.getLogger(__name__)


class Connection(BaseHTTPRequestHandler):
    """A client connection. Subclasses implement ``answer``; an HttpError raised by a helper method becomes the response."""

    protocol_version = "HTTP/1.1"
    server_version = "hetero_mpi"
    disable_nagle_algorithm = True
    timeout = SEND_TIMEOUT_S
    server: WebServer
    _deadline = 0.0
    _closed_s: float | None = None
    """Time at which the server detected that the client had closed its sending side."""
    _may_probe = True
    _response_started = False
    """Whether the response has started, so that no error response can replace it."""

    def answer(self) -> None:
        """Respond to the request in ``command`` (GET, HEAD or POST), ``headers``, ``route`` and ``body``."""
        raise NotImplementedError

    @property
    def route(self) -> str:
        return self.path.partition("?")[0].rstrip("/")

    def check_key(self) -> str:
        """Return the name of the client's API key, or "" if none is required. Keys are compared in constant time."""
        keys = self.server.keys
        scheme, _, given_key = self.headers.get("Authorization", "").strip().partition(" ")
        matches = [name for name, key in keys.items() if hmac.compare_digest(given_key.strip().encode(), key.encode())]
        if keys and not (matches and scheme.lower() == "bearer"):
            raise HttpError(401, "wrong or missing API key (Authorization: Bearer ...)", code="invalid_api_key")
        return matches[0] if matches else ""

    @contextlib.contextmanager
    def body(self, kind: str, max_bytes: int) -> Iterator[bytes]:
        """Yield the request body, with content type ``kind`` and at most ``max_bytes``; it counts as pending during the block."""
        content_type = self.headers.get_content_type() if "Content-Type" in self.headers else "none"
        if content_type != kind:
            raise HttpError(415, f"the body must have Content-Type {kind}, not {content_type[:60]}")
        text = ",".join(self.headers.get_all("Content-Length", []))
        if not text.isascii() or not text.isdigit() or "Transfer-Encoding" in self.headers:
            raise HttpError(411, "a request must have exactly one Content-Length header and no Transfer-Encoding")
        length = int(text[:18])
        if len(text) > 18 or length > max_bytes:
            raise HttpError(413, f"a request may have at most {max_bytes:,} bytes, this one has {text[:18]}")
        with self.server.receiving(length):
            self._deadline = time.monotonic() + RECEIVE_TIMEOUT_S + length / MIN_BYTES_PER_S
            try:
                content = self.rfile.read(length)
            except TimeoutError:
                raise HttpError(408, f"the {length:,} bytes of the body took too long") from None
            if len(content) < length:
                raise HttpError(400, f"the body ended after {len(content):,} of {length:,} bytes (Content-Length)")
            yield content

    def alive(self) -> bool:
        """Return whether the client is still connected.

        A client that has closed its sending side may still be listening. It is sent a 100 Continue, which HTTP/1.1 clients accept
        before a response and which the host of a vanished client rejects. Data before the end of the stream is read ahead.
        """
        if self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            return False
        looking = select.poll()
        looking.register(self.connection, select.POLLIN)
        if not looking.poll(0) or self._reader.read_ahead():
            self.close_connection |= self._reader.overrun
            return True
        now = time.monotonic()
        self._closed_s = now if self._closed_s is None else self._closed_s
        if now - self._closed_s > _PROBE_DELAY_S and self._may_probe and self.request_version != "HTTP/1.0":
            self._may_probe = False
            self.connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        return True

    def send(self, value: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_content(json.dumps(value).encode(), "application/json", headers, status)

    def send_content(self, content: bytes, kind: str, headers: dict[str, str] | None = None, status: int = 200) -> None:
        self._head(status, kind, {"Content-Length": str(len(content)), **(headers or {})}, content)

    @contextlib.contextmanager
    def events(self) -> Iterator[Callable[[str], None]]:
        """Respond with server-sent events; yields a function that sends one event. An HttpError in the block is sent as an event.

        If the block fails or this process ends, the last chunk is missing, so the client can detect the truncation. In HTTP/1.0,
        which has no chunks, the response ends when the connection closes, and truncation cannot be detected.
        """
        chunked = self.request_version >= "HTTP/1.1"
        self.close_connection = self.close_connection or not chunked
        coding = {"Transfer-Encoding": "chunked"} if chunked else {}
        self._head(200, "text/event-stream", {"Cache-Control": "no-cache", **coding})

        def send(content: bytes) -> None:
            self.wfile.write(b"%x\r\n%b\r\n" % (len(content), content) if chunked else content)

        def send_event(data: str) -> None:
            send(f"data: {data}\n\n".encode())

        try:
            yield send_event
        except HttpError as error:
            send_event(json.dumps(error.body()))
            raise
        send(b"")

    def do_GET(self) -> None:
        if "Content-Length" in self.headers or "Transfer-Encoding" in self.headers:
            self.close_connection = True  # the body is not read, and must not be parsed as the next request
        self._guarded(self.answer)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self._guarded(self.answer)

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name in _KEEPALIVE_OPTIONS.keys() & vars(socket).keys():
            self.connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), _KEEPALIVE_OPTIONS[name])
        self.rfile.close()
        self._reader = _DeadlineReader(self.connection, lambda: self._deadline)
        self.rfile = io.BufferedReader(self._reader)

    def handle_one_request(self) -> None:
        self._deadline = time.monotonic() + RECEIVE_TIMEOUT_S
        self._closed_s = None
        self._may_probe, self._response_started = True, False
        super().handle_one_request()

    def parse_request(self) -> bool:
        """Parse the request and reject unknown host names and origins, whatever the method and path."""
        return super().parse_request() and self._guarded(self._check_names)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send the error response for a request that ``http.server`` rejects."""
        self.close_connection = True
        self.send(HttpError(code, message or HTTPStatus(code).phrase).body(), code)

    def finish(self) -> None:
        """Read the rest of a rejected request, as closing with unread data would reset the connection and lose the response."""
        deadline, bytes_left = time.monotonic() + _LINGER_S, _LINGER_BYTES
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            while bytes_left > 0 and (rest_s := deadline - time.monotonic()) > 0:
                self.connection.settimeout(rest_s)
                if not (received := len(self.connection.recv(1 << 16))):
                    break
                bytes_left -= received
        super().finish()

    def log_message(self, format: str, *arguments: Any) -> None:
        _LOG.info("%s: " + format, self.client_address[0], *arguments)

    def _check_names(self) -> None:
        names, hosts = self.server.names, self.headers.get_all("Host", [])
        if len(hosts) != 1:
            raise HttpError(400, f"a request must have one Host header, not {len(hosts)}")
        if not names.has_host(hosts[0]):
            raise HttpError(
                403,
                f"this server does not accept the host name {hosts[0][:100]!r} (Host); if it is one of the server's "
                f"names, start the server with --allow-host NAME",
                code="foreign_host",
            )
        for origin in self.headers.get_all("Origin", []):
            if not names.has_origin(origin, hosts[0]):
                raise HttpError(
                    403,
                    f"requests from {origin[:100]!r} (Origin) are not allowed; to allow them, start the server with "
                    f"--allow-host NAME, the name of that site",
                    code="foreign_origin",
                )

    def _guarded(self, action: Callable[[], None]) -> bool:
        with self.server.answering():
            try:
                action()
                return True
            except HttpError as error:
                self.close_connection = True  # its body may not have been read
                if not self._response_started:
                    self.send(error.body(), error.status, {"Allow": error.allow} if error.allow else None)
                return False
            except Exception as error:  # a bug, which the server logs
                self.close_connection = True
                if not self._response_started and not isinstance(error, OSError):
                    self.send(HttpError(500, "internal server error; see the server's log").body(), 500)
                raise

    def _head(self, status: int, kind: str, extra: dict[str, str], content: bytes = b"") -> None:
        """Send the status, the headers and ``content`` in a single write, so that they share a packet if they fit."""
        self._may_probe, self._response_started = False, True
        if self.request_version == "HTTP/0.9":  # also non-HTTP data, which gets an error
            self.request_version = "HTTP/1.0"
        lines = {"Content-Type": kind, **extra, **({"Connection": "close"} if self.close_connection else {})}
        self.log_request(status)
        self.send_response_only(status, HTTPStatus(status).phrase)
        for name, value in {"X-Content-Type-Options": "nosniff", **lines}.items():
            self.send_header(name, value)
        self._headers_buffer.append(b"\r\n" + (b"" if self.command == "HEAD" else content))  # type: ignore[attr-defined]
        self.flush_headers()


class _DeadlineReader(io.RawIOBase):
    """Reads a client's bytes until a deadline, which slow arrival does not extend."""

    def __init__(self, connection: socket.socket, deadline: Callable[[], float]) -> None:
        self._connection, self._deadline = connection, deadline
        self._ahead, self.overrun = bytearray(), False  # overrun: bytes were lost, so no further request can be parsed

    def readable(self) -> bool:
        return True

    def read_ahead(self) -> bool:
        """Read the available bytes without waiting. Returns False at the end of the stream."""
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
            self._connection.settimeout(SEND_TIMEOUT_S)
