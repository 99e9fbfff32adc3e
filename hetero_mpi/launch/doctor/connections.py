"""TCP connections between hosts on ephemeral ports, as MPI uses them: why a host is not reached, and not how fast a link is."""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hetero_mpi.background import Background


def listen() -> dict[str, Any]:
    """Listen as long as this process lives, and tell every caller a random ``word``: {"port", "word"}."""
    server, word = socket.create_server(("", 0), backlog=64), secrets.token_hex(16)

    def serve() -> None:
        while True:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(word.encode())

    Background("listening to callers", serve)
    return {"port": server.getsockname()[1], "word": word}


def connect(doors: Sequence[Mapping[str, Any]], patience_s: float) -> dict[str, Any]:
    """{"errors": why no connection to a door (``address``, ``port``, ``word``) could be opened; "": one was}."""
    with ThreadPoolExecutor(len(doors) or 1) as pool:
        return {"errors": list(pool.map(lambda door: _error(door, patience_s), doors))}


def _error(door: Mapping[str, Any], patience_s: float) -> str:
    try:
        with socket.create_connection((door["address"], door["port"]), patience_s) as connection:
            heard = connection.makefile("rb").read(len(door["word"]))
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return "" if heard == door["word"].encode() else "something else answers at its port"
