"""Texts that are keys of records, and keys that have other names than ours."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants

from hetero_mpi.data.dataset import Dataset
from hetero_mpi.data.record_files import OwnKeys
from hetero_mpi.data.records import read_records
from hetero_mpi.data.tokenizer import save_tokenizer, train_bpe
from hetero_mpi.job.load import load_job
from hetero_mpi.training.setup.data_setup import Material, prepare
from tests.data.test_hub_records import put
from tests.support.errors import refuses
from tests.support.jobs import SMALLEST

JOB = (
    SMALLEST
    + """\
[data]
sequence_length = 8
evaluation_fraction = 0.1
cache = false
"""
)
TEXTS = [f"Document {number} says\nab {'abc ' * number}" for number in range(6)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("texts")
    save_tokenizer(train_bpe(TEXTS, 300), directory / "tokenizer")
    for number, text in enumerate(TEXTS):
        (directory / f"{number}.txt").write_text(text)
    rows: list[dict[str, Any]] = [{"id": number, "body": text} for number, text in enumerate(TEXTS)]
    (directory / "body.jsonl").write_text("\n".join(map(json.dumps, [*rows, {"body": " "}, {"body": None}])))
    pq.write_table(pa.Table.from_pylist([*rows, {"body": None}]), directory / "body.parquet", row_group_size=2)
    (directory / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    (directory / "bad.jsonl").write_text('{"body": "a b c"}\n{"body": 3}\n{"other": "x"}\n["a"]\n{"bo')
    (directory / "job.toml").write_text(JOB)
    return directory


def prepared(folder: Path, *overrides: str) -> Material:
    return prepare(load_job(folder / "job.toml", overrides))


def tokens(material: Material) -> list[bytes]:
    assert isinstance(material.dataset, Dataset)
    return [material.dataset.tokens.tobytes(), material.dataset.targets.tobytes()]


RECORD = "data.documents=record"
BODY = "data.keys={text = 'body'}"


@pytest.mark.parametrize("packing", ["true", "false"])
@pytest.mark.parametrize(
    "keys", [["data.text=['body.jsonl']", BODY], ["data.text=['body.parquet']", BODY], ["data.text=['text.jsonl']"]]
)
def test_texts_of_records_are_learnt_as_files_are(folder: Path, keys: list[str], packing: str) -> None:
    files = prepared(folder, "data.text=['*.txt']", f"data.packing={packing}")
    assert tokens(prepared(folder, RECORD, f"data.packing={packing}", *keys)) == tokens(files)


def test_texts_of_the_hub_and_an_evaluation_of_their_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
    put(folder / "hub", "org/texts", {"data/train-00000-of-00001.parquet": (folder / "body.parquet").read_bytes()})
    found = prepared(folder, RECORD, BODY, "data.text=['hf:org/texts']", "data.evaluation=['body.jsonl']")
    assert isinstance(found.dataset, Dataset)
    learnt, looked_at = (found.dataset.tokens[own] for own in (found.dataset.train, np.sort(found.dataset.held_out)))
    np.testing.assert_array_equal(learnt, looked_at)


def test_bytes_of_texts_are_counted_and_no_text_is_cut(folder: Path) -> None:
    most = sum(len(text) for text in TEXTS[:4]) + 3
    found = prepared(folder, RECORD, "data.text=['text.jsonl']", f"data.max_bytes={most}")
    assert any(note.startswith("corpus: 4 documents") and "truncated at data.max_bytes" in note for note in found.notes)


def test_bad_records_of_texts(folder: Path) -> None:
    keys = (RECORD, BODY, "data.text=['bad.jsonl', 'body.jsonl']")
    with refuses("records.malformed", "data.text") as raised:
        prepared(folder, *keys)
    found = [(problem.kind, problem.text.split("bad.jsonl, line ")[1][0]) for problem in raised.value.problems]
    assert found == [("record.text", "2"), ("record.no_text", "3"), ("record.not_an_object", "4"), ("record.json", "5")]
    assert prepared(folder, *keys, "data.skip_bad=4").skipped_records == 4


@pytest.mark.parametrize(
    ("keys", "kind", "shown"),
    [
        (["data.text=['body.jsonl']", RECORD], "record.no_text", "'id', 'body'"),
        (["data.text=['body.parquet']", RECORD], "record.unknown_shape", "'id', 'body'"),
        (["data.text=['text.jsonl']", RECORD, BODY], "records.key_missing", "'body'"),
        (["data.text=['a'] ", BODY], "job.data.keys", 'keys = { text = "body" }'),
        (["data.text=['a']", RECORD, "data.keys={prompt = 'q'}"], "job.data.keys", "prompt"),
        (["data.records=['a']", "data.keys={text = 'q'}"], "job.data.keys", "text"),
        (["data.records=['a']", "data.keys={prompt = 'q', output = 'q'}"], "job.data.keys", "output"),
        (["data.records=['a']", "data.keys={promt = 'q'}"], "job.data.keys", "prompt"),
        (["data.text=['hf:org/texts']"], "job.data.text", 'data.documents = "record"'),
    ],
)
def test_what_is_refused(folder: Path, keys: list[str], kind: str, shown: str) -> None:
    with refuses(kind, shown):
        prepared(folder, *keys)


ROWS = [{"query": f"Grass {i}", "reply": f" green {i}", "prompt": "Answer", "completion": i} for i in range(3)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_keys_with_other_names(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text(json.dumps({"prompt": "Sky", "completion": "blue"}))
    keys = OwnKeys({"prompt": "query", "completion": "reply"})
    found = read_records([str(tmp_path / name), str(tmp_path / "b.jsonl")], keys=keys)
    assert [[one.content for one in record.messages] for record in found.records] == [
        *([row["query"], row["reply"]] for row in ROWS),
        ["Sky", "blue"],
    ]
    assert found.unread == {"prompt (original)": 3, "completion (original)": 3}
    keys.check()
    swapped = OwnKeys({"prompt": "completion", "completion": "prompt"})
    (tmp_path / "c.jsonl").write_text(json.dumps({"prompt": "an answer", "completion": "a question"}))
    (record,) = read_records([str(tmp_path / "c.jsonl")], keys=swapped).records
    assert [one.content for one in record.messages] == ["a question", "an answer"]
    (tmp_path / "d.jsonl").write_text(json.dumps({"prompt": "Sky", "completion": "low", "good": False}))
    job = tmp_path / "job.toml"
    job.write_text(JOB)
    named = load_job(
        job, ["data.records=['d.jsonl']", "data.keys={label = 'good'}", "train.preference=kto"]
    ).job.data.keys
    (record,) = read_records([str(tmp_path / "d.jsonl")], preference="labels", keys=OwnKeys(named or {})).records
    assert not record.desirable
    with refuses("records.key_missing"):
        wrong = OwnKeys({"system": "sys"})
        read_records([str(tmp_path / "b.jsonl")], keys=wrong)
        wrong.check()


def test_chats_under_other_names(folder: Path) -> None:
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for name, key in (("chat", "messages"), ("talk", "talk")):
        (folder / f"{name}.json").write_text(json.dumps([{key: said}] * 3))
    own, named = (
        tokens(
            prepared(folder, f"data.records=['{name}.json']", "data.template=plain", "data.sequence_length=24", *keys)
        )
        for name, keys in (("chat", []), ("talk", ["data.keys={messages = 'talk'}"]))
    )
    assert own == named
