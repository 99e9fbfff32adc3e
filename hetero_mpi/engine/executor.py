"""Interprets a rank's actions: exactly the lists that were validated and simulated."""

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
    """The use of a step's gradients: exchanges, the common decision, the optimizer."""

    def finished(self, layer: int) -> None:
        """The gradients of ``layer`` are whole, while its stage's last backward still runs; the last layer first."""

    def reduce(self, layer: int) -> None:
        """REDUCE."""

    def decide(self, losses: Sequence[torch.Tensor]) -> Decided:
        """The common decision, once all have come here. ``losses``: shares of the loss of the micro-batches (fp32 scalars), on
        the last stage."""

    def carry_out(self, decided: Decided) -> None:
        """STEP, by the decision."""


@dataclass(frozen=True)
class StepRun(Generic[Decided]):
    """A step that was run."""

    decided: Decided | None
    """The result of ``Update.decide``; None: the list has no STEP."""
    events: tuple[Event, ...]
    """Actions with their times, in seconds from ``began_s`` on."""
    began_s: float
    """Its beginning (``time.perf_counter``)."""
    worked_s: float
    """Seconds of a CPU rank's forwards and backwards by processor time: without waiting for a core."""


class _StageLinks:
    """One of the rank's stages, what it receives from its neighbours in the chain, and what it sends to them.

    Between two stages of one rank there is no box: what the one computes is at once the other's.
    """

    def __init__(
        self,
        setup: RankSetup,
        wire: WireFormat,
        stage: Stage,
        place: Placement,
        pipeline: PipelinePlan,
        actions: Sequence[Action],
    ) -> None:
        self.stage, self.wire = stage, wire
        own = [action for action in actions if action.stage == place.index]
        self.last_backward = next((a for a in reversed(own) if a.op in (Op.B, Op.W)), None)
        self.inboxes: dict[Op, Inbox] = {}
        self.outboxes: dict[Op, Outbox] = {}
        self.evaluation_in: Inbox | None = None
        self.evaluation_out: Outbox | None = None
        in_flight = max(flying for flying, _ in holdings(own))
        depth = min(in_flight + 1, pipeline.micro_batches)  # one more than are held: a receive is always posted
        ranks = [stage.ranks[0] for stage in pipeline.stages]
        index, position, how = place.index, place.position, (stage.backend, wire.dtype)
        if not setup.leads:
            return
        if position > 0 and (before := ranks[position - 1]) != ranks[position]:
            self.inboxes[Op.RECV_F] = Inbox(setup.transport, before, tag_of(index, FORWARD), *how, depth)
            self.outboxes[Op.SEND_B] = Outbox(setup.transport, before, tag_of(index - 1, BACKWARD), *how)
            self.evaluation_in = Inbox(setup.transport, before, tag_of(index, EVALUATION), *how, 2)
        if position + 1 < len(ranks) and (after := ranks[position + 1]) != ranks[position]:
            self.inboxes[Op.RECV_B] = Inbox(setup.transport, after, tag_of(index, BACKWARD), *how, 2)
            self.outboxes[Op.SEND_F] = Outbox(setup.transport, after, tag_of(index + 1, FORWARD), *how)
            self.evaluation_out = Outbox(setup.transport, after, tag_of(index + 1, EVALUATION), *how)

    def begin(self, data: StepData) -> None:
        """Be ready for what may come early."""
        self.stage.rewards.clear()
        if self.stage.routers is not None:
            self.stage.routers.seen.clear()
        for op, inbox in self.inboxes.items():
            inbox.begin(self.packed_shapes(data, op))

    def packed_shapes(self, data: StepData, op: Op) -> list[tuple[int, ...]]:
        """Shapes of the messages to ``op``, RECV_F or RECV_B, a micro-batch each."""
        return [self.wire.packed_shape(self.shape(data, op, index)) for index in range(len(data.sizes))]

    def unpacked(self, packed: torch.Tensor, data: StepData, op: Op, index: int) -> torch.Tensor:
        """The tensor that a message to ``op``, RECV_F or RECV_B, stands for."""
        return self.wire.unpacked(packed, self.shape(data, op, index))

    def shape(self, data: StepData, op: Op, index: int) -> tuple[int, ...]:
        """Shape of a micro-batch's tensor at ``op``, RECV_F or RECV_B."""
        layer = (self.stage.first if op is Op.RECV_F else self.stage.last) - 1
        return self.stage.chain.boundary(layer, data.sizes[index], data.length)

    def packed(self, tensor: torch.Tensor, data: StepData, op: Op, index: int) -> torch.Tensor:
        """The message of ``op``, SEND_F or SEND_B, for a micro-batch's tensor."""
        return self.wire.packed(tensor, self._seeds(data, index) if op is Op.SEND_B else NEAREST)

    def _seeds(self, data: StepData, index: int) -> Iterator[int]:
        """Seeds by which the gradient of each sequence is rounded on its way to the stage before: functions of the sample alone."""
        for sample in range(data.first_samples[index], data.first_samples[index] + data.sizes[index]):
            yield seed_from(self.stage.seed, "wire", data.step, sample, self.stage.first - 1)

    def release(self) -> None:
        """The tensors that the last backward received may be overwritten.

        Only once it is computed: the copies of whatever arrives from now on would else wait for it, also those of tensors whose
        receives were posted long before.
        """
        for inbox in self.inboxes.values():  # the input is kept from forward to backward
            inbox.release()


