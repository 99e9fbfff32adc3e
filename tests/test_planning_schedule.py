"""Schedules drawn as grids, the dry run, and simulated times checked by hand."""

import random
from dataclasses import replace
from textwrap import dedent

import pytest

from hetero_mpi.errors import UserError
from hetero_mpi.planning.dry_run import grid, interpret, validate
from hetero_mpi.planning.memory import in_flight, predict_memory, stage_memory
from hetero_mpi.planning.schedule import Action, Op, Schedule, one_f_one_b, parse_action
from hetero_mpi.planning.simulator import duration, makespan_s, simulate
from tests.planning_samples import make_model, make_plan_of, make_profile


def actions(text: str) -> tuple[Action, ...]:
    return tuple(parse_action(word) for word in text.split())


def drawn(text: str) -> str:
    """A grid without regard to the width of its columns."""
    return "\n".join(" ".join(line.split()) for line in dedent(text).strip().splitlines())


@pytest.mark.parametrize("text", ["2F0", "1SEND_B3", "0RECV_F12", "10REDUCE", "3STEP"])
def test_actions_read_back(text: str) -> None:
    assert str(parse_action(text)) == text


@pytest.mark.parametrize("text", ["F0", "1X2", "1F", "0STEP1", "1SEND_B3 ", "-1F0"])
def test_other_texts_are_no_actions(text: str) -> None:
    with pytest.raises(UserError, match="2F0"):
        parse_action(text)


def test_classic_schedule_as_a_grid() -> None:
    schedule = one_f_one_b(make_plan_of((0, 1, 2, 4), (0, 1, 2), 4), tied=False)
    assert drawn(grid(schedule)) == drawn("""
        clock    0   1   2   3   4   5   6   7   8   9  10  11
        rank 0 0F0 0F1 0F2   .   . 0B0 0F3 0B1   . 0B2   . 0B3
        rank 1   . 1F0 1F1   . 1B0 1F2 1B1 1F3 1B2   . 1B3   .
        rank 2   .   . 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3   .   .
    """)


def test_deeper_warm_up_as_a_grid_on_ranks_in_another_order() -> None:
    schedule = one_f_one_b(make_plan_of((0, 2, 4), (3, 1), 3, warm_up=(9, 0)), tied=False)
    assert drawn(grid(schedule)) == drawn("""
        clock    0   1   2   3   4   5   6   7
        rank 1   . 1F0 1B0 1F1 1B1 1F2 1B2   .
        rank 3 0F0 0F1 0F2 0B0   . 0B1   . 0B2
    """)


def test_lists_of_a_tied_model_end_with_reduce_on_both_ends_only() -> None:
    plan = make_plan_of((0, 1, 2, 4), (0, 1, 2), 1)
    schedule = one_f_one_b(plan, tied=True)
    assert schedule[0] == actions("0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE 0STEP")
    assert schedule[1] == actions("1RECV_F0 1F0 1SEND_F0 1RECV_B0 1B0 1SEND_B0 1STEP")
    assert schedule[2] == actions("2RECV_F0 2F0 2B0 2SEND_B0 2REDUCE 2STEP")
    alone = one_f_one_b(make_plan_of((0, 4), (2,), 2), tied=True)
    assert alone == {2: actions("0F0 0B0 0F1 0B1 0STEP")}


@pytest.mark.parametrize("seed", range(40))
def test_every_non_increasing_depth_from_classic_on_is_free_of_deadlock(seed: int) -> None:
    draw = random.Random(seed)
    stages, count = draw.randint(1, 5), draw.randint(1, 6)
    depth = [stages - 1 - i for i in range(stages)]
    for i in reversed(range(stages)):
        depth[i] = max([depth[i] + draw.randint(0, 3), *depth[i + 1 : i + 2]])
    plan = make_plan_of(range(stages + 1), draw.sample(range(stages), stages), count, depth)
    validate(one_f_one_b(plan, tied=draw.random() < 0.5), plan)


def test_a_deadlock_is_shown_with_the_stuck_rows_marked() -> None:
    plan = make_plan_of((0, 2, 4), (0, 1), 3, warm_up=(0, 1))
    with pytest.raises(UserError) as caught:
        validate(one_f_one_b(plan, tied=False), plan)
    message = str(caught.value)
    assert "rank 0 waits at 0RECV_B0 for 1SEND_B0; rank 1 waits at 1RECV_F1 for 0SEND_F1" in message
    assert drawn(message).splitlines()[1].startswith("> rank 0 0F0 0SEND_F0 [0RECV_B0] 0B0")


GOOD = {
    0: "0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE 0STEP",
    1: "1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE 1STEP",
}


