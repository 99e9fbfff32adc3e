"""How activations and gradients travel from stage to stage: as they are computed, or as int8 (``train.wire``).

What is packed is on the device, so that copies to host memory and back are as small as the messages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import repeat

import torch

from hetero_mpi.planning.types.cost import SCALE_BYTES

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
        """Of what travels in place of a tensor of ``shape``."""
        return tuple(shape)

    def packed(self, tensor: torch.Tensor, seeds: Iterable[int | None] = NEAREST) -> torch.Tensor:
        """What travels. ``seeds``: one for each sequence, by which its numbers are rounded up or down at random."""
        return tensor

    def unpacked(self, packed: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """The tensor of ``shape`` that the receiver sees."""
        return packed


class Int8Format(WireFormat):
    """Each row (a position's hidden vector) in parts of its largest absolute value: int8, behind the fp32 scales of all rows.

    Numbers are rounded to the nearest, or at random such that the mean is right, by a function of (seed, place in the sequence) in
    whole numbers: the same on every device, in any micro-batch. A row with a number that is not finite has none when it arrives.
    """

    def __init__(self, computed: torch.dtype) -> None:
        super().__init__(torch.uint8)
        self._computed = computed

    def packed_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return (math.prod(shape[:-1]) * (shape[-1] + SCALE_BYTES),)

    def packed(self, tensor: torch.Tensor, seeds: Iterable[int | None] = NEAREST) -> torch.Tensor:
        tensor = tensor.detach()
        found = torch.empty(self.packed_shape(tensor.shape), dtype=torch.uint8, device=tensor.device)
        scales, numbers = _parts(found, tensor.shape)
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
        scales, numbers = _parts(packed, shape)
        for rows, own_scales, own_numbers in zip(found, scales, numbers, strict=True):
            for piece in _pieces(rows):
                rows[piece] = own_numbers[piece] * own_scales[piece]
        return found


def format_of(wire: str, computed: torch.dtype) -> WireFormat:
    """By the job's ``train.wire``. ``computed``: dtype of what stages compute."""
    return Int8Format(computed) if wire == "int8" else WireFormat(computed)


def _parts(packed: torch.Tensor, shape: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of a packed tensor of ``shape`` (..., H): fp32 scales (..., 1), int8 numbers (..., H)."""
    begin = math.prod(shape[:-1]) * SCALE_BYTES
    return packed[:begin].view(torch.float32).view(*shape[:-1], 1), packed[begin:].view(torch.int8).view(*shape)


def _pieces(rows: torch.Tensor) -> list[slice]:
    """Of a sequence's rows (T, H). All begin with an even number: ``_draws`` makes two at once."""
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
