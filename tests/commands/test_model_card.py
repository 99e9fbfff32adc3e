"""The card of an exported model, as the hub's own library reads it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard, ModelCardData

from hetero_mpi.interop.export import CARD, write_card
from hetero_mpi.planning.types.toml_files import plan_to_dict, profile_to_dict
from tests.report.test_looks import LORA
from tests.support.past_runs import cluster, make_run, planned

BASE_CARD = """---
license: other
license_name: llama3.1
license_link: https://example.com/licence
datasets: [somebody/text]
---
# Base
"""


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A run of 40 steps, and the metadata of its checkpoint after step 20."""
    profile = cluster(3)
    profile = replace(profile, devices=tuple(replace(one, host=f"annas-{one.host}") for one in profile.devices))
    job = LORA | {"data": LORA["data"] | {"records": ["/home/anna/a|b.jsonl"]}}
    job["train"] = job["train"] | {"preference": "none"}
    report = planned(profile, 2)
    folder = make_run(tmp_path / "run", report, profile, steps=40, job=job)
    told = {"base_model": "org/base", "job": job, "step": 20, "versions": {"hetero_mpi": "0.1.0", "torch": "2.13"}}
    return folder, told | {"plan": plan_to_dict(report.plan), "profile": profile_to_dict(profile)}


def card_of(tmp_path: Path, run: tuple[Path, dict[str, Any]], kind: str = "adapter", **told: Any) -> ModelCard:
    target, base = tmp_path / "out", tmp_path / "base"
    target.mkdir(exist_ok=True)
    write_card(target, target, run[0] / "checkpoints" / "step-00000020.h5", run[1] | told, base, kind)
    return ModelCard.load(target / CARD)


def said(card: ModelCard) -> dict[str, Any]:
    """The card's metadata, which the hub's library takes."""
    assert isinstance(card.data, ModelCardData)
    return dict(card.data.to_dict())


def test_a_card_tells_what_was_trained_how_and_where(tmp_path: Path, run: tuple[Path, dict[str, Any]]) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / CARD).write_text(BASE_CARD)
    card = card_of(tmp_path, run)
    assert said(card) == {
        "base_model": "org/base", "base_model_relation": "adapter", "library_name": "peft", "pipeline_tag": "text-generation",
        "license": "other", "license_name": "llama3.1", "license_link": "https://example.com/licence", "tags": ["hetero_mpi"],
    }, "the base's data are not this run's"  # fmt: skip
    for words in (
        "# out", "| base | org/base |", "| licence of the base | other |", "LoRA on NF4 weights", "rank 4", ".../a\\|b.jsonl",
        "peak learning rate 0.003", "at step 20 (nats per token)", "Evaluation loss: ",
        "Plan: 2 stages, schedule 1F1B", "card 0", "| embedding, blocks 0-2 |", "hetero_mpi 0.1.0, torch 2.13",
    ):  # fmt: skip
        assert words in card.text, words
    assert not any(secret in card.content for secret in ("anna", "/home", str(tmp_path))), "it may be shown to anybody"
    assert "at step 40" not in card.text, "a checkpoint knows nothing of what came after it"


def test_a_card_in_a_run_has_the_title_of_the_run(tmp_path: Path, run: tuple[Path, dict[str, Any]]) -> None:
    best = run[0] / "best"
    best.mkdir()
    write_card(best, best, run[0] / "checkpoints" / "step-00000020.h5", run[1], None, "adapter")
    assert "# run\n" in ModelCard.load(best / CARD).text


def test_a_merged_model_and_one_from_scratch(tmp_path: Path, run: tuple[Path, dict[str, Any]]) -> None:
    merged = card_of(tmp_path, run, "merged")
    assert said(merged)["library_name"] == "transformers" and said(merged)["base_model_relation"] == "finetune"
    assert "| adapter | added to the weights of the base |" in merged.text
    assert "| licence of the base | unknown |" in merged.text and "license" not in said(merged)
    scratch = card_of(tmp_path, run, "model", base_model=None)
    assert "base_model" not in said(scratch) and "| base | none: trained from scratch |" in scratch.text
    assert "licence of the base" not in scratch.text
    local = card_of(tmp_path, run, "model", base_model=str(tmp_path / "base"))
    assert "base_model" not in said(local) and "| base | base |" in local.text


def test_without_its_run_a_checkpoint_tells_what_it_knows(tmp_path: Path, run: tuple[Path, dict[str, Any]]) -> None:
    card = card_of(tmp_path, (tmp_path / "moved", run[1]))
    assert "Plan: 2 stages" in card.text and "Loss: " not in card.text


@pytest.mark.parametrize(
    ("licence", "kept", "text"),
    [
        ("[mit, apache-2.0]", ["mit", "apache-2.0"], "mit, apache-2.0"),
        *(
            (odd, None, "unrecognised: see the card of the base model")
            for odd in ("3", "true", "{a: 1}", "2020-01-01", r'"\ud800"')
        ),
        ('"a|b <i>: #"', "a|b <i>: #", "a\\|b &lt;i&gt;: #"),
        ("null", None, "unknown"),
    ],
)
def test_a_licence_of_any_form(
    tmp_path: Path, run: tuple[Path, dict[str, Any]], licence: str, kept: Any, text: str
) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / CARD).write_text(f"---\nlicense: {licence}\n---\n")
    card = card_of(tmp_path, run)
    assert said(card).get("license") == kept and f"| licence of the base | {text} |" in card.text


def test_a_card_of_somebody_else_stays(tmp_path: Path, run: tuple[Path, dict[str, Any]]) -> None:
    first = card_of(tmp_path, run).content
    assert card_of(tmp_path, run, "merged").content != first, "its own is written anew"
    (tmp_path / "out" / CARD).write_text("---\nlicense: mit\n---\nmine\n")
    assert said(card_of(tmp_path, run)) == {"license": "mit"}
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / CARD).write_text("---\n: [\n---\n")
    (tmp_path / "out" / CARD).unlink()
    assert "license" not in said(card_of(tmp_path, run)), "a card of the base that cannot be read"
