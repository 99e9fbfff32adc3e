"""SimPO: mean log-probabilities with a margin, without a reference model (Meng et al. 2024, arXiv:2405.14734)."""

import torch

from hetero_mpi.objectives import Answers, Settings
from hetero_mpi.objectives.dpo import sigmoid_losses

KEYS = ("preference_beta", "preference_smoothing", "preference_margin")
REFERENCE = False


def pair_losses(chosen: Answers, rejected: Answers, settings: Settings) -> torch.Tensor:
    margins = chosen.reward - rejected.reward - settings.preference_margin
    return sigmoid_losses(margins, settings.preference_smoothing)
