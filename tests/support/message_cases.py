"""What every transport must do with messages, as cases for two ranks."""

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from hetero_mpi.comm.transport import Buffer, Transport, TransportError

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


def what_is_under_way_is_told(make: MakeTransport, rank: int) -> None:
    """A long message stays with its sender until the receive is posted."""
    with make() as transport:
        if rank == 0:
            sends = [transport.send(1, 5, pattern(8 << 20, seed)) for seed in range(2)]
            deadline = time.monotonic() + 60
            while transport.sending() != {"1": [2, 16 << 20]}:  # type: ignore[attr-defined]
                assert time.monotonic() < deadline, "the thread that sends takes them when it comes to run"
                time.sleep(0.01)
            transport.wait(transport.send(1, 6, pattern(1, 0)))
            for send in sends:
                transport.wait(send)
            assert transport.sending() == {}  # type: ignore[attr-defined]
        else:
            transport.wait(transport.post_receive(0, 6, np.zeros(1, np.uint8)))
            for _ in range(2):
                transport.wait(transport.post_receive(0, 5, np.zeros(8 << 20, np.uint8)))


HELD_CASES = {case.__name__: case for case in (a_held_send_holds_up_no_other, what_is_under_way_is_told)}
"""Over MPI only: between threads the sender waits."""
