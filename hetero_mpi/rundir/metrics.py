"""``metrics.jsonl``, which has a JSON object for each step and evaluation and is readable during a run and after a crash.

Metrics are also sent to experiment trackers (``[report] trackers``, modules of ``rundir/trackers``). A tracker that fails, when it
is opened or later, is disabled with a message and never ends the run.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from hetero_mpi.rundir.line_files import LineFile, keep_until, lines
from hetero_mpi.rundir.logs import say
from hetero_mpi.util.background import BestEffort, warn_on_failure
from hetero_mpi.util.display import Displayed
from hetero_mpi.util.plug_ins import plug_in

Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
"""A number of a metrics file, whose ``null`` is NaN."""
Count = Annotated[int, Field(ge=0, lt=2**63)]
WARM_UP_STEPS = 2
"""Number of initial steps under each plan that are excluded from timing, because caches, allocators and links are warming up."""


@dataclass(frozen=True, kw_only=True)
class Rewards:
    """Means over the compared answers in a step or evaluation (docs/preferences.md). None if no answers are compared."""

    chosen_reward: float | None = None
    """Mean reward of the chosen or desirable answers."""
    rejected_reward: float | None = None
    reward_margin: float | None = None
    """Chosen reward minus rejected reward."""
    reward_accuracy: float | None = None
    """Share of the pairs in which the chosen answer has the higher reward."""
    kl: float | None = None
    """Reference point of KTO."""

    def rewards(self) -> dict[str, float]:
        """Return the rewards that are not None, by the names of ``TRACKER_NAMES``."""
        return {name: value for name, key in TRACKER_NAMES.items() if (value := getattr(self, key)) is not None}


@dataclass(frozen=True)
class StepMetrics(Rewards):
    """Metrics of one step. ``step`` is the number of completed steps, so the first step has number 1."""

    step: Count
    loss: Number
    """Mean cross-entropy per target token in nats, plus the router loss multiplied by its coefficient."""
    grad_norm: Number
    """Global gradient norm before clipping."""
    lr: Number
    tokens: Count
    """Number of target tokens in the step."""
    tokens_per_s: Number
    """Tokens of the step's sequences per second: prompts and padding included, as in predictions."""
    step_s: Number
    predicted_step_s: Number
    emulated: bool = False
    """Whether ``step_s`` and ``tokens_per_s`` are emulated."""
    router_loss: float | None = None
    """Mean router loss over the step's sequences, before the coefficient. None if the model has no routers."""
    epoch: float | None = None
    """Passes over the training data so far; None if unknown."""


@dataclass(frozen=True)
class Evaluation(Rewards):
    """Evaluation loss after ``step`` steps, in nats per token, and related metrics."""

    step: Count
    loss: Annotated[Number, Field(validation_alias="evaluation_loss")]
    perplexity: float | None = None
    """Perplexity, or None if the loss is not a token cross-entropy."""
    token_accuracy: float | None = None
    """Share of target tokens to which the model assigns the highest probability. None without tokens or in preference training."""
    sets: Mapping[str, Number] | None = None
    """Maps the name of each additional evaluation set to its loss."""

    def beside(self) -> str:
        """Format all metrics except the loss as text."""
        text = f", perplexity {self.perplexity:.4g}" if self.perplexity is not None else ""
        text += f", token accuracy {100 * self.token_accuracy:.1f} %" if self.token_accuracy is not None else ""
        text += "".join(f", {name} {loss:.4f}" for name, loss in (self.sets or {}).items())
        return text + rewards_text(self)


@dataclass(frozen=True, repr=False)
class Metrics(Displayed):
    """The contents of a metrics file, in the order of the file."""

    steps: tuple[StepMetrics, ...]
    evaluations: tuple[Evaluation, ...]


class MetricsWriter:
    """Writes metrics to a file and to trackers. If the disk is full, lines are buffered until there is space.

    ``resume_step`` is the number of completed steps when this run begins. Lines of later steps, left by a run that continued after
    its last checkpoint, are removed atomically. Usable as a context manager, which also closes the ``trackers``.
    """

    def __init__(self, path: str | Path, resume_step: int = 0, trackers: Trackers | None = None) -> None:
        self.path = Path(path)
        self._trackers = trackers
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with warn_on_failure("dropping later steps from metrics.jsonl"):
            keep_until(self.path, resume_step)
        self._file = LineFile(self.path, say)

    def step(self, metrics: StepMetrics) -> None:
        rewards = {field.name: getattr(metrics, field.name) for field in fields(Rewards)}
        values = {name: value for name, value in asdict(metrics).items() if name not in rewards} | rewards
        self._file.write({name: value for name, value in values.items() if value is not None and value is not False})
        if self._trackers is not None:
            self._trackers.step(metrics)

    def evaluation(self, step: int, loss: float, **values: Any) -> None:
        """Write the evaluation loss after ``step`` steps and, as ``values``, other fields of ``Evaluation``."""
        self._file.write({"step": step, "evaluation_loss": loss, **values})
        if self._trackers is not None:
            self._trackers.evaluation(step, loss, **values)

    def close(self) -> None:
        self._file.add()  # the buffered lines
        if self._trackers is not None:
            self._trackers.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: str | Path) -> Metrics:
    """Read a metrics file. A ``null`` is read as NaN. Torn lines, unknown kinds of lines and unknown keys are skipped."""
    records = [_parse_line(line) for line in lines(Path(path))]
    steps = tuple(record for record in records if isinstance(record, StepMetrics))
    return Metrics(steps, tuple(record for record in records if isinstance(record, Evaluation)))


