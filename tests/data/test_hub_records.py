"""Data sets of the Hugging Face hub, in a cache written as the hub's package writes it; and fetched from one on this machine."""

import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from hetero_mpi.data.records import read_records
from hetero_mpi.data.source_files import matching_files
from tests.model.test_cache import answer
from tests.support.errors import refuses

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
    with refuses("data.hub_missing", "dev", "HF_HUB_OFFLINE"):
        prompts("hf:org/some-set:dev")
    with refuses("data.hub_ambiguous", "default, german", "hf:org/some-set/default:train"):
        prompts("hf:org/some-set/french")


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
    for name in ("org/absent", "org/half"):
        with refuses(
            "data.hub_missing", f'data.records "hf:{name}"', home, f"`hf download {name} --repo-type dataset`"
        ):
            read_records([f"hf:{name}"], tell=print)
    for text in ("hf:org", "hf:", "hf:/a/b", "hf:org/name:", "hf:org/name/config/more", "hf:org/na me"):
        with refuses("data.hub_name"):
            read_records([text])


class Hub(http.server.BaseHTTPRequestHandler):
    """A hub on this machine with one data set, org/x: as much of its protocol as fetching asks for."""

    files: ClassVar[dict[str, str | bytes]] = {}
    asked: ClassVar[list[str]] = []
    """Files that were fetched."""

    def do_HEAD(self) -> None:
        self.do_GET(whole=False)

    def do_GET(self, whole: bool = True) -> None:
        path, headers, found = self.path.partition("?")[0], {}, None
        if path.startswith("/api/datasets/org/x/tree/"):
            found = json.dumps(
                [{"type": "file", "path": name, "size": len(of), "oid": name} for name, of in self.files.items()]
            )
        elif path.startswith("/api/datasets/org/x/"):
            names = [{"rfilename": name} for name in self.files]
            found = json.dumps({"id": "org/x", "sha": COMMIT, "siblings": names, "private": False, "tags": []})
        elif path.startswith(f"/datasets/org/x/resolve/{COMMIT}/"):
            name = path.partition(f"{COMMIT}/")[2]
            found, headers = self.files.get(name), {"ETag": f'"{name.replace("/", "-")}"', "X-Repo-Commit": COMMIT}
            self.asked.extend([name] if whole else [])
        content = (found or "").encode() if not isinstance(found, bytes) else found
        self.send_response(404 if found is None else 200)
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(content if whole else b"")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        Hub.asked.clear()
        yield Hub
        server.shutdown()


def test_only_the_split_is_fetched(home: Path, hub: type[Hub], monkeypatch: pytest.MonkeyPatch) -> None:
    hub.files = {"README.md": CARD, **shards(2), **shards(1, "test"), "a.bin": "x", "train.csv": "y"}
    told: list[str] = []
    with refuses("data.hub_missing"):
        read_records(["hf:org/x"])
    assert len(read_records(["hf:org/x"], tell=told.append).records) == len(ROWS)
    assert sorted(hub.asked) == ["README.md", *shards(2)]
    assert told == [f"downloading hf:org/x from {constants.ENDPOINT} into {home}"]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert len(prompts("hf:org/x")) == len(ROWS), "all of it is here now"


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (answer(errors.GatedRepoError), "/datasets/org/x, then run `hf auth login`"),
        (answer(errors.RepositoryNotFoundError), "org/x"),
        (OSError("no route to host\nmore"), "(no route to host)"),
    ],
    ids=["gated", "unknown", "no-network"],
)
def test_what_the_hub_answers_becomes_advice(
    hub: type[Hub], monkeypatch: pytest.MonkeyPatch, error: Exception, shown: str
) -> None:
    hub.files = {"README.md": CARD, **shards(1)}
    with refuses("data.hub_split", "dev", '"train"'):
        read_records(["hf:org/x:dev"], tell=print)
    with refuses("data.hub_missing", "org/none"):
        read_records(["hf:org/none"], tell=print)

    def refuse(name: str, local_files_only: bool = False, **arguments: object) -> str:
        raise FileNotFoundError("not here") if local_files_only else error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with refuses("data.hub_missing", shown, "hf download org/x --repo-type dataset"):
        read_records(["hf:org/x"], tell=print)
