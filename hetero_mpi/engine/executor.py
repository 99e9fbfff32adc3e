"""Run a rank's list of actions: the schedule that the planner validated and simulated, action by action.

    rank 0 (stage 0)  F0 SEND_F0  F1 SEND_F1  RECV_B0 B0  RECV_B1 B1  REDUCE(layer) ... STEP
    rank 1 (stage 1)  RECV_F0 F0 B0 SEND_B0  RECV_F1 F1 B1 SEND_B1  REDUCE(layer) ... STEP

F and B are the forward and backward pass of a micro-batch. A split backward consists of I (input gradients) and, later, W (weight
gradients). A stage's last backward reports each layer as soon as its gradients are final. REDUCE waits for the summed gradients,
and STEP decides whether to update the parameters and runs the optimizer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

import torch

from hetero_mpi.device.backend import HOST, Mark
from hetero_mpi.engine.channel import BACKWARD, EVALUATION, FORWARD, Inbox, Outbox, tag_of
from hetero_mpi.engine.placement import Placement, RankSetup
from hetero_mpi.engine.wire_format import NEAREST, WireFormat
from hetero_mpi.model.layer.gradients import Finished
from hetero_mpi.model.layer.interface import seed_from
from hetero_mpi.model.layer.micro_batch import StepData
from hetero_mpi.model.stage import Stage
from hetero_mpi.planning.schedule import COMPUTE, Action, Event, MeasuredEvent, Op, holdings
from hetero_mpi.planning.types.plan import PipelinePlan

Decided = TypeVar("Decided")


class Update(Protocol[Decided]):
    """Consumes a step's gradients: reduces them across ranks, takes the collective step decision and runs the optimizer."""

    def finished(self, layer: int) -> None:
        """Report that the gradients of ``layer`` are final; called during the stage's last backward, in reverse layer order."""

    def reduce(self, layer: int) -> None:
        """Execute the REDUCE action of ``layer``."""

    def decide(self, losses: Sequence[torch.Tensor]) -> Decided:
        """Take the collective step decision. ``losses`` holds each micro-batch's share of the loss (fp32), on the last stage."""

    def carry_out(self, decided: Decided) -> None:
        """Execute the STEP action according to the decision."""


@dataclass(frozen=True)
class StepRun(Generic[Decided]):
    decided: Decided | None
    """The result of ``Update.decide``; None if the actions contain no STEP."""
    events: tuple[Event, ...]
    """Actions with their times, in seconds since ``began_s``."""
    began_s: float
    """Start of the step (``time.perf_counter``)."""
    worked_s: float
    """CPU seconds spent in the forward and backward passes of a CPU rank, excluding time spent waiting for a core."""


