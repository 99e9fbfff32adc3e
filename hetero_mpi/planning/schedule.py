"""The actions of a step, as data: generated, printed, validated, simulated and executed.

The text form follows torch.distributed.pipelining: ``2F0`` (stage 2, forward of micro-batch 0), ``1SEND_B3``.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hetero_mpi.planning.orders import computed_by_rank
from hetero_mpi.planning.types.cost import ModelCost
from hetero_mpi.planning.types.plan import PipelinePlan, Plan
from hetero_mpi.util.errors import UserError


class Op(str, enum.Enum):
    """An operation of a rank. F/B compute, where backward is split I (gradient of the input) and W (of the weights) instead of B;
    SEND_F/RECV_F move activations, SEND_B/RECV_B gradients; REDUCE sums the gradients of a layer held more than once (tied
    ends included); STEP clips by the global norm and runs the optimizer."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 - the field's name for it
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    REDUCE = "REDUCE"
    STEP = "STEP"

    # Actions are keys of large dictionaries; Enum's own hash is computed in Python, every time.
    __hash__ = str.__hash__


COMPUTE = (Op.F, Op.B, Op.I, Op.W)
"""Operations that keep the device busy with a micro-batch."""
COMPUTING = (*COMPUTE, Op.STEP)
"""Operations during which a rank is busy; messages and sums pass beside them."""
WHOLE_STEP = (Op.REDUCE, Op.STEP)
"""Operations that belong to the step, not to a micro-batch."""


class Action(NamedTuple):
    """``stage`` counts all stages of all pipelines in plan order; ``micro_batch`` counts within the pipeline.

    ``1SEND_F3``: stage 1 sends its output of micro-batch 3 to stage 2. ``1SEND_B3``: stage 1 sends the gradient of its
    input to stage 0. ``1RECV_F3``: stage 1 receives its input from stage 0. ``1RECV_B3``: stage 1 receives the gradient
    of its output from stage 2. Actions of the whole step have no micro-batch: ``0STEP``, and ``2REDUCE5``: stage 2 takes
    part in summing the gradients of ``layer`` 5 of the chain.
    """

    op: Op
    stage: int
    micro_batch: int | None = None
    layer: int | None = None

    def __str__(self) -> str:
        number = self.layer if self.op is Op.REDUCE else self.micro_batch
        return f"{self.stage}{self.op.value}{'' if number is None else number}"


def parse_action(text: str) -> Action:
    """``"1SEND_B3"`` -> ``Action(Op.SEND_B, stage=1, micro_batch=3)``; inverse of ``str``. Raises ``UserError``."""
    match = re.fullmatch(r"(\d+)([A-Z_]+)(\d*)", text)
    names = {op.value: op for op in Op}
    if match is None or match[2] not in names or (match[3] == "") != (names[match[2]] is Op.STEP):
        raise UserError(
            "schedule.action",
            f"an action is written STAGE OP MICRO_BATCH, such as 2F0 or 1SEND_B3; 2REDUCE5 names a layer, 0STEP nothing "
            f"(got {text!r}); operations: {', '.join(names)}",
        )
    op, stage = names[match[2]], int(match[1])
    if op is Op.REDUCE:
        return Action(op, stage, layer=int(match[3]))
    return Action(op, stage, int(match[3]) if match[3] else None)


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
    exchanged_s: float = field(default=0.0, kw_only=True)
    """Seconds of computing in which a rank of a group exchanged with the others, or waited for them."""


@dataclass(frozen=True)
class MeasuredEvent(Event):
    """An executed action. The time of a receive is waiting, then copying; that of a send copying, then handing over."""

    copied_s: float = 0.0
    """Seconds of it spent on the copy between device and host memory: the first of a send, the last of a receive."""
    arrived_s: float | None = None
    """When a received message was seen to be in host memory, on the clock of ``start_s``; None: not known."""
    begun_s: float | None = None
    """When the rank began a send, in events from ``on_one_clock``; it may then have waited for the link."""


def holdings(actions: Sequence[Action]) -> tuple[tuple[int, int], ...]:
    """Micro-batches that a stage holds as it goes through its list: (in flight, deferred), where no other such pair is larger in
    both.

    In flight are micro-batches whose forward has begun and whose backward (or its input part) has not ended; deferred are
    those that still await their weight gradients.
    """
    now = waiting = 0
    found: set[tuple[int, int]] = set()
    for action in actions:
        if action.op is Op.F:
            now += 1
        elif action.op in (Op.B, Op.I):
            now -= 1
            waiting += action.op is Op.I
        elif action.op is Op.W:
            waiting -= 1
        found.add((now, waiting))
    largest: list[tuple[int, int]] = []
    for pair in sorted(found, reverse=True):
        if not largest or pair[1] > largest[-1][1]:
            largest.append(pair)
    return tuple(largest)


