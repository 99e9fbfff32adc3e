"""What every transport must do, as cases for two ranks; sums also on three.

Under mpirun this program runs them over MPI, with and without the communication thread; the loopback transport runs the same
cases between threads of the test process.

    mpirun -np 2 python tests/programs/comm_conformance.py
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from hetero_mpi.comm.ranks.mpi_start import run_guarded
from hetero_mpi.comm.ranks.world import World
from hetero_mpi.comm.transport import Buffer, Numbers, Transport, TransportError

MakeTransport = Callable[[], Transport]
SIZES = (0, 1, 1023, 4096, 65_537, 1 << 20, 8 << 20)


def pattern(size: int, seed: int) -> Buffer:
    """Bytes that tell messages apart."""
    return ((np.arange(size, dtype=np.uint32) * 2654435761 + seed * 40503) >> 8).astype(np.uint8)


def error_of(transport: Transport, request: object) -> str:
    """The text that ``wait`` raises; empty when it does not."""
    try:
        transport.wait(request)  # type: ignore[arg-type]
    except TransportError as error:
        return str(error)
    return ""


def order_per_source_and_tag(make: MakeTransport, rank: int) -> None:
    """Interleaved tags and unequal sizes: within a tag, first sent is first received."""
    sizes = [(index * 37) % 300 for index in range(40)]
    with make() as transport:
        if rank == 0:
            sends = [transport.send(1, 5 + index % 2, pattern(size, index)) for index, size in enumerate(sizes)]
            for send in sends:
                transport.wait(send)
        else:
            for tag in (6, 5):
                for index in range(tag - 5, len(sizes), 2):
                    buffer = np.zeros(sizes[index], np.uint8)
                    transport.wait(transport.post_receive(0, tag, buffer))
                    assert np.array_equal(buffer, pattern(sizes[index], index)), (tag, index)


def many_outstanding_receives(make: MakeTransport, rank: int) -> None:
    """64 receives posted early, messages sent and waited for in the opposite order."""
    peer = 1 - rank
    with make() as transport:
        buffers = [np.zeros(10 + tag, np.uint8) for tag in range(64)]
        receives = [transport.post_receive(peer, tag, buffer) for tag, buffer in enumerate(buffers)]
        sends = [transport.send(peer, tag, pattern(10 + tag, tag + peer)) for tag in reversed(range(64))]
        for request in reversed(receives + sends):
            transport.wait(request)
        for tag, buffer in enumerate(buffers):
            assert np.array_equal(buffer, pattern(10 + tag, tag + rank)), tag
        assert transport.pending() == 0


def sizes_in_both_directions(make: MakeTransport, rank: int) -> None:
    """From nothing to 8 MiB, all sizes at once, both ways, sends waited for before receives."""
    peer = 1 - rank
    with make() as transport:
        buffers = [np.full(size, 255, np.uint8) for size in SIZES]
        receives = [transport.post_receive(peer, tag, buffer) for tag, buffer in enumerate(buffers)]
        sends = [transport.send(peer, tag, pattern(size, tag + rank)) for tag, size in enumerate(SIZES)]
        for request in sends + receives:
            transport.wait(request)
        for tag, (size, buffer) in enumerate(zip(SIZES, buffers, strict=True)):
            assert np.array_equal(buffer, pattern(size, tag + peer)), size


def receives_posted_late(make: MakeTransport, rank: int) -> None:
    """Both send large messages before either has posted a receive."""
    peer = 1 - rank
    with make() as transport:
        sends = [transport.send(peer, tag, pattern(4 << 20, tag)) for tag in range(3)]
        for tag in (2, 0, 1):
            buffer = np.zeros(4 << 20, np.uint8)
            transport.wait(transport.post_receive(peer, tag, buffer))
            assert np.array_equal(buffer, pattern(4 << 20, tag)), tag
        for send in sends:
            transport.wait(send)


def message_to_oneself(make: MakeTransport, rank: int) -> None:
    """A rank may be its own neighbour."""
    with make() as transport:
        buffer = np.zeros(100_000, np.uint8)
        receive = transport.post_receive(rank, 3, buffer)
        transport.wait(transport.send(rank, 3, pattern(100_000, rank)))
        transport.wait(receive)
        assert np.array_equal(buffer, pattern(100_000, rank))


def shorter_message_is_refused(make: MakeTransport, rank: int) -> None:
    """The receiver's wait raises with both lengths; the next message of the pair arrives."""
    with make() as transport:
        if rank == 0:
            transport.wait(transport.send(1, 1, pattern(90, 1)))
            transport.wait(transport.send(1, 1, pattern(50, 2)))
        else:
            text = error_of(transport, transport.post_receive(0, 1, np.zeros(100, np.uint8)))
            assert "90 bytes" in text and "100" in text and "tag 1" in text, text
            buffer = np.zeros(50, np.uint8)
            transport.wait(transport.post_receive(0, 1, buffer))
            assert np.array_equal(buffer, pattern(50, 2))


