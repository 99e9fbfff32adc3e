"""The actions of a step, as data: generated, printed, validated, simulated and executed.

The text form follows torch.distributed.pipelining: ``2F0`` (stage 2, forward of micro-batch 0), ``1SEND_B3``.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Op(str, enum.Enum):
    """What a rank does. F/B compute; SEND_F/RECV_F move activations, SEND_B/RECV_B gradients; REDUCE sums the gradients of
    layers held more than once (tied ends included); STEP clips by the global norm and runs the optimizer."""

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
    """``stage`` counts all stages of all pipelines in plan order; ``micro_batch`` counts within the pipeline (None: whole step).

    ``1SEND_F3``: stage 1 sends its output of micro-batch 3 to stage 2. ``1SEND_B3``: stage 1 sends the gradient of its input
    to stage 0. ``1RECV_F3``: stage 1 receives its input from stage 0. ``1RECV_B3``: stage 1 receives the gradient of its
    output from stage 2.
    """

    op: Op
    stage: int
    micro_batch: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.op.value}{'' if self.micro_batch is None else self.micro_batch}"


Schedule = dict[int, tuple[Action, ...]]
"""rank -> its actions in order; an idle rank has none (it still takes part in collective calls between steps)."""


@dataclass(frozen=True)
class Event:
    """An action that took place (or was predicted to). Times are seconds since the start of the step."""

    rank: int
    step: int
    action: Action
    start_s: float
    end_s: float
    bytes: int = 0
