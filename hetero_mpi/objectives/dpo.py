"""Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290); conservative with smoothing (Mitchell 2023)."""

import torch
import torch.nn.functional as F

from hetero_mpi.objectives import Answers, Settings

KEYS = ("preference_beta", "preference_smoothing")
REFERENCE = True


def sigmoid_losses(margins: torch.Tensor, flipped: float) -> torch.Tensor:
    """-log sigmoid of reward margins; ``flipped`` is the assumed fraction of wrong preferences (label smoothing)."""
    return -F.logsigmoid(margins) * (1 - flipped) - F.logsigmoid(-margins) * flipped


def pair_losses(chosen: Answers, rejected: Answers, settings: Settings) -> torch.Tensor:
    return sigmoid_losses(chosen.reward - rejected.reward, settings.preference_smoothing)
