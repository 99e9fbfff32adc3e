"""Ranks that hold a stage together train as one process would, and take up, and hand on, what other plans have begun."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from hetero_mpi.planning.schedule import COMPUTE
from hetero_mpi.planning.types.plan import Plan
from hetero_mpi.planning.types.toml_files import load_report
from hetero_mpi.rundir.rank_steps import read_rank_steps
from tests.stand_in_gpu import COUNTERS, THROUGH, backend, build
from tests.support.equality import IN_GROUPS, Stretch, assert_same_run, losses, run_stretches, tensors
from tests.support.jobs import Workshop, write_profile
from tests.support.plans import pipeline, plan_of, write_plan

pytestmark = pytest.mark.slow

WORDS = 20_000
ENOUGH, LITTLE = 10**9, 10_700_000
"""Bytes of a rank. Embedding and head are one matrix of 640,000 numbers, in all 12.8 MB with gradients and moments."""
PAIR = {0: 1, 1: 1}
STAGED = plan_of(pipeline([0, 1], [0, 2, 4]))
GROUPED = plan_of(pipeline([PAIR], [0, 4]))
THERE_AND_BACK = {
    "staged": Stretch("staged"),
    "resumed": Stretch("grouped", "staged", 1),
    "back": Stretch("staged", "resumed", 3),
}
"""Masters and moments that two ranks have whole are cut for both; and what the group saves, two stages take up."""
SEVERAL = {
    "chain": plan_of(pipeline(range(4), range(5))),
    "unlike": plan_of(pipeline([{0: 3, 1: 1}], [0, 4], 1, 3), pipeline([{2: 2, 3: 2}], [0, 4], 1, 1, state_weight=0.5)),
    "three": plan_of(pipeline([3], [0, 4], 1, 1), pipeline([{0: 1, 1: 1, 2: 2}], [0, 4], 1, 3)),
    "staged": plan_of(pipeline([0, {1: 1, 2: 3}], [0, 2, 4], 1, 2), pipeline([3], [0, 4], 1, 2)),
}
"""Of four ranks: one pipeline without groups; and two with groups of unlike shares, of unlike sizes, and of some layers only."""
LORA = {"method": "lora", "rank": 4, "alpha": 8}
ADAPTED_EXPERTS = {**LORA, "targets": ["q_proj", "o_proj"], "parameters": ["experts.gate_up_proj", "experts.down_proj"]}
MIXTRAL = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
ROUTERS = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
BLOCKS = {"model_type": "glm", "pad_token_id": 0, "attention_bias": False, "hidden_size": 128, "intermediate_size": 768}


@dataclass(frozen=True)
class Grouped:
    """A model, tables of its job, and the plans that resume each other.

    ``losses``, ``tensors``: how near those of all plans are to the first one's.
    """

    model: dict[str, Any] = field(default_factory=dict)
    tables: dict[str, Any] = field(default_factory=dict)
    group: Plan | None = GROUPED
    """Of two ranks; None: the plans in ``SEVERAL``."""
    losses: float = IN_GROUPS
    tensors: float | None = 1e-4


def several(losses: float = IN_GROUPS, tensors: float = 1e-4, tables: Any = None, **model: Any) -> Grouped:
    return Grouped({"num_key_value_heads": 4, **model}, tables or {}, None, losses, tensors)


CASES = {
    "narrow-np2": Grouped(tensors=None),
    # The first rank, which leads and owns what is saved, has neither heads nor words of the matrix at both ends.
    "experts-np2": Grouped(
        {"tied": True, **MIXTRAL, **ROUTERS}, group=plan_of(pipeline([{0: 0, 1: 2}], [0, 4], experts=(3, 1)))
    ),
    # Masks and magnitudes of adapters are those of one rank, in memory and in checkpoints.
    "dora-np2": Grouped(tables={"adapter": {**LORA, "dora": True, "dropout": 0.2}}),
    # Cuts fall between blocks of 256, by rows and by columns, and blocks have their scales in every plan. The MLP's two inner
    # matrices are one.
    "8bit-np2": Grouped(
        {**BLOCKS, "head_dim": 256, "num_attention_heads": 2}, {"train": {"optimizer": "adamw_8bit"}}, tensors=None
    ),
    "adapted-experts-np2": Grouped(
        {"tied": True, **MIXTRAL}, {"adapter": ADAPTED_EXPERTS},
        group=plan_of(pipeline([{0: 2, 1: 0}], [0, 4], experts=(1, 3))),
    ),
    "full-np4": several(),
    "tied-np4": several(tied=True),
    "dora-np4": several(tables={"adapter": {**LORA, "dora": True, "dropout": 0.2}}),
    "experts-np4": several(tied=True, **MIXTRAL),
    "nf4-np4": several(tensors=1e-3, tables={"adapter": LORA, "model": {"quantization": "nf4"}},
                       hidden_size=256, head_dim=64, intermediate_size=256),
    "bf16-np4": several(4e-3, 5e-2, {"train": {"dtype": "bf16"}}),
}  # fmt: skip


class Grouping(Workshop):
    """The runs of every case, each made once."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.done: dict[str, dict[str, Path]] = {}

    def start(self, name: str) -> Path:
        return self.model(name, **{"num_key_value_heads": 2, **CASES[name].model})

    def runs(self, name: str) -> dict[str, Path]:
        if name not in self.done:
            case = CASES[name]
            if case.group is not None:
                plans, stretches = {"staged": STAGED, "grouped": case.group}, THERE_AND_BACK
            else:  # each plan runs from the start, and goes on from the first checkpoint of the one before it
                names = [
                    one for one in SEVERAL if one != "staged" or "tied" not in case.model
                ]  # a tied end is of no group
                plans = {one: SEVERAL[one] for one in names}
                stretches = {one: Stretch(one) for one in names}
                stretches |= {f"{a}-{b}": Stretch(b, a) for a, b in zip(names, [*names[1:], names[0]], strict=True)}
            self.done[name] = run_stretches(self, name, self.start(name), plans, stretches, case.tables)
        return self.done[name]


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Grouping:
    return Grouping(tmp_path_factory.mktemp("grouped"))


