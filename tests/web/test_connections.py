"""The HTTP server by itself: limits of time and number, clients that close a side or leave, and who may ask."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from hetero_mpi.serve.web import connection, server
from hetero_mpi.serve.web.connection import Connection
from hetero_mpi.serve.web.server import HttpError, Names, WebServer, bound_socket
from tests.support.processes import wait_until


class _Answers(Connection):
    """Tells the size of what is posted; ``/slow`` answers once the gate is open, unless its client has gone; ``/defect`` has
    one. Below ``/events``, an answer ends as the rest of the path says."""

    gate = threading.Event()
    gone = threading.Event()

    def answer(self) -> None:
        if self.command == "POST":
            with self.body("application/json", 1 << 20) as body:
                self.send({"bytes": len(body)})
            return
        if self.route == "/posted":
            raise HttpError(405, "by POST only", allow="POST")
        if self.route.startswith("/events"):
            with self.events() as tell:
                tell("begun")
                if self.route == "/events/refused":
                    raise HttpError(503, "the service ends")
                if self.route == "/events/defect":
                    raise ZeroDivisionError("a defect")
            return
        if self.route == "/defect":
            raise ZeroDivisionError("a defect")
        while self.route == "/slow" and not self.gate.wait(0.02):
            if not self.alive():
                self.gone.set()
                return
        self.send({"route": self.route})


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    monkeypatch.setattr(connection, "RECEIVE_TIMEOUT_S", 1.0)
    monkeypatch.setattr(connection, "_PROBE_DELAY_S", 0.1)
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 20)
    _Answers.gate.clear()
    _Answers.gone.clear()
    web = WebServer(bound_socket("127.0.0.1", 0), _Answers, Names.for_address("127.0.0.1", ["chat.example"]))
    yield web
    web.stop(0.0)


def connected(web: WebServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(web.server_address[1])), timeout=60)


def read(client: socket.socket) -> bytes:
    return b"".join(iter(lambda: client.recv(1 << 16), b""))


def asked(web: WebServer, line: str, *headers: str, body: bytes = b"", host: str = "localhost") -> bytes:
    with connected(web) as client:
        head = "\r\n".join([f"{line} HTTP/1.1", f"Host: {host}", "Connection: close", *headers, "", ""])
        client.sendall(head.encode() + body)
        return read(client)


@pytest.mark.parametrize("head", [b"", b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"])
def test_bytes_that_drip_hold_a_connection_no_longer_than_a_request_may_take(web: WebServer, head: bytes) -> None:
    with connected(web) as client:
        if head:
            client.sendall(head + b"Content-Length: 1000\r\n\r\n")
        begin = time.monotonic()
        client.settimeout(0.1)
        answer = b""
        for _ in range(400):
            try:
                client.sendall(b"a")
                answer += client.recv(1000)
                break
            except TimeoutError:
                continue
        assert time.monotonic() - begin < 35, "each byte comes in time, the whole does not"
        assert answer.startswith(b"HTTP/1.1 408") if head else answer == b""


def test_more_clients_than_connections_are_answered_in_turn(web: WebServer) -> None:
    """And the threads are no more than the connections."""
    before = psutil.Process().num_threads()
    with ThreadPoolExecutor(60) as pool:
        found = [pool.submit(asked, web, "GET /slow") for _ in range(60)]
        time.sleep(0.5)
        assert psutil.Process().num_threads() - before <= 60 + 20
        _Answers.gate.set()
        assert all(b"HTTP/1.1 200" in answer.result()[:20] for answer in found)


def test_a_full_server_can_end(web: WebServer) -> None:
    clients = [connected(web) for _ in range(25)]
    time.sleep(0.3)
    begin = time.monotonic()
    web.stop(0.0)
    assert time.monotonic() - begin < 20
    for client in clients:
        client.close()


@pytest.mark.parametrize("slow", [False, True], ids=["at once", "later"])
def test_a_client_that_has_closed_its_sending_side_gets_its_answer(web: WebServer, slow: bool) -> None:
    with connected(web) as client:
        client.sendall(f"GET {'/slow' if slow else '/'} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        client.shutdown(socket.SHUT_WR)
        if slow:
            assert client.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n", "asked whether it still listens"
            time.sleep(0.2)
            _Answers.gate.set()
        assert read(client).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("kept", [True, False])
def test_requests_that_come_during_an_answer_are_answered_behind_it(
    web: WebServer, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless they are more than the server keeps: then the connection ends with the answer."""
    monkeypatch.setattr(connection, "_MAX_AHEAD_BYTES", 1000 if kept else 80)
    request = "GET /{} HTTP/1.1\r\nHost: localhost\r\n{}\r\n"
    with connected(web) as client:
        client.sendall(request.format("slow", "").encode())
        time.sleep(0.1)
        client.sendall(f"{request.format('b', '')}{request.format('c', 'Connection: close')[:40]}".encode())
        time.sleep(0.2)
        client.sendall(request.format("c", "Connection: close\r\n")[40:].encode())
        time.sleep(0.1)
        _Answers.gate.set()
        answers = read(client)
    assert re.findall(rb'"route": "/(\w+)"', answers) == ([b"slow", b"b", b"c"] if kept else [b"slow"])
    assert answers.count(b"Connection: close") == 1


