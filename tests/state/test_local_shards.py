"""Copies on the disks of hosts, as files: what several ranks of one disk do there at once."""

import threading
from pathlib import Path

from hetero_mpi.state.directory import SHARDS_NAME, keep_versions, remove_shards, shard_path
from tests.support.jobs import newest_copy_step
from tests.support.ranks import play_ranks

RANKS = 6


def filled(run: Path) -> None:
    """A shard of two versions of every rank, and what a dead process was writing."""
    for rank in range(RANKS):
        for step, version_id in ((3, "0000aaaa"), (5, "0000bbbb")):
            path = shard_path(run, rank, step, version_id)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        (path.parent / f".{path.name}.tmp-12.abcd").touch()


def test_shards_of_other_versions_go_and_what_was_being_written(tmp_path: Path) -> None:
    filled(tmp_path)
    other = tmp_path / SHARDS_NAME / "notes.txt"
    other.touch()
    keep_versions(tmp_path, ("0000aaaa",))
    assert newest_copy_step(tmp_path) == 3
    assert len(list((tmp_path / SHARDS_NAME).glob("rank-*/.*"))) == RANKS
    keep_versions(tmp_path, ("0000aaaa",), sweep=True)
    left = {path.name for path in (tmp_path / SHARDS_NAME).glob("rank-*/*")}
    assert left == {shard_path(tmp_path, 0, 3, "0000aaaa").name}
    remove_shards(tmp_path)
    assert list((tmp_path / SHARDS_NAME).iterdir()) == [other]


def test_ranks_of_one_disk_clear_it_at_once(tmp_path: Path) -> None:
    """Each finds that others remove what it is about to look into."""

    def clear(run: Path, together: threading.Barrier) -> None:
        together.wait()
        remove_shards(run)

    for attempt in range(100):
        run, together = tmp_path / str(attempt), threading.Barrier(RANKS)
        filled(run)
        play_ranks(RANKS, lambda rank, run=run, together=together: clear(run, together))
        assert not (run / SHARDS_NAME).exists()
