"""A plan: who holds which items of the chain, and how a step is run. Kept as TOML, accepted back with ``--plan``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

SCHEMA_VERSION = 2
"""Version of the plan file's layout."""
WARM_UP = "warm_up"
"""The order that the planner makes plans for (``orders.warm_up``)."""


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
    sequences: int
    """Sequences per step: this pipeline's share of the global batch. The last micro-batch holds what is left over."""
    split_backward: bool = False
    """Backward in two parts: the gradient of the input first, which the stage before waits for; those of the weights
    when there is time (full training only)."""
    order: str = WARM_UP
    """The order of what each stage computes: a name of ``orders.ORDERS``."""

    @property
    def micro_batches(self) -> int:
        """Micro-batches per step."""
        return -(-self.sequences // self.micro_batch)

    def size(self, micro_batch: int) -> int:
        """Sequences in one micro-batch of the step."""
        return min(self.micro_batch, self.sequences - micro_batch * self.micro_batch)


@dataclass(frozen=True)
class IdleRank:
    rank: int
    reason: str


@dataclass(frozen=True)
class Alone:
    """One rank by itself, with the same tokens per step."""

    rank: int
    step_s: float | None = None
    """Predicted; None: it cannot, for the reason ``problem``."""
    problem: str = ""


@dataclass(frozen=True)
class RankMemory:
    """Predicted peak of one rank, against what it has."""

    rank: int
    peak_bytes: int
    usable_bytes: int


@dataclass(frozen=True)
class HostMemory:
    """Predicted peak of all ranks that compute in one host's memory, against what it has."""

    host: str
    peak_bytes: int
    usable_bytes: int


@dataclass(frozen=True)
class Plan:
    """What every rank is told before the first step.

    Pipelines hold the whole model each and share the global batch: the first takes its first ``sequences`` rows, and so
    on. A rank holds one stage. A pipeline may be a single rank: many such make plain data parallelism.
    """

    pipelines: tuple[PipelinePlan, ...]
    global_batch: int
    sequence_length: int
    items: int
    """Length of the chain: blocks + 2."""
    predicted_step_s: float = 0.0
    bound_step_s: float = 0.0
    """No plan for this instance can be faster than this (``packing.bound`` for a few ranks, else the fluid bound of
    ``bounds``)."""
    alone: Alone | None = None
    """The rank that is fastest by itself; None: not known."""
    memory: tuple[RankMemory, ...] = ()
    hosts: tuple[HostMemory, ...] = ()
    idle: tuple[IdleRank, ...] = ()
    reasons: tuple[str, ...] = ()
    """Sentences for a person: why this plan, what was beaten and by how much."""

    @cached_property
    def numbered(self) -> tuple[tuple[int, int, StagePlan], ...]:
        """All stages as (number, index of the pipeline, stage), in plan order: the numbers used by actions."""
        flat = [(index, stage) for index, pipeline in enumerate(self.pipelines) for stage in pipeline.stages]
        return tuple((number, index, stage) for number, (index, stage) in enumerate(flat))
