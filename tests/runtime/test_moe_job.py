"""jobs/moe_nf4.toml in small: its result does not depend on the plan, and peft and transformers read it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from hetero_mpi.interop.export import export
from tests import family_trial
from tests.support.family_configs import tiny_keys
from tests.support.jobs import Outcome, Workshop
from tests.support.mpi import ROOT

pytestmark = pytest.mark.long
JOB = ROOT / "jobs" / "moe_nf4.toml"
SMALL = {
    "train.steps": 2, "train.global_batch": 4, "train.micro_batch": 2, "train.dtype": "fp32", "train.warmup_steps": 0,
    "train.learning_rate": 2e-3, "data.sequence_length": 64, "data.template": "plain", "checkpoint.every": 1,
    "plan.allow_idle": False, "plan.pipelines": 1,
}  # fmt: skip
SIZES = {"hidden_size": 64, "moe_intermediate_size": 64, "max_position_embeddings": 256, "tie_word_embeddings": False}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Outcome]]:
    """On three ranks: the job, then the same with its middle stage streamed, and resumed from its first checkpoint."""
    root = tmp_path_factory.mktemp("moe")
    shop, model = Workshop(root), root / "model"
    family_trial._whole_model(family_trial._config({**tiny_keys("qwen3_moe"), **SIZES}), str(model))
    shutil.copytree(shop.tokenizer, model, dirs_exist_ok=True)
    given = [f"{key}={json.dumps(value)}" for key, value in {**SMALL, "model.path": str(model)}.items()]

    def entry(name: str, **more: object) -> dict[str, object]:
        return {"job": JOB, "run_dir": root / name, "set": given, **more}

    outcomes = shop.run_entries(3, {"plain": entry("plain")})
    plan = (root / "plain" / "plan.toml").read_text()
    (root / "streamed.toml").write_text(plan.replace("streamed = false", "streamed = true"))
    shutil.copytree(root / "plain", root / "resumed")
    (root / "resumed" / "checkpoints" / "step-00000002.h5").unlink()
    outcomes |= shop.run_entries(
        3, {"streamed": entry("streamed", plan=root / "streamed.toml"), "resumed": entry("resumed", resume="latest")}
    )
    return root, outcomes


def losses(outcome: Outcome) -> list[str]:
    return re.findall(r"(?:step 2/2  |step 2: evaluation )loss [\d.]+", outcome.printed)


def test_streamed_and_resumed_runs_are_the_same_np3(runs: tuple[Path, dict[str, Outcome]]) -> None:
    _, outcomes = runs
    assert all(outcome.raised == ("",) * 3 for outcome in outcomes.values()), outcomes
    assert "Plan: 3 stages" in outcomes["plain"].printed
    assert losses(outcomes["plain"]) == losses(outcomes["streamed"]) == losses(outcomes["resumed"])
    assert len(losses(outcomes["plain"])) == 2


def test_the_adapter_and_the_merged_model_np3(runs: tuple[Path, dict[str, Outcome]], tmp_path: Path) -> None:
    root, _ = runs
    export(root / "plain", tmp_path / "merged", merge=True)
    tokens = torch.arange(40).view(2, 20) * 7 % 320
    base, merged = (
        AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32) for p in (root / "model", tmp_path / "merged")
    )
    with torch.no_grad():
        before = base(input_ids=tokens).logits
        expected = PeftModel.from_pretrained(base, root / "plain" / "adapter")(input_ids=tokens).logits
        assert (expected - before).norm() > 1e-3 * before.norm(), "the adapter does nothing"
        assert (merged(input_ids=tokens).logits - expected).norm() < 1e-5 * expected.norm()
