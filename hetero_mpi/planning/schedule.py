"""The actions of a step as data: generated, printed, validated, simulated and executed.

The text form follows torch.distributed.pipelining: ``2F0`` (stage 2, forward of micro-batch 0), ``1SEND_B3``.
"""

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
    """An operation of a rank: compute (F, B), a message, an all-reduce or the optimizer step.

    A split backward is I (input gradient) and W (weight gradients). SEND_F/RECV_F move activations, SEND_B/RECV_B gradients.
    REDUCE sums a layer's gradients over its holders (tied ends included); STEP clips by the global norm and runs the optimizer.
    """

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
"""Operations that compute on a micro-batch."""
COMPUTING = (*COMPUTE, Op.STEP)
"""Operations that occupy a rank; messages and all-reduces overlap with them."""
WHOLE_STEP = (Op.REDUCE, Op.STEP)
"""Operations that belong to the step instead of a micro-batch."""
SENDS, RECEIVES = (Op.SEND_F, Op.SEND_B), (Op.RECV_F, Op.RECV_B)
OTHER_ENDS = {
    Op.SEND_F: (Op.RECV_F, 1),
    Op.SEND_B: (Op.RECV_B, -1),
    Op.RECV_F: (Op.SEND_F, -1),
    Op.RECV_B: (Op.SEND_B, 1),
}
"""Operation at one end of a message -> operation at the other end, and that stage's number relative to this one's."""


