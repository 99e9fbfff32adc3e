"""Checkpoints that somebody made to harm whoever reads them: all are refused in words, in bounded memory and time.

Real files are changed with h5py, so that all of HDF5's own checksums are right. Each is then read by all that reads checkpoints, in
a process that may not take more than a few hundred megabytes.
"""

import json
import os
import random
import shutil
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from hetero_mpi.model.optimizer import LossScale
from hetero_mpi.state.directory import checkpoint_path, newest_good, shard_path, shards_on_disk
from hetero_mpi.state.hdf5 import CheckpointError
from hetero_mpi.state.reader import CheckpointReader, verify
from hetero_mpi.state.state import State
from hetero_mpi.state.writer import CheckpointWriter
from tests.support.checkpoint_samples import told, write_checkpoint
from tests.support.crafted_checkpoints import CRAFTED, FIFO, KINDS, PLAIN, SECRET, SHAPES, numbers
from tests.support.errors import refuses

ROOT = Path(__file__).parents[2]
MEMORY_BYTES = 600 << 20
"""What the reading process may take beyond what its imports take."""
LIMIT_S = 120
"""A hang, on a machine that does other things."""


READER = f"""
import json, resource, sys
from pathlib import Path
from hetero_mpi.state.directory import newest_good, prune
from hetero_mpi.state.hdf5 import CheckpointError
from hetero_mpi.state.reader import CheckpointReader
from hetero_mpi.state.directory import lowest_held_out
from hetero_mpi.state.directory import shards_on_disk
from hetero_mpi.commands.plan_commands import inspect
from hetero_mpi.util.errors import UserError
import hetero_mpi.commands.checkpoint_text
taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + {MEMORY_BYTES}, taken + {MEMORY_BYTES}))
for name in sys.stdin.read().split():
    path, said = Path(name), []
    best, passed_over = newest_good(path.parent)
    try:
        inspect(path, None)
    except UserError as error:
        said.append(str(error))
    lowest_held_out(path.parent)
    print(json.dumps([str(best), passed_over[0][1] if passed_over else None, *said]), flush=True)
"""


def read_all(paths: list[Path]) -> list[list[Any]]:
    """What a process of bounded memory says of each: [newest good one beside it, why it was passed over, inspect's error]."""
    done = subprocess.run(
        [sys.executable, "-c", READER], input="\n".join(map(str, paths)), capture_output=True, text=True, timeout=LIMIT_S, cwd=ROOT
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout.splitlines()[-1:]}: {done.stderr[-3000:]}"
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def crafted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[Any]]]:
    """Name -> (the crafted file, the newest of its directory; what was said of it)."""
    paths = {}
    good = write_checkpoint(tmp_path_factory.mktemp("good") / "a.h5", told(3, held_out_loss=1.5), SHAPES)
    for name, change in CRAFTED.items():
        folder = tmp_path_factory.mktemp(name)
        shutil.copy(good, checkpoint_path(folder, 2))
        paths[name] = Path(shutil.copy(good, checkpoint_path(folder, 3)))
        shutil.copy(good, folder / "other.h5")
        (folder / SECRET).write_text("root:x:0:0:for nobody's eyes")
        os.mkfifo(folder / FIFO)
        with h5py.File(paths[name], "a") as file:
            change(file)
    return dict(zip(paths, zip(paths.values(), read_all(list(paths.values())), strict=True), strict=True))


@pytest.mark.parametrize("name", CRAFTED)
def test_a_crafted_checkpoint_is_named_and_passed_over(name: str, crafted: dict[str, tuple[Path, list[Any]]]) -> None:
    path, (best, reason, *inspected) = crafted[name]
    assert best == str(checkpoint_path(path.parent, 2)), "the last good one is another"
    assert reason.startswith(f"{path}: ") and inspected == [reason]
    assert "nobody's eyes" not in reason


def test_pipes_and_directories_are_not_waited_for(tmp_path: Path) -> None:
    good = write_checkpoint(checkpoint_path(tmp_path, 1), told(1), SHAPES)
    os.mkfifo(checkpoint_path(tmp_path, 3))
    checkpoint_path(tmp_path, 2).mkdir()
    ((best, reason, inspected),) = read_all([checkpoint_path(tmp_path, 3)])
    assert best == str(good) and "not a regular file" in reason and "must be a regular file" in inspected


