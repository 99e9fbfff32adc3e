"""The dense families, cut into three stages, give the whole model's numbers. One process, no MPI."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.integrations import sdpa_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hetero_mpi.device.backend import Backend
from hetero_mpi.job.training_tables import AdapterTable
from hetero_mpi.model.adapters.adapter_tuning import adapter_tuning
from hetero_mpi.model.files.model_files import ModelFiles
from hetero_mpi.model.layer.interface import Start
from hetero_mpi.model.layer.loss import IGNORED
from hetero_mpi.model.layer.micro_batch import StepData
from hetero_mpi.model.stage import MicroBatch, Stage
from hetero_mpi.model.transformers.chain import TransformersChain
from hetero_mpi.model.transformers.families import read_config
from hetero_mpi.model.transformers.packed_records import attention
from hetero_mpi.model.transformers.weights import FileStart, SeededStart
from tests.support.errors import refuses
from tests.support.group_cases import batch
from tests.support.operations import Operations
from tests.support.stages import stage_of, trained_once

BLOCKS = 4
LAYERS = BLOCKS + 2
CUTS = (0, 2, 5, LAYERS)
DENSE = ("gemma", "gemma2", "gpt_neox", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3")
"""Families that the keys below fit; ``test_all_families.py`` has them all."""
EVERY_FAMILY = pytest.mark.parametrize("family", DENSE)
TIED = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])


def keys(family: str, tied: bool) -> dict[str, object]:
    """Windows are shorter than the sequences, for masks to matter; weights are so large that gradients are far from rounding."""
    sizes = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": BLOCKS, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "sliding_window": 8}
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
    return {"model_type": family, **sizes, **heads, **tokens, "tie_word_embeddings": tied, "initializer_range": 0.2}


def whole_model(family: str, tied: bool) -> PreTrainedModel:
    torch.manual_seed(5)
    arguments = {name: value for name, value in keys(family, tied).items() if name != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **arguments), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim < 2:  # norms and biases start as ones and zeros: mistakes there would not show
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.train()


def cut(chain: TransformersChain, start: Start, cuts: tuple[int, ...] = CUTS) -> list[Stage]:
    return [stage_of(chain, first, last, Backend(), "fp32", start) for first, last in pairwise(cuts)]


def chain_of(family: str, tied: bool) -> TransformersChain:
    return TransformersChain(read_config(keys(family, tied)))


def run_stages(stages: list[Stage]) -> float:
    """Forward and backward through all stages; returns the loss, the mean over the targets."""
    tokens, targets = batch()
    position = MicroBatch(0, 0, 0, int((targets != IGNORED).sum()))
    return trained_once(stages, position, tokens, targets)


def gradients(stages: list[Stage], chain: TransformersChain) -> dict[str, torch.Tensor]:
    """name -> gradient, the head's share of a tied matrix added to the embedding's as the trainer does."""
    found = {name: p.grad for stage in stages for name, p in stage.parameters.items() if p.grad is not None}
    if chain.tied is not None:
        head = stages[-1].tied_head
        assert head is not None and head.grad is not None
        found[chain.tied[1]] = found[chain.tied[1]] + head.grad
    return found


@TIED
@EVERY_FAMILY
def test_three_stages_equal_the_whole_model(family: str, tied: bool, tmp_path: Path) -> None:
    model, chain = whole_model(family, tied), chain_of(family, tied)
    assert chain.layer_count == LAYERS and (chain.tied is not None) is tied
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    files = ModelFiles(tmp_path)
    assert len(files.files) > 1
    stages = cut(chain, FileStart(files, chain))
    loss = run_stages(stages)

    tokens, targets = batch()
    logits = model(input_ids=tokens, use_cache=False).logits.float()
    summed = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    expected = summed / (targets != IGNORED).sum()
    expected.backward()

    assert loss == expected.item()
    found = gradients(stages, chain)
    assert set(found) == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.norm() > 0, f"{name}: the comparison would be empty"
        difference = (found[name] - parameter.grad).norm() / parameter.grad.norm()
        # The order in which autograd adds the two shares of a tied matrix is its own affair.
        limit = 1e-6 if chain.tied is not None and name == chain.tied[1] else 0.0
        assert difference <= limit, (name, difference)


class Repeats(Backend):
    """A device with fused attention only where every head has keys and values of its own."""

    def shares_keys(self, dtype: torch.dtype) -> bool:
        return False


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("backend, heads_of_keys", [(Backend(), 2), (Repeats(), 4)])
def test_keys_are_repeated_where_attention_would_else_keep_all_scores(
    monkeypatch: pytest.MonkeyPatch, backend: Backend, heads_of_keys: int, recompute: bool
) -> None:
    """And only in this stage: transformers is as before between its passes."""
    before = sdpa_attention.use_gqa_in_sdpa, ALL_ATTENTION_FUNCTIONS["sdpa"]
    calls = []
    attention = F.scaled_dot_product_attention

    def seen(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        calls.append((key.shape[1], value.shape[1], options.get("enable_gqa", False)))
        return attention(query, key, value, **options)

    chain = chain_of("llama", False)
    whole = cut(chain, SeededStart(0), (0, chain.layer_count))
    loss = run_stages(whole)
    monkeypatch.setattr(F, "scaled_dot_product_attention", seen)
    stage = stage_of(chain, 0, chain.layer_count, backend, "fp32", SeededStart(0), recompute=recompute)
    assert run_stages([stage]) == pytest.approx(loss, rel=1e-6)
    assert calls == [(heads_of_keys, heads_of_keys, heads_of_keys == 2)] * BLOCKS * (1 + recompute)
    assert before == (sdpa_attention.use_gqa_in_sdpa, ALL_ATTENTION_FUNCTIONS["sdpa"])
    expected = gradients(whole, chain)
    for name, gradient in gradients([stage], chain).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)


def test_transformers_attention_is_its_own_again_however_passes_overlap() -> None:
    def now() -> tuple[Any, Any]:
        return sdpa_attention.use_gqa_in_sdpa, ALL_ATTENTION_FUNCTIONS["sdpa"]

    before, first, second = now(), attention([[24]], True), attention(None, True)
    first.__enter__()
    second.__enter__()
    assert now()[0] is not before[0] and now()[1] is not before[1]
    first.__exit__(None, None, None)
    assert now()[0] is not before[0] and now()[1] is before[1]
    second.__exit__(None, None, None)
    assert now() == before


def positions_of(*records: list[int]) -> torch.Tensor:
    return torch.stack([torch.cat([torch.arange(length) for length in lengths]) for lengths in records])


@pytest.mark.parametrize("records", [None, [7, 9, 8]], ids=["one text", "packed"])
@pytest.mark.parametrize("family", ["gemma2", "llama", "mistral", "qwen3"])
def test_forward_does_not_wait_for_the_device(family: str, records: list[int] | None) -> None:
    """transformers' own does: it looks whether records are packed."""
    tokens, targets = batch()
    positions = None if records is None else positions_of(records, [24])
    with Operations() as operations:
        whole_model(family, False)(input_ids=tokens, position_ids=positions, use_cache=False)
    assert operations.count("_local_scalar_dense") > 0
    for stage in cut(chain_of(family, False), SeededStart(0)):
        with Operations() as operations:
            tokens = stage.forward(MicroBatch(0, 0, 0, 33, positions), tokens, targets if stage.is_last else None)
        assert operations.calls and operations.count("_local_scalar_dense") == 0


