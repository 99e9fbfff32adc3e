"""The HTTP server on rank 0: OpenAI's routes, errors in its form, answers whole or by server-sent events. It never calls MPI."""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from hetero_mpi.background import Background
from hetero_mpi.errors import UserError
from hetero_mpi.report.run_files.logs import say
from hetero_mpi.runtime.serve.api_requests import ApiError, Asked, ChatRequest, CompletionRequest, parse
from hetero_mpi.runtime.serve.service import Bodies, Service, Wording, ending_error

LARGEST_BODY_BYTES = 32 << 20
SILENT_S = 60
"""A client that neither sends nor takes anything for so long has gone."""
_LINGER_S = 2.0
"""A client that is answered before all of its request has come may go on sending for so long."""
_POSTED: dict[str, type[Asked]] = {"/v1/chat/completions": ChatRequest, "/v1/completions": CompletionRequest}
_LOG = logging.getLogger(__name__)


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket that holds the port: it listens, and who connects waits for a server to take it. Raises UserError: the port cannot
    be had.
    """
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
        found.listen(64)  # a port that is bound only can be taken by another who reuses addresses
    except (OSError, OverflowError) as error:
        found.close()
        raise UserError(
            f"--host {host} --port {port} cannot be had: {error}; name another (0: any free port)"
        ) from None
    return found


class ApiServer(ThreadingHTTPServer):
    """Answers requests from its construction until ``stop``.

    Args:
        bound: what ``bound_socket`` returned; the server closes it.
        token: what clients must show; None: nothing.
    """

    daemon_threads = True

    def __init__(self, bound: socket.socket, token: str | None, service: Service) -> None:
        super().__init__(bound.getsockname(), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = bound
        self.token, self.service = token, service
        self._begun = int(time.time())
        self._under_way = 0
        self._counting = threading.Lock()
        self._serving = Background("answering requests", lambda: self.serve_forever(poll_interval=0.1))

    @property
    def url(self) -> str:
        host, port = (str(part) for part in self.server_address[:2])
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def stop(self, patience_s: float) -> None:
        """Take no more requests, and give those under way so long to tell their clients."""
        deadline = time.monotonic() + patience_s
        while self._under_way and time.monotonic() < deadline:
            time.sleep(0.01)
        self.shutdown()
        self._serving.finish()
        self.server_close()

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

    def models(self) -> list[dict[str, Any]]:
        own = {"id": self.service.model.name, "object": "model", "created": self._begun, "owned_by": "hetero_mpi"}
        return [{**own, "max_model_len": self.service.context.tokens}]


class _Handler(BaseHTTPRequestHandler):
    """One connection, on a thread of its own."""

    protocol_version = "HTTP/1.1"
    server_version = "hetero_mpi"
    disable_nagle_algorithm = True
    timeout = SILENT_S
    server: ApiServer

    def do_GET(self) -> None:
        self._guarded(self._get)

    def do_POST(self) -> None:
        self._guarded(self._post)

    def finish(self) -> None:
        """Read what a refused client still sends: closed on unread bytes, the connection would be reset, and the answer lost."""
        deadline, left = time.monotonic() + _LINGER_S, LARGEST_BODY_BYTES
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

    def _guarded(self, answer: Callable[[Service], None]) -> None:
        with self.server.answering():
            try:
                answer(self.server.service)
            except ApiError as error:
                self.close_connection = True  # its body may not have been read
                self._send(error.body(), error.status)

    def _get(self, service: Service) -> None:
        if "Content-Length" in self.headers or "Transfer-Encoding" in self.headers:
            self.close_connection = True  # the body is not read, and must not be taken for the next request
        path = self._path()
        if path == "/health":
            if service.ending():
                raise ending_error()
            self._send({"status": "ok", **service.scheduler.counts()})
            return
        self._check_token()
        models = self.server.models()
        if path == "/v1/models":
            self._send({"object": "list", "data": models})
        elif path == f"/v1/models/{service.model.name}":
            self._send(models[0])
        else:
            raise ApiError(404, f"there is no {path} here", code="not_found")

    def _post(self, service: Service) -> None:
        self._check_token()
        kind = _POSTED.get(self._path())
        if kind is None:
            raise ApiError(404, f"there is no {self._path()} here; POST to {' or '.join(_POSTED)}", code="not_found")
        asked = parse(kind, self._body())
        task = service.task(asked)
        begin = time.monotonic()
        answer = service.scheduler.submit(task)
        wording = Wording(service.model.tokenizer, task, asked.stop_texts)
        bodies = Bodies(asked, service.model.name, len(task.prompt))
        try:
            pieces = service.pieces(answer, wording, self._alive)
            if asked.stream:
                self._stream(pieces, wording, bodies)
            else:
                self._send(bodies.whole("".join(pieces), wording))
        finally:
            answer.given_up.set()
            how = wording.finish or "broken off"
            say(
                f"{self._path()}: {len(task.prompt)} + {wording.tokens} tokens in {time.monotonic() - begin:.1f} s, {how}"
            )

    def _path(self) -> str:
        return self.path.partition("?")[0].rstrip("/")

    def _check_token(self) -> None:
        token = self.server.token
        scheme, _, shown = self.headers.get("Authorization", "").strip().partition(" ")
        right = scheme.lower() == "bearer" and hmac.compare_digest(shown.strip().encode(), (token or "").encode())
        if token is not None and not right:
            raise ApiError(401, "wrong or missing API key (Authorization: Bearer ...)", code="invalid_api_key")

    def _body(self) -> bytes:
        length = ",".join(self.headers.get_all("Content-Length", []))
        if not length.isascii() or not length.isdigit() or "Transfer-Encoding" in self.headers:
            raise ApiError(411, "a request needs one Content-Length, and no Transfer-Encoding")
        if len(length) > 18 or int(length) > LARGEST_BODY_BYTES:
            raise ApiError(413, f"a request may have {LARGEST_BODY_BYTES:,} bytes, this one has {length[:18]}")
        return self.rfile.read(int(length))

    def _alive(self) -> bool:
        """Is the client still there? One that has closed its side of the connection is not."""
        looking = select.poll()
        looking.register(self.connection, select.POLLIN)
        return not looking.poll(0) or bool(self.connection.recv(1, socket.MSG_PEEK))

    def _stream(self, pieces: Iterator[str], wording: Wording, bodies: Bodies) -> None:
        text = next(pieces)  # what fails before the first token has a status of its own
        self.close_connection = True
        self._head(200, "text/event-stream", {"Cache-Control": "no-cache"})
        self._tell(bodies.chunk(text, first=True))
        try:
            for text in pieces:
                if text:
                    self._tell(bodies.chunk(text))
        except ApiError as error:
            self._tell(error.body())
            return
        for chunk in bodies.last(wording):
            self._tell(chunk)
        self.wfile.write(b"data: [DONE]\n\n")

    def _tell(self, value: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")

    def _send(self, value: dict[str, Any], status: int = 200) -> None:
        content = json.dumps(value).encode()
        self._head(status, "application/json", {"Content-Length": str(len(content))}, content)

    def _head(self, status: int, kind: str, more: dict[str, str], content: bytes = b"") -> None:
        """Status and headers, and ``content`` with them: one write, one packet."""
        lines = {"Content-Type": kind, **more, **({"Connection": "close"} if self.close_connection else {})}
        self.log_request(status)
        self.send_response_only(status, HTTPStatus(status).phrase)
        for name, value in lines.items():
            self.send_header(name, value)
        self._headers_buffer.append(b"\r\n" + content)  # type: ignore[attr-defined]
        self.flush_headers()
