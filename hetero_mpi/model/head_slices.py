"""The loss of a head that computes some tokens at a time, so that the logits of a whole micro-batch never exist.

Backward computes the logits of each slice again: for long sequences and large vocabularies they would take more memory than all
the blocks, whose forwards are repeated.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import MoeModelOutputWithPast

from hetero_mpi.model.layer.loss import IGNORED, likeliest, target_losses
from hetero_mpi.model.stage_layers import LayerShare
from hetero_mpi.model.transformers.chain import TransformersChain


class _LastNormOutput(MoeModelOutputWithPast):
    """The output of a model without its head, with all that classes with heads look for."""

    shared_kv_states = None


class HeadSlices:
    """The losses of hidden states (B, T, D), as the last norm gives them; of logits ``layer.loss`` has the same functions."""

    def __init__(self, chain: TransformersChain, tokens: int, model: Any, divided: LayerShare | None) -> None:
        """``tokens``: of a slice."""
        self._chain, self._model, self._divided, self._tokens = chain, model, divided, tokens

    def loss(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Sum of the losses of all targets that are not ``IGNORED``, a scalar (fp32), differentiable."""
        losses, words = self.target_losses(hidden, targets).flatten(), targets.flatten()
        # The order of additions of ``summed_loss``: each row is a vocabulary of one word.
        return F.nll_loss(-losses.unsqueeze(1), words.clamp(max=0), ignore_index=IGNORED, reduction="sum")

    def target_losses(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Loss of each target, (B, T) in fp32, differentiable; 0 where it is ``IGNORED``."""
        of = target_losses if self._divided is None else self._divided.target_losses

        def losses(x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
            return of(self._logits(x), words)

        found = [
            checkpoint(losses, *one, use_reentrant=False, preserve_rng_state=False)
            for one in self._slices(hidden, targets)
        ]
        return torch.cat(found, 1).view_as(targets)

    def likeliest(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """How many targets have the largest logit, a scalar."""
        of = likeliest if self._divided is None else self._divided.likeliest
        counts = [of(self._logits(x), words) for x, words in self._slices(hidden, targets)]
        return torch.stack(counts).sum()

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As the model's own class makes them: it is called as if all before the head gave ``hidden``."""
        base, layers = self._model.base_model, self._chain.layer_count
        base.forward = lambda *_, **__: _LastNormOutput(last_hidden_state=hidden)
        try:
            return self._chain.run(self._model, layers - 1, layers, hidden)
        finally:
            del base.forward

    def _slices(self, hidden: torch.Tensor, targets: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        rows = hidden.reshape(1, -1, hidden.shape[-1]), targets.reshape(1, -1)
        return list(zip(*(each.split(self._tokens, 1) for each in rows), strict=True))
