"""Products of narrow dtypes in fp32; run by tests/device/test_products.py, in a process whose processor has AVX2 only.

In a process of its own: what is replaced in torch stays so.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hetero_mpi.device import products
from hetero_mpi.device.backend import DTYPES, Backend
from hetero_mpi.training.setup.setup import settle_products

ALONE: Any = SimpleNamespace(all_gather_json=lambda value: [value])
LONG = 1504
"""Sums so long that torch's own narrow products differ from rounded ones of fp32."""
Operation = Callable[..., torch.Tensor]


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def masked(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(64, 64, dtype=torch.bool).tril(5).triu(-20)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def experts(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return F.grouped_mm(rows, weights, offs=torch.tensor([200, 200, 999, LONG], dtype=torch.int32))


EXACT: dict[str, tuple[Operation, tuple[tuple[int, ...], ...]]] = {
    "linear": (F.linear, ((2, LONG // 2, LONG), (LONG, LONG))),
    "linear with bias": (F.linear, ((LONG, LONG), (LONG, LONG), (LONG,))),
    "matrices": (torch.matmul, ((2, LONG, 400), (2, 400, LONG))),
    "matrices added": (
        lambda c, a, b: torch.baddbmm(c, a, b, beta=0.5, alpha=2),
        ((2, LONG, 9), (2, LONG, 400), (2, 400, 9)),
    ),
    "experts": (experts, ((LONG, LONG), (4, LONG, 200))),
    "convolution": (lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1), ((2, 64, 20, 20), (64, 64, 3, 3), (64,))),
    "depthwise convolution": (lambda x, w: F.conv1d(x, w, padding=3, groups=64), ((2, 64, 300), (64, 1, 4))),
    "transposed convolution": (lambda x, w: F.conv_transpose2d(x, w, stride=2), ((2, 64, 20, 20), (64, 8, 3, 3))),
}
ATTENTIONS: dict[str, tuple[Operation, tuple[tuple[int, ...], ...]]] = {
    "grouped heads": (attention, ((2, 4, 300, 64), (2, 2, 300, 64), (2, 2, 300, 64))),
    "mask": (masked, ((2, 4, 64, 64),) * 3),
}


def both(
    operation: Operation, shapes: tuple[tuple[int, ...], ...], dtype: str
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(narrow, fp32 rounded afterwards) of the result and of every operand's gradient."""
    torch.manual_seed(0)
    narrow = [torch.randn(shape).to(DTYPES[dtype]).requires_grad_() for shape in shapes]
    wide = [tensor.detach().float().requires_grad_() for tensor in narrow]
    results = operation(*narrow), operation(*wide)
    gradient = torch.randn(results[1].shape).to(DTYPES[dtype])
    results[0].backward(gradient)
    results[1].backward(gradient.float())
    pairs = [results, *((a.grad, b.grad) for a, b in zip(narrow, wide, strict=True))]
    return [(a.detach(), b.detach().to(DTYPES[dtype])) for a, b in pairs if a is not None and b is not None]


def test_nothing_is_replaced_where_no_job_needs_it() -> None:
    settle_products(ALONE, Backend(), "fp32")
    assert not products._libraries and Backend().products("fp32") == "fp32"


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", EXACT)
def test_products_are_those_of_fp32_rounded(name: str, dtype: str) -> None:
    settle_products(ALONE, Backend(), dtype)
    for ours, expected in both(*EXACT[name], dtype):
        assert ours.dtype is DTYPES[dtype] and torch.equal(ours, expected)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_keeps_its_result_narrow_for_backward(name: str, dtype: str) -> None:
    settle_products(ALONE, Backend(), dtype)
    (out, expected), *gradients = both(*ATTENTIONS[name], dtype)
    assert torch.equal(out, expected)
    precision = torch.finfo(DTYPES[dtype]).eps
    for ours, exact in gradients:
        assert (ours - exact).norm() <= precision * exact.norm()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_large_matrices_are_copied_in_parts(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settle_products(ALONE, Backend(), dtype)
    monkeypatch.setattr(products, "_BLOCK_ROWS", 7)
    precision = torch.finfo(DTYPES[dtype]).eps
    for name in ("added", "batched"):
        shapes = ((30, 20), (17, 20), (17,)) if name == "added" else ((9, 5, 6), (9, 6, 4))
        for ours, exact in both(F.linear if name == "added" else torch.bmm, shapes, dtype):
            assert (ours - exact).norm() <= precision * exact.norm()


def test_products_of_nothing_and_of_one_row() -> None:
    settle_products(ALONE, Backend(), "bf16")
    empty = torch.empty(3, 0, dtype=torch.bfloat16)
    assert torch.equal(empty @ empty.t(), torch.zeros(3, 3, dtype=torch.bfloat16))
    assert (empty.t() @ torch.ones(3, 2, dtype=torch.bfloat16)).shape == (0, 2)
    row, matrix = torch.ones(1, LONG, dtype=torch.bfloat16), torch.ones(LONG, 5, dtype=torch.bfloat16)
    assert torch.equal(row @ matrix, torch.full((1, 5), LONG).bfloat16())


def test_other_dtypes_are_multiplied_as_before() -> None:
    torch.manual_seed(1)
    a, b, c = torch.randn(50, 60), torch.randn(60, 70), torch.randn(70)
    before = a @ b, torch.addmm(c, a, b), a[None] @ b[None], a.double() @ b.double()
    settle_products(ALONE, Backend(), "bf16")
    after = a @ b, torch.addmm(c, a, b), a[None] @ b[None], a.double() @ b.double()
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    with pytest.raises(RuntimeError, match="dtype"):
        torch.mm(a.bfloat16(), b)
