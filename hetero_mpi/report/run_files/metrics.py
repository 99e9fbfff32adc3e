"""``metrics.jsonl``: one JSON object per step and per evaluation, readable during the run and after a crash."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from hetero_mpi.report.run_files.line_files import LineFile, keep_until, objects
from hetero_mpi.report.run_files.logs import say


@dataclass(frozen=True)
class StepMetrics:
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
class Evaluation:
    """The held-out loss after ``step`` steps, nats per token."""

    step: int
    loss: float


@dataclass(frozen=True)
class Metrics:
    """The contents of a metrics file, in its order."""

    steps: tuple[StepMetrics, ...]
    evaluations: tuple[Evaluation, ...]


class Board(Protocol):
    """Another writer of metrics (TensorBoard)."""

    def step(self, line: StepMetrics) -> None: ...

    def evaluation(self, step: int, loss: float) -> None: ...

    def close(self) -> None: ...


class MetricsWriter:
    """Appends to a metrics file, line by line; on a full disk lines wait until there is room. A context manager.

    ``resume_step``: steps taken when this run begins (0: none). Lines of later steps, left by a run that went further than its last
    checkpoint, are dropped by an atomic replacement of the file. ``board``: gets everything too, and is closed at the end.
    """

    def __init__(self, path: str | Path, resume_step: int = 0, board: Board | None = None) -> None:
        self.path = Path(path)
        self._board = board
        self.path.parent.mkdir(parents=True, exist_ok=True)
        keep_until(self.path, resume_step)
        self._file = LineFile(self.path, say)

    def step(self, metrics: StepMetrics) -> None:
        """Write one step."""
        values = asdict(metrics)
        if not metrics.emulated:
            del values["emulated"]
        if metrics.router_loss is None:
            del values["router_loss"]
        self._write(values)
        if self._board is not None:
            self._board.step(metrics)

    def evaluation(self, step: int, loss: float) -> None:
        """Write the held-out loss after ``step`` steps."""
        self._write({"step": step, "evaluation_loss": loss})
        if self._board is not None:
            self._board.evaluation(step, loss)

    def close(self) -> None:
        self._file.add()  # what has waited for room until now
        if self._board is not None:
            self._board.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, values: dict[str, Any]) -> None:
        # JSON has no NaN: a line with one would make the whole file unreadable to strict parsers.
        bad = [key for key, value in values.items() if isinstance(value, float) and not math.isfinite(value)]
        line = {**values, **dict.fromkeys(bad), **({"non_finite": True} if bad else {})}
        self._file.write(json.dumps(line, allow_nan=False))


def read_metrics(path: str | Path) -> Metrics:
    """Read a metrics file. ``null`` becomes NaN. Torn lines, lines of unknown kinds, and unknown keys are left out."""
    steps: list[StepMetrics] = []
    evaluations: list[Evaluation] = []
    for _, values in objects(Path(path)):
        if "evaluation_loss" in values:
            known = _numbers({"step": values.get("step"), "loss": values["evaluation_loss"]}, Evaluation)
            evaluations += [Evaluation(**known)] if known is not None else []
        else:
            known = _numbers(values, StepMetrics)
            steps += [StepMetrics(**known)] if known is not None else []
    return Metrics(tuple(steps), tuple(evaluations))


def _numbers(values: Mapping[str, Any], kind: type[StepMetrics] | type[Evaluation]) -> dict[str, Any] | None:
    """The values for the fields of ``kind``; None where one is missing or is no number."""
    found: dict[str, Any] = {}
    for field in fields(kind):
        value = values.get(field.name, field.default)
        value = math.nan if value is None and field.type == "float" else value
        allowed = {"float": (int, float), "float | None": (int, float, type(None)), "int": (int,), "bool": (bool,)}[
            str(field.type)
        ]
        if type(value) not in allowed or (type(value) is int and abs(value) >= 2**63):
            return None
        found[field.name] = value
    return found
