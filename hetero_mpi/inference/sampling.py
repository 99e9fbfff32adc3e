"""Sample tokens and compute log-probabilities from the last stage's logits."""

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
"""Returned by ``pick`` instead of a token if the model's output is not a number."""
_CANDIDATE_COUNT = 4096
"""Number of most likely tokens to sort for sampling; the whole vocabulary is sorted only if these do not suffice."""


@dataclass(frozen=True)
class Sampling:
    temperature: float = 0.0
    """Softmax temperature; 0 selects the most likely token (greedy decoding)."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens with this total probability (nucleus sampling, arXiv:1904.09751)."""
    seed: int = 0
    top_k: int = 0
    """Sample from this number of most likely tokens, including ties with the last of them; 0 for no limit."""
    min_p: float = 0.0
    """Sample from tokens with at least this fraction of the most likely token's probability (arXiv:2407.01082)."""
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens that the text contains, and multiplies negative ones (arXiv:1909.05858)."""


def pick(
    logits: torch.Tensor,
    sampling: Sampling,
    position: int,
    text_tokens: Sequence[int] = (),
    forbidden: Sequence[int] = (),
) -> int:
    """Sample the token at ``position`` of the text; returns ``NOT_A_NUMBER`` if the logits are invalid.

    Filters are the same as in transformers' ``generate`` and are applied in the same order. Random numbers are drawn on the host
    from (seed, position), so they depend neither on the device nor on how the model is split.

    ``logits``: (V,) fp32, on any device. ``text_tokens``: the text so far, for the penalty. ``forbidden``: tokens to exclude.
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
    """Sample by inverting the cumulative distribution of the filtered tokens, from the most likely one on, at ``share``.

    Only the ``count`` most likely tokens, including ties with the last of them, are sorted; returns None if these do not suffice.
    Equally likely tokens are ordered by their ids.

    Args:
        weights: (V,), proportional to the probabilities; the largest is 1.
        share: random number in [0, 1).
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
    """A token and its log-probability given the preceding tokens, before temperature, penalties and filters."""

    token: int
    likelihood: float
    likeliest: tuple[tuple[int, float], ...] = ()
    """The most likely tokens at the same position with their log-probabilities, in descending order."""


def scored(logits: torch.Tensor, tokens: Sequence[int], count: int) -> torch.Tensor:
    """Compute log-probabilities of ``tokens`` and of the most likely tokens. ``logits``: (K, V) fp32, one row per token.

    Returns (K, 1 + 2 ``count``) fp64 on the host: the token's log-probability, the most likely tokens, their log-probabilities.
    """
    likelihoods = torch.log_softmax(logits, dim=1)
    token_scores = likelihoods.gather(1, torch.tensor(tokens, device=logits.device).unsqueeze(1))
    most, words = likelihoods.topk(min(count, logits.shape[1]), dim=1)
    return torch.cat([part.to(HOST).double() for part in (token_scores, words, most)], dim=1)
