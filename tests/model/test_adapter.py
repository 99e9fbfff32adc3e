"""Adapters and packed weights: what is refused, and which bits are kept."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from bitsandbytes.nn import Linear4bit
from transformers import AutoConfig

from hetero_mpi.device.backend import Backend
from hetero_mpi.job.load import load_job
from hetero_mpi.job.schema import JobConfig
from hetero_mpi.job.training_tables import TrainTable
from hetero_mpi.model.adapters.adapter_files import check_adapter, read_adapter, write_adapter
from hetero_mpi.model.adapters.adapter_tuning import tuning_of
from hetero_mpi.model.layer.lora import join_products
from hetero_mpi.model.layer.quantize import quantize, unpacked
from hetero_mpi.model.model_cost import model_cost, packed_bytes
from hetero_mpi.model.optimizer import Optimizer
from hetero_mpi.model.stage import MicroBatch, Stage, StageSpec
from hetero_mpi.model.transformers.chain import TransformersChain
from hetero_mpi.model.transformers.families import read_config
from hetero_mpi.model.transformers.weights import SeededStart
from hetero_mpi.model.tuning import Tuning
from tests.support.errors import refuses
from tests.support.stages import stage_of
from tests.support.training_cases import Case

CASE = Case("plain", "llama", True, 0.0, True, 2, "even")


def chain() -> TransformersChain:
    return TransformersChain(read_config({**CASE.config, "hidden_size": 64, "intermediate_size": 128}))


def job(quantization: str = "none", **adapter: object) -> JobConfig:
    tables = {"model": {"path": "x", "quantization": quantization}, "data": {"text": ["x"]}}
    return JobConfig.model_validate({**tables, "adapter": {"method": "lora", "rank": 4, "alpha": 8.0, **adapter}})


def stage(tuning: Tuning, first: int, last: int, dtype: str = "fp32") -> Stage:
    return stage_of(chain(), first, last, Backend(), dtype, SeededStart(1), 7, tuning)


def test_targets_that_match_nothing_or_lie_outside_the_blocks() -> None:
    for targets in (["c_attn"], ["lm_head", "q_proj"]):
        with refuses("adapter.targets", targets[0]):
            tuning_of(job(targets=targets), chain())


def test_targets_that_peft_has_for_a_family() -> None:
    reached = {name.rpartition(".")[2] for _, name in tuning_of(job(targets="family"), chain()).modules}
    assert reached == {"q_proj", "v_proj"}
    unknown = TransformersChain(
        AutoConfig.for_model("smollm3", hidden_size=64, num_hidden_layers=2, vocab_size=99, pad_token_id=None)
    )
    with refuses("adapter.targets"):
        tuning_of(job(targets="family"), unknown)


def test_layers_without_their_dropout() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = AutoConfig.for_model("phi3", **sizes, vocab_size=99, resid_pdrop=0.1, pad_token_id=None)
    with_dropout, without = TransformersChain(config), TransformersChain(config, dropout=False)
    assert with_dropout.draws and not without.draws
    rates = [
        {one.p for one in model.frame().modules() if isinstance(one, torch.nn.Dropout)}
        for model in (with_dropout, without)
    ]
    assert rates == [{0.1}, {0.0}]
    assert without.to_dict()["resid_pdrop"] == 0.1, "which is what the written model has"


def test_packed_weights_need_an_adapter(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('[model]\npath = "x"\nquantization = "nf4"\n[data]\ntext = ["x"]\n')
    with refuses("job.model.quantization", "nf4"):
        load_job(path)
    keys = {**CASE.config, "quantization_config": {"quant_method": "gptq", "bits": 4}}
    with refuses("model.stored_quantized"):
        read_config(keys)


def test_a_stage_without_targets_is_no_error() -> None:
    embedding = stage(tuning_of(job(), chain()), 0, 1)
    assert embedding.parameters == {}
    y = embedding.forward(MicroBatch(0, 0, 0, 1), torch.zeros(1, 4, dtype=torch.long))
    assert y.shape == (1, 4, 64) and embedding.backward(0, torch.ones_like(y)) is None


def test_start_values_do_not_depend_on_the_partition() -> None:
    tuning = tuning_of(job(), chain())
    whole = stage(tuning, 0, 6).parameters
    parts = {**stage(tuning, 0, 2).parameters, **stage(tuning, 2, 6).parameters}
    assert list(whole) == list(parts) == list(tuning.trainable)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    first, second = (whole[f"model.layers.{i}.self_attn.q_proj.lora_A.weight"] for i in (0, 1))
    assert not torch.equal(first, second) and bool(first.any())
    assert not whole["model.layers.0.self_attn.q_proj.lora_B.weight"].any()


def test_packed_bits_are_bitsandbytes_own_and_survive_evaluation() -> None:
    """bitsandbytes repacks weights in place in eval mode on some CPUs: the bytes must not move between vendors like that."""
    tuning = tuning_of(job("nf4"), chain())
    plain, packed = stage(tuning_of(job(), chain()), 1, 2, "bf16"), stage(tuning, 1, 2, "bf16")
    name = "model.layers.0.self_attn.q_proj"
    layer = packed.model.get_submodule(name).base_layer
    assert isinstance(layer, Linear4bit)
    weight = plain.model.get_submodule(name).base_layer.weight.detach()
    expected, _ = quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
    before = layer.weight.data.clone()
    assert torch.equal(before, expected)
    packed.evaluate(torch.randn(1, 8, 64, dtype=torch.bfloat16))
    assert torch.equal(layer.weight.data, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [40, 64, 96, 100])
def test_products_with_packed_matrices_of_any_row_length(columns: int, dtype: torch.dtype) -> None:
    """bitsandbytes' own CPU kernel is wrong where a block of 64 weights crosses the end of a row."""
    plain = torch.nn.Linear(columns, 128)
    module = torch.nn.Sequential(copy.deepcopy(plain))
    quantize(module, torch.device("cpu"), dtype, True)
    row, state = quantize_4bit(plain.weight.detach().to(dtype).view(1, -1), quant_type="nf4", compress_statistics=True)
    weight = dequantize_4bit(row.view(-1, 1), state).view(128, columns)
    x = torch.randn(2, 3, columns, dtype=dtype, requires_grad=True)
    module(x).backward(dy := torch.randn(2, 3, 128, dtype=dtype))
    assert torch.equal(unpacked(module[0].weight, dtype), weight)
    for inputs in (x.detach(), x.detach()[:1, :1]):
        torch.testing.assert_close(module(inputs), F.linear(inputs, weight, plain.bias.detach().to(dtype)))
    torch.testing.assert_close(x.grad, dy @ weight)


