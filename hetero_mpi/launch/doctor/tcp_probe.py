"""TCP between two hosts, for ``doctor``: can they connect, and how fast? Plain sockets on ephemeral ports, as MPI uses them.

The listener answers only who proves that it knows the token (``authenticated``). It counts bytes without keeping them.
"""

from __future__ import annotations

import socket
import struct
import time
from dataclasses import dataclass
from statistics import median

from hetero_mpi.launch.hosts.authenticated import AuthenticatedLines, AuthenticatedServer

_TRIPS = 8
_FIRST_BYTES, _MOST_BYTES = 1 << 18, 1 << 26
_AIM_S = 0.25
"""Duration that the message for the bandwidth aims at, seconds."""
_PIECE = bytes(1 << 16)
_SILENCE_S = 20.0
_SIZE = struct.Struct("<q")


@dataclass(frozen=True)
class Speed:
    """Latency and bandwidth of a connection, in the direction in which it was opened."""

    latency_s: float
    """Half a round trip of eight bytes."""
    bytes_per_s: float


def listen() -> AuthenticatedServer:
    """A server that answers ``measure`` until it is closed."""
    return AuthenticatedServer("", _answer, _SILENCE_S)


def _answer(connection: socket.socket, lines: AuthenticatedLines) -> None:
    lines.write(lines.read())
    while True:
        (size,) = _SIZE.unpack(_read(connection, _SIZE.size))
        _skip(connection, size)
        connection.sendall(b"!")


def measure(address: str, port: int, token: str, timeout_s: float) -> Speed:
    """Connect to the listener at ``address`` and ``port``, and time messages.

    :raises OSError: no connection within ``timeout_s``, or it broke. :raises NotAuthentic: the other end is not that listener.
    """
    with socket.create_connection((address, port), timeout_s) as connection:
        connection.settimeout(timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        lines = AuthenticatedLines(connection, token, "caller")
        lines.write("measure")
        lines.read()  # so that nothing of what follows is read with it
        trip_s = median([_trip_s(connection, 0) for _ in range(_TRIPS + 1)][1:])
        size = _FIRST_BYTES
        while True:
            took_s = max(_trip_s(connection, size) - trip_s, 1e-9)
            if took_s >= _AIM_S / 2 or size >= _MOST_BYTES:
                return Speed(trip_s / 2, size / took_s)
            size = min(_MOST_BYTES, max(2 * size, int(size * _AIM_S / took_s)))


def _trip_s(connection: socket.socket, size: int) -> float:
    start = time.perf_counter()
    connection.sendall(_SIZE.pack(size))
    left = size
    while left > 0:
        connection.sendall(_PIECE[:left])
        left -= len(_PIECE)
    _read(connection, 1)
    return time.perf_counter() - start


def _read(connection: socket.socket, size: int) -> bytes:
    read = b""
    while len(read) < size:
        piece = connection.recv(size - len(read))
        if not piece:
            raise EOFError
        read += piece
    return read


def _skip(connection: socket.socket, size: int) -> None:
    while size > 0:
        piece = connection.recv(min(size, 1 << 20))
        if not piece:
            raise EOFError
        size -= len(piece)
