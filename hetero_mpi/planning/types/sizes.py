"""Sizes and names that planning shares with the stages that run."""

from __future__ import annotations

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of a value in each compute dtype."""
SCALE_BYTES = 4
"""Bytes of the scale that goes with each row that travels as int8."""
GRADIENT_BYTES = 4
"""Gradients are added up and exchanged in fp32, whatever the compute dtype."""
INT8 = "int8"
COPY_BYTES = 12
"""Bytes of a copy of the trained state, per trained parameter: itself and AdamW's two moments, fp32."""
MOMENT_BLOCK = 256
"""Moments of a byte each that share an fp32 scale."""
EIGHT_BIT_SAVING = 8 - 2 - 8 / MOMENT_BLOCK
"""Bytes per parameter whose two moments take a byte each and share scales, in place of two fp32 numbers."""
STREAMED_LAYERS = 2
"""Layers of a streamed stage whose weights are on the device: the one that computes and the next one. Of gradients: the one that
computes, and the one whose gradients leave or come. Of layers on disk, in host memory: one that leaves, and one that is read."""
LOGITS_BYTES = 500_000_000
"""A head whose logits of a micro-batch take more bytes than this computes them in slices, forward and again in backward. Without
slices they, their gradient and the loss take three times as much: so no head takes more than 1.5 GB of them."""
HEAD_TOKENS = 1024
"""Tokens of a slice: few enough that logits of 150,000 words take less than a gigabyte, enough for a device to be as fast as it
can."""
BLOCK_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
"""Names of the number of blocks in a ``config.json``."""
EMBEDDING = "embedding"
HEAD = "head"


def in_slices(logits_bytes_per_token: float, tokens: int) -> bool:
    """Whether a head that is given so many tokens computes their logits in slices. That changes bits: it is asked here alone, by
    planning and by the stages of every plan."""
    return tokens > HEAD_TOKENS and tokens * logits_bytes_per_token > LOGITS_BYTES


def sent_bytes(row_bytes: int, dtype: str, wire: str | None) -> int:
    """Bytes of a token's hidden vector, which is ``row_bytes`` long in ``dtype``, as it travels."""
    return row_bytes // DTYPE_BYTES[dtype] + SCALE_BYTES if wire == INT8 and row_bytes else row_bytes
