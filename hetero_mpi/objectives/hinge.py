"""The hinge loss of SLiC on DPO's rewards (Zhao et al. 2023, arXiv:2305.10425)."""

import torch

from hetero_mpi.objectives import Answers, Settings

KEYS = ("preference_beta",)
REFERENCE = True


def pair_losses(chosen: Answers, rejected: Answers, settings: Settings) -> torch.Tensor:
    return torch.relu(1 - (chosen.reward - rejected.reward))
