"""Robust DPO: unbiased under flipped preference labels (Chowdhury et al. 2024, arXiv:2403.00409)."""

import torch

from hetero_mpi.objectives import Answers, Settings
from hetero_mpi.objectives.dpo import sigmoid_losses

KEYS = ("preference_beta", "preference_smoothing")
REFERENCE = True


def pair_losses(chosen: Answers, rejected: Answers, settings: Settings) -> torch.Tensor:
    flipped = settings.preference_smoothing
    flipped /= 2 * flipped - 1  # negative, to subtract the expected loss of flipped pairs
    return sigmoid_losses(chosen.reward - rejected.reward, flipped)
