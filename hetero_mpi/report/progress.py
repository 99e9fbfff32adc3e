"""Show training progress: on a terminal, a screen of a few lines redrawn in place; otherwise, occasional plain lines.

::

    quickstart: 2 stages on 2 of 3 ranks, schedule 1F1B
    step 120/300 ━━━━━━━━━━━━                     40 %, 1:12 left
    loss 5.1234   5,242 tokens/s   391 ms per step, 291 ms predicted (+34 %)

    rank  holds                  computes          predicted  now
       0  embedding, blocks 0-1  ━━━━━━━━    82 %       91 %  forward 3
       1  blocks 2-5, head       ━━━━━━━     74 %       80 %  waits for rank 0 to send
"""

from __future__ import annotations

import contextlib
import os
import re
import statistics
import sys
import threading
import time
import unicodedata
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

from hetero_mpi.planning.simulator import simulate
from hetero_mpi.planning.types.plan import Plan
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.report.plan_text import stages_text
from hetero_mpi.rundir.logs import SHOWN
from hetero_mpi.rundir.metrics import StepMetrics, rewards_text
from hetero_mpi.rundir.present import Standing
from hetero_mpi.util import units
from hetero_mpi.util.background import Background, BestEffort
from hetero_mpi.util.terminal import is_terminal, printable, terminal_size, write_text

LINE_EVERY_S, LINE_AT_LEAST_EVERY_S = 5.0, 600.0
MIN_LINES_PER_RUN = 10
LINE_INTERVAL_RATIO = 0.25
"""Time until the next line, as a fraction of the elapsed time, within the limits above."""
_RECENT_STEPS = 20
"""The speed shown is the median over this number of recent steps."""
DRAW_EVERY_S = 0.5
_BAR, _SHORT_BAR = 30, 10
_MAX_HOLDS = 26
"""Maximum width of the column ``holds`` in characters."""
_BAR_PARTS = re.compile("[━╸]+")


@dataclass(frozen=True)
class RankRow:
    """The static part of a rank's row on the screen."""

    rank: int
    holds: str
    predicted: float
    """Fraction of the predicted step during which the rank computes."""


@dataclass(frozen=True)
class Overview:
    """The static part of the screen, which changes only with the plan."""

    title: str
    ranks: tuple[RankRow, ...] = ()


Standings = Callable[[], Mapping[int, Standing]]
"""Returns the current activity of each rank. The drawing thread calls it."""


def overview(plan: Plan, profile: ClusterProfile, name: str) -> Overview:
    """Build the title of the screen, and a row for each rank that the plan uses."""
    use = simulate(plan, profile).use
    on = f" on {len(plan.ranks)} of {units.plural(len(profile.devices), 'rank')}"
    title = f"{name}: {stages_text(plan, on)}{', EMULATED' if profile.emulated else ''}"
    rows = []
    for rank in plan.ranks:
        stages = [plan.numbered[number][2] for number in plan.of_rank(rank)]
        holds = "; ".join(units.layers(s.first, s.last, plan.layers, plan.sequence_length) for s in stages)
        rows.append(RankRow(rank, holds, use[rank]))
    return Overview(title, tuple(rows))


