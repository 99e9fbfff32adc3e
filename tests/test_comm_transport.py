"""One conformance suite for all transports: between threads, over MPI with and without the communication thread."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

import pytest

from hetero_mpi.comm.loopback import LoopbackNetwork
from tests.mpi import run_mpi
from tests.programs.comm_conformance import CASES, PIECE_CASES


@pytest.fixture(scope="module")
def passed_over_mpi() -> set[tuple[str, str]]:
    """(kind, case) of what two real ranks have passed; one mpirun for all of them."""
    result = run_mpi(2, ["tests/programs/comm_conformance.py"])
    passed = {(line[0], line[1]) for line in map(json.loads, result.stdout.splitlines())}
    if result.returncode != 0:
        print(result.stderr)
    return passed


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["threaded", "unthreaded"])
def test_over_mpi(passed_over_mpi: set[tuple[str, str]], kind: str, case: str) -> None:
    assert (kind, case) in passed_over_mpi


@pytest.mark.parametrize("case", PIECE_CASES)
def test_messages_in_pieces(passed_over_mpi: set[tuple[str, str]], case: str) -> None:
    assert ("pieces", case) in passed_over_mpi


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_between_threads(case: Callable[..., None]) -> None:
    network = LoopbackNetwork(2)
    failures: list[BaseException] = []

    def play(rank: int) -> None:
        try:
            case(lambda: network.transports[rank], rank)
        except BaseException as error:
            failures.append(error)
            for transport in network.transports:
                transport.close()

    ranks = [threading.Thread(target=play, args=(rank,), daemon=True) for rank in range(2)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(timeout=30)
        assert not thread.is_alive(), "a rank hangs"
    if failures:
        raise failures[0]
