"""Modules that are trained whole beside adapters, rows of single tokens, and rows for new words, as in peft and transformers."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from hetero_mpi.data.tokenizer import add_tokens, load_tokenizer, rows_with_added
from hetero_mpi.job.training_tables import AdapterTable
from hetero_mpi.model.adapters.adapter_files import (
    adapter_of,
    check_adapter,
    read_adapter,
    with_patterns_of,
    write_adapter,
)
from hetero_mpi.model.adapters.adapter_tuning import adapter_tuning
from hetero_mpi.model.files.model_files import ModelFiles
from hetero_mpi.model.group.refusals import refusal
from hetero_mpi.model.transformers.chain import TransformersChain
from hetero_mpi.model.transformers.weights import FileStart, with_mean_rows
from tests import family_trial
from tests.support.errors import refuses
from tests.support.training_cases import Case, corpus, model_directory, tokenizer_directory

ROWS, GROWN = 320, 323
TOKENS = torch.tensor([[5, 7, 319, 11, 322, 320, 7, 5, 3, 300]])
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
BOTH = ["embed_tokens", "lm_head"]
KINDS: dict[str, dict[str, Any]] = {
    "tokens": {"trainable_token_indices": [322, 7, 320, 321]},
    "tokens of both": {"trainable_token_indices": {end: [320, 7, 321, 322] for end in BOTH}},
    "head": {"trainable_token_indices": {"lm_head": [320, 7, 321, 322]}},
    "modules": {"modules_to_save": BOTH, "ensure_weight_tying": True},
    "norms": {"modules_to_save": ["norm"]},
    "one norm": {"modules_to_save": ["model.norm"], "trainable_token_indices": [320, 321, 322]},
}


def case(family: str, tied: bool) -> Case:
    return Case(f"{family}-{tied}", family, tied, 0.0, True, 1, "even", tuning="lora")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rows")


def grown(base: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(9)
    model.resize_token_embeddings(GROWN)
    return model


def chain_of(one: Case) -> TransformersChain:
    return TransformersChain(family_trial._config({**one.config, "vocab_size": GROWN}))


def stages_of(chain: TransformersChain, base: Path, tuning: Any, state: dict[str, torch.Tensor]) -> list[Any]:
    stages = family_trial._stages(chain, FileStart(ModelFiles(base), chain), 2, 4, tuning=tuning)
    for stage in stages:
        for name, parameter in stage.parameters.items():
            parameter.data.copy_(state[name])
    tied = tuning.tied(chain)
    if tied is not None:
        stages[-1].tied_head.data.copy_(state[tied])
    return stages


@pytest.mark.parametrize("alone", [True, False], ids=["changed vocabulary", "rows alone"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_of_peft_are_read(kind: str, tied: bool, alone: bool, place: Path, tmp_path: Path) -> None:
    """Whether peft writes embedding and head once more, as it does of a grown model, or not; and written by us again."""
    if kind == "head" and tied:
        return
    one = case("gemma2" if kind.startswith("tokens") else "llama", tied)
    base, chain = model_directory(place, one), chain_of(one)
    keys = {**copy.deepcopy(KINDS[kind]), **({"ensure_weight_tying": tied} if kind == "modules" else {})}
    model = get_peft_model(grown(base), LoraConfig(**LORA, **keys))
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, std=0.1)
    model.save_pretrained(tmp_path / "theirs", save_embedding_layers="auto" if alone else False)
    # New rows that are in no file begin as the mean.
    plain = model.eval() if alone else PeftModel.from_pretrained(with_mean(base), tmp_path / "theirs").eval()
    table, _ = adapter_of(tmp_path / "theirs")
    tuning = adapter_tuning(chain, table, False, True)
    check_adapter(tmp_path / "theirs", tuning)
    state = read_adapter(tmp_path / "theirs", tuning)
    expected = logits_of(plain)
    assert torch.allclose(ours(chain, base, tuning, state), expected, atol=2e-6)
    (tmp_path / "ours").mkdir()
    write_adapter(tmp_path / "ours", tuning, state, str(base))
    again = PeftModel.from_pretrained(with_mean(base), tmp_path / "ours").eval()
    assert torch.allclose(logits_of(again), expected, atol=2e-6)
    assert torch.allclose(logits_of(again.merge_and_unload()), expected, atol=5e-5)
    check_adapter(tmp_path / "ours", tuning)
    job = AdapterTable(method="lora", path="x", rank=4, alpha=8, targets=["q_proj", "v_proj"])
    continued = adapter_tuning(chain, with_patterns_of(tmp_path / "ours", job), False, True)
    assert continued.trainable == tuning.trainable and continued.tokens == tuning.tokens


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits.float()


def with_mean(base: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model.resize_token_embeddings(GROWN, mean_resizing=False)
    for module in {model.get_input_embeddings(), model.get_output_embeddings()}:
        module.weight.data = with_mean_rows(module.weight.data[:ROWS], GROWN)
    return model


def ours(chain: TransformersChain, base: Path, tuning: Any, state: dict[str, torch.Tensor]) -> torch.Tensor:
    x: torch.Tensor = TOKENS
    for stage in stages_of(chain, base, tuning, state):
        with torch.no_grad():
            stage.model.eval()
            x = stage.apply(x)
    return x


def test_an_embedding_apart_from_its_tied_head_is_refused(place: Path, tmp_path: Path) -> None:
    one = case("llama", True)
    base = model_directory(place, one)
    for number, modules in enumerate((BOTH[:1], list(BOTH))):
        model = get_peft_model(grown(base), LoraConfig(**LORA, modules_to_save=modules))
        for name, parameter in model.named_parameters():
            if "embed_tokens" in name:
                torch.nn.init.normal_(parameter)
        model.save_pretrained(tmp_path / str(number), save_embedding_layers=False)
        tuning = adapter_tuning(chain_of(one), adapter_of(tmp_path / str(number))[0], False, True)
        with refuses("adapter.tied_ends"):
            check_adapter(tmp_path / str(number), tuning)


@pytest.mark.parametrize(
    ("table", "nf4", "kind", "shown"),
    [
        ({"modules_to_save": ["score"]}, False, "adapter.modules_to_save", "score embed_tokens, lm_head"),
        (
            {"modules_to_save": ["self_attn"]},
            False,
            "adapter.modules_to_save",
            "self_attn model.layers.0.self_attn.q_proj",
        ),
        (
            {"modules_to_save": ["up_proj"]},
            True,
            "adapter.modules_to_save",
            "up_proj model.layers.0.mlp.up_proj.weight",
        ),
        ({"modules_to_save": ["act_fn"]}, False, "adapter.modules_to_save", "act_fn model.layers.0.mlp.act_fn"),
        ({"tokens": [5, GROWN]}, False, "adapter.tokens", "323"),
    ],
)
def test_what_cannot_be_trained_is_refused(table: dict[str, Any], nf4: bool, kind: str, shown: str) -> None:
    with refuses(kind, *shown.split()):
        adapter_tuning(
            chain_of(case("llama", False)), AdapterTable(method="lora", targets=["q_proj"], **table), nf4, True
        )


def test_groups_divide_whole_modules_and_no_rows() -> None:
    chain = chain_of(case("llama", False))
    rows = adapter_tuning(chain, AdapterTable(method="lora", tokens=[320]), False, True)
    assert refusal(chain, rows, (1, 1)) is not None
    both = AdapterTable(method="lora", tokens=[320], modules_to_save=BOTH)
    assert refusal(chain, adapter_tuning(chain, both, False, True), (1, 1)) is None


def test_new_rows_are_the_mean_whatever_the_threads(place: Path) -> None:
    matrix, found = torch.randn(5000, 64).bfloat16(), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(with_mean_rows(matrix, 5002))
    assert torch.equal(*found) and torch.equal(found[0][:5000], matrix.float())
    assert torch.allclose(found[0][5000:], matrix.double().mean(0).float().expand(2, 64), rtol=1e-6)


def test_a_vocabulary_grows_for_added_tokens_alone(tmp_path: Path) -> None:
    text = corpus(tmp_path)
    tokenizer = load_tokenizer(tokenizer_directory(tmp_path, text))
    size = len(tokenizer)
    assert rows_with_added(tokenizer, size) == size and rows_with_added(tokenizer, size - 5) == size - 5
    assert f"<tool> ({size}), <|call|> ({size + 1})" in add_tokens(tokenizer, ["<tool>"], ["<|call|>"])[0]
    assert add_tokens(tokenizer, ["<tool>"], []) == []
    assert rows_with_added(tokenizer, size) == size + 2
    assert rows_with_added(tokenizer, size + 40) == size + 40, "spare rows"
    assert rows_with_added(tokenizer, size - 5) == size - 5, "another model's tokenizer, which is refused"


DAMAGES: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "negative": ("tokens", {"trainable_token_indices": [-1, 7, 320, 321]}, "adapter.config_value", "trainable_token_indices"),
    "twice": ("tokens", {"trainable_token_indices": [7, 7, 320, 321]}, "adapter.unsupported", "[7, 7, 320, 321]"),
    "no rows": ("norms", {"trainable_token_indices": [7]}, "adapter.tensors_missing", "[7]"),
    "rows of one end": ("head", {"trainable_token_indices": {"lm_head": [1, 2], "embed_tokens": [7]}}, "adapter.tensors_missing",
                        "embed_tokens"),
    "no module": ("tokens", {"modules_to_save": ["norm"]}, "adapter.tensors_missing", "norm"),
    "another module": ("norms", {"modules_to_save": ["norm", "lm_head"]}, "adapter.tensors_missing", "lm_head"),
}  # fmt: skip
OF_SMALL: dict[str, dict[str, Any]] = {
    "tokens": {"trainable_token_indices": [1, 2]},
    "head": {"trainable_token_indices": {"lm_head": [1, 2]}},
    "norms": {"modules_to_save": ["norm"]},
}


@pytest.mark.parametrize("name", DAMAGES)
def test_settings_that_the_tensors_contradict_are_refused(name: str, place: Path, tmp_path: Path) -> None:
    tensors, changed, kind, shown = DAMAGES[name]
    base = model_directory(place, case("llama", False))
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(**LORA, **OF_SMALL[tensors]))
    model.save_pretrained(tmp_path)
    adapter_of(tmp_path)
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changed}))
    with refuses(kind, tmp_path, shown):
        adapter_of(tmp_path)


def test_a_tied_head_that_is_whole_beside_rows_is_refused(place: Path, tmp_path: Path) -> None:
    base = model_directory(place, case("llama", True))
    keys: dict[str, Any] = {"modules_to_save": ["lm_head"], "trainable_token_indices": [5, 9]}
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(**LORA, **keys)).save_pretrained(tmp_path)
    with refuses("adapter.unsupported"):
        adapter_of(tmp_path)


@pytest.mark.parametrize("tokens", [[320, 7, 321], [320, 7, 321, 323]])
def test_tokens_that_do_not_fit_the_rows_of_a_grown_model_are_refused(
    tokens: list[int], place: Path, tmp_path: Path
) -> None:
    model = get_peft_model(grown(model_directory(place, case("llama", False))), LoraConfig(**LORA, **KINDS["tokens"]))
    model.save_pretrained(tmp_path)
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "trainable_token_indices": tokens}))
    with refuses("adapter.shape"):
        adapter_of(tmp_path)