class ProgressDisplay:
    """Context manager that shows the progress of a run. Call ``update`` once per step.

    On a terminal, it draws a screen. Otherwise it prints a line for the first and the last step and, in between, after a tenth of
    the run or a quarter of the elapsed time (5 s to 10 minutes), whichever is earlier.

    Args:
        first_step: number of steps completed before this run (0 unless resumed).
        steps_per_epoch: number of steps per epoch if epochs are to be shown.
        screen: whether to draw the screen if the output is a terminal.
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
        self._recent: deque[StepMetrics] = deque(maxlen=_RECENT_STEPS)
        self._write_line = BestEffort("printing a step", lambda line: write_text(self._line(line) + "\n", self._stream))
        watched = screen and is_terminal(self._stream) and os.environ.get("TERM") != "dumb"
        self._screen = Screen(self._stream, self.view) if watched else None

    def show(self, about: Overview, standings: Standings) -> None:
        """Show the overview and activities of a new plan from now on."""
        self.overview, self.standings = about, standings

    def update(self, line: StepMetrics) -> None:
        """Record the metrics of a completed step, and print a line if one is due."""
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

    def view(self, rows: int) -> list[str]:
        """Return the lines of the screen, at most ``rows`` of them if possible."""
        step, total = self._latest.step if self._latest else self.first_step, self.total_steps
        ranks = self.overview.ranks
        share = step / total if total else 1.0
        time_left = f", {self._left(step)} left" if self.first_step < step < total else ""
        progress = f"step {step:>{len(str(total))}}/{total} {_bar(share, _BAR)} {100 * share:3.0f} %{self._epoch(step)}{time_left}"
        lines, max_rank_rows = [self.overview.title, progress, self._speed_text()], rows - 6
        if ranks and max_rank_rows > 0:
            shown_ranks = ranks if len(ranks) <= max_rank_rows else ranks[: max_rank_rows - 1]
            lines += ["", *self._rank_lines(shown_ranks)]
            lines += [f"  and {len(ranks) - len(shown_ranks)} more ranks"] if len(shown_ranks) < len(ranks) else []
        return lines

    def _rank_lines(self, ranks: Sequence[RankRow]) -> list[str]:
        standings = self.standings()
        wide = min(max(len(row.holds) for row in ranks), _MAX_HOLDS) if ranks else 0
        lines = [f"rank  {'holds':<{wide}}  {'computes':<16}  predicted  now"]
        for row in ranks:
            now = standings.get(row.rank, Standing(""))
            share, predicted = now.computed, f"{100 * row.predicted:.0f} %"
            computes = f"{_bar(share, _SHORT_BAR)} {100 * share:3.0f} %" if share is not None else ""
            lines.append(f"{row.rank:>4}  {_cut(row.holds, wide):<{wide}}  {computes:<16}  {predicted:>9}  {now.text}")
        return lines

    def _speed_text(self) -> str:
        """Return the latest loss, the current speed and the predicted step time."""
        if self._latest is None:
            return "running the first step"
        recent = list(self._recent)
        step_s = statistics.median(line.step_s for line in recent)
        rate = statistics.median(line.tokens_per_s for line in recent)
        text = f"{_loss(self._latest)}   {rate:,.0f} {self.unit}/s   {units.seconds(step_s)} per step"
        predicted_s = self._latest.predicted_step_s
        if predicted_s > 0:
            text += f", {units.seconds(predicted_s)} predicted ({units.change(step_s / predicted_s - 1)})"
        return text

    def _is_due(self, step: int) -> bool:
        some_steps = max(1, (self.total_steps - self.first_step) // MIN_LINES_PER_RUN)
        pause_s = LINE_INTERVAL_RATIO * (self._shown_s - self._started_s)
        return (
            step == self.total_steps
            or self._shown_step == self.first_step
            or step - self._shown_step >= some_steps
            or self._now_s() - self._shown_s >= min(LINE_AT_LEAST_EVERY_S, max(LINE_EVERY_S, pause_s))
        )

    def _line(self, line: StepMetrics) -> str:
        width = len(str(self.total_steps))
        text = f"step {line.step:>{width}}/{self.total_steps}{self._epoch(line.step)}  {_loss(line)}"
        text += f"  {line.tokens_per_s:,.0f} {self.unit}/s"
        return f"{text}  {self._left(line.step)} left" if line.step < self.total_steps else text

    def _epoch(self, step: int) -> str:
        return f", epoch {step / self._steps_per_epoch:.2f}" if self._steps_per_epoch is not None else ""

    def _left(self, step: int) -> str:
        """Return the estimated time for the steps after ``step``, formatted like a clock."""
        per_step_s = (self._now_s() - self._started_s) / (step - self.first_step)
        return units.clock(per_step_s * (self.total_steps - step))


class Screen:
    """Context manager that redraws lines in place and prints other output above them. The last lines remain at exit.

    Args:
        stream: the terminal to draw on.
        view: a function that returns the lines for a maximum number of rows. The drawing thread calls it.
    """

    def __init__(self, stream: TextIO, view: Callable[[int], Sequence[str]], every_s: float = DRAW_EVERY_S) -> None:
        self._stream, self._view, self._every_s = stream, BestEffort("drawing the screen", view), every_s
        self._writing, self._stop = threading.Lock(), threading.Event()
        self._lines: Sequence[str] = ()
        self._height = 0

    def print_above(self, text: str) -> None:
        self._draw(text + "\n")

    def __enter__(self) -> Screen:
        self._draw()
        SHOWN.append(self)
        self._drawing = Background("drawing the screen", self._redraw)
        return self

    def __exit__(self, *_: object) -> None:
        SHOWN.remove(self)
        self._stop.set()
        self._drawing.finish()
        self._draw()

    def _redraw(self) -> None:
        while not self._stop.wait(self._every_s):
            self._draw()

    def _draw(self, above: str = "") -> None:
        """Replace the previous lines with ``above`` and the current ones. All end in a newline, without which launchers buffer."""
        size = terminal_size(self._stream)
        self._lines = self._view(size.lines - 2) or self._lines
        lines = [_cut(printable(line), size.columns) for line in self._lines]
        if not os.environ.get("NO_COLOR"):
            lines = [_BAR_PARTS.sub("\x1b[34m\\g<0>\x1b[0m", line) for line in lines]
        with self._writing, contextlib.suppress(OSError, ValueError):  # a closed terminal must not end the run
            back = f"\x1b[{self._height}A\x1b[J" if self._height else ""
            self._height = len(lines)
            self._stream.write(back + above + "".join(f"{line}\n" for line in lines))
            self._stream.flush()


def _cut(text: str, width: int) -> str:
    """Shorten ``text`` to at most ``width`` terminal columns."""
    columns = 0
    for index, character in enumerate(text):
        columns += 2 if unicodedata.east_asian_width(character) in "WF" else 1
        if columns > width:
            return text[: index - 1] + "…"
    return text


def _bar(share: float, width: int) -> str:
    halves = int(2 * width * min(max(share, 0.0), 1.0))
    return f"{'━' * (halves // 2) + '╸' * (halves % 2):<{width}}"


def _loss(line: StepMetrics) -> str:
    of_routers = f" (routers {line.router_loss:.4f})" if line.router_loss is not None else ""
    return f"loss {line.loss:.4f}{of_routers}{rewards_text(line)}"
