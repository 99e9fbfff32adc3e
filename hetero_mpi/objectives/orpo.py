"""ORPO: log odds ratio of mean log-probabilities plus cross-entropy of chosen records (Hong et al. 2024, arXiv:2403.07691)."""

import math

import torch
import torch.nn.functional as F

from hetero_mpi.objectives import Answers, Settings

KEYS = ("preference_beta",)
REFERENCE = False
LEARNS_CHOSEN = True


def pair_losses(chosen: Answers, rejected: Answers, settings: Settings) -> torch.Tensor:
    return -settings.preference_beta * F.logsigmoid(_log_odds(chosen.mean) - _log_odds(rejected.mean))


def _log_odds(log_probabilities: torch.Tensor) -> torch.Tensor:
    """Compute log(p / (1 - p)) from log p < 0 (Maechler, "Accurately computing log(1 - exp(-|a|))", 2012).

    The clamp avoids infinite odds and NaN gradients for an answer with probability 1 in fp32.
    """
    log_probabilities = log_probabilities.clamp(max=-1e-7)
    small = torch.log1p(-torch.exp(log_probabilities.clamp(max=-math.log(2))))
    large = torch.log(-torch.expm1(log_probabilities.clamp(min=-math.log(2))))
    return log_probabilities - torch.where(log_probabilities < -math.log(2), small, large)
