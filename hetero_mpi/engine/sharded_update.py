"""Sharded optimizer state (as in ZeRO-1) for layers on several ranks: each trained parameter has one owner (``planning.owners``).

    last backward    gradients of layer 9 | layer 8 | ...    a reduce-scatter per layer: owners get the sums of their parameters
    REDUCE, STEP     owners compute norms, clip, and step    only the owner has a parameter's master and moments
    next forward     values of layer 0 | layer 1 | ...       an all-gather per layer, in the compute dtype, awaited by that layer

Each shared layer has one flat fp32 gradient buffer with one part per owner; the gradients of its parameters are views of the
buffer. When backward finishes a layer (in reverse order), the ranks that hold it reduce-scatter the buffer, or a copy of it in host
memory; REDUCE waits for the sum. New values travel in the same buffers, which are free from STEP until the next backward. All
members of a group start its exchanges in the same order and never wait for another rank before starting one, so the exchanges
cannot deadlock. Copies between device and host overlap with computation until REDUCE.

If the tensor-parallel groups of several pipelines shard a layer differently, each set of ranks that hold the same segments has its
own buffer (``shared_parts``).

A tied model's matrix belongs to layer 0. In each pipeline the rank with the head sends its gradient to the rank with the embedding,
which adds the two. Layer 0 is then reduced over the pipelines like any other layer, and its new values are sent back to the head.
Both transfers go through preallocated host memory and overlap with computation.
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
    """Exchanges one rank's gradients and new parameter values in each step.

    Args:
        shared: shared parts of the whole plan, in reverse layer order.
        tied: this rank's end of a trained tied matrix; None if this rank has neither end.
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
        # Two streams, so that a layer's sum does not wait for other layers' backward.
        to_host, to_device = backend.copying(), backend.copying()
        self._parts = [
            _ExchangedPart(part, groups[part.ranks], rank, optimizer, to_host, to_device)
            for part in shared
            if rank in part.ranks
        ]
        self._parts_by_layer: dict[int, list[_ExchangedPart]] = {}
        """Maps each layer to its exchanged parts."""
        for exchanged in self._parts:
            self._parts_by_layer.setdefault(exchanged.layer, []).append(exchanged)
        optimizer.stage.before_each_layer(self.await_values)

    def start_step(self) -> None:
        """Prepare buffers and post receives for a new step."""
        for part in self._parts:
            part.start_step()
        if self.tied is not None:
            self.tied.start_step()

    def finished(self, layer: int) -> None:
        """Start the exchanges that need not wait, now that this rank's gradients of ``layer`` are final."""
        if self.tied is not None:
            if layer == 0 and self.tied.receives:
                return  # ``reduce`` waits for the head's gradient
            if layer == (self.last_layer if self.tied.sends else 0):
                self.tied.join_gradients()
        self._start_down_to(layer)

    def reduce(self, layer: int) -> None:
        """Wait until this rank's gradients in ``layer`` are summed over all ranks that hold the layer."""
        self._start_down_to(0)  # backward is over, so all gradients are final
        for part in self._parts_by_layer.get(layer, ()):
            self._complete(part)

    def finish_step(self) -> None:
        """Complete the remaining reductions before the optimizer step and reset each exchange for the next step."""
        if self.tied is not None:
            self.tied.finish_step()
        for part in self._parts:
            self._complete(part)
            part.finish_step()

    def publish(self) -> None:
        """Start sending new parameter values from their owners to the other ranks, in layer order, after the optimizer step."""
        for part in reversed(self._parts):
            part.publish(self.transport)
        self.share_tied_weight()

    def share_tied_weight(self) -> None:
        """Copy the embedding's values to the tied head. Called by both ranks."""
        if self.tied is not None:
            self.await_values(0)
            self.tied.share_weight()

    def await_values(self, layer: int) -> None:
        """Wait until the parameters of ``layer`` have their new values. Called before the parameters are read."""
        for part in self._parts_by_layer.get(layer, ()):
            part.await_values(self.transport)

    def settle(self) -> None:
        """Wait until all parameters have their new values."""
        for part in reversed(self._parts):
            part.await_values(self.transport)

    def dissolve(self) -> None:
        """Release the transport's groups after the last step."""
        self.settle()
        for group in {part.group for part in self._parts}:
            self.transport.dissolve(group)

    def _start_down_to(self, layer: int) -> None:
        """Start the reductions of ``layer`` and all later layers, in the order used by all ranks."""
        for part in self._parts:
            if part.layer >= layer and part.request is None:
                self._start(part)

    def _start(self, part: _ExchangedPart) -> None:
        if part.layer == 0 and self.tied is not None:
            self.tied.join_gradients()
        part.start(self.transport)

    def _complete(self, part: _ExchangedPart) -> None:
        """Wait for a part's reduction unless it is already complete."""
        if part.request is None:
            self._start(part)
        part.wait(self.transport)


