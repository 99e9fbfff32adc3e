"""The update of layers that several ranks hold: each trained parameter has one owner among them (``planning.owners``).

    last backward    gradients of layer 9 | of layer 8 | ...    a reduce-scatter each: every owner gets the sums of what it owns
    REDUCE, STEP     owners count norms, clip, and step         masters and moments exist once
    next forward     values of layer 0 | of layer 1 | ...       an all-gather each, in the compute dtype; a layer waits for its own

Every such layer has one flat fp32 buffer, a part of it for each owner, whose views are its parameters' gradients. As backward
finishes a layer, the last one first, its buffer is summed where it lies (in host memory) or in a copy there, over exactly the
ranks that hold it; REDUCE waits for that. New values travel in the same buffers, which are free from STEP until the next
backward. All members of a group start its exchanges in one order, and no start waits for another rank, so nothing can deadlock.
Copies go and come beside what the device computes: nobody waits for one before REDUCE.

Where groups hold a layer in several pipelines, each cut in its own way, there is a buffer for every set of ranks that hold the same
segments of it (``shared_parts``).

The matrix of a tied model belongs to layer 0. Within each pipeline the head's rank sends its share of the gradient to the
embedding's, which adds it to its own; then layer 0 is summed over the pipelines as any other. Its new values go on to the head.
Both ways lead through host memory that is kept, beside what the device computes.

Also here: the parts of trained tensors that several ranks hold under a plan, and their owners.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

import torch

from hetero_mpi.comm.transport import Arrived, Group, Ready, Request, Transport
from hetero_mpi.device.backend import HOST, Copied, Copying, host_bytes
from hetero_mpi.engine.channel import TIED_TAG, Arrival, Outbox
from hetero_mpi.model.group.tensor_division import Division
from hetero_mpi.model.held_layers import Segment, SharedPart
from hetero_mpi.model.optimizer import Optimizer
from hetero_mpi.model.tuning import Tuning
from hetero_mpi.planning.types.plan import Plan, StagePlan


class ShardedUpdate:
    """A rank's part in the exchanges of a step.

    Args:
        shared: of the whole plan, the last layer's first.
        tied: its end of the matrix, if that is tied and trained.
    """

    def __init__(
        self,
        rank: int,
        last_layer: int,
        shared: Collection[SharedPart],
        tied: TiedMatrix | None,
        optimizer: Optimizer,
        transport: Transport,
    ) -> None:
        self.last_layer, self.tied, self.transport = last_layer, tied, transport
        groups, backend = _groups(rank, shared, transport), optimizer.stage.backend
        out, back = backend.copying(), backend.copying()  # two: what is summed waits for no later layer's backward
        self._parts = [
            _Exchanged(part, groups[part.ranks], rank, optimizer, out, back) for part in shared if rank in part.ranks
        ]
        self._of: dict[int, list[_Exchanged]] = {}
        """Layer -> those of it."""
        for own in self._parts:
            self._of.setdefault(own.layer, []).append(own)
        optimizer.stage.before_each_layer(self.take)

    def begin(self) -> None:
        """A step begins: be ready for what may come early."""
        for own in self._parts:
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
        for own in self._of.get(layer, ()):
            self._complete(own)

    def end(self) -> None:
        """Before the optimizer's step: sums that no REDUCE waits for; each exchange is ready for the next step's."""
        if self.tied is not None:
            self.tied.end()
        for own in self._parts:
            self._complete(own)
            own.end()

    def publish(self) -> None:
        """After the optimizer's step: new values go from their owners to the other holders, the first layer first."""
        for own in reversed(self._parts):
            own.publish(self.transport)
        self.share_tied_weight()

    def share_tied_weight(self) -> None:
        """Bring the embedding's values to the head's copy of a tied matrix. Both ends call it."""
        if self.tied is not None:
            self.take(0)
            self.tied.share_weight()

    def take(self, layer: int) -> None:
        """The parameters of ``layer`` are about to be read: return when their new values are there."""
        for own in self._of.get(layer, ()):
            own.take(self.transport)

    def settle(self) -> None:
        """Return when all new values are there."""
        for own in reversed(self._parts):
            own.take(self.transport)

    def dissolve(self) -> None:
        """No step follows: the transport may use the groups' numbers for others."""
        self.settle()
        for group in {own.group for own in self._parts}:
            self.transport.dissolve(group)

    def _start_down_to(self, layer: int) -> None:
        """Start the sums of this layer and of later ones, in the common order."""
        for own in self._parts:
            if own.layer >= layer and own.request is None:
                self._start(own)

    def _start(self, own: _Exchanged) -> None:
        if own.layer == 0 and self.tied is not None:
            self.tied.join()
        own.start(self.transport)

    def _complete(self, own: _Exchanged) -> None:
        """Wait for the sums, once; nothing if that has been done."""
        if own.request is None:
            self._start(own)
        own.wait(self.transport)


