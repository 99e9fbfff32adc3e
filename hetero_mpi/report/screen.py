"""The screen: a few lines at the bottom of a terminal, drawn in place by rich. Other output is printed above them.

::

    quickstart: 2 stages on 2 of 3 ranks, schedule 1F1B
    step 120/300 ━━━━━━━━━━━━                     40 %, 1:12 left
    loss 5.1234   5,242 tokens/s   391 ms per step, 291 ms predicted (+34 %)

    rank  holds                  computes         predicted  now
       0  embedding, blocks 0-1  ━━━━━━━━   82 %       91 %  forward 3
       1  blocks 2-5, head       ━━━━━━━    74 %       80 %  waits for rank 0 to send

A thread draws it twice a second. Callers only store what is to be shown. Where no person watches, this module is not loaded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hetero_mpi.rundir.logs import SHOWN
from hetero_mpi.util.background import BestEffort
from hetero_mpi.util.terminal import printable, terminal_size

PER_SECOND = 2
_BAR, _SHORT_BAR = 30, 10
_LONGEST_HOLDS = 26


class _Console(Console):
    def show_cursor(self, show: bool = True) -> bool:
        """Always show the cursor: a process that is killed could not show it again."""
        return False

    def on_broken_pipe(self) -> None:
        """Draw no more: the run goes on without its reader."""
        self.quiet = True


class _Live(Live):
    def refresh(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # the terminal may have gone: no reason to fail
            super().refresh()


class Screen:
    """Lines that are drawn in place while the context lasts; the last ones stay at its end.

    Args:
        stream: a terminal.
        view: returns what to show in so many rows; called from the drawing thread.
        per_second: how often it is drawn.
    """

    def __init__(self, stream: TextIO, view: Callable[[int], RenderableType], per_second: float = PER_SECOND) -> None:
        self._stream, self._view = stream, BestEffort("drawing the screen", view)
        self.console = _Console(file=stream, force_terminal=True, force_jupyter=False, highlight=False)
        self._live = _Live(
            console=self.console, get_renderable=self._drawn, refresh_per_second=per_second,
            redirect_stdout=False, redirect_stderr=False, vertical_overflow="crop",
        )  # fmt: skip

    def say(self, text: str) -> None:
        """Print a line above the screen."""
        with contextlib.suppress(OSError, ValueError):
            self.console.print(Text(text), soft_wrap=True)

    def __enter__(self) -> Screen:
        self._live.start(refresh=True)
        SHOWN.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        SHOWN.remove(self)
        with contextlib.suppress(OSError, ValueError):
            self._live.stop()

    def _drawn(self) -> RenderableType:
        columns, rows = terminal_size(self._stream)
        self.console.size = (columns, rows)  # type: ignore[assignment]  # a person may have changed it
        # The last row needs a line end, too: launchers pass on whole lines.
        return Group(self._view(rows - 2) or "", "")


RankLine = tuple[int, str, float | None, float, str]
"""A rank, what it holds, its measured and predicted shares of computing, and what it is doing."""


def view(title: str, steps: tuple[int, int], left: str, speed: str, ranks: Sequence[RankLine], rows: int) -> Group:
    """The screen of a run, in at most ``rows`` rows. ``steps``: (done, of how many)."""
    done, total = steps
    share = done / total if total else 1.0
    row = Table.grid(padding=(0, 1, 0, 0))
    row.add_row(f"step {done:>{len(str(total))}}/{total}", _bar(share, _BAR), _line(f"{share * 100:3.0f} %{left}"))
    parts: list[RenderableType] = [_line(title, "bold"), row, _line(speed)]
    room = rows - 6
    if ranks and room > 0:
        shown = ranks if len(ranks) <= room else ranks[: room - 1]
        parts += ["", _ranks(shown)]
        parts += [f"  and {len(ranks) - len(shown)} more ranks"] if len(shown) < len(ranks) else []
    return Group(*parts)


def _line(text: str, style: str = "") -> Text:
    return Text(printable(text), style, no_wrap=True, overflow="ellipsis")


def _bar(share: float, width: int) -> ProgressBar:
    return ProgressBar(1.0, min(max(share, 0.0), 1.0), width, complete_style="blue", finished_style="green")


def _ranks(ranks: Sequence[RankLine]) -> Table:
    rows = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    rows.add_column("rank", justify="right", no_wrap=True)
    rows.add_column("holds", max_width=_LONGEST_HOLDS)  # gives way where the terminal is narrow, as the last one does
    rows.add_column("computes", no_wrap=True)
    rows.add_column("predicted", justify="right", no_wrap=True)
    rows.add_column("now")
    for rank, holds, computed, predicted, now in ranks:
        computes = Table.grid(padding=(0, 1, 0, 0))
        if computed is not None:
            computes.add_row(_bar(computed, _SHORT_BAR), f"{computed * 100:3.0f} %")
        rows.add_row(str(rank), _line(holds), computes, f"{predicted * 100:.0f} %", _line(now))
    return rows
