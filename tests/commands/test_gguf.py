"""``export --gguf``: a stand-in with the command line of llama.cpp's converters keeps what those and llama.cpp would take."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from hetero_mpi.interop.gguf import announce_gguf, write_gguf
from tests.support import training_cases
from tests.support.errors import refuses
from tests.support.training_cases import Case

CONVERTER = """
import argparse, json
from pathlib import Path
from safetensors.numpy import load_file
parser = argparse.ArgumentParser()
parser.add_argument("directory")
for name in ("--outfile", "--outtype", "--base", "--base-model-id"):
    parser.add_argument(name)
given = parser.parse_args()
found = vars(given) | {"name": Path(given.directory).name, "factors": {}}
adapter = Path(given.directory) / "adapter_config.json"
if adapter.exists():
    alpha = json.loads(adapter.read_text())["lora_alpha"]
    for name, tensor in load_file(adapter.with_name("adapter_model.safetensors")).items():
        assert ".lora_A." in name or ".lora_B." in name, "Not a lora_A or lora_B tensor"
        if ".lora_B." in name:
            found["factors"][name.split(".")[-3]] = alpha / tensor.shape[1]
else:
    assert json.loads((Path(given.directory) / "config.json").read_text()), "not a model"
Path(given.outfile).write_text(json.dumps(found))
"""
"""Of an adapter's configuration llama.cpp's script reads ``lora_alpha`` alone, and llama.cpp divides it by each B's columns."""
AGAIN = "python -m hetero_mpi export run 'my model' --gguf"
BASE = Case("base", "llama", False, 0.0, True, 2, "even")


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No converter anywhere but in ``llama``, once it is there."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("LLAMA_CPP", str(tmp_path / "llama"))
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    return tmp_path


def converters(places: Path) -> None:
    (places / "llama").mkdir()
    for name in ("hf", "lora"):
        (places / "llama" / f"convert_{name}_to_gguf.py").write_text(CONVERTER)


def model(path: Path, keys: dict[str, Any]) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(keys))
    return path


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("base")
    found = training_cases.model_directory(root, BASE)
    for path in training_cases.tokenizer_directory(root, training_cases.corpus(root)).iterdir():
        shutil.copy(path, found)
    (found / "generation_config.json").write_text('{"temperature": 0.7, "do_sample": true}')
    return found


def adapter(base: Path, target: Path, **keys: Any) -> dict[str, float]:
    """An adapter by peft in ``target``; returns the factor of each kind of layer."""
    whole = AutoModelForCausalLM.from_pretrained(base)
    made = get_peft_model(
        whole, LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "up_proj"], **keys})
    )
    made.save_pretrained(target)
    config = json.loads((target / "adapter_config.json").read_text())
    (target / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": str(base)}))
    return {n.rpartition(".")[2]: m.scaling["default"] for n, m in made.named_modules() if isinstance(m, LoraLayer)}


def test_without_llama_cpp_there_is_a_modelfile_and_two_commands(base: Path, places: Path) -> None:
    for name, first in (("my model", "FROM ."), ("my adapter", f"FROM {base}\nADAPTER ./my adapter.gguf")):
        if name == "my model":
            model(places / name, {"model_type": "llama"})
        else:
            adapter(base, places / name, use_rslora=True)
        with refuses("gguf.unsupported") as caught:
            write_gguf(places / name, "q8_0", AGAIN)
        commands = str(caught.value).splitlines()[1:]
        assert commands == ["  git clone https://github.com/ggml-org/llama.cpp", f"  LLAMA_CPP=llama.cpp {AGAIN}"]
        assert (places / name / "Modelfile").read_text().startswith(first + "\n")


def test_missing_programs_are_named_before_the_export(places: Path) -> None:
    mine = model(places / "my model", {"model_type": "llama"})
    for kind, is_adapter in (("q4_k_m", False), ("f16", True)):
        (line,) = announce_gguf(mine, kind, is_adapter)
        assert str(mine) in line and "ollama" not in line, "the last message has the commands"
    with refuses("gguf.adapter_type", "q6_k", "q8_0"):
        announce_gguf(mine, "q6_k", True)
    converters(places)
    assert announce_gguf(mine, "q8_0", False) == announce_gguf(mine, "bf16", True) == []
    command = f"llama-quantize '{mine}/my model.gguf' '{mine}/my model-Q6_K.gguf' Q6_K"
    assert command in announce_gguf(mine, "q6_k", False)[0]
    (mine / "my model-Q6_K.gguf").write_text("of an earlier export")
    assert command in write_gguf(mine, "q6_k", AGAIN)
    assert json.loads((mine / "my model.gguf").read_text())["outtype"] == "auto"
    assert not (mine / "my model-Q6_K.gguf").exists() and "FROM ./my model.gguf" in (mine / "Modelfile").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("width", "is_wider"), [(256, False), (96, True)])
