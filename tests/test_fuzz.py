"""Whatever a file holds: it is read, or refused in words. Never a hang, another exception than UserError, or a file left behind.

Good files are broken in two ways: as bytes (flipped, cut, repeated, moved), which is what disks and transfers do; and as
values (a key taken away, a value of another kind, an absurd number), which is what people and programs do. Then everything
that looks at such a file before training looks at it.
"""

from __future__ import annotations

import copy
import json
import signal
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import tomli
import tomli_w
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from hetero_mpi.commands.checkpoint_text import checkpoint_lines
from hetero_mpi.data.records import read_records
from hetero_mpi.data.text_sequences import Corpus
from hetero_mpi.job.load import job_from_dict, job_to_dict, load_job, run_directory
from hetero_mpi.model.files.model_files import ModelFiles
from hetero_mpi.planning.decision.planner import complete_plan, make_plan
from hetero_mpi.planning.types.request import PlanRequest
from hetero_mpi.planning.types.toml_files import load_plan_file, load_profile, save_plan, save_profile
from hetero_mpi.report.plan_text import plan_lines
from hetero_mpi.report.profile_text import inspection_lines
from hetero_mpi.state.directory import newest_good
from hetero_mpi.state.writer import CheckpointWriter
from hetero_mpi.util.errors import UserError
from tests.support.checkpoint_samples import told
from tests.support.errors import refuses
from tests.support.planning_samples import SEQUENCE, make_profile

ROOT = Path(__file__).parents[1]
NORMAL, LONG = 50, 1300
"""Inputs per subject; of nine subjects, more than 10,000 in the long suite."""
LIMIT_S = 30
"""What takes longer counts as a hang."""

ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 2**31, 2**63, -(2**63), 10**30, 0.0, -0.0, 0.5, 1e-320, 1e308, float("inf"),
    float("-inf"), float("nan"), "", " ", "auto", "inf", "../../etc/passwd", "/", "{name}", "{", "%s%n", "\0",
    "\ud7ff\uffff", "é" * 300, "x" * 70_000, [], [[]], [1, "a", None], {}, {"a": {}}, {"": 0},
]  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """A kind of file."""

    name: str
    """Of the file; ``{}`` in no case."""
    make: Callable[[Path], bytes]
    """A good one, made in a directory that may be used for it."""
    look: Callable[[Path], object]
    """Everything that reads it."""
    values: Callable[[bytes], Any] | None = None
    """Its values, where it is made of such; ``text`` is the inverse."""
    text: Callable[[Any], bytes] | None = None


def request() -> PlanRequest:
    """What is planned for the good profile."""
    return PlanRequest(global_batch=4, sequence_length=SEQUENCE, micro_batch_choices=(1, 2))


def look_at_job(path: Path) -> None:
    loaded = load_job(path)
    run_directory(loaded)
    loaded.patterns("text"), loaded.patterns("records"), loaded.patterns("evaluation")
    sent = json.dumps(job_to_dict(loaded.job))
    assert json.dumps(job_to_dict(job_from_dict(json.loads(sent)))) == sent, "other ranks see another job"


def look_at_override(path: Path) -> None:
    look_at = path.with_name("job.toml")
    look_at.write_text('[model]\npath = "m"\n[data]\ntext = ["*.txt"]\n')
    try:
        load_job(look_at, [path.read_bytes().decode("utf-8", "surrogateescape")])
    finally:
        look_at.unlink()


def look_at_plan(path: Path) -> None:
    plan, report = load_plan_file(path)
    plan_lines(report or plan, None)
    complete_plan(plan, make_profile(), request())


def look_at_profile(path: Path) -> None:
    profile = load_profile(path)
    inspection_lines(profile)
    make_plan(profile, request())


def look_at_checkpoint(path: Path) -> None:
    newest_good(path.parent)
    checkpoint_lines(path)


