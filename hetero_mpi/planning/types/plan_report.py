"""What is predicted of a plan, and why it is the plan: for a person, the watchdog, and messages about a lack of memory."""

from __future__ import annotations

from dataclasses import dataclass

from hetero_mpi.planning.types.plan import Plan


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
    """Also why it does not train alone although it would be faster."""


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
class PlanReport:
    """A plan with its prediction, bound and reasons, as ``planner.make_plan`` and ``planner.complete_plan`` work them out."""

    plan: Plan
    predicted_step_s: float
    bound_step_s: float
    """No plan for this instance can be faster than this: the fluid bound (``bounds``), often far below what is possible."""
    alone: Alone | None = None
    """The rank that is fastest by itself; None: not known."""
    tried_step_s: float | None = None
    """A step as it was measured before the run, with made-up weights and data; None: not tried."""
    memory: tuple[RankMemory, ...] = ()
    hosts: tuple[HostMemory, ...] = ()
    idle: tuple[IdleRank, ...] = ()
    reasons: tuple[str, ...] = ()
    """Sentences for a person: why this plan, what was beaten and by how much."""

    @property
    def expected_step_s(self) -> float:
        """As tried, else as predicted."""
        return self.predicted_step_s if self.tried_step_s is None else self.tried_step_s
