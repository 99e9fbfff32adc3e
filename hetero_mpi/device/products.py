"""Matrix products in 16-bit dtypes on CPUs without hardware support, computed in fp32 and rounded once.

If oneDNN has no kernel for the processor, torch's bf16 and fp16 products are about 30 times slower than fp32. This module replaces
the operators below autograd, so that the forward and backward of every model use fp32 products. Tensors keep their 16-bit dtype in
memory and in messages. The replacements call the original ``out`` variants, as kernels from ``torch.library.get_kernel`` would hold
the GIL while they compute, which blocks communication. Operators without an ``out`` variant are replaced one level higher.
"""

import warnings
from collections.abc import Iterator
from typing import Any

import torch

_NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}
_BLOCK_ROWS = 2048
"""Maximum rows and columns converted to fp32 at a time (16 MB); converting a whole LM head would take gigabytes."""
_widened: set[torch.dtype] = set()
_libraries: list[torch.library.Library] = []
"""The libraries that replace operators, referenced here to keep them alive."""


def has_products(dtype: str) -> bool:
    """Return whether this CPU multiplies matrices in a compute dtype at least about as fast as in fp32."""
    if dtype not in _NARROW:
        return True
    try:
        return bool(getattr(torch.ops.mkldnn, f"_is_mkldnn_{dtype}_supported")())
    except AttributeError:  # torch was built without oneDNN
        return False


def is_faster_in_bf16() -> bool:
    """Return whether this CPU multiplies matrices faster in bf16 than in fp32 (x86 with AVX512-BF16 or AMX)."""
    return has_products("bf16") and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def widen_products(dtype: str) -> None:
    """Make this process compute matrix products of ``dtype`` tensors on the CPU in fp32."""
    _widened.add(_NARROW[dtype])
    if _libraries:
        return
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        for name, product in {"mm": _mm, "mm.out": _mm_out, "addmm": _addmm, "bmm": _bmm, "baddbmm": _baddbmm}.items():
            library.impl(name, product, "CPU")
        library.impl("addmm_", _addmm_, "CPU")
        library.impl("_scaled_dot_product_flash_attention_for_cpu", _attention, "AutogradCPU")
        library.impl("convolution", _Convolution.apply, "AutogradCPU")


def _to_fp32(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in _widened else value


def _mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return _mm_out(a, b, out=a.new_empty(a.shape[0], b.shape[1]))


def _mm_out(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    out.resize_(a.shape[0], b.shape[1])
    return _matrices(out, a, b, 0, 1, out)  # beta = 0 ignores the addend


def _addmm(added: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1) -> torch.Tensor:
    return _matrices(added, a, b, beta, alpha, a.new_empty(a.shape[0], b.shape[1]))


def _addmm_(
    added: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    return _matrices(added, a, b, beta, alpha, added)


def _matrices(
    added: torch.Tensor, a: torch.Tensor, b: torch.Tensor, beta: float, alpha: float, out: torch.Tensor
) -> torch.Tensor:
    """Compute ``beta * added + alpha * a @ b`` into ``out``."""
    single = a.shape[0] == 1  # torch's kernel for one row (token generation) is faster than fp32
    if single or a.dtype not in _widened or b.dtype is not a.dtype:
        return torch.addmm(added, a, b, beta=beta, alpha=alpha, out=out)
    added = added.expand(out.shape)
    for rows in _parts(a.shape[0], _BLOCK_ROWS):
        for columns in _parts(b.shape[1], _BLOCK_ROWS):
            total = added[rows, columns].float()
            for i, inner in enumerate(_parts(a.shape[1], _BLOCK_ROWS)):
                factors = a[rows, inner].float(), b[inner, columns].float()
                torch.addmm(total, *factors, beta=beta if i == 0 else 1, alpha=alpha, out=total)
            out[rows, columns] = total
    return out


def _bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out = a.new_empty(a.shape[0], a.shape[1], b.shape[2])
    if a.dtype not in _widened or b.dtype is not a.dtype:
        return torch.bmm(a, b, out=out)
    for part in _batches(a, b):
        out[part] = torch.bmm(a[part].float(), b[part].float(), out=torch.empty(0))
    return out


def _baddbmm(
    added: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    out = a.new_empty(a.shape[0], a.shape[1], b.shape[2])
    if a.dtype not in _widened or b.dtype is not a.dtype:
        return torch.baddbmm(added, a, b, beta=beta, alpha=alpha, out=out)
    added = added.expand(out.shape)
    for part in _batches(a, b):
        factors = a[part].float(), b[part].float()
        out[part] = torch.baddbmm(added[part].float(), *factors, beta=beta, alpha=alpha, out=torch.empty(0))
    return out


def _batches(a: torch.Tensor, b: torch.Tensor) -> Iterator[slice]:
    """Yield slices of the batch dimension of ``a @ b`` that limit the size of the fp32 copies."""
    (batch, rows, inner), columns = a.shape, b.shape[2]
    return _parts(batch, max(1, _BLOCK_ROWS * _BLOCK_ROWS // max(1, rows * inner, inner * columns, rows * columns)))


def _parts(length: int, size: int) -> Iterator[slice]:
    """Yield slices of at most ``size`` that cover ``range(length)``. There is at least one, even if it is empty."""
    return (slice(first, first + size) for first in range(0, max(1, length), size))


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> Any:
    return _Attention.apply(query, key, value, dropout_p, is_causal, attn_mask, scale)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        *inputs, ctx.mask, ctx.scale = arguments
        with torch._C._AutoDispatchBelowAutograd():
            out, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *map(_to_fp32, inputs), attn_mask=_to_fp32(ctx.mask), scale=ctx.scale
            )
        out = out.to(inputs[0].dtype)
        ctx.save_for_backward(*inputs[:3], out, log_sum)
        ctx.options = inputs[3:]
        ctx.mark_non_differentiable(log_sum)
        return out, log_sum

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
        tensors = [_to_fp32(tensor) for tensor in (gradient, *ctx.saved_tensors)]
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *tensors, *ctx.options, attn_mask=_to_fp32(ctx.mask), scale=ctx.scale
        )
        return *(grad.to(gradient.dtype) for grad in gradients), None, None, None, None


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *how: Any) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias_sizes, ctx.how = None if bias is None else list(bias.shape), how
        with torch._C._AutoDispatchBelowAutograd():
            return torch.convolution(_to_fp32(x), _to_fp32(weight), _to_fp32(bias), *how).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tensors = [_to_fp32(tensor) for tensor in (gradient, *ctx.saved_tensors)]
        needs_gradient = list(ctx.needs_input_grad[:3])
        gradients = torch.ops.aten.convolution_backward(*tensors, ctx.bias_sizes, *ctx.how, needs_gradient)
        return *(grad if grad is None else grad.to(gradient.dtype) for grad in gradients), *(None for _ in ctx.how)
