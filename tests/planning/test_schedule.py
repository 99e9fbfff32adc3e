"""Schedules drawn as grids, and the dry run: what is refused, and how it is shown."""

import random
from dataclasses import replace
from textwrap import dedent

import pytest

from hetero_mpi.planning.dry_run import stuck_at, validate
from hetero_mpi.planning.schedule import Action, Schedule, schedule_of
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan
from hetero_mpi.util.errors import UserError
from tests.support.errors import refuses
from tests.support.planning_samples import SEQUENCE, grid, make_model, make_plan_of, random_plan

MODEL, TIED = make_model(), make_model(tied=True)


def actions(text: str) -> tuple[Action, ...]:
    return tuple(Action.parse(word) for word in text.split())


def drawn(text: str) -> str:
    """A grid without regard to the width of its columns."""
    return "\n".join(" ".join(line.split()) for line in dedent(text).strip().splitlines())


@pytest.mark.parametrize("text", ["2F0", "1SEND_B3", "0RECV_F12", "10REDUCE7", "3STEP", "1I2", "4W0"])
def test_actions_read_back(text: str) -> None:
    assert str(Action.parse(text)) == text


@pytest.mark.parametrize("text", ["F0", "1X2", "1F", "0STEP1", "1SEND_B3 ", "-1F0", "0REDUCE"])
def test_other_texts_are_no_actions(text: str) -> None:
    with refuses("schedule.action", repr(text)):
        Action.parse(text)


GRIDS = {
    "classic": (make_plan_of((0, 1, 2, 4), (0, 1, 2), 4), """
        clock    0   1   2   3   4   5   6   7   8   9  10  11
        rank 0 0F0 0F1 0F2   .   . 0B0 0F3 0B1   . 0B2   . 0B3
        rank 1   . 1F0 1F1   . 1B0 1F2 1B1 1F3 1B2   . 1B3   .
        rank 2   .   . 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3   .   .
    """),
    "deeper warm-up, ranks in another order": (make_plan_of((0, 2, 4), (3, 1), 3, warm_up=(9, 0)), """
        clock    0   1   2   3   4   5   6   7
        rank 1   . 1F0 1B0 1F1 1B1 1F2 1B2   .
        rank 3 0F0 0F1 0F2 0B0   . 0B1   . 0B2
    """),
    "GPipe, a warm-up of all micro-batches": (make_plan_of((0, 2, 4), (0, 1), 3, warm_up=(3, 3)), """
        clock    0   1   2   3   4   5   6   7
        rank 0 0F0 0F1 0F2   .   . 0B0 0B1 0B2
        rank 1   . 1F0 1F1 1F2 1B0 1B1 1B2   .
    """),
}  # fmt: skip


@pytest.mark.parametrize("name", GRIDS)
def test_schedules_as_grids(name: str) -> None:
    plan, expected = GRIDS[name]
    assert drawn(grid(schedule_of(plan, MODEL))) == drawn(expected)


def split(plan: Plan) -> Plan:
    return replace(plan, pipelines=tuple(replace(pipeline, split_backward=True) for pipeline in plan.pipelines))


def test_split_backward_fills_the_waiting_with_weight_gradients() -> None:
    """The deeper a stage lies in the pipeline, the longer its W trails its I: 1 micro-batch on rank 1, 2 on rank 2."""
    schedule = schedule_of(split(make_plan_of((0, 1, 2, 4), (0, 1, 2), 4)), MODEL)
    assert drawn(grid(schedule)) == drawn("""
        clock    0   1   2   3   4   5   6   7   8   9  10  11  12  13
        rank 0 0F0 0F1 0F2   .   . 0B0 0F3 0B1   .   . 0B2   . 0B3   .
        rank 1   . 1F0 1F1   . 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
        rank 2   .   . 2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3
    """)
    text = " ".join(str(action) for action in schedule[1])
    assert "1RECV_B1 1I1 1SEND_B1 1W0 1RECV_F3" in text, "the gradient is sent before W"


