"""Encoding of activations and gradients sent between stages: the compute dtype, or int8 (``train.wire``).

Tensors are encoded on the device, so copies between device and host are no larger than the messages.
"""

from collections.abc import Iterable, Sequence
from itertools import repeat

import torch

from hetero_mpi.planning.types.sizes import SCALE_BYTES

NEAREST: Iterable[None] = repeat(None)
"""Seeds that select rounding to nearest."""
_PIECE_ELEMENTS = 1 << 18
"""Number of elements quantized at a time, so that intermediate tensors fit in a CPU's cache."""
_MAX_INT8 = 127
_MIN_SCALE = torch.finfo(torch.float32).tiny


class WireFormat:
    """Sends tensors unchanged. ``dtype`` is the dtype of the messages."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def packed_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the message for a tensor of ``shape``."""
        return tuple(shape)

    def packed(self, tensor: torch.Tensor, seeds: Iterable[int | None] = NEAREST) -> torch.Tensor:
        """Encode a tensor. ``seeds`` gives each sequence's stochastic-rounding seed; a seed of None rounds to nearest."""
        return tensor

    def unpacked(self, packed: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Decode a message into a tensor of ``shape``."""
        return packed


class Int8Format(WireFormat):
    """Int8 with one fp32 scale per row (the hidden vector of one position).

    A message holds the scales of all rows, then the exact rows, then the int8 values. Values are rounded to nearest, or
    stochastically without bias by an integer hash of (seed, position in the sequence), so that results do not depend on device or
    micro-batch. A row that contains a non-finite value is decoded without finite values. ``exact_rows`` is the number of rows at
    the end of each sequence that are not hidden vectors and are sent unquantized (``router_loss``).
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
        message = torch.empty(self.packed_shape(tensor.shape), dtype=torch.uint8, device=tensor.device)
        scales, exact, values = self._parts(message, tensor.shape)
        tensor, exact[...] = tensor[:, : values.shape[1]], tensor[:, values.shape[1] :]
        for rows, row_scales, row_values, seed in zip(tensor, scales, values, seeds, strict=False):
            for piece in _row_slices(rows):
                part = rows[piece]
                scale = part.abs().amax(-1, keepdim=True).float().div_(_MAX_INT8).clamp_(min=_MIN_SCALE)
                scaled = part / scale
                if seed is None:
                    scaled.round_()
                else:
                    scaled.add_(
                        _uniform(piece.start * rows.shape[-1], scaled.numel(), seed, tensor.device).view_as(scaled)
                    )
                    scaled.floor_()
                row_scales[piece], row_values[piece] = scale, scaled.clamp_(-_MAX_INT8, _MAX_INT8)
        return message

    def unpacked(self, packed: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        tensor = torch.empty(tuple(shape), dtype=self._computed, device=packed.device)
        scales, exact, values = self._parts(packed, shape)
        tensor[:, values.shape[1] :] = exact
        for rows, row_scales, row_values in zip(tensor[:, : values.shape[1]], scales, values, strict=True):
            for piece in _row_slices(rows):
                rows[piece] = row_values[piece] * row_scales[piece]
        return tensor

    def _parts(self, packed: torch.Tensor, shape: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return views of the encoded tensor of ``shape`` (B, T, H): fp32 scales (B, .., 1), exact rows, int8 values (B, .., H)."""
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
    """Return the wire format for the job's ``train.wire``. ``computed`` is the compute dtype of the stages."""
    return Int8Format(computed, exact_rows) if wire == "int8" else WireFormat(computed)


def _row_slices(rows: torch.Tensor) -> list[slice]:
    """Return slices of a sequence's rows (T, H). Each starts at an even row, because ``_uniform`` makes two values at a time."""
    size = max(2, _PIECE_ELEMENTS // rows.shape[-1] // 2 * 2)
    return [slice(begin, begin + size) for begin in range(0, len(rows), size)]


def _uniform(first: int, count: int, seed: int, device: torch.device) -> torch.Tensor:
    """Return ``count`` pseudo-random values in (0, 1) for positions from ``first`` (even), as halves of a hashed 32-bit counter.

    The hash is murmur's finalizer with other constants (Wellons, 2018: "lowbias32"), in wrapping signed integers.
    """
    mixed = torch.arange(first // 2, (first + count + 1) // 2, dtype=torch.int32, device=device)
    mixed.add_(seed % 2**31)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32), (16, 1)):
        without_sign = (mixed >> shift).bitwise_and_((1 << (32 - shift)) - 1)
        mixed.bitwise_xor_(without_sign).mul_(factor)
    return mixed.view(torch.int16)[:count].float().mul_(2.0**-16).add_(0.5 + 2.0**-17)
