"""Preference objectives, a module each: ``[train] preference`` takes the name of any file in this folder.

A module states in its docstring's first line which loss it is, and holds

    KEYS       the keys of [train] that it reads
    REFERENCE  whether answers are compared with the model that the run begins with; rewards are beta x gain then, else beta x mean
    LEARNS_CHOSEN = True  (optional) add the cross-entropy of the chosen records' tokens

and one of two functions, by the records that it learns from:

    pair_losses(chosen, rejected, settings) -> losses of the pairs
    label_losses(answers, point, settings)  -> losses of each answer if it is desirable, and if it is undesirable

Modules import torch, so ``names`` only lists the folder: jobs without preferences load without torch. The lookup is cached, as
every micro-batch asks for its objective.
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
    """The keys of ``[train]`` that an objective may read."""

    preference: str
    preference_beta: float
    preference_smoothing: float
    preference_margin: float
    desirable_weight: float
    undesirable_weight: float


@dataclass(frozen=True)
class Answers:
    """Answers of a micro-batch, all (B, N); entries without an answer hold numbers whose loss is finite and not counted.

    Attributes:
        tokens: the answer's tokens, int64.
        mean: mean log-probability of these tokens.
        gain: their summed log-probability minus the reference model's.
        reward: what the objective makes likelier.
    """

    tokens: torch.Tensor
    mean: torch.Tensor
    gain: torch.Tensor
    reward: torch.Tensor

    def every_second(self, first: int) -> Answers:
        """The entries ``first``, ``first + 2``, ... of each row."""
        columns = slice(first, None, 2)
        return Answers(self.tokens[:, columns], self.mean[:, columns], self.gain[:, columns], self.reward[:, columns])


@dataclass(frozen=True)
class Objective:
    """A module of this folder.

    Attributes:
        learns_from: "pairs" of answers to one prompt, or single answers with "labels".
        losses: ``pair_losses`` or ``label_losses`` of the module.
    """

    keys: tuple[str, ...]
    reference: bool
    learns_chosen: bool
    learns_from: Literal["pairs", "labels"]
    losses: Callable[..., Any]


def names() -> tuple[str, ...]:
    """The values of ``[train] preference``, without "none"."""
    return plug_in_names(__name__)


@cache
def objective(name: str) -> Objective | None:
    """The objective of that name; None: there is none, as for "none"."""
    if name not in names():
        return None
    module = plug_in(__name__, name)
    learns_chosen = getattr(module, "LEARNS_CHOSEN", False)
    if hasattr(module, "label_losses"):
        return Objective(module.KEYS, module.REFERENCE, learns_chosen, "labels", module.label_losses)
    return Objective(module.KEYS, module.REFERENCE, learns_chosen, "pairs", module.pair_losses)


def learns_from(name: str) -> Literal["pairs", "labels"] | None:
    """The records of ``[train] preference``; None: it is "none"."""
    known = objective(name)
    return known.learns_from if known is not None else None
