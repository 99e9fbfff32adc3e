"""Checkpoints that somebody made to harm whoever reads them: all are refused in words, in bounded memory and time.

Real files are changed with h5py, so that all of HDF5's own checksums are right. Each is then read by all that reads checkpoints, in
a process that may not take more than a few hundred megabytes.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from hetero_mpi.checkpoint import (
    CheckpointError,
    CheckpointReader,
    CheckpointWriter,
    checkpoint_path,
    newest_good,
    verify,
)
from hetero_mpi.checkpoint.local_shards import piece_path, pieces_on_disk
from hetero_mpi.errors import UserError
from tests.support.checkpoint_samples import told, write_checkpoint

ROOT = Path(__file__).parents[2]
SHAPES = {"a.weight": (3, 4), "b.weight": (4,)}
KINDS = ("parameters", "moments1", "moments2")
FIFO, SECRET = "fifo.h5", "secret.txt"
MEMORY_BYTES = 600 << 20
"""What the reading process may take beyond what its imports take."""
LIMIT_S = 120
"""A hang, on a machine that does other things."""


def text(group: Any, name: str, value: str, content: str = "json", size: int | None = None) -> None:
    """A text with its right CRC-32, as the writer stores it."""
    raw = value.encode()
    if name in group:
        del group[name]
    dataset = group.create_dataset(name, data=raw, dtype=h5py.string_dtype("utf-8", size or max(1, len(raw))))
    dataset.attrs["content"] = np.bytes_(content)
    dataset.attrs["crc32"] = np.uint32(zlib.crc32(raw))


def numbers(group: Any, name: str, values: Any, **layout: Any) -> None:
    """A dataset with its right CRC-32."""
    array = np.ascontiguousarray(values)
    if name in group:
        del group[name]
    dataset = group.create_dataset(name, data=array, **layout)
    dataset.attrs["crc32"] = np.uint32(zlib.crc32(array.tobytes()))


def replaced(place: str, thing: Any) -> Callable[[Any], None]:
    def change(file: Any) -> None:
        del file[place]
        file[place] = thing

    return change


def external_storage(file: Any) -> None:
    size = Path(file.filename).with_name(SECRET).stat().st_size
    del file["parameters/a.weight"]
    file["parameters"].create_dataset("a.weight", (size,), "u1", external=[(SECRET, 0, size)]).attrs["crc32"] = 0


def external_text(file: Any) -> None:
    """A text of the metadata that lies in another file, with its right CRC-32."""
    raw = Path(file.filename).with_name(SECRET).read_bytes()
    kind = h5py.h5t.C_S1.copy()
    kind.set_size(len(raw))
    created = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    created.set_external(SECRET.encode(), 0, len(raw))
    space = h5py.h5s.create(h5py.h5s.SCALAR)
    dataset = h5py.Dataset(h5py.h5d.create(file["metadata"].id, b"run", kind, space, created))
    dataset.attrs["content"] = np.bytes_("text")
    dataset.attrs["crc32"] = np.uint32(zlib.crc32(raw))


def virtual(file: Any) -> None:
    layout = h5py.VirtualLayout((3, 4), "f4")
    layout[:] = h5py.VirtualSource(FIFO, "x", (3, 4))
    del file["parameters/a.weight"]
    file["parameters"].create_virtual_dataset("a.weight", layout).attrs["crc32"] = np.uint32(0)


def variable_length(file: Any) -> None:
    del file["metadata/job"]
    dataset = file["metadata"].create_dataset("job", data=json.dumps(told(1)["job"]))
    dataset.attrs["content"], dataset.attrs["crc32"] = np.bytes_("json"), np.uint32(0)


def a_tree_of_itself(file: Any) -> None:
    file["parameters/a.weight.again"] = file["/"]


def bomb(place: str, shape: tuple[int, ...], kind: Any = "f8") -> Callable[[Any], None]:
    def change(file: Any) -> None:
        if place in file:
            del file[place]
        dataset = file.create_dataset(
            place, shape, kind, chunks=tuple(min(n, 1 << 20) for n in shape), compression="gzip"
        )
        dataset.attrs["crc32"] = np.uint32(0)

    return change


def text_bomb(file: Any) -> None:
    """A gigabyte of blanks."""
    del file["metadata/job"]
    kind = h5py.string_dtype("utf-8", 1 << 20)
    dataset = file["metadata"].create_dataset("job", (1000,), kind, chunks=(1,), compression="gzip")
    dataset.attrs["content"], dataset.attrs["crc32"] = np.bytes_("json"), np.uint32(0)


def json_bomb(file: Any) -> None:
    """Some 20 MB of text, and a hundred times that as values."""
    text(file["metadata"], "job", '{"train": {}, "data": {}, "x": [' + "{}," * 6_000_000 + "{}]}")


def overlapping(file: Any) -> None:
    """One hard link more for each of many names: the same megabytes, a thousand times."""
    numbers(file["parameters"], "big", np.ones(1 << 18, np.float32))
    for number in range(1000):
        file[f"parameters/more.{number}"] = file["parameters/big"]


def sparse(file: Any) -> None:
    """A terabyte of losses that takes no room on the disk."""
    created = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    created.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    created.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    del file["metadata/losses"]
    space, kind = h5py.h5s.create_simple((1 << 37,)), h5py.h5t.IEEE_F64LE
    h5py.Dataset(h5py.h5d.create(file["metadata"].id, b"losses", kind, space, created)).attrs["crc32"] = np.uint32(0)


def attribute(place: str, name: str, value: Any) -> Callable[[Any], None]:
    def change(file: Any) -> None:
        file[place].attrs[name] = value

    return change


def metadata(name: str, value: str) -> Callable[[Any], None]:
    def change(file: Any) -> None:
        if name in file["metadata"].attrs:
            del file["metadata"].attrs[name]
        text(file["metadata"], name, value)

    return change


def removed(place: str, name: str) -> Callable[[Any], None]:
    def change(file: Any) -> None:
        del file[place].attrs[name]

    return change


def filled(kind: str, value: float, dtype: Any = np.float32) -> Callable[[Any], None]:
    return lambda file: numbers(file[kind], "a.weight", np.full((3, 4), value, dtype))


PLAIN = np.dtype([("x", "i4"), ("y", "f8")])
CRAFTED: dict[str, Callable[[Any], None]] = {
    # Out of the file.
    "external-link-to-metadata": replaced("metadata", h5py.ExternalLink("other.h5", "/metadata")),
    "external-link-to-a-tensor": replaced("parameters/a.weight", h5py.ExternalLink("other.h5", "/parameters/a.weight")),
    "external-link-to-a-pipe": replaced("parameters/a.weight", h5py.ExternalLink(FIFO, "/x")),
    "external-link-beside": lambda file: file.__setitem__("notes", h5py.ExternalLink(FIFO, "/x")),
    "external-link-in-metadata": lambda file: file["metadata"].__setitem__("note", h5py.ExternalLink(FIFO, "/x")),
    "soft-link": replaced("parameters/a.weight", h5py.SoftLink("/moments1/a.weight")),
    "soft-link-to-nothing": replaced("parameters/a.weight", h5py.SoftLink("/nothing")),
    "external-storage": external_storage,
    "external-text": external_text,
    "virtual": virtual,
    # Larger than it looks.
    "compressed-losses": bomb("metadata/losses", (1 << 29,)),
    "compressed-tensor": bomb("parameters/a.weight", (1 << 29,)),
    "compressed-text": text_bomb,
    "json": json_bomb,
    "deep-json": metadata("job", '{"a":' * 200_000),
    "sparse-losses": sparse,
    "overlapping": overlapping,
    "large-attribute": attribute("metadata", "note", np.bytes_(b"x" * 60_000)),
    "variable-length": variable_length,
    # Of another kind.
    "a-tree-of-itself": a_tree_of_itself,
    "group-for-tensor": lambda file: (file.__delitem__("parameters/a.weight"), file.create_group("parameters/a.weight")),
    "group-for-text": lambda file: (file.__delitem__("metadata/job"), file.create_group("metadata/job")),
    "dataset-for-group": lambda file: (file.__delitem__("moments1"), numbers(file, "moments1", np.ones(3))),
    "dataset-for-metadata": lambda file: (file.__delitem__("metadata"), numbers(file, "metadata", np.ones(3))),
    "no-group": lambda file: file.__delitem__("moments2"),
    "named-type": replaced("parameters/a.weight", np.dtype("f4")),
    "empty-tensor": replaced("parameters/a.weight", h5py.Empty("f4")),
    "compound-tensor": lambda file: numbers(file["parameters"], "a.weight", np.zeros(3, PLAIN)),
    "complex-tensor": lambda file: numbers(file["parameters"], "a.weight", np.zeros(3, np.complex128)),
    "wrong-endian": lambda file: numbers(file["parameters"], "a.weight", np.ones((3, 4), ">f4")),
    "text-for-tensor": lambda file: text(file["parameters"], "a.weight", "abc"),
    "other-shape": lambda file: numbers(file["moments1"], "a.weight", np.ones(5, np.float32)),
    "moments-missing": lambda file: file["moments2"].__delitem__("a.weight"),
    "moments-too-many": lambda file: [numbers(file[kind], "c", np.ones(5, np.float32)) for kind in KINDS[1:]],
    "name-not-utf8": lambda file: h5py.h5g.create(file["parameters"].id, b"\xff\xfe"),
    # Attributes.
    "crc-text": attribute("parameters/a.weight", "crc32", np.bytes_("abc")),
    "crc-array": attribute("parameters/a.weight", "crc32", np.arange(4)),
    "crc-float": attribute("parameters/a.weight", "crc32", float("nan")),
    "crc-missing": removed("parameters/a.weight", "crc32"),
    "content-array": attribute("metadata/job", "content", np.arange(3)),
    "content-number": attribute("metadata/job", "content", 7),
    "content-missing": removed("metadata/job", "content"),
    "content-on-numbers": attribute("metadata/losses", "content", np.bytes_("json")),
    "version-text": attribute("/", "format_version", "one"),
    "version-inf": attribute("/", "format_version", float("inf")),
    "version-compound": attribute("/", "format_version", np.zeros((), PLAIN)),
    "version-missing": removed("/", "format_version"),
    "program-number": attribute("/", "program_version", 3.5),
    "program-not-utf8": attribute("/", "program_version", np.bytes_(b"\xff\xff")),
    "program-missing": removed("/", "program_version"),
    "format-array": attribute("/", "format", np.arange(3)),
    "step-text": attribute("metadata", "step", "three"),
    "step-bytes": attribute("metadata", "step", np.bytes_("3")),
    "step-array": attribute("metadata", "step", np.arange(3)),
    "step-compound": attribute("metadata", "step", np.zeros((), PLAIN)),
    "step-complex": attribute("metadata", "step", 1j),
    "step-empty": attribute("metadata", "step", h5py.Empty("i8")),
    "step-nan": attribute("metadata", "step", float("nan")),
    "step-reference": lambda file: file["metadata"].attrs.create("step", file["metadata"].ref, dtype=h5py.ref_dtype),
    "step-true": attribute("metadata", "step", np.asarray(True)),
    "step-negative": attribute("metadata", "step", -3),
    "step-huge": metadata("step", "9" * 5000),
    "step-missing": removed("metadata", "step"),
    "step-of-more-losses": attribute("metadata", "step", 4),
    "updates-missing": removed("metadata", "updates"),
    "updates-too-many": attribute("metadata", "updates", 4),
    "held-out-text": attribute("metadata", "held_out_loss", "low"),
    "held-out-huge": metadata("held_out_loss", "1" + "0" * 400),
    "job-a-list": metadata("job", "[]"),
    "job-of-lists": metadata("job", '{"train": [], "data": []}'),
    "job-torn": metadata("job", '{"train": {'),
    "job-not-utf8": lambda file: numbers(file["metadata"], "job", np.frombuffer(b"\xff", np.uint8)),
    "losses-a-text": metadata("losses", '"none"'),
    "losses-of-two-axes": lambda file: numbers(file["metadata"], "losses", np.ones((3, 3))),
    "losses-whole-numbers": lambda file: numbers(file["metadata"], "losses", np.ones(3, np.int64)),
    "loss-scale-null": metadata("loss_scale", "null"),
    "loss-scale-nan": metadata("loss_scale", "[NaN, 0]"),
    "loss-scale-short": metadata("loss_scale", "[1.0]"),
    "base-model-a-number": metadata("base_model", "7"),
    "config-a-text": metadata("model_config", '"llama"'),
    "versions-a-list": metadata("versions", "[1]"),
    "generation-alone": metadata("generation", '"0000aaaa"'),
    # Numbers that no run can go on from.
    "nan-weights": filled("parameters", float("nan")),
    "infinite-weights": filled("parameters", float("-inf")),
    "nan-moments": filled("moments1", float("nan")),
    "infinite-moments": filled("moments2", float("inf")),
    "negative-squares": filled("moments2", -1e-30),
}  # fmt: skip

READER = f"""
import json, resource, sys
from pathlib import Path
from hetero_mpi.checkpoint import CheckpointError, CheckpointReader, newest_good, prune
from hetero_mpi.checkpoint.directory import _best
from hetero_mpi.checkpoint.local_shards import pieces_on_disk
from hetero_mpi.commands.plan import inspect
from hetero_mpi.errors import UserError
import hetero_mpi.report.checkpoints
taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + {MEMORY_BYTES}, taken + {MEMORY_BYTES}))
for name in sys.stdin.read().split():
    path, said = Path(name), []
    best, passed_over = newest_good(path.parent)
    try:
        inspect(path, None)
    except UserError as error:
        said.append(str(error))
    _best([path], 1)
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
    assert best == str(good) and "not a regular file" in reason and "not a regular file" in inspected


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
        with pytest.raises(CheckpointError, match=f"was not written, as no run could go on from {bad}/w"):
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
    from hetero_mpi.state.checkpointing import LATEST, check_tensors, find_checkpoint

    good, *odd = (checkpoint_path(tmp_path / "checkpoints", step) for step in (1, 2, 3))
    for path, name in zip(odd, ("step-negative", "nan-weights"), strict=True):
        with h5py.File(write_checkpoint(path, told(3), SHAPES), "a") as file:
            CRAFTED[name](file)
        with pytest.raises(UserError, match=path.name):
            find_checkpoint(tmp_path, str(path))
    write_checkpoint(good, told(1), SHAPES)
    found, remarks = find_checkpoint(tmp_path, LATEST)
    assert found == good and len(remarks) == 2 and all("passed over" in remark for remark in remarks)

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
            pytest.raises(UserError, match=f"of another model: parameters/{name} has"),
        ):
            check_tensors(reader, good, tuning)


def test_odd_pieces_of_a_copy_are_remarked_upon(tmp_path: Path) -> None:
    books = {"step": 1, "updates": 1, "loss_scale": None, "skipped": 0, "skips_in_a_row": 0}
    books |= {"last_checkpoint": None, "good_checkpoint": None}
    said = {"generation": "0000aaaa", "rank": 0, "layers": [0, 1], "begun": "x", "books": books}
    for number, (key, value) in enumerate({"": 0, "layers": "all", "rank": -1, "books": {}, "begun": 7}.items()):
        path = piece_path(tmp_path, number, 1, "0000aaaa")
        write_checkpoint(path, told(1, **{**said, **({key: value} if key else {})}), SHAPES)
    found, remarks = pieces_on_disk(tmp_path)
    assert [piece.writer for piece in found] == [0] and len(remarks) == 4, remarks


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