_ADAPTERS: Sequence[TypeAdapter[StepMetrics | Evaluation]] = (TypeAdapter(StepMetrics), TypeAdapter(Evaluation))


@lru_cache(1 << 17)  # the web page of a run reads all lines twice a second
def _parse_line(line: str) -> StepMetrics | Evaluation | None:
    for adapter in _ADAPTERS:
        with contextlib.suppress(ValidationError):
            return adapter.validate_json(line, strict=True)
    return None


def measured_step_s(steps: Sequence[StepMetrics]) -> float | None:
    """Return the median seconds per step under the last plan after its warm-up, or None if there are no such steps."""
    warm = [step.step_s for step in warm_steps(steps)]
    return statistics.median(warm) if warm else None


def warm_steps(steps: Sequence[StepMetrics]) -> Sequence[StepMetrics]:
    """Return the steps under a run's last plan, without the warm-up steps."""
    steps_by_plan = by_plan(steps)
    return steps_by_plan[-1][WARM_UP_STEPS:] if steps_by_plan else ()


def by_plan(steps: Sequence[StepMetrics]) -> list[list[StepMetrics]]:
    """Group the steps of a run by plan. Plans are distinguished by their predicted step times."""
    return [list(group) for _, group in groupby(steps, lambda step: step.predicted_step_s)]


def rewards_text(line: Rewards) -> str:
    """Format rewards as text that follows a loss, or return "" if there are none."""
    margin, accuracy = line.reward_margin, line.reward_accuracy
    text = f", reward margin {margin:.4f}" if margin is not None else ""
    return text + (f", accuracy {100 * accuracy:.0f} %" if accuracy is not None else "")


# Trackers

TRACKER_NAMES = {
    "rewards/chosen": "chosen_reward",
    "rewards/rejected": "rejected_reward",
    "rewards/margins": "reward_margin",
    "rewards/accuracies": "reward_accuracy",
    "kl": "kl",
}
"""Maps the name of a reward in trackers, which is that of TRL, to the field."""


class Trackers:
    """The trackers of a run. Emulated speeds are sent under different names.

    Args:
        names: Modules of ``rundir/trackers``.
        run_dir: Run directory, in which each tracker may write its own sub-directory. Its name is the name of the run.
        job: The job's values, for trackers that show them.
    """

    def __init__(self, names: Sequence[str], run_dir: Path, job: Mapping[str, Any]) -> None:
        self._using: list[BestEffort[None]] = []
        """One function per open tracker, which calls its argument with that tracker."""
        for name in names:
            with warn_on_failure(f"opening {name} (pip install {name}, or remove it from [report] trackers)"):
                tracker = plug_in("hetero_mpi.rundir.trackers", name).open_tracker(run_dir, job)
                self._using.append(BestEffort(f"sending metrics to {name}", lambda use, of=tracker: use(of)))

    def step(self, line: StepMetrics) -> None:
        speed = "speed (emulated)" if line.emulated else "speed"
        values = {
            "loss/training": line.loss,
            "optimizer/learning rate": line.lr,
            "optimizer/gradient norm": line.grad_norm,
            f"{speed}/tokens per second": line.tokens_per_s,
            f"{speed}/seconds per step": line.step_s,
        }
        if line.router_loss is not None:
            values["loss/routers"] = line.router_loss
        values |= line.rewards()
        if line.predicted_step_s > 0:
            values[f"{speed}/seconds per step, predicted"] = line.predicted_step_s
        self._write(line.step, values)

    def evaluation(self, step: int, loss: float, **values: Any) -> None:
        """Send the evaluation loss after ``step`` steps and, as ``values``, other fields of ``Evaluation``."""
        tracked = {**TRACKER_NAMES, "perplexity": "perplexity", "token accuracy": "token_accuracy"}
        logged = {f"{name}, held out": values[key] for name, key in tracked.items() if key in values}
        logged |= {f"loss/{name}, held out": set_loss for name, set_loss in values.get("sets", {}).items()}
        self._write(step, {"loss/held out": loss, **logged})

    def close(self) -> None:
        for using in self._using:
            using(lambda tracker: tracker.finish())

    def _write(self, step: int, values: dict[str, float]) -> None:
        for using in self._using:
            using(lambda tracker: tracker.log(values, step=step))
