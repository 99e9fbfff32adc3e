"""Adapters' settings: read as peft reads them or refused by name, and written so that peft adapts what was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from transformers import AutoModelForCausalLM

from hetero_mpi.interop.export import merged
from hetero_mpi.job.training_tables import AdapterTable
from hetero_mpi.model.adapters.adapter_files import (
    adapter_of,
    check_adapter,
    read_adapter,
    with_patterns_of,
    write_adapter,
)
from hetero_mpi.model.adapters.adapter_tuning import adapter_tuning
from hetero_mpi.model.adapters.peft_config import read_peft_config
from hetero_mpi.model.files.model_files import ModelFiles
from hetero_mpi.model.transformers.chain import TransformersChain
from hetero_mpi.model.transformers.weights import FileStart
from hetero_mpi.model.tuning import Tuning
from tests import family_trial
from tests.support.errors import refuses
from tests.support.training_cases import PATTERNS, Case, model_directory

CASE = Case("plain", "llama", False, 0.0, True, 2, "even")
ALL = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
TARGETS = ["q_proj", "v_proj", "down_proj"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return model_directory(tmp_path_factory.mktemp("base"), CASE)


@pytest.fixture(scope="module")
def chain(base: Path) -> TransformersChain:
    return TransformersChain(family_trial._config(CASE.config))


@pytest.fixture(scope="module")
def plain(base: Path) -> Path:
    """An adapter by peft at its defaults."""
    get_peft_model(whole(base), LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS)).save_pretrained(base / "adapter")
    return base / "adapter"


def whole(base: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)


def with_keys(plain: Path, target: Path, **keys: Any) -> Path:
    """The adapter with some keys of its configuration changed; ``...`` removes one."""
    target.mkdir(parents=True)
    (target / "adapter_model.safetensors").write_bytes((plain / "adapter_model.safetensors").read_bytes())
    found = {**json.loads((plain / "adapter_config.json").read_text()), **keys}
    (target / "adapter_config.json").write_text(json.dumps({k: v for k, v in found.items() if v is not ...}))
    return target


CHANGING = {
    **dict.fromkeys(("lora_bias", "use_qalora", "fan_in_fan_out"), True),
    **dict.fromkeys(("megatron_config", "velora_config", "monteclora_config", "arrow_config"), ("some",)),
    **dict.fromkeys(("kasa_config", "use_bdlora", "of_tomorrow"), ("some",)),
    "layer_replication": [[0, 2], [1, 3]],
    "alora_invocation_tokens": [5],
    "bias": "all",
    "peft_type": "LOHA",
    "revision": "v2",
    "scale_of_tomorrow": 0.5,
}


@pytest.mark.parametrize("key", CHANGING)
def test_what_is_not_computed_is_refused_by_name(key: str, plain: Path, tmp_path: Path) -> None:
    directory = with_keys(plain, tmp_path / "a", **{key: CHANGING[key]})
    kind = "adapter.config_value" if key in ("peft_type", "bias", "revision") else "adapter.unsupported"
    with refuses(kind, f"{directory}/adapter_config.json: {key} "):
        adapter_of(directory)
    with refuses(kind, f"{directory}/adapter_config.json: {key} "):
        with_patterns_of(directory, AdapterTable(path=str(directory)))


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga", "mica", 1, None])
def test_starts_that_change_the_base_are_refused(start: Any, plain: Path, tmp_path: Path) -> None:
    with refuses("adapter.unsupported"):
        adapter_of(with_keys(plain, tmp_path / "a", init_lora_weights=start))


def test_what_says_nothing_of_the_result_is_taken(plain: Path, tmp_path: Path) -> None:
    """Every key at peft's default; how an adapter began; and unknown keys that ask for nothing, or are not there."""
    keys = {**LoraConfig().to_dict(), **json.loads((plain / "adapter_config.json").read_text())}
    keys |= {"init_lora_weights": "eva", "eva_config": {"rho": 2.0}, "corda_config": {"cache_file": "x"}}
    keys |= {"of_tomorrow": None, "more": False, "words": "", "list": [], "table": {}, "task_type": ...}
    keys |= {"lora_dropout": 0.1, "revision": "main"}
    keys |= dict.fromkeys(("lora_bias", "use_dora", "alpha_pattern", "layers_to_transform", "peft_version"), ...)
    table, _ = adapter_of(with_keys(plain, tmp_path / "a", **keys))
    assert (table.rank, table.alpha, table.rslora, table.alpha_pattern) == (4, 8.0, False, None)


