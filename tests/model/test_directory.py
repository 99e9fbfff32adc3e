"""The exported directory is what transformers' own ``save_pretrained`` would have written, and loads bit for bit."""

from __future__ import annotations

import contextlib
import json
import re
import resource
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hetero_mpi.model.files.model_directory import LayersWriter, ModelDirectoryWriter
from hetero_mpi.model.files.model_files import WEIGHTS
from tests.support.errors import refuses

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "qwen3": {**GROUPED, "head_dim": 8},
    "gemma2": {**GROUPED, "head_dim": 8},
    "gpt_neox": SMALL,
    "phi3": GROUPED,
    "mixtral": {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
}


def build(
    family: str, *, tied: bool = False, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    config = AutoConfig.for_model(family, **FAMILIES[family], tie_word_embeddings=tied)
    torch.manual_seed(1)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def layers(model: PreTrainedModel) -> list[dict[str, torch.Tensor]]:
    """The state dict in pieces: what comes before the blocks, each block, the rest."""
    pieces: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    for name, tensor in model.state_dict().items():
        block = re.search(r"\.layers\.(\d+)\.", name)
        pieces[block[1] if block else "embedding" if "embed" in name else "head"][name] = tensor
    return [pieces[key] for key in sorted(pieces)]


def export(model: PreTrainedModel, directory: Path, shard_bytes: int, skeleton: PreTrainedModel | None = None) -> Path:
    with ModelDirectoryWriter(skeleton or model, directory, shard_bytes) as writer:
        for state in layers(model):
            writer.add(state)
    return directory


def names_in(directory: Path) -> set[str]:
    found: set[str] = set()
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            found |= set(file.keys())
    return found


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_loads_bitwise_and_names_equal_save_pretrained(family: str, tied: bool, tmp_path: Path) -> None:
    model = build(family, tied=tied)
    export(model, tmp_path / "ours", 20_000, skeleton=build(family, tied=tied, device="meta"))
    model.save_pretrained(tmp_path / "theirs")
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)

    assert not any(info.values()), info
    assert names_in(tmp_path / "ours") == names_in(tmp_path / "theirs")
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    tokens = torch.arange(20).reshape(2, 10)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(tokens).logits, model(tokens).logits)
    ours, theirs = (json.loads((tmp_path / who / "config.json").read_text()) for who in ("ours", "theirs"))
    theirs.pop("use_cache", None)  # a family's own default: it keeps keys and values
    assert ours == theirs
    assert (tmp_path / "ours/generation_config.json").is_file()


def test_a_loaded_model_goes_back_to_the_names_it_came_from(tmp_path: Path) -> None:
    """A model that transformers loaded remembers its conversions; fused experts are split again."""
    first = export(build("mixtral"), tmp_path / "first", 10**9)
    again = export(AutoModelForCausalLM.from_pretrained(first), tmp_path / "again", 10**9)
    assert any(name.endswith("block_sparse_moe.experts.3.w2.weight") for name in names_in(first))
    assert (again / "model.safetensors").read_bytes() == (first / "model.safetensors").read_bytes()