class Executor:
    """Runs the actions of a rank: those of its stages, all of one pipeline.

    Where a group of ranks holds the stage, its first one hands on to the others what it receives.

    Attributes:
        current: the action that runs.
        evaluated: micro-batches of held-out sequences so far, of each stage.
    """

    def __init__(
        self,
        setup: RankSetup,
        stages: Sequence[Stage],
        places: Sequence[Placement],
        pipeline: PipelinePlan,
        actions: Sequence[Action],
    ) -> None:
        self.actions, self.rank = tuple(actions), setup.rank
        self.current: Action | None = None
        self.evaluated = 0
        self._transport, self._backend, self._group = setup.transport, setup.backend, setup.group
        wire = setup.wire_format()
        self.stages = {
            place.index: _StageLinks(setup, wire, stage, place, pipeline, self.actions)
            for stage, place in zip(stages, places, strict=True)
        }
        """Number -> stage, in chain order."""
        # A device may still compute when a forward or backward returns; what it sent and received may be copied on beside. Waiting
        # for it here, the time belongs to the action that took it. A rank that alone is a pipeline has nothing to send: its device
        # marks when it began and ended each action, and never runs out of work.
        self._synchronises = setup.group is not None or any(own.inboxes for own in self.stages.values())
        self._on_host = self._backend.device == HOST
        self._marks = not self._synchronises and not self._on_host
        self._last_backwards = {own.last_backward for own in self.stages.values()}
        self._inputs: dict[Action, torch.Tensor] = {}
        """Tensors that RECV has received, or another stage of the rank has computed."""
        self._outputs: dict[Action, torch.Tensor] = {}
        """Tensors that SEND will send."""
        self._losses: list[torch.Tensor] = []
        """Shares of the loss of the running step's micro-batches."""

    def run(self, data: StepData, update: Update[Decided]) -> StepRun[Decided]:
        """Run one step."""
        self._losses = []
        for own in self.stages.values():
            own.begin(data)
        events: list[Event] = []
        marked: list[tuple[int, Mark, Mark]] = []
        backend, decided = self._backend, None
        origin = backend.mark() if self._marks else None
        worked_s, begin = 0.0, time.perf_counter()
        for action in self.actions:
            self.current = action
            start, exchanged_s = time.perf_counter(), self._exchanged_s()
            first = backend.mark() if (self._marks or self._on_host) and action.op in COMPUTE else None
            moved = 0
            if action.op is Op.REDUCE:
                assert action.layer is not None
                update.reduce(action.layer)
            elif action.op is Op.STEP:
                decided = update.decide(self._losses)
                start = time.perf_counter()  # what waited for the others is no part of it
                update.carry_out(decided)
            else:
                moved = self._perform(action, data, update.finished if action in self._last_backwards else None)
                if first is not None and self._on_host:
                    worked_s += backend.mark().seconds_since(first)
                if self._synchronises and action.op in COMPUTE:
                    self._transport.idle = not self._on_host
                    backend.finish_compute()
                    self._transport.idle = False
                if action.op in (Op.B, Op.I):
                    self.stages[action.stage].release()
            if first is not None and self._marks:
                marked.append((len(events), first, backend.mark()))
            end, exchanged_s = time.perf_counter(), self._exchanged_s() - exchanged_s
            event = Event(self.rank, data.step, action, start - begin, end - begin, moved, exchanged_s=exchanged_s)
            events.append(self._with_copies(event, begin))
        self.flush()
        if origin is not None:
            for place, first, last in marked:
                start_s, end_s = first.seconds_since(origin), last.seconds_since(origin)
                events[place] = replace(events[place], start_s=start_s, end_s=end_s)
        self.current = None
        assert not self._inputs and not self._outputs, "the step left tensors behind"
        return StepRun(decided, tuple(events), begin, worked_s)

    def _exchanged_s(self) -> float:
        """Seconds in exchanges of its group so far."""
        return self._group.summed_s if self._group is not None else 0.0

    def _with_copies(self, event: Event, began_s: float) -> Event:
        """An event of a message with when it came, and how long this rank waited for copies."""
        own, op = self.stages[event.action.stage], event.action.op
        if op in own.inboxes:
            inbox = own.inboxes[op]
            arrived_s = inbox.arrived_s - began_s if inbox.arrived_s is not None else None
            return MeasuredEvent(**vars(event), copied_s=inbox.copied_s, arrived_s=arrived_s)
        if op in (Op.SEND_F, Op.SEND_B):
            return MeasuredEvent(**vars(event), copied_s=own.outboxes[op].copied_s)
        return event

    def flush(self) -> None:
        """Return when everything this rank sent has left: collective calls may follow."""
        for own in self.stages.values():
            for outbox in own.outboxes.values():
                outbox.flush()

    def evaluate(self, data: StepData) -> list[torch.Tensor]:
        """Forward of batches through the pipeline: what ``Stage.evaluate`` returns of each on the last stage, else nothing.

        All batches pass one stage of the rank, then all the next one: no rank waits for what waits for itself.
        """
        for own in self.stages.values():
            own.stage.rewards.clear()
            if own.evaluation_in is not None:
                own.evaluation_in.begin(own.packed_shapes(data, Op.RECV_F))
        found: list[torch.Tensor] = []
        for own in self.stages.values():
            found = self._evaluated(own, data, found)
        for own in self.stages.values():
            if own.evaluation_out is not None:
                own.evaluation_out.flush()
        return found

    def _evaluated(self, own: _StageLinks, data: StepData, before: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Outputs of a stage for all batches, unless they are sent on. ``before``: those of the rank's stage before it has made."""
        found: list[torch.Tensor] = []
        stage = own.stage
        for index in range(len(data.sizes)):
            x, targets = self._evaluation_input(own, data, index, before), data.targets_of(index)
            y = stage.evaluate(x, targets if stage.is_last else None, data.micro_batch(index))
            self.evaluated += 1
            if own.evaluation_in is not None:
                own.evaluation_in.release()
            if own.evaluation_out is not None:
                own.evaluation_out.put(own.packed(y, data, Op.SEND_F, index))
            elif stage.is_last or self._group is None:
                found.append(y)
        return found

    def _evaluation_input(
        self, own: _StageLinks, data: StepData, index: int, before: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        if own.stage.is_first:
            return data.tokens_of(index)
        received = own.evaluation_in
        x = before[index] if before else None
        if received is not None:
            x = own.unpacked(received.take(), data, Op.RECV_F, index)
        if self._group is not None:
            return self._group.shared(x, own.shape(data, Op.RECV_F, index), own.stage.dtype)
        assert x is not None
        return x

    def _perform(self, action: Action, data: StepData, finished: Finished | None) -> int:
        """One action of one micro-batch; returns the bytes sent or received. ``finished``: hears of layers, if it is the last
        backward."""
        op, own = action.op, self.stages[action.stage]
        if op is Op.F:
            self._forward(action, own.stage, data)
        elif op in (Op.B, Op.I):
            self._backward(action, own.stage, data, finished)
        elif op is Op.W:
            own.stage.backward_weights(_index(action), finished)
        elif op in (Op.RECV_F, Op.RECV_B):
            if op not in own.inboxes:
                self._inputs[action] = self._shared(None, own, action, data)
                return 0  # the message was its leader's
            tensor = own.inboxes[op].take()
            self._inputs[action] = own.unpacked(tensor, data, op, _index(action))
            return int(tensor.nbytes)
        else:
            return own.outboxes[op].put(own.packed(self._outputs.pop(action), data, op, _index(action)))
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
            # Made there: a copy would wait for the device.
            dy = torch.full((), data.loss_scale, device=self._backend.device)
        if action.op is Op.I:
            dx = stage.backward_input(index, dy)
        else:
            dx = stage.backward(index, dy, finished)
        if dx is not None:
            self._hand_on(Action(Op.SEND_B, number, index), Action(Op.RECV_B, number - 1, index), dx)

    def _received(self, action: Action, data: StepData) -> torch.Tensor:
        """The tensor of RECV_F or RECV_B. The leader of a group hands it on, for which the RECV of other members waits."""
        received, own = self._inputs.pop(action), self.stages[action.stage]
        leads = self._group is not None and action.op in own.inboxes
        return self._shared(received, own, action, data) if leads else received

    def _shared(self, tensor: torch.Tensor | None, own: _StageLinks, action: Action, data: StepData) -> torch.Tensor:
        """The tensor that RECV_F or RECV_B has brought to the leader of the group; the other members give None."""
        assert self._group is not None
        return self._group.shared(tensor, own.shape(data, action.op, _index(action)), own.stage.dtype)

    def _hand_on(self, send: Action, receive: Action, tensor: torch.Tensor) -> None:
        """To ``send``; or, where the next stage is this rank's too, as if ``receive`` had brought it."""
        if send.op in self.stages[send.stage].outboxes:
            self._outputs[send] = tensor
        elif self._group is None:
            self._inputs[receive] = tensor


def _index(action: Action) -> int:
    assert action.micro_batch is not None
    return action.micro_batch