@pytest.mark.parametrize("double", [True, False])
def test_packed_bytes_are_counted_right(double: bool) -> None:
    weight = torch.randn(96, 64)
    data, state = quantize_4bit(weight, blocksize=64, compress_statistics=double, quant_type="nf4")
    held = data.nbytes + state.absmax.nbytes + (state.state2.absmax.nbytes if double else 0)
    assert packed_bytes(weight.numel(), double) == held


def test_costs_of_packed_and_adapted_blocks() -> None:
    """A block: its matrices in NF4, two norms of 64 and adapters in bf16."""
    tuning = tuning_of(job("nf4"), chain())
    cost = model_cost(chain(), tuning, "bf16", 16, dict.fromkeys(chain().kinds, 1.0))
    block = cost.layers[1]
    adapters = sum(spec.count for spec in tuning.specs(1, 2))
    weights = sum(spec.count for spec in chain().specs(1, 2)) - 2 * 64
    assert block.trainable_parameters == adapters
    assert block.parameter_bytes == packed_bytes(weights, True) + 2 * 64 * 2 + adapters * 2
    assert block.workspace_bytes == 128 * 64 * 2
    assert not cost.tied and cost.state_bytes_per_trainable_parameter == 16  # masters, gradients, two moments
    assert cost.layers[0].trainable_parameters == 0


