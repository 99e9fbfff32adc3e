"""Checkpoints: what is written comes back to the bit, appears only when whole, and damage is named."""

import ctypes
import mmap
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import hetero_mpi
from hetero_mpi.commands.checkpoint_text import checkpoint_lines
from hetero_mpi.state.directory import checkpoint_path, newest_good, prune
from hetero_mpi.state.hdf5 import PIECE_BYTES, CheckpointError, piece_count, pieces
from hetero_mpi.state.reader import CheckpointReader, verify
from hetero_mpi.state.writer import WINDOW_BYTES, CheckpointWriter
from tests.support.checkpoint_samples import told
from tests.support.errors import refuses

DOCUMENT = Path(__file__).parents[2] / "docs" / "internals" / "checkpoint.md"
WEIGHT = "model.layers.0.mlp.up_proj.weight"
METADATA: dict[str, Any] = {
    **told(120, updates=118),
    "data_position": 960,
    "seed": 2**63 + 1,
    "learning_rate": 0.1,
    "emulated": False,
    "job": {"train": {"steps": 200, "dtype": "fp32"}, "data": {}, "note": "ünï \ud800", "nothing": None},
    "plan": '[[pipelines]]\nmicro_batch = 2 # "two"\n',
    "empty": "",
    "losses": np.array([3.5, 1 / 3, np.nan] * 40),
    "rng_keys": np.arange(9, dtype=np.uint8),
}
RNG = np.random.default_rng(0)
TENSORS: dict[tuple[str, str], tuple[np.ndarray[Any, Any], str]] = {
    ("parameters", WEIGHT): (RNG.standard_normal((7, 5), np.float32), "float32"),
    ("moments1", WEIGHT): (RNG.standard_normal((7, 5), np.float32), "float32"),
    ("moments2", WEIGHT): (RNG.random((7, 5)), "float64"),
    ("parameters", "half"): (RNG.standard_normal(11).astype(np.float16), "float16"),
    ("parameters", "brain"): (RNG.integers(0, 0x7F80, (2, 3, 4), np.uint16), "bfloat16"),
    ("parameters", "packed"): (RNG.integers(0, 256, 13, np.uint8), "uint8"),
    ("parameters", "counter"): (np.array(41, np.int64), "int64"),
    ("parameters", "transposed"): (RNG.standard_normal((4, 3), np.float32).T, "float32"),
    ("parameters", "empty"): (np.empty((0, 4), np.float32), "float32"),
}


def write(path: Path, metadata: dict[str, Any] = METADATA, scale: float = 1.0) -> Path:
    with CheckpointWriter(path, metadata) as writer:
        for (kind, name), (array, dtype) in TENSORS.items():
            writer.write(kind, name, (array * scale).astype(array.dtype) if dtype == "float32" else array, dtype)
    return path


def contents(path: Path) -> dict[Any, Any]:
    """Everything in a checkpoint, comparable with ==."""
    with CheckpointReader(path) as reader:
        found: dict[Any, Any] = {
            key: value.tobytes() if isinstance(value, np.ndarray) else value for key, value in reader.metadata.items()
        }
        for kind in ("parameters", "moments1", "moments2"):
            for name in reader.names(kind):
                array, dtype = reader.read(kind, name)
                assert array.shape == reader.shape(kind, name)
                found[kind, name] = (array.shape, dtype, array.tobytes())
    return found


def test_everything_comes_back_to_the_bit(tmp_path: Path) -> None:
    path = write(checkpoint_path(tmp_path / "checkpoints", 120))
    assert path == tmp_path / "checkpoints" / "step-00000120.h5"
    found = contents(path)
    for key, value in METADATA.items():
        expected = value.tobytes() if isinstance(value, np.ndarray) else value
        assert found[key] == expected and type(found[key]) is type(expected), key
    for (kind, name), (array, dtype) in TENSORS.items():
        assert found[kind, name] == (array.shape, dtype, array.tobytes()), (kind, name)
    assert set(found) == set(METADATA) | set(TENSORS)
    assert verify(path) is None


def test_plain_h5py_reads_it(tmp_path: Path) -> None:
    with h5py.File(write(tmp_path / "a.h5")) as file:
        assert list(file["parameters"][WEIGHT].shape) == [7, 5], "dots do not nest"
        bits = TENSORS["parameters", "brain"][0].astype(np.uint32) << 16
        np.testing.assert_array_equal(file["parameters/brain"][:], bits.view(np.float32))
        assert file["metadata/plan"][()].decode() == METADATA["plan"]
        assert file.attrs["program_version"].decode() == hetero_mpi.__version__
        assert file["metadata"].attrs["step"] == 120


