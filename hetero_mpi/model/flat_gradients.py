"""Gradients that several ranks sum, in one buffer for each set of ranks that hold the same."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from hetero_mpi.model.held_layers import HeldLayers, Segment, SharedPart
from hetero_mpi.model.offloaded_gradients import flat_layout


class FlatGradients:
    """The fp32 gradients of a shared part, one after the other with a few zeros between them, in the same memory for good.

    The buffer has a part for each holder, of the segments that this one owns (``HeldLayers.shared``); the layout is the same
    wherever they are held. Between two steps a part takes new values of its segments, in their dtype. The gradient of a parameter
    that is of several shared parts is elsewhere, and copied.

    Attributes:
        gradients: (n,), where the stage keeps its state.
        views: name -> the gradient in there of a parameter of which all is in there.
        parts: of ``gradients``, one for each holder.
        values: what of them new values take, in fp32 numbers.
    """

    def __init__(self, stage: HeldLayers, part: SharedPart) -> None:
        self._stage, self.backend = stage, stage.backend
        owned = stage.shared[part]
        sizes = [[segment.of(stage.parameters[segment.name]).numel() for segment in of_part] for of_part in owned]
        length = flat_layout(size for of_part in sizes for size in of_part)[1]
        own = stage.offloaded.flat[part.layer] if stage.offloaded is not None else None
        self.gradients = own if own is not None else torch.zeros(length, device=stage.backend.device)
        self.views: dict[str, torch.Tensor] = {}
        self.parts: list[slice] = []
        self.values: list[slice] = []
        self._copied: list[list[tuple[Segment, torch.Tensor]]] = []
        """A list for each holder, of its ranges with their places among the gradients."""
        self._rooms: list[list[tuple[Segment, torch.Tensor]]] = []
        """The same of all segments, with the places of their new values."""
        begin = 0
        for of_part, numbers in zip(owned, sizes, strict=True):
            starts, taken = flat_layout(numbers)
            end = begin + taken
            found = [
                (segment, self._room(begin + at, segment, torch.float32))
                for segment, at in zip(of_part, starts, strict=True)
            ]
            self.views |= {segment.name: room for segment, room in found if segment.length is None}
            self._copied.append([one for one in found if one[0].length is not None])
            dtypes = [stage.parameters[segment.name].dtype for segment in of_part]
            where, taken = flat_layout(-(-n * d.itemsize // 4) for n, d in zip(numbers, dtypes, strict=True))
            rooms = zip(of_part, where, dtypes, strict=True)
            self._rooms.append([(segment, self._room(begin + at, segment, dtype)) for segment, at, dtype in rooms])
            self.parts.append(slice(begin, end))
            self.values.append(slice(begin, begin + taken))
            begin = end

    def _room(self, start: int, segment: Segment, dtype: torch.dtype) -> torch.Tensor:
        own = segment.of(self._stage.parameters[segment.name])
        size = own.numel() * dtype.itemsize
        numbers = self.gradients[start : start + -(-size // 4)]
        return numbers.view(torch.uint8)[:size].view(dtype).view(own.shape)

    def collect(self, gradient: Callable[[str], torch.Tensor]) -> None:
        """Copy to here what is elsewhere of the gradients (``Optimizer.gradient``)."""
        for segment, there in itertools.chain(*self._copied):
            there.copy_(segment.of(gradient(segment.name)))

    def spread(self, place: int, gradient: Callable[[str], torch.Tensor]) -> None:
        """Copy a holder's sums to there."""
        for segment, here in self._copied[place]:
            segment.of(gradient(segment.name)).copy_(here)

    def pack(self, place: int) -> None:
        """Copy a holder's parameters to where new values go."""
        rooms = self._rooms[place]
        if rooms:
            torch._foreach_copy_([room for _, room in rooms], [self._stored(segment) for segment, _ in rooms])

    def unpack(self, place: int) -> None:
        """Copy the new values of a holder's parameters into these."""
        rooms = self._rooms[place]
        self._stage.overwrite({segment.name: room for segment, room in rooms if segment.length is None})
        for segment, room in rooms:
            if segment.length is not None:
                self._stored(segment).copy_(room)

    def _stored(self, segment: Segment) -> torch.Tensor:
        return segment.of(self._stage.storage_of(self._stage.parameters[segment.name]))
