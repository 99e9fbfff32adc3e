"""The network between hosts, for ``doctor``: plain TCP is timed, and checks tell which links fail, and how fast the others are.

TCP is tried on ephemeral ports, as MPI uses them. The listener answers only who proves that it knows the token (``authenticated``).
It counts bytes without keeping them.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from hetero_mpi import units
from hetero_mpi.launch.hosts.authenticated import AuthenticatedLines, AuthenticatedServer
from hetero_mpi.launch.hosts.diagnostics import Finding, Severity

SLOW_BYTES_PER_S = 40e6
"""Bandwidth below which a link is called slow: between 100 Mbit/s and 1 Gbit/s. A bad cable or Wi-Fi gives less."""
LONG_S = 2e-3
"""Latency above which a link is called slow, seconds: a local cable is faster."""
ASYMMETRY = 3.0
MANY = 12
"""More links than this are not listed one by one."""
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
    stream = connection.makefile("rb")
    while len(header := stream.read(_SIZE.size)) == _SIZE.size:
        (size,) = _SIZE.unpack(header)
        while size > 0 and (piece := stream.read(min(size, 1 << 20))):
            size -= len(piece)
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
    if not connection.recv(1):
        raise EOFError
    return time.perf_counter() - start


@dataclass(frozen=True)
class Link:
    """A directed link between two hosts or ranks, which are named by their titles."""

    source: str
    destination: str
    latency_s: float = 0.0
    bytes_per_s: float = 0.0
    error: str = ""
    """Why there is no connection; "": there is one."""
    network: str = ""
    """Where there is no connection: the network of the source's address, as ``10.77.0.0/24``."""
    same_host: bool = False
    """Both ends are ranks of one host: messages pass through its memory."""


def check_links(links: Sequence[Link], how: str) -> Iterator[Finding]:
    """Findings about links and their speed. ``how``: what was measured, in words."""
    if not links:
        return
    for link in links:
        if link.error:
            yield _refused(link, any(other.source == link.destination and not other.error for other in links))
    open_links = [link for link in links if not link.error]
    if len(open_links) == len(links):
        yield Finding("connections", Severity.FINE, f"possible both ways between all ({how})")
    by_pair = {(link.source, link.destination): link for link in open_links}
    speeds = {link: _speed(link, how, by_pair) for link in open_links}
    if len(open_links) > MANY:
        slowest = min(open_links, key=lambda link: link.bytes_per_s)
        speeds = {link: found for link, found in speeds.items() if found.severity is Severity.SLOW or link is slowest}
        yield Finding(
            "links", Severity.FINE, f"{len(open_links)} measured; listed: the slowest, and those that are too slow"
        )
    yield from speeds.values()


def _refused(link: Link, other_way_works: bool) -> Finding:
    text = f"{link.source} cannot open a TCP connection to {link.destination}: {link.error}"
    text += "; the other way round it works, so a firewall there is likely: a run may fail" if other_way_works else ""
    if "refused" in link.error:
        remedy = f"something on {link.destination} or between answers for its ports: look for a firewall that rejects, or a proxy"
    else:
        remedy = f"check the address and the cable: on {link.source}, `ping` {link.destination}"
    remedy += (
        f"\nlet the firewall of {link.destination} pass the other hosts: `sudo ufw allow from {link.network}`, or "
        f"`sudo firewall-cmd --zone=trusted --add-source={link.network}`; MPI uses any port above 1023"
    )
    severity = Severity.RISKS if other_way_works else Severity.FAILS
    return Finding("connections", severity, text, remedy)


def _speed(link: Link, how: str, by_pair: Mapping[tuple[str, str], Link]) -> Finding:
    speed = f"{units.bandwidth(link.bytes_per_s)} ({link.bytes_per_s * 8 / 1e9:.2g} Gbit/s)"
    text = f"{link.source} -> {link.destination}: {speed}, {units.seconds(link.latency_s)} ({how})"
    if link.same_host:
        if link.bytes_per_s >= SLOW_BYTES_PER_S:
            return Finding("links", Severity.FINE, text)
        text += ": slow, for ranks that share a host's memory"
        return Finding("links", Severity.NOTE, text, "look for other programs that take this host's cores")
    back = by_pair.get((link.destination, link.source))
    if link.bytes_per_s < SLOW_BYTES_PER_S:
        remedy = "use a cable of 1 Gbit/s or more instead of Wi-Fi; the planner takes the link as it is measured"
        return Finding("links", Severity.SLOW, text, remedy)
    if back is not None and link.bytes_per_s * ASYMMETRY < back.bytes_per_s:
        slower = back.bytes_per_s / link.bytes_per_s
        remedy = f"that is {slower:.1f} times slower than back: look at cable, duplex setting and other traffic"
        return Finding("links", Severity.SLOW, text, remedy)
    if link.latency_s > LONG_S:
        remedy = "fine for training with large micro-batches; a wired local network would have well under 1 ms"
        return Finding("links", Severity.NOTE, text, remedy)
    return Finding("links", Severity.FINE, text)
