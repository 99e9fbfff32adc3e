"""Plans that change while a run goes on: layers move between running processes, and not a bit of the result changes."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from hetero_mpi.device.backend import Backend
from hetero_mpi.job.schema import JobConfig
from hetero_mpi.model.adapters.adapter_tuning import tuning_of
from hetero_mpi.model.held_layers import Kept
from hetero_mpi.model.stage import MicroBatch, Stage
from hetero_mpi.model.transformers.chain import TransformersChain
from hetero_mpi.model.transformers.families import read_config
from hetero_mpi.model.transformers.weights import SeededStart
from hetero_mpi.planning.schedule import Op, schedule_of
from hetero_mpi.planning.types.plan import Plan
from hetero_mpi.planning.types.profile import ClusterProfile, Curve, LayerTimes
from hetero_mpi.planning.types.toml_files import load_report, save_plan, save_profile
from hetero_mpi.rundir.line_files import STEPS_NAME
from hetero_mpi.rundir.metrics import read_metrics
from hetero_mpi.rundir.rank_steps import read_rank_steps
from tests.support import training_cases
from tests.support.equality import IN_GROUPS, assert_same_run
from tests.support.jobs import Outcome, Workshop, write_profile
from tests.support.planning_samples import make_model, make_profile
from tests.support.plans import pipeline, plan_of, write_plan
from tests.support.stages import stage_of

pytestmark = pytest.mark.slow

BLOCKS, STEPS = 4, 8
EMULATED_BLOCKS, EMULATED_STEPS, EMULATED_BATCH, TOKENS = 6, 46, 3, 256
CHANGES = {2: "all", 3: "V", 4: "without-0", 5: "looped", 6: "first"}
"""After so many steps, to that plan; every run begins with ``first``."""
GROUPED_CHANGES = {2: "rank-and-group", 4: "first", 5: "group-beside-rank", 6: "group"}
"""The same of runs that begin with ``group-and-rank``."""


def streaming(plan: Plan, *ranks: int) -> Plan:
    """The plan with the stages of these ranks streamed."""
    (one,) = plan.pipelines
    stages = tuple(replace(stage, streamed=stage.ranks[0] in ranks) for stage in one.stages)
    return replace(plan, pipelines=(replace(one, stages=stages),))


PAIR = {0: 1, 1: 1}
PLANS = {
    "first": plan_of(pipeline([0, 1], [0, 3, 6])),  # rank 2 is idle
    "all": plan_of(pipeline([2, 0, 1], [0, 1, 5, 6])),
    "without-0": plan_of(pipeline([1, 2], [0, 5, 6])),  # rank 0 leads only
    "V": plan_of(pipeline([2, 0, 0, 2], [0, 1, 3, 5, 6], schedule="zbv")),  # rank 1 is idle
    "looped": plan_of(pipeline([1, 0, 2, 1, 0], [0, 1, 2, 4, 5, 6], schedule="zbv")),
    "two-stream": streaming(plan_of(pipeline([2, 0, 1], [0, 1, 5, 6])), 2, 0),
    "one-streams": streaming(plan_of(pipeline([1, 2], [0, 5, 6])), 1),
    "group-and-rank": plan_of(pipeline([PAIR, 2], [0, 2, 6])),
    "rank-and-group": plan_of(pipeline([0, {1: 1, 2: 1}], [0, 2, 6])),
    "group": plan_of(pipeline([PAIR], [0, 6])),
    "group-beside-rank": plan_of(pipeline([PAIR], [0, 6], 1, 3), pipeline([2], [0, 6], 1, 1)),
    "two": plan_of(pipeline([0, 1], [0, 2, 6], 1, 3), pipeline([2], [0, 6], 1, 1)),
    "two-exchanged": plan_of(pipeline([1, 0], [0, 5, 6], 1, 3), pipeline([2], [0, 6], 1, 1)),
    "two-otherwise": plan_of(pipeline([2, 1], [0, 1, 6], 1, 3), pipeline([0], [0, 6], 1, 1)),
}


@dataclass(frozen=True)
class Runs:
    """One mpirun of all jobs: outcomes, and where each wrote."""

    directory: Path
    outcomes: dict[str, Outcome]

    def lines(self, name: str) -> list[tuple[int, float, float]]:
        """(step, loss, norm of the gradient) of every step that the run took."""
        assert self.outcomes[name].raised == ("", "", ""), self.outcomes[name].texts
        steps = read_metrics(self.directory / name / "metrics.jsonl").steps
        return [(step.step, step.loss, step.grad_norm) for step in steps]


ADAPTED: dict[str, Any] = {"method": "lora", "rank": 4, "dropout": 0.1}


QUICK = {
    "full-straight", "full-changed", "narrow", "slow-sums", "slow-sums-straight", "groups-straight", "groups-changed",
    "nf4-groups-straight", "nf4-groups-changed",
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return run_all(tmp_path_factory.mktemp("changing"), quick=True)


@pytest.fixture(scope="module")
def more_runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return run_all(tmp_path_factory.mktemp("changing"), quick=False)


def run_all(directory: Path, quick: bool) -> Runs:
    """The jobs in ``QUICK``, or all others."""
    shop = Workshop(directory)
    for name, one in PLANS.items():
        save_plan(one, directory / f"{name}.toml")
    model = shop.model("tied", BLOCKS, tied=True, attention_dropout=0.1)
    entries: dict[str, dict[str, Any]] = {}

    def entry(
        name: str, first: str, changes: dict[int, str], *, base: Path = model, steps: int = STEPS, **tables: Any
    ) -> None:
        values = shop.values(base)
        job = shop.job(name, values, train={"steps": steps}, checkpoint={"every": 1, "keep": 2}, **tables)
        entries[name] = {"job": job, "run_dir": directory / name, "plan": directory / f"{first}.toml"}
        if name in QUICK:
            entries[name]["profile"] = write_profile(directory / f"{name}.profile.toml", job, 3)
        if changes:
            files = [(after, directory / f"{to}.toml") for after, to in changes.items()]
            entries[name] |= {"breaks": "plans_change", "changes": files}

    entry("full-straight", "first", {})
    entry("full-changed", "first", CHANGES)
    rows = {
        "model": {"quantization": "nf4"},
        "adapter": {**ADAPTED, "tokens": [5, 90], "modules_to_save": ["model.norm"]},
    }
    entry("nf4-straight", "first", {}, **rows)
    entry("nf4-changed", "first", CHANGES, **rows)
    begun = {"model": {"quantization": "nf4"}, "adapter": {**ADAPTED, "start": "pissa_niter_4"}}
    entry("nf4-pissa-straight", "first", {}, **begun)
    entry("nf4-pissa-changed", "first", CHANGES, **begun)
    ends = {**ADAPTED, "modules_to_save": ["embed_tokens", "layernorm"]}
    entry("streamed-straight", "first", {}, adapter=ends)
    entry("streamed-changed", "first", {2: "two-stream", 4: "one-streams", 6: "first"}, adapter=ends)
    entry("full-streamed-straight", "first", {})
    entry("full-streamed-changed", "two-stream", {2: "one-streams", 4: "all", 6: "two-stream"})
    untied = shop.model("untied", BLOCKS)
    entry("two-straight", "two", {}, base=untied)
    entry("two-changed", "two", {3: "two-exchanged", 5: "two-otherwise"}, base=untied)
    entry("groups-straight", "first", {}, base=untied)
    entry("groups-changed", "group-and-rank", GROUPED_CHANGES, base=untied)
    entry("slow-sums-straight", "first", {}, base=untied, steps=30)
    entry("slow-sums", "group-and-rank", {}, base=untied, steps=30)
    entries["slow-sums"]["breaks"] = "sums_are_slow"
    wide: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    packed = {
        "base": shop.model("wide", BLOCKS, **wide, intermediate_size=256),
        "adapter": {"method": "lora", "rank": 4},
    }
    packed["model"] = {"quantization": "nf4", "double_quantization": True}
    entry("nf4-groups-straight", "first", {}, **packed)
    entry("nf4-groups-changed", "group-and-rank", GROUPED_CHANGES, **packed)
    emulated_entries(shop, entries)
    plan_table = {"rebalance": True, "allow_idle": False}
    narrow = shop.job("narrow", shop.values(untied), train={"steps": 2}, checkpoint={"every": 0}, plan=plan_table)
    entries["narrow"] = {"job": narrow, "run_dir": directory / "narrow", "breaks": "no_room_to_change"}
    entries = {name: one for name, one in entries.items() if (name in QUICK) == quick}
    return Runs(directory, shop.run_entries(3, entries, timeout_s=400))


def three_alike() -> ClusterProfile:
    """Three ranks; a block takes 10 ms forward and 20 ms backward, for one sequence."""

    def times(seconds: float) -> LayerTimes:
        return LayerTimes(Curve((TOKENS,), (seconds,)), Curve((TOKENS,), (2 * seconds,)))

    layers = {"embedding": times(0.005), "block": times(0.010), "head": times(0.010)}
    model = replace(make_model(EMULATED_BLOCKS, False, 4096), sequence_length=TOKENS)
    profile = make_profile([1.0] * 3, model, 10**9, 0.0005, 1e9)
    return replace(profile, devices=tuple(replace(device, layers=layers) for device in profile.devices))


def emulated_entries(shop: Workshop, entries: dict[str, dict[str, Any]]) -> None:
    """``drop``: rank 1 of three falls to a third of its speed after step 8, and recovers after step 24; ``plain`` is the same
    training without emulation, on one rank."""
    save_profile(three_alike(), shop.directory / "three.toml")
    write_plan(shop.directory / "alone.toml", pipeline([0], [0, EMULATED_BLOCKS + 2], 1, EMULATED_BATCH))
    values = shop.values(shop.model("six", EMULATED_BLOCKS))
    train, checkpoint = {"steps": EMULATED_STEPS, "global_batch": EMULATED_BATCH, "micro_batch": 1}, {"every": 0}
    changes = ["rank 1 runs at 0.333 from step 9", "rank 1 runs at 1 from step 25"]
    cluster = {"emulate": "three.toml", "emulate_changes": changes}
    plan = {"pipelines": 1, "rebalance": True, "schedule": "1f1b"}
    drop = shop.job("drop", values, train=train, checkpoint=checkpoint, cluster=cluster, plan=plan)
    entries["drop"] = {"job": drop, "run_dir": shop.directory / "drop"}
    plain = shop.job("plain", values, train=train, checkpoint=checkpoint)
    entries["plain"] = {"job": plain, "run_dir": shop.directory / "plain", "plan": shop.directory / "alone.toml"}


def test_a_run_without_the_memory_for_changes_says_so(runs: Runs) -> None:
    assert len(runs.lines("narrow")) == 2
    lines = [line for line in runs.outcomes["narrow"].printed.splitlines() if line.startswith("Rebalancing is off")]
    assert len(lines) == 1 and " needs " in lines[0] and lines[0].endswith(" and has 1.00 kB free")


def test_a_group_whose_sums_have_become_slow_is_left(runs: Runs) -> None:
    straight, left = (np.array(runs.lines(name)) for name in ("slow-sums-straight", "slow-sums"))
    np.testing.assert_allclose(left, straight, rtol=1e-4)
    (event,) = [json.loads(line) for line in (runs.directory / "slow-sums" / "events.jsonl").read_text().splitlines()]
    assert event["event"] == "rebalanced" and "the all-reduce of ranks 0 and 1 (" in event["text"]
    report = load_report(runs.directory / "slow-sums" / "plan.toml")
    assert not report.plan.leader_of


@pytest.mark.long
def test_a_slow_device_gives_layers_away_and_takes_them_back(more_runs: Runs) -> None:
    runs = more_runs
    assert [line[:2] for line in runs.lines("drop")] == [line[:2] for line in runs.lines("plain")]
    events = [json.loads(line) for line in (runs.directory / "drop" / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["rebalanced", "rebalanced"], runs.outcomes["drop"].printed
    away, back = events
    assert 8 + 5 <= away["step"] < 24 < 24 + 5 <= back["step"]
    assert away["speeds"]["1"] == pytest.approx(0.333, rel=0.2) and back["speeds"]["1"] == pytest.approx(1, rel=0.2)
    assert {move["from"] for move in away["moved"]} == {1} and {move["to"] for move in back["moved"]} == {1}
    assert away["step_s_after"] < 0.95 * away["step_s_before"]
    said = f"step {away['step']}: rank 1 (host1) at 0.33 of the profiled speed for "
    assert said in runs.outcomes["drop"].printed and " from rank 1 to rank " in away["text"]
    # The emulated rank really is faster with fewer layers: steps get shorter at once.
    steps = read_metrics(runs.directory / "drop" / "metrics.jsonl").steps
    slow = statistics.median(step.step_s for step in steps[8 : away["step"]])
    eased = statistics.median(step.step_s for step in steps[away["step"] + 1 : 24])
    assert eased < 0.9 * slow


def test_changing_plans_gives_the_same_bits(runs: Runs) -> None:
    check_same_bits(runs, "full")


@pytest.mark.long
@pytest.mark.parametrize("kind", ["nf4", "nf4-pissa", "two", "streamed", "full-streamed"])
def test_changing_plans_gives_the_same_bits_over_packed_and_streamed_weights_and_in_two_pipelines(
    more_runs: Runs, kind: str
) -> None:
    check_same_bits(more_runs, kind)


@pytest.mark.parametrize("kind", ["groups", "nf4-groups"])
def test_groups_of_ranks_take_over_and_hand_on(runs: Runs, kind: str) -> None:
    """The numbers stay those of single ranks, but for the rounding of sums in another order. Under NF4 each plan packs the frozen
    weights anew, with scales that are quantised twice."""
    straight, changed = (np.array(runs.lines(f"{kind}-{how}")) for how in ("straight", "changed"))
    assert len(straight) == STEPS and len(set(straight[:, 1])) == STEPS
    np.testing.assert_allclose(changed, straight, rtol=1e-4)
    told = [line for line in runs.outcomes[f"{kind}-changed"].printed.splitlines() if line.startswith("changed after")]
    assert len(told) == len(GROUPED_CHANGES)
    assert_same_run(runs.directory / f"{kind}-changed", runs.directory / f"{kind}-straight", IN_GROUPS, 1e-3)


def test_a_member_of_a_group_waits_for_what_its_leader_receives(runs: Runs) -> None:
    """That is told as waiting, as the leader's is, not as computing; and no message is counted twice."""
    told = {(one.step, one.rank): one for one in read_rank_steps(runs.directory / "groups-changed" / STEPS_NAME)}
    for name, step, leader, member in (("group-and-rank", 2, 0, 1), ("rank-and-group", 3, 1, 2)):
        lists = schedule_of(PLANS[name], make_model(BLOCKS))
        received = [action for action in lists[leader] if action.op in (Op.RECV_F, Op.RECV_B)]
        assert [one.action for one in told[step, member].events if one.action in received] == received != []
        assert tuple(one.action for one in told[step, member].events) == lists[member]
        usage = told[step, member].usage
        assert (usage.activations_s > 0, usage.gradients_s > 0) == (leader == 1, leader == 0)
        assert usage.received_bytes == usage.sent_bytes == 0 < told[step, leader].usage.received_bytes


