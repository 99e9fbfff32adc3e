"""NF4 weights (QLoRA, Dettmers et al. 2023, arXiv:2305.14314) through bitsandbytes, the same bits on every device.

Linear layers of blocks are packed on the host, whatever device they go to, and only the packed bytes move; embedding, norms
and head stay in the compute dtype. bitsandbytes quantises ``nn.Linear`` alone: fused expert tensors of MoE families stay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from hetero_mpi.device.backend import HOST

if TYPE_CHECKING:
    from bitsandbytes.nn import Linear4bit

BLOCK = 64
"""Weights that share one scale."""
_SECOND_BLOCK = 256
"""Scales that share one scale of their own (double quantisation)."""


def quantize_linears(module: nn.Module, device: torch.device, dtype: torch.dtype, double: bool) -> None:
    """Replace every ``nn.Linear`` in ``module`` by its NF4 form on ``device``, one after the other.

    Args:
        module: a block with fp32 weights in host memory.
        dtype: compute dtype; the weights are rounded to it first, as if the model had been loaded in it.
    """
    for name, layer in [(n, m) for n, m in module.named_modules() if type(m) is nn.Linear]:
        parent, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(parent), attribute, _quantized(layer, device, dtype, double))


def packed_bytes(parameters: int, double: bool) -> int:
    """Bytes of so many weights in NF4, scales included."""
    blocks = -(-parameters // BLOCK)
    scales = blocks + 4 * -(-blocks // _SECOND_BLOCK) if double else 4 * blocks
    return -(-parameters // 2) + scales


def set_training(model: nn.Module, training: bool) -> None:
    """``model.train(training)``, but for NF4 layers, which stay in training mode.

    In eval mode bitsandbytes repacks their bytes in place on CPUs with AVX512-BF16; nothing else in them depends on the mode.
    """
    model.train(training)
    for module in model.modules():
        if type(module).__module__.partition(".")[0] == "bitsandbytes":
            module.training = True


def _quantized(layer: nn.Linear, device: torch.device, dtype: torch.dtype, double: bool) -> Linear4bit:
    # Imported here, as it takes two seconds that a job without NF4 need not wait for.
    from bitsandbytes.functional import quantize_4bit
    from bitsandbytes.nn import Linear4bit, Params4bit

    weight = layer.weight.detach().to(HOST, dtype)
    packed, state = quantize_4bit(weight, blocksize=BLOCK, compress_statistics=double, quant_type="nf4")
    state.to(device)
    new = Linear4bit(
        layer.in_features,
        layer.out_features,
        bias=layer.bias is not None,
        compute_dtype=dtype,
        compress_statistics=double,
        quant_type="nf4",
        device="meta",
    )
    new.weight = Params4bit(
        packed.to(device),
        requires_grad=False,
        quant_state=state,
        blocksize=BLOCK,
        compress_statistics=double,
        quant_type="nf4",
        module=new,
        bnb_quantized=True,
    )
    new.quant_state = state
    if layer.bias is not None:
        new.bias = nn.Parameter(layer.bias.detach().to(device, dtype), requires_grad=False)
    return new
