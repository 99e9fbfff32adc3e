"""Changes to checkpoint files by h5py, each of which makes a file that no reader may accept."""

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from tests.support.checkpoint_samples import told

SHAPES = {"a.weight": (3, 4), "b.weight": (4,)}
KINDS = ("parameters", "moments1", "moments2")
FIFO, SECRET = "fifo.h5", "secret.txt"


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
    "version-alone": metadata("version_id", '"0000aaaa"'),
    # Numbers that no run can go on from.
    "nan-weights": filled("parameters", float("nan")),
    "infinite-weights": filled("parameters", float("-inf")),
    "nan-moments": filled("moments1", float("nan")),
    "infinite-moments": filled("moments2", float("inf")),
    "negative-squares": filled("moments2", -1e-30),
}  # fmt: skip
