"""The result of a run, as every rank gets it at the end."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hetero_mpi.planning.types.plan import PlanReport
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.report.run_files.metrics import Evaluation


@dataclass(frozen=True)
class TrainResult:
    """What a finished run has produced. The same on every rank; the files are on rank 0's host."""

    run_dir: Path
    losses: tuple[float, ...]
    """Loss of every step from the first on, those before a resumed checkpoint included: nats, mean over the step's target tokens,
    or over its samples.
    """
    evaluations: tuple[Evaluation, ...]
    """Held-out losses of this process's steps, each with the number of steps taken by then."""
    step_s: float | None
    """Measured seconds per step: the median without the first two; None: too few steps."""
    report: PlanReport
    """The plan of the last step, with its prediction."""
    profile: ClusterProfile
    """The profile that the plan was made for."""
    result: Path
    """Directory of what was trained: ``model`` or ``adapter``."""
    checkpoint: Path | None
    """The newest checkpoint; None: none could be written."""
    skipped: int
    """Steps without an update, because gradients were not finite."""