class _ExchangedPart:
    """Exchanges a shared part's flat buffer, directly if it is in host memory, otherwise through a host copy.

    Attributes:
        request: this step's reduce-scatter; None before it starts.
    """

    def __init__(
        self, part: SharedPart, group: Group, rank: int, optimizer: Optimizer, to_host: Copying, to_device: Copying
    ) -> None:
        self.layer, self.group, self._member = part.layer, group, part.ranks.index(rank)
        flat = self._flat = optimizer.flat[part]
        self._gradient, self._to_host, self._to_device = optimizer.gradient, to_host, to_device
        self._copies = flat.gradients.device != HOST
        shape = flat.gradients.shape
        self._host = flat.backend.host_buffer(shape, torch.float32) if self._copies else flat.gradients
        self._other_members = [index for index in range(len(group.ranks)) if index != self._member]
        self.request: Request | None = None
        self._values: Request | None = None
        """The all-gather of new values; None once ``await_values`` has completed it."""
        self._copied: list[Copied] = []
        self._summed = False

    def start_step(self) -> None:
        """Zero the gradients unless the buffer still holds new values."""
        if self._values is None:
            self._flat.gradients.zero_()

    def start(self, transport: Transport) -> None:
        """Start reducing this rank's final gradients once they are in host memory."""
        self._summed = False
        assert self._values is None, "a backward pass has ended whose forward pass did not use the new values"
        self._flat.collect(self._gradient)
        parts = [self._host[part].numpy() for part in self._flat.parts]
        callbacks = self._start_host_copy(slice(None), self._copy_sums_back)
        self.request = transport.reduce_scatter(self.group, parts, *callbacks, self.layer)

    def wait(self, transport: Transport) -> None:
        """Wait for the summed gradients. Device work that this thread submits afterwards sees them."""
        if self._summed:
            return
        self._summed = True
        assert self.request is not None
        self._await(self.request, transport, self._copy_sums_back)
        self._flat.spread(self._member, self._gradient)

    def finish_step(self) -> None:
        self.request = None

    def publish(self, transport: Transport) -> None:
        """Start sending this rank's new parameter values once they are in host memory."""
        self._flat.pack(self._member)
        parts, member_values = (
            [host_bytes(self._host[part]) for part in self._flat.values],
            self._flat.values[self._member],
        )
        self._values = transport.all_gather(
            self.group, parts, *self._start_host_copy(member_values, self._copy_values_back), self.layer
        )

    def await_values(self, transport: Transport) -> None:
        """Wait for the new values in flight, if any, and write them to the parameters."""
        request, self._values = self._values, None
        if request is None:
            return
        self._await(request, transport, self._copy_values_back)
        for member in self._other_members:
            self._flat.unpack(member)
        self._flat.gradients.zero_()

    def _start_host_copy(self, part: slice, copy_back: Arrived) -> tuple[Ready | None, Arrived | None]:
        """Start copying ``part`` to host memory if needed; return (check whether the copy is done, callback that copies back)."""
        if not self._copies:
            return None, None
        self._to_host.after_compute()
        ready = self._to_host.copy(self._host[part], self._flat.gradients[part]).done
        return ready, copy_back if self._to_device.overlaps else None

    def _await(self, request: Request, transport: Transport, copy_back: Arrived) -> None:
        transport.wait(request)
        if self._copies:
            if not self._to_device.overlaps:
                copy_back()
            for copied in self._copied:
                copied.hold_compute()

    def _copy_sums_back(self) -> None:
        """Copy summed gradients to the device. Called on the thread that sees the reduction complete."""
        self._copy_back([self._flat.parts[self._member]])

    def _copy_values_back(self) -> None:
        self._copy_back([self._flat.values[member] for member in self._other_members])

    def _copy_back(self, ranges: list[slice]) -> None:
        self._copied = [self._to_device.copy(self._flat.gradients[part], self._host[part]) for part in ranges]


