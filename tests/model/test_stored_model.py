"""Where a model directory's config.json and tensors disagree: the tensors count, or the directory is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Mxfp4Config

from hetero_mpi.device.backend import Backend
from hetero_mpi.model.files.model_files import ModelFiles
from hetero_mpi.model.transformers.chain import TransformersChain
from hetero_mpi.model.transformers.families import read_config
from hetero_mpi.model.transformers.generation import read_generation, with_end
from hetero_mpi.model.transformers.stored_model import stored_model
from hetero_mpi.model.transformers.weights import FileStart
from hetero_mpi.model.tuning import nothing_trained
from tests.support.errors import refuses
from tests.support.family_configs import VOCABULARY, tiny_keys
from tests.support.stages import stage_of

Tensors = dict[str, torch.Tensor]
TOKENS = torch.arange(24).view(2, 12) * 7 % 300


@pytest.fixture
def directory(tmp_path: Path) -> Callable[..., Path]:
    """Makes the directory of a tiny model, of which config.json and tensors are then changed."""

    def make(
        family: str = "llama",
        labels: dict[str, Any] | None = None,
        change: Callable[[Tensors], object] = lambda tensors: None,
        **keys: Any,
    ) -> Path:
        torch.manual_seed(5)
        config = {**tiny_keys(family), **keys}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
        model.float().save_pretrained(tmp_path)
        tensors = load_file(tmp_path / "model.safetensors")
        change(tensors)
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        written = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**written, **(labels or {})}))
        return tmp_path

    return make


def own_logits(path: Path) -> torch.Tensor:
    chain = TransformersChain(read_config(stored_model(ModelFiles(path)).config))
    start = FileStart(ModelFiles(path), chain)
    stage = stage_of(chain, 0, chain.layer_count, Backend(), "fp32", start, tuning=nothing_trained())
    return stage.apply(TOKENS)


def require_equal_to_transformers(path: Path) -> None:
    with torch.no_grad():
        assert torch.equal(own_logits(path), AutoModelForCausalLM.from_pretrained(path).float()(TOKENS).logits)


def test_a_head_of_its_own_is_not_tied_whatever_config_json_says(directory: Any) -> None:
    path = directory(labels={"tie_word_embeddings": True}, tie_word_embeddings=False)
    found = stored_model(ModelFiles(path))
    assert found.config["tie_word_embeddings"] is False
    assert "lm_head.weight" in found.notes[0] and "model.embed_tokens.weight" in found.notes[0]
    require_equal_to_transformers(path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_that_is_the_embedding_stays_tied_up_to_its_last_number(directory: Any, dtype: torch.dtype) -> None:
    def copy(tensors: Tensors) -> None:
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].bfloat16().float()
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].to(dtype, copy=True)

    path = directory(tie_word_embeddings=True, change=copy)
    found = stored_model(ModelFiles(path))
    assert found.config["tie_word_embeddings"] is True and not found.notes

    def spoil(tensors: Tensors) -> None:
        copy(tensors)
        tensors["lm_head.weight"][-1, -1] += 1

    path = directory(tie_word_embeddings=True, change=spoil)
    assert stored_model(ModelFiles(path)).config["tie_word_embeddings"] is False


@pytest.mark.parametrize("label", [300, 400])
@pytest.mark.parametrize("tied", [False, True])
def test_the_vocabulary_has_the_rows_of_the_files(directory: Any, label: int, tied: bool) -> None:
    path = directory(labels={"vocab_size": label}, tie_word_embeddings=tied)
    found = stored_model(ModelFiles(path))
    assert found.config["vocab_size"] == VOCABULARY
    assert len(found.notes) == 1 and f"vocab_size {label}" in found.notes[0] and str(VOCABULARY) in found.notes[0]
    assert own_logits(path).shape == (2, 12, VOCABULARY)


def test_biases_are_there_where_the_files_have_them(directory: Any) -> None:
    def random_biases(tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            if name.endswith("bias"):
                tensor.normal_()

    path = directory(attention_bias=True, mlp_bias=True, change=random_biases)
    expected = own_logits(path)
    written = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**written, "attention_bias": False, "mlp_bias": False}))
    found = stored_model(ModelFiles(path))
    assert found.config["attention_bias"] is True and found.config["mlp_bias"] is True and len(found.notes) == 2
    assert torch.equal(own_logits(path), expected)

    path = directory(labels={"attention_bias": True}, attention_bias=False)
    (note,) = stored_model(ModelFiles(path)).notes
    assert "attention_bias = true" in note and "model.layers.0.self_attn." in note


def test_the_dtype_is_that_of_most_bytes(directory: Any) -> None:
    def narrow(tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            if tensor.ndim > 1:
                tensors[name] = tensor.bfloat16()

    path = directory(labels={"dtype": "float32"}, change=narrow)
    found = stored_model(ModelFiles(path))
    assert found.config["dtype"] == "bfloat16"
    for odd in ("word", 7, None):
        path = directory(labels={"dtype": odd}, change=narrow)
        assert stored_model(ModelFiles(path)).config["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("labels", "kind", "shown"),
    [
        ({"num_hidden_layers": 3}, "model.blocks_differ", "4 3"),
        ({"num_hidden_layers": 6}, "model.blocks_differ", "4 6"),
        ({"num_hidden_layers": 10**6}, "model.blocks_differ", "1000000"),
        ({"intermediate_size": 48}, "model.shapes_differ", "mlp.down_proj.weight (32, 64) (32, 48)"),
        ({"hidden_size": 64}, "model.shapes_differ", "(320, 32) (320, 64)"),
        ({"num_key_value_heads": 4}, "model.shapes_differ", "k_proj.weight (16, 32) (32, 32)"),
        ({"head_dim": 4}, "model.shapes_differ", ""),
        ({"model_type": "qwen3"}, "model.tensors_missing", "model.layers.0.self_attn. _norm.weight"),
        ({"num_hidden_layers": "four"}, "model.configuration", "num_hidden_layers"),
        ({"hidden_size": 33}, "model.configuration", ""),
        ({"num_attention_heads": 0}, "model.configuration", ""),
        ({"vocab_size": [1]}, "model.configuration", "vocab_size"),
    ],
)
def test_labels_that_cannot_be_right_are_refused(directory: Any, labels: dict[str, Any], kind: str, shown: str) -> None:
    with refuses(kind, *shown.split()):
        stored_model(ModelFiles(directory(labels=labels)))


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.self_attn.q_norm.weight",
        "model.layers.1.self_attn.q_proj.lora_A.default.weight",
        "model.layers.1.self_attn.q_proj.weight_scale_inv",
        "model.layers.9.mlp.up_proj.weight",
        "model.layers.1.self_attn.q_proj.bias",
        "lm_head.modules_to_save.default.weight",
    ],
)
def test_tensors_of_layers_that_nobody_reads_are_refused(directory: Any, name: str) -> None:
    path = directory(tie_word_embeddings=False, change=lambda tensors: tensors.update({name: torch.ones(32)}))
    with refuses("model.foreign_tensors" if ".9." not in name else "model.blocks_differ"):
        stored_model(ModelFiles(path))


def test_tensors_of_other_parts_are_counted_and_computed_ones_are_not(directory: Any) -> None:
    def add(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
        tensors["model.layers.0.self_attn.masked_bias"] = torch.ones(())
        tensors["model.layers.0.self_attn.bias"] = torch.ones(1, 1, 64, 64, dtype=torch.bool)

    assert stored_model(ModelFiles(directory(change=add))).notes == ()

    def add_head(tensors: Tensors) -> None:
        tensors["v_head.summary.weight"] = torch.ones(1, 32)

    assert "v_head.summary.weight" in stored_model(ModelFiles(directory(change=add_head))).notes[0]
    further = directory(
        "glm4_moe",
        change=lambda tensors: tensors.update({"model.layers.4.eh_proj.weight": torch.ones(32, 64)}),
        labels={"num_nextn_predict_layers": 1},
    )
    assert "model.layers.4.eh_proj.weight" in stored_model(ModelFiles(further)).notes[0]


@pytest.mark.parametrize(
    "values",
    [
        *({"eos_token_id": odd} for odd in ("a", [1, "b"], True, 1.5)),
        {"temperature": "hot"},
        {"top_k": 1.5},
        {"do_sample": 3},
        [1],
    ],
)
def test_a_generation_config_of_other_types_is_refused(tmp_path: Path, values: Any) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    with refuses("generation.value" if values != [1] else "model.json", "generation_config.json"):
        read_generation(tmp_path)


def test_what_is_no_regular_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "generation_config.json")
    with refuses("file.not_regular"):
        read_generation(tmp_path)
    with refuses("file.not_regular"):
        read_config("/dev/zero")


def test_ends_are_added_once() -> None:
    assert (with_end([], 3), with_end([3], 3), with_end([5, 7], 3)) == (3, 3, [5, 7, 3])
    assert with_end([], None) is None and read_generation(None) is None


def packed_experts(tensors: Tensors) -> None:
    """In place of gpt-oss's experts: random codes of 4 bits and scales, in the layout of the published files."""
    drawn = torch.Generator().manual_seed(7)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        shape = (experts, rows, columns // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=drawn, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(118, 126, shape, generator=drawn, dtype=torch.uint8)


MXFP4 = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}}
WIDE = {"hidden_size": 64, "intermediate_size": 32}


@pytest.mark.parametrize("label", [MXFP4, {}], ids=["labelled", "no label"])
def test_gpt_oss_as_published_is_unpacked_as_transformers_unpacks_it(
    directory: Callable[..., Path], label: dict[str, Any]
) -> None:
    path = directory("gpt_oss", label, packed_experts, **WIDE)
    found, stored = own_logits(path), stored_model(ModelFiles(path))
    assert not stored.notes and "quantization_config" not in read_config(stored.config).to_diff_dict()
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **MXFP4}))
    whole = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, quantization_config=Mxfp4Config(dequantize=True)
    )
    with torch.no_grad():
        expected = whole(input_ids=TOKENS).logits
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def test_gpt_oss_without_a_scale_is_refused(directory: Callable[..., Path]) -> None:
    missing = "model.layers.1.mlp.experts.down_proj_scales"

    def change(tensors: Tensors) -> None:
        packed_experts(tensors)
        del tensors[missing]

    with refuses("model.tensors_missing", missing):
        own_logits(directory("gpt_oss", MXFP4, change, **WIDE))
