"""NF4 weights (QLoRA, Dettmers et al. 2023, arXiv:2305.14314) through bitsandbytes, the same bits on every device.

Linear layers and fused experts of blocks are packed on the host, whatever device they go to, and only the packed bytes move;
embedding, norms and head stay in the compute dtype.

Fused experts are one tensor (experts, rows, columns) of a module, which transformers' own kernels read, so they are unpacked while
the module computes. Autograd would keep them so until backward: the module's forward is repeated there instead, from its input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hetero_mpi.device.backend import HOST
from hetero_mpi.model.layer.interface import one_thread

if TYPE_CHECKING:
    from bitsandbytes.functional import QuantState
    from bitsandbytes.nn import Linear4bit

BLOCK = 64
"""Weights that share one scale."""
_SECOND_BLOCK = 256
"""Scales that share one scale of their own (double quantisation)."""
_PIECE = 1 << 24
"""Weights packed at once: bitsandbytes needs ten bytes for each meanwhile."""
_PACKED = "_nf4"
"""Ends the name of the parameter that has the packed bytes of the one before it."""


def fused_experts(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """(name of the holder, holder, name in it, parameter) of each tensor in ``module`` that has a layer's experts in one."""
    for path, holder in module.named_modules():
        if "expert" in type(holder).__name__.lower():
            for name, parameter in holder.named_parameters(recurse=False):
                if parameter.ndim == 3 and parameter.numel():
                    yield path, holder, name, parameter


def packed_weights(module: nn.Module) -> dict[str, nn.Parameter]:
    """Name in ``module`` -> parameter, of all that ``quantize`` packs."""
    linear = {f"{name}.weight": layer.weight for name, layer in _linear_layers(module)}
    return linear | {f"{path}.{name}": parameter for path, _, name, parameter in fused_experts(module)}


def _linear_layers(module: nn.Module) -> list[tuple[str, nn.Linear]]:
    layers = ((name, layer) for name, layer in module.named_modules() if type(layer) is nn.Linear)
    return [
        (name, layer) for name, layer in layers if layer.weight.numel()
    ]  # a member of a group may have nothing of it