def _groups(rank: int, shared: Collection[SharedPart], transport: Transport) -> dict[tuple[int, ...], Group]:
    """Create a transport group for each set of ranks that includes this rank, with numbers on which all members agree."""
    distinct = list(dict.fromkeys(part.ranks for part in shared))
    return {ranks: transport.group(ranks, number) for number, ranks in enumerate(distinct) if rank in ranks}


_GRADIENT, _WEIGHT = TIED_TAG, TIED_TAG + 1


class TiedMatrix:
    """Exchanges a tied matrix between embedding and head; a rank has one end or both.

    Args:
        embedding: rank in this pipeline that holds the embedding.
        head: rank in this pipeline that holds the head.
        name: name of the embedding's parameter.

    Attributes:
        sends: whether this rank has only the head, and so sends its gradient.
        receives: whether this rank has only the embedding, and so receives the head's gradient.
    """

    def __init__(
        self, rank: int, embedding: int, head: int, name: str, optimizer: Optimizer, transport: Transport
    ) -> None:
        self.embedding, self.head, self.name = embedding, head, name
        self.optimizer, self.transport = optimizer, transport
        self.sends, self.receives = embedding != rank == head, head != rank == embedding
        self._backend, self._joined = optimizer.stage.backend, False
        stage, dtype = optimizer.stage, torch.float32
        matrix = stage.tied_head if self.sends else stage.parameters[name]
        assert matrix is not None
        self._copying = self._backend.copying()
        self._host: torch.Tensor | None = None
        """Host memory to receive into; None if messages are received in place."""
        if self.receives or (self.sends and self._backend.device != HOST):
            self._host = self._backend.host_buffer(matrix.shape, matrix.dtype if self.sends else dtype)
        peer, tag = (embedding, _GRADIENT) if self.sends else (head, _WEIGHT)
        sent_dtype = dtype if self.sends else stage.dtype
        self._outbox = Outbox(transport, peer, tag, self._backend, sent_dtype)
        self._head_gradient: Arrival | None = None

    def start_step(self) -> None:
        """Post the receive of the head's gradient for the new step."""
        self._joined = False
        if self.receives:
            assert self._host is not None
            self._head_gradient = self._arrival(self.head, _GRADIENT, self._host, self._host)

    def join_gradients(self) -> None:
        """Send the head's final gradient, or add it to the embedding's. Repeated calls in a step have no effect."""
        if self._joined:
            return
        self._joined = True
        if self.sends:
            self._outbox.put(self.optimizer.tied_gradient())
            return
        gradient = self.optimizer.gradient(self.name)
        if self._head_gradient is None:
            gradient.add_(self.optimizer.tied_gradient())
        else:
            self._head_gradient.wait()
            # The step decision waits for the norms, and so for this copy, before the next step reuses the memory.
            gradient.add_(self._head_gradient.tensor.to(gradient.device, non_blocking=True))

    def finish_step(self) -> None:
        """Wait until the head's gradient has been sent or added. Called before the optimizer step."""
        self.join_gradients()
        self._outbox.flush()

    def share_weight(self) -> None:
        """Copy the embedding's values to the head. Called by both ranks."""
        stage = self.optimizer.stage
        if self.receives:
            self._outbox.put(stage.parameters[self.name])
            self._outbox.flush()
        elif self.sends:
            assert stage.tied_head is not None
            head = stage.storage_of(stage.tied_head)
            arrival = self._arrival(self.embedding, _WEIGHT, head if self._host is None else self._host, head)
            arrival.wait()
            arrival.release()

    def _arrival(self, source: int, tag: int, buffer: torch.Tensor, tensor: torch.Tensor) -> Arrival:
        return Arrival(self.transport, source, tag, buffer, tensor, self._copying)


