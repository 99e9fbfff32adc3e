"""Fused experts in 4 bits, and adapters on them: three stages against transformers, bitsandbytes and peft in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from bitsandbytes.nn.parametrize import replace_parameter_4bit
from peft import PeftModel, get_peft_model
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from hetero_mpi.device.backend import Backend
from hetero_mpi.interop.export import expert_delta
from hetero_mpi.job.training_tables import AdapterTable
from hetero_mpi.model.adapters.adapter_files import adapter_of, check_adapter, write_adapter
from hetero_mpi.model.adapters.adapter_tuning import adapter_tuning
from hetero_mpi.model.files.model_files import ModelFiles
from hetero_mpi.model.layer import quantize
from hetero_mpi.model.layer.quantize import fused_experts, is_empty, unpack_experts
from hetero_mpi.model.model_cost import model_cost
from hetero_mpi.model.stage import MicroBatch, Stage
from hetero_mpi.model.transformers.chain import TransformersChain
from hetero_mpi.model.transformers.weights import FileStart, SeededStart
from hetero_mpi.model.tuning import lora_config
from tests import family_trial
from tests.model.test_split_backward import NormalStart
from tests.support.errors import refuses
from tests.support.family_configs import tiny_keys
from tests.support.plain_training import with_right_products
from tests.support.stages import stage_of, streamed_stage_of

FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3")
WIDE = {"hidden_size": 64, "moe_intermediate_size": 64, "tie_word_embeddings": False}
"""On the CPU bitsandbytes' own unpacking needs rows of 64 weights."""
ATTENTION = AdapterTable(method="lora", rank=4, targets=["o_proj"])
PACKED = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)


def chain_of(family: str) -> TransformersChain:
    keys = tiny_keys(family)
    return TransformersChain(
        family_trial._config({**keys, **{k: v for k, v in WIDE.items() if k in keys or k[0] == "t"}})
    )


def reference(chain: TransformersChain, folder: Path) -> nn.Module:
    """The model of the folder with its linear layers and experts in NF4, by transformers and bitsandbytes alone."""
    whole = AutoModelForCausalLM.from_pretrained(
        folder, config=chain.config, dtype=torch.float32, quantization_config=PACKED
    )
    with_right_products(whole)
    for _, holder, name, _ in list(fused_experts(whole)):
        replace_parameter_4bit(holder, name, compress_statistics=True, quant_type="nf4", blocksize=64)
    return whole.train()


@pytest.mark.parametrize("family, recompute", [*((family, False) for family in FAMILIES), ("qwen3_moe", True)])
def test_packed_experts_equal_bitsandbytes(family: str, recompute: bool, tmp_path: Path) -> None:
    chain = chain_of(family)
    family_trial._whole_model(chain.config, str(tmp_path))
    stages = stages_of(chain, tmp_path, ATTENTION, True)
    for stage in stages:
        chain.recompute(stage.model, recompute)
    family_trial.require_equal_to_peft(
        chain, stages, get_peft_model(reference(chain, tmp_path), lora_config(ATTENTION, ["o_proj"], []))
    )


def stages_of(chain: TransformersChain, folder: Path, adapter: AdapterTable, nf4: bool) -> list[Stage]:
    """Three stages with an adapter whose B is random: with zeros, A has no gradient."""
    start = FileStart(ModelFiles(str(folder)), chain)
    stages = family_trial._stages(chain, start, 2, 4, tuning=adapter_tuning(chain, adapter, nf4, True))
    for stage in stages:
        for name, parameter in stage.parameters.items():
            if ".lora_B." in name:
                nn.init.normal_(parameter, std=0.1)
    return stages


EXPERTS = AdapterTable(
    method="lora", rank=4, targets=["o_proj"], parameters=["experts.gate_up_proj", "experts.down_proj"]
)


