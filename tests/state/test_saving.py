"""Saving beside the training: what the file holds, what memory it takes, and what happens when it cannot be written."""

from typing import Any, cast

import pytest

from hetero_mpi.comm.ranks.world import World
from hetero_mpi.state.saving import lack_of_memory
from tests.support.rank_pool import run_pooled

CASES = (
    "the_file_is_the_moment_of_the_call",
    "training_goes_on_meanwhile",
    "a_step_has_one_snapshot",
    "memory_is_bounded",
    "a_full_disk_costs_one_checkpoint",
    "other_errors_of_the_background_reach_training",
    "without_memory_or_wish_training_waits",
)


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What rank 0 of programs/checkpoint_saving.py prints: a line per case that passed."""
    directory = tmp_path_factory.mktemp("np3")
    result = run_pooled(3, "checkpoint_saving", [str(directory)], timeout_s=240)
    return result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_background_saving_np3(printed: str, case: str) -> None:
    assert f"passed: {case}\n" in printed, printed[-3000:]


class Ranks:
    """What ``lack_of_memory`` asks of a world: three ranks, two on one host; ``rows``: what each says."""

    hosts = ("box", "box", "other")

    def __init__(self, rows: list[list[int]]) -> None:
        self.rows = rows

    def all_gather_json(self, value: Any) -> list[list[int]]:
        return self.rows


def test_ranks_of_a_host_share_its_memory_however_much_each_keeps() -> None:
    """A GPU's rank keeps nearly all of it: it may take what a processor's beside it leaves."""
    gigabyte = 10**9
    roomy = Ranks([[12 * gigabyte, 30 * gigabyte], [gigabyte, 30 * gigabyte], [gigabyte, 3 * gigabyte]])
    assert lack_of_memory(cast(World, roomy), 0) is None
    tight = Ranks([[9 * gigabyte, 30 * gigabyte], [7 * gigabyte, 30 * gigabyte], [gigabyte, 3 * gigabyte]])
    assert lack_of_memory(cast(World, tight), 0) == "box needs 16.0 GB and has 30.0 GB free"