class _StageLinks:
    """One of the rank's stages with its inboxes and outboxes.

    Adjacent stages on the same rank use neither: the output tensor of one stage is the input of the next.
    """

    def __init__(
        self,
        setup: RankSetup,
        wire: WireFormat,
        stage: Stage,
        placement: Placement,
        pipeline: PipelinePlan,
        actions: Sequence[Action],
    ) -> None:
        self.stage, self.wire = stage, wire
        stage_actions = [action for action in actions if action.stage == placement.index]
        self.last_backward = next((a for a in reversed(stage_actions) if a.op in (Op.B, Op.W)), None)
        self.inboxes: dict[Op, Inbox] = {}
        self.outboxes: dict[Op, Outbox] = {}
        self.evaluation_in: Inbox | None = None
        self.evaluation_out: Outbox | None = None
        in_flight = max(activations for activations, _ in holdings(stage_actions))
        depth = min(in_flight + 1, pipeline.micro_batches)  # one more, so that a receive is always posted
        ranks = [stage.ranks[0] for stage in pipeline.stages]
        index, position, encoding = placement.index, placement.position, (stage.backend, wire.dtype)
        if not setup.leads:
            return
        if position > 0 and (previous_rank := ranks[position - 1]) != ranks[position]:
            self.inboxes[Op.RECV_F] = Inbox(setup.transport, previous_rank, tag_of(index, FORWARD), *encoding, depth)
            self.outboxes[Op.SEND_B] = Outbox(setup.transport, previous_rank, tag_of(index - 1, BACKWARD), *encoding)
            self.evaluation_in = Inbox(setup.transport, previous_rank, tag_of(index, EVALUATION), *encoding, 2)
        if position + 1 < len(ranks) and (next_rank := ranks[position + 1]) != ranks[position]:
            self.inboxes[Op.RECV_B] = Inbox(setup.transport, next_rank, tag_of(index, BACKWARD), *encoding, 2)
            self.outboxes[Op.SEND_F] = Outbox(setup.transport, next_rank, tag_of(index + 1, FORWARD), *encoding)
            self.evaluation_out = Outbox(setup.transport, next_rank, tag_of(index + 1, EVALUATION), *encoding)

    def start_step(self, data: StepData) -> None:
        """Clear the statistics of the previous step and post the first receives."""
        self.stage.rewards.clear()
        if self.stage.routers is not None:
            self.stage.routers.seen.clear()
        for op, inbox in self.inboxes.items():
            inbox.start_step(self.packed_shapes(data, op))

    def packed_shapes(self, data: StepData, op: Op) -> list[tuple[int, ...]]:
        """Return the message shapes of ``op`` (RECV_F or RECV_B), one per micro-batch."""
        return [self.wire.packed_shape(self.shape(data, op, index)) for index in range(len(data.sizes))]

    def unpacked(self, packed: torch.Tensor, data: StepData, op: Op, index: int) -> torch.Tensor:
        """Decode a message received by ``op`` (RECV_F or RECV_B)."""
        return self.wire.unpacked(packed, self.shape(data, op, index))

    def shape(self, data: StepData, op: Op, index: int) -> tuple[int, ...]:
        """Return the shape of a micro-batch's tensor at ``op`` (RECV_F or RECV_B)."""
        layer = (self.stage.first if op is Op.RECV_F else self.stage.last) - 1
        return self.stage.chain.boundary(layer, data.sizes[index], data.length)

    def packed(self, tensor: torch.Tensor, data: StepData, op: Op, index: int) -> torch.Tensor:
        """Encode a micro-batch's tensor as the message that ``op`` (SEND_F or SEND_B) sends."""
        return self.wire.packed(tensor, self._seeds(data, index) if op is Op.SEND_B else NEAREST)

    def _seeds(self, data: StepData, index: int) -> Iterator[int]:
        """Yield the stochastic-rounding seed of each sequence's gradient, which is independent of the micro-batch boundaries."""
        for sample in range(data.first_samples[index], data.first_samples[index] + data.sizes[index]):
            yield seed_from(self.stage.seed, "wire", data.step, sample, self.stage.first - 1)

    def release(self) -> None:
        """Release the tensors that the last backward received.

        Call this only after the device has finished that backward: otherwise all later copies to the device wait for it.
        """
        for inbox in self.inboxes.values():  # the input is kept from forward to backward
            inbox.release()