def test_packed_records_move_hardly_more_bytes_than_joined_ones() -> None:
    tokens, chain = torch.arange(8 * 256).view(8, 256) % 320, chain_of("llama", False)
    moved = []
    for positions in (None, positions_of(*[[16] * 16] * 8)):
        (stage,) = cut(chain, SeededStart(0), (0, LAYERS))
        stage.forward(MicroBatch(0, 0, 0, 2048, positions), tokens, tokens)
        with Operations() as operations:
            stage.backward(0)
        moved.append(operations.moved_bytes)
    assert 0 < moved[1] <= 1.2 * moved[0]


def test_records_are_read_from_host_memory() -> None:
    records = [[24], [7, 9, 8], [20, 4]]
    on_device = torch.empty((3, 24), dtype=torch.int64, device="meta")
    data = StepData(0, (1, 2), (0, 1), 24, None, None, on_device, 1.0, host_positions=positions_of(*records))
    assert [data.micro_batch(index).records for index in range(2)] == [records[:1], records[1:]]


@pytest.mark.parametrize("dropout, adapter_dropout", [(0.0, None), (0.1, None), (0.0, 0.0), (0.0, 0.1)])
def test_recomputing_keeps_states_of_random_numbers_only_where_some_are_drawn(
    monkeypatch: pytest.MonkeyPatch, dropout: float, adapter_dropout: float | None
) -> None:
    chain = TransformersChain(read_config({**keys("llama", False), "attention_dropout": dropout}))
    tuning = None
    if adapter_dropout is not None:
        tuning = adapter_tuning(chain, AdapterTable(method="lora", rank=2, dropout=adapter_dropout), False, False)
    kept, once = (
        stage_of(chain, 0, chain.layer_count, Backend(), "fp32", SeededStart(0), tuning=tuning, recompute=recompute)
        for recompute in (False, True)
    )
    loss, states, state_of = run_stages([kept]), [], torch.get_rng_state
    monkeypatch.setattr(torch, "get_rng_state", lambda: states.append(1) or state_of())  # type: ignore[func-returns-value]
    assert run_stages([once]) == loss
    assert bool(states) is (dropout > 0 or bool(adapter_dropout))
    expected = gradients([kept], chain)
    for name, gradient in gradients([once], chain).items():
        assert torch.equal(gradient, expected[name]), name