def test_values_of_frozen_parameters_may_be_infinite_and_nothing_else(tmp_path: Path) -> None:
    """A mask is full of them. Of trained ones, and of NaN, no checkpoint is written, and the one before stays."""
    path, mask = checkpoint_path(tmp_path, 1), np.triu(np.full((3, 3), -np.inf, np.float32), 1)
    ones = np.ones(3, np.float32)

    def write(bad: str | None, value: float) -> None:
        with CheckpointWriter(path, told(1)) as writer:
            writer.write("parameters", "mask", mask, "float32")
            for kind in KINDS:
                writer.write(kind, "w", np.full(3, value, np.float32) if kind == bad else ones, "float32")

    write(None, 0)
    assert verify(path) is None
    before = path.read_bytes()
    for bad, value in (("parameters", np.nan), ("parameters", np.inf), ("moments1", -np.inf), ("moments2", -1.0)):
        with refuses("checkpoint.not_finite"):
            write(bad, value)
        assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == before


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_values_are_looked_at_in_every_type(dtype: str, tmp_path: Path) -> None:
    path = write_checkpoint(checkpoint_path(tmp_path, 1), told(1), SHAPES)
    values = {"bfloat16": np.array([0x3F80, 0x7FC0], np.uint16)}.get(dtype, np.array([1, np.nan]))
    with CheckpointWriter(path, told(1)) as writer, pytest.raises(CheckpointError, match="NaN"):
        writer.write("parameters", "x", values if dtype == "bfloat16" else values.astype(dtype), dtype)


def test_resuming_takes_the_newest_that_is_whole_and_of_this_model(tmp_path: Path) -> None:
    from hetero_mpi.model.layer.interface import ParameterSpec
    from hetero_mpi.model.tuning import Tuning
    from hetero_mpi.state.directory import LATEST, find_checkpoint
    from hetero_mpi.state.resume_checks import check_tensors

    good, *odd = (checkpoint_path(tmp_path / "checkpoints", step) for step in (1, 2, 3))
    for path, name in zip(odd, ("step-negative", "nan-weights"), strict=True):
        with h5py.File(write_checkpoint(path, told(3), SHAPES), "a") as file:
            CRAFTED[name](file)
        with refuses("checkpoint.damaged"):
            find_checkpoint(tmp_path, str(path))
    write_checkpoint(good, told(1), SHAPES)
    assert find_checkpoint(tmp_path, LATEST) == good

    specs = {name: ParameterSpec(name, 0, shape) for name, shape in SHAPES.items()}
    tuning = Tuning({"a.weight": specs["a.weight"]}, {"b.weight": specs["b.weight"]})
    with CheckpointReader(good) as reader:
        check_tensors(reader, good, tuning)
    for name, shape, dtype in (("b.weight", (5,), np.float32), ("a.weight", (3, 4), np.int8)):
        write_checkpoint(good, told(1), SHAPES)
        with h5py.File(good, "a") as file:
            for kind in KINDS:
                numbers(file[kind], name, np.ones(shape, dtype))
        assert verify(good) is None
        with (
            CheckpointReader(good) as reader,
            refuses("resume.other_model"),
        ):
            check_tensors(reader, good, tuning)


def test_odd_shards_of_a_copy_are_remarked_upon(tmp_path: Path) -> None:
    said: dict[str, Any] = {**State(LossScale(1.0), 1, 1, [4.0]).metadata(shard=True), "job": {"train": {}, "data": {}}}
    said |= {"version_id": "0000aaaa", "rank": 0, "names": ["a", "b"], "begun": "x"}
    odd = {"names": "all", "rank": -1, "skipped": None, "begun": 7, "newest_checkpoint": 0, "loss_scale": [0.0, 1]}
    for number, (key, value) in enumerate([("rank", 0), *odd.items()]):
        write_checkpoint(shard_path(tmp_path, number, 1, "0000aaaa"), {**said, key: value}, SHAPES)
    without_skips = {key: value for key, value in said.items() if key != "skips_in_a_row"}
    write_checkpoint(shard_path(tmp_path, 7, 1, "0000aaaa"), without_skips, SHAPES)
    write_checkpoint(shard_path(tmp_path, 8, 1, "0000aaaa"), told(1), SHAPES)
    found, skipped = shards_on_disk(tmp_path)
    assert [shard.writer for shard in found] == [0] and len(skipped) == 8, skipped


