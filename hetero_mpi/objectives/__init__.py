"""Preference objectives, one module each: ``[train] preference`` is the name of any file in this folder.

The first line of a module's docstring names its loss. A module defines

    KEYS       keys of [train] that it reads
    REFERENCE  whether it uses the initial model as a reference; rewards are then beta x gain, else beta x mean
    LEARNS_CHOSEN = True  (optional) add the cross-entropy of the chosen records' tokens

and one of two functions, for pairs of answers or for single answers with labels:

    pair_losses(chosen, rejected, settings) -> losses of the pairs
    label_losses(answers, point, settings)  -> (loss of each answer if desirable, loss of each answer if undesirable)

Modules import torch, so ``names`` only lists the folder, and jobs without preferences load without torch. ``objective`` is cached,
since it is called for every micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, Protocol

from hetero_mpi.util.plug_ins import plug_in, plug_in_names

if TYPE_CHECKING:
    import torch


class Settings(Protocol):
    """Keys of ``[train]`` that an objective may read."""

    preference: str
    preference_beta: float
    preference_smoothing: float
    preference_margin: float
    desirable_weight: float
    undesirable_weight: float


@dataclass(frozen=True)
class Answers:
    """Answers of a micro-batch, all (B, N); empty entries hold values with a finite loss that is not counted.

    Attributes:
        tokens: Number of tokens in the answer, int64.
        mean: Mean log-probability of the answer's tokens.
        gain: Log-probability of the answer minus that under the reference model.
        reward: Implicit reward.
    """

    tokens: torch.Tensor
    mean: torch.Tensor
    gain: torch.Tensor
    reward: torch.Tensor

    def every_second(self, first: int) -> Answers:
        """Return entries ``first``, ``first + 2``, ... of each row."""
        columns = slice(first, None, 2)
        return Answers(self.tokens[:, columns], self.mean[:, columns], self.gain[:, columns], self.reward[:, columns])


@dataclass(frozen=True)
class Objective:
    """An objective, defined by a module of this folder.

    Attributes:
        learns_from: "pairs" of answers to one prompt, or "labels" of single answers.
        losses: The module's ``pair_losses`` or ``label_losses``.
    """

    keys: tuple[str, ...]
    reference: bool
    learns_chosen: bool
    learns_from: Literal["pairs", "labels"]
    losses: Callable[..., Any]


def names() -> tuple[str, ...]:
    """Return the values of ``[train] preference`` except "none"."""
    return plug_in_names(__name__)


@cache
def objective(name: str) -> Objective | None:
    """Return the objective with this name, or None if there is none, as for "none"."""
    if name not in names():
        return None
    module = plug_in(__name__, name)
    learns_chosen = getattr(module, "LEARNS_CHOSEN", False)
    if hasattr(module, "label_losses"):
        return Objective(module.KEYS, module.REFERENCE, learns_chosen, "labels", module.label_losses)
    return Objective(module.KEYS, module.REFERENCE, learns_chosen, "pairs", module.pair_losses)


def learns_from(name: str) -> Literal["pairs", "labels"] | None:
    """Return the kind of records that ``[train] preference`` needs; None for "none"."""
    preference = objective(name)
    return preference.learns_from if preference is not None else None
