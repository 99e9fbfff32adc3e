"""The update of layers that several ranks hold: each trained parameter has one owner among them (``planning.owners``).

    last backward    gradients of layer 9 | of layer 8 | ...    a reduce-scatter each: every owner gets the sums of what it owns
    REDUCE, STEP     owners count norms, clip, and step         masters and moments exist once
    next forward     values of layer 0 | of layer 1 | ...       an all-gather each, in the compute dtype; a layer waits for its own

Every such layer has one flat fp32 buffer, a part of it for each owner, whose views are its parameters' gradients. As backward
finishes a layer, the last one first, its buffer is summed where it lies (in host memory) or in a copy there, over exactly
the ranks that hold it; REDUCE waits for that. New values travel in the same buffers, which are free from STEP until the next
backward. All members of a group start its exchanges in one order, and no start waits for another rank, so nothing can
deadlock. Copies go and come beside what the device computes: nobody waits for one before REDUCE.

The matrix of a tied model belongs to layer 0. Within each pipeline the head's rank sends its share of the gradient to the
embedding's, which adds it to its own; then layer 0 is summed over the pipelines as any other. Its new values go on to the head.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hetero_mpi.comm.transport import Arrived, Group, Ready, Request, Transport
from hetero_mpi.device.backend import HOST, Backend, Copied, Copying, host_bytes
from hetero_mpi.engine.pacing import Pace
from hetero_mpi.engine.tied import TiedMatrix
from hetero_mpi.model.held_layers import FlatGradients
from hetero_mpi.model.optimizer import Optimizer
from hetero_mpi.model.tuning import Tuning
from hetero_mpi.planning.schedule import Schedule, holders
from hetero_mpi.planning.types.plan import Plan

SharedLayers = Mapping[int, tuple[int, ...]]
"""Layer -> the ranks that hold it."""


def shared_layers(plan: Plan, schedule: Schedule, tuning: Tuning) -> SharedLayers:
    """layer -> the ranks that sum its gradients, increasing; the last layer first. Layers held by one rank are absent.

    Those that the schedule REDUCEs, and whatever else is trained: an emulated model may train less than its stand-in.
    """
    layers = {spec.layer for spec in tuning.trainable.values()}
    layers |= {action.layer for actions in schedule.values() for action in actions if action.layer is not None}
    found = {
        layer: tuple(sorted(ranks)) for layer, ranks in holders(plan).items() if layer in layers and len(ranks) > 1
    }
    return dict(sorted(found.items(), reverse=True))


class ShardedUpdate:
    """A rank's part in the exchanges of a step.

    Args:
        shared: as ``shared_layers`` says, of the whole plan.
        tied: its end of the matrix, if that is tied and trained.
        pace: in an emulation, told which layer's exchange starts. A rank then sums one layer at a time, as simulated.
    """

    def __init__(
        self,
        rank: int,
        last_layer: int,
        shared: SharedLayers,
        tied: TiedMatrix | None,
        optimizer: Optimizer,
        transport: Transport,
        pace: Pace | None = None,
    ) -> None:
        self.last_layer, self.tied = last_layer, tied
        self.transport, self.pace = transport, pace
        groups, backend = _groups(rank, shared, transport), optimizer.stage.backend
        out, back = backend.copying(), backend.copying()  # two: what is summed waits for no later layer's backward
        self._layers = {
            layer: _SharedLayer(groups[ranks], ranks.index(rank), optimizer.flat[layer], backend, out, back)
            for layer, ranks in shared.items()
            if rank in ranks
        }
        optimizer.stage.before_each_layer(self.take)

    def begin(self) -> None:
        """A step begins: be ready for what may come early."""
        for own in self._layers.values():
            own.begin()
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
        """Return when the gradients of what this rank owns of ``layer`` are those of all ranks that hold it."""
        self._start_down_to(0)  # backward is over: all are whole
        if layer in self._layers:
            self._complete(layer)

    def end(self) -> None:
        """Before the optimizer's step: sums that no REDUCE waits for; each exchange is ready for the next step's."""
        if self.tied is not None:
            self.tied.end()
        for layer, own in self._layers.items():
            self._complete(layer)
            own.end()

    def publish(self) -> None:
        """After the optimizer's step: new values go from their owners to the other holders, the first layer first."""
        for layer, own in reversed(self._layers.items()):
            if self.pace is not None:
                self.pace.begin_exchange(layer)
            own.publish(self.transport)
        self.share_tied_weight()

    def share_tied_weight(self) -> None:
        """Bring the embedding's values to the head's copy of a tied matrix. Both ends call it."""
        if self.tied is not None:
            self.take(0)
            self.tied.share_weight()

    def take(self, layer: int) -> None:
        """The parameters of ``layer`` are about to be read: return when their new values are there."""
        if layer in self._layers:
            self._layers[layer].take(self.transport)

    def settle(self) -> None:
        """Return when all new values are there."""
        for layer in reversed(self._layers):
            self.take(layer)

    def dissolve(self) -> None:
        """No step follows: the transport may use the groups' numbers for others."""
        self.settle()
        for group in {own.group for own in self._layers.values()}:
            self.transport.dissolve(group)

    def _start_down_to(self, layer: int) -> None:
        """Start the sums of this layer and of later ones, in the common order. An emulated rank sums one at a time: it starts
        none while one of another group is under way."""
        under_way: set[Group] = set()
        for other, own in self._layers.items():
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
            self.pace.begin_exchange(layer)
        self._layers[layer].start(self.transport)

    def _complete(self, layer: int) -> None:
        """Wait for a layer's sums, once; nothing if that has been done."""
        own = self._layers[layer]
        if own.request is None:
            self._start(layer)
        own.wait(self.transport)