def test_shards_are_bounded_and_indexed(tmp_path: Path) -> None:
    model = build("llama")
    export(model, tmp_path / "model", shard_bytes=30_000)
    index = json.loads((tmp_path / "model/model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "model").glob("*.safetensors"))
    count = len(files)
    assert count > 1
    assert files == [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    assert sorted(set(index["weight_map"].values())) == files
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in model.state_dict().values())
    for file in files:
        with safe_open(tmp_path / "model" / file, "pt") as opened:
            sizes = [opened.get_tensor(name).nbytes for name in opened.keys()]  # noqa: SIM118 (not a dict)
        assert sum(sizes) <= 30_000 or len(sizes) == 1


def test_the_dtype_of_the_tensors_is_recorded(tmp_path: Path) -> None:
    skeleton = build("llama", device="meta")
    export(build("llama", dtype=torch.bfloat16), tmp_path / "model", 10**9, skeleton=skeleton)
    assert (tmp_path / "model/model.safetensors").is_file()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").dtype == torch.bfloat16
    assert skeleton.config.dtype == torch.float32, "the caller's configuration is left alone"


def test_tensors_may_change_after_add(tmp_path: Path) -> None:
    """Rank 0 gathers into one reused buffer."""
    model, wanted = build("llama"), build("llama")
    with ModelDirectoryWriter(model, tmp_path / "model", 10**9) as writer:
        for state in layers(model):
            writer.add(state)
            for tensor in state.values():
                tensor.zero_()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in wanted.state_dict().items())


def test_replaces_a_former_result_and_keeps_other_files(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    export(build("llama"), directory, shard_bytes=30_000)
    (directory / "notes.md").write_text("mine")
    for stale in ("model.gguf", "chat_template.jinja"):
        (directory / stale).write_text("of the former weights, and the former tokenizer")
    with ModelDirectoryWriter(build("qwen3"), directory, 10**9) as writer:
        (writer.path / "tokenizer.json").write_text("{}")
        for state in layers(build("qwen3")):
            writer.add(state)
    assert AutoModelForCausalLM.from_pretrained(directory).config.model_type == "qwen3"
    kept = ["config.json", "generation_config.json", "model.safetensors", "notes.md", "tokenizer.json"]
    assert sorted(path.name for path in directory.iterdir()) == kept
    assert [path.name for path in tmp_path.iterdir()] == ["model"], "nothing temporary is left"


def test_a_failed_export_leaves_the_former_result(tmp_path: Path) -> None:
    directory = export(build("llama"), tmp_path / "model", 10**9)
    before = (directory / "model.safetensors").read_bytes()
    with (
        pytest.raises(RuntimeError, match="gathering failed"),
        ModelDirectoryWriter(build("llama"), directory, 1) as writer,
    ):
        writer.add(layers(build("llama"))[0])
        raise RuntimeError("gathering failed")
    assert (directory / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    directory.rename(
        tmp_path / ".model.former"
    )  # between the two renames of a replacement it waits under a hidden name
    ModelDirectoryWriter(build("llama"), directory, 10**9).discard()
    assert (directory / "model.safetensors").read_bytes() == before
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "precious.txt").write_text("mine")
    with refuses("directory.not_replaceable", tmp_path / "precious"):
        ModelDirectoryWriter(build("llama", device="meta"), tmp_path / "precious", 10**9)


def test_missing_and_repeated_tensors_are_noticed(tmp_path: Path) -> None:
    model = build("llama")
    pieces = layers(model)
    writer = ModelDirectoryWriter(model, tmp_path / "model", 10**9)
    writer.add(pieces[0])
    with pytest.raises(AssertionError, match=r"repeated.*model\.layers\.0\."):
        writer.add(pieces[0])
    with pytest.raises(AssertionError, match=r"never added.*lm_head\.weight"), writer:
        pass
    writer.discard()
    assert list(tmp_path.iterdir()) == []


@contextlib.contextmanager
def files_of_at_most(count: int) -> Iterator[None]:
    """As if the disk were full behind so many bytes: Python ignores the signal, and writing fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_a_plain_error_and_leaves_nothing(tmp_path: Path) -> None:
    with files_of_at_most(20_000), refuses("directory.unwritable", tmp_path / "model"):
        export(build("llama"), tmp_path / "model", 10**9)
    assert list(tmp_path.iterdir()) == []


def test_layers_of_a_model_of_ones_own_become_one_file(tmp_path: Path) -> None:
    state = {f"{layer}.weight": torch.randn(3, 4) + layer for layer in range(3)}
    buffers = {"1.counter": torch.tensor(7), "1.wave": torch.ones(2, dtype=torch.complex64)}

    def write(values: dict[str, torch.Tensor]) -> None:
        with LayersWriter(tmp_path, [dict, lambda: buffers], dict.fromkeys(state, (3, 4))) as writer:
            for name, value in values.items():
                writer.add({name: value})

    write(state)
    found = load_file(tmp_path / WEIGHTS)
    assert found.keys() == {*state, *buffers} and [path.name for path in tmp_path.iterdir()] == [WEIGHTS]
    assert all(torch.equal(found[name], tensor) for name, tensor in (state | buffers).items())
    with pytest.raises(AssertionError, match=r"never added: \['2.weight'\]"):
        write({name: torch.zeros(3, 4) for name in list(state)[:2]})
    with files_of_at_most(100), refuses("directory.unwritable", WEIGHTS):
        write(state)
    assert [path.name for path in tmp_path.iterdir()] == [WEIGHTS]
    assert torch.equal(load_file(tmp_path / WEIGHTS)["2.weight"], state["2.weight"]), "the former file is whole"
