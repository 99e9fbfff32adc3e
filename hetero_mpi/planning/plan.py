"""A plan: who holds which items of the chain, and how a step is run. Kept as TOML, accepted back with ``--plan``."""

from __future__ import annotations

from dataclasses import dataclass

SCHEMA_VERSION = 1
"""Version of the plan file's layout."""


@dataclass(frozen=True)
class StagePlan:
    """Items ``[first, last)`` of the chain, held by a group of ranks (length 1 today; wider: sharded stages)."""

    ranks: tuple[int, ...]
    first: int
    last: int
    warm_up: int
    """Micro-batches sent forward before the first backward; 1F1B's classic depth is ``stages - 1 - index``."""
    recompute: bool = False


@dataclass(frozen=True)
class PipelinePlan:
    """Stages in chain order, together holding every item once."""

    stages: tuple[StagePlan, ...]
    micro_batch: int
    """Sequences per micro-batch."""
    micro_batches: int
    """Micro-batches per step."""


@dataclass(frozen=True)
class IdleRank:
    rank: int
    reason: str


@dataclass(frozen=True)
class RankMemory:
    """Predicted peak of one rank, against what it has."""

    rank: int
    peak_bytes: int
    usable_bytes: int


@dataclass(frozen=True)
class Plan:
    """What every rank is told before the first step."""

    pipelines: tuple[PipelinePlan, ...]
    global_batch: int
    sequence_length: int
    items: int
    """Length of the chain: blocks + 2."""
    schedule: str = "1f1b"
    predicted_step_s: float = 0.0
    bound_step_s: float = 0.0
    """No plan for this instance can be faster than this (fluid bound of planning.bounds)."""
    memory: tuple[RankMemory, ...] = ()
    idle: tuple[IdleRank, ...] = ()
    reasons: tuple[str, ...] = ()
    """Sentences for a person: why this plan, what was beaten and by how much."""