def test_the_example_in_the_documentation_runs(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    metadata = {"step": 120, "job": {"train": {}}, "losses": np.array([3.0, 2.0, 1.5, 1.25])}
    with CheckpointWriter(checkpoint_path(tmp_path, 120), metadata) as writer:
        for kind in ("parameters", "moments1", "moments2"):
            writer.write(kind, "wide", np.full((2, 3), 7 if kind == "moments2" else -7, np.float32), "float32")
            writer.write(kind, "brain", np.full(4, 0x3FC0, np.uint16), "bfloat16")
    done = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "step 120 of job {'train': {}}",
        "last losses [2.   1.5  1.25]",
        "brain (4,) 1.5 (4,)",
        "wide (2, 3) -7.0 (2, 3)",
    ]


def test_an_exception_leaves_the_former_file_and_nothing_else(tmp_path: Path) -> None:
    path = write(tmp_path / "step-00000001.h5")
    before = path.read_bytes()
    with pytest.raises(ZeroDivisionError), CheckpointWriter(path, METADATA) as writer:
        writer.write("parameters", "w", np.zeros(3, np.float32), "float32")
        raise ZeroDivisionError
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


KILLED = """
import os, signal, sys
import numpy as np
from hetero_mpi.state.writer import CheckpointWriter
with CheckpointWriter(sys.argv[1], {"step": 2}) as writer:
    writer.write("parameters", "w", np.zeros(100_000, np.float32), "float32")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_writer_leaves_the_last_good_one_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    first = write(checkpoint_path(tmp_path, 1))
    killed = subprocess.run([sys.executable, "-c", KILLED, str(checkpoint_path(tmp_path, 2))], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 2, "the temporary file of the dead writer is there"
    assert newest_good(tmp_path) == (first, [])
    third = write(checkpoint_path(tmp_path, 3))
    assert sorted(tmp_path.iterdir()) == [first, third]


FULL = """
import resource, signal, sys
import numpy as np
from hetero_mpi.state.hdf5 import CheckpointError
from hetero_mpi.state.writer import CheckpointWriter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
try:
    with CheckpointWriter(sys.argv[1], {"step": 2}) as writer:
        for number in range(int(sys.argv[2])):
            writer.write("parameters", f"w{number}", np.ones(100_000, np.float32), "float32")
except CheckpointError as error:
    print(error)
"""


@pytest.mark.parametrize("tensors", [3, 9])
def test_a_full_disk_is_a_plain_error_and_leaves_nothing(tensors: int, tmp_path: Path) -> None:
    path = checkpoint_path(tmp_path, 2)
    command = [sys.executable, "-c", FULL, str(path), str(tensors)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"{path}: the checkpoint could not be written"), done
    assert "Free space" in done.stdout
    assert list(tmp_path.iterdir()) == []


FAILING = """
import errno, sys
from pathlib import Path
import numpy as np
from hetero_mpi.state import writer as module
from hetero_mpi.state.hdf5 import CheckpointError
from hetero_mpi.state.reader import verify
from hetero_mpi.state.writer import CheckpointWriter
from tests.support.checkpoint_samples import told
path, works = Path(sys.argv[1]), module.os.pwrite

def disk_is_full_after(writes):
    def write(descriptor, content, offset):
        nonlocal writes
        writes -= 1
        if writes < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return works(descriptor, content, offset)
    return write

def attempt(writes):
    module.os.pwrite = disk_is_full_after(writes)
    try:
        with CheckpointWriter(path, told(1, note=["x" * 3000])) as writer:
            for number in range(200):
                writer.write("parameters", f"layer.{number}", np.ones(50, np.float32), "float32")
    except CheckpointError:
        return False
    return True

writes = attempts = 0
while not attempt(writes):
    assert not list(path.parent.iterdir())
    attempts, writes = attempts + 1, writes + 1 + writes // 10
