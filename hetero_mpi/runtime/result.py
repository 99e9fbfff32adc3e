"""What a run has come to, as every rank is told at its end."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hetero_mpi.planning.types.plan_report import PlanReport
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.toml_files import plan_to_dict, profile_from_dict, profile_to_dict, report_from_dict
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

    def to_dict(self) -> dict[str, Any]:
        """As JSON-able values, to be broadcast."""
        return {
            **{key: str(path) if path is not None else None for key, path in self._paths().items()},
            "losses": self.losses,
            "evaluations": [asdict(one) for one in self.evaluations],
            "step_s": self.step_s,
            "report": plan_to_dict(self.report),
            "profile": profile_to_dict(self.profile),
            "skipped": self.skipped,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainResult:
        """The inverse of ``to_dict``."""
        return cls(
            run_dir=Path(values["run_dir"]),
            losses=tuple(values["losses"]),
            evaluations=tuple(Evaluation(**one) for one in values["evaluations"]),
            step_s=values["step_s"],
            report=report_from_dict(values["report"]),
            profile=profile_from_dict(values["profile"]),
            result=Path(values["result"]),
            checkpoint=Path(values["checkpoint"]) if values["checkpoint"] is not None else None,
            skipped=values["skipped"],
        )

    def _paths(self) -> dict[str, Path | None]:
        return {"run_dir": self.run_dir, "result": self.result, "checkpoint": self.checkpoint}