@pytest.mark.parametrize(
    "family, nf4", [*((family, True) for family in FAMILIES), ("mixtral", False), ("gpt_oss", False)]
)
def test_adapters_of_experts_equal_peft_which_reads_them(family: str, nf4: bool, tmp_path: Path) -> None:
    """Of packed weights against the same values not packed: peft 0.21 keeps its change of a parameter that bitsandbytes unpacks."""
    chain = chain_of(family)
    family_trial._whole_model(chain.config, str(tmp_path))
    stages = stages_of(chain, tmp_path, EXPERTS, nf4)
    whole = AutoModelForCausalLM.from_pretrained(
        tmp_path, config=chain.config, dtype=torch.float32, quantization_config=PACKED if nf4 else None
    )
    with_right_products(whole)
    for _, _, _, parameter in list(fused_experts(whole)) if nf4 else []:
        packed, state = quantize_4bit(parameter.data, blocksize=64, compress_statistics=True, quant_type="nf4")
        parameter.data = dequantize_4bit(packed, state)
    state = {name: p.detach().clone() for stage in stages for name, p in stage.parameters.items()}
    (tmp_path / "adapter").mkdir()
    write_adapter(tmp_path / "adapter", stages[0].tuning, state, str(tmp_path))
    plain = PeftModel.from_pretrained(whole, tmp_path / "adapter", is_trainable=True)
    family_trial.require_equal_to_peft(chain, stages, plain)
    check_adapter(tmp_path / "adapter", stages[0].tuning)
    table, _ = adapter_of(tmp_path / "adapter")
    assert adapter_tuning(chain, table, nf4, True).trainable == stages[0].tuning.trainable
    if not nf4:
        merged = plain.merge_and_unload().state_dict()
        for name, wrapper in stages[0].tuning.parameters.items():
            a, b = (state[f"{wrapper}.lora_{side}.weight"] for side in "AB")
            delta = EXPERTS.alpha / EXPERTS.rank * expert_delta(chain.model, name, a, b)
            before = AutoModelForCausalLM.from_pretrained(tmp_path, config=chain.config, dtype=torch.float32)
            assert torch.allclose(merged[name], before.get_parameter(name) + delta, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("adapter", [ATTENTION, EXPERTS], ids=["attention", "experts"])
def test_nothing_unpacked_is_kept_until_backward(
    adapter: AdapterTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = chain_of("qwen3_moe")
    family_trial._whole_model(chain.config, str(tmp_path))
    stage = stages_of(chain, tmp_path, adapter, True)[1]
    unpacked: list[StorageWeakRef] = []

    def noted(*arguments: Any) -> torch.Tensor:
        values = dequantize_4bit(*arguments)
        if values.shape[0] == 1:  # matrices of linear layers are unpacked in backward, too
            unpacked.append(StorageWeakRef(values.untyped_storage()))
        return values

    monkeypatch.setattr("bitsandbytes.functional.dequantize_4bit", noted)
    x = torch.randn(2, 8, 64)
    stage.forward(MicroBatch(0, 0, 0, 16), x)
    assert len(unpacked) == 4 and all(one.expired() for one in unpacked)
    stage.backward(0, torch.ones_like(x))
    assert len(unpacked) == 8 and all(one.expired() for one in unpacked)
    unpack_experts(stage.model, repeat=False, draws=False)
    stage.forward(MicroBatch(0, 0, 0, 16), x)
    assert (adapter is EXPERTS) is all(one.expired() for one in unpacked), (
        "autograd keeps them, or their sums with adapters"
    )


def test_costs_of_packed_experts() -> None:
    """A block of qwen3_moe: 4 experts of 3 x 64 x 64 weights, which are unpacked at once; with adapters also their sums."""
    chain, experts = chain_of("qwen3_moe"), 4 * 3 * 64 * 64
    for adapter, copies in ((ATTENTION, 1), (EXPERTS, 2)):
        tuning = adapter_tuning(chain, adapter, True, True)
        block = model_cost(chain, tuning, "bf16", 16, dict.fromkeys(chain.kinds, 1.0)).layers[1]
        assert block.workspace_bytes == copies * experts * 2
        stage = stage_of(chain, 1, 2, Backend(), "bf16", SeededStart(1), 7, tuning)
        held = [(p, getattr(p, "quant_state", None)) for p in stage.model.parameters()]
        scales = sum(s.absmax.nbytes + s.state2.absmax.nbytes for _, s in held if s is not None)
        packed = sum(p.nbytes for p, _ in held if not is_empty(p)) + scales
        assert block.parameter_bytes == pytest.approx(packed, abs=4 * 10), "scales of scales begin anew in each tensor"


def test_names_that_are_no_experts_are_refused() -> None:
    wrong = AdapterTable(method="lora", targets=["o_proj"], parameters=["o_proj.weight"])
    with refuses("adapter.parameters", "o_proj.weight", "experts.down_proj, experts.gate_up_proj"):
        adapter_tuning(chain_of("mixtral"), wrong, False, True)


@pytest.mark.parametrize(("mapped", "keeps"), [(False, 0), (True, 0), (False, 1)])
def test_streamed_and_rebuilt_stages_have_the_same_bits(mapped: bool, keeps: int, tmp_path: Path) -> None:
    chain = chain_of("gpt_oss")
    tuning = adapter_tuning(chain, EXPERTS, True, True)
    start, device = NormalStart(), Backend()
    plain = stage_of(chain, 0, chain.layer_count, device, "fp32", start, 7, tuning)
    folder = tmp_path if mapped else None
    streamed = streamed_stage_of(
        chain, 0, chain.layer_count, device, "fp32", start, 7, tuning, kept_slices=keeps, folder=folder
    )
    kept = plain.frozen_layers(range(1, 4))
    rebuilt = stage_of(chain, 0, chain.layer_count, device, "fp32", start, 7, tuning, kept_layers=kept)
    tokens, targets = family_trial._batch()
    seen = []
    for stage in (plain, streamed, rebuilt):
        loss = stage.forward(MicroBatch(0, 0, 0, 33), tokens, targets)
        stage.backward(0)
        seen.append({"loss": loss, **{name: p.grad for name, p in stage.parameters.items()}})
    for name, expected in seen[0].items():
        assert all(torch.equal(one[name], expected) for one in seen[1:]), name
    assert all(gradient.norm() > 0 for name, gradient in seen[0].items() if ".lora_B." in name)


def test_pieces_are_packed_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize, "_PIECE", 4096)
    weight = torch.randn(3, 50, 61)  # in pieces that are not full, with blocks over the ends of rows
    found, state = quantize._packed(weight.flatten(), torch.device("cpu"), torch.bfloat16, True)
    packed, expected = quantize_4bit(
        weight.bfloat16().flatten(), blocksize=64, compress_statistics=True, quant_type="nf4"
    )
    assert torch.equal(found, packed) and torch.equal(dequantize_4bit(found, state), dequantize_4bit(packed, expected))
    assert (dequantize_4bit(found, state).view(weight.shape) - weight).norm() < 0.12 * weight.norm()


def test_scales_of_scales_do_not_depend_on_threads() -> None:
    """Of a tensor of 59 million weights; torch adds up so many numbers in as many parts as it has threads."""
    absmax, offsets = torch.rand(917_504, generator=torch.Generator().manual_seed(0)), set()
    for threads in (1, 2, 3, 5, 8):
        torch.set_num_threads(threads)
        offsets.add(quantize._quantized_twice(absmax)[1].item())
        assert torch.get_num_threads() == threads
    assert len(offsets) == 1


def test_a_family_that_cannot_be_packed_is_refused() -> None:
    with refuses("model.quantization", "longcat_flash"):
        adapter_tuning(chain_of("longcat_flash"), ATTENTION, True, True)
