"""What a rank keeps of a model it has not got, how two models are told apart, and models by their name on the hub."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants, errors
from safetensors.torch import load_file, save_file

from hetero_mpi.data import source_files
from hetero_mpi.model.files import hub
from hetero_mpi.model.files.model_files import DirectoryContents, ModelFiles
from hetero_mpi.state.file_supply import ShardCache
from tests.support.errors import refuses

TENSORS = {
    "model.embed_tokens.weight": torch.arange(40_000, dtype=torch.float32).reshape(200, 200),
    "model.norm.weight": torch.arange(5).to(torch.bfloat16),
    "model.eight": torch.tensor([0.5, 2.0]).to(torch.float8_e4m3fn),
    "model.scalar": torch.tensor(7, dtype=torch.int64),
    "model.empty": torch.empty(0, 3),
}
CONFIG = {"model_type": "llama", "hidden_size": 200, "transformers_version": "5.20.0", "rope_scaling": None}


def write(directory: Path, config: dict[str, object] = CONFIG, **changed: torch.Tensor) -> DirectoryContents:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    tensors = {**TENSORS, **{name.replace("_", "."): tensor for name, tensor in changed.items()}}
    save_file(tensors, directory / "model.safetensors")
    return ModelFiles(directory).contents()


@pytest.fixture
def contents(tmp_path: Path) -> DirectoryContents:
    return write(tmp_path / "llama")


def test_contents_travel_as_json(contents: DirectoryContents) -> None:
    again = DirectoryContents.from_dict(json.loads(json.dumps(contents.to_dict())))
    assert again.identity == contents.identity and list(again.tensors) == list(contents.tensors)
    assert {name: tensor.bytes for name, tensor in again.tensors.items()} == {n: t.nbytes for n, t in TENSORS.items()}


def test_a_copy_in_other_files_is_the_same_model(contents: DirectoryContents, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "config.json").write_text(json.dumps({**CONFIG, "transformers_version": "5.23.0"}))
    names = list(TENSORS)
    parts = {"b.safetensors": names[:2], "a.safetensors": names[2:]}
    for file, own in parts.items():
        save_file({name: TENSORS[name] for name in own}, copy / file)
    index = {"weight_map": {name: file for file, own in parts.items() for name in own}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    assert contents.difference(ModelFiles(copy).contents()) is None


def test_another_model_is_told_apart_by_name(contents: DirectoryContents, tmp_path: Path) -> None:
    rows = TENSORS["model.embed_tokens.weight"].clone()
    rows[-1, -1] += 1  # new tokens are the last rows
    without = {key: value for key, value in CONFIG.items() if key != "rope_scaling"}
    others = {
        "hidden_size": write(tmp_path / "1", {**CONFIG, "hidden_size": 64}),
        "rope_scaling": write(tmp_path / "2", without),
        "model.more": write(tmp_path / "3", model_more=torch.ones(2)),
        "model.scalar": write(tmp_path / "4", model_scalar=torch.tensor(7).int()),
        "model.norm.weight": write(tmp_path / "5", model_norm_weight=TENSORS["model.norm.weight"] + 1),
    }
    save_file({**TENSORS, "model.embed_tokens.weight": rows}, tmp_path / "llama" / "model.safetensors")
    others["model.embed_tokens.weight"] = ModelFiles(tmp_path / "llama").contents()
    for name, other in others.items():
        assert name in (contents.difference(other) or "")


def test_an_entry_comes_back_to_the_bit(contents: DirectoryContents, tmp_path: Path) -> None:
    cache = ShardCache(tmp_path / "cache", contents.identity)
    assert not cache.holds(3, contents.tensors)
    cache.prepare(1000)
    cache.add(3, TENSORS)
    (entry,) = cache.directory.glob("layer-00003/*.safetensors")
    assert load_file(entry).keys() == TENSORS.keys()  # an ordinary safetensors file
    again = ShardCache(tmp_path / "cache", contents.identity)
    assert again.holds(3, contents.tensors) and not again.holds(2, contents.tensors) and again.remarks == []
    for name, tensor in again.read(3, list(TENSORS)).items():
        assert (tensor.dtype, tensor.shape) == (TENSORS[name].dtype, TENSORS[name].shape)
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), TENSORS[name].reshape(-1).view(torch.uint8)), name


def test_an_entry_of_another_layer_or_model_or_of_other_tensors_is_removed(
    contents: DirectoryContents, tmp_path: Path
) -> None:
    cache = ShardCache(tmp_path / "cache", contents.identity)
    cache.add(3, {"model.norm.weight": TENSORS["model.norm.weight"]})
    cache.add(4, TENSORS)
    (cache.directory / "layer-00004").rename(cache.directory / "layer-00005")
    ShardCache(tmp_path / "cache", contents.identity[:16] + "another").add(6, TENSORS)
    for layer in (3, 5, 6):
        assert not cache.holds(layer, contents.tensors)
    assert len(cache.remarks) == 3 and list(cache.directory.iterdir()) == []


def test_a_cache_that_cannot_be_used_is_a_clear_error(contents: DirectoryContents, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with refuses("file.unwritable", tmp_path / "file", "shard_cache"):
        ShardCache(tmp_path / "file", contents.identity)
    cache = ShardCache(tmp_path / "cache", contents.identity)
    with refuses("shard_cache.full"):
        cache.prepare(10**18)
    shutil.rmtree(cache.directory)
    cache.directory.write_text("")
    for refused in (lambda: cache.prepare(1), lambda: cache.add(1, TENSORS)):
        with refuses("file.unwritable", "shard_cache"):
            refused()


def put(home: Path, name: str) -> Path:
    """A model in the cache's layout."""
    folder = home / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / ("a1" * 20)
    snapshot.parent.mkdir(parents=True)
    write(snapshot)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(snapshot.name)
    return snapshot


