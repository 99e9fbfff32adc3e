"""``metrics.jsonl``: a JSON object per step and per evaluation, readable during the run and after a crash.

The same goes to other programs (``[report] trackers``, a module each in ``rundir/trackers``). None can end a run: one that cannot
begin, or fails later, is left out from then on, and it is said.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

from hetero_mpi.rundir.line_files import LineFile, keep_until, lines, object_of
from hetero_mpi.rundir.logs import say
from hetero_mpi.util.background import BestEffort, warn_on_failure
from hetero_mpi.util.plug_ins import plug_in

WARM_UP_STEPS = 2
"""Number of first steps under a plan that do not count for times, while caches, allocators and links warm up."""


@dataclass(frozen=True, kw_only=True)
class Rewards:
    """Means over the compared answers of a step, or of an evaluation (docs/preferences.md); None: there are none."""

    chosen_reward: float | None = None
    """Of chosen, or desirable, answers."""
    rejected_reward: float | None = None
    reward_margin: float | None = None
    """Chosen less rejected."""
    reward_accuracy: float | None = None
    """Share of the pairs whose chosen answer has the higher reward."""
    kl: float | None = None
    """KTO's reference point."""


@dataclass(frozen=True)
class StepMetrics(Rewards):
    """One step. ``step`` counts from 1: the number of steps taken, this one included."""

    step: int
    loss: float
    """Mean cross-entropy per target token of the step's batch, nats; and the routers' loss, times its coefficient."""
    grad_norm: float
    """Global gradient norm before clipping."""
    lr: float
    tokens: int
    """Target tokens of the step."""
    tokens_per_s: float
    step_s: float
    predicted_step_s: float
    emulated: bool = False
    """``step_s`` and ``tokens_per_s`` are emulated ones."""
    router_loss: float | None = None
    """Mean over the step's sequences, before the coefficient; None: the model has none."""


@dataclass(frozen=True)
class Evaluation(Rewards):
    """The held-out loss after ``step`` steps, nats per token."""

    step: int
    loss: float
    perplexity: float | None = None
    """None: the loss is not of tokens alone."""
    token_accuracy: float | None = None
    """Share of the target tokens that the model finds the likeliest; None: the model has no tokens, or preferences are compared."""
    sets: Mapping[str, float] | None = None
    """Name -> loss of each further set."""

    def beside(self) -> str:
        """All that is known beside the loss, in words."""
        text = f", perplexity {self.perplexity:.4g}" if self.perplexity is not None else ""
        text += f", token accuracy {self.token_accuracy:.1%}" if self.token_accuracy is not None else ""
        text += "".join(f", {name} {loss:.4f}" for name, loss in (self.sets or {}).items())
        return text + rewards_text(self)


@dataclass(frozen=True)
class Metrics:
    """The contents of a metrics file, in its order."""

    steps: tuple[StepMetrics, ...]
    evaluations: tuple[Evaluation, ...]


class MetricsWriter:
    """Appends to a metrics file, line by line; on a full disk lines wait until there is room. A context manager.

    ``resume_step``: steps taken when this run begins (0: none). Lines of later steps, left by a run that went further than its last
    checkpoint, are dropped by an atomic replacement of the file. ``trackers``: get everything too, and are closed at the end.
    """

    def __init__(self, path: str | Path, resume_step: int = 0, trackers: Trackers | None = None) -> None:
        self.path = Path(path)
        self._trackers = trackers
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with warn_on_failure("dropping later steps from metrics.jsonl"):
            keep_until(self.path, resume_step)
        self._file = LineFile(self.path, say)

    def step(self, metrics: StepMetrics) -> None:
        """Write one step."""
        rewards = {field.name: getattr(metrics, field.name) for field in fields(Rewards)}
        values = {name: value for name, value in asdict(metrics).items() if name not in rewards} | rewards
        self._file.write({name: value for name, value in values.items() if value is not None and value is not False})
        if self._trackers is not None:
            self._trackers.step(metrics)

    def evaluation(self, step: int, loss: float, **beside: Any) -> None:
        """Write the held-out loss after ``step`` steps, and what else ``Evaluation`` holds."""
        self._file.write({"step": step, "evaluation_loss": loss, **beside})
        if self._trackers is not None:
            self._trackers.evaluation(step, loss, **beside)

    def close(self) -> None:
        self._file.add()  # what has waited for room until now
        if self._trackers is not None:
            self._trackers.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: str | Path) -> Metrics:
    """Read a metrics file. ``null`` becomes NaN. Torn lines, lines of unknown kinds, and unknown keys are left out."""
    found = [_record(line) for line in lines(Path(path))]
    steps = tuple(one for one in found if isinstance(one, StepMetrics))
    return Metrics(steps, tuple(one for one in found if isinstance(one, Evaluation)))