def look_at_model(path: Path) -> None:
    (path.parent / "config.json").write_text('{"model_type": "llama"}')
    try:
        files = ModelFiles(path.parent)
        files.contents()
        for name in files.names:
            files.read(name)
    finally:
        (path.parent / "config.json").unlink()


def make_plan_file(directory: Path) -> bytes:
    profile = make_profile()
    save_plan(make_plan(profile, request()), directory / "made")
    return (directory / "made").read_bytes()


def make_profile_file(directory: Path) -> bytes:
    save_profile(make_profile(), directory / "made")
    return (directory / "made").read_bytes()


def make_checkpoint(directory: Path) -> bytes:
    with CheckpointWriter(directory / "made", told(3, held_out_loss=1.5)) as writer:
        for kind in ("parameters", "moments1", "moments2"):
            writer.write(kind, "w", np.arange(12, dtype=np.float32).reshape(3, 4), "float32")
        writer.write("parameters", "brain", np.arange(5, dtype=np.uint16), "bfloat16")
    return (directory / "made").read_bytes()


def make_safetensors(values: Any) -> bytes:
    header = json.dumps(values).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(header)) + header + bytes(40)


def safetensors_values(content: bytes) -> Any:
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length])


HEADER = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [8], "data_offsets": [24, 40]},
}
RECORDS = [
    {"instruction": "Add.", "input": "1 2", "output": "3"},
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    {"prompt": "p", "completion": "c"},
]


def toml_bytes(values: Any) -> bytes:
    try:
        return tomli_w.dumps(without_null(values)).encode("utf-8", "surrogatepass")
    except (TypeError, AttributeError):
        return repr(values).encode()


def without_null(values: Any) -> Any:
    """TOML has no null: such keys are taken away."""
    if isinstance(values, dict):
        return {key: without_null(value) for key, value in values.items() if value is not None}
    return [without_null(value) for value in values if value is not None] if isinstance(values, list) else values


def toml_values(content: bytes) -> Any:
    return tomli.loads(content.decode())


def json_lines(values: Any) -> bytes:
    values = values if isinstance(values, list) else [values]
    return "\n".join(json.dumps(value) for value in values).encode()


SUBJECTS = {
    **{
        name: Subject(
            "job.toml", lambda _, job=job: (ROOT / "jobs" / job).read_bytes(), look_at_job, toml_values, toml_bytes
        )  # type: ignore[misc]
        for name, job in (("job", "lora_nf4.toml"), ("reference", "quickstart.toml"))
    },
    "override": Subject("set", lambda _: b"train.learning_rate=1e-3", look_at_override),
    "plan": Subject("plan.toml", make_plan_file, look_at_plan, toml_values, toml_bytes),
    "profile": Subject("profile.toml", make_profile_file, look_at_profile, toml_values, toml_bytes),
    "checkpoint": Subject("step-00000003.h5", make_checkpoint, look_at_checkpoint),
    "safetensors": Subject(
        "model.safetensors", lambda _: make_safetensors(HEADER), look_at_model, safetensors_values, make_safetensors
    ),
    "records": Subject(
        "records.jsonl",
        lambda _: json_lines(RECORDS),
        lambda path: read_records([str(path)]),
        lambda content: [json.loads(line) for line in content.splitlines()],
        json_lines,
    ),
    "text": Subject(
        "corpus.txt",
        lambda _: "Straße, naïve, 日本\n".encode() * 5,
        lambda path: list(Corpus([str(path)], "line").blocks()),
    ),
}