def longer_message_is_refused(make: MakeTransport, rank: int) -> None:
    """The receiver's wait raises and says that the length is at fault."""
    with make() as transport:
        if rank == 0:
            transport.wait(transport.send(1, 1, pattern(110, 1)))
        else:
            text = error_of(transport, transport.post_receive(0, 1, np.zeros(100, np.uint8)))
            assert "100 bytes" in text and "agree on the length" in text, text


def errors_surface_in_wait(make: MakeTransport, rank: int) -> None:
    """A rank that does not exist: posting succeeds, waiting raises, the transport works on."""
    with make() as transport:
        text = error_of(transport, transport.send(99, 1, pattern(10, 1)))
        assert "rank 99" in text, text
        assert error_of(transport, transport.post_receive(99, 1, np.zeros(10, np.uint8)))
        assert transport.pending() == 0
        sizes_in_both_directions(lambda: transport, rank)


def close_leaves_nothing_pending(make: MakeTransport, rank: int) -> None:
    """A receive that nobody serves ends with the transport; later requests are refused; closing again does nothing."""
    transport = make()
    receives = [transport.post_receive(1 - rank, tag, np.zeros(10, np.uint8)) for tag in range(3)]
    assert transport.pending() == 3
    transport.close()
    assert transport.pending() == 0
    for receive in receives:
        assert "closed" in error_of(transport, receive)
    try:
        transport.send(1 - rank, 1, pattern(1, 1))
    except TransportError as error:
        assert "closed" in str(error)
    else:
        raise AssertionError("a closed transport took a message")
    transport.close()


def unsuitable_buffers_are_refused(make: MakeTransport, rank: int) -> None:
    """Only what can be moved without a copy is taken."""
    read_only: Any = np.zeros(4, np.uint8)
    read_only.flags.writeable = False
    unsuitable: list[Any] = [np.zeros(4, np.float32), np.zeros((2, 2), np.uint8), np.zeros(8, np.uint8)[::2], read_only]
    with make() as transport:
        for buffer in unsuitable:
            try:
                transport.post_receive(1 - rank, 1, buffer)
            except ValueError:
                continue
            raise AssertionError(f"taken: {buffer.dtype} {buffer.shape}")
        assert transport.pending() == 0


def sends_wait_for_their_bytes(make: MakeTransport, rank: int) -> None:
    """A message that is not there yet, and one behind it, arrive in order with the right bytes; the receiver hears of each."""
    heard: list[int] = []
    with make() as transport:
        if rank == 0:
            late, there = np.zeros(5000, np.uint8), threading.Event()

            def fill() -> None:
                late[:] = pattern(5000, 1)
                there.set()

            threading.Timer(0.05, fill).start()
            requests = [transport.send(1, 5, late, there.is_set), transport.send(1, 5, pattern(300, 2))]
            requests.append(transport.send(1, 6, pattern(20, 3)))
        else:
            buffers = [np.zeros(size, np.uint8) for size in (5000, 300, 20)]
            tags = (5, 5, 6)
            requests = [
                transport.post_receive(0, tag, buffer, partial(heard.append, number))
                for number, (tag, buffer) in enumerate(zip(tags, buffers, strict=True))
            ]
        for request in reversed(requests):
            transport.wait(request)
        if rank == 1:
            assert all(np.array_equal(one, pattern(one.size, seed)) for seed, one in enumerate(buffers, 1))
            assert sorted(heard) == [0, 1, 2] and heard.index(0) < heard.index(1)
        assert transport.pending() == 0


def what_readiness_and_arrival_raise_is_raised_by_wait(make: MakeTransport, rank: int) -> None:
    def fail() -> None:
        raise ValueError("the copy has failed")

    with make() as transport:
        if rank == 0:
            transport.wait(transport.send(1, 5, pattern(10, 1)))
        else:
            request = transport.post_receive(0, 5, np.zeros(10, np.uint8), fail)
            assert "the copy has failed" in error_of(transport, request)
        assert transport.pending() == 0


