"""``train.wire = "int8"``: what stages exchange is rounded as it should be, and everything else is as before.

On threads instead of ranks. What they are held against is one process that rounds at the same cuts, by arithmetic of its own.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hetero_mpi.device.backend import Backend
from hetero_mpi.engine.wire_format import Int8Format
from hetero_mpi.job.load import job_from_tables
from hetero_mpi.model.layer.interface import seed_from
from hetero_mpi.model.stage import Stage
from hetero_mpi.planning.decision.alternatives import AS_INT8, what_ifs
from hetero_mpi.planning.decision.planner import make_plan
from hetero_mpi.planning.durations import message_bytes
from hetero_mpi.planning.schedule import Action, Op
from hetero_mpi.planning.types.cluster_changes import with_wire
from hetero_mpi.planning.types.request import PlanRequest
from hetero_mpi.planning.types.toml_files import profile_from_dict, profile_to_dict
from hetero_mpi.state.directory import checkpoint_path
from tests.engine.test_trainer import (
    LAYOUTS,
    LENGTH,
    SEVERAL,
    TRAIN,
    chain_of,
    check_close,
    check_same_bits,
    outcome_of,
)
from tests.model.test_split_backward import chain_of as family_chain
from tests.support.equality import assert_same_run
from tests.support.errors import refuses
from tests.support.jobs import Workshop
from tests.support.late_copies import LateBackend
from tests.support.planning_samples import make_model, make_plan_of, make_profile
from tests.support.ranks import Threads, plan_of

INT8 = TRAIN.model_copy(update={"wire": "int8"})


def rounded(values: torch.Tensor, seeds: list[int] | None) -> torch.Tensor:
    """(B, T, H) as the other side sees it; ``seeds``: of the sequences, None: to the nearest."""
    scale = np.abs(values.numpy()).max(-1, keepdims=True) / np.float32(127)
    parts = values.numpy() / np.maximum(scale, np.finfo(np.float32).tiny)
    if seeds is None:
        return torch.from_numpy(np.rint(parts) * scale)
    count = parts[0].size
    for sequence, seed in zip(parts, seeds, strict=True):
        x = (np.arange((count + 1) // 2) + seed % 2**31).astype(np.uint32)
        x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
        x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
        x ^= x >> np.uint32(16)
        halves = np.stack([x & np.uint32(0xFFFF), x >> np.uint32(16)], 1).ravel()[:count].astype(np.uint16)
        draws = (halves.view(np.int16).astype(np.float32) + np.float32(32768.5)) / np.float32(65536)
        sequence[...] = np.clip(np.floor(sequence + draws.reshape(sequence.shape)), -127, 127)
    return torch.from_numpy(parts * scale)


def round_after(stage: Stage, layer: int) -> None:
    """A stage of the whole model rounds as if it was cut after ``layer``."""

    class Cut(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, y: torch.Tensor) -> torch.Tensor:
            context.position = stage._position
            return rounded(y.detach(), None)

        @staticmethod
        def backward(context: Any, dy: torch.Tensor) -> torch.Tensor:
            first, step = context.position.first_sample, context.position.step
            return rounded(dy, [seed_from(stage.seed, "wire", step, first + row, layer) for row in range(len(dy))])

    module = stage.model.get_submodule(stage.chain.module_names(layer)[-1])
    module.register_forward_hook(lambda module, given, y: Cut.apply(y))


@pytest.mark.parametrize(
    ("layout", "schedule"), [("pipeline", "gpipe"), ("pipeline", "1f1b"), ("pipeline", "split"), ("V", "zbv")]
)
def test_a_pipeline_computes_what_one_process_does_that_rounds_at_its_cuts(layout: str, schedule: str) -> None:
    """Not where both sides of a cut are on one rank."""
    chain = chain_of()
    whole = Threads(chain, plan_of(chain, LAYOUTS["alone"], LENGTH), INT8)
    (stage,) = whole.trainers[0].stages
    layouts = {**LAYOUTS, **SEVERAL}[layout]
    ranks, edges = layouts[0][:2]
    for cut, (before, after) in zip(edges[1:-1], pairwise(ranks), strict=True):
        if before != after:
            round_after(stage, cut - 1)
    plan = plan_of(chain, layouts, LENGTH, schedule, recompute=schedule == "1f1b")
    found, expected = outcome_of(Threads(chain, plan, INT8)), outcome_of(whole)
    check_close(found, expected)
    exact = outcome_of(Threads(chain, plan, TRAIN))
    assert abs(exact.decision.loss - found.decision.loss) > 1e-5, "nothing was rounded"


@pytest.mark.parametrize("layout", ["alone", "data parallel, unequal"])
def test_without_boundaries_nothing_is_rounded(layout: str) -> None:
    chain = chain_of()
    plan = plan_of(chain, LAYOUTS[layout], LENGTH)
    check_same_bits(*(outcome_of(Threads(chain, plan, train)) for train in (INT8, TRAIN)))


def test_devices_with_memory_of_their_own_round_alike() -> None:
    chain = chain_of(tied=True)
    plan = plan_of(chain, LAYOUTS["unlike pipelines"], LENGTH, "split")
    check_same_bits(*(outcome_of(Threads(chain, plan, INT8, backend=one)) for one in (LateBackend, Backend)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_near_and_right_on_average_in_any_micro_batch(dtype: torch.dtype) -> None:
    made = Int8Format(dtype)
    values = torch.randn(2, 600, 501, generator=torch.Generator().manual_seed(1)).to(
        dtype
    )  # more than a piece; odd rows

    def through(tensor: torch.Tensor, *seeds: int) -> torch.Tensor:
        packed = made.packed(tensor, seeds) if seeds else made.packed(tensor)
        assert packed.shape == made.packed_shape(tensor.shape) == (tensor[..., 0].numel() * 505,)
        return made.unpacked(packed, tensor.shape)

    step = values.float().abs().amax(-1, keepdim=True) / 127
    error = {seeds: (through(values, *seeds).float() - values.float()) / step for seeds in [(), (3, 4)]}
    narrow = 127 * torch.finfo(dtype).eps
    assert error[()].abs().max() <= 0.5 + narrow and 0.9 < error[3, 4].abs().max() <= 1 + narrow
    assert error[3, 4].mean().abs() < 4 * 0.41 / values.numel() ** 0.5 + 1e-3
    assert torch.equal(through(values, 3, 4)[1:], through(values[1:], 4)), "the other sequences matter"
    assert not torch.equal(through(values, 3, 4)[1:], through(values[1:], 5))


def test_what_goes_behind_hidden_vectors_arrives_as_it_was() -> None:
    made, values = Int8Format(torch.bfloat16, exact_rows=2), torch.randn(3, 9, 16).bfloat16()
    values[:, 7:] = torch.randint(-(2**15), 2**15, (3, 2, 16), dtype=torch.int16).view(torch.bfloat16)  # any bits
    packed = made.packed(values, [1, 2, 3])
    assert packed.shape == made.packed_shape(values.shape) == (3 * (7 * 20 + 2 * 32),)
    found, alone = made.unpacked(packed, values.shape), Int8Format(torch.bfloat16)
    assert torch.equal(found[:, 7:].view(torch.int16), values[:, 7:].view(torch.int16))
    assert torch.equal(found[:, :7], alone.unpacked(alone.packed(values[:, :7], [1, 2, 3]), (3, 7, 16)))


def test_the_loss_of_routers_passes_boundaries_unrounded() -> None:
    chain = family_chain("mixtral", output_router_logits=True, router_aux_loss_coef=0.1)
    layouts = [([0], [0, chain.layer_count], 2, 8)], [([0, 1], [0, 2, chain.layer_count], 2, 8)]
    train = INT8.model_copy(update={"dtype": "bf16"})  # of which the sums take two numbers each
    alone, cut = (outcome_of(Threads(chain, plan_of(chain, layout, LENGTH), train)).decision for layout in layouts)
    assert alone.router_loss is not None and cut.router_loss == pytest.approx(alone.router_loss, rel=0.02)
    assert alone.loss != cut.loss == pytest.approx(alone.loss, rel=0.02)


def test_rows_that_are_not_finite_arrive_so_and_zeros_stay_zeros() -> None:
    values = torch.zeros(1, 4, 8)
    values[0, 1, 2], values[0, 2, 3], values[0, 3, 4] = float("nan"), float("-inf"), 1e-42
    made = Int8Format(torch.float32)
    found = made.unpacked(made.packed(values, [7]), values.shape)[0]
    assert not found[1:3].isfinite().any() and not found[0].any() and found[3].abs().max() < 2e-38


def test_planning_counts_the_shorter_messages_and_says_what_is_given_up() -> None:
    profile = make_profile((1.0, 1.0), make_model(6), latency_s=0.0, bytes_per_s=200.0)
    short = with_wire(profile, "int8")
    plan = make_plan_of((0, 4, 8), (0, 1), 4)
    sent = Action(Op.SEND_F, 0, 0)
    assert [message_bytes(sent, plan, one) for one in (profile, short)] == [10 * 100, 10 * (25 + 4)]
    assert with_wire(short, "exact") == profile
    request = PlanRequest(global_batch=4, sequence_length=10, micro_batch_choices=(1,))
    reports = [make_plan(one, request) for one in (profile, short)]
    assert reports[1].predicted_step_s < reports[0].predicted_step_s
    told = ["the loss differs from that of one process" in report.reasons[-1] for report in reports]
    assert told == [False, True]
    offered = {answer.change: answer.step_s for answer in what_ifs(reports[0], profile, request)}
    assert offered[AS_INT8] == pytest.approx(reports[1].predicted_step_s)
    assert not any("int8" in answer.change for answer in what_ifs(reports[1], short, request))


@pytest.mark.slow
def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted_np2(tmp_path: Path) -> None:
    workshop = Workshop(tmp_path)
    values = workshop.values(workshop.model())
    values["train"]["wire"] = "int8"
    values["plan"]["allow_idle"] = False
    found = workshop.finish_entries(2, {"whole": workshop.entry("whole", values)})
    assert "gradients are sent as int8" in (tmp_path / "whole" / "logs" / "rank-0000.log").read_text(), found
    given = {"resume": checkpoint_path(tmp_path / "whole" / "checkpoints", 2), "plan": tmp_path / "whole" / "plan.toml"}
    workshop.finish_entries(2, {"resumed": workshop.entry("resumed", values, given)})
    assert_same_run(tmp_path / "resumed", tmp_path / "whole")


def test_models_of_ones_own_are_not_rounded() -> None:
    tables: dict[str, dict[str, Any]] = {"model": {"factory": "cnn_model:cnn"}, "data": {}, "train": {"wire": "int8"}}
    with refuses("job.train.wire", "model.factory"):
        job_from_tables(tables, "cnn", ".")


def test_the_wire_travels_with_the_profile_that_plans_are_made_for() -> None:
    """A run that goes on after a death, and the report of one, have the profile from a file or a message."""
    profile = make_profile()
    assert profile_from_dict(profile_to_dict(with_wire(profile, "int8"))) == replace(
        profile, model=replace(profile.model, wire="int8")
    )
