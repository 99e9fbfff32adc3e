"""The supervisor's channel: both ends prove that they know the token, and lines can be neither forged nor repeated."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from hetero_mpi.launch.hosts.authenticated import AuthenticatedLines, NotAuthentic
from hetero_mpi.launch.hosts.hostfile import HostEntry
from hetero_mpi.launch.supervisor import host_agent
from hetero_mpi.launch.supervisor.heartbeat_server import HeartbeatServer
from hetero_mpi.launch.supervisor.host_agent import AgentOrders, HostAgent, as_line
from tests.support.mpi import ROOT

TOKEN = "0123456789abcdef"


def both_ends(tokens: tuple[str, str] = (TOKEN, TOKEN)) -> tuple[AuthenticatedLines, AuthenticatedLines]:
    """(caller, listener), connected."""
    here, there = socket.socketpair()
    ends: list[AuthenticatedLines] = []
    for end in (here, there):
        end.settimeout(5.0)
    thread = threading.Thread(target=lambda: ends.append(AuthenticatedLines(there, tokens[1], "listener")))
    thread.start()
    caller = AuthenticatedLines(here, tokens[0], "caller")
    thread.join()
    return caller, ends[0]


def test_lines_pass_in_order_both_ways() -> None:
    caller, listener = both_ends()
    for number in range(3):
        caller.write({"number": number, "text": "ä\n"})
        assert listener.read() == {"number": number, "text": "ä\n"}
        listener.write(None)
        assert caller.read() is None


@pytest.mark.parametrize("tokens", [("wrong", TOKEN), (TOKEN, "wrong")])
def test_an_end_without_the_token_is_not_believed(tokens: tuple[str, str]) -> None:
    caller, listener = both_ends(tokens)
    for sender, reader in ((caller, listener), (listener, caller)):
        sender.write("sweep")
        with pytest.raises(NotAuthentic):
            reader.read()


@pytest.mark.parametrize(
    "tampered",
    [
        lambda line: line.replace(b"17", b"18"),
        lambda line: line + line,  # the second is a repetition
        lambda line: b"",
        lambda line: line[:-1],
        lambda line: line[65:],  # no MAC
    ],
)
def test_a_line_that_was_tampered_with_is_not_believed(tampered: Callable[[bytes], bytes]) -> None:
    caller, listener = both_ends()
    caller.write({"step": 17})
    line = listener._connection.recv(4096)
    caller._connection.sendall(tampered(line))
    caller._connection.shutdown(socket.SHUT_WR)
    with pytest.raises(NotAuthentic):
        listener.read()
        listener.read()


def test_a_line_sent_back_to_its_sender_is_not_believed() -> None:
    caller, listener = both_ends()
    caller.write({"sweep": 1})
    listener._connection.sendall(listener._connection.recv(4096))
    with pytest.raises(NotAuthentic):
        caller.read()


def orders_to(port: int) -> AgentOrders:
    return AgentOrders(TOKEN, "127.0.0.1", port, 0, 0, "somebody", 1.0, "/nowhere")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[HeartbeatServer]:
    watching = HeartbeatServer([HostEntry("localhost", 1)], (), "somebody", 4.0, tmp_path)
    watching._server.token = TOKEN
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


def test_a_call_that_was_overheard_betrays_no_token_and_cannot_be_repeated(server: HeartbeatServer) -> None:
    port = int(server._server.server_address[1])
    with in_between(port) as (door, sent):
        assert HostAgent(orders_to(door))._call()["leave"] is False
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


def test_a_false_supervisor_can_end_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers every call as the supervisor would, to have all ranks killed; the host agent takes it for silence."""
    ended: list[str | None] = []
    monkeypatch.setattr(host_agent, "end_starts", lambda supervisor, keep=None: ended.append(keep))
    orders = {"sweep": 9, "keep": None, "try_lock": 0, "leave": True}
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection, suppress(OSError):
                        AuthenticatedLines(connection, "another", "listener").write(orders)
                        connection.sendall(json.dumps(orders).encode() + b"\n")

        threading.Thread(target=serve, daemon=True).start()
        reason = HostAgent(orders_to(int(server.getsockname()[1]))).watch()
    assert reason == "the supervisor was not heard of for too long" and len(ended) == 1


def test_a_host_agent_that_does_not_understand_its_orders_names_the_commits() -> None:
    line = as_line(orders_to(1)).replace(b'"timeout_s"', b'"a_name_of_tomorrow"')
    result = subprocess.run(
        [sys.executable, "-m", "hetero_mpi.launch.supervisor.host_agent"], input=line, capture_output=True, cwd=ROOT
    )
    assert result.returncode == 1 and b"bring the same commit here" in result.stderr
