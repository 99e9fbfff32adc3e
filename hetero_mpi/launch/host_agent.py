"""The host agent: ``python -m hetero_mpi.launch.host_agent`` runs on a host for ``doctor`` or the supervisor of ``--elastic``.

Requests and answers are JSON lines over stdin and stdout; ``launch.hosts.agent`` is the client::

    {"ask": "clock"}                                {"unix_s": 1760000000.0}
    {"ask": "facts", "directory": "runs", ...}      {"host": "rtx", "python": ...}       see ``gather``
    {"ask": "self_tests", "torch": ...}             {"found": [...]}                     see ``self_tests``
    {"ask": "listen"}                               {"port": 40000, "word": "..."}       see ``listen``
    {"ask": "connect", "doors": [...], ...}         {"errors": ["timed out", ""]}        see ``connect``
    {"ask": "report", "token": ...}                 {"reason": "told to leave"}          see ``supervisor.host_reports``

Only the standard library is imported until a request needs more, so that missing or broken packages can be reported.
"""

import contextlib
import json
import secrets
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hetero_mpi.comm.ranks.versions import own_source
from hetero_mpi.launch.doctor.host_facts import gather, self_tests
from hetero_mpi.launch.hosts.agent import MARK
from hetero_mpi.util.background import start_unattended


def listen() -> dict[str, Any]:
    """Listen on an ephemeral port, as MPI does, until this process exits; every caller receives a random ``word``."""
    server, word = socket.create_server(("", 0), backlog=64), secrets.token_hex(16)

    def serve() -> None:
        while True:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(word.encode())

    start_unattended("listening to callers", serve)
    return {"port": server.getsockname()[1], "word": word}


def connect(doors: Sequence[Mapping[str, Any]], patience_s: float) -> dict[str, Any]:
    """Connect to each door (``address``, ``port``, ``word``); return {"errors": [...]}, "" for each success."""
    with ThreadPoolExecutor(len(doors) or 1) as pool:
        return {"errors": list(pool.map(lambda door: _error(door, patience_s), doors))}


def _error(door: Mapping[str, Any], patience_s: float) -> str:
    try:
        with socket.create_connection((door["address"], door["port"]), patience_s) as connection:
            reply = connection.makefile("rb").read(len(door["word"]))
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return "" if reply == door["word"].encode() else "its port is in use by another program"


def _report(**orders: Any) -> dict[str, Any]:
    from hetero_mpi.launch.supervisor.host_reports import HostReports

    return {"reason": HostReports(**orders).report()}


REQUESTS: dict[str, Callable[..., dict[str, Any]]] = {
    "clock": lambda: {"unix_s": time.time()},
    "facts": lambda **values: gather(**values).to_dict(),
    "self_tests": lambda torch: {"found": self_tests(torch)},
    "listen": listen,
    "connect": connect,
    "report": _report,
}


def main() -> int:
    for line in sys.stdin:
        request = json.loads(line)
        name, source = request.pop("ask"), request.pop("source", "another commit")
        try:
            answer = REQUESTS[name](**request)
        except (KeyError, TypeError):
            if source == own_source():
                raise
            sys.exit(f"this host has hetero_mpi {own_source()}, the caller has {source}: install the same commit here")
        print(MARK + json.dumps(answer), flush=True)
        if "reason" in answer:  # the requester of reports may be gone
            break
    return 0


if __name__ == "__main__":
    sys.exit(main())
