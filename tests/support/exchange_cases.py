"""What every transport must do with reduce-scatters and all-gathers, as cases for two and three ranks."""

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hetero_mpi.comm.transport import Buffer, Numbers
from tests.support.message_cases import MakeTransport, error_of, pattern

SUM_SIZES = (0, 1, 15, 17, 1000, 65_537, 1 << 20, (2 << 20) + 3)


def numbers(size: int, seed: int) -> Numbers:
    """Numbers whose sum depends on the order in which they are added."""
    return np.random.default_rng(seed).normal(0, 1e3, size).astype(np.float32)


def in_order(parts: list[Numbers]) -> Numbers:
    """((r0 + r1) + r2) + ..."""
    total: Numbers = parts[0].copy()
    for part in parts[1:]:
        total += part
    return total


def parts_of(numbers: Numbers, members: int) -> list[Numbers]:
    """Of unequal length: that of member i is in proportion to i + 1."""
    edges = [numbers.size * i * (i + 1) // (members * (members + 1)) for i in range(members + 1)]
    return [numbers[first:last] for first, last in itertools.pairwise(edges)]


def bytes_of(parts: list[Numbers]) -> list[Buffer]:
    return [part.view(np.uint8) for part in parts]


def sums_in_the_order_of_ranks(make: MakeTransport, rank: int, size: int) -> None:
    """All sizes at once: bits are those of adding rank after rank, the owner's and then all ranks'. Twice: buffers are reused."""
    with make() as transport:
        group = transport.group(tuple(range(size)), 3)
        for turn in range(2):
            seeds = [100 * turn + 10 * index for index in range(len(SUM_SIZES))]
            own = [numbers(count, seed + rank) for count, seed in zip(SUM_SIZES, seeds, strict=True)]
            parts = [parts_of(buffer, size) for buffer in own]
            totals = [
                in_order([numbers(n, s + other) for other in range(size)])
                for n, s in zip(SUM_SIZES, seeds, strict=True)
            ]
            for request in reversed([transport.reduce_scatter(group, one) for one in parts]):
                transport.wait(request)
            for one, total in zip(parts, totals, strict=True):
                assert np.array_equal(one[rank].view(np.uint32), parts_of(total, size)[rank].view(np.uint32)), one[
                    rank
                ].size
            for request in reversed([transport.all_gather(group, bytes_of(one)) for one in parts]):
                transport.wait(request)
            for count, expected, buffer in zip(SUM_SIZES, totals, own, strict=True):
                assert np.array_equal(buffer.view(np.uint32), expected.view(np.uint32)), (turn, count)
        assert transport.pending() == 0


def groups_and_messages_interleave(make: MakeTransport, rank: int, size: int, exact: bool = True) -> None:
    """Every pair, all ranks and each rank alone as groups, two sums each, and messages around the ring, in no common order.

    ``exact``: sums are in the order of the ranks.
    """
    members = [*itertools.combinations(range(size), 2), tuple(range(size)), *((other,) for other in range(size))]
    mine = {number: ranks for number, ranks in enumerate(members) if rank in ranks}
    with make() as transport:
        groups = {number: transport.group(ranks, number) for number, ranks in mine.items()}
        ahead, behind = (rank + 1) % size, (rank - 1) % size
        arriving = np.zeros(3 << 20, np.uint8)
        requests = [transport.post_receive(behind, 1, arriving)]
        sums = []
        for number in sorted(mine, key=lambda number: (number * (rank + 2)) % 7):
            for turn in range(2):
                buffer = numbers(50_000 + number, 1000 * number + 10 * turn + rank)
                sums.append((number, turn, buffer))
                requests.append(transport.reduce_scatter(groups[number], parts_of(buffer, len(mine[number]))))
        requests.append(transport.send(ahead, 1, pattern(3 << 20, rank)))
        for request in requests[:: -1 if rank % 2 else 1]:
            transport.wait(request)
        gathers = []
        for number, _, buffer in sums:
            gathers.append(transport.all_gather(groups[number], bytes_of(parts_of(buffer, len(mine[number])))))
        for request in gathers[:: 1 if rank % 2 else -1]:
            transport.wait(request)
        assert transport.pending() == 0
        assert np.array_equal(arriving, pattern(3 << 20, behind))
        for number, turn, buffer in sums:
            parts = [numbers(50_000 + number, 1000 * number + 10 * turn + other) for other in mine[number]]
            expected = in_order(parts)
            assert np.array_equal(buffer, expected) if exact else np.allclose(buffer, expected, atol=1e-2), (
                number,
                turn,
            )


def sums_wait_for_their_numbers(make: MakeTransport, rank: int, size: int) -> None:
    """And later ones of the group for those; it is told when they are summed."""
    with make() as transport:
        group = transport.group(tuple(range(size)), 0)
        first, second = np.full(50_000, np.nan, np.float32), numbers(50_000, 10 + rank)
        there, told = threading.Event(), threading.Event()

        def arrives() -> None:
            np.copyto(first, numbers(50_000, rank))
            there.set()

        threading.Timer(0.05, arrives).start()
        requests = [
            transport.reduce_scatter(group, parts_of(first, size), there.is_set, told.set),
            transport.reduce_scatter(group, parts_of(second, size)),
        ]
        for request in reversed(requests):
            transport.wait(request)
        assert told.is_set()
        for own, seed in ((first, 0), (second, 10)):
            total = in_order([numbers(50_000, seed + other) for other in range(size)])
            assert np.array_equal(parts_of(own, size)[rank], parts_of(total, size)[rank])


def sums_of_unequal_length_are_refused(make: MakeTransport, rank: int, size: int) -> None:
    """Both find out, and nobody waits for ever."""
    with make() as transport:
        group = transport.group((0, 1) if rank < 2 else (rank,), 0)
        parts = parts_of(numbers(10 if rank == 0 else 20, rank), len(group.ranks))
        text = error_of(transport, transport.reduce_scatter(group, parts))
        assert rank > 1 or text, "this rank found nothing wrong"


def close_ends_a_sum(make: MakeTransport, rank: int, size: int) -> None:
    """A sum that others do not join ends with the transport."""
    transport = make()
    request = None
    if rank == 0:
        request = transport.reduce_scatter(transport.group((0, 1), 5), parts_of(numbers(100, 0), 2))
        assert transport.pending() == 1
    transport.close()
    if request is not None:
        assert "closed" in error_of(transport, request)
        assert transport.pending() == 0


def unsuitable_groups_and_numbers_are_refused(make: MakeTransport, rank: int, size: int) -> None:
    """Groups without the caller, out of order or with a number that is taken; parts that cannot be exchanged in place."""
    unsuitable: list[Any] = [np.zeros(4, np.float64), np.zeros((2, 2), np.float32), np.zeros(8, np.float32)[::2]]
    with make() as transport:
        group = transport.group(tuple(range(size)), 0)
        calls: list[Callable[[], object]] = [
            lambda: transport.group(((rank + 1) % size,), 1),
            lambda: transport.group(tuple(reversed(range(size))), 1),
            lambda: transport.group((*range(size), size), 1),
            lambda: transport.group((rank,), 0),
        ]
        calls += [lambda part=part: transport.reduce_scatter(group, [part] * size) for part in unsuitable]  # type: ignore[misc]
        calls.append(lambda: transport.all_gather(group, [np.zeros(4, np.uint8)] * (size + 1)))
        calls.append(lambda: transport.all_gather(group, [np.zeros(4, np.float32)] * size))  # type: ignore[list-layer]
        for index, call in enumerate(calls):
            try:
                call()
            except ValueError:
                continue
            raise AssertionError(f"taken: call {index}")
        assert transport.pending() == 0


SUM_CASES: dict[str, Callable[..., None]] = {
    case.__name__: case
    for case in (
        sums_in_the_order_of_ranks,
        groups_and_messages_interleave,
        sums_wait_for_their_numbers,
        sums_of_unequal_length_are_refused,
        close_ends_a_sum,
        unsuitable_groups_and_numbers_are_refused,
    )
}


def in_order_of_the_ring(members: list[Numbers], order: Sequence[int]) -> Numbers:
    """A part is added up from the member after its owner on. ``members``: everybody's numbers; ``order``: of the ring."""
    count = len(order)
    total: Numbers = np.empty_like(members[0])
    parts = [parts_of(own, count) for own in members]
    for owner, part in enumerate(parts_of(total, count)):
        first = order.index(owner) + 1
        part[:] = in_order([parts[order[(first + turn) % count]][owner] for turn in range(count)])
    return total


def sums_around_a_ring(make: MakeTransport, rank: int, size: int) -> None:
    """All sizes at once on two hosts: the bits are those of the ring's order, then all ranks'; rooms are reused in steady state."""
    order = (*range(0, size, 2), *range(1, size, 2))
    with make() as transport:
        group = transport.group(tuple(range(size)), 3)
        rooms = []
        for turn in range(4):
            seeds = [100 * turn + 10 * index for index in range(len(SUM_SIZES))]
            own = [numbers(count, seed + rank) for count, seed in zip(SUM_SIZES, seeds, strict=True)]
            parts = [parts_of(buffer, size) for buffer in own]
            for request in reversed([transport.reduce_scatter(group, one) for one in parts]):
                transport.wait(request)
            for request in reversed([transport.all_gather(group, bytes_of(one)) for one in parts]):
                transport.wait(request)
            for count, seed, buffer in zip(SUM_SIZES, seeds, own, strict=True):
                expected = in_order_of_the_ring([numbers(count, seed + other) for other in range(size)], order)
                assert np.array_equal(buffer.view(np.uint32), expected.view(np.uint32)), (turn, count)
            rooms.append(sorted(id(array) for array in transport._exchanges[group]._scratch))  # type: ignore[attr-defined]
        assert transport.pending() == 0
        assert rooms[-1] == rooms[-2], "every piece takes rooms of earlier ones"
