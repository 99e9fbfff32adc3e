"""The gradients of a layer that several ranks hold, in one buffer: what these exchange."""

from __future__ import annotations

import torch

from hetero_mpi.model.held_layers import HeldLayers
from hetero_mpi.model.layer.flat_layout import flat_layout


class FlatGradients:
    """A layer's fp32 gradients, one after the other with a few zeros between them, in the same memory for good.

    The buffer has a part for each holder, of the parameters that this one owns (``HeldLayers.shared``); the layout is the same
    wherever the layer is held. Between two steps a part takes new values of its parameters, in their dtype.

    Attributes:
        gradients: (n,), where the stage keeps its state.
        views: name -> a parameter's gradient in there.
        parts: of ``gradients``, one for each holder.
        values: what of them new values take, in fp32 numbers.
    """

    def __init__(self, stage: HeldLayers, layer: int) -> None:
        self._stage = stage
        owned = stage.shared[layer]
        names = [name for of_part in owned for name in of_part]
        starts, length = flat_layout(stage.parameters[name].numel() for name in names)
        own = stage.offloaded.flat[layer] if stage.offloaded is not None else None
        self.gradients = own if own is not None else torch.zeros(length, device=stage.backend.device)
        self.views: dict[str, torch.Tensor] = {}
        for name, start in zip(names, starts, strict=True):
            parameter = stage.parameters[name]
            self.views[name] = self.gradients[start : start + parameter.numel()].view(parameter.shape)
        self.parts: list[slice] = []
        self.values: list[slice] = []
        self._rooms: list[dict[str, torch.Tensor]] = []
        """Of each holder: name -> where a parameter's new values are."""
        begin = 0
        for of_part in owned:
            end = begin + flat_layout(stage.parameters[name].numel() for name in of_part)[1]
            where, taken = flat_layout(-(-stage.parameters[name].nbytes // 4) for name in of_part)
            self._rooms.append({name: self._room(begin + at, name) for name, at in zip(of_part, where, strict=True)})
            self.parts.append(slice(begin, end))
            self.values.append(slice(begin, begin + taken))
            begin = end

    def _room(self, start: int, name: str) -> torch.Tensor:
        parameter = self._stage.parameters[name]
        numbers = self.gradients[start : start + -(-parameter.nbytes // 4)]
        return numbers.view(torch.uint8)[: parameter.nbytes].view(parameter.dtype).view(parameter.shape)

    def pack(self, place: int) -> None:
        """Copy a holder's parameters to where new values go."""
        rooms, stage = self._rooms[place], self._stage
        if rooms:
            torch._foreach_copy_(list(rooms.values()), [stage.storage_of(stage.parameters[name]) for name in rooms])

    def unpack(self, place: int) -> None:
        """Copy the new values of a holder's parameters into these."""
        self._stage.overwrite(self._rooms[place])
