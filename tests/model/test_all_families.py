"""docs/models.md, the table that decides (model/transformers/supported.py) and what a trial of each family sees are the same."""

from __future__ import annotations

import inspect
import re
import sys

import pytest
import torch
import transformers

from hetero_mpi.errors import UserError
from hetero_mpi.model.transformers.chain import TransformersChain, build_on_meta
from hetero_mpi.model.transformers.families import read_config
from hetero_mpi.model.transformers.supported import (
    LEAKING_FAMILIES,
    MASKED_FAMILIES,
    PROVEN_FAMILIES,
    REFUSED_FAMILIES,
    ROUTER_LOSS_FAMILIES,
)
from tests.family_trial import DOCUMENT, Different, row, try_family
from tests.support.family_configs import families, tiny_keys

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


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()


def lines() -> list[str]:
    return DOCUMENT.read_text(encoding="utf-8").splitlines()


def test_the_document_holds_the_families_of_the_code() -> None:
    proven = [line.split(" | ")[0][2:] for line in lines() if "| proven |" in line]
    assert tuple(proven) == PROVEN_FAMILIES == tuple(sorted(PROVEN_FAMILIES))
    leaking = {line.split(" | ")[0][2:] for line in lines() if line.endswith(("| no |  |", "| no | yes |"))}
    routed = tuple(line.split(" | ")[0][2:] for line in lines() if line.endswith(("| yes | yes |", "| no | yes |")))
    assert (
        routed == ROUTER_LOSS_FAMILIES
        and leaking == set(LEAKING_FAMILIES)
        and set(MASKED_FAMILIES) <= set(PROVEN_FAMILIES) - leaking
    )
    for family in REFUSED_FAMILIES:
        assert row(family, None) in lines()
    assert not set(PROVEN_FAMILIES) & set(REFUSED_FAMILIES)
    assert re.search(rf"^{len(PROVEN_FAMILIES)} of the \d+ causal-LM families", DOCUMENT.read_text(), re.MULTILINE)


def test_every_family_with_a_pipeline_plan_is_decided() -> None:
    assert set(families()) <= set(PROVEN_FAMILIES) | set(REFUSED_FAMILIES)


@pytest.mark.parametrize("family", UNLIKE)
def test_unlike_families(family: str) -> None:
    assert row(family, try_family(family)) in lines()


@pytest.mark.long
@pytest.mark.parametrize("family", PROVEN_FAMILIES)
def test_proven_families(family: str) -> None:
    assert row(family, try_family(family)) in lines()


@pytest.mark.parametrize("family", sorted(set(REFUSED_FAMILIES) & set(families()) - {"phi4_multimodal"}))
def test_refused_families_cannot_be_split(family: str) -> None:
    with pytest.raises((UserError, ValueError, Different)):  # when this fails the family may have become provable
        try_family(family)


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
    with pytest.raises(UserError, match=r"gemma3n_text.*per-layer embeddings"):
        read_config({"model_type": "gemma3n_text"})
    with pytest.raises(UserError, match=r"gpt2.*no pipeline plan"):
        read_config({"model_type": "gpt2"})


def test_settings_that_splitting_cannot_keep_are_refused() -> None:
    with pytest.raises(UserError, match="num_kv_shared_layers = 2"):
        read_config({**tiny_keys("gemma4_text"), "num_kv_shared_layers": 2})
    with pytest.raises(UserError, match="outside the pipeline plan"):
        TransformersChain(read_config({**tiny_keys("gemma4_text"), "hidden_size_per_layer_input": 8}))