@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_adapters_compute_in_the_models_dtype_and_step_fp32_masters(quantization: str) -> None:
    """In bf16: what is kept for backward holds no fp32 copy of an adapted layer's input, and small steps are not rounded away."""
    tuning = tuning_of(job(quantization, targets=["gate_proj", "down_proj"]), chain())
    narrow, plain = (stage(tuning, 0, chain().layer_count, dtype) for dtype in ("bf16", "fp32"))
    assert not plain.masters and narrow.masters.keys() == narrow.parameters.keys() == tuning.trainable.keys()
    for name, parameter in narrow.parameters.items():
        assert parameter.dtype == torch.bfloat16 and torch.equal(narrow.masters[name], plain.parameters[name])
    optimizer = Optimizer(narrow, TrainTable(steps=2, global_batch=1, dtype="bf16", learning_rate=1e-6))
    tokens, wide = torch.arange(24)[None], []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == torch.float32 and tensor.shape[-1:] == (128,):  # as wide as down_proj's input
            wide.append(tensor.shape)
        return tensor

    name, before = next((n, m.clone()) for n, m in narrow.masters.items() if ".lora_B." in n)
    optimizer.zero()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        narrow.forward(MicroBatch(0, 0, 0, 24), tokens, tokens)
    assert not wide
    narrow.backward(0)
    optimizer.step(0, 1.0)
    after = optimizer.targets[name].detach()
    assert after.dtype == torch.float32 and not torch.equal(after, before)
    assert torch.equal(narrow.parameters[name], after.bfloat16())


@pytest.mark.parametrize("quantization", ["none", "nf4"])
@pytest.mark.parametrize(
    "adapter", [{}, {"dropout": 0.1, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 2.5}}, {"dora": True}]
)
def test_plain_adapters_are_one_function_and_equal_pefts(quantization: str, adapter: dict[str, object]) -> None:
    tuning = tuning_of(job(quantization, targets="all-linear", **adapter), chain())
    tokens, found = torch.arange(24).view(2, 12), []
    for of_peft, recompute in ((False, False), (False, True), (True, False)):
        spec = StageSpec(chain(), 0, chain().layer_count, Backend(), "fp32", 7, tuning, recompute)
        made = Stage(spec, SeededStart(1))
        join_products(made.model)
        for name, parameter in made.parameters.items():
            parameter.data.normal_(0, 0.05, generator=torch.Generator().manual_seed(len(name)))
        layers = [layer for layer in made.model.modules() if hasattr(layer, "lora_A")]
        assert {"forward" in vars(layer) for layer in layers} == {"dora" not in adapter}
        for layer in layers if of_peft else ():
            vars(layer).pop("forward", None)
        loss = made.forward(MicroBatch(0, 0, 0, 24), tokens, tokens)
        made.backward(0)
        gradients = [parameter.grad.flatten() for parameter in made.parameters.values() if parameter.grad is not None]
        assert len(gradients) == len(tuning.trainable)
        found.append((loss, torch.cat(gradients)))
    for ours, recomputed, pefts in zip(*found, strict=True):
        assert torch.equal(ours, recomputed) and (ours - pefts).norm() <= 1e-6 * pefts.norm()


def test_adapter_directories_round_trip_and_are_checked(tmp_path: Path) -> None:
    tuning = tuning_of(job(), chain())
    state = {name: torch.randn(spec.shape) for name, spec in tuning.trainable.items()}
    assert tuning.adapter is not None
    (tmp_path / "a").mkdir()
    write_adapter(tmp_path / "a", tuning, state, "base")
    check_adapter(tmp_path / "a", tuning)
    back = read_adapter(tmp_path / "a", tuning)
    assert all(torch.equal(back[name], state[name]) for name in state)
    assert json.loads((tmp_path / "a" / "adapter_config.json").read_text())["base_model_name_or_path"] == "base"
    with refuses("adapter.setting_differs", "rank = 4", "rank = 8"):
        check_adapter(tmp_path / "a", tuning_of(job(rank=8), chain()))
    with refuses("adapter.targets_differ"):
        check_adapter(tmp_path / "a", tuning_of(job(targets=["q_proj"]), chain()))
    (tmp_path / "a" / "adapter_model.safetensors").write_bytes(b"short")
    with refuses("model.damaged"):
        check_adapter(tmp_path / "a", tuning)
    (tmp_path / "a" / "adapter_model.safetensors").unlink()
    with refuses("adapter.damaged"):
        check_adapter(tmp_path / "a", tuning)
    with refuses("model.file_missing", tmp_path):
        check_adapter(tmp_path, tuning)
