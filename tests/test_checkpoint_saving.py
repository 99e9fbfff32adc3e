"""Saving beside the training: what the file holds, what memory it takes, and what happens when it cannot be written."""

from __future__ import annotations

import pytest

from tests.mpi import run_mpi

CASES = (
    "the_file_is_the_moment_of_the_call",
    "training_goes_on_meanwhile",
    "memory_is_bounded",
    "a_full_disk_costs_one_checkpoint",
    "other_errors_of_the_background_reach_training",
    "without_memory_or_wish_training_waits",
)


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What rank 0 of programs/checkpoint_saving.py prints: a line per case that passed."""
    directory = tmp_path_factory.mktemp("np3")
    result = run_mpi(3, ["tests/programs/checkpoint_saving.py", str(directory)], timeout_s=240)
    return result.stdout + result.stderr


@pytest.mark.parametrize("case", CASES)
def test_background_saving_np3(printed: str, case: str) -> None:
    assert f"passed: {case}\n" in printed, printed[-3000:]