def broken(draw: random.Random, file: Any) -> None:
    """One to three things of a file made odd, by whoever knows HDF5."""
    odd = [
        -1, 2**62, 0.5, float("nan"), True, "text", np.bytes_("bytes"), np.arange(3), np.zeros((2, 2)), np.zeros(2, PLAIN), 1j,
        h5py.Empty("f4"), np.array([], np.int32), np.float16(1), np.uint8(255), np.bytes_(b"\xff\0"), ["a", "bc"],
    ]  # fmt: skip
    for _ in range(draw.randint(1, 3)):
        hard = [name for name in (*KINDS, "metadata") if isinstance(file.get(name, getlink=True), h5py.HardLink)]
        groups = [name for name in hard if isinstance(file[name], h5py.Group)]
        places = groups + [f"{group}/{name}" for group in groups for name in file[group]]
        place = draw.choice(places)
        if not isinstance(file.get(place, getlink=True), h5py.HardLink):
            continue
        thing = file[place]
        match draw.choice(["attribute", "attribute", "drop", "replace", "swap", "group", "link"]):
            case "attribute":
                holder = draw.choice([thing, file["/"]])
                name = draw.choice([*holder.attrs, "crc32", "content"])
                holder.attrs[name] = draw.choice(odd)
            case "drop":
                del file[place]
            case "replace":
                del file[place]
                value = draw.choice(odd)
                file[place] = value
                raw = b"" if isinstance(value, h5py.Empty) else np.asarray(value).tobytes()
                file[place].attrs["crc32"] = np.uint32(zlib.crc32(raw))
            case "swap":
                other = draw.choice(places)
                if isinstance(file.get(other, getlink=True), h5py.HardLink) and not other.startswith(place):
                    del file[place]
                    file[place] = file[other]
            case "group":
                del file[place]
                file.create_group(place)
            case _:
                del file[place]
                file[place] = draw.choice(
                    [h5py.SoftLink("/metadata"), h5py.ExternalLink(FIFO, "/"), h5py.SoftLink(place)]
                )


def some_broken_files(folder: Path, seed: int, count: int) -> list[Path]:
    """Files made odd through HDF5, truncated, and with flipped bits, each the newest of a directory of its own."""
    draw, paths = random.Random(seed), []
    good = write_checkpoint(folder / "good.h5", told(3, held_out_loss=1.5), SHAPES)
    for number in range(count):
        within = folder / str(number)
        within.mkdir()
        os.mkfifo(within / FIFO)
        path = Path(shutil.copy(good, checkpoint_path(within, 3)))
        if number % 4 < 2:
            with h5py.File(path, "a") as file:
                broken(draw, file)
        content = bytearray(path.read_bytes())
        if number % 4 == 2:
            del content[draw.randrange(len(content)) :]
        elif number % 4 == 3:
            for _ in range(draw.randint(1, 8)):
                content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(content)
        paths.append(path)
    return paths


@pytest.mark.parametrize(("seed", "count"), [(1, 150), pytest.param(2, 3000, marks=pytest.mark.long)])
def test_whatever_a_file_holds_it_is_whole_or_refused(seed: int, count: int, tmp_path: Path) -> None:
    paths = some_broken_files(tmp_path, seed, count)
    refused = 0
    for path, (best, reason, *inspected) in zip(paths, read_all(paths), strict=True):
        if reason is None:
            assert best == str(path) and not inspected
        else:
            assert best == "None" and len(inspected) == 1 and reason.startswith(f"{path}: "), (path, reason, inspected)
            refused += 1
    assert count / 2 < refused < count, refused
    with CheckpointReader(tmp_path / "good.h5") as reader:
        assert reader.check_all().tensors == len(KINDS) * len(SHAPES)
    assert newest_good(tmp_path) == (None, [])
