"""How activations and gradients travel from stage to stage: as they are computed, or as int8 (``train.wire``).

What is packed is on the device, so that copies to host memory and back are as small as the messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat

import torch

from hetero_mpi.planning.types.sizes import SCALE_BYTES

NEAREST: Iterable[None] = repeat(None)
"""No seed for any sequence."""
_PIECE = 1 << 18
"""Numbers that are rounded at once: what is made of them meanwhile stays in a processor's cache."""
_LARGEST = 127
_LEAST_SCALE = torch.finfo(torch.float32).tiny


class WireFormat:
    """Tensors as they are. ``dtype``: of what travels."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def packed_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of what travels in place of a tensor of ``shape``."""
        return tuple(shape)

    def packed(self, tensor: torch.Tensor, seeds: Iterable[int | None] = NEAREST) -> torch.Tensor:
        """The tensor that travels. ``seeds``: one for each sequence, by which its numbers are rounded up or down at random."""
        return tensor

    def unpacked(self, packed: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """The tensor of ``shape`` that the receiver sees."""
        return packed


class Int8Format(WireFormat):
    """Each row (a position's hidden vector) in parts of its largest absolute value: int8, behind the fp32 scales of all rows.

    Numbers are rounded to the nearest, or at random such that the mean is right, by a function of (seed, place in the sequence) in
    whole numbers: the same on every device, in any micro-batch. A row with a number that is not finite has none when it arrives.

    ``exact_rows``: of the end of each sequence, which are no hidden vectors and travel as they are (``router_loss``).
    """

    def __init__(self, computed: torch.dtype, exact_rows: int = 0) -> None:
        super().__init__(torch.uint8)
        self._computed, self._exact_rows = computed, exact_rows

    def packed_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        sequences, rows, width = shape
        exact = self._exact_rows * width * self._computed.itemsize
        return (sequences * ((rows - self._exact_rows) * (width + SCALE_BYTES) + exact),)

    def packed(self, tensor: torch.Tensor, seeds: Iterable[int | None] = NEAREST) -> torch.Tensor:
        tensor = tensor.detach()
        found = torch.empty(self.packed_shape(tensor.shape), dtype=torch.uint8, device=tensor.device)
        scales, exact, numbers = self._parts(found, tensor.shape)
        tensor, exact[...] = tensor[:, : numbers.shape[1]], tensor[:, numbers.shape[1] :]
        for rows, own_scales, own_numbers, seed in zip(tensor, scales, numbers, seeds, strict=False):
            for piece in _pieces(rows):
                part = rows[piece]
                scale = part.abs().amax(-1, keepdim=True).float().div_(_LARGEST).clamp_(min=_LEAST_SCALE)
                scaled = part / scale
                if seed is None:
                    scaled.round_()
                else:
                    scaled.add_(
                        _draws(piece.start * rows.shape[-1], scaled.numel(), seed, tensor.device).view_as(scaled)
                    )
                    scaled.floor_()
                own_scales[piece], own_numbers[piece] = scale, scaled.clamp_(-_LARGEST, _LARGEST)
        return found

    def unpacked(self, packed: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        found = torch.empty(tuple(shape), dtype=self._computed, device=packed.device)
        scales, exact, numbers = self._parts(packed, shape)
        found[:, numbers.shape[1] :] = exact
        for rows, own_scales, own_numbers in zip(found[:, : numbers.shape[1]], scales, numbers, strict=True):
            for piece in _pieces(rows):
                rows[piece] = own_numbers[piece] * own_scales[piece]
        return found

    def _parts(self, packed: torch.Tensor, shape: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views of a packed tensor of ``shape`` (B, T, H): fp32 scales (B, .., 1), exact rows, int8 numbers (B, .., H)."""
        sequences, rows, width = shape
        hidden = rows - self._exact_rows
        scales_end = sequences * hidden * SCALE_BYTES
        exact_end = scales_end + sequences * self._exact_rows * width * self._computed.itemsize
        return (
            packed[:scales_end].view(torch.float32).view(sequences, hidden, 1),
            packed[scales_end:exact_end].view(self._computed).view(sequences, self._exact_rows, width),
            packed[exact_end:].view(torch.int8).view(sequences, hidden, width),
        )


def format_of(wire: str, computed: torch.dtype, exact_rows: int = 0) -> WireFormat:
    """The format of the job's ``train.wire``. ``computed``: dtype of what stages compute."""
    return Int8Format(computed, exact_rows) if wire == "int8" else WireFormat(computed)


def _pieces(rows: torch.Tensor) -> list[slice]:
    """Pieces of a sequence's rows (T, H). All begin with an even number: ``_draws`` makes two at once."""
    size = max(2, _PIECE // rows.shape[-1] // 2 * 2)
    return [slice(begin, begin + size) for begin in range(0, len(rows), size)]


def _draws(first: int, count: int, seed: int, device: torch.device) -> torch.Tensor:
    """``count`` numbers in (0, 1) for the places from ``first`` (even) on: halves of a mixed 32-bit counter.

    The mixing is murmur's last step with other constants (Wellons, 2018: "lowbias32"), in signed numbers that wrap around.
    """
    mixed = torch.arange(first // 2, (first + count + 1) // 2, dtype=torch.int32, device=device)
    mixed.add_(seed % 2**31)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32), (16, 1)):
        without_sign = (mixed >> shift).bitwise_and_((1 << (32 - shift)) - 1)
        mixed.bitwise_xor_(without_sign).mul_(factor)
    return mixed.view(torch.int16)[:count].float().mul_(2.0**-16).add_(0.5 + 2.0**-17)
