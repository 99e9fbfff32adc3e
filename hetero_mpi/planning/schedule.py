"""The actions of a step, as data: generated, printed, validated, simulated and executed.

The text form follows torch.distributed.pipelining: ``2F0`` (stage 2, forward of micro-batch 0), ``1SEND_B3``.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from hetero_mpi.errors import UserError
from hetero_mpi.planning.plan import PipelinePlan, Plan, StagePlan


class Op(str, enum.Enum):
    """What a rank does. F/B compute; SEND_F/RECV_F move activations, SEND_B/RECV_B gradients; REDUCE sums the gradients
    of layers held more than once (tied ends included); STEP clips by the global norm and runs the optimizer."""

    F = "F"
    B = "B"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    REDUCE = "REDUCE"
    STEP = "STEP"


@dataclass(frozen=True)
class Action:
    """``stage`` counts all stages of all pipelines in plan order; ``micro_batch`` counts within the pipeline.

    ``1SEND_F3``: stage 1 sends its output of micro-batch 3 to stage 2. ``1SEND_B3``: stage 1 sends the gradient of its
    input to stage 0. ``1RECV_F3``: stage 1 receives its input from stage 0. ``1RECV_B3``: stage 1 receives the gradient
    of its output from stage 2. ``micro_batch`` is None for actions of the whole step: ``0REDUCE``, ``0STEP``.
    """

    op: Op
    stage: int
    micro_batch: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.op.value}{'' if self.micro_batch is None else self.micro_batch}"


WHOLE_STEP = (Op.REDUCE, Op.STEP)
"""Operations that belong to the step, not to a micro-batch."""


def parse_action(text: str) -> Action:
    """``"1SEND_B3"`` -> ``Action(Op.SEND_B, stage=1, micro_batch=3)``; inverse of ``str``. Raises ``UserError``."""
    match = re.fullmatch(r"(\d+)([A-Z_]+)(\d*)", text)
    names = {op.value: op for op in Op}
    if match is None or match[2] not in names or (match[3] == "") != (names[match[2]] in WHOLE_STEP):
        raise UserError(
            f"an action is written STAGE OP MICRO_BATCH, such as 2F0 or 1SEND_B3, and 0REDUCE or 0STEP (got {text!r}); "
            f"operations: {', '.join(names)}"
        )
    return Action(names[match[2]], int(match[1]), int(match[3]) if match[3] else None)


Schedule = dict[int, tuple[Action, ...]]
"""rank -> its actions in order; an idle rank is absent (it still takes part in collective calls between steps)."""


@dataclass(frozen=True)
class Event:
    """An action that took place (or was predicted to). Times are seconds since the start of the step."""

    rank: int
    step: int
    action: Action
    start_s: float
    end_s: float
    bytes: int = 0


def stages(plan: Plan) -> list[tuple[int, int, StagePlan]]:
    """All stages as (global stage number, index of the pipeline, stage), in plan order: the numbers used by actions."""
    flat = [(index, stage) for index, pipeline in enumerate(plan.pipelines) for stage in pipeline.stages]
    return [(number, index, stage) for number, (index, stage) in enumerate(flat)]


def ends_are_split(pipeline: PipelinePlan) -> bool:
    """The embedding and the head lie on different ranks (a tied model must then sum both gradients)."""
    return pipeline.stages[0].ranks != pipeline.stages[-1].ranks


def one_f_one_b(plan: Plan, tied: bool) -> Schedule:
    """Each rank's actions: ``warm_up`` forwards, then a forward and a backward in turn, then the remaining backwards.

    Three stages, four micro-batches, classic depth (2, 1, 0), every forward and backward one clock long::

        clock        0   1   2   3   4   5   6   7   8   9  10  11
        rank 0     0F0 0F1 0F2   .   . 0B0 0F3 0B1   . 0B2   . 0B3
        rank 1       . 1F0 1F1   . 1B0 1F2 1B1 1F3 1B2   . 1B3   .
        rank 2       .   . 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3   .   .

    A stage that warms up deeper than the classic depth keeps more micro-batches in flight, which hides slow links. Free
    of deadlock when no stage warms up deeper than the one before it; ``dry_run.validate`` says so of any schedule.
    ``tied``: the ends share their matrix; the two ranks that hold them then REDUCE before the STEP. With several
    pipelines every rank REDUCEs: each item is held once per pipeline.
    """
    schedule: Schedule = {}
    for number, index, stage in stages(plan):
        pipeline = plan.pipelines[index]
        position = pipeline.stages.index(stage)
        last = position == len(pipeline.stages) - 1
        actions = _micro_batches(number, position == 0, last, stage.warm_up, pipeline.micro_batches)
        split_end = tied and (position == 0 or last) and ends_are_split(pipeline)
        if split_end or len(plan.pipelines) > 1:
            actions.append(Action(Op.REDUCE, number))
        actions.append(Action(Op.STEP, number))
        for rank in stage.ranks:
            schedule[rank] = tuple(actions)
    return schedule


def _micro_batches(number: int, first: bool, last: bool, warm_up: int, count: int) -> list[Action]:
    """Forwards and backwards of one stage, each with the messages it needs and causes."""

    def forward(m: int) -> list[Action]:
        receive = [] if first else [Action(Op.RECV_F, number, m)]
        send = [] if last else [Action(Op.SEND_F, number, m)]
        return [*receive, Action(Op.F, number, m), *send]

    def backward(m: int) -> list[Action]:
        receive = [] if last else [Action(Op.RECV_B, number, m)]
        send = [] if first else [Action(Op.SEND_B, number, m)]
        return [*receive, Action(Op.B, number, m), *send]

    depth = min(warm_up, count)
    actions = [action for m in range(depth) for action in forward(m)]
    for m in range(count):
        if depth + m < count:
            actions += forward(depth + m)
        actions += backward(m)
    return actions


def gradients_first(schedule: Schedule) -> Schedule:
    """The same lists, except that a rank takes the gradient it needs next before it sends its latest activation.

    That is the order of DeepSpeed's pipeline engine, which sends an output at the beginning of the following turn::

        1F1B       0F1 0SEND_F1 0RECV_B0 0B0
        this       0F1 0RECV_B0 0SEND_F1 0B0

    An activation then travels only after a gradient has come: where links are slow, every micro-batch pays for a round
    trip that 1F1B hides.
    """
    return {rank: tuple(_swapped(actions)) for rank, actions in schedule.items()}


def _swapped(actions: tuple[Action, ...]) -> list[Action]:
    result = list(actions)
    for i in range(len(result) - 1):
        if result[i].op is Op.SEND_F and result[i + 1].op is Op.RECV_B:
            result[i], result[i + 1] = result[i + 1], result[i]
    return result
