"""One conformance suite for all transports: between threads, over MPI with and without the communication thread."""

import json
import random
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from functools import cache, partial

import numpy as np
import pytest

from hetero_mpi.comm import mpi_group_exchange
from hetero_mpi.comm.mpi_group_exchange import GroupExchange, segment_bytes
from hetero_mpi.comm.mpi_progress import Then
from hetero_mpi.comm.transport import Exchange, Group, Part, Transport
from hetero_mpi.emulation.emulated_cluster import PacedTransport
from hetero_mpi.emulation.paced_stage import Sleeper
from tests.support.exchange_cases import SUM_CASES, bytes_of
from tests.support.message_cases import CASES, HELD_CASES, PIECE_CASES
from tests.support.mpi import finish_mpi
from tests.support.rank_pool import run_pooled
from tests.support.ranks import LoopbackNetwork, play_ranks

Passed = Callable[[int], set[tuple[str, str]]]
Case = Callable[[Callable[[], Transport], int], None]


@pytest.fixture(scope="module")
def passed_over_mpi() -> Callable[[int], set[tuple[str, str]]]:
    """(kind, case) of what real ranks have passed, for a number of them; one mpirun for all cases."""

    @cache
    def passed(ranks: int) -> set[tuple[str, str]]:
        result = run_pooled(ranks, "comm_conformance")
        if result.returncode != 0:
            print(result.stderr)
        return {(line[0], line[1]) for line in map(json.loads, result.stdout.splitlines())}

    return passed


@pytest.mark.parametrize("case", [*CASES, *HELD_CASES])
@pytest.mark.parametrize("kind", ["threaded", "unthreaded"])
def test_over_mpi(passed_over_mpi: Passed, kind: str, case: str) -> None:
    assert (kind, case) in passed_over_mpi(2)


@pytest.mark.slow
@pytest.mark.parametrize("case", PIECE_CASES)
def test_messages_in_pieces(passed_over_mpi: Passed, case: str) -> None:
    assert ("pieces", case) in passed_over_mpi(2)