def double_scales(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The scales of a tensor's blocks as double quantisation leaves them, fp32 (rows, blocks of a row).

    Args:
        weight: (rows, ...), of which each row is a whole number of blocks.
        dtype: as ``quantize`` takes it.
    """
    from bitsandbytes.functional import dequantize_blockwise

    largest = [piece.view(-1, BLOCK).abs().amax(1).float() for piece in _rounded(weight, dtype)]
    codes, offset, second = _quantized_twice(torch.cat(largest))
    return (dequantize_blockwise(codes, second) + offset).view(len(weight), -1)


def quantize(
    module: nn.Module,
    device: torch.device,
    dtype: torch.dtype,
    double: bool,
    scales: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Replace every ``nn.Linear`` and all fused experts in ``module`` by their NF4 form on ``device``, one after the other.

    Experts compute after ``unpack_experts`` only.

    Args:
        module: a block with fp32 weights in host memory.
        dtype: compute dtype; the weights are rounded to it first, as if the model had been loaded in it.
        scales: name of a tensor in ``module`` -> the scales of its blocks, fp32, which it keeps as they are in place of its own.
    """
    scales = scales or {}
    for name, layer in _linear_layers(module):
        parent, _, attribute = name.rpartition(".")
        new = _quantized(layer, device, dtype, double, scales.get(f"{name}.weight"))
        setattr(module.get_submodule(parent), attribute, new)
    for path, holder, name, parameter in list(fused_experts(module)):
        # Flat, so that blocks may go over the ends of rows: bitsandbytes' kernel for CPUs is wrong there otherwise.
        packed, state = _packed(parameter.flatten(), device, dtype, double, scales.get(f"{path}.{name}"))
        held = nn.Parameter(packed, requires_grad=False)
        held.quant_state = state  # type: ignore[attr-defined]
        holder.register_parameter(name + _PACKED, held)
        # Of the shape and dtype that peft looks for, and without memory.
        empty = torch.empty((), dtype=dtype, device=device).expand(parameter.shape)
        setattr(holder, name, nn.Parameter(empty, requires_grad=False))


def is_empty(parameter: torch.Tensor) -> bool:
    """Whether it only stands for packed experts."""
    return parameter.device.type != "meta" and parameter.untyped_storage().nbytes() < parameter.nbytes


def unpacked_bytes(module: nn.Module) -> int:
    """Bytes of all packed experts in ``module`` when they are unpacked."""
    return sum(parameter.nbytes for parameter in module.parameters() if is_empty(parameter))


def unpack_experts(model: nn.Module, repeat: bool | Callable[[], bool], draws: bool) -> None:
    """From now on modules with packed experts unpack them to compute.

    Args:
        repeat: repeat such a module's forward in backward, so that nothing unpacked is kept; without, whoever calls the model sees
            to that.
        draws: may the model draw random numbers?
    """
    for path, holder in list(model.named_modules()):
        names = [n for n, parameter in holder.named_parameters(recurse=False) if is_empty(parameter)]
        if names:
            # peft's wrappers read the parameters before they call what they wrap.
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
    """bitsandbytes' product with a packed matrix, whose backward reads the weights where they are then: bitsandbytes' own keeps the
    memory in which they were."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: Any) -> torch.Tensor:
        from bitsandbytes import matmul_4bit

        ctx.layer = layer
        return cast(torch.Tensor, matmul_4bit(x, layer.weight, bias=layer.bias, quant_state=layer.weight.quant_state))

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        from bitsandbytes.functional import dequantize_4bit

        weight = ctx.layer.weight
        return torch.matmul(dy, dequantize_4bit(weight.data.view(-1, 1), weight.quant_state).to(dy.dtype)), None


def refer_to_packed(model: nn.Module) -> None:
    """Graphs of packed linear layers will outlive a change of the memory in which the weights are."""
    from bitsandbytes.nn import Linear4bit

    for layer in model.modules():
        if isinstance(layer, Linear4bit):
            layer.forward = partial(_product, layer)


def _product(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return cast(torch.Tensor, _PackedProduct.apply(x.to(layer.compute_dtype or x.dtype), layer)).to(x.dtype)


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


def _rounded(weight: torch.Tensor, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    return (piece.to(HOST, dtype) for piece in weight.detach().flatten().split(_PIECE))


def _quantized_twice(absmax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, QuantState]:
    """Scales in 8 bits: (codes, their offset, the scales of the scales)."""
    from bitsandbytes.functional import quantize_blockwise

    with one_thread():  # else ranks that hold one tensor could differ in a mean's last bit
        offset = absmax.mean()
    codes, second = quantize_blockwise(absmax - offset, blocksize=_SECOND_BLOCK)
    return codes, offset, second


def _packed(
    weight: torch.Tensor, device: torch.device, dtype: torch.dtype, double: bool, scales: torch.Tensor | None = None
) -> tuple[torch.Tensor, QuantState]:
    """The bits that ``quantize_4bit`` gives for the whole tensor. ``scales``: of its blocks, as they are to be kept."""
    from bitsandbytes.functional import QuantState, quantize_4bit

    pieces = [quantize_4bit(piece, blocksize=BLOCK, quant_type="nf4") for piece in _rounded(weight, dtype)]
    offset, second = None, None
    if scales is not None:
        absmax = scales.flatten()
    else:
        absmax = torch.cat([state.absmax for _, state in pieces])
        if double:
            absmax, offset, second = _quantized_twice(absmax)
    code = pieces[0][1].code
    state = QuantState(absmax, weight.shape, code, BLOCK, "nf4", dtype, offset, second)
    state.to(device)
    return torch.cat([packed for packed, _ in pieces]).to(device), state


def _quantized(
    layer: nn.Linear, device: torch.device, dtype: torch.dtype, double: bool, scales: torch.Tensor | None
) -> Linear4bit:
    # Imported here, as it takes two seconds that a job without NF4 need not wait for.
    from bitsandbytes.nn import Linear4bit, Params4bit

    packed, state = _packed(layer.weight, device, dtype, double, scales)
    how: dict[str, Any] = {"compress_statistics": state.nested, "quant_type": "nf4"}
    sizes = layer.in_features, layer.out_features
    new = Linear4bit(*sizes, bias=layer.bias is not None, compute_dtype=dtype, device="meta", **how)
    held = {"quant_state": state, "blocksize": BLOCK, "module": new, "bnb_quantized": True, **how}
    new.weight = Params4bit(packed, requires_grad=False, **held)
    new.quant_state = state
    if layer.bias is not None:
        new.bias = nn.Parameter(layer.bias.detach().to(device, dtype), requires_grad=False)
    return new