@TIED
@EVERY_FAMILY
def test_seeded_start_does_not_depend_on_the_partition(family: str, tied: bool) -> None:
    chain = chain_of(family, tied)
    whole = cut(chain, SeededStart(3), (0, LAYERS))[0]
    for cuts in (CUTS, (0, 1, LAYERS), (0, LAYERS - 1, LAYERS)):
        stages = cut(chain, SeededStart(3), cuts)
        found = {name: parameter for stage in stages for name, parameter in stage.parameters.items()}
        assert found.keys() == whole.parameters.keys()
        for name, parameter in whole.parameters.items():
            assert torch.equal(found[name], parameter), (name, cuts)
        if tied:
            assert torch.equal(stages[-1].tied_head, whole.tied_head)
    matrices = [p for p in whole.parameters.values() if p.ndim >= 2]
    assert all(0.15 < p.std() < 0.25 for p in matrices), "the family's own rule: initializer_range"
    other = cut(chain, SeededStart(4), (0, LAYERS))[0]
    assert not any(torch.equal(other.parameters[name], p) for name, p in whole.parameters.items() if p.ndim >= 2), (
        "another seed gives other weights"
    )


@pytest.mark.parametrize(
    ("family", "kind", "shown"),
    [
        ("gpt2", "model.family_refused", "Supported: "),
        ("hrm_text", "model.family_refused", "Supported: "),
        ("lama", "model.family_unknown", "'llama'"),
        ("zzz", "model.family_unknown", 86),
    ],
)
def test_other_families_are_refused_by_name(family: str, kind: str, shown: str) -> None:
    with refuses(kind, repr(family), shown):
        read_config({"model_type": family})


def test_the_dtype_auto_says_nothing() -> None:
    assert read_config({**keys("llama", False), "dtype": "auto"}).dtype == read_config(keys("llama", False)).dtype
