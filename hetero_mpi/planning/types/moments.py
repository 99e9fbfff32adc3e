"""Optimizer state tensors of each parameter."""

import math

from hetero_mpi.planning.types.sizes import MOMENT_BLOCK_SIZE

TWO, EIGHT_BIT, FACTORED, ONE = "two", "eight_bit", "factored", "one"
"""Kinds of state: AdamW's fp32 moments, the same in 8-bit blocks, Adafactor's row and column means of squares, Muon's
momentum."""
OF_OPTIMIZER = {"adamw": (TWO,), "adamw_8bit": (TWO, EIGHT_BIT), "adafactor": (FACTORED,), "muon": (TWO, ONE)}
"""``[train] optimizer`` -> kinds of state; the last one is for the matrices in blocks."""

_FP32_BYTES = 4
Kept = dict[str, tuple[tuple[int, ...], str]]
"""Kind of tensor in a checkpoint -> (shape, dtype)."""


def moment_tensors(moments: str, shape: tuple[int, ...]) -> Kept:
    """Return the state tensors of a parameter with this shape."""
    if moments == EIGHT_BIT:
        scales = (-(-math.prod(shape) // MOMENT_BLOCK_SIZE),), "float32"
        codes = shape, "uint8"
        return {"moments1": codes, "moments2": codes, "absmax1": scales, "absmax2": scales}
    tensors = {"moments1": (shape, "float32"), "moments2": (shape, "float32")}
    if moments == FACTORED and len(shape) > 1:
        return {"moments1": (shape[:-1], "float32"), "moments2": ((*shape[:-2], shape[-1]), "float32")}
    if moments in (FACTORED, ONE):  # a vector's are not factored
        del tensors["moments2" if moments == ONE else "moments1"]
    return tensors


def saved_bytes(moments: str, shape: tuple[int, ...]) -> float:
    """Bytes that this state of a parameter saves relative to AdamW's fp32 moments."""
    sizes = moment_tensors(moments, shape).values()
    return 2 * _FP32_BYTES * math.prod(shape) - sum(
        math.prod(tensor_shape) * (1 if dtype == "uint8" else _FP32_BYTES) for tensor_shape, dtype in sizes
    )