def test_no_weight_gradient_is_put_off_for_longer_than_there_are_micro_batches() -> None:
    schedule = schedule_of(split(make_plan_of((0, 2, 4), (0, 1), 2, warm_up=(9, 0))), MODEL)
    assert schedule[1] == actions("1RECV_F0 1F0 1I0 1SEND_B0 1RECV_F1 1F1 1I1 1SEND_B1 1W0 1W1 1STEP")


def unlike(micro_batch: int = 2) -> Plan:
    """Rank 1 -> rank 0 with two sequences, rank 2 alone with three."""
    halves = PipelinePlan((StagePlan((1,), 0, 2, 1), StagePlan((0,), 2, 4, 0)), 1, 2)
    return Plan((halves, PipelinePlan((StagePlan((2,), 0, 4, 0),), micro_batch, 3)), 5, SEQUENCE, 4)


def test_layers_of_several_pipelines_are_summed_last_layer_first() -> None:
    schedule = schedule_of(unlike(), MODEL)
    assert schedule[0][-3:] == actions("1REDUCE3 1REDUCE2 1STEP")
    assert schedule[1][-3:] == actions("0REDUCE1 0REDUCE0 0STEP")
    assert schedule[2] == actions("2F0 2B0 2F1 2B1 2REDUCE3 2REDUCE2 2REDUCE1 2REDUCE0 2STEP")
    tied = schedule_of(unlike(), TIED)
    assert tied[0][-3:] == actions("1REDUCE2 1REDUCE0 1STEP"), (
        "the head brings its share of layer 0, and has nothing else"
    )
    assert tied[1] == schedule[1]
    assert tied[2] == tuple(action for action in schedule[2] if action.layer != 3)


def test_what_is_not_trained_is_not_summed() -> None:
    frozen = replace(
        MODEL, layers=tuple(replace(layer, trainable_parameters=i % 2) for i, layer in enumerate(MODEL.layers))
    )
    schedule = schedule_of(unlike(), frozen)
    assert schedule[2][-3:] == actions("2REDUCE3 2REDUCE1 2STEP")


def test_lists_of_a_tied_model_end_with_reduce_on_both_ends_only() -> None:
    plan = make_plan_of((0, 1, 2, 4), (0, 1, 2), 1)
    schedule = schedule_of(plan, TIED)
    assert schedule[0] == actions("0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE0 0STEP")
    assert schedule[1] == actions("1RECV_F0 1F0 1SEND_F0 1RECV_B0 1B0 1SEND_B0 1STEP")
    assert schedule[2] == actions("2RECV_F0 2F0 2B0 2SEND_B0 2REDUCE0 2STEP")
    alone = schedule_of(make_plan_of((0, 4), (2,), 2), TIED)
    assert alone == {2: actions("0F0 0B0 0F1 0B1 0STEP")}


@pytest.mark.parametrize("seed", range(40))
def test_every_non_increasing_depth_from_classic_on_is_free_of_deadlock(seed: int) -> None:
    draw = random.Random(seed)
    stages, count = draw.randint(1, 5), draw.randint(1, 6)
    depth = [stages - 1 - i for i in range(stages)]
    for i in reversed(range(stages)):
        depth[i] = max([depth[i] + draw.randint(0, 3), *depth[i + 1 : i + 2]])
    layers = max(stages, 2)  # a model has an embedding and a head
    plan = make_plan_of([*range(stages), layers], draw.sample(range(stages), stages), count, depth)
    model = make_model(layers - 2, tied=draw.random() < 0.5)
    validate(schedule_of(plan, model), plan, model)


def test_a_deadlock_is_shown_with_the_stuck_rows_marked() -> None:
    plan = make_plan_of((0, 2, 4), (0, 1), 3, warm_up=(0, 1))
    with pytest.raises(UserError) as caught:
        validate(schedule_of(plan, MODEL), plan, MODEL)
    message = str(caught.value)
    assert "rank 0 waits at 0RECV_B0 for 1SEND_B0; rank 1 waits at 1RECV_F1 for 0SEND_F1" in message
    assert drawn(message).splitlines()[1].startswith("> rank 0 0F0 0SEND_F0 [0RECV_B0] 0B0")