def test_llama_cpp_quantises_a_model(width: int, is_wider: bool, tmp_path: Path) -> None:
    """transformers reads the file with nearly the weights of the model; rows of 96 are no multiple of K-quants' 256."""
    folder = Path(os.environ.get("LLAMA_CPP", Path.home() / "llama.cpp"))
    if not (folder / "models/ggml-vocab-gpt-2.gguf").exists() or not (folder / "build/bin/llama-quantize").exists():
        pytest.skip("needs llama.cpp in $LLAMA_CPP or ~/llama.cpp, with llama-quantize in its build/bin")
    pytest.importorskip("gguf", reason="needs the packages of llama.cpp's converter")
    AutoTokenizer.from_pretrained(folder / "models", gguf_file="ggml-vocab-gpt-2.gguf").save_pretrained(
        tmp_path / "out"
    )
    sizes = {"hidden_size": width, "intermediate_size": width, "num_hidden_layers": 1, "num_attention_heads": 4}
    before = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=50257, **sizes))
    before.save_pretrained(tmp_path / "out")
    assert ("wider type" in write_gguf(tmp_path / "out", "q4_k_m", AGAIN)) == is_wider
    assert [path.name for path in (tmp_path / "out").glob("*.gguf")] == ["out-Q4_K_M.gguf"]
    assert "FROM ./out-Q4_K_M.gguf" in (tmp_path / "out/Modelfile").read_text()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "out", gguf_file="out-Q4_K_M.gguf").state_dict()
    for name, weight in before.state_dict().items():
        error = (after[name] - weight).norm() / weight.norm()
        assert error < 0.1 and (error > 1e-4) == (weight.dim() > 1), name


def test_a_model(places: Path) -> None:
    converters(places)
    whole = model(places / "model", {"model_type": "llama"})
    assert "ollama create model -f" in write_gguf(whole, "auto", AGAIN)
    asked = json.loads((whole / "model.gguf").read_text())
    assert asked["outtype"] == "auto" and asked["base"] is None
    assert (whole / "Modelfile").read_text() == "FROM ./model.gguf\n"


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"use_rslora": True, "r": 3, "lora_alpha": 5},
        {"lora_alpha": 5, "rank_pattern": {"up_proj": 13}},
        {"alpha_pattern": {"up_proj": 3, "q_proj": 3}},
        {"use_rslora": True, "rank_pattern": {"up_proj": 16}, "alpha_pattern": {"up_proj": 4}},
    ],
)
def test_the_factors_of_an_adapter_are_peft_own(keys: dict[str, Any], base: Path, places: Path) -> None:
    converters(places)
    factors = adapter(base, places / "mine", **keys)
    before = (places / "mine" / "adapter_config.json").read_bytes()
    write_gguf(places / "mine", "f16", AGAIN)
    asked = json.loads((places / "mine" / "mine.gguf").read_text())
    assert asked["factors"].keys() == factors.keys() == {"q_proj", "up_proj"}
    assert all(math.isclose(asked["factors"][name], factor, rel_tol=1e-11) for name, factor in factors.items())
    assert (asked["base"], asked["outtype"], asked["name"]) == (str(base), "f16", "mine")
    assert (places / "mine" / "adapter_config.json").read_bytes() == before
    lines = (places / "mine" / "Modelfile").read_text().splitlines()
    assert lines[:2] == [f"FROM {base}", "ADAPTER ./mine.gguf"]
    assert {'PARAMETER stop "<|end|>"', "PARAMETER temperature 0.7"} <= set(lines)  # both are the base's


@pytest.mark.parametrize(
    ("keys", "shown"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"alpha_pattern": {"up_proj": 3}}, "alpha_pattern"),
        ({"use_rslora": True, "rank_pattern": {"up_proj": 2}}, "rank_pattern"),
    ],
)
def test_what_llama_cpp_cannot_compute_is_refused(keys: dict[str, Any], shown: str, base: Path, places: Path) -> None:
    converters(places)
    adapter(base, places / "mine", **keys)
    with refuses("gguf.adapter_unsupported", places / "mine", shown):
        write_gguf(places / "mine", "auto", AGAIN)
    assert not list((places / "mine").glob("*.gguf")) and not (places / "mine" / "Modelfile").exists()


def test_a_base_of_the_hub_is_left_to_the_reader(base: Path, places: Path) -> None:
    converters(places)
    adapter(base, places / "mine")
    config = json.loads((places / "mine" / "adapter_config.json").read_text())
    (places / "mine" / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "org/name"}))
    write_gguf(places / "mine", "auto", AGAIN)
    assert json.loads((places / "mine" / "mine.gguf").read_text())["base_model_id"] == "org/name"
    lines = (places / "mine" / "Modelfile").read_text().splitlines()
    assert lines[1:3] == ["FROM org/name", "ADAPTER ./mine.gguf"]


def test_a_converter_that_fails_is_quoted(places: Path) -> None:
    converters(places)
    whole = model(places / "model", {})
    (whole / "model.gguf").write_text("of an earlier export")
    with refuses("gguf.unsupported", "AssertionError: not a model\n", AGAIN):
        write_gguf(whole, "auto", AGAIN)
    assert not (whole / "model.gguf").exists()