@pytest.mark.parametrize("name", CASES)
def test_plans_with_groups_train_as_one_without_and_resume_each_other(shop: Grouping, name: str) -> None:
    expected, *others = shop.runs(name).values()
    assert len(losses(expected)) == 4
    for run in others:
        assert_same_run(run, expected, CASES[name].losses, CASES[name].tensors)


def test_a_group_begins_with_the_adapter_that_stages_begin_with_np2(shop: Grouping) -> None:
    runs = run_stretches(
        shop,
        "begun",
        shop.start("dora-np2"),
        {"grouped": GROUPED},
        {"run": Stretch("grouped")},
        CASES["dora-np2"].tables,
    )
    assert_same_run(runs["run"], shop.runs("dora-np2")["staged"], IN_GROUPS, None)


def test_a_group_keeps_moments_in_8_bits_np2(shop: Grouping) -> None:
    expected, *others = map(tensors, shop.runs("8bit-np2").values())
    scales = {key for key in expected if key[0].startswith("absmax")}
    assert {name.rpartition("proj")[0][-2:] for _, name in scales} >= {"q_", "o_", "n_", "p_"}
    for found in others:
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            if key in scales or key[0] == "parameters":
                assert np.linalg.norm(found[key] - tensor) <= 2e-3 * np.linalg.norm(tensor), key
            elif tensor.dtype == np.uint8:  # now and then a number gets the next code
                assert np.mean(found[key] != tensor) < 0.01, key


def test_peft_reads_the_adapters_of_experts_that_a_group_wrote_np2(shop: Grouping) -> None:
    run = shop.runs("adapted-experts-np2")["resumed"]
    base = AutoModelForCausalLM.from_pretrained(shop.start("adapted-experts-np2"), dtype=torch.float32)
    read = PeftModel.from_pretrained(base, run / "adapter").state_dict()
    saved = {name: array for (kind, name), array in tensors(run).items() if kind == "parameters"}
    assert sum(".experts." in name for name in saved) >= 4
    for name, array in saved.items():
        end = name.replace(".lora_A.", ".lora_A.default.").replace(".lora_B.", ".lora_B.default.")
        assert torch.equal(read[f"base_model.model.{end}"], torch.from_numpy(array)), name


