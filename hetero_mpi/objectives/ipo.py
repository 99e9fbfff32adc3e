"""Identity preference optimisation (Azar et al. 2023, arXiv:2310.12036), with gains averaged over tokens as in TRL."""

import torch

from hetero_mpi.objectives import Answers, Settings

KEYS = ("preference_beta",)
REFERENCE = True


def pair_losses(chosen: Answers, rejected: Answers, settings: Settings) -> torch.Tensor:
    chosen_gain, rejected_gain = (answers.gain / answers.tokens.clamp(min=1) for answers in (chosen, rejected))
    return (chosen_gain - rejected_gain - 1 / (2 * settings.preference_beta)) ** 2
