"""KTO: labelled single answers relative to a reference point (Ethayarajh et al. 2024, arXiv:2402.01306)."""

import torch

from hetero_mpi.objectives import Answers, Settings

KEYS = ("preference_beta", "desirable_weight", "undesirable_weight")
REFERENCE = True


def label_losses(answers: Answers, point: float, settings: Settings) -> tuple[torch.Tensor, torch.Tensor]:
    above = answers.reward - settings.preference_beta * point
    desirable = settings.desirable_weight * (1 - torch.sigmoid(above))
    return desirable, settings.undesirable_weight * (1 - torch.sigmoid(-above))
