"""Progress of the training loop: a screen that is drawn in place on a terminal, else plain lines now and then."""

from __future__ import annotations

import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from hetero_mpi.planning.simulator import simulate
from hetero_mpi.planning.types.plan import Plan
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.report.plan_text import stages_text
from hetero_mpi.rundir.metrics import StepMetrics, rewards_text
from hetero_mpi.rundir.present import Standing
from hetero_mpi.util import units
from hetero_mpi.util.background import BestEffort
from hetero_mpi.util.terminal import is_terminal, write_text

if TYPE_CHECKING:
    from rich.console import Group

LINE_EVERY_S, LINE_AT_LEAST_EVERY_S = 5.0, 600.0
LINES_PER_RUN = 10
LATER = 0.25
"""The next line comes after this share of the time so far, within those limits."""
_RECENT = 20
"""Number of steps whose median is shown as the present speed."""


@dataclass(frozen=True)
class RankRow:
    """A rank's row of the screen, as it is before the first step."""

    rank: int
    holds: str
    predicted: float
    """Share of the predicted step in which it computes."""


@dataclass(frozen=True)
class Overview:
    """The part of the screen that does not change while a plan is run."""

    title: str
    ranks: tuple[RankRow, ...] = ()


Standings = Callable[[], Mapping[int, Standing]]
"""A function: rank -> what it is doing. Called by the thread that draws."""


def overview(plan: Plan, profile: ClusterProfile, name: str) -> Overview:
    """The screen's first line, and a row for every rank that has a stage."""
    use = simulate(plan, profile).use
    on = f" on {len(plan.ranks)} of {len(profile.devices)} ranks"
    title = f"{name}: {stages_text(plan, on)}{', EMULATED' if profile.emulated else ''}"
    rows = []
    for rank in plan.ranks:
        held = [plan.numbered[number][2] for number in plan.of_rank(rank)]
        holds = "; ".join(units.layers(stage.first, stage.last, plan.layers) for stage in held)
        rows.append(RankRow(rank, holds, use[rank]))
    return Overview(title, tuple(rows))


class ProgressDisplay:
    """Shows the steps of a run. A context manager; ``update`` is called once per step and only stores what is to be shown.

    ``first_step``: steps done before this run (0 unless resumed). On a terminal it is a screen. Otherwise a line for the first
    step, the last, and in between after a tenth of the run or a quarter of the time so far (5 s at least, 10 minutes at most),
    whichever comes first: some twenty in a few minutes. ``steps_per_epoch``: of a run that counts epochs.
    ``screen``: may there be one?

    Attributes:
        overview, standings: shown on the screen.
        unit: what the throughput counts.
    """

    def __init__(
        self,
        total_steps: int,
        first_step: int = 0,
        stream: TextIO | None = None,
        now_s: Callable[[], float] = time.monotonic,
        about: Overview | None = None,
        unit: str = "tokens",
        steps_per_epoch: float | None = None,
        screen: bool = True,
    ) -> None:
        self.total_steps = total_steps
        self.first_step = first_step
        self.overview = about or Overview("training")
        self.standings: Standings = dict
        self.unit, self._steps_per_epoch = unit, steps_per_epoch
        self._stream = sys.stdout if stream is None else stream
        self._now_s = now_s
        self._started_s = now_s()
        self._shown_s = self._started_s
        self._shown_step = first_step
        self._latest: StepMetrics | None = None
        self._recent: deque[StepMetrics] = deque(maxlen=_RECENT)
        self._write_line = BestEffort("printing a step", lambda line: write_text(self._line(line) + "\n", self._stream))
        self._screen = None
        if screen and is_terminal(self._stream):
            from hetero_mpi.report.screen import Screen  # loads rich

            self._screen = Screen(self._stream, self.view)

    def show(self, about: Overview, standings: Standings) -> None:
        """Show another plan from now on."""
        self.overview, self.standings = about, standings

    def update(self, line: StepMetrics) -> None:
        """Record a step."""
        self._latest = line
        self._recent.append(line)
        if self._screen is None and self._is_due(line.step):
            self._shown_s, self._shown_step = self._now_s(), line.step
            self._write_line(line)

    def __enter__(self) -> ProgressDisplay:
        if self._screen is not None:
            self._screen.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._screen is not None:
            self._screen.__exit__()

    def view(self, rows: int) -> Group:
        """The screen's contents, in at most ``rows`` rows."""
        from hetero_mpi.report.screen import view

        step = self._latest.step if self._latest is not None else self.first_step
        left = self._epoch(step)
        left += f", {self._left(step)} left" if self.first_step < step < self.total_steps else ""
        standings = self.standings()
        ranks = [
            (row.rank, row.holds, now.computed, row.predicted, now.text)
            for row in self.overview.ranks
            for now in [standings.get(row.rank, Standing(""))]
        ]
        return view(self.overview.title, (step, self.total_steps), left, self._speed_text(), ranks, rows)

    def _speed_text(self) -> str:
        """The loss, and the present speed beside the predicted one."""
        if self._latest is None:
            return "the first step is under way"
        recent = list(self._recent)
        step_s = statistics.median(line.step_s for line in recent)
        rate = statistics.median(line.tokens_per_s for line in recent)
        text = f"{_loss(self._latest)}   {rate:,.0f} {self.unit}/s   {units.seconds(step_s)} per step"
        predicted_s = self._latest.predicted_step_s
        if predicted_s > 0:
            text += f", {units.seconds(predicted_s)} predicted ({units.change(step_s / predicted_s - 1)})"
        return text

    def _is_due(self, step: int) -> bool:
        some_steps = max(1, (self.total_steps - self.first_step) // LINES_PER_RUN)
        return (
            step == self.total_steps
            or self._shown_step == self.first_step
            or step - self._shown_step >= some_steps
            or self._now_s() - self._shown_s >= self._pause_s()
        )

    def _pause_s(self) -> float:
        return min(LINE_AT_LEAST_EVERY_S, max(LINE_EVERY_S, LATER * (self._shown_s - self._started_s)))

    def _line(self, line: StepMetrics) -> str:
        width = len(str(self.total_steps))
        text = f"step {line.step:>{width}}/{self.total_steps}{self._epoch(line.step)}  {_loss(line)}"
        text += f"  {line.tokens_per_s:,.0f} {self.unit}/s"
        return f"{text}  {self._left(line.step)} left" if line.step < self.total_steps else text

    def _epoch(self, step: int) -> str:
        return f", epoch {step / self._steps_per_epoch:.2f}" if self._steps_per_epoch is not None else ""

    def _left(self, step: int) -> str:
        """The time that the steps after ``step`` will take, as a clock."""
        per_step_s = (self._now_s() - self._started_s) / (step - self.first_step)
        return units.clock(per_step_s * (self.total_steps - step))


def _loss(line: StepMetrics) -> str:
    of_routers = f" (routers {line.router_loss:.4f})" if line.router_loss is not None else ""
    return f"loss {line.loss:.4f}{of_routers}{rewards_text(line)}"
