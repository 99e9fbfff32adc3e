"""A stage that a group of threads holds: real stages, and a link between them without MPI."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from hetero_mpi.device.backend import Backend
from hetero_mpi.model.group.division import divisions
from hetero_mpi.model.group.exchanges import StageGroup
from hetero_mpi.model.group.layers import DividedLayers
from hetero_mpi.model.group.tensor_division import Holding
from hetero_mpi.model.held_layers import Kept
from hetero_mpi.model.layer.interface import Start
from hetero_mpi.model.stage import Stage
from hetero_mpi.model.transformers.chain import TransformersChain
from hetero_mpi.model.tuning import Tuning, full_training
from tests.support.stages import stage_of

_PATIENCE_S = 120.0
"""After which a member that waits alone is an error: some other one made another exchange, or failed."""
T = TypeVar("T")


class _Meeting:
    """What the links of a group share."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=_PATIENCE_S)
        self.given: list[tuple[str, torch.Tensor]] = [("", torch.empty(0))] * size
        self.turn = threading.Lock()
        """Held by the member that computes: all threads draw from one generator, whose state each has for itself."""


class ThreadLink:
    """A member's ``GroupLink``. Sums are added in the order of the members, in fp32 at least, and written into the
    given tensor.

    Attributes:
        calls: how many exchanges there have been.
    """

    def __init__(self, meeting: _Meeting, member: int, size: int) -> None:
        self.member, self.size, self.calls = member, size, 0
        self._meeting = meeting

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._exchanged("sum", tensor, torch.add)

    def maximum(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._exchanged("maximum", tensor, torch.maximum)

    def _exchanged(
        self, kind: str, tensor: torch.Tensor, join: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        assert tensor.is_contiguous()
        self.calls += 1
        meeting = self._meeting
        meeting.given[self.member] = kind, tensor
        drawn = torch.get_rng_state()
        meeting.turn.release()
        try:
            joined = self._joined(tensor, join)
        finally:
            meeting.turn.acquire()
            torch.set_rng_state(drawn)
        with torch.no_grad():
            tensor.copy_(joined)
        return tensor

    def _joined(self, tensor: torch.Tensor, join: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        meeting = self._meeting
        meeting.barrier.wait()
        seen = {(other, given.shape, given.dtype) for other, given in meeting.given}
        assert len(seen) == 1, f"the members exchange different things: {seen}"
        wide = torch.promote_types(tensor.dtype, torch.float32)
        result = meeting.given[0][1].to(wide)
        for _, given in meeting.given[1:]:
            result = join(result, given.to(wide))
        meeting.barrier.wait()
        return result

    @property
    def turn(self) -> threading.Lock:
        return self._meeting.turn

    def abort(self) -> None:
        self._meeting.barrier.abort()


def links(size: int) -> list[ThreadLink]:
    meeting = _Meeting(size)
    return [ThreadLink(meeting, member, size) for member in range(size)]


Members = list[list[Stage]]
"""Of each member its part of every stage."""


class ThreadGroup:
    """The stages of one pipeline, each of which the same threads hold together.

    Attributes:
        members: of each member its part of every stage.
    """

    def __init__(
        self,
        chain: TransformersChain,
        cuts: Iterable[tuple[int, int]],
        shares: tuple[int, ...],
        start: Start | None,
        dtype: str = "fp32",
        tuning: Tuning | None = None,
        recompute: bool = False,
        kept: Sequence[Kept | None] = (),
        experts: tuple[int, ...] | None = None,
    ) -> None:
        self.chain, self.shares, self.tuning = chain, shares, tuning or full_training(chain)
        self.links = links(len(shares))
        self.divisions = divisions(chain, self.tuning, shares, range(chain.layer_count), experts)
        cuts = list(cuts)
        self.members: Members = [
            [
                stage_of(
                    chain,
                    first,
                    last,
                    Backend(),
                    dtype,
                    start,
                    tuning=tuning,
                    recompute=recompute,
                    kept_layers=weights,
                    divided=DividedLayers(chain, self.tuning, StageGroup(shares, link, experts)),
                )
                for first, last in cuts
            ]
            for link, weights in zip(self.links, kept or [None] * len(shares), strict=True)
        ]

    def together(self, call: Callable[[list[Stage]], T]) -> list[T]:
        """``call`` with each member's stages, all at once; what they return."""

        def one(member: int) -> T:
            torch.set_num_threads(1)
            try:
                with self.links[member].turn:
                    return call(self.members[member])
            except BaseException:
                self.links[member].abort()
                raise

        with ThreadPoolExecutor(len(self.members)) as pool:
            running = [pool.submit(one, member) for member in range(len(self.members))]
        errors = [task.exception() for task in running]
        for error in sorted(filter(None, errors), key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        return [task.result() for task in running]

    def whole(self, tensors: Sequence[dict[str, torch.Tensor]], gradients: bool) -> dict[str, torch.Tensor]:
        """Each tensor of the whole model, of the parts that the members have by name; partial gradients are added."""
        names = dict.fromkeys(name for own in tensors for name in own)
        return {name: self._whole(name, [own.get(name) for own in tensors], gradients) for name in names}

    def _whole(self, name: str, parts: Sequence[torch.Tensor | None], gradients: bool) -> torch.Tensor:
        division = self.divisions[name]
        there = [part for part in parts if part is not None]
        if division.holding is Holding.CUT:
            assert [part is not None for part in parts] == [division.exists(m) for m in range(len(parts))], name
            dim = division.dim
            pieces = [part.unflatten(dim, (division.pieces, part.shape[dim] // division.pieces)) for part in there]
            return torch.cat(pieces, dim + 1).flatten(dim, dim + 1)
        if division.holding is Holding.SUMMED and gradients:
            return torch.stack(there).sum(0)
        assert not gradients or not any(other.any() for other in there[1:]), (
            f"{name}: only the leader's gradient counts"
        )
        return there[0]


def parameters_of(stages: Sequence[Stage]) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for stage in stages for name, parameter in stage.parameters.items()}


def gradients_of(stages: Sequence[Stage]) -> dict[str, torch.Tensor]:
    """name -> gradient, the head's share of a tied matrix added to the embedding's as the trainer does."""
    found: dict[str, Any] = {n: p.grad for stage in stages for n, p in stage.parameters.items() if p.grad is not None}
    chain, head = stages[0].chain, stages[-1].tied_head
    if chain.tied is not None and chain.tied[1] in found and head is not None and head.grad is not None:
        found[chain.tied[1]] = found[chain.tied[1]] + head.grad
    return found