def test_sums_in_different_orders_deadlock() -> None:
    schedule = schedule_of(unlike(), MODEL)
    turned = {**schedule, 0: (*schedule[0][:-3], *actions("1REDUCE2 1REDUCE3 1STEP"))}
    with refuses("schedule.deadlock"):
        validate(turned, unlike(), MODEL)


def test_a_deadlock_of_many_ranks_is_shown_in_a_few_rows() -> None:
    pairs = [PipelinePlan((StagePlan((2 * p,), 0, 2, 0), StagePlan((2 * p + 1,), 2, 4, 1)), 1, 40) for p in range(40)]
    plan = Plan(tuple(pairs), 1600, SEQUENCE, 4)
    with pytest.raises(UserError) as caught:
        validate(schedule_of(plan, MODEL), plan, MODEL)
    lines = str(caught.value).splitlines()
    assert len(lines) == 19 and lines[-2] == "... and 64 more ranks" and max(map(len, lines[1:])) < 200


@pytest.mark.parametrize("seed", range(60))
def test_every_plan_with_depths_that_do_not_grow_passes_the_dry_run(seed: int) -> None:
    plan, profile = random_plan(seed)
    validate(schedule_of(plan, profile.model), plan, profile.model)


GOOD = {0: "0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE0 0STEP", 1: "1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE0 1STEP"}


@pytest.mark.parametrize(
    ("rank", "text", "named"),
    [
        (1, "1F0 1RECV_F0 1B0 1SEND_B0 1REDUCE0 1STEP", ("1F0", "1RECV_F0")),
        (1, "1RECV_F0 1F0 1SEND_B0 1B0 1REDUCE0 1STEP", ("1SEND_B0", "1B0")),
        (0, "0F0 0SEND_F0 0B0 0RECV_B0 0REDUCE0 0STEP", ("0B0", "0RECV_B0")),
        (0, "0F0 0SEND_F0 0F0 0RECV_B0 0B0 0REDUCE0 0STEP", ("0F0",)),
        (0, "0F0 0RECV_B0 0B0 0REDUCE0 0STEP", ("rank 0", "0SEND_F0")),
        (0, "0F0 0SEND_F0 0RECV_B0 0B0 0STEP", ("rank 0", "REDUCE")),
        (1, "1RECV_F0 1F0 1REDUCE0 1B0 1SEND_B0 1STEP", ("1REDUCE0", "1B0")),
        (0, "0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE0", ("STEP",)),
        (0, "0F0 0SEND_F0 0RECV_B0 0B0 0SEND_B0 0REDUCE0 0STEP", ("0SEND_B0",)),
        (1, "0F0 1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE0 1STEP", ("rank 1", "0F0")),
        (1, "", ("STEP",)),
    ],
)
def test_wrong_lists_are_refused(rank: int, text: str, named: tuple[str, ...]) -> None:
    plan = make_plan_of((0, 2, 4), (0, 1), 1)
    good: Schedule = {r: actions(t) for r, t in GOOD.items()}
    validate(good, plan, TIED)
    with refuses("schedule.invalid", f"> rank {rank}", *named):
        validate({**good, rank: actions(text)}, plan, TIED)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("1RECV_F0 1F0 1W0 1I0 1SEND_B0 1STEP", ("1W0", "1I0")),
        ("1RECV_F0 1F0 1I0 1SEND_B0 1STEP", ("1W0",)),
        ("1RECV_F0 1F0 1B0 1I0 1SEND_B0 1W0 1STEP", ("1I0",)),
        ("1RECV_F0 1F0 1I0 1W0 1W0 1SEND_B0 1STEP", ("1W0",)),
    ],
)
def test_wrong_lists_of_a_split_backward_are_refused(text: str, named: tuple[str, ...]) -> None:
    plan = split(make_plan_of((0, 2, 4), (0, 1), 1))
    good = schedule_of(plan, MODEL)
    validate(good, plan, MODEL)
    with refuses("schedule.invalid", *named):
        validate({**good, 1: actions(text)}, plan, MODEL)


def test_a_receive_nobody_sends_for_is_stuck() -> None:
    assert stuck_at({0: actions("0RECV_B0 0STEP"), 1: actions("1STEP")}) == {0: 0, 1: 0}