class _SharedLayer:
    """A layer's flat buffer, and where it is exchanged: in place in host memory, else in a copy there.

    Attributes:
        request: the reduce-scatter of the running step.
    """

    def __init__(
        self, group: Group, place: int, flat: FlatGradients, backend: Backend, out: Copying, back: Copying
    ) -> None:
        self.group, self._place, self._flat, self._out, self._back = group, place, flat, out, back
        self._copies = flat.gradients.device != HOST
        shape = flat.gradients.shape
        self._host = backend.host_buffer(shape, torch.float32) if self._copies else flat.gradients
        self._others = [index for index in range(len(group.ranks)) if index != place]
        self.request: Request | None = None
        self._values: Request | None = None
        """The all-gather of values that are not taken yet."""
        self._copied: list[Copied] = []
        self._whole = False

    def begin(self) -> None:
        """A step begins. Where new values are still to be taken, the buffer holds them."""
        if self._values is None:
            self._flat.gradients.zero_()

    def start(self, transport: Transport) -> None:
        """The gradients are those of this rank: sum them as soon as they are in host memory."""
        self._whole = False
        assert self._values is None, "a backward has ended whose forward did not take the new values"
        parts = [self._host[part].numpy() for part in self._flat.parts]
        self.request = transport.reduce_scatter(self.group, parts, *self._copied_beside(slice(None), self._bring_sums))

    def wait(self, transport: Transport) -> None:
        """Return when they are summed; what this thread gives the device from now on sees that."""
        if self._whole:
            return
        self._whole = True
        assert self.request is not None
        self._arrive(self.request, transport, self._bring_sums)

    def end(self) -> None:
        """They are summed, and the step is over."""
        self.request = None

    def publish(self, transport: Transport) -> None:
        """The parameters that this rank owns have new values: send them as soon as they are in host memory."""
        self._flat.pack(self._place)
        parts, own = [host_bytes(self._host[part]) for part in self._flat.values], self._flat.values[self._place]
        self._values = transport.all_gather(self.group, parts, *self._copied_beside(own, self._bring_values))

    def take(self, transport: Transport) -> None:
        """Return when new values that are on their way are in the parameters, once."""
        request, self._values = self._values, None
        if request is None:
            return
        self._arrive(request, transport, self._bring_values)
        for place in self._others:
            self._flat.unpack(place)
        self._flat.gradients.zero_()

    def _copied_beside(self, part: slice, bring: Arrived) -> tuple[Ready | None, Arrived | None]:
        """Where the buffer is exchanged in a copy, copy ``part`` there; (says when it is there, brings back what comes)."""
        if not self._copies:
            return None, None
        self._out.after_compute()
        ready = self._out.copy(self._host[part], self._flat.gradients[part]).done
        return ready, bring if self._back.beside else None

    def _arrive(self, request: Request, transport: Transport, bring: Arrived) -> None:
        transport.wait(request)
        if self._copies:
            if not self._back.beside:
                bring()
            for copied in self._copied:
                copied.hold_compute()

    def _bring_sums(self) -> None:
        """Called by whatever thread sees them complete."""
        self._bring([self._flat.parts[self._place]])

    def _bring_values(self) -> None:
        self._bring([self._flat.values[place] for place in self._others])

    def _bring(self, ranges: list[slice]) -> None:
        self._copied = [self._back.copy(self._flat.gradients[one], self._host[one]) for one in ranges]


def _groups(rank: int, shared: SharedLayers, transport: Transport) -> dict[tuple[int, ...], Group]:
    """A group for each set of ranks that this rank belongs to. Numbers follow the plan, so all members agree on them."""
    distinct = list(dict.fromkeys(shared.values()))
    return {ranks: transport.group(ranks, number) for number, ranks in enumerate(distinct) if rank in ranks}