@pytest.mark.parametrize(
    ("rank", "text", "rule"),
    [
        (1, "1F0 1RECV_F0 1B0 1SEND_B0 1REDUCE 1STEP", "1F0 comes before 1RECV_F0"),
        (1, "1RECV_F0 1F0 1SEND_B0 1B0 1REDUCE 1STEP", "1SEND_B0 comes before 1B0"),
        (0, "0F0 0SEND_F0 0B0 0RECV_B0 0REDUCE 0STEP", "0B0 comes before 0RECV_B0"),
        (0, "0F0 0SEND_F0 0F0 0RECV_B0 0B0 0REDUCE 0STEP", "0F0 occurs twice"),
        (0, "0F0 0RECV_B0 0B0 0REDUCE 0STEP", "rank 0 never does 0SEND_F0"),
        (0, "0F0 0SEND_F0 0RECV_B0 0B0 0STEP", "rank 0 must REDUCE once"),
        (0, "0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE", "must end with its only STEP"),
        (0, "0F0 0SEND_F0 0RECV_B0 0B0 0SEND_B0 0REDUCE 0STEP", "0SEND_B0 is no action of stage 0"),
        (1, "0F0 1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE 1STEP", "rank 1 does not hold the stage of 0F0"),
        (1, "", "must end with its only STEP"),
    ],
)
def test_wrong_lists_are_refused(rank: int, text: str, rule: str) -> None:
    plan = make_plan_of((0, 2, 4), (0, 1), 1)
    good: Schedule = {r: actions(t) for r, t in GOOD.items()}
    validate(good, plan)
    with pytest.raises(UserError) as caught:
        validate({**good, rank: actions(text)}, plan)
    assert rule in str(caught.value)
    assert f"> rank {rank}" in str(caught.value)


def test_a_receive_nobody_sends_for_is_stuck() -> None:
    assert interpret({0: actions("0RECV_B0 0STEP"), 1: actions("1STEP")}).stuck == (0, 1)


def test_two_stages_with_a_link_by_hand() -> None:
    """Stage 0: embedding + block, F 1.1 s, B 2.2 s; stage 1: block + head, F 1.5 s, B 3 s; every message 2 s.

    rank 0  F0 0-1.1, F1 1.1-2.2, B0 9.6-11.8, B1 14.1-16.3
    0 -> 1  F0 1.1-3.1, F1 3.1-5.1
    rank 1  F0 3.1-4.6, B0 4.6-7.6, F1 7.6-9.1, B1 9.1-12.1
    1 -> 0  B0 7.6-9.6, B1 12.1-14.1
    """
    profile = make_profile((1.0, 1.0), latency_s=1.0, bytes_per_s=1000.0)
    result = simulate(make_plan_of((0, 2, 4), (0, 1), 2), profile)
    times = {str(e.action): (round(e.start_s, 9), round(e.end_s, 9)) for e in result.events}
    assert times == {
        "0F0": (0.0, 1.1), "0SEND_F0": (1.1, 3.1), "0F1": (1.1, 2.2), "0SEND_F1": (3.1, 5.1),
        "0RECV_B0": (2.2, 9.6), "0B0": (9.6, 11.8),
        "0RECV_B1": (11.8, 14.1), "0B1": (14.1, 16.3), "0STEP": (16.3, 16.3),
        "1RECV_F0": (0.0, 3.1), "1F0": (3.1, 4.6), "1B0": (4.6, 7.6), "1SEND_B0": (7.6, 9.6),
        "1RECV_F1": (7.6, 7.6), "1F1": (7.6, 9.1), "1B1": (9.1, 12.1), "1SEND_B1": (12.1, 14.1), "1STEP": (16.3, 16.3),
    }  # fmt: skip
    assert result.step_s == pytest.approx(16.3)
    assert result.busy_s == pytest.approx({0: 6.6, 1: 9.0})
    assert result.waiting_s == pytest.approx({0: 9.7, 1: 7.3})
    assert {e.bytes for e in result.events if e.action.op is Op.SEND_F} == {1000}


