"""The supervisor's channel: both ends prove that they know the token, and lines can be neither forged nor repeated."""

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from hetero_mpi.launch.hosts.agent import PROGRAM
from hetero_mpi.launch.hosts.hostfile import HostEntry
from hetero_mpi.launch.supervisor import host_reports
from hetero_mpi.launch.supervisor.host_reports import HostReports, NotAuthentic, seal, unseal
from hetero_mpi.launch.supervisor.watched_hosts import WatchedHosts
from tests.support.mpi import ROOT

TOKEN = "0123456789abcdef"


def test_a_value_passes_in_a_sealed_line() -> None:
    value = {"number": 3, "text": "ä\n"}
    assert unseal(TOKEN, "caller", seal(TOKEN, "caller", value)) == value


@pytest.mark.parametrize(
    "tampered",
    [
        lambda line: line.replace(b"17", b"18"),
        lambda line: line + line,
        lambda line: b"",
        lambda line: line[:-1],
        lambda line: line[65:],  # no MAC
        lambda line: seal("wrong", "caller", {"step": 17}),
        lambda line: seal(TOKEN, "listener", {"step": 17}),  # sent back to its sender
    ],
)
def test_a_line_that_was_tampered_with_is_not_believed(tampered: Callable[[bytes], bytes]) -> None:
    line = seal(TOKEN, "caller", {"step": 17})
    assert unseal(TOKEN, "caller", line) == {"step": 17}
    with pytest.raises(NotAuthentic):
        unseal(TOKEN, "caller", tampered(line))


def reports_to(port: int) -> HostReports:
    return HostReports(TOKEN, "127.0.0.1", port, 0, 0, "somebody", 1.0, "/nowhere")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[WatchedHosts]:
    watching = WatchedHosts([HostEntry("localhost", 1)], (), "somebody", 4.0, tmp_path)
    watching.token = TOKEN
    with watching:
        yield watching


@contextmanager
def in_between(port: int) -> Iterator[tuple[int, list[bytes]]]:
    """A listener that passes one connection on to ``port``: (its port, what the caller sent through it)."""
    sent: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            here, _ = server.accept()
            there = socket.create_connection(("127.0.0.1", port))

            def back() -> None:
                with suppress(OSError):
                    while data := there.recv(4096):
                        here.sendall(data)

            threading.Thread(target=back, daemon=True).start()
            while data := here.recv(4096):
                sent.append(data)
                there.sendall(data)

        threading.Thread(target=serve, daemon=True).start()
        yield int(server.getsockname()[1]), sent


def test_a_call_that_was_overheard_betrays_no_token_and_cannot_be_repeated(server: WatchedHosts) -> None:
    port = server.port
    with in_between(port) as (door, sent):
        assert reports_to(door)._call()["leave"] is False
    (post,) = server.watched
    assert post.heard_s > 0.0, "a true call counts"
    assert TOKEN.encode() not in b"".join(sent) and b"swept" in b"".join(sent)
    post.heard_s = 0.0
    with socket.create_connection(("127.0.0.1", port), 5.0) as again:
        again.sendall(b"".join(sent))
        with suppress(OSError):
            while again.recv(4096):
                pass
    assert post.heard_s == 0.0, "a repeated one does not"


def test_an_answer_to_another_call_is_not_believed() -> None:
    """It was recorded, and is sent again: to a later call, or to another agent of this supervisor's."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.makefile("rb").readline()
                connection.sendall(seal(TOKEN, "listener", {"to": [0, 0, 7], "leave": True}))

        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(NotAuthentic, match="another call"):
            reports_to(int(server.getsockname()[1]))._call()


def test_a_false_supervisor_can_end_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers every call as the supervisor would, to have all ranks killed; the host agent takes it for silence."""
    ended: list[str | None] = []
    monkeypatch.setattr(host_reports, "end_starts", lambda supervisor, keep=None: ended.append(keep))
    orders = {"sweep": 9, "keep": None, "leave": True}
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection, suppress(OSError):
                        call = json.loads(connection.makefile("rb").readline().partition(b" ")[2])
                        answer = {"to": [call[name] for name in ("host", "number", "call")], **orders}
                        connection.sendall(seal("another", "listener", answer))

        threading.Thread(target=serve, daemon=True).start()
        reason = reports_to(int(server.getsockname()[1])).report()
    assert reason == "the supervisor has not answered for too long" and len(ended) == 1


def test_a_host_agent_that_does_not_understand_its_orders_names_the_commits() -> None:
    line = json.dumps({"ask": "report", "source": "another", "a_name_of_tomorrow": 1}).encode() + b"\n"
    result = subprocess.run([sys.executable, "-m", PROGRAM], input=line, capture_output=True, cwd=ROOT)
    assert result.returncode == 1 and b"install the same commit here" in result.stderr