class _Exchanged:
    """The flat buffer of a shared part, and where it is exchanged: in place in host memory, else in a copy there.

    Attributes:
        request: the reduce-scatter of the running step.
    """

    def __init__(
        self, part: SharedPart, group: Group, rank: int, optimizer: Optimizer, out: Copying, back: Copying
    ) -> None:
        self.layer, self.group, self._place = part.layer, group, part.ranks.index(rank)
        flat = self._flat = optimizer.flat[part]
        self._gradient, self._out, self._back = optimizer.gradient, out, back
        self._copies = flat.gradients.device != HOST
        shape = flat.gradients.shape
        self._host = flat.backend.host_buffer(shape, torch.float32) if self._copies else flat.gradients
        self._others = [index for index in range(len(group.ranks)) if index != self._place]
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
        self._flat.collect(self._gradient)
        parts = [self._host[part].numpy() for part in self._flat.parts]
        beside = self._copied_beside(slice(None), self._bring_sums)
        self.request = transport.reduce_scatter(self.group, parts, *beside, self.layer)

    def wait(self, transport: Transport) -> None:
        """Return when they are summed; what this thread gives the device from now on sees that."""
        if self._whole:
            return
        self._whole = True
        assert self.request is not None
        self._arrive(self.request, transport, self._bring_sums)
        self._flat.spread(self._place, self._gradient)

    def end(self) -> None:
        """They are summed, and the step is over."""
        self.request = None

    def publish(self, transport: Transport) -> None:
        """The parameters that this rank owns have new values: send them as soon as they are in host memory."""
        self._flat.pack(self._place)
        parts, own = [host_bytes(self._host[part]) for part in self._flat.values], self._flat.values[self._place]
        self._values = transport.all_gather(
            self.group, parts, *self._copied_beside(own, self._bring_values), self.layer
        )

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


def _groups(rank: int, shared: Collection[SharedPart], transport: Transport) -> dict[tuple[int, ...], Group]:
    """A group for each set of ranks that this rank belongs to. Numbers follow the plan, so all members agree on them."""
    distinct = list(dict.fromkeys(part.ranks for part in shared))
    return {ranks: transport.group(ranks, number) for number, ranks in enumerate(distinct) if rank in ranks}


_GRADIENT, _WEIGHT = TIED_TAG, TIED_TAG + 1