def test_copies_recompute_reduce_and_step_are_priced() -> None:
    profile = make_profile((1.0, 2.0), make_model(tied=True), latency_s=1.0, bytes_per_s=1000.0)
    slow_copy = replace(
        profile.devices[1],
        copy_latency_s=0.5,
        host_to_device_bytes_per_s=100.0,
        device_to_host_bytes_per_s=500.0,
        optimizer_fixed_s=0.25,
        optimizer_s_per_parameter=0.001,
    )
    profile = replace(profile, devices=(profile.devices[0], slow_copy))
    plan = make_plan_of((0, 2, 4), (0, 1), 2)
    first, last = plan.pipelines[0].stages
    plan = replace(plan, pipelines=(replace(plan.pipelines[0], stages=(first, replace(last, recompute=True))),))
    priced = actions("0F0 1F0 0B1 1B1 0SEND_F0 1SEND_B0 1RECV_F0 1STEP 0STEP 0REDUCE 1REDUCE")
    seconds = {str(action): duration(action, plan, profile) for action in priced}
    there, back = (1 + 4) + (0.5 + 40), (0.5 + 8) + (1 + 4)
    assert seconds == pytest.approx({
        "0F0": 1.1, "1F0": 3.0, "0B1": 2.2, "1B1": 8.0, "0SEND_F0": (1 + 1) + (0.5 + 10),
        "1SEND_B0": (0.5 + 2) + (1 + 1),
        "1RECV_F0": 0.0, "1STEP": 0.25 + 1.4, "0STEP": 0.0, "0REDUCE": there + back, "1REDUCE": there + back,
    })  # fmt: skip
    result = simulate(plan, profile)
    end = {str(e.action): e.end_s for e in result.events}
    start = {str(e.action): e.start_s for e in result.events}
    assert start["0REDUCE"] == start["1REDUCE"] == end["0B1"]
    assert start["0STEP"] == start["1STEP"] == end["0REDUCE"]
    assert result.step_s == pytest.approx(end["0REDUCE"] + 1.65)


@pytest.mark.parametrize("seed", range(40))
def test_the_planners_short_form_equals_the_simulation_to_the_last_bit(seed: int) -> None:
    draw = random.Random(seed)
    stages, count = draw.randint(1, 4), draw.randint(1, 6)
    depth = sorted((stages - 1 - i + draw.randint(0, 2) for i in range(stages)), reverse=True)
    profile = make_profile(
        [draw.uniform(0.5, 2) for _ in range(stages)], make_model(3), latency_s=draw.uniform(0, 3), bytes_per_s=500.0
    )
    plan = make_plan_of([0, *sorted(draw.sample(range(1, 5), stages - 1)), 5], range(stages), count, depth)

    def seconds(op: Op, numbers: range) -> list[float]:
        return [duration(Action(op, number, 0), plan, profile) for number in numbers]

    every, out, back = range(stages), range(stages - 1), range(1, stages)
    short = makespan_s(
        seconds(Op.F, every), seconds(Op.B, every), seconds(Op.SEND_F, out), seconds(Op.SEND_B, back), depth, count
    )
    assert short == simulate(plan, profile).step_s


def test_micro_batches_in_flight_are_counted() -> None:
    assert in_flight(actions("0F0 0F1 0B0 0F2 0F3 0B1")) == 3
    for depth, count, expected in ((2, 4, 3), (3, 4, 4), (9, 4, 4), (0, 4, 1)):
        schedule = one_f_one_b(make_plan_of((0, 2, 4), (0, 1), count, (depth, 0)), tied=False)
        assert in_flight(schedule[0]) == expected


def test_memory_by_hand() -> None:
    """Stage 0: embedding + block, 1,400 parameters; two micro-batches of 10 tokens in flight; 1,000-byte messages."""
    plan = make_plan_of((0, 2, 4), (1, 0), 4)
    profile = make_profile((1.0, 1.0), memory_bytes=(50_000, 40_000))
    by_rank = {m.rank: (m.peak_bytes, m.usable_bytes) for m in predict_memory(plan, profile, reserve=0.25)}
    fixed = 1400 * 4 + 1400 * 12 + 50 * 10 + 2 * 2 * 1000
    assert by_rank == {1: (fixed + 2 * 2 * 300 * 10, 30_000), 0: (fixed + 1 * 2 * 300 * 10, 37_500)}
    again = stage_memory(profile.model, 2, 4, 10, in_flight=3, recompute=True)
    # The block keeps its input, the head all it needs; one block is computed again at a time.
    assert (again.activations, again.workspace) == (3 * (1000 + 3000), 500 + 300 * 10)


def test_a_rank_with_both_tied_ends_holds_their_matrix_once() -> None:
    tied = stage_memory(make_model(tied=True), 0, 4, 10, 1)
    untied = stage_memory(make_model(tied=False), 0, 4, 10, 1)
    assert (untied.parameters - tied.parameters, untied.state - tied.state) == (1000 * 4, 1000 * 12)
    assert stage_memory(make_model(tied=True), 0, 3, 10, 1) == stage_memory(make_model(tied=False), 0, 3, 10, 1)
