"""Measures the latency, bandwidth and clock offset between pairs of ranks, using the same transport as training.

Among the pairs between the same two hosts, or within one host, a few are measured first. If they agree, they represent the others;
otherwise every pair is measured. Measurements are scheduled in rounds (the circle method for round-robin tournaments) in which each
rank has at most one partner and each NIC serves at most one pair. The two directions of a pair are measured separately because many
home links are asymmetric. Finally, on each host with several ranks, all ranks send and then receive at the same time. If their
combined rate hardly exceeds that of one rank, they share a NIC.
"""

import itertools
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import astuple, dataclass, replace
from statistics import median
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hetero_mpi.comm.ranks.world import World
from hetero_mpi.comm.transport import Transport

Pair = tuple[int, int]
MAX_REPRESENTATIVE_PAIRS = 4
"""Maximum number of pairs to measure as representatives of all pairs between the same hosts."""
MAX_TIME_RATIO = 2.0
"""Representative pairs agree if, for the largest message, the slowest takes at most this many times as long as the fastest."""
_PING, _PONG, _HEADER, _READY = 1, 2, 3, 4
_TINY_BYTES = 1
_FEW_REPEATS_ABOVE_S = 0.05
"""Messages that take longer than this are repeated at most twice."""
_MAX_MESSAGE_S = 1.0
"""Messages that are expected to take longer than this are not sent."""
_FLOW_S, _FLOW_MESSAGES = 0.05, 3
"""The rate of a flow is measured with ``_FLOW_MESSAGES`` messages that take about ``_FLOW_S`` seconds each."""
MIN_SPEEDUP = 1.5
"""Ranks have separate NICs if the combined rate of their flows is at least this many times that of the fastest single flow."""
MAX_BANDWIDTH_FACTOR = 4.0
"""Upper bound on a fitted bandwidth, as a multiple of the highest ratio of bytes to seconds among its samples."""


@dataclass(frozen=True)
class LinkSamples:
    """Measurements of a directed pair of ranks: a message of ``sample_bytes[i]`` bytes takes ``sample_s[i]`` seconds."""

    source: int
    destination: int
    same_host: bool
    sample_bytes: tuple[int, ...]
    sample_s: tuple[float, ...]

    @property
    def pair(self) -> Pair:
        """The two ranks, lower rank first."""
        return min(self.source, self.destination), max(self.source, self.destination)


@dataclass(frozen=True)
class HostFlows:
    """Measured rates between a host with several ranks and the other hosts, in bytes per second."""

    host: str
    single_rates: tuple[float, float]
    """(outgoing, incoming): rate of the faster of two flows, each measured alone."""
    total_rates: tuple[float, float]
    """(outgoing, incoming): combined rate of all flows running at the same time."""

    @property
    def shares_nic(self) -> bool:
        pairs = zip(self.single_rates, self.total_rates, strict=True)
        return any(total < MIN_SPEEDUP * single for single, total in pairs)


def measure_links(world: World, transport: Transport, sizes_bytes: Sequence[int], repeats: int) -> list[LinkSamples]:
    """Measure every directed pair and return all samples on all ranks, ordered by (source, destination). Collective.

    Up to ``MAX_REPRESENTATIVE_PAIRS`` pairs between the same hosts are measured; if they agree, their median represents the rest.

    The time of a message is the median round trip of the message and a one-byte reply, minus half the median round trip of one byte
    in both directions. Each size is measured with ``repeats`` round trips after one for warm-up. Sizes that would take too long
    over a slow link are skipped.
    """
    pairs_by_hosts: dict[tuple[str, ...], list[Pair]] = {}
    for pair in itertools.combinations(range(world.size), 2):
        pairs_by_hosts.setdefault(tuple(sorted(world.hosts[rank] for rank in pair)), []).append(pair)
    representative_pairs = {pair for pairs in pairs_by_hosts.values() for pair in representative_pairs_of(pairs)}
    samples = _measure_pairs(world, transport, representative_pairs, sizes_bytes, repeats)
    models_by_hosts, remaining_pairs = {}, set[Pair]()
    for hosts, pairs in pairs_by_hosts.items():
        if (models := common_samples(world.hosts, pairs, samples)) is not None:
            models_by_hosts[hosts] = models
        else:
            remaining_pairs |= {*pairs} - representative_pairs
    samples += _measure_pairs(world, transport, remaining_pairs, sizes_bytes, repeats) if remaining_pairs else []
    measured_links = {(link.source, link.destination) for link in samples}
    for hosts, pairs in pairs_by_hosts.items():
        for source, destination in (*pairs, *((b, a) for a, b in pairs)):
            if (source, destination) not in measured_links:
                model = models_by_hosts[hosts][world.hosts[source], world.hosts[destination]]
                samples.append(replace(model, source=source, destination=destination))
    return sorted(samples, key=lambda link: (link.source, link.destination))


