"""Sampling of a token from the last stage's logits, and log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from hetero_mpi.device.backend import HOST
from hetero_mpi.model.layer.interface import seed_from

NOT_A_NUMBER = -1
"""Returned by ``pick`` instead of a token when the model's output is not a number."""
_CANDIDATE_COUNT = 4096
"""Number of most likely tokens that are sorted for sampling; all are only where these do not decide."""


@dataclass(frozen=True)
class Sampling:
    """Sampling settings."""

    temperature: float = 0.0
    """0: the most likely token (greedy)."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens with this total probability (nucleus sampling, arXiv:1904.09751)."""
    seed: int = 0
    top_k: int = 0
    """Sample from this many most likely tokens, and those as likely as the last of them; 0: from all."""
    min_p: float = 0.0
    """Sample from tokens with at least this share of the most likely token's probability (arXiv:2407.01082)."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of all tokens in the text, and multiplies the negative ones (arXiv:1909.05858)."""


def pick(
    logits: torch.Tensor,
    sampling: Sampling,
    position: int,
    text_tokens: Sequence[int] = (),
    forbidden: Sequence[int] = (),
) -> int:
    """Sample the token at ``position`` of the text; ``NOT_A_NUMBER`` if the logits are invalid.

    The candidates are those of transformers' ``generate``, filtered by the same steps in the same order. Random numbers are drawn
    on the host from (seed, position), so they depend neither on the device nor on the partition.

    ``logits``: (V,) fp32, on any device. ``text_tokens``: the text's tokens, for the penalty. ``forbidden``: excluded tokens.
    """
    if sampling.repetition_penalty != 1 and text_tokens:
        used = torch.tensor(sorted(set(text_tokens)), device=logits.device)
        used_logits, penalty = logits[used], sampling.repetition_penalty
        logits = logits.index_copy(0, used, torch.where(used_logits < 0, used_logits * penalty, used_logits / penalty))
    if forbidden:
        logits = logits.index_fill(0, torch.tensor(forbidden, device=logits.device), -torch.inf)
    if not torch.isfinite(logits.max()):  # NaN, an overflow, or -inf everywhere; a single -inf only forbids a token
        return NOT_A_NUMBER
    if sampling.temperature == 0:
        return int(torch.argmax(logits))
    host_logits = logits.to(HOST)
    weights = host_logits.double().sub_(host_logits.max()).div_(sampling.temperature).exp_()
    generator = torch.Generator().manual_seed(seed_from(sampling.seed, "token", position))
    share = torch.rand((), dtype=torch.float64, generator=generator).item()
    drawn = partial(_drawn, host_logits.numpy(), weights.numpy(), sampling, share)
    token = drawn(_CANDIDATE_COUNT)
    return token if token is not None else cast(int, drawn(len(weights)))


def _drawn(
    logits: npt.NDArray[np.float32], weights: npt.NDArray[np.float64], sampling: Sampling, share: float, count: int
) -> int | None:
    """The token at which the weights, added up from the most likely token on, exceed ``share`` of the sum of the kept ones.

    Only the ``count`` most likely tokens are sorted, and those as likely as the last of them. None if these do not decide.
    Equally likely tokens are in the order of their numbers.

    Args:
        weights: (V,), proportional to the probabilities; the largest is 1.
        share: the random number, in [0, 1).
    """
    words = len(logits)
    is_complete = count >= words
    if is_complete:
        bits = (logits + 0.0).view(np.int32)  # without -0.0; as integers numpy sorts ten times as fast
        keys = np.where(bits < 0, bits & 0x7FFFFFFF, ~bits).astype(np.int64)
        tokens = np.sort(keys << 32 | np.arange(words)) & 0xFFFFFFFF
    else:
        tokens = np.flatnonzero(logits >= np.partition(logits, words - count)[words - count])
        tokens = tokens[np.argsort(-logits[tokens], kind="stable")]
    likely, total = weights[tokens], weights.sum()
    if 0 < sampling.top_k < words:
        if sampling.top_k > len(tokens):
            return None
        likely = likely[: np.searchsorted(-likely, -likely[sampling.top_k - 1], side="right")]
        is_complete, total = True, likely.sum()
    sums = likely.cumsum()
    end = len(likely)
    if sampling.top_p < 1:  # the token that reaches top_p is included
        end = min(end, 1 + int(np.searchsorted(sums, sampling.top_p * total)))
    end = min(end, int(np.searchsorted(-likely, -sampling.min_p, side="right")))
    if end < len(likely):
        total = sums[end - 1]
    elif not is_complete and (sampling.top_p < 1 or sampling.min_p > 0):
        return None
    index = int(np.searchsorted(sums[:end], share * total, side="right"))
    if index == end:
        if not is_complete:
            return None
        index = min(end, int(np.count_nonzero(likely))) - 1  # ``total`` is rounded
    return int(tokens[index])


@dataclass(frozen=True)
class Scored:
    """A token of a text with its log-probability given the preceding tokens, before temperature, penalties and filters."""

    token: int
    likelihood: float
    likeliest: tuple[tuple[int, float], ...] = ()
    """The most likely tokens at its position with their log-probabilities, in descending order."""


def scored(logits: torch.Tensor, tokens: Sequence[int], count: int) -> torch.Tensor:
    """Log-probabilities of tokens as (K, 1 + 2 ``count``) fp64 on the host: the token's, then the most likely tokens, then theirs.

    ``logits``: (K, V) fp32, one row per token.
    """
    likelihoods = torch.log_softmax(logits, dim=1)
    token_scores = likelihoods.gather(1, torch.tensor(tokens, device=logits.device).unsqueeze(1))
    most, words = likelihoods.topk(min(count, logits.shape[1]), dim=1)
    return torch.cat([part.to(HOST).double() for part in (token_scores, words, most)], dim=1)
