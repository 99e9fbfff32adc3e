"""What copies of the trained state cost, timed: the row ``copies`` of ``reliability.py``."""

from __future__ import annotations

import re
import signal
import statistics
import time
from contextlib import ExitStack
from pathlib import Path

import psutil

from benchmarks.reliability_kills import Row, job_of, newest, started, wait_for
from hetero_mpi.rundir.run_directory import START_VARIABLE

RANKS, FIRST, LAST = 2, 50, 450
"""Steps are timed from ``FIRST``, by when it is decided how often copies are taken, until a run has come to ``LAST``."""
WINDOW_S = 2.0
"""The runs stand still but for one, each in turn for so long: what else the machine does then slows all of them down."""
ALONE = (["--with-ft", "ulfm"], {}, 0)
KINDS = {
    "none": ALONE,
    "in memory": (["--with-ft", "ulfm"], {}, "auto"),
    "on disk": ([], {START_VARIABLE: "benchmark.1"}, "auto"),
    "none, once more": ALONE,
}
"""Launcher's options, environment, ``replicate_every``."""


class _Run:
    """A run that stands still but when it is its turn."""

    def __init__(self, folder: Path, name: str, process: psutil.Popen, log: Path) -> None:
        self.run, self.process, self.log = folder / name, process, log
        self.seconds, self.steps = 0.0, 0
        if not wait_for(process, self.run, FIRST):
            raise SystemExit(f"step {FIRST} did not come:\n{log.read_text()}")
        self._all(signal.SIGSTOP)
        self._begun = newest(self.run)

    def turn(self) -> None:
        """Go on for ``WINDOW_S``."""
        self._all(signal.SIGCONT)
        begin = time.monotonic()
        time.sleep(WINDOW_S)
        if self.process.poll() is not None:
            raise SystemExit(f"the run ended after step {newest(self.run)}:\n{self.log.read_text()}")
        self._all(signal.SIGSTOP)
        self.seconds += time.monotonic() - begin
        self.steps = newest(self.run) - self._begun

    def _all(self, which: signal.Signals) -> None:
        for one in [self.process, *self.process.children(recursive=True)]:
            one.send_signal(which)

    @property
    def step_s(self) -> float:
        return self.seconds / max(1, self.steps)

    @property
    def chosen(self) -> list[int]:
        """Numbers of steps between copies that were chosen."""
        return [int(found) for found in re.findall(r"Copies of .*: every (\d+) step", self.log.read_text())]


def copies(folder: Path, smallest: bool) -> list[Row]:
    """Steps with copies as often as the run thinks right, against steps without; seconds by the clock outside."""
    job, last = job_of(folder), FIRST + 10 if smallest else LAST
    with ExitStack() as stack:
        runs: dict[str, _Run] = {}
        for kind, (options, variables, wanted) in KINDS.items():
            more = ["--set", f"checkpoint.replicate_every={wanted}", "--set", f"train.steps={2 * LAST}"]
            name = re.sub(r"\W+", "-", kind)
            begun = stack.enter_context(started(folder, job, folder / name, RANKS, options, more, **variables))
            runs[kind] = _Run(folder, name, *begun)
        while max(run.steps for run in runs.values()) < last - FIRST:
            for kind, run in runs.items():
                run.turn()
                print(
                    f"copies: {kind}: {run.steps} of {last - FIRST} steps, {run.step_s * 1e3:.1f} ms each", flush=True
                )
        every = [number for run in runs.values() for number in run.chosen]
    none_s = statistics.mean(runs[kind].step_s for kind, given in KINDS.items() if given is ALONE)
    rows: list[Row] = [("a step without copies", 1e3 * none_s, "ms", None, None)]
    for kind in ("in memory", "on disk"):
        # The promise is 2 %; equal runs differ by about as much again on a machine that does nothing else, by more on others.
        rows.append((f"a step with copies {kind} / without", runs[kind].step_s / none_s, "", None, 1.04))
    again = runs["none, once more"].step_s / runs["none"].step_s
    rows.append(("a step without copies / without, of two runs", again, "", None, None))
    rows.append(("steps between copies, as chosen (median)", statistics.median(every or [0]), "", None, None))
    return rows