def test_a_layer_larger_than_every_rank_is_trained_by_two_of_them_np2(shop: Grouping) -> None:
    values = shop.values(shop.model("words", tied=True, vocab_size=WORDS, num_key_value_heads=2))
    values["train"]["global_batch"] = 1

    def entry(name: str, memory_bytes: int, **plan: Any) -> dict[str, Any]:
        tables = {"cluster": {"memory_bytes": memory_bytes}, "plan": {"pipelines": "auto", **plan}}
        return shop.entry(name, values, **tables)

    refused = shop.run_entries(2, {"refused": entry("refused", LITTLE, tensor_parallel=False, offload=False)})[
        "refused"
    ]
    assert refused.raised == ("CollectiveUserError",) * 2, refused
    assert "the model does not fit in memory on these ranks" in refused.texts[0]
    shop.finish_entries(2, {"grouped": entry("grouped", LITTLE)})
    report = load_report(shop.directory / "grouped" / "plan.toml")
    assert [stage.ranks for _, _, stage in report.plan.numbered] == [(0, 1)]
    assert "no plan without tensor parallelism fits in memory" in report.reasons
    shop.finish_entries(1, {"alone": entry("alone", ENOUGH)})
    assert_same_run(shop.directory / "grouped", shop.directory / "alone", IN_GROUPS, None)
    for one in read_rank_steps(shop.directory / "grouped" / "steps.jsonl"):
        computed = [event for event in one.events if event.action.op in COMPUTE]
        assert computed and all(0 < event.exchanged_s < event.end_s - event.start_s for event in computed)
        assert one.usage.computing_s > 0 and one.usage.group_s > 0


def test_a_plan_with_a_group_that_the_job_cannot_have_is_refused_with_the_setting_in_the_way(shop: Grouping) -> None:
    plan = write_plan(shop.directory / "group.plan.toml", *GROUPED.pipelines)
    values = shop.values(shop.model("unlike", num_key_value_heads=2, attention_dropout=0.1))
    outcome = shop.run_entries(2, {"refused": shop.entry("unlike", values, {"plan": plan})})["refused"]
    assert outcome.raised == ("CollectiveUserError",) * 2 and "attention_dropout = 0.1" in outcome.texts[0], outcome


UNLIKE: dict[str, tuple[dict[str, Any], float]] = {
    "all": ({}, IN_GROUPS),
    "bf16": ({"adapter": ADAPTED_EXPERTS, "train": {"dtype": "bf16"}}, 4e-3),  # routers choose otherwise now and then
    "nf4": ({"adapter": ADAPTED_EXPERTS, "model": {"quantization": "nf4"}}, IN_GROUPS),
}
"""Name -> (tables of its job, how near the losses are to those of one process)."""


def test_a_gpu_has_the_heads_and_a_processor_beside_it_the_experts_np2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (reason := build.missing()) is not None:
        pytest.skip(reason)
    monkeypatch.setenv(backend.COUNT, "1")
    shop, alone = Workshop(tmp_path, THROUGH), Workshop(tmp_path)
    sizes = {"num_key_value_heads": 2, "hidden_size": 64, "intermediate_size": 64, "head_dim": 64}
    plan = write_plan(tmp_path / "unlike.plan.toml", pipeline([{0: 2, 1: 0}], [0, 4], experts=(0, 4)))
    values = shop.values(shop.model("unlike", **MIXTRAL, **sizes))
    values["train"]["dtype"] = "fp32"  # for which the processor decides, and a GPU would not
    grouped = {name: shop.entry(f"{name}-group", values, {"plan": plan}, **of) for name, (of, _) in UNLIKE.items()}
    for name, entry in grouped.items():
        entry["profile"] = write_profile(tmp_path / f"{name}.made.toml", entry["job"], 2)
    shop.finish_entries(2, grouped)
    counters = [
        json.loads(line.partition(COUNTERS)[2]) for line in shop.printed_errors.splitlines() if COUNTERS in line
    ]
    assert {one["rank"]: one["operators"] > 0 for one in counters} == {0: True, 1: False}
    alone.finish_entries(
        1, {name: shop.entry(f"{name}-alone", values, **tables) for name, (tables, _) in UNLIKE.items()}
    )
    for name, (_, limit) in UNLIKE.items():
        assert_same_run(tmp_path / f"{name}-group", tmp_path / f"{name}-alone", limit, None)
