"""docs/models.md, the table that decides (model/transformers/supported.py) and what a trial of each family sees are the same."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hetero_mpi.model.files.model_files import ModelFiles
from hetero_mpi.model.transformers.chain import TransformersChain, build_on_meta
from hetero_mpi.model.transformers.families import read_config
from hetero_mpi.model.transformers.stored_model import stored_model
from hetero_mpi.model.transformers.supported import (
    LEAKING_FAMILIES,
    MASKED_FAMILIES,
    PROVEN_FAMILIES,
    REFUSED_FAMILIES,
    ROUTER_LOSS_FAMILIES,
)
from hetero_mpi.model.transformers.weights import FileStart
from hetero_mpi.util.errors import UserError
from tests.family_trial import DOCUMENT, Different, row, try_family
from tests.support.errors import refuses
from tests.support.family_configs import VOCABULARY, families, tiny_keys

UNLIKE = (
    "gemma2",  # tied by default, soft-capping, two kinds of attention
    "gpt_neox",  # other names, parallel residual, a dropout module after the embedding
    "granite",  # scales its embeddings outside of the embedding
    "mixtral",  # experts that are separate in the files and fused in memory
    "deepseek_v3",  # latent attention, a router correction that is no parameter
    "olmo_hybrid",  # linear attention, tensors that stay in fp32
    "starcoder2",  # dropout between embedding and blocks
    "gemma4_unified_text",  # a constant factor per block
    "gpt_oss",  # packed records need finished masks
)
"""Families that differ in structure, tried in the normal suite; the long one tries all."""


def lines() -> list[str]:
    return DOCUMENT.read_text(encoding="utf-8").splitlines()


def test_the_document_holds_the_families_of_the_code() -> None:
    table = "\n".join(lines()).partition("## New tokens")[0]
    notes = dict(re.findall(r"^\| (\w+) \| .* \|(.*) \|$", table, re.M)[1:])  # beside the head
    assert tuple(notes) == PROVEN_FAMILIES == tuple(sorted(PROVEN_FAMILIES))
    leaking = {family for family, text in notes.items() if "not isolated" in text}
    routed = tuple(family for family, text in notes.items() if "router loss" in text)
    assert (
        routed == ROUTER_LOSS_FAMILIES
        and leaking == set(LEAKING_FAMILIES)
        and set(MASKED_FAMILIES) <= set(PROVEN_FAMILIES) - leaking
    )
    for family in REFUSED_FAMILIES:
        assert row(family, None) in lines()
    assert not set(PROVEN_FAMILIES) & set(REFUSED_FAMILIES)
    told = re.search(
        r"^(\d+) of the (\d+) causal-LM families for which transformers (\S+) has", "\n".join(lines()), re.M
    )
    assert told is not None and int(told[1]) == len(PROVEN_FAMILIES)
    if told[3] == transformers.__version__:
        assert int(told[2]) == len(families())


@pytest.mark.long
def test_every_family_with_a_pipeline_plan_is_decided() -> None:
    """A release of transformers may bring others: they are refused as not tried, until a trial decides."""
    assert set(families()) <= set(PROVEN_FAMILIES) | set(REFUSED_FAMILIES)


def test_a_family_that_nobody_has_tried_is_refused_with_the_way_to_try_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if transformers had just brought llama; and as if the installed one did not know it."""
    with monkeypatch.context() as patch:
        patch.setattr("hetero_mpi.model.transformers.families.PROVEN_FAMILIES", ("mistral", "qwen3"))
        command = "`OMP_NUM_THREADS=1 python -m tests.family_trial llama`"
        with refuses("model.family_untried", "'llama'", transformers.__version__, command):
            read_config(tiny_keys("llama"))
    monkeypatch.setattr("hetero_mpi.model.transformers.families.CONFIG_MAPPING", {"qwen3": None})
    with refuses("model.family_unknown", "'llama'", transformers.__version__):
        read_config(tiny_keys("llama"))


@pytest.mark.slow
@pytest.mark.parametrize("family", UNLIKE)
def test_unlike_families(family: str) -> None:
    assert row(family, try_family(family)) in lines()


@pytest.mark.long
@pytest.mark.parametrize("family", PROVEN_FAMILIES)
def test_proven_families(family: str) -> None:
    assert row(family, try_family(family)) in lines()


READ_BACK = ("longcat_flash", "lara_mini", "sarvam_moe", "mixtral", "gpt_neox")
"""Families whose files name blocks or tensors otherwise than the model."""


@pytest.mark.parametrize(
    "family",
    [*READ_BACK, *(pytest.param(one, marks=pytest.mark.slow) for one in sorted({*PROVEN_FAMILIES} - {*READ_BACK}))],
)
def test_a_model_that_transformers_saves_is_read_back(family: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(read_config(tiny_keys(family)))
    model.save_pretrained(tmp_path)
    files, values = ModelFiles(tmp_path), model.state_dict()
    stored = stored_model(files)
    assert stored.notes == ()
    chain = TransformersChain(read_config(stored.config))
    start = FileStart(files, chain)
    for layer in range(chain.layer_count):
        built = build_on_meta(read_config(stored.config))
        start.fill(chain, built, layer)
        for spec in (*chain.specs(layer, layer + 1), *chain.constant_specs(layer, layer + 1)):
            assert torch.equal(built.get_parameter_or_buffer(spec.name).float(), values[spec.name].float()), spec.name
    assert {*chain.parameters} <= start.dtypes.keys()


@pytest.mark.parametrize("family", sorted(set(REFUSED_FAMILIES) & set(families()) - {"phi4_multimodal"}))
def test_refused_families_cannot_be_split(family: str) -> None:
    with pytest.raises((UserError, ValueError, Different)):  # when this fails the family may have become provable
        try_family(family)


@pytest.mark.slow
def test_transformers_computes_the_loss_of_routers_in_one_way() -> None:
    """In the families that are taken; doge, whose experts are found by two keys, has another."""
    found: dict[str, list[str]] = {}
    for family in PROVEN_FAMILIES:
        model = type(build_on_meta(read_config(tiny_keys(family))))
        function = getattr(sys.modules[model.__module__], "load_balancing_loss_func", None)
        if function is not None:
            found.setdefault(inspect.getsource(function), []).append(family)
    assert sorted(found.values()) == [["doge"], list(ROUTER_LOSS_FAMILIES)]


def test_refusals_name_the_reason() -> None:
    with refuses("model.family_refused", "gemma3n_text"):
        read_config({"model_type": "gemma3n_text"})
    undeclared = next(
        name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in {*families(), *REFUSED_FAMILIES}
    )
    with refuses("model.family_refused"):
        read_config({"model_type": undeclared})


def test_settings_that_splitting_cannot_keep_are_refused() -> None:
    with refuses("model.shared_keys"):
        read_config({**tiny_keys("gemma4_text"), "num_kv_shared_layers": 2})
    with refuses("model.stray_parameters"):
        TransformersChain(read_config({**tiny_keys("gemma4_text"), "hidden_size_per_layer_input": 8}))
    if "apertus1p5_text" in CONFIG_MAPPING:
        read_config({**tiny_keys("apertus1p5_text"), "output_vocab_size": VOCABULARY})
        with refuses("model.output_vocabulary"):
            read_config({**tiny_keys("apertus1p5_text"), "output_vocab_size": 300})