@pytest.mark.parametrize("behind", [b"", b"\r\n", b"a" * 3_000_000], ids=["nothing", "a line", "3 MB"])
@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
def test_a_client_that_leaves_is_noticed_though_nothing_is_sent(web: WebServer, reset: bool, behind: bytes) -> None:
    """Whatever it has sent behind its request, and nobody reads."""
    client = connected(web)
    client.sendall(b"GET /slow HTTP/1.1\r\nHost: localhost\r\n\r\n")
    time.sleep(0.2)
    client.sendall(behind)
    time.sleep(0.05)
    if reset:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    assert _Answers.gone.wait(30)


@pytest.mark.parametrize(
    ("method", "path"), list(itertools.product(["GET", "POST", "OPTIONS", "PUT", "HEAD", "BREW"], ["/", "/nowhere"]))
)
def test_only_own_names_are_answered_whatever_the_method_and_path(web: WebServer, method: str, path: str) -> None:
    for host in (
        "elsewhere.example",
        "127.0.0.1.example",
        "localhost@elsewhere.example",
        "",
        "localhost, other",
        "[::1]x",
    ):
        answer = asked(web, f"{method} {path}", host=host)
        assert answer.startswith(b"HTTP/1.1 403"), (host, answer)
    port = int(web.server_address[1])
    for origin in (
        "http://elsewhere.example",
        "null",
        f"http://localhost:{port + 1}",
        f"http://127.0.0.1:{port}",
        "http://[",
    ):
        answer = asked(web, f"{method} {path}", f"Origin: {origin}", host=f"localhost:{port}")
        assert answer.startswith(b"HTTP/1.1 403"), (origin, answer)
        assert b"Access-Control" not in answer
    for host in ("localhost", f"127.0.0.1:{port}", "[::1]", "LOCALHOST.", "chat.example"):
        assert b" 403 " not in asked(web, f"{method} {path}", f"Origin: http://{host}", host=host)[:20]
    assert b" 403 " not in asked(web, f"{method} {path}", "Origin: https://chat.example", host="127.0.0.1")[:20]


@pytest.mark.parametrize(("path", "status"), [("/", b"200"), ("/posted", b"405")])
def test_head_has_the_status_and_headers_of_get_and_no_content(web: WebServer, path: str, status: bytes) -> None:
    got = asked(web, f"GET {path}")
    head, end, content = got.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 " + status) and content and (b"\r\nAllow: POST" in head) == (status == b"405")
    assert asked(web, f"HEAD {path}") == head + end
    for odd in ("HEAD / HTTP/9.9", f"HEAD /{'a' * 70_000} HTTP/1.1"):
        with connected(web) as client:
            client.sendall(f"{odd}\r\n\r\n".encode())
            assert read(client).startswith(b"HTTP/1.")
    assert asked(web, f"HEAD {path}", host="elsewhere.example").endswith(b"\r\n\r\n"), "nor has a refusal"
    with connected(web) as client:
        client.sendall(b"HEAD / HTTP/1.1\r\nHost: localhost\r\n\r\nGET /next HTTP/1.0\r\nHost: localhost\r\n\r\n")
        assert read(client).count(b"HTTP/1.1 200") == 2, "the connection goes on"


def test_a_defect_is_an_answer_unless_another_has_begun(web: WebServer, caplog: pytest.LogCaptureFixture) -> None:
    head, _, body = asked(web, "GET /defect").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 500 ") and "internal server error" in json.loads(body)["error"]["message"]
    asked(web, "GET /events/defect")
    assert asked(web, "GET /").startswith(b"HTTP/1.1 200 ")
    # Told once the client has its answer.
    wait_until(lambda: caplog.text.count("ZeroDivisionError: a defect") == 2, "both are told")