Divided = Mapping[int, Mapping[str, Division]]
"""Maps each tensor-parallel group's first rank to the sharding of its stage's tensors, by name."""


def shared_parts(
    rank: int, plan: Plan, tuning: Tuning, divided: Divided, owner: Mapping[str, int]
) -> dict[SharedPart, list[list[Segment]]]:
    """List the gradient reductions of a step, in reverse layer order, with the segments that each member owns.

    A tensor that groups shard is reduced in segments between neighbouring shard bounds of all pipelines. For example, bounds 4 | 8
    in pipeline 0 and 6 | 8 in pipeline 1 give [0, 4), [4, 6), [6, 8). The owner's stage runs the optimizer, sharded as in that
    stage.

    Returns:
        Map from each part to the segments owned by each of its ranks, in coordinates of ``rank``; the lists are empty if ``rank``
            takes
        no part.
    """
    segments_by_part: dict[SharedPart, list[list[Segment]]] = {}
    for layer in reversed(range(plan.layers)):
        stages = [stage for _, _, stage in plan.numbered if stage.first <= layer < stage.last]
        for spec in tuning.specs(layer, layer + 1):
            ranges, division = _rank_ranges(spec.name, stages, divided)
            owner_ranks = next(stage.ranks for stage in stages if owner[spec.name] in stage.ranks)
            for begin, end in pairwise(sorted({bound for span in ranges.values() for bound in span})):
                ranks = tuple(sorted(member for member, (low, high) in ranges.items() if low <= begin < end <= high))
                if len(ranks) > 1:
                    owned = segments_by_part.setdefault(SharedPart(layer, ranks), [[] for _ in ranks])
                    if rank in ranks:
                        owner_index = ranks.index(next(member for member in owner_ranks if member in ranks))
                        owned[owner_index].append(_segment(spec.name, division, ranges[rank], begin, end))
    return segments_by_part


def _segment(name: str, division: Division | None, span: tuple[int, int], begin: int, end: int) -> Segment:
    """Return the segment [begin, end) relative to a rank's range ``span``."""
    if division is None or span == (begin, end):
        return Segment(name)
    return Segment(name, division.dim, division.pieces, begin - span[0], end - begin)


def _rank_ranges(
    name: str, stages: Sequence[StagePlan], divided: Divided
) -> tuple[dict[int, tuple[int, int]], Division | None]:
    """Return (each rank's range of the sharded dimension, one group's division); (0, 1) and None if no group shards the tensor."""
    divisions = [divided[stage.ranks[0]][name] if stage.grouped else None for stage in stages]
    cut = next((d for d in divisions if d is not None and d.cut), None)
    ranges = {}
    for stage, division in zip(stages, divisions, strict=True):
        for member, rank in enumerate(stage.ranks):
            if division is not None and division.cut:
                ranges[rank] = division.bounds[member], division.bounds[member + 1]
            elif division is None or division.exists(member):
                ranges[rank] = 0, cut.bounds[-1] if cut is not None else 1
    return ranges, cut