ODD = {
    "r": [True, "4", [4], 4.5, 0, -1, None, ..., {}],
    "lora_alpha": [float("nan"), float("inf"), True, "8", [8], 0, None, ...],
    "use_rslora": ["yes", 1, []],
    "use_dora": ["no", 0],
    "target_modules": [5, [5], {"q_proj": 1}, "(", True],
    "target_parameters": ["experts", [5], True],
    "rank_pattern": [{"q_proj": 0}, {"q_proj": True}, {"q_proj": "8"}, ["q_proj"], {"(": 4}, 3],
    "alpha_pattern": [{"q_proj": float("nan")}, {"q_proj": None}, "q_proj", {"[": 1.0}],
    "layers_to_transform": ["1", [1.5], {"0": 1}, [True]],
    "layers_pattern": [5, [5], "("],
    "modules_to_save": ["lm_head", [5], 5],
    "trainable_token_indices": ["5", [1.5], {"lm_head": ["5"]}],
    "ensure_weight_tying": ["yes", 1],
    "exclude_modules": [5, "("],
    "base_model_name_or_path": [5, ["x"], {}],
    "peft_type": [None, ["LORA"], 5, ...],
}


@pytest.mark.parametrize("key, value", [(key, value) for key, values in ODD.items() for value in values])
def test_odd_values_are_named(key: str, value: Any, plain: Path, tmp_path: Path) -> None:
    with refuses("adapter.config_value", f"adapter_config.json: {key} is "):
        adapter_of(with_keys(plain, tmp_path / "a", **{key: value}))


def test_tensors_that_peft_would_leave_out_are_refused(plain: Path, tmp_path: Path) -> None:
    unreached: tuple[dict[str, Any], ...] = (
        {"target_modules": ["q_proj", "v_proj"]},
        {"layers_to_transform": [0, 1], "layers_pattern": "layers"},
        {"exclude_modules": ["q_proj"]},
    )
    for number, keys in enumerate(unreached):
        with refuses("adapter.unreached_tensors", tmp_path / str(number)):
            adapter_of(with_keys(plain, tmp_path / str(number), **keys))
    adapter_of(with_keys(plain, tmp_path / "d", target_modules=r".*\.(q_proj|v_proj|down_proj)"))


def made(base: Path, target: Path, **keys: Any) -> Any:
    """An adapter by peft with a random B, and its model."""
    model = get_peft_model(whole(base), LoraConfig(r=4, lora_alpha=8, **{"target_modules": TARGETS, **keys}))
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(target)
    return model


def state_of(directory: Path, tuning: Tuning) -> dict[str, torch.Tensor]:
    check_adapter(directory, tuning)
    return read_adapter(directory, tuning)