class Action(NamedTuple):
    """An operation; ``stage`` is numbered over all pipelines in plan order, ``micro_batch`` within its pipeline.

    ``1SEND_F3``: stage 1 sends its output of micro-batch 3 to stage 2. ``1SEND_B3``: it sends its input's gradient to stage 0.
    ``1RECV_F3``: it receives its input from stage 0. ``1RECV_B3``: it receives its output's gradient from stage 2. ``0STEP``
    and ``2REDUCE5`` (stage 2 takes part in reducing layer 5) have no micro-batch.
    """

    op: Op
    stage: int
    micro_batch: int | None = None
    layer: int | None = None

    def __str__(self) -> str:
        number = self.layer if self.op is Op.REDUCE else self.micro_batch
        return f"{self.stage}{self.op.value}{'' if number is None else number}"

    def other_end(self) -> "Action":
        """The receive of a message's send, or the send of its receive."""
        op, away = OTHER_ENDS[self.op]
        return Action(op, self.stage + away, self.micro_batch)

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Parse ``"1SEND_B3"`` into ``Action(Op.SEND_B, stage=1, micro_batch=3)``; raise ``UserError`` if it is malformed."""
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
            return cls(op, stage, layer=int(match[3]))
        return cls(op, stage, int(match[3]) if match[3] else None)


Schedule = dict[int, tuple[Action, ...]]
"""Rank -> its actions in order; idle ranks are absent, although they join collective calls between steps."""


@dataclass(frozen=True)
class Event:
    """An executed or predicted action. Times are seconds since the start of the step."""

    rank: int
    step: int
    action: Action
    start_s: float
    end_s: float
    bytes: int = 0
    exchanged_s: float = field(default=0.0, kw_only=True)
    """Seconds spent exchanging with the tensor-parallel group, or waiting for it."""


@dataclass(frozen=True)
class MeasuredEvent(Event):
    """An executed action. A receive waits, then copies; a send copies, then hands the message to the transport."""

    copied_s: float = 0.0
    """Seconds spent copying between device and host memory."""
    arrived_s: float | None = None
    """Time at which a received message reached host memory, on the clock of ``start_s``; None if unknown."""
    begun_s: float | None = None
    """Time at which a send began, in events from ``on_one_clock``; it may then have waited for the link."""


def holdings(actions: Sequence[Action]) -> tuple[tuple[int, int], ...]:
    """Return the maximal pairs (in flight, deferred) of micro-batches that a stage holds while it runs ``actions``.

    A micro-batch is in flight from its forward to the end of its backward (or of the input part), and deferred while its weight
    gradients are due.
    """
    in_flight = deferred = 0
    holding_pairs: set[tuple[int, int]] = set()
    for action in actions:
        if action.op is Op.F:
            in_flight += 1
        elif action.op in (Op.B, Op.I):
            in_flight -= 1
            deferred += action.op is Op.I
        elif action.op is Op.W:
            deferred -= 1
        holding_pairs.add((in_flight, deferred))
    largest: list[tuple[int, int]] = []
    for pair in sorted(holding_pairs, reverse=True):
        if not largest or pair[1] > largest[-1][1]:
            largest.append(pair)
    return tuple(largest)


def busy(events: Iterable[Event]) -> dict[int, float]:
    """Map each rank to the seconds it spends computing, excluding tensor-parallel exchanges."""
    result: dict[int, float] = {}
    for event in events:
        seconds = event.end_s - event.start_s - event.exchanged_s if event.action.op in COMPUTING else 0.0
        result[event.rank] = result.get(event.rank, 0.0) + seconds
    return result


def holders(plan: Plan) -> dict[int, tuple[int, ...]]:
    """Map each layer to the ranks that hold it or a shard of it, in plan order."""
    ranks_by_layer: dict[int, tuple[int, ...]] = {}
    for _, _, stage in plan.numbered:
        for layer in range(stage.first, stage.last):
            ranks_by_layer[layer] = (*ranks_by_layer.get(layer, ()), *stage.ranks)
    return ranks_by_layer


def reduced_layers(plan: Plan, model: ModelCost) -> dict[int, tuple[int, ...]]:
    """Map each trained layer on several ranks to the ranks that reduce its gradients (tied layer 0: heads too)."""
    ranks_by_layer = {}
    for index, layer in enumerate(model.layers):
        ranks = plan.holders[index]
        if index == 0 and model.tied:
            ranks = tuple(dict.fromkeys((*ranks, *plan.holders[-1])))
        if len(ranks) > 1 and layer.trainable_parameters > 0:
            ranks_by_layer[index] = ranks
    return ranks_by_layer


def tied_heads(plan: Plan, model: ModelCost) -> dict[int, int]:
    """Map each head's stage to its pipeline's embedding stage if a trained tied matrix is on two ranks.

    The head's REDUCE of layer 0 sends its gradient to the embedding, which adds it before the all-reduce; STEP returns the new
    values.
    """
    if not model.tied or model.layers[0].trainable_parameters == 0:
        return {}
    embedding_by_head, number = {}, 0
    for pipeline in plan.pipelines:
        if pipeline.stages[0].ranks != pipeline.stages[-1].ranks:
            embedding_by_head[number + len(pipeline.stages) - 1] = number
        number += len(pipeline.stages)
    return embedding_by_head


def schedule_of(plan: Plan, model: ModelCost) -> Schedule:
    """Return each rank's actions: the operations in the pipeline's order (``orders``), with their messages.

    In a tensor-parallel group the leader exchanges the messages and broadcasts what it receives. After its last backward, a
    rank REDUCEs shared layers from last to first; every rank uses this order, so it cannot deadlock.
    """
    schedule: Schedule = {}
    summed, first = reduced_layers(plan, model), 0
    for pipeline in plan.pipelines:
        computed = computed_by_rank(pipeline)
        for rank, indices in pipeline.stages_of.items():
            leads = rank == pipeline.stages[indices[0]].ranks[0]
            actions = [action for operation in computed[rank] for action in _with_messages(*operation, pipeline, first)]
            actions = actions if leads else [action for action in actions if action.op not in SENDS]
            stage_by_layer = {
                layer: i for i in indices for layer in range(pipeline.stages[i].first, pipeline.stages[i].last)
            }
            layers = (layer for layer in sorted(summed, reverse=True) if rank in summed[layer])
            # A tied head reduces layer 0 without holding it.
            reduces = [
                Action(Op.REDUCE, first + stage_by_layer.get(layer, indices[-1]), layer=layer) for layer in layers
            ]
            schedule[rank] = (*actions, *reduces, Action(Op.STEP, first + indices[0]))
        first += len(pipeline.stages)
    return schedule


def _with_messages(name: str, index: int, m: int, pipeline: PipelinePlan, first: int) -> list[Action]:
    """Return an operation between its receives and sends; ``first`` is the number of the pipeline's first stage."""
    op, number, last = Op(name), first + index, len(pipeline.stages) - 1
    has_previous = index > 0 and not pipeline.is_local_boundary(index - 1)
    has_next = index < last and not pipeline.is_local_boundary(index)
    if op is Op.F:
        received, sent = [Op.RECV_F] * has_previous, [Op.SEND_F] * has_next
    elif op is Op.W:
        received, sent = [], []
    else:
        received, sent = [Op.RECV_B] * has_next, [Op.SEND_B] * has_previous
    return [Action(operation, number, m) for operation in (*received, op, *sent)]