@pytest.mark.parametrize(("route", "whole"), [("", True), ("/refused", False), ("/defect", False)])
def test_a_stream_that_is_cut_does_not_look_whole(web: WebServer, route: str, whole: bool) -> None:
    """By a client of HTTP/1.1, which may then ask again; one of HTTP/1.0 gets the same events, and the connection's end."""
    client = http.client.HTTPConnection("localhost", int(web.server_address[1]), timeout=60)
    client.request("GET", f"/events{route}")
    answer, events = client.getresponse(), b"data: begun\n\n"
    with contextlib.nullcontext() if whole else pytest.raises(http.client.IncompleteRead) as cut:
        got = answer.read()
    assert answer.status == 200 and (got if whole else cut.value.partial).startswith(events)
    if whole:
        client.request("GET", "/")
        assert got == events and client.getresponse().status == 200
    with connected(web) as older:
        older.sendall(f"GET /events{route} HTTP/1.0\r\nHost: localhost\r\nConnection: keep-alive\r\n\r\n".encode())
        head, _, content = read(older).partition(b"\r\n\r\n")
    assert b"chunked" not in head and content.startswith(events)
    assert (b"the service ends" in content) == (route == "/refused")


def test_one_host_is_named(web: WebServer) -> None:
    assert asked(web, "GET /", "Host: localhost").startswith(b"HTTP/1.1 400"), "two"
    with connected(web) as client:
        client.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert read(client).startswith(b"HTTP/1.1 400"), "none"


def test_a_server_for_others_knows_the_names_of_its_machine() -> None:
    names = Names.for_address("0.0.0.0")
    addresses = [one.address for some in psutil.net_if_addrs().values() for one in some if one.family == socket.AF_INET]
    for host in (socket.gethostname(), *addresses, "localhost"):
        assert names.has_host(f"{host}:8000"), host
        assert host in ("127.0.0.1", "localhost") or not Names.for_address("127.0.0.1").has_host(host)
    assert not names.has_host("elsewhere.example")


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json", b"200"),
        ("Application/JSON; charset=utf-8", b"200"),
        ("text/plain", b"415"),
        ("application/x-www-form-urlencoded", b"415"),
        ("multipart/form-data", b"415"),
        ("", b"415"),
        (None, b"415"),
    ],
)
def test_a_body_is_of_the_type_that_browsers_ask_before_they_send(
    web: WebServer, kind: str | None, status: bytes
) -> None:
    headers = ["Content-Length: 2", *([] if kind is None else [f"Content-Type: {kind}"])]
    assert asked(web, "POST /", *headers, body=b"{}").startswith(b"HTTP/1.1 " + status)


def test_a_body_that_ends_early_is_no_request(web: WebServer) -> None:
    with connected(web) as client:
        client.sendall(
            b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 5\r\n\r\n{}"
        )
        client.shutdown(socket.SHUT_WR)
        answer = read(client)
    assert answer.startswith(b"HTTP/1.1 400") and b"ended after 2 of 5 bytes" in answer


def test_what_is_no_http_is_told_so_in_json(web: WebServer) -> None:
    for sent in (b"\x00\x01\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n"):
        with connected(web) as client:
            client.sendall(sent)
            answer = read(client)
        assert answer.startswith(b"HTTP/1.1 ") and b'{"error": {' in answer, sent[:20]


def test_bodies_have_a_size_together(web: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_PENDING_BODY_BYTES", 1500)
    monkeypatch.setattr(connection, "RECEIVE_TIMEOUT_S", 60.0)
    kind, size = "Content-Type: application/json", "Content-Length: 1000"
    with connected(web) as other:
        other.sendall(f"POST / HTTP/1.1\r\nHost: localhost\r\n{kind}\r\n{size}\r\n\r\n{{".encode())
        wait_until(lambda: web._body_bytes == 1000, "the server's thread has come to run")
        assert asked(web, "POST /", kind, size, body=bytes(1000)).startswith(b"HTTP/1.1 503")
        other.sendall(bytes(999))
        assert other.recv(100).startswith(b"HTTP/1.1 200")
        wait_until(lambda: web._body_bytes == 0, "the server's thread has come to run")
        assert asked(web, "POST /", kind, size, body=bytes(1000)).startswith(b"HTTP/1.1 200"), "its room is free again"