def check_same_bits(runs: Runs, kind: str) -> None:
    straight, changed = f"{kind}-straight", f"{kind}-changed"
    assert len(runs.lines(straight)) == STEPS
    assert runs.lines(changed) == runs.lines(straight)
    told = [line for line in runs.outcomes[changed].printed.splitlines() if line.startswith("changed after step")]
    assert len(told) == {"two": 2, "streamed": 3, "full-streamed": 3}.get(kind, len(CHANGES))
    assert_same_run(runs.directory / changed, runs.directory / straight)


@pytest.mark.parametrize("quantization", ["none", "nf4"])
@pytest.mark.parametrize("tied", [False, True])
def test_frozen_weights_that_stay_are_not_loaded_again(quantization: str, tied: bool) -> None:
    """A stage of layers [1, 6) takes what one of [0, 5) held; only what is new is asked for, and it computes the same bits."""
    case = replace(training_cases.NORMAL[0], tied=tied)
    chain = TransformersChain(read_config(dict(case.config)))
    tables = {"model": {"path": "x", "quantization": quantization}, "data": {"text": ["x"]}}
    tuning = tuning_of(JobConfig.model_validate({**tables, "adapter": {"method": "lora", "rank": 4}}), chain)
    asked: list[int] = []

    class Asked(SeededStart):
        def fill(self, chain: TransformersChain, model: PreTrainedModel, layer: int) -> None:
            asked.append(layer)
            super().fill(chain, model, layer)

    def stage(first: int, last: int, kept: Kept | None = None) -> Stage:
        return stage_of(chain, first, last, Backend(), "bf16", Asked(1), 7, tuning, kept_layers=kept)

    before, fresh = stage(0, 5), stage(1, 6)
    packed = before.model.get_submodule(chain.module_names(2)[0]).mlp.up_proj.weight.data_ptr()
    kept = before.frozen_layers(range(1, 6))
    asked.clear()
    again = stage(1, 6, kept)
    assert asked == ([0, 5] if tied else [5])  # the head's copy of a tied matrix is made from the embedding's
    assert again.model.get_submodule(chain.module_names(2)[0]).mlp.up_proj.weight.data_ptr() == packed
    x, targets = torch.randn(1, 8, 32, dtype=torch.bfloat16), torch.randint(0, 320, (1, 8))
    losses = [one.forward(MicroBatch(0, 0, 0, 8), x, targets) for one in (fresh, again)]
    gradients = [one.backward(0) for one in (fresh, again)]
    assert torch.equal(*losses) and gradients[0] is not None and torch.equal(*gradients)  # type: ignore[arg-type]


def test_nothing_is_kept_where_all_weights_are_trained() -> None:
    chain = TransformersChain(read_config(dict(training_cases.NORMAL[0].config)))
    assert stage_of(chain, 0, 3, Backend(), "fp32", SeededStart(1)).frozen_layers(range(6)) == {}
