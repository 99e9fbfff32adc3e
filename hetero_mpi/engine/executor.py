"""Interprets a rank's actions: exactly the lists that were validated and simulated."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from hetero_mpi.comm.transport import Transport
from hetero_mpi.device.backend import HOST, Mark
from hetero_mpi.emulation.pace import Emulation
from hetero_mpi.engine.channel import PIECE_BYTES, Inbox, Outbox
from hetero_mpi.engine.placement import Placement
from hetero_mpi.engine.wire import NEAREST, WireFormat
from hetero_mpi.model.layer.preference import Comparison
from hetero_mpi.model.layer.router_loss import Routed
from hetero_mpi.model.layer.seeds import seed_from
from hetero_mpi.model.stage import MicroBatch, Stage
from hetero_mpi.planning.memory import holdings
from hetero_mpi.planning.schedule import COMPUTE, WHOLE_STEP, Action, Event, Op
from hetero_mpi.planning.types.plan import PipelinePlan
from hetero_mpi.report.run_files.measured import MeasuredEvent

_FORWARD, _BACKWARD, _EVALUATION = 0, 1, 2
WholeStep = Callable[[Action], None]
Finished = Callable[[int], None]
"""Is told the number of a layer whose gradients are whole for this step."""


def tag_of(stage: int, direction: int) -> int:
    """Message tag of what stage ``stage`` receives; one tag per receiving stage and direction keeps micro-batches in order."""
    return stage * 4 + direction


@dataclass(frozen=True)
class StepData:
    """What a pipeline computes on. Tensors on the device, (rows of its share, T) int64, or samples (rows, ...) in the dtypes of
    ``interface.as_input``; None where this rank does not need them."""

    step: int
    sizes: tuple[int, ...]
    """Sequences in each micro-batch; they follow one another in the tensors."""
    first_samples: tuple[int, ...]
    """Where each micro-batch begins in the global batch."""
    length: int
    """Tokens T per sequence of this batch."""
    tokens: torch.Tensor | None
    targets: torch.Tensor | None
    positions: torch.Tensor | None
    """See ``MicroBatch``; on every stage, where records are packed."""
    divisor: int
    """Of the whole global batch; see ``MicroBatch``."""
    loss_scale: float = 1.0
    """Factor of the loss in backward (fp16)."""
    comparison: Comparison | None = None
    """On the last stage, where preferences are learnt."""
    routed: Routed | None = None
    """On every stage, where routers have a loss."""

    def micro_batch(self, index: int, rows: slice) -> MicroBatch:
        """One of them, which has these rows."""
        positions = None if self.positions is None else self.positions[rows]
        comparison = None if self.comparison is None else self.comparison.of_rows(rows)
        routed = None if self.routed is None else self.routed.of_rows(rows)
        return MicroBatch(index, self.step, self.first_samples[index], self.divisor, positions, comparison, routed)


class Executor:
    """Runs the actions of one stage of one pipeline.

    Args:
        stage: this rank's share of the model.
        place: where it stands in the plan.
        pipeline: the pipeline it belongs to.
        actions: this rank's list.
        transport: how tensors reach the neighbours.
        whole_step: what REDUCE and STEP do.
        finished: is told each layer whose gradients are whole while the last backward still runs, the last layer first.
        emulation: makes actions and messages of steps last as those of other devices.
        wire: how tensors travel; None: as they are.

    Attributes:
        losses: shares of the loss of the running step's micro-batches (fp32 scalars), on the last stage.
        current: the action that runs.
        evaluated: micro-batches of held-out sequences so far.
        began_s: when the latest step began (``time.perf_counter``); its events count from then.
    """

    def __init__(
        self,
        stage: Stage,
        place: Placement,
        pipeline: PipelinePlan,
        actions: Sequence[Action],
        transport: Transport,
        whole_step: dict[Op, WholeStep],
        finished: Finished,
        emulation: Emulation | None = None,
        wire: WireFormat | None = None,
    ) -> None:
        self.stage, self.place, self.actions = stage, place, tuple(actions)
        self.whole_step, self.finished = whole_step, finished
        self.wire = wire if wire is not None else WireFormat(stage.dtype)
        self.pace = emulation.pace if emulation is not None else None
        position = place.position
        self.rank = pipeline.stages[position].ranks[0]
        self.losses: list[torch.Tensor] = []
        self.current: Action | None = None
        self.evaluated = 0
        self.began_s = self._decided_s = 0.0
        # A device may still compute when a forward or backward returns; what it sent and receives may be copied on beside. Waiting
        # for it here, the time belongs to the action that took it. A pipeline of one stage has nothing to send: its device marks
        # when it began and ended each action, and never runs out of work.
        self._synchronises = len(pipeline.stages) > 1
        self._marks = not self._synchronises and stage.backend.device != HOST
        self._last_backward = next((a for a in reversed(self.actions) if a.op in (Op.B, Op.W)), None)
        self._inputs: dict[tuple[Op, int], torch.Tensor] = {}
        self._outputs: dict[tuple[Op, int], torch.Tensor] = {}
        self._rows: list[slice] = []
        """Of each micro-batch within its pipeline's share of a batch."""
        self._transport = transport
        paced = emulation.transport if emulation is not None else transport
        in_flight = max(flying for flying, _ in holdings(self.actions))
        depth = min(in_flight + 1, pipeline.micro_batches)  # one more than are held: a receive is always posted
        self.activations_in = self.activations_out = self.gradients_in = self.gradients_out = None
        self.evaluation_in = self.evaluation_out = None
        index, backend, dtype = place.index, stage.backend, self.wire.dtype
        # An emulated message takes its time whole: pieces would each wait for a link's latency.
        piece = PIECE_BYTES if emulation is None else sys.maxsize
        if position > 0:
            before = pipeline.stages[position - 1].ranks[0]
            self.activations_in = Inbox(paced, before, tag_of(index, _FORWARD), backend, dtype, depth, piece)
            self.gradients_out = Outbox(paced, before, tag_of(index - 1, _BACKWARD), backend, dtype, piece)
            self.evaluation_in = Inbox(transport, before, tag_of(index, _EVALUATION), backend, dtype, 2)
        if position + 1 < len(pipeline.stages):
            after = pipeline.stages[position + 1].ranks[0]
            self.gradients_in = Inbox(paced, after, tag_of(index, _BACKWARD), backend, dtype, 2, piece)
            self.activations_out = Outbox(paced, after, tag_of(index + 1, _FORWARD), backend, dtype, piece)
            self.evaluation_out = Outbox(transport, after, tag_of(index + 1, _EVALUATION), backend, dtype)

    def run(self, data: StepData) -> list[Event]:
        """Run one step and return what took place when."""
        self._begin(data)
        events: list[Event] = []
        marked: list[tuple[int, Mark, Mark]] = []
        backend = self.stage.backend
        origin = backend.mark() if self._marks else None
        self.began_s = begin = time.perf_counter()
        for action in self.actions:
            self.current = action
            start = time.perf_counter()
            first = backend.mark() if self._marks and action.op in COMPUTE else None
            moved = 0
            if action.op in WHOLE_STEP:
                self.whole_step[action.op](action)
                start = max(start, self._decided_s) if action.op is Op.STEP else start
            else:
                moved = self._perform(action, data)
                if self._synchronises and action.op in COMPUTE:
                    self._transport.idle = backend.device != HOST
                    backend.finish_compute()
                    self._transport.idle = False
                if action.op in (Op.B, Op.I):
                    self._release()
                if self.pace is not None:
                    self.pace.hold(action, start, self.finished if action is self._last_backward else None)
            if first is not None:
                marked.append((len(events), first, backend.mark()))
            events.append(self._event(data.step, action, start - begin, time.perf_counter() - begin, moved))
        self.flush()
        if origin is not None:
            for place, first, last in marked:
                start_s, end_s = first.seconds_since(origin), last.seconds_since(origin)
                events[place] = replace(events[place], start_s=start_s, end_s=end_s)
        self.current = None
        assert not self._inputs and not self._outputs, "the step left tensors behind"
        return events

    def _event(self, step: int, action: Action, start_s: float, end_s: float, moved: int) -> Event:
        if action.op in (Op.RECV_F, Op.RECV_B):
            inbox = self.activations_in if action.op is Op.RECV_F else self.gradients_in
            assert inbox is not None
            arrived_s = inbox.arrived_s - self.began_s if inbox.arrived_s is not None else None
            return MeasuredEvent(self.rank, step, action, start_s, end_s, moved, inbox.copied_s, arrived_s)
        if action.op in (Op.SEND_F, Op.SEND_B):
            outbox = self.activations_out if action.op is Op.SEND_F else self.gradients_out
            assert outbox is not None
            return MeasuredEvent(self.rank, step, action, start_s, end_s, moved, outbox.copied_s)
        return Event(self.rank, step, action, start_s, end_s, moved)

    def step_begins(self) -> float:
        """STEP has waited for the others' decision, and its event begins only now, at the time returned (``time.perf_counter``)."""
        self._decided_s = time.perf_counter()
        return self._decided_s

    def flush(self) -> None:
        """Return when everything this stage sent has left: collective calls may follow."""
        for outbox in (self.activations_out, self.gradients_out):
            if outbox is not None:
                outbox.flush()

    def evaluate(self, data: StepData) -> list[torch.Tensor]:
        """Forward of batches through the pipeline: what ``Stage.evaluate`` returns of each on the last stage, else nothing."""
        found: list[torch.Tensor] = []
        if self.evaluation_in is not None:
            self.evaluation_in.begin(self._packed_shapes(data, self.stage.first - 1))
        for index, rows in enumerate(_consecutive(data.sizes)):
            if self.evaluation_in is not None:
                x = self._unpacked(self.evaluation_in.take(), data, self.stage.first - 1, index)
            else:
                assert data.tokens is not None
                x = data.tokens[rows]
            part = data.micro_batch(index, rows)
            targets = None if data.targets is None else data.targets[rows]
            y = self.stage.evaluate(x, targets, part.positions, part.comparison, part.routed)
            self.evaluated += 1
            if self.evaluation_in is not None:
                self.evaluation_in.release()
            if self.evaluation_out is not None:
                self.evaluation_out.put(self.wire.packed(y))
            else:
                found.append(y)
        if self.evaluation_out is not None:
            self.evaluation_out.flush()
        return found

    def _begin(self, data: StepData) -> None:
        self.losses = []
        if self.stage.routers is not None:
            self.stage.routers.seen.clear()
        self._rows = _consecutive(data.sizes)
        for inbox, layer in ((self.activations_in, self.stage.first - 1), (self.gradients_in, self.stage.last - 1)):
            if inbox is not None:
                inbox.begin(self._packed_shapes(data, layer))

    def _packed_shapes(self, data: StepData, layer: int) -> list[tuple[int, ...]]:
        """Of what travels of the tensors that follow ``layer``, and of their gradients."""
        boundary = self.stage.chain.boundary
        return [self.wire.packed_shape(boundary(layer, size, data.length)) for size in data.sizes]

    def _unpacked(self, packed: torch.Tensor, data: StepData, layer: int, index: int) -> torch.Tensor:
        """What has come of a micro-batch's tensor that follows ``layer``, or of its gradient."""
        return self.wire.unpacked(packed, self.stage.chain.boundary(layer, data.sizes[index], data.length))

    def _seeds(self, data: StepData, index: int) -> Iterator[int]:
        """By which the gradient of each sequence is rounded on its way to the stage before: functions of the sample alone."""
        for sample in range(data.first_samples[index], data.first_samples[index] + data.sizes[index]):
            yield seed_from(self.stage.seed, "wire", data.step, sample, self.stage.first - 1)

    def _perform(self, action: Action, data: StepData) -> int:
        """One action of one micro-batch; returns the bytes sent or received."""
        op, index = action.op, action.micro_batch
        assert index is not None
        if op is Op.F:
            self._forward(index, data)
        elif op in (Op.B, Op.I):
            self._backward(action, data.loss_scale)
        elif op is Op.W:
            self.stage.backward_weights(index, self._listener(action))
        elif op in (Op.RECV_F, Op.RECV_B):
            forward = op is Op.RECV_F
            inbox, layer = (self.activations_in, self.stage.first) if forward else (self.gradients_in, self.stage.last)
            assert inbox is not None
            tensor = inbox.take()
            self._inputs[op, index] = self._unpacked(tensor, data, layer - 1, index)
            return int(tensor.nbytes)
        else:
            outbox = self.activations_out if op is Op.SEND_F else self.gradients_out
            assert outbox is not None
            seeds = self._seeds(data, index) if op is Op.SEND_B else NEAREST
            return outbox.put(self.wire.packed(self._outputs.pop((op, index)), seeds))
        return 0

    def _forward(self, index: int, data: StepData) -> None:
        rows = self._rows[index]
        x = self._inputs.pop((Op.RECV_F, index)) if data.tokens is None else data.tokens[rows]
        targets = None if data.targets is None else data.targets[rows]
        y = self.stage.forward(data.micro_batch(index, rows), x, targets)
        if self.stage.is_last:
            self.losses.append(y)
        else:
            self._outputs[Op.SEND_F, index] = y

    def _backward(self, action: Action, loss_scale: float) -> None:
        """B or I."""
        index = action.micro_batch
        assert index is not None
        dy = self._inputs.pop((Op.RECV_B, index), None)
        if self.stage.is_last and loss_scale != 1.0:
            dy = torch.full(
                (), loss_scale, device=self.stage.backend.device
            )  # made there: a copy would wait for the device
        if action.op is Op.I:
            dx = self.stage.backward_input(index, dy)
        else:
            dx = self.stage.backward(index, dy, self._listener(action))
        if dx is not None:
            self._outputs[Op.SEND_B, index] = dx

    def _release(self) -> None:
        """The tensors that the last backward received may be overwritten.

        Only once it is computed: the copies of whatever arrives from now on would else wait for it, also those of tensors whose
        receives were posted long before.
        """
        for inbox in (self.gradients_in, self.activations_in):  # the input is kept from forward to backward
            if inbox is not None:
                inbox.release()

    def _listener(self, action: Action) -> Finished | None:
        """Who hears of finished layers. In an emulation the pace says when they count as finished."""
        return self.finished if action is self._last_backward and self.pace is None else None


def _consecutive(sizes: Sequence[int]) -> list[slice]:
    rows, first = [], 0
    for size in sizes:
        rows.append(slice(first, first + size))
        first += size
    return rows