assert verify(path) is None
print(attempts)
"""


def test_wherever_the_disk_fills_up_the_process_lives_on_and_ends_well(tmp_path: Path) -> None:
    """HDF5 by itself crashes at the end of a process in which a file could not be closed."""
    command = [sys.executable, "-c", FAILING, str(tmp_path / "a.h5")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=DOCUMENT.parents[2])
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 20


@pytest.mark.slow
def test_any_flipped_bit_is_noticed_or_harmless(tmp_path: Path) -> None:
    """Bits of every part of the file: data, headers, names, attributes, and padding, where nothing can change."""
    path = write(tmp_path / "a.h5")
    good, original = contents(path), path.read_bytes()
    noticed = 0
    for position in range(0, len(original), 11):
        damaged = bytearray(original)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        reason = verify(path)
        if reason is None:
            assert contents(path) == good, position
        else:
            assert str(path) in reason
            noticed += 1
    assert noticed > len(original) / 11 / 4


def test_damaged_data_is_named_with_file_and_dataset(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5")
    with h5py.File(path) as file:
        offset = file["parameters"][WEIGHT].id.get_offset()
    damaged = bytearray(path.read_bytes())
    damaged[offset + 5] ^= 4
    path.write_bytes(damaged)
    with CheckpointReader(path) as reader:
        with pytest.raises(CheckpointError, match=rf"a\.h5: dataset parameters/{WEIGHT}: damaged.*CRC-32"):
            reader.read("parameters", WEIGHT)
        reader.read("moments1", WEIGHT)
        with refuses("checkpoint.dataset_missing"):
            reader.read("parameters", "other")


def test_inspection_reads_everything_and_names_damage(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5", {**METADATA, "held_out_loss": 1.25, "data_fingerprint": "f00d"})
    text = "\n".join(checkpoint_lines(path))
    for part in (
        "after step 120 of 200",
        "evaluation loss: 1.2500",
        "2 steps were skipped",
        "fingerprint f00d",
        "7 trained tensors",
        "bfloat16, float16, float32",
        f"hetero_mpi {hetero_mpi.__version__}, format 3; all {len(TENSORS)} checksums match",
    ):
        assert part in text, (part, text)
    with h5py.File(path) as file:
        offset = file["moments2"][WEIGHT].id.get_offset()
    damaged = bytearray(path.read_bytes())
    damaged[offset] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(CheckpointError, match=f"moments2/{WEIGHT}: damaged"):
        checkpoint_lines(path)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
def test_truncated_files_are_noticed(share: float, tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5")
    os.truncate(path, int(share * path.stat().st_size))
    assert str(path) in (verify(path) or "")


def test_foreign_newer_and_unfinished_files_are_named(tmp_path: Path) -> None:
    text, foreign = tmp_path / "text.h5", tmp_path / "foreign.h5"
    text.write_text("not at all")
    with h5py.File(foreign, "w") as file:
        file["x"] = 1
    newer, unfinished = write(tmp_path / "newer.h5"), write(tmp_path / "unfinished.h5")
    with h5py.File(newer, "a") as file:
        file.attrs["format_version"] = 99
        file.attrs["program_version"] = np.bytes_("9.9")
    with h5py.File(unfinished, "a") as file:
        del file.attrs["finished"]
    for path, words in {
        tmp_path / "absent.h5": "no such checkpoint",
        text: "not an HDF5 file",
        foreign: "not a hetero_mpi checkpoint",
        newer: "format version 99, written by hetero_mpi 9.9",
        unfinished: "is incomplete",
    }.items():
        assert re.fullmatch(rf"{re.escape(str(path))}: .*{words}.*", verify(path) or ""), verify(path)


def test_newest_good_skips_damaged_ones_and_prune_keeps_it(tmp_path: Path) -> None:
    paths = [write(checkpoint_path(tmp_path, step), told(step)) for step in (1, 2, 3, 4)]
    (tmp_path / "step-latest.h5").write_text("not one of ours")
    for path in paths[2:]:
        os.truncate(path, 100)
    best, skipped = newest_good(tmp_path)
    assert best == paths[1]
    assert [path for path, _ in skipped] == [paths[3], paths[2]]
    assert all(str(path) in reason for path, reason in skipped)

    assert prune(tmp_path, keep=2) == [paths[0]], "the newest good one stays although two newer files exist"
    write(paths[3], told(4))
    assert prune(tmp_path, keep=1) == [paths[2], paths[1]]
    assert newest_good(tmp_path) == (paths[3], [])
    assert newest_good(tmp_path / "absent") == (None, [])


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (7,), (3, 5), (4, 3, 2), (2, 3, 4, 5), (1, 70)])
@pytest.mark.parametrize("limit", [1, 4, 12, 24, 1000])
def test_pieces_cover_an_array_in_order(shape: tuple[int, ...], limit: int) -> None:
    array = np.arange(np.prod(shape, dtype=int), dtype=np.int32).reshape(shape)
    found: list[int] = []
    for first, count in pieces(shape, 4, limit):
        block = array[tuple(slice(a, a + n) for a, n in zip(first, count, strict=True))]
        assert block.size == piece_count((first, count)) and block.size * 4 <= max(limit, 4)
        found += block.reshape(-1).tolist()
    assert found == array.reshape(-1).tolist()


def test_tensors_larger_than_a_piece_come_back(tmp_path: Path) -> None:
    arrays = {"deep": (3, 2, PIECE_BYTES // 16), "long": (PIECE_BYTES // 4 + 1,), "rows": (PIECE_BYTES // 8, 5)}
    path = tmp_path / "a.h5"
    with CheckpointWriter(path, told(1)) as writer:
        for name, shape in arrays.items():
            writer.write("parameters", name, np.arange(np.prod(shape), dtype=np.float32).reshape(shape), "float32")
    with CheckpointReader(path) as reader:
        for name, shape in arrays.items():
            array, _ = reader.read("parameters", name)
            assert np.array_equal(array, np.arange(np.prod(shape), dtype=np.float32).reshape(shape)), name
    assert verify(path) is None
    with h5py.File(path) as file:
        last = file["parameters/rows"].id.get_offset() + file["parameters/rows"].nbytes - 1
    content = bytearray(path.read_bytes())
    content[last] ^= 1
    path.write_bytes(content)
    assert "CRC-32" in (verify(path) or "")


def test_datasets_that_claim_more_than_the_file_holds_are_refused(tmp_path: Path) -> None:
    """Compressed and virtual datasets may claim any size; whoever believes them runs out of memory."""
    path = write(tmp_path / "a.h5")
    with h5py.File(path, "a") as file:
        bomb = file["parameters"].create_dataset("bomb", (2**40,), "f4", chunks=(2**20,), compression="gzip")
        bomb.attrs["crc32"] = np.uint32(0)
    assert "parameters/bomb" in (verify(path) or "") and "are not contiguous" in (verify(path) or "")


def test_the_best_by_held_out_loss_stay(tmp_path: Path) -> None:
    losses = {1: 2.0, 2: 1.0, 3: None, 4: 1.5, 5: float("nan"), 6: 3.0}
    paths = {}
    for step, loss in losses.items():
        metadata = told(step) if loss is None else told(step, held_out_loss=loss)
        paths[step] = write(checkpoint_path(tmp_path, step), metadata)
    assert prune(tmp_path, keep=1, keep_best=2, just_written=paths[6]) == [paths[5], paths[3], paths[1]]
    assert prune(tmp_path, keep=2, keep_best=1) == []
    assert prune(tmp_path, keep=1, keep_best=1) == [paths[4]]
    assert sorted(tmp_path.iterdir()) == [paths[2], paths[6]]
    with CheckpointReader(paths[2]) as reader:
        assert reader.held_out_loss() == 1.0


def test_memory_is_bounded_by_a_tensor(tmp_path: Path) -> None:
    """40 tensors of 8 MB are written by a process that may not grow by more than 100 MB."""
    program = textwrap.dedent("""
        import resource, sys
        import numpy as np
        from hetero_mpi.state.reader import CheckpointReader
        from hetero_mpi.state.writer import CheckpointWriter
        array = np.ones(2_000_000, np.float32)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with CheckpointWriter(sys.argv[1], {"step": 1}) as writer:
            for number in range(40):
                writer.write("parameters", f"w{number}", array, "float32")
        with CheckpointReader(sys.argv[1]) as reader:
            for name in reader.names("parameters"):
                reader.read("parameters", name)
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1000)
    """)
    command = [sys.executable, "-c", program, str(tmp_path / "a.h5")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 100


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="pages are dropped where the system can")
def test_few_pages_of_a_large_file_are_in_memory(tmp_path: Path) -> None:
    """A control group that training has filled but for little would be ended for them."""
    probe = tmp_path / "probe"
    with probe.open("wb") as file:
        file.write(bytes(100_000))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if resident_bytes(probe, 100_000) > 0:
        pytest.skip("this file system keeps its files in memory")
    array, folder = np.ones(2_000_000, np.float32), tmp_path / "checkpoints"
    with CheckpointWriter(folder / "a.h5", told(1)) as writer:
        for number in range(40):
            writer.write("parameters", f"w{number}", array, "float32")
        (growing,) = folder.iterdir()
        assert growing.stat().st_size > 4 * WINDOW_BYTES
        assert resident_bytes(growing, growing.stat().st_size) <= WINDOW_BYTES + array.nbytes


def resident_bytes(path: Path, count: int) -> int:
    """How many of the first bytes of a file are in memory, by mincore(2)."""
    page = mmap.PAGESIZE
    with path.open("rb") as file, mmap.mmap(file.fileno(), count, access=mmap.ACCESS_COPY) as mapped:
        flags = (ctypes.c_ubyte * (-(-count // page)))()
        start = ctypes.c_char.from_buffer(mapped)
        failed = ctypes.CDLL(None).mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(count), flags)
        del start
        assert failed == 0
        return min(count, page * sum(flag & 1 for flag in flags))
