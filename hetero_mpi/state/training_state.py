"""The training state besides tensors: checkpoints hold it, joining ranks receive it, and a recovery restores it."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hetero_mpi.device.backend import DTYPES
from hetero_mpi.model.optimizer import LossScale
from hetero_mpi.rundir.metrics import Evaluation, StepMetrics


@dataclass
class TrainingState:
    """Step, losses, updates, loss scale, skips and checkpoints of a run. It passes from plan to plan.

    Complete on rank 0. Other active ranks have what they need to go on; on idle ranks it is out of date.
    """

    loss_scale: LossScale
    step: int = 0
    """Steps taken. The next step has this number, and the position in the data follows from it."""
    updates: int = 0
    """Updates by the optimizer: fewer than ``step`` when some steps were skipped."""
    losses: list[float] = field(default_factory=list)
    """Loss of every step so far, nats per token."""
    skipped: int = 0
    """Steps of this run without an update, since gradients were not finite."""
    skips_in_a_row: int = 0
    lowest_loss: float | None = None
    """The least of the held-out losses so far; None: there is none."""
    higher_in_a_row: int = 0
    """Evaluations since the one with the lowest loss."""
    newest_checkpoint: Path | None = None
    """On other ranks than 0 its writing may have failed."""
    good_checkpoint: Path | None = None
    """The newest checkpoint after which a step with finite gradients has followed."""
    reference: NDArray[np.float32] | None = None
    """[N, R], the reference model's log-likelihood of each answer of each row of the dataset, NaN where no step needs it."""
    metrics: list[StepMetrics] = field(default_factory=list)
    """The steps that this process has taken."""
    evaluations: list[Evaluation] = field(default_factory=list)
    """The evaluations that this process has taken part in."""

    @classmethod
    def initial(cls, dtype: str) -> TrainingState:
        """The state before the first step of a run that computes in ``dtype``."""
        return cls(LossScale.of(DTYPES[dtype]))

    def add_step(self, line: StepMetrics, finite: bool) -> None:
        """Record a step. ``finite``: it has updated the parameters."""
        self.step = line.step
        self.losses.append(line.loss)
        self.metrics.append(line)
        if finite:
            self.updates += 1
            self.skips_in_a_row, self.good_checkpoint = 0, self.newest_checkpoint
        else:
            self.skipped += 1
            self.skips_in_a_row += 1

    def add_evaluation(self, loss: float, **beside: Any) -> None:
        """Record the held-out loss after the latest step, and what else ``Evaluation`` holds."""
        self.evaluations.append(Evaluation(self.step, loss, **beside))
        if self.lowest_loss is None or loss < self.lowest_loss:
            self.lowest_loss, self.higher_in_a_row = loss, 0
        else:
            self.higher_in_a_row += 1

    def set_newest_checkpoint(self, path: Path | None) -> None:
        self.newest_checkpoint = path

    def set_reference(self, reference: NDArray[np.float32]) -> None:
        self.reference = reference

    def checkpoint_metadata(self) -> dict[str, Any]:
        """The part of the state that a checkpoint of this moment holds."""
        return {
            "step": self.step,
            "updates": self.updates,
            "losses": np.array(self.losses, dtype=np.float64),
            "loss_scale": [self.loss_scale.value, self.loss_scale.good_steps],
            "lowest_loss": self.lowest_loss,
            "higher_in_a_row": self.higher_in_a_row,
            **({} if self.reference is None else {"reference": self.reference}),
        }

    def to_dict(self) -> dict[str, Any]:
        """The state as JSON-able values, for a rank that joins."""
        newest, good = self.newest_checkpoint, self.good_checkpoint
        return {
            **self.checkpoint_metadata(),
            "losses": list(self.losses),
            "reference": packed(self.reference),
            "skipped": self.skipped,
            "skips_in_a_row": self.skips_in_a_row,
            "last_checkpoint": str(newest) if newest is not None else None,
            "good_checkpoint": str(good) if good is not None else None,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any], seen: TrainingState | None = None) -> TrainingState:
        """The inverse of ``to_dict``. ``seen``: an earlier state of this process, whose metrics up to this step are kept."""
        newest, good = values.get("last_checkpoint"), values.get("good_checkpoint")
        step = values["step"]
        return cls(
            LossScale(*values["loss_scale"]),
            step,
            values["updates"],
            [float(loss) for loss in values["losses"]],
            values.get("skipped", 0),
            values.get("skips_in_a_row", 0),
            values.get("lowest_loss"),
            values.get("higher_in_a_row", 0),
            Path(newest) if newest is not None else None,
            Path(good) if good is not None else None,
            unpacked(values.get("reference")),
            [line for line in seen.metrics if line.step <= step] if seen is not None else [],
            [line for line in seen.evaluations if line.step <= step] if seen is not None else [],
        )


def packed(array: NDArray[np.float32] | None) -> dict[str, Any] | None:
    """An array as JSON-able values; a list of its numbers would take ten times the memory."""
    if array is None:
        return None
    return {"shape": list(array.shape), "base64": base64.b64encode(array.tobytes()).decode()}


def unpacked(values: dict[str, Any] | None) -> NDArray[np.float32] | None:
    """The inverse of ``packed``."""
    if values is None:
        return None
    return np.frombuffer(base64.b64decode(values["base64"]), np.float32).reshape(values["shape"])
