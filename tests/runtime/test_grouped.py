"""A model of which a layer is larger than every rank is trained by two ranks together, as one process would."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from hetero_mpi.planning.schedule import COMPUTE
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan
from hetero_mpi.planning.types.toml_files import load_report, save_plan
from hetero_mpi.rundir.metrics import read_metrics
from hetero_mpi.rundir.rank_steps import read_rank_steps
from hetero_mpi.state.directory import checkpoint_path
from hetero_mpi.state.reader import CheckpointReader
from tests.runtime.test_equality import IN_GROUPS, tensors
from tests.stand_in_gpu import COUNTERS, THROUGH, backend, build
from tests.support.jobs import GLOBAL_BATCH, SEQUENCE, Workshop, write_profile

pytestmark = pytest.mark.slow

WORDS = 20_000
ENOUGH, LITTLE = 10**9, 10_700_000
"""Bytes of a rank. Embedding and head are one matrix of 640,000 numbers, in all 12.8 MB with gradients and moments."""
RUNS = ("staged", "resumed", "back")


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("grouped"))


def entry(workshop: Workshop, name: str, memory_bytes: int, **plan: Any) -> dict[str, Any]:
    values = workshop.values(workshop.model("words", tied=True, vocab_size=WORDS, num_key_value_heads=2))
    tables = {
        "cluster": {"memory_bytes": memory_bytes},
        "plan": {"pipelines": "auto", **plan},
        "train": {"global_batch": 1},
    }
    return {"job": workshop.job(name, values, **tables), "run_dir": workshop.directory / name}


def two_ranks(*stages: StagePlan) -> Plan:
    return Plan((PipelinePlan(stages, 1, GLOBAL_BATCH),), GLOBAL_BATCH, SEQUENCE, 4)


def losses(folder: Path) -> list[float]:
    return [step.loss for step in read_metrics(folder / "metrics.jsonl").steps]


def test_a_layer_larger_than_every_rank_is_trained_by_two_of_them_np2(workshop: Workshop) -> None:
    named = {
        "refused": entry(workshop, "refused", LITTLE, groups=False, stream=False),
        "grouped": entry(workshop, "grouped", LITTLE),
    }
    outcomes = workshop.run_entries(2, named)
    assert outcomes["refused"].raised == ("CollectiveUserError",) * 2, outcomes["refused"]
    assert "the model does not fit in memory on these ranks" in outcomes["refused"].texts[0]
    assert outcomes["grouped"].raised == ("",) * 2, outcomes["grouped"]
    report = load_report(workshop.directory / "grouped" / "plan.toml")
    assert [stage.ranks for _, _, stage in report.plan.numbered] == [(0, 1)]
    assert "no plan without ranks that hold a stage together fits in memory" in report.reasons
    alone = workshop.run_entries(1, {"alone": entry(workshop, "alone", ENOUGH)})
    assert alone["alone"].raised == ("",), alone
    expected, found = (losses(workshop.directory / name) for name in ("alone", "grouped"))
    assert found == pytest.approx(expected, rel=IN_GROUPS) and len(set(expected)) == 4
    for one in read_rank_steps(workshop.directory / "grouped" / "steps.jsonl"):
        computed = [event for event in one.events if event.action.op in COMPUTE]
        assert computed and all(0 < event.exchanged_s < event.end_s - event.start_s for event in computed)
        assert one.usage.computing_s > 0 and one.usage.group_s > 0


def test_a_plan_with_a_group_that_the_job_cannot_have_is_refused_with_the_setting_in_the_way(
    workshop: Workshop,
) -> None:
    plan, name = workshop.directory / "group.plan.toml", "unlike"
    save_plan(two_ranks(StagePlan((0, 1), 0, 4, 0, shares=(1, 1))), plan)
    values = workshop.values(workshop.model(name, num_key_value_heads=2, attention_dropout=0.1))
    entry = {"job": workshop.job(name, values), "run_dir": workshop.directory / name, "plan": plan}
    outcome = workshop.run_entries(2, {"refused": entry})["refused"]
    assert outcome.raised == ("CollectiveUserError",) * 2 and "attention_dropout = 0.1" in outcome.texts[0], outcome


def test_a_checkpoint_of_two_stages_is_resumed_by_a_group_of_both_ranks_np2(workshop: Workshop) -> None:
    """Masters and moments that two ranks have whole are cut for both; and what the group saves, two stages take up."""
    there_and_back(workshop, workshop.model("narrow", num_key_value_heads=2), StagePlan((0, 1), 0, 4, 0, shares=(1, 1)))


def test_a_checkpoint_of_two_stages_is_resumed_by_a_rank_with_all_heads_and_one_with_most_experts_np2(
    workshop: Workshop,
) -> None:
    """The first rank, which leads and owns what is saved, has neither heads nor words of the matrix at both ends; routers have a
    loss."""
    routers = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
    experts = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, **routers}
    model = workshop.model("experts", tied=True, num_key_value_heads=2, **experts)
    there_and_back(workshop, model, StagePlan((0, 1), 0, 4, 0, shares=(0, 2), experts=(3, 1)))
    same_tensors(workshop, model)


def test_a_group_trains_what_depends_on_whole_layers_np2(workshop: Workshop) -> None:
    """Masks and magnitudes of adapters are those of one rank, in memory and in checkpoints."""
    adapter = {"method": "lora", "rank": 4, "alpha": 8, "dora": True, "dropout": 0.2}
    model = workshop.model("adapted", num_key_value_heads=2)
    there_and_back(workshop, model, StagePlan((0, 1), 0, 4, 0, shares=(1, 1)), adapter=adapter)
    same_tensors(workshop, model)
    begun = {
        "job": workshop.directory / f"{model.name}.toml",
        "profile": workshop.directory / f"{model.name}.made.toml",
    }
    plan, folder = workshop.directory / "grouped.plan.toml", workshop.directory / f"{model.name}-begun"
    outcome = workshop.run_entries(2, {"begun": {**begun, "plan": plan, "run_dir": folder}})["begun"]
    assert outcome.raised == ("",) * 2, outcome
    assert losses(folder) == pytest.approx(losses(workshop.directory / f"{model.name}-staged"), rel=IN_GROUPS)


def test_a_group_keeps_moments_in_8_bits_np2(workshop: Workshop) -> None:
    """Cuts fall between blocks of 256, by rows and by columns, and blocks have their scales in every plan. The MLP's two inner
    matrices are one."""
    sizes = {
        "model_type": "glm",
        "pad_token_id": 0,
        "attention_bias": False,
        "hidden_size": 128,
        "intermediate_size": 768,
        "head_dim": 256,
    }
    model = workshop.model("blocks", num_attention_heads=2, num_key_value_heads=2, **sizes)
    train = {"optimizer": "adamw_8bit"}
    there_and_back(workshop, model, StagePlan((0, 1), 0, 4, 0, shares=(1, 1)), train=train)
    expected, *others = (tensors(workshop.directory / f"{model.name}-{name}", 4) for name in RUNS)
    scales = {key for key in expected if key[0].startswith("absmax")}
    assert {name.rpartition("proj")[0][-2:] for _, name in scales} >= {"q_", "o_", "n_", "p_"}
    for found in others:
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            if key in scales or key[0] == "parameters":
                assert np.linalg.norm(found[key] - tensor) <= 2e-3 * np.linalg.norm(tensor), key
            elif tensor.dtype == np.uint8:  # now and then a number gets the next code
                assert np.mean(found[key] != tensor) < 0.01, key


def same_tensors(workshop: Workshop, model: Path) -> None:
    expected, *others = (tensors(workshop.directory / f"{model.name}-{name}", 4) for name in RUNS)
    for found in others:
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            assert np.linalg.norm(found[key] - tensor) <= 1e-4 * np.linalg.norm(tensor), key


ADAPTER = {
    "method": "lora",
    "rank": 4,
    "alpha": 8,
    "targets": ["q_proj", "o_proj"],
    "parameters": ["experts.gate_up_proj", "experts.down_proj"],
}
MIXTRAL = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}


def test_adapters_on_experts_go_to_a_group_and_back_and_peft_reads_them_np2(workshop: Workshop) -> None:
    model = workshop.model("adapted-experts", tied=True, **MIXTRAL)
    there_and_back(workshop, model, StagePlan((0, 1), 0, 4, 0, shares=(2, 0), experts=(1, 3)), adapter=ADAPTER)
    runs = [workshop.directory / f"{model.name}-{name}" for name in RUNS]
    expected, *others = (tensors(run, 4) for run in runs)
    for found in others:
        assert found.keys() == expected.keys() and sum(".experts." in name for _, name in found) >= 8
        for key, tensor in expected.items():
            assert np.linalg.norm(found[key] - tensor) <= 1e-4 * np.linalg.norm(tensor), key
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    read = PeftModel.from_pretrained(base, runs[1] / "adapter").state_dict()
    with CheckpointReader(checkpoint_path(runs[1] / "checkpoints", 4)) as whole:
        for name in whole.names("parameters"):
            end = name.replace(".lora_A.", ".lora_A.default.").replace(".lora_B.", ".lora_B.default.")
            assert torch.equal(read[f"base_model.model.{end}"], torch.from_numpy(whole.read("parameters", name)[0])), (
                name
            )


UNLIKE: dict[str, tuple[dict[str, Any], float]] = {
    "all": ({}, IN_GROUPS),
    "bf16": ({"adapter": ADAPTER, "train": {"dtype": "bf16"}}, 4e-3),  # routers choose otherwise now and then
    "nf4": ({"adapter": ADAPTER, "model": {"quantization": "nf4"}}, IN_GROUPS),
}
"""Name -> (tables of its job, how near the losses are to those of one process)."""


def test_a_gpu_has_the_heads_and_a_processor_beside_it_the_experts_np2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (reason := build.missing()) is not None:
        pytest.skip(reason)
    monkeypatch.setenv(backend.COUNT, "1")
    shop, alone = Workshop(tmp_path, THROUGH), Workshop(tmp_path)
    model = shop.model("unlike", **MIXTRAL, hidden_size=64, intermediate_size=64, head_dim=64)
    plan = tmp_path / "unlike.plan.toml"
    save_plan(two_ranks(StagePlan((0, 1), 0, 4, 0, shares=(2, 0), experts=(0, 4))), plan)
    values = shop.values(model)
    values["train"]["dtype"] = "fp32"  # for which the processor decides, and a GPU would not
    jobs = {name: shop.job(name, values, **tables) for name, (tables, _) in UNLIKE.items()}
    given = {
        name: {
            "job": job,
            "plan": plan,
            "profile": write_profile(tmp_path / f"{name}.made.toml", job, 2),
            "run_dir": tmp_path / f"{name}-group",
        }
        for name, job in jobs.items()
    }
    found = shop.run_entries(2, given)
    assert {outcome.raised for outcome in found.values()} == {("", "")}, found
    counters = [
        json.loads(line.partition(COUNTERS)[2]) for line in shop.printed_errors.splitlines() if COUNTERS in line
    ]
    assert {one["rank"]: one["operators"] > 0 for one in counters} == {0: True, 1: False}
    expected = alone.run_entries(1, {n: {"job": job, "run_dir": tmp_path / f"{n}-alone"} for n, job in jobs.items()})
    assert {outcome.raised for outcome in expected.values()} == {("",)}, expected
    for name, (_, limit) in UNLIKE.items():
        ours, one = (losses(tmp_path / f"{name}-{how}") for how in ("group", "alone"))
        assert ours == pytest.approx(one, rel=limit) and len(set(one)) == 4, name


def there_and_back(workshop: Workshop, model: Path, group: StagePlan, **tables: dict[str, Any]) -> None:
    """Two stages for four steps; the group from their first checkpoint; two stages again from its third."""
    job = workshop.job(model.name, workshop.values(model), **tables)
    profile = write_profile(workshop.directory / f"{model.name}.made.toml", job, 2)
    plans = {
        "staged": two_ranks(StagePlan((0,), 0, 2, 1), StagePlan((1,), 2, 4, 0)),
        "grouped": two_ranks(group),
    }
    for name, plan in plans.items():
        save_plan(plan, workshop.directory / f"{name}.plan.toml")
    folders = {name: workshop.directory / f"{model.name}-{name}" for name in RUNS}

    def entry(name: str, plan: str, resume: str = "", step: int = 0) -> dict[str, Any]:
        found = {"job": job, "profile": profile, "plan": workshop.directory / f"{plan}.plan.toml"}
        from_step = checkpoint_path(folders[resume] / "checkpoints", step) if resume else None
        return {**found, "run_dir": folders[name], "resume": from_step}

    entries = {
        "staged": entry("staged", "staged"),
        "resumed": entry("resumed", "grouped", "staged", 1),
        "back": entry("back", "staged", "resumed", 3),
    }
    for name, outcome in workshop.run_entries(2, entries).items():
        assert outcome.raised == ("",) * 2, (name, outcome)
    plan = load_report(folders["resumed"] / "plan.toml").plan
    assert [stage.ranks for _, _, stage in plan.numbered] == [(0, 1)]
    expected = losses(folders["staged"])
    assert len(set(expected)) == 4
    assert losses(folders["resumed"]) == pytest.approx(expected[1:], rel=IN_GROUPS)
    assert losses(folders["back"]) == pytest.approx(expected[3:], rel=IN_GROUPS)
