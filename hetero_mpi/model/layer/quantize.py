"""NF4 weights (QLoRA, Dettmers et al. 2023, arXiv:2305.14314) using bitsandbytes, bitwise equal on every device.

The linear layers and fused experts of blocks are quantized on the host for every device, and only packed bytes are copied. The
embedding, norms and head stay in the compute dtype.

Fused experts are one tensor (experts, rows, columns) that transformers' kernels read from a module, so they are unpacked while the
module computes. Autograd would keep the unpacked tensor until backward, so backward recomputes the module's forward instead.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hetero_mpi.device.backend import HOST
from hetero_mpi.model.layer.interface import one_thread

if TYPE_CHECKING:
    from bitsandbytes.functional import QuantState
    from bitsandbytes.nn import Linear4bit

BLOCK_SIZE = 64
"""Number of weights that share one scale."""
SCALE_BLOCK_SIZE = 256
"""Number of scales that share one second-level scale (double quantization)."""
_PIECE = 1 << 24
"""Number of weights quantized at a time; bitsandbytes needs ten bytes of workspace for each."""
_PACKED = "_nf4"
"""Suffix of the parameter that holds the packed bytes of a fused experts' parameter."""


def fused_experts(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Yield (module name, module, parameter name, parameter) of each fused experts' tensor in ``module``."""
    for path, holder in module.named_modules():
        if "expert" in type(holder).__name__.lower():
            for name, parameter in holder.named_parameters(recurse=False):
                if parameter.ndim == 3 and parameter.numel():
                    yield path, holder, name, parameter


def packed_weights(module: nn.Module) -> dict[str, nn.Parameter]:
    """Map names in ``module`` to the parameters that ``quantize`` packs."""
    linear = {f"{name}.weight": layer.weight for name, layer in _linear_layers(module)}
    return linear | {f"{path}.{name}": parameter for path, _, name, parameter in fused_experts(module)}


def _linear_layers(module: nn.Module) -> list[tuple[str, nn.Linear]]:
    layers = ((name, layer) for name, layer in module.named_modules() if type(layer) is nn.Linear)
    return [(name, layer) for name, layer in layers if layer.weight.numel()]  # a member's shard may be empty


def double_scales(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the scales of a tensor's blocks after double quantization, fp32 (rows, blocks per row).

    Args:
        weight: (rows, ...); the size of each row is a multiple of the block size.
        dtype: compute dtype, as for ``quantize``.
    """
    from bitsandbytes.functional import dequantize_blockwise

    largest = [piece.view(-1, BLOCK_SIZE).abs().amax(1).float() for piece in _rounded(weight, dtype)]
    codes, offset, second = _quantized_twice(torch.cat(largest))
    return (dequantize_blockwise(codes, second) + offset).view(len(weight), -1)


def quantize(
    module: nn.Module,
    device: torch.device,
    dtype: torch.dtype,
    double: bool,
    scales: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Replace every ``nn.Linear`` and all fused experts in ``module`` with NF4 weights on ``device``.

    Experts need ``unpack_experts`` before they can compute.

    Args:
        module: a block with fp32 weights in host memory.
        dtype: compute dtype, to which weights are rounded first, as if the model had been loaded in this dtype.
        scales: maps names of tensors in ``module`` to fp32 scales to use for their blocks.
    """
    scales = scales or {}
    for name, layer in _linear_layers(module):
        parent, _, attribute = name.rpartition(".")
        new = _quantized(layer, device, dtype, double, scales.get(f"{name}.weight"))
        setattr(module.get_submodule(parent), attribute, new)
    for path, holder, name, parameter in list(fused_experts(module)):
        # Flat, because bitsandbytes' CPU kernel is wrong for blocks that cross the ends of rows.
        packed, state = _packed(parameter.flatten(), device, dtype, double, scales.get(f"{path}.{name}"))
        packed_parameter = nn.Parameter(packed, requires_grad=False)
        packed_parameter.quant_state = state  # type: ignore[attr-defined]
        holder.register_parameter(name + _PACKED, packed_parameter)
        # A placeholder without memory, with the shape and dtype that peft expects.
        empty = torch.empty((), dtype=dtype, device=device).expand(parameter.shape)
        setattr(holder, name, nn.Parameter(empty, requires_grad=False))


def is_empty(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is a placeholder for packed experts."""
    return parameter.device.type != "meta" and parameter.untyped_storage().nbytes() < parameter.nbytes


def unpack_experts(model: nn.Module, repeat: bool | Callable[[], bool], draws: bool) -> None:
    """Make modules with packed experts unpack them during their forward.

    Args:
        repeat: whether backward recomputes the module's forward, so that unpacked tensors are not kept; if not, the caller does.
        draws: whether the model may draw random numbers.
    """
    for path, holder in list(model.named_modules()):
        names = [n for n, parameter in holder.named_parameters(recurse=False) if is_empty(parameter)]
        if names:
            # peft's wrappers read the parameters before they call the wrapped module.
            outer = model.get_submodule(path[: path.find(".base_layer")] if ".base_layer" in path else path)
            vars(outer).pop("forward", None)
            run = partial(_with_unpacked, holder, names, outer.forward)
            outer.forward = partial(_repeated, run, repeat, draws) if repeat else run


def _repeated(
    run: Callable[..., Any], repeat: bool | Callable[[], bool], draws: bool, *arguments: Any, **keywords: Any
) -> Any:
    if callable(repeat) and not repeat():
        return run(*arguments, **keywords)
    return checkpoint(run, *arguments, use_reentrant=False, preserve_rng_state=draws, **keywords)


def _with_unpacked(
    holder: nn.Module, names: list[str], forward: Callable[..., Any], *arguments: Any, **keywords: Any
) -> Any:
    from bitsandbytes.functional import dequantize_4bit

    empty = {name: holder.get_parameter(name) for name in names}
    try:
        for name, parameter in empty.items():
            packed: Any = holder.get_parameter(name + _PACKED)
            values = dequantize_4bit(packed.data, packed.quant_state).view(parameter.shape)
            setattr(holder, name, nn.Parameter(values, requires_grad=False))
        return forward(*arguments, **keywords)
    finally:
        for name, parameter in empty.items():
            setattr(holder, name, parameter)


class _PackedProduct(torch.autograd.Function):
    """bitsandbytes' product with a packed matrix; backward uses the weights' current address instead of the address in forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: Any) -> torch.Tensor:
        from bitsandbytes import matmul_4bit

        ctx.layer = layer
        if _blocks_cross_rows(layer.weight.quant_state, x):
            return nn.functional.linear(x, unpacked(layer.weight, x.dtype), layer.bias)
        return cast(torch.Tensor, matmul_4bit(x, layer.weight, bias=layer.bias, quant_state=layer.weight.quant_state))

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return torch.matmul(dy, unpacked(ctx.layer.weight, dy.dtype)), None


def unpacked(weight: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return the matrix of a packed linear layer, (out, in)."""
    from bitsandbytes.functional import dequantize_4bit

    return cast(torch.Tensor, dequantize_4bit(weight.data.view(-1, 1), weight.quant_state).to(dtype))


def _blocks_cross_rows(state: QuantState, tensor: torch.Tensor) -> bool:
    """Whether ``correct_unpacking`` is needed on the tensor's device."""
    return tensor.device.type == "cpu" and state.shape[-1] % state.blocksize != 0


@cache
def correct_unpacking() -> None:
    """Let bitsandbytes unpack matrices as one row: its CPU kernel is wrong (0.50.2) for blocks that cross the ends of rows."""
    from bitsandbytes import functional

    unpack = functional.dequantize_4bit

    def unpack_flat(packed: torch.Tensor, quant_state: Any = None, *arguments: Any, **keywords: Any) -> Any:
        if quant_state is None or not _blocks_cross_rows(quant_state, packed):
            return unpack(packed, quant_state, *arguments, **keywords)
        flat = copy.copy(quant_state)
        vars(flat).update(shape=torch.Size([quant_state.shape.numel()]))
        return unpack(packed, flat, *arguments, **keywords).view(quant_state.shape)

    functional.dequantize_4bit = unpack_flat


def _product(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return cast(torch.Tensor, _PackedProduct.apply(x.to(layer.compute_dtype or x.dtype), layer)).to(x.dtype)


def _rounded(weight: torch.Tensor, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    return (piece.to(HOST, dtype) for piece in weight.detach().flatten().split(_PIECE))


def _quantized_twice(absmax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, QuantState]:
    """Double-quantize scales to 8 bits; return (codes, offset, second-level scales)."""
    from bitsandbytes.functional import quantize_blockwise

    with one_thread():  # the last bit of a mean depends on the number of threads
        offset = absmax.mean()
    codes, second = quantize_blockwise(absmax - offset, blocksize=SCALE_BLOCK_SIZE)
    return codes, offset, second


def _packed(
    weight: torch.Tensor, device: torch.device, dtype: torch.dtype, double: bool, scales: torch.Tensor | None = None
) -> tuple[torch.Tensor, QuantState]:
    """Quantize a tensor piece by piece, bitwise equal to one ``quantize_4bit``. ``scales`` holds given scales for its blocks."""
    from bitsandbytes.functional import QuantState, quantize_4bit

    pieces = [quantize_4bit(piece, blocksize=BLOCK_SIZE, quant_type="nf4") for piece in _rounded(weight, dtype)]
    offset, second = None, None
    if scales is not None:
        absmax = scales.flatten()
    else:
        absmax = torch.cat([state.absmax for _, state in pieces])
        if double:
            absmax, offset, second = _quantized_twice(absmax)
    code = pieces[0][1].code
    state = QuantState(absmax, weight.shape, code, BLOCK_SIZE, "nf4", dtype, offset, second)
    state.to(device)
    return torch.cat([packed for packed, _ in pieces]).to(device), state


def _quantized(
    layer: nn.Linear, device: torch.device, dtype: torch.dtype, double: bool, scales: torch.Tensor | None
) -> Linear4bit:
    # Imported here, because the import takes two seconds.
    from bitsandbytes.nn import Linear4bit, Params4bit

    correct_unpacking()
    packed, state = _packed(layer.weight, device, dtype, double, scales)
    format_keywords: dict[str, Any] = {"compress_statistics": state.nested, "quant_type": "nf4"}
    sizes = layer.in_features, layer.out_features
    new = Linear4bit(*sizes, bias=layer.bias is not None, compute_dtype=dtype, device="meta", **format_keywords)
    keywords = {"quant_state": state, "blocksize": BLOCK_SIZE, "module": new, "bnb_quantized": True, **format_keywords}
    new.weight = Params4bit(packed, requires_grad=False, **keywords)
    new.quant_state = state
    new.forward = partial(_product, new)
    if layer.bias is not None:
        new.bias = nn.Parameter(layer.bias.detach().to(device, dtype), requires_grad=False)
    return new