@lru_cache(1 << 17)  # the page of a run reads all of its lines twice a second
def _record(line: str) -> StepMetrics | Evaluation | None:
    values = object_of(line) or {}
    kind = Evaluation if "evaluation_loss" in values else StepMetrics
    known = _numbers({**values, "loss": values["evaluation_loss"]} if kind is Evaluation else values, kind)
    return kind(**known) if known is not None else None


_ALLOWED = {"float": (int, float), "float | None": (int, float, type(None)), "int": (int,), "bool": (bool,)}
_SETS = "Mapping[str, float] | None"


def _numbers(values: Mapping[str, Any], kind: type[StepMetrics] | type[Evaluation]) -> dict[str, Any] | None:
    """The values for the fields of ``kind``; None where one is missing or is no number."""
    found: dict[str, Any] = {}
    for field in fields(kind):
        value = values.get(field.name, field.default)
        value = math.nan if value is None and field.type == "float" else value
        if field.type == _SETS:
            value = (
                {name: one for name, one in value.items() if type(one) is float} if isinstance(value, dict) else None
            )
        elif type(value) not in _ALLOWED[str(field.type)] or (type(value) is int and abs(value) >= 2**63):
            return None
        found[field.name] = value
    return found


def measured_step_s(steps: Sequence[StepMetrics]) -> float | None:
    """Median seconds per step under the last plan, without its first two; None where no step is left."""
    warm = [step.step_s for step in warm_steps(steps)]
    return statistics.median(warm) if warm else None


def warm_steps(steps: Sequence[StepMetrics]) -> Sequence[StepMetrics]:
    """The steps of a run that count for its times: those under its last plan, without the first two."""
    under = by_plan(steps)
    return under[-1][WARM_UP_STEPS:] if under else ()


def by_plan(steps: Sequence[StepMetrics]) -> list[list[StepMetrics]]:
    """The steps of a run under each of its plans, which are told apart by their predictions."""
    return [list(group) for _, group in groupby(steps, lambda step: step.predicted_step_s)]


def rewards_text(line: Rewards) -> str:
    """The rewards behind a loss, in words; "" where there are none."""
    margin, accuracy = line.reward_margin, line.reward_accuracy
    text = f", reward margin {margin:.4f}" if margin is not None else ""
    return text + (f", accuracy {accuracy:.0%}" if accuracy is not None else "")


# Other programs

_TRACKED = {
    "rewards/chosen": "chosen_reward",
    "rewards/rejected": "rejected_reward",
    "rewards/margins": "reward_margin",
    "rewards/accuracies": "reward_accuracy",
    "kl": "kl",
}
"""Name of a reward there (TRL's) -> here."""


class Trackers:
    """The trackers of a run. Emulated speeds have names of their own.

    Args:
        names: which ones, modules of ``rundir/trackers``.
        run_dir: what they write is in directories of theirs there; its name is the run's.
        job: the job's values, for those that show them.
    """

    def __init__(self, names: Sequence[str], run_dir: Path, job: Mapping[str, Any]) -> None:
        self._using: list[BestEffort[None]] = []
        """Of every tracker that could be opened, a function that hands it to another one."""
        for name in names:
            with warn_on_failure(f"opening {name} (pip install {name}, or leave it out of [report] trackers)"):
                tracker = plug_in("hetero_mpi.rundir.trackers", name).open_tracker(run_dir, job)
                self._using.append(BestEffort(f"giving metrics to {name}", lambda use, of=tracker: use(of)))

    def step(self, line: StepMetrics) -> None:
        """Write one step."""
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
        values |= {name: value for name, key in _TRACKED.items() if (value := getattr(line, key)) is not None}
        if line.predicted_step_s > 0:
            values[f"{speed}/seconds per step, predicted"] = line.predicted_step_s
        self._write(line.step, values)

    def evaluation(self, step: int, loss: float, **beside: Any) -> None:
        """Write the held-out loss after ``step`` steps, and what else ``Evaluation`` holds."""
        tracked = {**_TRACKED, "perplexity": "perplexity", "token accuracy": "token_accuracy"}
        told = {f"{name}, held out": beside[key] for name, key in tracked.items() if key in beside}
        told |= {f"loss/{name}, held out": one for name, one in beside.get("sets", {}).items()}
        self._write(step, {"loss/held out": loss, **told})

    def close(self) -> None:
        for using in self._using:
            using(lambda tracker: tracker.finish())

    def _write(self, step: int, values: dict[str, float]) -> None:
        for using in self._using:
            using(lambda tracker: tracker.log(values, step=step))