class Executor:
    """Runs the actions of all of a rank's stages, which belong to one pipeline.

    In a tensor-parallel group only the first rank exchanges messages with other stages; it broadcasts received tensors.

    Attributes:
        current: the running action; None between steps.
        evaluated: number of evaluation forward passes, counted once per micro-batch and stage.
    """

    def __init__(
        self,
        setup: RankSetup,
        stages: Sequence[Stage],
        placements: Sequence[Placement],
        pipeline: PipelinePlan,
        actions: Sequence[Action],
    ) -> None:
        self.actions, self.rank = tuple(actions), setup.rank
        self.current: Action | None = None
        self.evaluated = 0
        self._transport, self._backend, self._group = setup.transport, setup.backend, setup.group
        wire = setup.wire_format()
        self.stages = {
            placement.index: _StageLinks(setup, wire, stage, placement, pipeline, self.actions)
            for stage, placement in zip(stages, placements, strict=True)
        }
        """Maps each stage index to its stage, in chain order."""
        # Kernels run asynchronously. A rank with messages waits for the device after each forward and backward, so that the time is
        # charged to the right action. A rank that is a whole pipeline sends nothing: device events time its actions and its device
        # never idles.
        self._synchronises = setup.group is not None or any(links.inboxes for links in self.stages.values())
        self._on_host = self._backend.device == HOST
        self._marks = not self._synchronises and not self._on_host
        self._last_backwards = {links.last_backward for links in self.stages.values()}
        self._inputs: dict[Action, torch.Tensor] = {}
        """Maps each RECV action to the tensor received, or computed by another stage of this rank."""
        self._outputs: dict[Action, torch.Tensor] = {}
        """Maps each SEND action to the tensor to send."""
        self._losses: list[torch.Tensor] = []
        """Each micro-batch's share of the loss in the current step."""

    def run(self, data: StepData, update: Update[Decided]) -> StepRun[Decided]:
        self._losses = []
        for links in self.stages.values():
            links.start_step(data)
        events: list[Event] = []
        mark_pairs: list[tuple[int, Mark, Mark]] = []
        backend, decided = self._backend, None
        origin = backend.mark() if self._marks else None
        worked_s, begin = 0.0, time.perf_counter()
        for action in self.actions:
            self.current = action
            start, exchanged_s = time.perf_counter(), self._exchanged_s()
            start_mark = backend.mark() if (self._marks or self._on_host) and action.op in COMPUTE else None
            nbytes = 0
            if action.op is Op.REDUCE:
                assert action.layer is not None
                update.reduce(action.layer)
            elif action.op is Op.STEP:
                decided = update.decide(self._losses)
                start = time.perf_counter()  # excludes waiting for other ranks
                update.carry_out(decided)
            else:
                nbytes = self._perform(action, data, update.finished if action in self._last_backwards else None)
                if start_mark is not None and self._on_host:
                    worked_s += backend.mark().seconds_since(start_mark)
                if self._synchronises and action.op in COMPUTE:
                    self._transport.idle = not self._on_host
                    backend.finish_compute()
                    self._transport.idle = False
                if action.op in (Op.B, Op.I):
                    self.stages[action.stage].release()
            if start_mark is not None and self._marks:
                mark_pairs.append((len(events), start_mark, backend.mark()))
            end, exchanged_s = time.perf_counter(), self._exchanged_s() - exchanged_s
            event = Event(self.rank, data.step, action, start - begin, end - begin, nbytes, exchanged_s=exchanged_s)
            events.append(self._with_copies(event, begin))
        self.flush()
        if origin is not None:
            for event_index, start_mark, end_mark in mark_pairs:
                start_s, end_s = start_mark.seconds_since(origin), end_mark.seconds_since(origin)
                events[event_index] = replace(events[event_index], start_s=start_s, end_s=end_s)
        self.current = None
        assert not self._inputs and not self._outputs, "the step left tensors behind"
        return StepRun(decided, tuple(events), begin, worked_s)

    def _exchanged_s(self) -> float:
        """Return the total seconds that the tensor-parallel group has spent in collectives."""
        return self._group.summed_s if self._group is not None else 0.0

    def _with_copies(self, event: Event, began_s: float) -> Event:
        """Add to a message's event its arrival time and the seconds spent waiting for its copies."""
        links, op = self.stages[event.action.stage], event.action.op
        if op in links.inboxes:
            inbox = links.inboxes[op]
            arrived_s = inbox.arrived_s - began_s if inbox.arrived_s is not None else None
            return MeasuredEvent(**vars(event), copied_s=inbox.copied_s, arrived_s=arrived_s)
        if op in (Op.SEND_F, Op.SEND_B):
            return MeasuredEvent(**vars(event), copied_s=links.outboxes[op].copied_s)
        return event

    def flush(self) -> None:
        """Wait until all sends have completed, so that collective calls can follow."""
        for links in self.stages.values():
            for outbox in links.outboxes.values():
                outbox.flush()

    def evaluate(self, data: StepData) -> list[torch.Tensor]:
        """Evaluate micro-batches; return each result of ``Stage.evaluate`` on the last stage, and an empty list elsewhere.

        Each of the rank's stages runs all micro-batches before the next stage starts, which rules out deadlocks.
        """
        for links in self.stages.values():
            links.stage.rewards.clear()
            if links.evaluation_in is not None:
                links.evaluation_in.start_step(links.packed_shapes(data, Op.RECV_F))
        outputs: list[torch.Tensor] = []
        for links in self.stages.values():
            outputs = self._evaluated(links, data, outputs)
        for links in self.stages.values():
            if links.evaluation_out is not None:
                links.evaluation_out.flush()
        return outputs

    def _evaluated(
        self, links: _StageLinks, data: StepData, previous_outputs: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Evaluate one stage, given the outputs of this rank's previous stage; return the outputs that stay on this rank."""
        outputs: list[torch.Tensor] = []
        stage = links.stage
        for index in range(len(data.sizes)):
            x, targets = self._evaluation_input(links, data, index, previous_outputs), data.targets_of(index)
            y = stage.evaluate(x, targets if stage.is_last else None, data.micro_batch(index))
            self.evaluated += 1
            if links.evaluation_in is not None:
                links.evaluation_in.release()
            if links.evaluation_out is not None:
                links.evaluation_out.put(links.packed(y, data, Op.SEND_F, index))
            elif stage.is_last or self._group is None:
                outputs.append(y)
        return outputs

    def _evaluation_input(
        self, links: _StageLinks, data: StepData, index: int, previous_outputs: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        if links.stage.is_first:
            return data.tokens_of(index)
        inbox = links.evaluation_in
        x = previous_outputs[index] if previous_outputs else None
        if inbox is not None:
            x = links.unpacked(inbox.receive(), data, Op.RECV_F, index)
        if self._group is not None:
            return self._group.broadcast(x, links.shape(data, Op.RECV_F, index), links.stage.dtype)
        assert x is not None
        return x

    def _perform(self, action: Action, data: StepData, finished: Finished | None) -> int:
        """Run one action of a micro-batch and return the number of bytes sent or received.

        ``finished`` is called with each layer whose gradients are final; it is None unless this is the stage's last backward.
        """
        op, links = action.op, self.stages[action.stage]
        if op is Op.F:
            self._forward(action, links.stage, data)
        elif op in (Op.B, Op.I):
            self._backward(action, links.stage, data, finished)
        elif op is Op.W:
            links.stage.backward_weights(_index(action), finished)
        elif op in (Op.RECV_F, Op.RECV_B):
            if op not in links.inboxes:
                self._inputs[action] = self._shared(None, links, action, data)
                return 0  # the group's leader counts the message
            tensor = links.inboxes[op].receive()
            self._inputs[action] = links.unpacked(tensor, data, op, _index(action))
            return int(tensor.nbytes)
        else:
            return links.outboxes[op].put(links.packed(self._outputs.pop(action), data, op, _index(action)))
        return 0

    def _forward(self, action: Action, stage: Stage, data: StepData) -> None:
        index, number = _index(action), action.stage
        x = data.tokens_of(index) if stage.is_first else self._received(Action(Op.RECV_F, number, index), data)
        y = stage.forward(data.micro_batch(index), x, data.targets_of(index) if stage.is_last else None)
        if stage.is_last:
            self._losses.append(y)
        else:
            self._hand_on(Action(Op.SEND_F, number, index), Action(Op.RECV_F, number + 1, index), y)

    def _backward(self, action: Action, stage: Stage, data: StepData, finished: Finished | None) -> None:
        index, number = _index(action), action.stage
        dy = None if stage.is_last else self._received(Action(Op.RECV_B, number, index), data)
        if stage.is_last and data.loss_scale != 1.0:
            # Created on the device: a copy would wait for the device.
            dy = torch.full((), data.loss_scale, device=self._backend.device)
        if action.op is Op.I:
            dx = stage.backward_input(index, dy)
        else:
            dx = stage.backward(index, dy, finished)
        if dx is not None:
            self._hand_on(Action(Op.SEND_B, number, index), Action(Op.RECV_B, number - 1, index), dx)

    def _received(self, action: Action, data: StepData) -> torch.Tensor:
        """Return the tensor received by RECV_F or RECV_B, which a tensor-parallel group's leader first broadcasts to the group."""
        received, links = self._inputs.pop(action), self.stages[action.stage]
        leads = self._group is not None and action.op in links.inboxes
        return self._shared(received, links, action, data) if leads else received

    def _shared(self, tensor: torch.Tensor | None, links: _StageLinks, action: Action, data: StepData) -> torch.Tensor:
        """Broadcast the leader's received tensor to the group; the other members pass None."""
        assert self._group is not None
        return self._group.broadcast(tensor, links.shape(data, action.op, _index(action)), links.stage.dtype)

    def _hand_on(self, send: Action, receive: Action, tensor: torch.Tensor) -> None:
        """Store a tensor for the ``send`` action or, if this rank also has the next stage, as the result of ``receive``."""
        if send.op in self.stages[send.stage].outboxes:
            self._outputs[send] = tensor
        elif self._group is None:
            self._inputs[receive] = tensor


def _index(action: Action) -> int:
    assert action.micro_batch is not None
    return action.micro_batch
