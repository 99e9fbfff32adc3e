"""Ranks that stay between tests: they are the same processes, and a failure is told and costs nobody else anything."""

from __future__ import annotations

import time

import psutil
import pytest

from tests.support.rank_pool import run_pooled


def processes() -> dict[int, int]:
    """Rank -> process id."""
    result = run_pooled(3, "pool_checks", ["pid"])
    assert result.returncode == 0, result.stderr
    return {int(rank): int(process) for rank, process in map(str.split, result.stdout.splitlines())}


@pytest.mark.slow
def test_programs_share_ranks_until_one_fails_np3() -> None:
    before = processes()
    assert sorted(before) == [0, 1, 2] and processes() == before
    begin_s = time.monotonic()
    failed = run_pooled(3, "pool_checks", ["fails"], timeout_s=120)
    assert time.monotonic() - begin_s < 100, "nobody waits for ranks that wait for the one that failed"
    assert failed.returncode == 1 and failed.stdout == ""
    assert failed.stderr.count("RuntimeError: rank 1 is out of luck") == 1
    assert "rank 0: it gave no answer in time" in failed.stderr
    after = processes()
    assert sorted(after) == [0, 1, 2] and not set(after.values()) & set(before.values())


@pytest.mark.slow
def test_ranks_whose_launcher_has_ended_are_started_anew_np3() -> None:
    before = processes()
    ranks = [psutil.Process(number) for number in before.values()]
    launcher = ranks[0].parent()
    assert launcher is not None
    launcher.kill()
    launcher.wait(60)
    assert not set(processes().values()) & set(before.values())
    assert not psutil.wait_procs(ranks, timeout=60)[1], "ranks that are left leave"
