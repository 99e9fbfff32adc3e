"""A run as rank 0 shows it while it goes on: ``now.json``; the live page, where the job asks for it; else ``report.html`` now and
then.

Page and report are drawn by processes of their own, at a low priority and off the step's path. They end with their pipe, so
with rank 0, however that ends.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from hetero_mpi.comm.ranks.world import World
from hetero_mpi.job.schema import ReportTable
from hetero_mpi.report.progress import ProgressDisplay
from hetero_mpi.rundir.logs import write_line
from hetero_mpi.rundir.present import NICENESS, Present, write_present
from hetero_mpi.util.background import Background, BestEffort, start_module, unattended, unharmed

TELL_S = 0.5
REPORT_EVERY_S = 300.0
_PATIENCE_S = 5.0
"""For the page's process, which shows the end to who watches."""
_APART: dict[str, Any] = {"stderr": subprocess.DEVNULL, "start_new_session": True}
"""An interrupt of the terminal is not for these processes."""


class LiveView:
    """A context around all attempts of a run; on other ranks than 0 it does nothing."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._run_dir = Path()
        self._display: ProgressDisplay | None = None
        self._page: subprocess.Popen[bytes] | None = None
        self._report: subprocess.Popen[bytes] | None = None
        self._stop = threading.Event()
        self._telling: Background[None] | None = None
        self._write = BestEffort("writing now.json", self._write_present)
        self._begin_report = BestEffort("drawing report.html", self._report_process)

    def begin(self, asked: ReportTable, run_dir: Path, display: ProgressDisplay | None) -> None:
        """The start is accepted: show the run from now on. ``display`` knows what the ranks do; other ranks than 0 have none."""
        if display is None:
            return
        self._run_dir, self._display = run_dir, display
        if asked.watch is not False and self._page is None:
            port = [str(asked.watch)] if asked.watch is not True else []
            with unharmed("starting the live page"):
                self._page = start_module("hetero_mpi.serve.live_page", str(run_dir), *port, **_APART)
                unattended("passing on the page's address", self._pass_on)
        if self._telling is None and (asked.write or self._page is not None):
            with unharmed("telling what the ranks do"):
                self._telling = Background("telling what the ranks do", self._tell)

    def end(self, text: str) -> None:
        """The run ends, and that is told from now on, once. ``text``: how; empty: well."""
        if self._telling is not None and not self._stop.is_set():
            self._stop.set()
            self._telling.finish()
            self._write(text)

    def __enter__(self) -> LiveView:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self.end(f"{kind.__name__}: {error}" if kind is not None else "")
        if self._page is not None and self._page.stdin is not None:
            with contextlib.suppress(subprocess.TimeoutExpired), unharmed("ending the live page"):
                self._page.stdin.close()
                self._page.wait(_PATIENCE_S)

    def _tell(self) -> None:
        due_s = time.monotonic() + REPORT_EVERY_S
        while not self._stop.wait(TELL_S):
            self._write(None)
            busy = self._page is not None or (self._report is not None and self._report.poll() is None)
            if time.monotonic() > due_s and not busy:
                due_s += REPORT_EVERY_S
                self._begin_report()

    def _report_process(self) -> None:
        self._report = start_module("hetero_mpi", "report", str(self._run_dir), **_APART)
        os.setpriority(os.PRIO_PROCESS, self._report.pid, NICENESS)

    def _write_present(self, ended: str | None) -> None:
        assert self._display is not None
        ranks = {str(rank): now for rank, now in self._display.standings().items()}
        write_present(self._run_dir, Present(time.time(), self._world.doing, ended, ranks))

    def _pass_on(self) -> None:
        """Print what the page's process says. A log would keep the token."""
        assert self._page is not None and self._page.stdout is not None
        for line in self._page.stdout:
            write_line(line.decode(errors="replace").rstrip())