def busy(events: Iterable[Event]) -> dict[int, float]:
    """Rank -> seconds of computing, without exchanges in a group."""
    result: dict[int, float] = {}
    for event in events:
        seconds = event.end_s - event.start_s - event.exchanged_s if event.action.op in COMPUTING else 0.0
        result[event.rank] = result.get(event.rank, 0.0) + seconds
    return result


def held_by(plan: Plan, layer: int) -> tuple[int, ...]:
    """The ranks that hold ``layer``, one per pipeline (of a group its first), in plan order."""
    return plan.holders[layer] if layer < plan.layers else ()


def holders(plan: Plan) -> dict[int, tuple[int, ...]]:
    """layer -> the ranks that hold it or a share of it, in plan order."""
    found: dict[int, tuple[int, ...]] = {}
    for _, _, stage in plan.numbered:
        for layer in range(stage.first, stage.last):
            found[layer] = (*found.get(layer, ()), *stage.ranks)
    return found


def reduced_layers(plan: Plan, model: ModelCost) -> dict[int, tuple[int, ...]]:
    """layer -> the ranks that sum its gradients, in plan order; layers held once, or without trained parameters, are absent.

    Layer 0 of a tied model is the matrix of both ends: the ranks of the heads take part in its sum.
    """
    found = {}
    for index, layer in enumerate(model.layers):
        ranks = held_by(plan, index)
        if index == 0 and model.tied:
            ranks = tuple(dict.fromkeys((*ranks, *held_by(plan, plan.layers - 1))))
        if len(ranks) > 1 and layer.trainable_parameters > 0:
            found[index] = ranks
    return found


def tied_heads(plan: Plan, model: ModelCost) -> dict[int, int]:
    """Head's stage -> embedding's stage of its pipeline, where a tied matrix that is trained lies on two ranks.

    Of REDUCE of layer 0 the head does its own part: it brings its share of the gradient to the embedding, which adds it before
    it sums with other pipelines; STEP brings the new values back.
    """
    if not model.tied or model.layers[0].trainable_parameters == 0:
        return {}
    found, number = {}, 0
    for pipeline in plan.pipelines:
        if pipeline.stages[0].ranks != pipeline.stages[-1].ranks:
            found[number + len(pipeline.stages) - 1] = number
        number += len(pipeline.stages)
    return found


def schedule_of(plan: Plan, model: ModelCost) -> Schedule:
    """Each rank's actions: what the pipeline's order computes (``orders``), with the messages that it needs and causes.

    ``dry_run.validate`` says whether any schedule runs its plan and is free of deadlock. Of a group its first rank exchanges the
    messages; the others compute as it does, and what they RECV it hands on to them.

    After its last backward a rank REDUCEs the layers held more than once, the last layer first, as backward finishes them:
    the same order everywhere, so that no two ranks wait for each other.
    """
    schedule: Schedule = {}
    summed, first = reduced_layers(plan, model), 0
    for pipeline in plan.pipelines:
        computed = computed_by_rank(pipeline)
        for rank, places in pipeline.held.items():
            leads = rank == pipeline.stages[places[0]].ranks[0]
            actions = [action for one in computed[rank] for action in _with_messages(*one, pipeline, first)]
            actions = actions if leads else [action for action in actions if action.op not in (Op.SEND_F, Op.SEND_B)]
            own = [layer for layer in sorted(summed, reverse=True) if rank in summed[layer]]
            reduces = [Action(Op.REDUCE, first + _place(layer, pipeline, places), layer=layer) for layer in own]
            schedule[rank] = (*actions, *reduces, Action(Op.STEP, first + places[0]))
        first += len(pipeline.stages)
    return schedule


def _place(layer: int, pipeline: PipelinePlan, places: Sequence[int]) -> int:
    """The place, of those of its rank, of the stage that takes part in the sum of ``layer``: where it is not held, a tied
    head's."""
    holding = (place for place in places if pipeline.stages[place].first <= layer < pipeline.stages[place].last)
    return next(holding, places[-1])


def _with_messages(name: str, place: int, m: int, pipeline: PipelinePlan, first: int) -> list[Action]:
    """One forward or backward with the messages it needs and causes. ``first``: the pipeline's first stage's number."""
    op, number, last = Op(name), first + place, len(pipeline.stages) - 1
    before = place > 0 and not pipeline.together(place - 1)
    behind = place < last and not pipeline.together(place)
    if op is Op.F:
        received, sent = [Op.RECV_F] * before, [Op.SEND_F] * behind
    elif op is Op.W:
        received, sent = [], []
    else:
        received, sent = [Op.RECV_B] * behind, [Op.SEND_B] * before
    return [Action(one, number, m) for one in (*received, op, *sent)]