def test_a_model_in_the_cache_is_found_without_a_network(home: Path, tmp_path: Path) -> None:
    snapshot = put(home, "org/some-model_1.5B")
    told: list[str] = []
    found = hub.obtain("org/some-model_1.5B", tmp_path / "org" / "some-model_1.5B", True, told.append)
    assert found.samefile(snapshot) and told == []
    assert hub.cached("org/other") is None


def test_where_was_looked_is_said(home: Path, tmp_path: Path) -> None:
    for download, rule in ((True, "HF_HUB_OFFLINE"), (False, "[model] download = false")):
        with refuses("model.missing", 'path = "org/absent"', tmp_path / "org/absent", home, rule, "`hf download"):
            hub.obtain("org/absent", tmp_path / "org" / "absent", download, print)
    (put(home, "org/half") / "model.safetensors").unlink()
    with refuses("model.missing"):
        hub.obtain("org/half", tmp_path / "org" / "half", True, print)


@pytest.fixture
def online(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A hub that takes connections, and answers nothing. Its queue has one place: a second connection waits, as behind a firewall
    that drops packets."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listening:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{listening.getsockname()[1]}")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield listening


def test_a_hub_behind_a_firewall_that_drops_packets_is_given_up(
    online: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_files, "SILENT_S", 0.3)
    monkeypatch.setattr(source_files, "SILENT_AT_MOST_S", 0.6)
    told: list[str] = []
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(online.getsockname())
        with refuses("model.missing", "127.0.0.1", "1 s"):
            hub.obtain("org/x", tmp_path / "org" / "x", True, told.append)
    assert "127.0.0.1" in told[1]


def answer(kind: type[errors.HfHubHTTPError]) -> errors.HfHubHTTPError:
    """What huggingface_hub raises when the server refuses."""
    error = kind.__new__(kind)
    Exception.__init__(error, "403 Client Error.\n\nAccess is restricted.")
    return error


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (answer(errors.GatedRepoError), "huggingface-cli login"),
        (answer(errors.RepositoryNotFoundError), "huggingface-cli login"),
        (OSError("no route to host\nmore"), "(no route to host)"),
        (ConnectionError(), "(ConnectionError)"),
    ],
    ids=["gated", "unknown", "no-network", "silent"],
)
def test_what_the_hub_answers_becomes_advice(
    online: socket.socket, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, shown: str
) -> None:
    def refuse(name: str, local_files_only: bool = False, **arguments: object) -> str:
        raise FileNotFoundError("not here") if local_files_only else error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    told: list[str] = []
    with refuses("model.missing", shown, "hf download org/x"):
        hub.obtain("org/x", tmp_path / "org" / "x", True, told.append)
    assert "org/x" in told[0]


def test_only_configuration_tokenizer_weights_and_the_card_are_asked_for(
    online: socket.socket, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.json", "README.md",
             "pytorch_model.bin", "modeling_llama.py", "original/consolidated.00.pth", "onnx/model.safetensors",
             "consolidated.safetensors", "model.gguf"]  # fmt: skip
    asked: list[str] = []

    def download(name: str, local_files_only: bool = False, **patterns: list[str]) -> str:
        if local_files_only:
            raise FileNotFoundError("not here")
        allow, ignore = patterns["allow_patterns"], patterns["ignore_patterns"]
        asked.extend(huggingface_hub.utils.filter_repo_objects(files, allow_patterns=allow, ignore_patterns=ignore))
        return str(put(home, name))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert hub.obtain("org/x", tmp_path / "org" / "x", True, print).is_dir()
    assert asked == files[:5]


def test_a_path_is_not_taken_for_a_name(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    assert hub.is_hub_id("meta-llama/Llama-3.1-8B", tmp_path / "meta-llama" / "Llama-3.1-8B")
    assert not hub.is_hub_id("models/lama", tmp_path / "models" / "lama")  # a mistyped directory beside others
    for text in ("llama", "/a/b", "../x", "./x/y", "a/b/c", "~/llama", "a b/c", "org/"):
        assert not hub.is_hub_id(text, tmp_path / "absent" / "x"), text
