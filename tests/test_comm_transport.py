"""One conformance suite for all transports: between threads, over MPI with and without the communication thread."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache, partial

import numpy as np
import pytest

from hetero_mpi.comm.emulated_link import EmulatedTransport
from hetero_mpi.comm.loopback import LoopbackNetwork
from hetero_mpi.comm.sleeping import Sleeper
from hetero_mpi.comm.transport import Transport
from tests.mpi import run_mpi
from tests.programs.comm_conformance import CASES, PIECE_CASES, SUM_CASES

Passed = Callable[[int], set[tuple[str, str]]]
Case = Callable[[Callable[[], Transport], int], None]


@pytest.fixture(scope="module")
def passed_over_mpi() -> Callable[[int], set[tuple[str, str]]]:
    """(kind, case) of what real ranks have passed, for a number of them; one mpirun for all cases."""

    @cache
    def passed(ranks: int) -> set[tuple[str, str]]:
        result = run_mpi(ranks, ["tests/programs/comm_conformance.py"])
        if result.returncode != 0:
            print(result.stderr)
        return {(line[0], line[1]) for line in map(json.loads, result.stdout.splitlines())}

    return passed


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["threaded", "unthreaded"])
def test_over_mpi(passed_over_mpi: Passed, kind: str, case: str) -> None:
    assert (kind, case) in passed_over_mpi(2)


@pytest.mark.parametrize("case", PIECE_CASES)
def test_messages_in_pieces(passed_over_mpi: Passed, case: str) -> None:
    assert ("pieces", case) in passed_over_mpi(2)


@pytest.mark.parametrize("case", SUM_CASES)
@pytest.mark.parametrize("kind", ["threaded", "unthreaded"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_over_mpi(passed_over_mpi: Passed, kind: str, case: str, ranks: int) -> None:
    assert (kind, case) in passed_over_mpi(ranks)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_between_threads(case: Case) -> None:
    between_threads(LoopbackNetwork(2).transports, case)


@pytest.mark.parametrize("case", SUM_CASES.values(), ids=SUM_CASES.keys())
def test_sums_between_threads(case: Callable[..., None]) -> None:
    between_threads(LoopbackNetwork(3).transports, partial(case, size=3))


@pytest.mark.parametrize("case", [SUM_CASES["sums_in_the_order_of_ranks"], SUM_CASES["groups_and_messages_interleave"]])
def test_sums_of_an_emulated_cluster(case: Callable[..., None]) -> None:
    sleeper = Sleeper(False)
    ends = LoopbackNetwork(3).transports
    held = [
        EmulatedTransport(end, rank, lambda *_: 1e-3, None, [0.0] * 3, sleeper, lambda *_: 1e-3)
        for rank, end in enumerate(ends)
    ]
    between_threads(held, partial(case, size=3))


def test_a_sum_of_an_emulated_cluster_lasts_from_its_last_member_s_start() -> None:
    """Two sums at once: the second waits for the first, and neither begins before the member that comes late."""
    starts, ends, sum_s, late_s = [0.0] * 3, [0.0] * 3, 0.05, 0.1
    held = [
        EmulatedTransport(end, rank, lambda *_: 0.0, None, [0.0] * 3, Sleeper(False), lambda ranks, size: sum_s)
        for rank, end in enumerate(LoopbackNetwork(3).transports)
    ]

    def case(make: Callable[[], Transport], rank: int) -> None:
        transport = make()
        group = transport.group((0, 1, 2), 0)
        time.sleep(late_s if rank == 2 else 0.0)
        starts[rank] = time.perf_counter()
        sums = [transport.all_reduce(group, np.ones(4, np.float32)) for _ in range(2)]
        transport.wait(sums[1])
        ends[rank] = time.perf_counter()
        assert sums[0].completed

    between_threads(held, case)
    # The moments are read between the start noted here and the end: at most a waking early, at least two sums later.
    assert min(ends) - max(starts) >= 2 * sum_s - 1e-3
    assert starts[2] - min(starts) >= late_s / 2, "the late member was not late"


@pytest.mark.long
def test_messages_and_sums_over_two_gibibytes() -> None:
    result = run_mpi(2, ["tests/programs/comm_large.py"], timeout_s=600)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["message", "sum"]


def between_threads(transports: Sequence[Transport], case: Case) -> None:
    """Run the case, a thread playing each rank; what fails in one of them fails here."""
    failures: list[BaseException] = []

    def play(rank: int) -> None:
        try:
            case(lambda: transports[rank], rank)
        except BaseException as error:
            failures.append(error)
            for transport in transports:
                transport.close()

    ranks = [threading.Thread(target=play, args=(rank,), daemon=True) for rank in range(len(transports))]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(timeout=30)
        assert not thread.is_alive(), "a rank hangs"
    if failures:
        raise failures[0]
