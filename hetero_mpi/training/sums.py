"""Sums of the gradients of items that several ranks hold, started while the last backward still runs.

Every such item has one flat fp32 buffer, whose views are its parameters' gradients. As backward finishes an item, the last
one first, its buffer is summed where it lies (on CPU ranks) or from a copy in host memory, over exactly the ranks that hold
it; REDUCE waits for that. All members of a group start its sums in this one order, and no start waits for another rank, so
nothing can deadlock.

The matrix of a tied model belongs to item 0. Within each pipeline the head's rank sends its share of the gradient to the
embedding's, which adds it to its own; then item 0 is summed over the pipelines as any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hetero_mpi.comm.transport import Group, Request, Transport
from hetero_mpi.device.backend import HOST, Backend, host_bytes
from hetero_mpi.model.optimizer import Optimizer
from hetero_mpi.model.tuning import Tuning
from hetero_mpi.planning.plan import Plan
from hetero_mpi.planning.schedule import Schedule
from hetero_mpi.training.emulation import Pace
from hetero_mpi.training.places import holders

_TIED_GRADIENT = 1 << 12


@dataclass(frozen=True)
class TiedEnds:
    """Who holds the two ends of a tied matrix in a rank's own pipeline."""

    embedding: int
    head: int
    name: str
    """Of the embedding's parameter."""

    @property
    def apart(self) -> bool:
        return self.embedding != self.head


def shared_items(plan: Plan, schedule: Schedule, tuning: Tuning) -> dict[int, tuple[int, ...]]:
    """item -> the ranks that sum its gradients, increasing; the last item first. Items held by one rank are absent.

    Those that the schedule REDUCEs, and whatever else is trained: an emulated model may train less than its stand-in.
    """
    items = {spec.item for spec in tuning.trainable.values()}
    items |= {action.item for actions in schedule.values() for action in actions if action.item is not None}
    found = {item: tuple(sorted(ranks)) for item, ranks in holders(plan).items() if item in items and len(ranks) > 1}
    return dict(sorted(found.items(), reverse=True))