def adapted_by_peft(base: Path, directory: Path) -> list[str]:
    model = PeftModel.from_pretrained(whole(base), directory).base_model.model
    return sorted(name for name, module in model.named_modules() if isinstance(module, LoraLayer))


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize(
    "keys",
    [
        PATTERNS,
        {"alpha_pattern": {"q_proj": 64, "model.layers.1.mlp.down_proj": 2.5}},
        {"rank_pattern": {r"layers\.0\.self_attn\.v_proj": 6, "v_proj": 1}},
        {"layers_to_transform": 2, "layers_pattern": "layers"},
    ],
    ids=["all", "alphas", "ranks", "one block"],
)
def test_patterns_equal_peft(
    keys: dict[str, Any], rslora: bool, base: Path, chain: TransformersChain, tmp_path: Path
) -> None:
    """As a job's start and as an adapter of its own: the loss, the gradients, what is merged, and what is written."""
    reference = made(base, tmp_path / "theirs", use_rslora=rslora, **keys)
    job = AdapterTable(method="lora", path="x", rank=4, alpha=8, rslora=rslora, targets=TARGETS)
    continued = adapter_tuning(chain, with_patterns_of(tmp_path / "theirs", job), False, True)
    alone = adapter_tuning(chain, adapter_of(tmp_path / "theirs")[0], False, True)
    own = {n.removeprefix("base_model.model.").replace(".default.", "."): p for n, p in reference.named_parameters()}
    expected = family_trial._run_whole(reference.train())
    for tuning in (continued, alone):
        state = state_of(tmp_path / "theirs", tuning)
        stages = family_trial._stages(chain, FileStart(ModelFiles(base), chain), 2, 4, tuning=tuning)
        for stage in stages:
            for name, parameter in stage.parameters.items():
                parameter.data.copy_(state[name])
        loss, found = family_trial._run(chain, stages)
        family_trial._require_equal(loss, expected, found, {name: own[name].grad for name in state})
    (tmp_path / "ours").mkdir()
    write_adapter(tmp_path / "ours", continued, state, str(base))
    assert adapted_by_peft(base, tmp_path / "ours") == [name for _, name in continued.modules]
    written, given = (read_peft_config(tmp_path / name) for name in ("ours", "theirs"))
    for key in ("rank_pattern", "alpha_pattern", "layers"):
        assert (getattr(written, key) or None) == (getattr(given, key) or None)
    tokens = torch.arange(20)[None]
    again = PeftModel.from_pretrained(whole(base), tmp_path / "ours").eval()
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, reference.eval()(tokens).logits)
    theirs = reference.merge_and_unload().state_dict()
    for _, name in continued.modules:
        weight = whole(base).get_parameter(f"{name}.weight").detach()
        a, b = (state[f"{name}.lora_{side}.weight"] for side in "AB")
        ours = merged(continued.adapter, name, weight, b @ a, None)
        assert torch.allclose(ours, theirs[f"{name}.weight"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "table, reached",
    [
        ({"targets": ["q_proj", "up_proj"]}, (["q_proj", "up_proj"], None)),
        ({"targets": ["q_proj"], "layers": [3, 1]}, (["q_proj"], [1, 3])),
        ({"targets": ["layers.1.self_attn.q_proj"]}, (["model.layers.1.self_attn.q_proj"], None)),
        ({"targets": ["layers.1.self_attn.q_proj", "v_proj"]}, (None, None)),
        ({"targets": "all-linear", "layers": [0]}, (ALL, [0])),
    ],
    ids=["names", "blocks", "one", "unlike", "all of a block"],
)  # fmt: skip
def test_what_is_written_reaches_what_was_trained(
    table: dict[str, Any], reached: tuple[Any, Any], base: Path, chain: TransformersChain, tmp_path: Path
) -> None:
    tuning = adapter_tuning(chain, AdapterTable(method="lora", rank=4, **table), False, True)
    write_adapter(tmp_path, tuning, {name: torch.ones(spec.shape) for name, spec in tuning.trainable.items()}, "x")
    assert adapted_by_peft(base, tmp_path) == sorted(name for _, name in tuning.modules)
    written = read_peft_config(tmp_path)
    if reached[0] is not None:
        assert (sorted(written.target_modules or []), written.layers) == reached
    check_adapter(tmp_path, tuning)


@pytest.mark.parametrize(
    ("table", "kind", "shown"),
    [
        ({"targets": ["q_proj", "nothing"]}, "adapter.targets", "nothing down_proj"),
        ({"targets": ["q_proj", "proj"]}, "adapter.targets", "proj"),
        ({"targets": ["q_proj", "embed_tokens"]}, "adapter.targets", "embed_tokens embedding"),
        ({"targets": ["input_layernorm"]}, "adapter.targets", "input_layernorm LlamaRMSNorm"),
        ({"targets": ["mlp", "q_proj"]}, "adapter.targets", "mlp LlamaMLP"),
        ({"targets": ["lm_head", "q_proj"]}, "adapter.targets", "lm_head"),
        ({"layers": [1, 4]}, "adapter.layers", "4 0 3"),
        ({"alpha_pattern": {"q_prj": 4.0}}, "adapter.pattern", 'alpha_pattern "q_prj"'),
        ({"rank_pattern": {"q_proj": 2}, "targets": ["v_proj"]}, "adapter.pattern", 'rank_pattern "q_proj"'),
    ],
)
def test_names_that_reach_nothing_are_refused(
    table: dict[str, Any], kind: str, shown: str, chain: TransformersChain
) -> None:
    with refuses(kind, *shown.split()):
        adapter_tuning(chain, AdapterTable(method="lora", **table), False, True)


def test_patterns_keep_their_order(chain: TransformersChain, base: Path, tmp_path: Path) -> None:
    """The first that matches counts, for peft too, which would sort them in the file."""
    patterns = {"v_proj": 1, r"layers\.0\.self_attn\.v_proj": 6, "q_proj": 2}
    table = AdapterTable(method="lora", rank=4, targets=["q_proj", "v_proj"], rank_pattern=patterns)
    tuning = adapter_tuning(chain, table, False, True)
    name = "model.layers.0.self_attn.v_proj"
    assert tuning.trainable[f"{name}.lora_A.weight"].shape == (1, 32)
    write_adapter(tmp_path, tuning, {name: torch.ones(spec.shape) for name, spec in tuning.trainable.items()}, "x")
    assert PeftModel.from_pretrained(whole(base), tmp_path).base_model.model.get_submodule(name).r["default"] == 1
    assert list(read_peft_config(tmp_path).rank_pattern or ()) == list(patterns)


def test_the_start_says_what_is_trained(chain: TransformersChain) -> None:
    table = AdapterTable(method="lora", rank=4, targets=["q_proj", "v_proj"], layers=[1, 2])
    whole = sum(spec.count for spec in chain.parameters.values())
    told = adapter_tuning(chain, table, False, True).summary(chain)
    assert all(value in told for value in ("q_proj, v_proj", "896", f"{whole:,}", f"{89600 / whole:.2g} %"))