@pytest.mark.slow
@pytest.mark.parametrize("case", SUM_CASES)
@pytest.mark.parametrize("kind", ["threaded", "unthreaded"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_over_mpi(passed_over_mpi: Passed, kind: str, case: str, ranks: int) -> None:
    assert (kind, case) in passed_over_mpi(ranks)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["ring", "ring, interleaved"])
@pytest.mark.parametrize("kind", ["threaded", "unthreaded"])
def test_sums_of_ranks_on_two_hosts(passed_over_mpi: Passed, kind: str, case: str) -> None:
    assert (kind, case) in passed_over_mpi(3)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_between_threads(case: Case) -> None:
    between_threads(LoopbackNetwork(2).transports, case)


@pytest.mark.parametrize("case", SUM_CASES.values(), ids=SUM_CASES.keys())
def test_sums_between_threads(case: Callable[..., None]) -> None:
    between_threads(LoopbackNetwork(3).transports, partial(case, size=3))


def paced(end: Transport, rank: int, delay_s: float, exchange_s: float) -> PacedTransport:
    """``end`` whose messages and exchanges all take so long."""
    delay = lambda *_: delay_s  # noqa: E731
    return PacedTransport(end, rank, lambda tag: delay, lambda number, sums: exchange_s, [0.0] * 4, Sleeper(False))


@pytest.mark.slow
def test_sums_of_an_emulated_cluster() -> None:
    held = [paced(end, rank, 1e-3, 1e-3) for rank, end in enumerate(LoopbackNetwork(3).transports)]
    between_threads(held, partial(SUM_CASES["sums_in_the_order_of_ranks"], size=3))


def test_a_sum_of_an_emulated_cluster_lasts_from_its_last_member_s_start() -> None:
    """Two sums at once: the second waits for the first, and neither begins before the member that comes late."""
    starts, ends, exchange_s, late_s = [0.0] * 3, [0.0] * 3, 0.05, 0.1
    held = [paced(end, rank, 0.0, exchange_s) for rank, end in enumerate(LoopbackNetwork(3).transports)]

    def case(make: Callable[[], Transport], rank: int) -> None:
        transport = make()
        group = transport.group((0, 1, 2), 0)
        time.sleep(late_s if rank == 2 else 0.0)
        starts[rank] = time.perf_counter()
        sums = [transport.reduce_scatter(group, ones(3)), transport.all_gather(group, bytes_of(ones(3)))]
        transport.wait(sums[1])
        ends[rank] = time.perf_counter()
        assert sums[0].completed

    between_threads(held, case)
    # The moments are read between the start noted here and the end: at most a waking early, at least two sums later.
    assert min(ends) - max(starts) >= 2 * exchange_s - 1e-3
    assert starts[2] - min(starts) >= late_s / 2, "the late member was not late"


def test_a_rank_takes_part_in_one_sum_of_an_emulated_cluster_at_a_time() -> None:
    """Groups (0, 1), (1, 2), (2, 3), all begun at once: each waits for the one before, through a rank of both, and no rank sees
    another end than its peer; the last group's ranks have none in common with the first's."""
    exchange_s, starts, ends = 0.05, [0.0] * 4, [dict[int, float]() for _ in range(4)]
    held = [paced(end, rank, 0.0, exchange_s) for rank, end in enumerate(LoopbackNetwork(4).transports)]

    def case(make: Callable[[], Transport], rank: int) -> None:
        transport = make()
        groups = [transport.group((first, first + 1), first) for first in (rank - 1, rank) if 0 <= first < 3]
        starts[rank] = time.perf_counter()
        sums = {group.number: transport.reduce_scatter(group, ones(2)) for group in groups}
        for number, request in sums.items():
            transport.wait(request)
            ends[rank][number] = request.moment_s  # type: ignore[attr-defined]

    between_threads(held, case)
    for first in range(3):
        assert ends[first][first] == ends[first + 1][first]
    assert ends[0][0] >= max(starts[:2]) + exchange_s
    assert min(ends[2][1] - ends[1][0], ends[3][2] - ends[2][1]) >= exchange_s - 1e-9


def ones(members: int) -> list[Part]:
    return [np.ones(4, np.float32) for _ in range(members)]


class Wire:
    """Stands for MPI under all ranks' sums: delivers in a random order, and tells when a send may be received into.

    Messages with the tag ``late`` are delivered when nothing else is left to be.
    """

    def __init__(self, hosts: str, seed: int, late: int | None = None) -> None:
        self.hosts, self.draw, self.late = hosts, random.Random(seed), late
        self.sends: dict[tuple[int, int, int], deque[tuple[Part, Then]]] = defaultdict(deque)
        self.receives: dict[tuple[int, int, int], deque[tuple[Part, Then]]] = defaultdict(deque)
        self.being_sent: list[Part] = []
        self.left_host: Counter[str] = Counter()
        """Bytes."""

    def deliver(self) -> None:
        """Until nothing is under way."""
        finished: list[Callable[[], None]] = []
        while True:
            matched = [route for route, sends in self.sends.items() if sends and self.receives[route]]
            matched = [route for route in matched if route[2] != self.late] or matched
            if not matched and not finished:
                return
            if matched and (not finished or self.draw.random() < 0.5):
                finished += self._moved(self.draw.choice(matched))
            else:
                finished.pop(self.draw.randrange(len(finished)))()

    def _moved(self, route: tuple[int, int, int]) -> list[Callable[[], None]]:
        (content, left), (room, come) = self.sends[route].popleft(), self.receives[route].popleft()
        assert content.size == room.size
        room[:] = content
        source, destination = self.hosts[route[0]], self.hosts[route[1]]
        self.left_host[source] += content.nbytes if source != destination else 0

        def has_left() -> None:
            self.being_sent = [other for other in self.being_sent if other is not content]
            left()

        return [has_left, come]


class WiredProgress:
    """What ``GroupExchange`` asks of ``Progress``, for one rank on a ``Wire``."""

    def __init__(self, wire: Wire, rank: int) -> None:
        self.wire, self.rank, self.ended = wire, rank, 0

    def register(self, request: Exchange) -> None: ...

    def complete_request(self, request: Exchange) -> None:
        self.ended += 1

    def send(self, comm: object, request: Exchange, buffer: Part, peer: int, tag: int, then: Then) -> None:
        self.wire.being_sent.append(buffer)
        self.wire.sends[self.rank, peer, tag].append((buffer, then))

    def receive(self, comm: object, request: Exchange, buffer: Part, peer: int, tag: int, then: Then) -> None:
        used = any(np.shares_memory(buffer, other) for other in self.wire.being_sent)
        assert not used, "MPI forbids to receive into what is still being sent"
        self.wire.receives[peer, self.rank, tag].append((buffer, then))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("hosts", ["aab", "abab", "abcd", "aabbcc", "abcabcaa", "aaaa"])
def test_sums_leave_every_host_as_seldom_as_a_ring(hosts: str, seed: int) -> None:
    """Bytes that leave a host are counted where they are sent: at most (n - 1) / n of what is summed, or of new values."""
    count, size, wire = len(hosts), 16 * 5, Wire(hosts, seed)
    group = Group(tuple(range(count)), 0)
    sides = [WiredProgress(wire, rank) for rank in range(count)]
    exchanges = [GroupExchange(side, None, side.rank, group, hosts) for side in sides]  # type: ignore[arg-type]
    draw = np.random.default_rng(seed)
    turns = [draw.normal(0, 1e3, (count, count, size)).astype(np.float32) for _ in range(2)]
    expected = [members.astype(np.float64).sum(axis=0) for members in turns]
    for sums in (True, False):
        for members in turns:
            for rank in draw.permutation(count):
                parts = list(members[rank] if sums else members[rank].view(np.uint8))
                exchanges[rank].start(Exchange(group, parts, sums))
        wire.deliver()
    assert [side.ended for side in sides] == [4] * count
    for members, total in zip(turns, expected, strict=True):
        assert all(np.array_equal(own, members[0]) for own in members)
        assert np.linalg.norm(members[0] - total) <= 1e-6 * np.linalg.norm(total)
    most = 2 * 2 * (count - 1) * size * 4
    assert set(wire.left_host) == (set(hosts) if len(set(hosts)) > 1 else {"a"})
    assert max(wire.left_host.values()) == (most if len(set(hosts)) > 1 else 0)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("hosts", ["aab", "abcd", "aabbccddee"])
def test_a_piece_that_others_overtake_keeps_its_messages(
    monkeypatch: pytest.MonkeyPatch, hosts: str, seed: int
) -> None:
    monkeypatch.setattr(mpi_group_exchange, "PIECE_BYTES", 1)
    count, width, wire = len(hosts), segment_bytes(len(hosts)) // 4, Wire(hosts, seed, late=0)
    group = Group(tuple(range(count)), 0)
    sides = [WiredProgress(wire, rank) for rank in range(count)]
    exchanges = [GroupExchange(side, None, side.rank, group, hosts) for side in sides]  # type: ignore[arg-type]
    draw = np.random.default_rng(seed)
    turns = []
    for _ in range(20):
        sizes = draw.choice([0, 1, 3 * width], size=count)
        turns.append([[draw.integers(-9, 9, size).astype(np.float32) for size in sizes] for _ in range(count)])
    sums = [[sum(member[part].copy() for member in members) for part in range(count)] for members in turns]
    for members in turns:
        for rank in draw.permutation(count):
            exchanges[rank].start(Exchange(group, members[rank], sums=True))
    wire.deliver()
    assert [side.ended for side in sides] == [len(turns)] * count
    for members, total in zip(turns, sums, strict=True):
        assert all(np.array_equal(members[rank][rank], total[rank]) for rank in range(count))


@pytest.mark.long
def test_messages_and_sums_over_two_gibibytes() -> None:
    result = finish_mpi(2, ["tests/programs/comm_large.py"], timeout_s=600)
    assert result.stdout.split() == ["message", "sum"]


def between_threads(transports: Sequence[Transport], case: Case) -> None:
    """Run the case, a thread playing each rank; what fails in one of them fails here."""

    def close() -> None:
        for transport in transports:
            transport.close()

    play_ranks(len(transports), lambda rank: case(lambda: transports[rank], rank), close)
