"""What a run has come to, as every rank is told at its end."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hetero_mpi.planning.types.plan_report import PlanReport
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.report.run_files.metrics import Evaluation


@dataclass(frozen=True)
class TrainResult:
    """A run that came to its end. The same on every rank; the files are on rank 0's host."""

    run_dir: Path
    losses: tuple[float, ...]
    """Loss of every step from the first on, those before a resumed checkpoint included: the mean over the step's target tokens
    (nats), or over its samples."""
    evaluations: tuple[Evaluation, ...]
    """Held-out losses that this process has seen, each with the number of steps taken by then."""
    step_s: float | None
    """Measured seconds per step, the median without the first two; None: too few steps."""
    report: PlanReport
    """``report.plan``, by which the last step was taken, with what was predicted of it."""
    profile: ClusterProfile
    """For which it was made."""
    result: Path
    """What was trained: the directory ``model`` or ``adapter``."""
    checkpoint: Path | None
    """The newest one; None: none could be written."""
    skipped: int
    """Steps without an update, since gradients were not finite."""