class GradientSums:
    """A rank's part in the sums of a step.

    Args:
        rank: this rank's number in the plan.
        last_item: of the chain.
        shared: as ``shared_items`` says, of the whole plan.
        tied: the ends of its own pipeline, if this rank is one of them and the matrix is tied and trained.
        optimizer: holds the gradients.
        transport: of messages and sums.
        pace: in an emulation, told which item's sum starts. A rank then sums one item at a time, as simulated.
    """

    def __init__(
        self,
        rank: int,
        last_item: int,
        shared: Mapping[int, tuple[int, ...]],
        tied: TiedEnds | None,
        optimizer: Optimizer,
        transport: Transport,
        pace: Pace | None = None,
    ) -> None:
        self.last_item, self.tied, self.optimizer = last_item, tied, optimizer
        self.transport, self.pace = transport, pace
        apart = tied is not None and tied.apart
        self._sends = apart and tied is not None and rank == tied.head
        self._receives = apart and tied is not None and rank == tied.embedding
        groups = _groups(rank, shared, transport)
        self._sums = {
            item: _Sum(groups[ranks], optimizer.flat_gradients(item), optimizer.stage.backend)
            for item, ranks in shared.items()
            if rank in ranks
        }
        self._heads_share = torch.empty(optimizer.gradient(tied.name).shape) if self._receives and tied else None
        self._message: Request | None = None
        """The head's share, on either rank."""
        self._joined = False
        self._sent_share: torch.Tensor | None = None

    def begin(self) -> None:
        """A step begins: be ready for what may come early."""
        self._joined = False
        if self._heads_share is not None:
            assert self.tied is not None
            content = host_bytes(self._heads_share)
            self._message = self.transport.post_receive(self.tied.head, _TIED_GRADIENT, content)

    def finished(self, item: int) -> None:
        """The gradients of ``item`` are whole on this rank: what can start without waiting starts."""
        if self._sends and item == self.last_item:
            self._send_share()
        if item == 0 and self._receives:
            return  # the head's share may still be on its way: ``reduce`` waits for it
        if item == 0:
            self._join_ends()
        self._start_down_to(item)

    def reduce(self, item: int) -> None:
        """Return when the gradients of ``item`` are those of all ranks that hold it."""
        self._start_down_to(0)  # backward is over: all are whole
        if item in self._sums:
            self._complete(item)

    def end(self) -> None:
        """Before the optimizer's step: what needs no REDUCE, and the books."""
        if self._sends:
            self._send_share()
            assert self._message is not None
            self.transport.wait(self._message)
        self._join_ends()
        self._message = self._sent_share = None
        for item, own in self._sums.items():
            self._complete(item)
            own.request = None

    def dissolve(self) -> None:
        """No step follows: the transport may use the groups' numbers for others."""
        for group in {own.group for own in self._sums.values()}:
            self.transport.dissolve(group)

    def _start_down_to(self, item: int) -> None:
        """Start the sums of this item and of later ones, in the common order. An emulated rank sums one at a time: it starts
        none while one of another group is under way."""
        under_way: set[Group] = set()
        for other, own in self._sums.items():
            if other < item:
                return
            if own.request is None:
                if self.pace is not None and under_way - {own.group}:
                    return
                self._start(other)
            assert own.request is not None
            if not own.request.completed:
                under_way.add(own.group)

    def _start(self, item: int) -> None:
        if item == 0:
            self._join_ends()
        if self.pace is not None:
            self.pace.summed_item = item
        own = self._sums[item]
        own.bring_out()
        own.request = self.transport.all_reduce(own.group, own.numbers)

    def _complete(self, item: int) -> None:
        """Wait for an item's sum, once; nothing if that has been done."""
        own = self._sums[item]
        if own.request is None:
            self._start(item)
        assert own.request is not None
        if not own.whole:
            self.transport.wait(own.request)
            own.bring_back()

    def _send_share(self) -> None:
        """The head's gradient, once in a step."""
        if self._message is None:
            assert self.tied is not None
            self._sent_share = self.optimizer.tied_gradient().detach().to(HOST).contiguous()
            self._message = self.transport.send(self.tied.embedding, _TIED_GRADIENT, host_bytes(self._sent_share))

    def _join_ends(self) -> None:
        """Add the head's gradient to the embedding's where that is, once in a step."""
        if self.tied is None or self._sends or self._joined:
            return
        own = self.optimizer.gradient(self.tied.name)
        if self._heads_share is None:
            own.add_(self.optimizer.tied_gradient())
        else:
            assert self._message is not None
            self.transport.wait(self._message)
            own.add_(self._heads_share.to(own.device))
        self._joined = True


class _Sum:
    """The gradients of an item, and where they are summed: in place on CPU ranks, else in a copy in host memory."""

    def __init__(self, group: Group, gradients: torch.Tensor, backend: Backend) -> None:
        self.group, self.gradients = group, gradients
        on_host = gradients.device == HOST
        self.host = gradients if on_host else backend.host_buffer(gradients.shape, torch.float32)
        self.numbers = self.host.detach().numpy()
        self.request: Request | None = None
        self.whole = False

    def bring_out(self) -> None:
        self.whole = False
        if self.host is not self.gradients:
            self.host.copy_(self.gradients)

    def bring_back(self) -> None:
        self.whole = True
        if self.host is not self.gradients:
            self.gradients.copy_(self.host)


def _groups(rank: int, shared: Mapping[int, tuple[int, ...]], transport: Transport) -> dict[tuple[int, ...], Group]:
    """A group for each set of ranks that this rank belongs to. Numbers follow the plan, so all members agree on them."""
    distinct = list(dict.fromkeys(shared.values()))
    return {ranks: transport.group(ranks, number) for number, ranks in enumerate(distinct) if rank in ranks}
