"""Loss of a head that computes ``HEAD_TOKENS`` tokens at a time if a micro-batch's logits exceed ``LOGITS_BYTES``.

Backward recomputes the logits of each slice: for long sequences and large vocabularies, storing them would take more memory than
all blocks with activation checkpointing. The rule depends only on tokens and vocabulary, so all plans give bitwise equal results.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import MoeModelOutputWithPast

from hetero_mpi.model.layer.loss import added_losses, likeliest, target_losses
from hetero_mpi.planning.types import sizes

if TYPE_CHECKING:
    from hetero_mpi.model.layer.interface import LayerChain


class _LastNormOutput(MoeModelOutputWithPast):
    """Output of a model without its head, with all the fields that model classes with heads read."""

    shared_kv_states = None


class HeadSlices:
    """Losses from hidden states (B, T, D) after the last norm; ``layer.loss`` has the same functions for logits."""

    def __init__(self, chain: LayerChain, bytes_per_token: int, model: Any, divided: Any) -> None:
        """Prepare the sliced loss.

        Args:
            bytes_per_token: bytes of one token's logits over the full vocabulary, even if the head is sharded.
            divided: this rank's shard of the head (``LayerShare``) in a tensor-parallel group, or None.
        """
        self._chain, self._model, self._divided, self._bytes = chain, model, divided, bytes_per_token

    def slices(self, targets: torch.Tensor) -> bool:
        """Return whether the logits for ``targets`` are computed in slices."""
        return sizes.in_slices(self._bytes, targets.numel())

    def loss(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Sum the losses of all targets that are not ``IGNORED``: a differentiable fp32 scalar."""
        return added_losses(self.target_losses(hidden, targets).flatten(), targets.flatten())

    def target_losses(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of each target, (B, T) in fp32, differentiable; 0 for ``IGNORED``."""
        compute = target_losses if self._divided is None else self._divided.target_losses

        def losses(x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
            return compute(self._logits(x), words)

        slice_losses = [
            checkpoint(losses, *arguments, use_reentrant=False, preserve_rng_state=False)
            for arguments in self._slices(hidden, targets)
        ]
        return torch.cat(slice_losses, 1).view_as(targets)

    def likeliest(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the number of targets that have the largest logit, a scalar."""
        count = likeliest if self._divided is None else self._divided.likeliest
        counts = [count(self._logits(x), words) for x, words in self._slices(hidden, targets)]
        return torch.stack(counts).sum()

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute logits with the model's own class, as if the layers before the head had returned ``hidden``."""
        base, layers = self._model.base_model, self._chain.layer_count
        base.forward = lambda *_, **__: _LastNormOutput(last_hidden_state=hidden)
        try:
            return self._chain.run(self._model, layers - 1, layers, hidden)
        finally:
            del base.forward

    def _slices(self, hidden: torch.Tensor, targets: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        rows = hidden.reshape(1, -1, hidden.shape[-1]), targets.reshape(1, -1)
        return list(zip(*(each.split(sizes.HEAD_TOKENS, 1) for each in rows), strict=True))