CASES: dict[str, Callable[[MakeTransport, int], None]] = {
    case.__name__: case
    for case in (
        order_per_source_and_tag,
        many_outstanding_receives,
        sizes_in_both_directions,
        receives_posted_late,
        message_to_oneself,
        shorter_message_is_refused,
        longer_message_is_refused,
        errors_surface_in_wait,
        close_leaves_nothing_pending,
        unsuitable_buffers_are_refused,
        sends_wait_for_their_bytes,
        what_readiness_and_arrival_raise_is_raised_by_wait,
    )
}


def wrong_length_in_pieces(make: MakeTransport, rank: int) -> None:
    """Lengths that differ by whole pieces are found too, either way round, and nobody waits for a piece for ever."""
    for sent, expected in ((3000, 2000), (2000, 3000), (1000, 2500)):
        with make() as transport:
            if rank == 0:
                transport.wait(transport.send(1, 1, pattern(sent, 1)))
            else:
                text = error_of(transport, transport.post_receive(0, 1, np.zeros(expected, np.uint8)))
                assert "agree on the length" in text, (sent, expected, text)


PIECE_CASES = {
    case.__name__: case for case in (order_per_source_and_tag, sizes_in_both_directions, wrong_length_in_pieces)
}


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


def a_held_send_holds_up_no_other(make: MakeTransport, rank: int) -> None:
    """It leaves after an answer to one that was posted later; and one that never gets its bytes ends with the transport."""
    with make() as transport:
        if rank == 0:
            there = threading.Event()
            held = transport.send(1, 5, pattern(10, 1), there.is_set)
            transport.wait(transport.send(1, 6, pattern(20, 2)))
            transport.wait(transport.post_receive(1, 7, np.zeros(1, np.uint8)))
            assert not held.completed
            there.set()
            transport.wait(held)
            never = transport.send(1, 5, pattern(10, 1), lambda: False)
            broken = transport.send(1, 8, pattern(10, 1), lambda: bool(1 // 0))
            assert "by zero" in error_of(transport, broken)
        else:
            late = transport.post_receive(0, 5, np.zeros(10, np.uint8))
            transport.wait(transport.post_receive(0, 6, np.zeros(20, np.uint8)))
            transport.wait(transport.send(0, 7, pattern(1, 3)))
            transport.wait(late)
    if rank == 0:
        assert never.completed and "closed" in error_of(transport, never)


HELD_CASES = {"a_held_send_holds_up_no_other": a_held_send_holds_up_no_other}
"""Over MPI only: between threads the sender waits."""


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


def main(world: World) -> int:
    """Run all cases (those of messages on 2 ranks only); rank 0 prints a line of JSON per case that all ranks have passed."""
    from hetero_mpi.comm.mpi_transport import MpiTransport

    def run(kind: str, name: str, case: Callable[..., None], make: MakeTransport) -> None:
        world.doing = f"{kind} {name}"
        case(make, world.rank)
        world.barrier()
        if world.rank == 0:
            print(json.dumps([kind, name]), flush=True)

    for kind, threaded in (("threaded", True), ("unthreaded", False)):
        make = partial(MpiTransport, world.comm, threaded)
        for name, case in {**CASES, **HELD_CASES}.items() if world.size == 2 else ():
            run(kind, name, case, make)
        for name, sum_case in SUM_CASES.items():
            run(kind, name, partial(sum_case, size=world.size), make)
        hosts = [str(rank % 2) for rank in range(world.size)]
        interleaved = partial(groups_and_messages_interleave, exact=False)
        on_two_hosts: dict[str, Callable[..., None]] = {"ring": sums_around_a_ring, "ring, interleaved": interleaved}
        for name, around in on_two_hosts.items():
            if world.size > 2:
                run(kind, name, partial(around, size=world.size), partial(make, hosts=hosts))
    for name, piece_case in PIECE_CASES.items() if world.size == 2 else ():
        pieces = 1000 if name != "sizes_in_both_directions" else 1 << 20
        run("pieces", name, piece_case, partial(MpiTransport, world.comm, piece_bytes=pieces))
    return 0


if __name__ == "__main__":
    sys.exit(run_guarded(main))
