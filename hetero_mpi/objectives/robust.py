"""DPO without the bias of pairs that are the wrong way round (Chowdhury et al. 2024, arXiv:2403.00409)."""

import torch

from hetero_mpi.objectives import Answers, Settings
from hetero_mpi.objectives.dpo import sigmoid_losses

KEYS = ("preference_beta", "preference_smoothing")
REFERENCE = True


def pair_losses(chosen: Answers, rejected: Answers, settings: Settings) -> torch.Tensor:
    flipped = settings.preference_smoothing
    flipped /= 2 * flipped - 1  # below 0: subtracts what the exchanged pairs add
    return sigmoid_losses(chosen.reward - rejected.reward, flipped)