def broken_bytes(data: st.DataObject, content: bytes) -> bytes:
    """``content`` after one to four accidents."""
    found = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        begin = data.draw(st.integers(0, max(0, len(found) - 1)))
        end = min(len(found), begin + data.draw(st.integers(1, 64)))
        match data.draw(st.sampled_from(["flip", "cut", "drop", "repeat", "overwrite", "insert", "nest", "zero"])):
            case "flip" if found:
                found[begin] ^= 1 << data.draw(st.integers(0, 7))
            case "cut":
                del found[begin:]
            case "drop":
                del found[begin:end]
            case "repeat":
                found[begin:begin] = found[begin:end] * data.draw(st.integers(1, 50))
            case "overwrite":
                found[begin:end] = data.draw(st.binary(max_size=64))
            case "insert":
                found[begin:begin] = data.draw(st.text(max_size=20)).encode("utf-8", "surrogatepass")
            case "nest":
                found[begin:begin] = data.draw(st.sampled_from([b"[", b'{"a":', b"{a=", b"a."])) * 20_000
            case _:
                found[begin:end] = bytes(end - begin)
    return bytes(found)


def broken_values(data: st.DataObject, values: Any) -> Any:
    """``values`` with one to three places changed."""
    root = {"": copy.deepcopy(values)}
    for _ in range(data.draw(st.integers(1, 3))):
        places = list(_places(root))
        holder, key = places[data.draw(st.integers(0, len(places) - 1))]
        match data.draw(st.sampled_from(["odd", "odd", "drop", "rename", "swap", "wrap", "number"])):
            case "drop" if holder is not root:
                del holder[key]
            case "rename" if isinstance(holder, dict) and holder is not root:
                holder[data.draw(st.text(max_size=12))] = holder.pop(key)
            case "swap":
                other, its = places[data.draw(st.integers(0, len(places) - 1))]
                holder[key] = copy.deepcopy(other[its])
            case "wrap":
                holder[key] = [holder[key]]
            case "number":
                holder[key] = data.draw(st.one_of(st.integers(), st.floats()))
            case _:
                holder[key] = copy.deepcopy(data.draw(st.sampled_from(ODD)))
    return root[""]


def _places(holder: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) of a tree of values."""
    for key, value in holder.items() if isinstance(holder, dict) else enumerate(holder):
        yield holder, key
        if isinstance(value, (dict, list)):
            yield from _places(value)


@contextmanager
def no_hang() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"hangs: more than {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("inputs", [NORMAL, pytest.param(LONG, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", SUBJECTS)
def test_whatever_a_file_holds_it_is_read_or_refused_in_words(kind: str, inputs: int, tmp_path: Path) -> None:
    subject = SUBJECTS[kind]
    good = subject.make(tmp_path)
    folder = tmp_path / "files"
    folder.mkdir()
    path = folder / subject.name
    counts = {"read": 0, "refused": 0}

    def look(content: bytes) -> None:
        path.write_bytes(content)
        try:
            with no_hang():
                subject.look(path)
            counts["read"] += 1
        except UserError as error:
            assert str(error).strip()
            counts["refused"] += 1
        assert list(folder.iterdir()) == [path], "something was left behind"
        assert path.read_bytes() == content, "the input was changed"

    @settings(
        max_examples=inputs,
        deadline=None,
        database=None,
        phases=[Phase.generate],  # a failing input is printed as it is: making it smaller could take for ever
        derandomize=inputs == NORMAL,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def tried(data: st.DataObject) -> None:
        if subject.values is not None and subject.text is not None and data.draw(st.booleans()):
            look(subject.text(broken_values(data, subject.values(good))))
        else:
            look(broken_bytes(data, good))

    look(good)
    assert counts == {"read": 1, "refused": 0}, "the file is good before it is broken"
    tried()
    print(f"{kind}: {sum(counts.values()):,} inputs, {counts['refused']:,} refused, {counts['read']:,} read")
    assert sum(counts.values()) > inputs * 0.9 and counts["refused"] > 0


@pytest.mark.parametrize("nest", [b"[", b'{"a":'])
def test_json_that_nests_without_end_is_refused(nest: bytes, tmp_path: Path) -> None:
    header = nest * 100_000
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    with refuses("model.damaged"):
        look_at_model(path)
    path.write_bytes(make_safetensors(HEADER))
    (tmp_path / "config.json").write_bytes(header)
    with refuses("model.json"):
        ModelFiles(tmp_path).contents()
