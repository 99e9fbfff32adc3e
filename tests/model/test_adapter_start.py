"""Adapters that begin with a part of the weights: as peft begins them, and as they are written for the weights as they were."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from hetero_mpi.job.training_tables import AdapterTable
from hetero_mpi.model.adapters.adapter_files import ReducedStart, adapter_of, write_adapter
from hetero_mpi.model.adapters.adapter_tuning import adapter_tuning
from hetero_mpi.model.transformers.chain import TransformersChain
from hetero_mpi.model.transformers.families import read_config
from hetero_mpi.model.tuning import Tuning, began_with, scale_of
from tests.support.errors import refuses
from tests.support.family_configs import tiny_keys

CHAIN = TransformersChain(read_config({**tiny_keys("llama"), "tie_word_embeddings": False}))
KEYS: dict[str, Any] = {"rank": 4, "alpha": 6.0, "rank_pattern": {"v_proj": 3}, "alpha_pattern": {"down_proj": 2.0}}


class Loaded:
    """Start weights of a model in memory."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def fill(self, chain: TransformersChain, model: nn.Module, layer: int) -> None:
        for name in chain.module_names(layer):
            model.set_submodule(name, copy.deepcopy(self._model.get_submodule(name)))


def plain_model() -> nn.Module:
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(CHAIN.config)


def begun(plain: nn.Module, **keys: Any) -> tuple[Tuning, nn.Module, dict[str, torch.Tensor]]:
    """(tuning, what is left of the weights, values)."""
    tuning = adapter_tuning(CHAIN, AdapterTable(method="lora", **KEYS, **keys), False, True)
    start, model = ReducedStart(Loaded(plain), tuning, 7), CHAIN.frame()
    for layer in range(CHAIN.layer_count):
        start.fill(CHAIN, model, layer)
    CHAIN.restore_buffers(model, torch.device("cpu"))
    return tuning, model, start.values


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(40).view(2, 20), use_cache=False).logits


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("start", ["pissa", "olora", "pissa_niter_8"])
def test_it_begins_as_in_peft_and_opens_beside_the_weights_as_they_were(
    start: str, rslora: bool, tmp_path: Path
) -> None:
    plain = plain_model()
    tuning, left, values = begun(plain, start=start, rslora=rslora)
    assert tuning.adapter is not None and values.keys() == tuning.trainable.keys() | tuning.constants.keys()
    peft_keys = {
        "r": 4,
        "lora_alpha": 6,
        "use_rslora": rslora,
        "task_type": "CAUSAL_LM",
        "target_modules": "all-linear",
    }
    patterns = {key: KEYS[key] for key in ("rank_pattern", "alpha_pattern")}
    theirs = get_peft_model(copy.deepcopy(plain), LoraConfig(init_lora_weights=start, **peft_keys, **patterns))
    for name in tuning.modules_in(0, CHAIN.layer_count):
        a, b = (values[f"{name}.lora_{side}.weight"] for side in "AB")
        module = theirs.base_model.model.get_submodule(name)
        if "niter" not in start:
            assert torch.equal(a, module.lora_A["default"].weight) and torch.equal(b, module.lora_B["default"].weight)
            assert torch.equal(left.get_parameter(f"{name}.weight"), module.base_layer.weight)
        scale, weight = scale_of(tuning.adapter, name), plain.get_parameter(f"{name}.weight")
        assert torch.allclose(left.get_parameter(f"{name}.weight") + scale * b @ a, weight, atol=1e-6)
        if start != "olora":
            largest, begins = (torch.linalg.svdvals(one)[: len(a)] for one in (weight, scale * b @ a))
            assert torch.allclose(begins, largest, rtol=0.1 if "niter" in start else 1e-5)
    torch.manual_seed(5)
    state = {name: values[name] + 0.02 * torch.randn(spec.shape) for name, spec in tuning.trainable.items()}
    state |= {began_with(name): values[name] for name in tuning.trainable}
    write_adapter(tmp_path, tuning, state, None)
    opened = PeftModel.from_pretrained(copy.deepcopy(plain), tmp_path)
    for name in tuning.modules_in(
        0, CHAIN.layer_count
    ):  # what is trained: the rest of the weights, and the adapter beside it
        a, b = (state[f"{name}.lora_{side}.weight"] for side in "AB")
        left.get_parameter(f"{name}.weight").data.add_(scale_of(tuning.adapter, name) * b @ a)
    assert torch.allclose(logits(opened), logits(left), atol=1e-4)
    assert not torch.allclose(logits(opened), logits(plain), atol=1e-2)
    table, _ = adapter_of(tmp_path)
    assert (table.rank, table.start, table.rank_pattern) == (8, "default", {"v_proj": 6})


@pytest.mark.parametrize("start", ["pissa", "olora", "pissa_niter_8"])
def test_what_has_no_such_parts_is_refused(start: str) -> None:
    plain = plain_model()
    table = AdapterTable(method="lora", rank=17, start=start)
    with refuses("adapter.rank"):
        adapter_tuning(CHAIN, table, False, True)
    adapter_tuning(CHAIN, table.model_copy(update={"rank_pattern": {"[kv]_proj": 16}}), False, True)
    plain.get_parameter("model.layers.1.mlp.up_proj.weight").data[0, 0] = float("inf")
    with refuses("adapter.not_finite"):
        begun(plain, start=start)


@pytest.mark.parametrize("start", ["pissa", "olora", "pissa_niter_8"])
def test_bits_do_not_depend_on_the_number_of_threads(start: str) -> None:
    plain, found = plain_model(), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(begun(plain, start=start)[2])
        assert torch.get_num_threads() == threads
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
