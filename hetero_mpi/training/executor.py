"""Interprets a rank's actions: exactly the lists that were validated and simulated."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hetero_mpi.comm.transport import Transport
from hetero_mpi.model.stage import MicroBatch, Stage
from hetero_mpi.planning.plan import PipelinePlan
from hetero_mpi.planning.schedule import Action, Event, Op
from hetero_mpi.training.channel import Inbox, Outbox
from hetero_mpi.training.emulation import Emulation

_FORWARD, _BACKWARD, _EVALUATION = 0, 1, 2


def tag_of(stage: int, direction: int) -> int:
    """Message tag of what stage ``stage`` receives; one tag per receiving stage and direction keeps micro-batches in order."""
    return stage * 4 + direction


@dataclass(frozen=True)
class StepData:
    """What a step computes on. Tensors on the device, (B_global, T) int64; None where this rank does not need them."""

    step: int
    tokens: torch.Tensor | None
    targets: torch.Tensor | None
    target_tokens: int
    """Targets of the whole global batch."""
    loss_scale: float = 1.0
    """Factor of the loss in backward (fp16)."""


class Executor:
    """Runs the actions of one stage of one pipeline.

    Args:
        stage: this rank's share of the model.
        index: number of the stage among all stages of the plan.
        pipeline: the pipeline it belongs to.
        position: index of the stage within its pipeline.
        transport: how tensors reach the neighbours.
        hidden: width D of the tensors between stages.
        sequence_length: tokens T per sequence.
        emulation: makes actions and messages of steps last as those of other devices.
    """

    def __init__(
        self,
        stage: Stage,
        index: int,
        pipeline: PipelinePlan,
        position: int,
        transport: Transport,
        hidden: int,
        sequence_length: int,
        emulation: Emulation | None = None,
    ) -> None:
        self.stage, self.index, self.pipeline = stage, index, pipeline
        self.pace = emulation.pace if emulation is not None else None
        wire = emulation.transport if emulation is not None else transport
        self.boundary = (pipeline.micro_batch, sequence_length, hidden)
        own, backend = pipeline.stages[position], stage.backend
        self.previous = pipeline.stages[position - 1].ranks[0] if position > 0 else None
        self.next = pipeline.stages[position + 1].ranks[0] if position + 1 < len(pipeline.stages) else None
        self.rank = own.ranks[0]
        self.activations_in = self.activations_out = self.gradients_in = self.gradients_out = None
        self.evaluation_in = self.evaluation_out = None
        depth = min(own.warm_up + 2, pipeline.micro_batches)
        if self.previous is not None:
            source = (wire, self.previous)
            self.activations_in = Inbox(*source, tag_of(index, _FORWARD), backend, stage.dtype, depth)
            self.gradients_out = Outbox(*source, tag_of(index - 1, _BACKWARD), backend)
            self.evaluation_in = Inbox(transport, self.previous, tag_of(index, _EVALUATION), backend, stage.dtype, 2)
        if self.next is not None:
            sink = (wire, self.next)
            self.gradients_in = Inbox(*sink, tag_of(index, _BACKWARD), backend, stage.dtype, 2)
            self.activations_out = Outbox(*sink, tag_of(index + 1, _FORWARD), backend)
            self.evaluation_out = Outbox(transport, self.next, tag_of(index + 1, _EVALUATION), backend)

        self.losses: list[torch.Tensor] = []
        """Shares of the loss of the running step's micro-batches (fp32 scalars), on the last stage."""
        self._inputs: dict[tuple[Op, int], torch.Tensor] = {}
        self._outputs: dict[tuple[Op, int], torch.Tensor] = {}

    def run(
        self, actions: Sequence[Action], data: StepData, whole_step: dict[Op, Callable[[Action], None]]
    ) -> list[Event]:
        """Run one step and return what took place when.

        Args:
            actions: this rank's list.
            data: tokens and targets.
            whole_step: what REDUCE and STEP do.
        """
        self._begin()
        events = []
        begin = time.perf_counter()
        for action in actions:
            start = time.perf_counter()
            if action.micro_batch is None:
                whole_step[action.op](action)
                moved = 0
            else:
                moved = self._perform(action.op, action.micro_batch, data)
                if self.pace is not None:
                    self.pace.hold(action.op, self.index, start)
            events.append(Event(self.rank, data.step, action, start - begin, time.perf_counter() - begin, moved))
        self.flush()
        assert not self._inputs and not self._outputs, "the step left tensors behind"
        return events

    def flush(self) -> None:
        """Return when everything this stage sent has left: collective calls may follow."""
        for outbox in (self.activations_out, self.gradients_out):
            if outbox is not None:
                outbox.flush()

    def evaluate(self, batches: Sequence[StepData]) -> float:
        """Forward of held-out batches through the pipeline.

        Args:
            batches: each of exactly ``micro_batch`` sequences (short ones are padded with ignored targets).

        Returns:
            Sum of the losses of all targets on the last stage, else 0.
        """
        total = 0.0
        if self.evaluation_in is not None:
            self.evaluation_in.begin([self.boundary] * len(batches))
        for data in batches:
            x = self.evaluation_in.take() if self.evaluation_in is not None else data.tokens
            assert x is not None
            y = self.stage.evaluate(x, data.targets)
            if self.evaluation_in is not None:
                self.evaluation_in.release()
            if self.evaluation_out is not None:
                self.evaluation_out.put(y)
            else:
                total += float(y)
        if self.evaluation_out is not None:
            self.evaluation_out.flush()
        return total

    def _begin(self) -> None:
        self.losses = []
        shapes = [self.boundary] * self.pipeline.micro_batches
        for inbox in (self.activations_in, self.gradients_in):
            if inbox is not None:
                inbox.begin(shapes)

    def _perform(self, op: Op, index: int, data: StepData) -> int:
        """One action of one micro-batch; returns the bytes sent or received."""
        if op is Op.F:
            self._forward(index, data)
        elif op is Op.B:
            self._backward(index, data.loss_scale)
        elif op in (Op.RECV_F, Op.RECV_B):
            inbox = self.activations_in if op is Op.RECV_F else self.gradients_in
            assert inbox is not None
            tensor = inbox.take()
            self._inputs[op, index] = tensor
            return tensor.nbytes
        else:
            outbox = self.activations_out if op is Op.SEND_F else self.gradients_out
            assert outbox is not None
            return outbox.put(self._outputs.pop((op, index)))
        return 0

    def _forward(self, index: int, data: StepData) -> None:
        rows = slice(index * self.pipeline.micro_batch, (index + 1) * self.pipeline.micro_batch)
        position = MicroBatch(index, data.step, rows.start, data.target_tokens)
        x = self._inputs.pop((Op.RECV_F, index)) if data.tokens is None else data.tokens[rows]
        y = self.stage.forward(position, x, None if data.targets is None else data.targets[rows])
        if self.stage.is_last:
            self.losses.append(y)
        else:
            self._outputs[Op.SEND_F, index] = y

    def _backward(self, index: int, loss_scale: float) -> None:
        dy = self._inputs.pop((Op.RECV_B, index), None)
        if self.stage.is_last and loss_scale != 1.0:
            dy = torch.tensor(loss_scale, device=self.stage.backend.device)
        dx = self.stage.backward(index, dy)
        if self.gradients_in is not None:
            self.gradients_in.release()
        if self.activations_in is not None:
            self.activations_in.release()  # only now: the input is kept for backward
        if dx is not None:
            self._outputs[Op.SEND_B, index] = dx
