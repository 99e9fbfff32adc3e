"""All-reduces of the gradients of layers that several ranks hold, started while the last backward still runs.

Every such layer has one flat fp32 buffer, whose views are its parameters' gradients. As backward finishes a layer, the last
one first, its buffer is summed where it lies (in host memory) or in a copy there, over exactly the ranks that hold
it; REDUCE waits for that. All members of a group start its all-reduces in this one order, and no start waits for another rank, so
nothing can deadlock. Copies go and come beside what the device computes: nobody waits for one before REDUCE.

The matrix of a tied model belongs to layer 0. Within each pipeline the head's rank sends its share of the gradient to the
embedding's, which adds it to its own; then layer 0 is summed over the pipelines as any other.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hetero_mpi.comm.transport import Group, Request, Transport
from hetero_mpi.device.backend import HOST, Backend
from hetero_mpi.device.copying import Copied, Copying
from hetero_mpi.emulation.pace import ActionPacer
from hetero_mpi.engine.placement import holders
from hetero_mpi.engine.tied import TiedMatrix
from hetero_mpi.model.optimizer import Optimizer
from hetero_mpi.model.tuning import Tuning
from hetero_mpi.planning.schedule import Schedule
from hetero_mpi.planning.types.plan import Plan


def shared_layers(plan: Plan, schedule: Schedule, tuning: Tuning) -> dict[int, tuple[int, ...]]:
    """layer -> the ranks that sum its gradients, increasing; the last layer first. Layers held by one rank are absent.

    Those that the schedule REDUCEs, and whatever else is trained: an emulated model may train less than its stand-in.
    """
    layers = {spec.layer for spec in tuning.trainable.values()}
    layers |= {action.layer for actions in schedule.values() for action in actions if action.layer is not None}
    found = {
        layer: tuple(sorted(ranks)) for layer, ranks in holders(plan).items() if layer in layers and len(ranks) > 1
    }
    return dict(sorted(found.items(), reverse=True))


class GradientAllReduce:
    """A rank's part in the all-reduces of a step.

    Args:
        rank: this rank's number in the plan.
        last_layer: of the chain.
        shared: as ``shared_layers`` says, of the whole plan.
        tied: its end of the matrix, if that is tied and trained.
        optimizer: holds the gradients.
        transport: of messages and all-reduces.
        pace: in an emulation, told which layer's all-reduce starts. A rank then sums one layer at a time, as simulated.
    """

    def __init__(
        self,
        rank: int,
        last_layer: int,
        shared: Mapping[int, tuple[int, ...]],
        tied: TiedMatrix | None,
        optimizer: Optimizer,
        transport: Transport,
        pace: ActionPacer | None = None,
    ) -> None:
        self.last_layer, self.tied = last_layer, tied
        self.transport, self.pace = transport, pace
        groups, backend = _groups(rank, shared, transport), optimizer.stage.backend
        out, back = backend.copying(), backend.copying()  # two: what is summed waits for no later layer's backward
        self._all_reduces = {
            layer: _LayerAllReduce(groups[ranks], optimizer.flat_gradients(layer), backend, out, back)
            for layer, ranks in shared.items()
            if rank in ranks
        }

    def begin(self) -> None:
        """A step begins: be ready for what may come early."""
        if self.tied is not None:
            self.tied.begin()

    def finished(self, layer: int) -> None:
        """The gradients of ``layer`` are whole on this rank: what can start without waiting starts."""
        if self.tied is not None:
            if layer == 0 and self.tied.receives:
                return  # the head's share may still be on its way: ``reduce`` waits for it
            if layer == (self.last_layer if self.tied.sends else 0):
                self.tied.join()
        self._start_down_to(layer)

    def reduce(self, layer: int) -> None:
        """Return when the gradients of ``layer`` are those of all ranks that hold it."""
        self._start_down_to(0)  # backward is over: all are whole
        if layer in self._all_reduces:
            self._complete(layer)

    def end(self) -> None:
        """Before the optimizer's step: what needs no REDUCE, and the books."""
        if self.tied is not None:
            self.tied.end()
        for layer, own in self._all_reduces.items():
            self._complete(layer)
            own.end()

    def dissolve(self) -> None:
        """No step follows: the transport may use the groups' numbers for others."""
        for group in {own.group for own in self._all_reduces.values()}:
            self.transport.dissolve(group)

    def _start_down_to(self, layer: int) -> None:
        """Start the all-reduces of this layer and of later ones, in the common order. An emulated rank sums one at a time: it
        starts none while one of another group is under way."""
        under_way: set[Group] = set()
        for other, own in self._all_reduces.items():
            if other < layer:
                return
            if own.request is None:
                if self.pace is not None and under_way - {own.group}:
                    return
                self._start(other)
            assert own.request is not None
            if not own.request.completed:
                under_way.add(own.group)

    def _start(self, layer: int) -> None:
        if layer == 0 and self.tied is not None:
            self.tied.join()
        if self.pace is not None:
            self.pace.begin_all_reduce(layer)
        self._all_reduces[layer].start(self.transport)

    def _complete(self, layer: int) -> None:
        """Wait for a layer's all-reduce, once; nothing if that has been done."""
        own = self._all_reduces[layer]
        if own.request is None:
            self._start(layer)
        own.wait(self.transport)


class _LayerAllReduce:
    """The gradients of a layer, and where they are summed: in place in host memory, else in a copy there."""

    def __init__(self, group: Group, gradients: torch.Tensor, backend: Backend, out: Copying, back: Copying) -> None:
        self.group, self._gradients, self._out, self._back = group, gradients, out, back
        self._copies = gradients.device != HOST
        self._host = backend.host_buffer(gradients.shape, torch.float32) if self._copies else gradients
        self.request: Request | None = None
        self._copied: Copied | None = None
        self._whole = False

    def start(self, transport: Transport) -> None:
        """The gradients are those of this rank: sum them as soon as they are in host memory."""
        self._whole = False
        ready = arrived = None
        if self._copies:
            self._out.after_compute()
            ready = self._out.copy(self._host, self._gradients).done
            arrived = self._bring_back if self._back.beside else None
        self.request = transport.all_reduce(self.group, self._host.numpy(), ready, arrived)

    def end(self) -> None:
        """They are summed, and the step is over."""
        self.request = None

    def wait(self, transport: Transport) -> None:
        """Return when they are summed; what this thread gives the device from now on sees that."""
        if self._whole:
            return
        self._whole = True
        assert self.request is not None
        transport.wait(self.request)
        if self._copies:
            if not self._back.beside:
                self._bring_back()
            assert self._copied is not None
            self._copied.hold_compute()

    def _bring_back(self) -> None:
        """Called by whatever thread sees the sum complete."""
        self._copied = self._back.copy(self._gradients, self._host)


def _groups(rank: int, shared: Mapping[int, tuple[int, ...]], transport: Transport) -> dict[tuple[int, ...], Group]:
    """A group for each set of ranks that this rank belongs to. Numbers follow the plan, so all members agree on them."""
    distinct = list(dict.fromkeys(shared.values()))
    return {ranks: transport.group(ranks, number) for number, ranks in enumerate(distinct) if rank in ranks}