class TiedMatrix:
    """One rank's end, or both.

    Args:
        embedding, head: the ranks of the two ends in its pipeline.
        name: of the embedding's parameter.

    Attributes:
        sends: it is the head, and the embedding is elsewhere.
        receives: it is the embedding, and the head is elsewhere.
    """

    def __init__(
        self, rank: int, embedding: int, head: int, name: str, optimizer: Optimizer, transport: Transport
    ) -> None:
        self.embedding, self.head, self.name = embedding, head, name
        self.optimizer, self.transport = optimizer, transport
        self.sends, self.receives = embedding != rank == head, head != rank == embedding
        self._backend, self._done = optimizer.stage.backend, False
        stage, dtype = optimizer.stage, torch.float32
        matrix = stage.tied_head if self.sends else stage.parameters[name]
        assert matrix is not None
        self._copying = self._backend.copying()
        self._host: torch.Tensor | None = None
        """Memory to receive into, unless a message can be received where it belongs."""
        if self.receives or (self.sends and self._backend.device != HOST):
            self._host = self._backend.host_buffer(matrix.shape, matrix.dtype if self.sends else dtype)
        other, tag = (embedding, _GRADIENT) if self.sends else (head, _WEIGHT)
        sent = dtype if self.sends else stage.dtype
        self._outbox = Outbox(transport, other, tag, self._backend, sent)
        self._share: Arrival | None = None

    def begin(self) -> None:
        """A step begins: be ready for the head's gradient, which may come early."""
        self._done = False
        if self.receives:
            assert self._host is not None
            self._share = self._arrival(self.head, _GRADIENT, self._host, self._host)

    def join(self) -> None:
        """The head's gradient is whole. Once in a step: the head sends it, the embedding adds it to its own."""
        if self._done:
            return
        self._done = True
        if self.sends:
            self._outbox.put(self.optimizer.tied_gradient())
            return
        own = self.optimizer.gradient(self.name)
        if self._share is None:
            own.add_(self.optimizer.tied_gradient())
        else:
            self._share.wait()
            # The step decision waits for the norms, and so for this copy, before the next step receives into the same memory.
            own.add_(self._share.tensor.to(own.device, non_blocking=True))

    def end(self) -> None:
        """The step needs both gradients: return when the head's has left, or has been added."""
        self.join()
        self._outbox.flush()

    def share_weight(self) -> None:
        """Bring the embedding's values to the head's copy. Both ends call it."""
        stage = self.optimizer.stage
        if self.receives:
            self._outbox.put(stage.parameters[self.name])
            self._outbox.flush()
        elif self.sends:
            assert stage.tied_head is not None
            head = stage.storage_of(stage.tied_head)
            coming = self._arrival(self.embedding, _WEIGHT, head if self._host is None else self._host, head)
            coming.wait()
            coming.release()

    def _arrival(self, source: int, tag: int, buffer: torch.Tensor, tensor: torch.Tensor) -> Arrival:
        return Arrival(self.transport, source, tag, buffer, tensor, self._copying)


Divided = Mapping[int, Mapping[str, Division]]
"""The first rank of each group -> name -> the division of every tensor of its stage."""


def shared_parts(
    rank: int, plan: Plan, tuning: Tuning, divided: Divided, owner: Mapping[str, int]
) -> dict[SharedPart, list[list[Segment]]]:
    """The sums of gradients in a step of all ranks, the last layer's first: of each the segments that every one of its ranks
    owns, as ``rank`` sees them; nothing where it takes no part.

    A tensor that groups cut is summed in segments, from any cut of any pipeline to the next. The owner's stage steps it, cut as it
    is there.
    """
    found: dict[SharedPart, list[list[Segment]]] = {}
    for layer in reversed(range(plan.layers)):
        stages = [stage for _, _, stage in plan.numbered if stage.first <= layer < stage.last]
        for spec in tuning.specs(layer, layer + 1):
            ends, cut = _held(spec.name, stages, divided)
            owning = next(stage.ranks for stage in stages if owner[spec.name] in stage.ranks)
            for begin, end in pairwise(sorted({bound for own in ends.values() for bound in own})):
                ranks = tuple(sorted(one for one, (low, high) in ends.items() if low <= begin < end <= high))
                if len(ranks) > 1:
                    owned = found.setdefault(SharedPart(layer, ranks), [[] for _ in ranks])
                    if rank in ranks:
                        place = ranks.index(next(one for one in owning if one in ranks))
                        owned[place].append(_segment(spec.name, cut, ends[rank], begin, end))
    return found


def _segment(name: str, cut: Division | None, own: tuple[int, int], begin: int, end: int) -> Segment:
    """The segment from ``begin`` to ``end`` as a rank with the range ``own`` sees it."""
    if cut is None or own == (begin, end):
        return Segment(name)
    return Segment(name, cut.dim, cut.pieces, begin - own[0], end - begin)


def _held(
    name: str, stages: Sequence[StagePlan], divided: Divided
) -> tuple[dict[int, tuple[int, int]], Division | None]:
    """(rank -> its range of the dimension in which groups cut a tensor, or (0, 1); how one of them cuts it, if one does)."""
    divisions = [divided[stage.ranks[0]][name] if stage.grouped else None for stage in stages]
    cut = next((one for one in divisions if one is not None and one.cut), None)
    ends = {}
    for stage, division in zip(stages, divisions, strict=True):
        for member, rank in enumerate(stage.ranks):
            if division is not None and division.cut:
                ends[rank] = division.bounds[member], division.bounds[member + 1]
            elif division is None or division.exists(member):
                ends[rank] = 0, cut.bounds[-1] if cut is not None else 1
    return ends, cut
