"""Files appear whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hetero_mpi.util.disk import PROCESS_MARK, atomic_write, free_bytes, write_atomic


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_is_replaced_whole_or_stays_as_it_was(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "file"
    write_atomic(path, "é", durable)
    assert path.read_bytes() == "é".encode()
    with pytest.raises(ZeroDivisionError), atomic_write(path, durable) as temporary:
        temporary.write_text("half")
        assert path.read_text() == "é" and temporary.name.endswith(PROCESS_MARK)
        raise ZeroDivisionError
    assert path.read_text() == "é" and os.listdir(tmp_path) == ["file"]
    with pytest.raises(FileNotFoundError):
        write_atomic(tmp_path / "none" / "file", b"")
    write_atomic(tmp_path / "made" / "file", b"\xff", durable, make_folder=True)
    assert (tmp_path / "made" / "file").read_bytes() == b"\xff"


def test_room_is_that_of_the_disk_where_a_path_would_be_made(tmp_path: Path) -> None:
    assert free_bytes(tmp_path / "not" / "yet") > 0
