"""An authenticated TCP connection between two processes that know a token, which both got through the launch agent.

Both ends send a nonce. After that every line is ``MAC JSON``. The MAC is HMAC-SHA256, under a key made of the token and both
nonces, of the sender's role, the line's number and its text. So the first line proves that its sender knows the token now. No line
can be forged, changed, repeated, left out or sent back to its sender. Nothing is encrypted, and the token itself is never sent.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import socketserver
from collections.abc import Callable
from typing import Any, Literal

from hetero_mpi.background import Background

LONGEST_BYTES = 4096
"""Longest line."""
_POLL_S = 0.1
"""Longest time until a server notices that it is closed, seconds."""
Role = Literal["caller", "listener"]


class NotAuthentic(ValueError):
    """The other end does not know the token, or a line was tampered with."""


class AuthenticatedLines:
    """One end of such a connection: ``write`` and ``read`` JSON values. The socket stays its owner's to close.

    :raises OSError: the connection breaks, or its time is up. Any call may raise it.
    """

    def __init__(self, connection: socket.socket, token: str, role: Role) -> None:
        self._connection, self._role = connection, role
        self._file = connection.makefile("rb")
        self._sent = self._read = 0
        own = secrets.token_hex(16)
        connection.sendall(own.encode() + b"\n")
        other = self._line().decode(errors="replace")
        nonces = (own, other) if role == "caller" else (other, own)
        self._key = _mac(token.encode(), *nonces).encode()

    def write(self, value: Any) -> None:
        text = json.dumps(value)
        self._sent += 1
        self._connection.sendall(f"{_mac(self._key, self._role, str(self._sent), text)} {text}\n".encode())

    def read(self) -> Any:
        """:raises NotAuthentic: the line is not the other end's next one."""
        mac, _, text = self._line().decode(errors="replace").partition(" ")
        self._read += 1
        other: Role = "listener" if self._role == "caller" else "caller"
        if not hmac.compare_digest(mac.encode(), _mac(self._key, other, str(self._read), text).encode()):
            raise NotAuthentic("a line that the other end did not write")
        return json.loads(text)

    def _line(self) -> bytes:
        line = self._file.readline(LONGEST_BYTES)
        if not line.endswith(b"\n"):
            raise NotAuthentic("the connection ended within a line")
        return line[:-1]


class AuthenticatedServer(socketserver.ThreadingTCPServer):
    """Listens on an ephemeral port of ``address`` until closed. Each caller that knows the token is served on a thread of its own.

    Args:
        address: "": all addresses of this host.
        serve: called with a caller's connection and its lines.
        silence_s: longest wait for a caller's next byte.
    """

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 64

    def __init__(
        self, address: str, serve: Callable[[socket.socket, AuthenticatedLines], None], silence_s: float
    ) -> None:
        super().__init__((address, 0), socketserver.BaseRequestHandler)
        self.token = secrets.token_hex(16)
        self.port = int(self.server_address[1])
        self._serve, self._silence_s = serve, silence_s
        self._listening = Background("listening to callers", lambda: self.serve_forever(_POLL_S))

    def finish_request(self, request: Any, client_address: Any) -> None:
        request.settimeout(self._silence_s)
        request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._serve(request, AuthenticatedLines(request, self.token, "listener"))

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore callers that break off or send nonsense."""

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._listening.finish()


def _mac(key: bytes, *words: str) -> str:
    # Lengths keep the words apart.
    return hmac.new(key, "".join(f"{len(word)}:{word}" for word in words).encode(), "sha256").hexdigest()
