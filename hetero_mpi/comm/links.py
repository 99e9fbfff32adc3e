"""How fast messages move between each pair of ranks, host buffer to host buffer, over the transport that training uses.

Pairs are measured in rounds in which every rank has one partner at most (the circle method of round-robin
tournaments), so a cluster of n ranks takes n - 1 or n rounds, and each direction of a pair on its own: home links are
faster one way.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from hetero_mpi.comm.transport import Transport
from hetero_mpi.comm.world import World

_PING, _PONG = 1, 2
_TINY_BYTES = 1


@dataclass(frozen=True)
class LinkSamples:
    """One directed pair: ``sample_s[i]`` seconds for a message of ``sample_bytes[i]``."""

    source: int
    destination: int
    same_host: bool
    sample_bytes: tuple[int, ...]
    sample_s: tuple[float, ...]


def measure_links(world: World, transport: Transport, sizes_bytes: Sequence[int], repeats: int) -> list[LinkSamples]:
    """Measure every directed pair; all ranks return the whole list, by (source, destination). Collective.

    The time of a message is the median round trip of it and a one-byte answer, less half the median round trip of one
    byte both ways. ``repeats`` round trips per size, after one that warms the path up.
    """
    own: list[LinkSamples] = []
    for pairs in rounds(world.size):
        for lower, higher in pairs:
            for source, destination in ((lower, higher), (higher, lower)):
                if world.rank == source:
                    seconds = _time_one_way(transport, destination, sizes_bytes, repeats)
                    same_host = world.hosts[source] == world.hosts[destination]
                    own.append(LinkSamples(source, destination, same_host, tuple(sizes_bytes), seconds))
                elif world.rank == destination:
                    _answer(transport, source, sizes_bytes, repeats)
    gathered = world.all_gather_json([asdict(samples) for samples in own])
    everything = [_from_json(values) for ranks_own in gathered for values in ranks_own]
    return sorted(everything, key=lambda samples: (samples.source, samples.destination))


def rounds(n: int) -> list[list[tuple[int, int]]]:
    """Disjoint pairs per round, every pair of ``range(n)`` once, lower rank first.

    For n = 4::

        round 0: 0-3 1-2
        round 1: 0-2 1-3  (0 stays, the others rotate)
        round 2: 0-1 2-3
    """
    seats: list[int | None] = [*range(n), *([None] if n % 2 else [])]
    result = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        opposite = zip(seats[:half], reversed(seats[half:]), strict=True)
        result.append([(min(a, b), max(a, b)) for a, b in opposite if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return result


def _time_one_way(transport: Transport, peer: int, sizes_bytes: Sequence[int], repeats: int) -> tuple[float, ...]:
    tiny_s = _round_trip_s(transport, peer, _TINY_BYTES, repeats)
    # Noise may make the difference tiny or negative; no message is faster than half of the smallest one's return trip.
    return tuple(max(_round_trip_s(transport, peer, size, repeats) - tiny_s / 2, tiny_s / 2) for size in sizes_bytes)


def _round_trip_s(transport: Transport, peer: int, size: int, repeats: int) -> float:
    message, answer = np.zeros(size, np.uint8), np.zeros(_TINY_BYTES, np.uint8)
    seconds = []
    for _ in range(repeats + 1):
        receive = transport.post_receive(peer, _PONG, answer)
        start = time.perf_counter()
        sent = transport.send(peer, _PING, message)
        transport.wait(receive)
        seconds.append(time.perf_counter() - start)
        transport.wait(sent)
    return median(seconds[1:])


def _answer(transport: Transport, peer: int, sizes_bytes: Sequence[int], repeats: int) -> None:
    answer = np.zeros(_TINY_BYTES, np.uint8)
    for size in (_TINY_BYTES, *sizes_bytes):
        message = np.zeros(size, np.uint8)
        for _ in range(repeats + 1):
            transport.wait(transport.post_receive(peer, _PING, message))
            transport.wait(transport.send(peer, _PONG, answer))


def _from_json(values: dict[str, object]) -> LinkSamples:
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return LinkSamples(**fields)  # type: ignore[arg-type]


def fit_line(sample_bytes: Sequence[float], sample_s: Sequence[float]) -> tuple[float, float]:
    """``(latency_s, bytes_per_s)`` of the line ``latency_s + bytes / bytes_per_s`` through the samples.

    Least squares of the *relative* errors: small messages fix the latency, large ones the bandwidth. The latency is not
    negative and the bandwidth positive (infinite if larger messages are not slower).
    """
    sizes, seconds = np.asarray(sample_bytes, np.float64), np.asarray(sample_s, np.float64)
    assert sizes.size == seconds.size > 0 and bool(np.all(seconds > 0)), "samples must be positive seconds"
    weights = 1 / seconds
    if np.ptp(sizes) == 0:
        return _through_zero(sizes, seconds)
    design = np.stack([weights, weights * sizes], axis=1)
    (latency_s, s_per_byte), *_ = np.linalg.lstsq(design, np.ones_like(seconds), rcond=None)
    if latency_s < 0:
        return _through_zero(sizes, seconds)
    if s_per_byte <= 0:
        return float(median(seconds)), float("inf")
    return float(latency_s), float(1 / s_per_byte)


def _through_zero(sizes: NDArray[np.float64], seconds: NDArray[np.float64]) -> tuple[float, float]:
    """The same fit with latency zero."""
    relative = sizes / seconds
    total = float((relative**2).sum())
    return (0.0, total / float(relative.sum())) if total > 0 else (float(median(seconds)), float("inf"))
