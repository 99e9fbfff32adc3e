"""Data sets of the Hugging Face hub, in a cache written as the hub's package writes it; without a network."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from hetero_mpi.data.documents import matching_files
from hetero_mpi.data.records import read_records
from hetero_mpi.errors import UserError
from tests.model.test_cache import answer

COMMIT = "b2" * 20
ROWS = [{"prompt": f"Grass {number}", "completion": f"green {number}"} for number in range(6)]
CARD = """\
---
license: mit
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train-*
  - split: test
    path:
    - data/test-*
- config_name: german
  data_files: german/*.jsonl
---
# A data set
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hugging Face cache and no network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def put(home: Path, name: str, files: dict[str, str | bytes]) -> Path:
    """A data set in the cache's layout: files are links to blobs named by their hashes."""
    folder = home / f"datasets--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / COMMIT
    for place, content in files.items():
        data = content.encode() if isinstance(content, str) else content
        blob, link = folder / "blobs" / hashlib.sha256(data).hexdigest(), snapshot / place
        for path in (blob, link, folder / "refs" / "main"):
            path.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(data)
        if not link.exists():
            link.symlink_to(blob)
        (folder / "refs" / "main").write_text(COMMIT)
    return snapshot


def lines(rows: list[dict[str, Any]]) -> str:
    return "\n".join(map(json.dumps, rows))


def shards(count: int, split: str = "train", folder: str = "data/") -> dict[str, str | bytes]:
    """The rows in so many files."""
    part = len(ROWS) // count
    return {
        f"{folder}{split}-{number:05}-of-{count:05}.jsonl": lines(ROWS[number * part : (number + 1) * part])
        for number in range(count)
    }


def prompts(*patterns: str) -> list[str]:
    return [record.messages[0].content for record in read_records(patterns).records]


def test_the_card_says_which_files_a_split_has(home: Path) -> None:
    german = {"german/a.jsonl": lines([{"prompt": "Gras", "completion": "grün"}])}
    put(home, "org/some-set", {"README.md": CARD, **shards(3), **shards(1, "test"), **german, "data/notes.txt": "x"})
    assert prompts("hf:org/some-set") == prompts("hf:org/some-set:train") == [row["prompt"] for row in ROWS], "in order"
    assert prompts("hf:org/some-set/default:test") == [row["prompt"] for row in ROWS]
    assert prompts("hf:org/some-set/german") == ["Gras"]
    for text, expected in (
        ("hf:org/some-set:dev", r'not all files of the split "dev" are there; HF_HUB_OFFLINE is set'),
        (
            "hf:org/some-set/french",
            r"has no such config: default, german. Write \"hf:org/some-set/default:train\", say",
        ),
    ):
        with pytest.raises(UserError, match=expected):
            prompts(text)


def test_without_a_card_the_names_say_it(home: Path) -> None:
    put(home, "org/a", {**shards(1, "train"), **shards(1, "validation", "validation/"), "dataset_infos.json": "{}"})
    put(home, "org/b", {"all.jsonl": lines(ROWS), "README.md": "no head"})
    put(home, "org/c", {"fr/train.jsonl": lines(ROWS[:1]), "de/train.jsonl": lines(ROWS[1:])})
    assert len(prompts("hf:org/a:validation")) == len(prompts("hf:org/a")) == len(prompts("hf:org/b")) == len(ROWS)
    assert len(prompts("hf:org/c/fr")) == 1 and len(prompts("hf:org/c")) == len(ROWS)


def test_the_same_rows_as_a_file(home: Path, tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    put(home, "org/a", {"data/train-00000-of-00001.parquet": (tmp_path / "a.parquet").read_bytes()})
    (tmp_path / "a.jsonl").write_text(lines(ROWS))
    found = [[one.messages for one in read_records([text]).records] for text in ("hf:org/a", f"{tmp_path}/a.jsonl")]
    assert found[0] == found[1] and len(found[0]) == len(ROWS)
    both = matching_files("data.records", ["hf:org/a", f"{tmp_path}/a.jsonl"])
    assert [path.name for path in both] == ["a.jsonl", "train-00000-of-00001.parquet"]


def test_what_is_not_here_is_said(home: Path) -> None:
    partly = shards(3)
    put(home, "org/half", dict(list(partly.items())[:2]))
    for text, reason in (
        ("hf:org/absent", "nothing of it is there"),
        ("hf:org/half", 'not all files of the split "train"'),
    ):
        with pytest.raises(UserError) as caught:
            read_records([text], tell=print)
        said, name = str(caught.value), text[3:]
        assert said.startswith(f'data.records "{text}" is not in the Hugging Face cache {home}: {reason}')
        assert f"run `hf download {name} --repo-type dataset`, copy the directory" in said
    for text in ("hf:org", "hf:", "hf:/a/b", "hf:org/name:", "hf:org/name/config/more", "hf:org/na me"):
        with pytest.raises(UserError, match=r'is written "hf:org/name", "hf:org/name:split" or'):
            read_records([text])


class Hub:
    """The hub's answers: a repository whose files are put into the cache as they are asked for."""

    def __init__(self, home: Path, files: dict[str, str | bytes], error: Exception | None = None) -> None:
        self.home, self.files, self.error = home, files, error
        self.asked: list[str] = []

    def snapshot_download(
        self, name: str, repo_type: str, allow_patterns: list[str], local_files_only: bool = False
    ) -> str:
        assert repo_type == "dataset"
        if local_files_only:
            raise FileNotFoundError("not here")
        if self.error is not None:
            raise self.error
        wanted = list(huggingface_hub.utils.filter_repo_objects(list(self.files), allow_patterns=allow_patterns))
        self.asked += wanted
        return str(put(self.home, name, {file: self.files[file] for file in wanted}))

    def HfApi(self) -> Hub:
        return self

    def list_repo_files(self, name: str, repo_type: str) -> list[str]:
        return list(self.files)


@pytest.mark.parametrize(
    ("files", "text", "asked"),
    [
        ({"README.md": CARD, **shards(2), **shards(1, "test"), "a.bin": "x"}, "hf:org/x", ["README.md", *shards(2)]),
        ({"README.md": CARD, **shards(1), "train.csv": "x"}, "hf:org/x", ["README.md", *shards(1)]),
    ],
)
def test_only_the_split_is_fetched(
    home: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str | bytes], text: str, asked: list[str]
) -> None:
    hub, told = Hub(home, files), list[str]()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    monkeypatch.setattr(huggingface_hub, "HfApi", hub.HfApi)
    assert len(read_records([text], tell=told.append).records) == len(ROWS)
    assert hub.asked == asked and told == [f"fetching {text} from {constants.ENDPOINT} into {home}"]
    with pytest.raises(UserError, match="so nothing is fetched"):
        read_records([text])
    with pytest.raises(
        UserError, match=r'files of the split "dev" in a format that is read here; it has the splits "train"'
    ):
        read_records([f"{text}:dev"], tell=told.append)


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (
            answer(errors.GatedRepoError),
            r"gated data set.*accept its terms at \S+/datasets/org/x, then run `hf auth login`",
        ),
        (answer(errors.RepositoryNotFoundError), "has no data set org/x, or it is private: correct data.records"),
        (OSError("no route to host\nmore"), r"could not be fetched from https://\S+ \(no route to host\)"),
    ],
    ids=["gated", "unknown", "no-network"],
)
def test_what_the_hub_answers_becomes_advice(
    home: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, advice: str
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Hub(home, {}, error).snapshot_download)
    with pytest.raises(UserError, match=advice) as raised:
        read_records(["hf:org/x"], tell=print)
    assert "hf download org/x --repo-type dataset" in str(raised.value)