def representative_pairs_of(pairs: Sequence[Pair]) -> list[Pair]:
    """Select up to ``MAX_REPRESENTATIVE_PAIRS`` evenly spaced pairs, first and last included, to cover different CPU sockets."""
    last, count = len(pairs) - 1, min(len(pairs), MAX_REPRESENTATIVE_PAIRS)
    return [pairs[last * number // max(1, count - 1)] for number in range(count)]


def common_samples(
    hosts: Sequence[str], pairs: Sequence[Pair], samples: Sequence[LinkSamples]
) -> dict[tuple[str, str], LinkSamples] | None:
    """Map each (source host, destination host) to the samples that represent the pairs; return None if the pairs disagree."""
    model_by_direction, requested_pairs = {}, set(pairs)
    pair_samples = [link for link in samples if link.pair in requested_pairs]
    for direction in {(hosts[link.source], hosts[link.destination]) for link in pair_samples}:
        one_way = [link for link in pair_samples if (hosts[link.source], hosts[link.destination]) == direction]
        one_way.sort(key=lambda link: (-len(link.sample_s), link.sample_s[-1:]))
        best_s: dict[Pair, float] = {}  # two directions per pair within a host; noise only adds time
        for link in one_way:
            best_s[link.pair] = min(link.sample_s[-1], best_s.get(link.pair, math.inf))
        slow = max(best_s.values()) > MAX_TIME_RATIO * min(best_s.values())
        if slow or len({link.sample_bytes for link in one_way}) > 1:
            return None
        model_by_direction[direction] = one_way[len(one_way) // 2]
    return model_by_direction


def _measure_pairs(
    world: World, transport: Transport, requested_pairs: Collection[Pair], sizes_bytes: Sequence[int], repeats: int
) -> list[LinkSamples]:
    """Measure the ``requested_pairs`` in both directions; samples are returned in no particular order. Collective."""
    local_samples: list[LinkSamples] = []
    for round_pairs in round_robin_per_host(world.hosts):
        pairs = [pair for pair in round_pairs if pair in requested_pairs]
        if not pairs:
            continue
        for lower, higher in pairs:
            for source, destination in ((lower, higher), (higher, lower)):
                if world.rank == source:
                    seconds = _time_one_way(transport, destination, sizes_bytes, repeats)
                    same_host = world.hosts[source] == world.hosts[destination]
                    sizes = tuple(sizes_bytes[: len(seconds)])
                    local_samples.append(LinkSamples(source, destination, same_host, sizes, seconds))
                elif world.rank == destination:
                    _answer(transport, source)
        world.sleeping_barrier()  # a finished pair must not disturb one that shares its NIC
    rows = (row for rank_rows in world.all_gather_json([astuple(link) for link in local_samples]) for row in rank_rows)
    return [LinkSamples(a, b, same_host, tuple(sizes), tuple(seconds)) for a, b, same_host, sizes, seconds in rows]


def measure_flows(
    world: World, transport: Transport, links: Sequence[LinkSamples], largest_bytes: int
) -> list[HostFlows]:
    """Measure the flows between each host with several ranks and the other hosts, one at a time and all at once. Collective."""
    names = tuple(dict.fromkeys(world.hosts))
    flows = []
    for host in names:
        outgoing_pairs = flow_pairs(world.hosts, host)
        if len(outgoing_pairs) < 2:
            continue
        directions = (outgoing_pairs, [(b, a) for a, b in outgoing_pairs])
        single_flow_rates, total_rates = [], []
        for pairs in directions:
            sizes = [_flow_bytes(links, pair, largest_bytes) for pair in pairs]
            single_rates = [_flow_rate(world, transport, pairs[i : i + 1], sizes[i : i + 1]) for i in range(2)]
            single_flow_rates.append(max(single_rates))
            total_rates.append(_flow_rate(world, transport, pairs, sizes))
        flows.append(HostFlows(host, (single_flow_rates[0], single_flow_rates[1]), (total_rates[0], total_rates[1])))
    return flows


def flow_pairs(hosts: Sequence[str], host: str) -> list[tuple[int, int]]:
    """Pair each rank of ``host`` with a remote rank, spreading the partners over as many hosts and ranks as possible.

    >>> flow_pairs(("a", "a", "b", "b", "c"), "a")
    [(0, 2), (1, 4)]
    """
    host_ranks = [rank for rank, name in enumerate(hosts) if name == host]
    remote_ranks = [rank for rank, name in enumerate(hosts) if name != host]
    local_index = {rank: sum(hosts[lower_rank] == hosts[rank] for lower_rank in range(rank)) for rank in remote_ranks}
    remote_ranks.sort(key=lambda rank: (local_index[rank], rank))
    return list(zip(host_ranks, itertools.cycle(remote_ranks), strict=False)) if remote_ranks else []


def _time_one_way(transport: Transport, peer: int, sizes_bytes: Sequence[int], repeats: int) -> tuple[float, ...]:
    """Measure the one-way time of a message of each size, in seconds, stopping before the first size that would take too long."""
    tiny_s = _round_trip_s(transport, peer, _TINY_BYTES, repeats)
    seconds: list[float] = []
    for index, size in enumerate(sizes_bytes):
        expected_s = seconds[-1] * size / sizes_bytes[index - 1] if seconds else 0.0
        if expected_s > _MAX_MESSAGE_S:
            break
        trip_s = _round_trip_s(transport, peer, size, repeats if expected_s < _FEW_REPEATS_ABOVE_S else min(repeats, 2))
        # Noise may make the difference tiny or negative; half the smallest message's round trip is a lower bound.
        seconds.append(max(trip_s - tiny_s / 2, tiny_s / 2))
    _announce(transport, peer, 0, 0)
    return tuple(seconds)


def _round_trip_s(transport: Transport, peer: int, size: int, repeats: int) -> float:
    """Return the median time of ``repeats`` round trips of a message and its reply, after one warm-up trip."""
    _announce(transport, peer, size, repeats + 1)
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


def _announce(transport: Transport, peer: int, size: int, trips: int) -> None:
    """Tell the peer the size and number of messages (0 ends the measurement), and wait until it has posted its first receive."""
    header = np.array([size, trips], np.int64).view(np.uint8)
    ready = transport.post_receive(peer, _READY, np.zeros(_TINY_BYTES, np.uint8))
    transport.wait(transport.send(peer, _HEADER, header))
    transport.wait(ready)


def _answer(transport: Transport, peer: int) -> None:
    """Act as the peer in ``_time_one_way``. As in training, each receive is posted before the message is sent."""
    tiny = np.zeros(_TINY_BYTES, np.uint8)
    while True:
        header = np.zeros(2, np.int64)
        transport.wait(transport.post_receive(peer, _HEADER, header.view(np.uint8)))
        size, trips = int(header[0]), int(header[1])
        message = np.zeros(size, np.uint8)
        receive = transport.post_receive(peer, _PING, message) if trips else None
        transport.wait(transport.send(peer, _READY, tiny))
        if receive is None:
            return
        for trip in range(trips):
            transport.wait(receive)
            if trip + 1 < trips:
                receive = transport.post_receive(peer, _PING, message)
            transport.wait(transport.send(peer, _PONG, tiny))


def _flow_bytes(links: Sequence[LinkSamples], pair: tuple[int, int], largest_bytes: int) -> int:
    """Return the size of a message that takes about ``_FLOW_S`` over the link between a pair."""
    link = next(link for link in links if (link.source, link.destination) == pair)
    bytes_per_s = link.sample_bytes[-1] / link.sample_s[-1]
    return min(largest_bytes, max(link.sample_bytes[0], int(_FLOW_S * bytes_per_s)))


def _flow_rate(world: World, transport: Transport, pairs: Sequence[tuple[int, int]], sizes: Sequence[int]) -> float:
    """Measure the combined bytes per second while all ``pairs`` send at once; the result is equal on every rank. Collective."""
    requests = []
    messages: list[NDArray[np.uint8]] = []
    for number, ((source, destination), size) in enumerate(zip(pairs, sizes, strict=True)):
        for _ in range(_FLOW_MESSAGES):
            if world.rank == destination:
                messages.append(np.zeros(size, np.uint8))
                requests.append(transport.post_receive(source, _PING + 16 * (number + 1), messages[-1]))
    world.sleeping_barrier()
    start = time.perf_counter()
    for number, ((source, destination), size) in enumerate(zip(pairs, sizes, strict=True)):
        if world.rank == source:
            message = np.zeros(size, np.uint8)
            tag = _PING + 16 * (number + 1)
            requests += [transport.send(destination, tag, message) for _ in range(_FLOW_MESSAGES)]
    for request in requests:
        transport.wait(request)
    local_s = time.perf_counter() - start if requests else 0.0
    world.sleeping_barrier()
    longest_s = max(float(seconds) for seconds in world.all_gather_json(local_s))
    return _FLOW_MESSAGES * sum(sizes) / longest_s


def fit_line(sample_bytes: Sequence[float], sample_s: Sequence[float]) -> tuple[float, float]:
    """Fit ``seconds = latency_s + bytes / bytes_per_s``; return (latency_s, bytes_per_s).

    The fit minimises the squared *relative* errors, so small messages determine the latency and large ones the bandwidth. The
    latency is never negative. The bandwidth is at most ``MAX_BANDWIDTH_FACTOR`` times the highest bytes / seconds of a sample,
    because noise alone can produce lines with a tiny or negative slope.
    """
    sizes, seconds = np.asarray(sample_bytes, np.float64), np.asarray(sample_s, np.float64)
    assert sizes.size == seconds.size > 0 and bool(np.all(seconds > 0)), "samples must be positive times in seconds"
    weights = 1 / seconds
    if np.ptp(sizes) == 0:
        return _fit_without_latency(sizes, seconds)
    design = np.stack([weights, weights * sizes], axis=1)
    (latency_s, s_per_byte), *_ = np.linalg.lstsq(design, np.ones_like(seconds), rcond=None)
    if latency_s < 0:
        return _fit_without_latency(sizes, seconds)
    fastest = MAX_BANDWIDTH_FACTOR * float((sizes / seconds).max())
    if s_per_byte * fastest >= 1:
        return float(latency_s), float(1 / s_per_byte)
    return max(0.0, float(median(seconds - sizes / fastest))), fastest


def _fit_without_latency(sizes: NDArray[np.float64], seconds: NDArray[np.float64]) -> tuple[float, float]:
    """Fit the line of ``fit_line`` with a latency of zero."""
    relative = sizes / seconds
    total = float((relative**2).sum())
    return (0.0, total / float(relative.sum())) if total > 0 else (float(median(seconds)), float("inf"))


_PING_TAG = (1 << 14) - 1
"""A tag that no stage uses, as stages use small tags. MPI guarantees tags up to 32767."""
_PING_COUNT = 20
Clock = Callable[[], float]


def clock_offset_s(world: World, transport: Transport) -> float:
    """Return this rank's clock minus that of rank 0, in seconds: 0 on rank 0's host, otherwise measured. Collective."""
    numbers, offset_s = list(world.numbers or range(world.size)), 0.0
    for index in range(1, world.size):
        if world.hosts[index] == world.hosts[0]:
            continue
        if world.rank == 0:
            compare_clocks(transport, numbers[index], "leads")
        elif world.rank == index:
            offset_s = compare_clocks(transport, numbers[0], "follows")
    return offset_s


def compare_clocks(
    transport: Transport, peer: int, role: Literal["leads", "follows"], clock: Clock = time.perf_counter
) -> float:
    """Return this rank's clock minus the leader's, in seconds (0 on the leader). Both ranks call this at the same time.

    The follower requests the leader's time and assumes that the reply is half a round trip old. The fastest of ``_PING_COUNT``
    round trips is used (Cristian 1989).
    """
    best_s, offset_s = float("inf"), 0.0
    answer = np.zeros(8, np.uint8)
    for _ in range(_PING_COUNT):
        if role == "leads":
            transport.wait(transport.post_receive(peer, _PING_TAG, answer))
            transport.wait(transport.send(peer, _PING_TAG, np.array([clock()]).view(np.uint8)))
            continue
        begin = clock()
        receive = transport.post_receive(peer, _PING_TAG, answer)
        transport.wait(transport.send(peer, _PING_TAG, np.zeros(8, np.uint8)))
        transport.wait(receive)
        end = clock()
        if end - begin < best_s:
            best_s = end - begin
            offset_s = (begin + end) / 2 - float(answer.view(np.float64)[0])
    return offset_s


# All pairs of n ranks in rounds of disjoint pairs, for measurements that must not interfere


def round_robin_per_host(hosts: Sequence[str]) -> list[list[tuple[int, int]]]:
    """Split the rounds of ``round_robin`` so that no two inter-host pairs in a round share a host.

    >>> round_robin_per_host(("a", "a", "b", "b"))
    [[(0, 3)], [(1, 2)], [(0, 2)], [(1, 3)], [(0, 1), (2, 3)]]
    """
    result = []
    for pairs in round_robin(len(hosts)):
        remaining_pairs = pairs
        while remaining_pairs:
            round_pairs: list[tuple[int, int]] = []
            busy_hosts: set[str] = set()
            for a, b in remaining_pairs:
                endpoint_hosts = {hosts[a], hosts[b]} if hosts[a] != hosts[b] else set()
                if not endpoint_hosts & busy_hosts:
                    round_pairs.append((a, b))
                    busy_hosts |= endpoint_hosts
            result.append(round_pairs)
            remaining_pairs = [pair for pair in remaining_pairs if pair not in round_pairs]
    return result


def round_robin(n: int) -> list[list[tuple[int, int]]]:
    """Return rounds of disjoint pairs that cover every pair of ``range(n)`` once, lower rank first.

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
