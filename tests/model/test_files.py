"""A model directory: tensors are found by headers alone, and every way in which a download goes wrong is named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hetero_mpi.model.files.model_files import ModelFiles
from tests.support.errors import refuses

TENSORS = {
    "model.embed_tokens.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "model.norm.weight": torch.arange(5).to(torch.bfloat16),
    "model.scalar": torch.tensor(7, dtype=torch.int64),
    "model.eight": torch.tensor([0.5, 2.0]).to(torch.float8_e4m3fn),
    "model.mask": torch.tensor([True, False]),
    "model.empty": torch.empty(0, 3),
}
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def config(directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text('{"model_type": "llama"}')
    return directory


@pytest.fixture
def single(tmp_path: Path) -> Path:
    save_file(TENSORS, config(tmp_path / "llama-tiny") / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "llama-tiny"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    directory = config(tmp_path / "sharded")
    names = list(TENSORS)
    save_file({name: TENSORS[name] for name in names[:2]}, directory / FIRST)
    save_file({name: TENSORS[name] for name in names[2:]}, directory / SECOND)
    weight_map = {name: FIRST if index < 2 else SECOND for index, name in enumerate(names)}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_reads_every_tensor_to_the_bit(layout: str, request: pytest.FixtureRequest) -> None:
    files = ModelFiles(request.getfixturevalue(layout))
    files.check()
    assert files.config == {"model_type": "llama"}
    assert set(files.names) == set(TENSORS)
    for name, tensor in TENSORS.items():
        stored, read = files.names[name], files.read(name)
        assert stored.shape == tuple(tensor.shape)
        assert f"torch.{stored.dtype}" == str(tensor.dtype) == str(read.dtype)
        assert torch.equal(read.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


def test_names_need_no_torch(single: Path) -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "import importlib.util\n"
        "spec = importlib.util.spec_from_file_location('files', sys.argv[2])\n"
        "module = sys.modules['files'] = importlib.util.module_from_spec(spec); spec.loader.exec_module(module)\n"
        "files = module.ModelFiles(sys.argv[1]); files.check(); print(len(files.names))"
    )
    source = Path(__file__).parents[2] / "hetero_mpi" / "model" / "files" / "model_files.py"
    command = [sys.executable, "-c", program, str(single), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) == len(TENSORS)


@pytest.mark.parametrize("lost", [1, 30, "header", "all"])
def test_truncated_file(single: Path, lost: int | str) -> None:
    path = single / "model.safetensors"
    whole = path.stat().st_size
    left = {"header": 60, "all": 0}.get(str(lost)) if isinstance(lost, str) else whole - lost
    assert left is not None
    with open(path, "r+b") as file:
        file.truncate(left)
    with refuses("model.damaged"):
        ModelFiles(single).check()


def test_too_long_corrupt_and_foreign_files(single: Path) -> None:
    path = single / "model.safetensors"
    whole = path.read_bytes()
    for content in (
        whole + b"\0",
        whole[:8] + b"\xff" + whole[9:],
        whole.replace(b'"BF16"', b'"BX16"'),
        whole.replace(b"[3,4]", b"[3,5]"),
        (2).to_bytes(8, "little") + b"[]",
        b"<!DOCTYPE html><html>Access to this model is restricted</html>",
    ):
        assert content != whole
        path.write_bytes(content)
        with refuses("model.damaged", path):
            ModelFiles(single).check()
    path.write_bytes(whole.replace(b'"BF16"', b'"F16" ').replace(b'"F32"', b'"U32"'))
    with refuses("model.dtype", path):
        ModelFiles(single).check()


def test_missing_shard_tensor_and_index_entry(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.extra"] = FIRST
    index.write_text(json.dumps(content))
    with refuses("model.files_missing"):
        ModelFiles(sharded).check()
    (sharded / SECOND).unlink()
    with refuses("model.files_missing"):
        ModelFiles(sharded).check()
    for odd in (
        "../elsewhere.safetensors",
        "..",
        "",
        "a\0.safetensors",
        "\ud800.safetensors",
        "a" * 300,
        5,
        None,
        ["a"],
    ):
        content["weight_map"]["model.extra"] = odd
        index.write_text(json.dumps(content))
        with refuses("model.index") as refused:
            ModelFiles(sharded).check()
        str(refused.value).encode()  # it can be printed
    index.write_text("{")
    with refuses("model.json"):
        ModelFiles(sharded).check()


def test_no_weights(tmp_path: Path) -> None:
    directory = config(tmp_path / "empty")
    with refuses("model.no_weights", directory):
        ModelFiles(directory).check()
    (directory / "pytorch_model.bin").write_bytes(b"\x80\x02")
    with refuses("model.no_weights", "save_pretrained(NEW)"):
        ModelFiles(directory).check()


def test_missing_directory_and_config(single: Path) -> None:
    with refuses("model.missing", "lama-tiny", single):
        ModelFiles(single.parent / "lama-tiny")
    with refuses("model.missing"):
        ModelFiles(single / "config.json")
    (single / "config.json").rename(single / "confg.json")
    with refuses("model.file_missing", "config.json", "confg.json"):
        ModelFiles(single)


def test_a_file_that_shrinks_while_in_use(single: Path) -> None:
    files = ModelFiles(single)
    name, last = next(reversed(files.names.items()))
    with open(last.file, "r+b") as file:
        file.truncate(last.file.stat().st_size - 1)
    with refuses("model.unreadable"):
        files.read(name)
    last.file.unlink()
    with refuses("model.unreadable"):
        files.read(name)
