"""The loss in pieces has the bits of torch's cross-entropy, and its gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hetero_mpi.model.layer.loss import IGNORED, PIECE, piece_size, summed_loss
from hetero_mpi.planning.types.sizes import DTYPE_BYTES


@pytest.mark.parametrize("factor", [1.0, 65536.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 7, 32, 120])
def test_pieces_change_no_bit(rows: int, dtype: torch.dtype, factor: float) -> None:
    """Pieces of one row, of a number that does not divide the rows, of one that does, and two unlike ones; the loss is scaled."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = 1003
    values = torch.randn((2, 64, vocabulary), generator=generator).mul_(4).to(dtype)
    targets = torch.randint(0, vocabulary, (2, 64), generator=generator)
    targets[1, 9:40] = IGNORED
    whole, pieces = values.clone().requires_grad_(True), values.clone().requires_grad_(True)
    expected = (
        F.cross_entropy(whole.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum") / 97
    )
    loss = summed_loss(pieces, targets, piece=rows * vocabulary) / 97
    assert loss.dtype == torch.float32 and torch.equal(loss, expected)
    for total in (expected, loss):
        total.backward(torch.tensor(factor))
    assert whole.grad is not None and pieces.grad is not None and pieces.grad.dtype == dtype
    assert torch.equal(pieces.grad, whole.grad) and pieces.grad.count_nonzero() > 0


def test_pieces_keep_only_the_logits() -> None:
    """Bytes that wait for backward: torch keeps fp32 values of every logit, the pieces what the head made."""
    logits = torch.randn((1, 64, 1000)).bfloat16().requires_grad_(True)
    targets = torch.zeros((1, 64), dtype=torch.int64)
    kept = {}
    for piece in (64 * 1000, 5 * 1000):
        storages = {}

        def pack(tensor: torch.Tensor, storages: dict[int, int] = storages) -> torch.Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            summed_loss(logits, targets, piece)
        kept[piece] = sum(size for size in storages.values() if size > 64 * 8)
    assert kept == {64 * 1000: 64 * 1000 * 4, 5 * 1000: logits.nbytes}


@pytest.mark.parametrize("logits", [PIECE + 1, 1024 * 128_256, 8192 * 128_256, 65_536 * 152_064])
def test_pieces_on_a_gpu_are_few_and_fit_what_planning_counts(logits: int) -> None:
    piece = piece_size(logits, cpu=False)
    assert piece_size(logits, cpu=True) == PIECE <= piece <= 1 << 26
    assert logits / piece <= 16 or piece == 1 << 26
    if piece > PIECE:  # planning counts the gradient twice
        assert 3 * 4 * piece <= logits * DTYPE_BYTES["bf16"]


def test_backward_of_pieces_runs_no_autograd_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of it hands every piece over to another thread on a GPU."""
    logits = torch.randn((1, 64, 1000), requires_grad=True)
    loss = summed_loss(logits, torch.zeros((1, 64), dtype=torch.int64), 5 * 1000)
    monkeypatch.delattr(torch.autograd, "grad")
    loss.backward()
    assert logits.grad is not None and logits.grad.count_nonzero() > 0
