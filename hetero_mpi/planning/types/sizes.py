"""Sizes and names shared by planning and execution."""

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
SCALE_BYTES = 4
"""Bytes of the scale that each int8 row carries."""
GRADIENT_BYTES = 4
"""Bytes of a gradient: gradients are accumulated and exchanged in fp32, whatever the compute dtype."""
INT8 = "int8"
COPY_BYTES = 12
"""Bytes per trained parameter of a copy: fp32 value and AdamW's two moments."""
MOMENT_BLOCK_SIZE = 256
"""Number of 8-bit moments that share one fp32 scale."""
OFFLOADED_LAYER_COUNT = 2
"""Layers that an offloaded stage buffers: on the device, weights of the current and next layer, and gradients of the current
layer and the one being copied; in host memory, the layer in use and the one being read from disk."""
LOGITS_BYTES = 500_000_000
"""Logits bytes per micro-batch above which a head computes them in slices in forward and backward. Unsliced logits, gradient
and loss take three times as much, at most 1.5 GB."""
HEAD_TOKENS = 1024
"""Tokens per slice: logits of a vocabulary of 150,000 stay below a gigabyte, and the device still runs at full speed."""
BLOCK_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
"""Keys for the number of blocks in a ``config.json``."""
EMBEDDING = "embedding"
HEAD = "head"


def in_slices(logits_bytes_per_token: float, tokens: int) -> bool:
    """Whether a head computes logits in slices. Slicing changes bits, so planning and execution both call this function."""
    return tokens > HEAD_TOKENS and tokens * logits_bytes_per_token > LOGITS_BYTES


def sent_bytes(row_bytes: int, dtype: str, wire: str | None) -> int:
    """Bytes sent for one token's hidden vector, which has ``row_bytes`` bytes in ``dtype``."""
    return row_bytes // DTYPE_BYTES[dtype] + SCALE_BYTES if wire == INT8 and row_bytes else row_bytes
