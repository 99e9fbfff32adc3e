"""What copies of the trained state cost, timed: the row ``copies`` of ``reliability.py``."""

from __future__ import annotations

import re
import statistics
import time
from pathlib import Path

from benchmarks.reliability_kills import Row, ended, job_of, started, wait_for
from hetero_mpi.launch.processes import VARIABLE

RANKS, FIRST, LAST, ROUNDS = 2, 50, 200, 4
"""Steps are timed from ``FIRST``, by when it is decided how often copies are taken, to ``LAST``."""
BUDGET_S = 300.0
"""No round begins later than this: on a slow machine there are fewer."""
KINDS = {
    "none": (["--with-ft", "ulfm"], {}, 0),
    "in memory": (["--with-ft", "ulfm"], {}, "auto"),
    "on disk": ([], {VARIABLE: "benchmark.1"}, "auto"),
}
"""Launcher's options, environment, ``buddy_every``."""


def copies(folder: Path) -> list[Row]:
    """Steps with copies as often as the run thinks right, against steps without, in turns; seconds by the clock outside."""
    job, began = job_of(folder), time.monotonic()
    steps: dict[str, list[float]] = {kind: [] for kind in KINDS}
    every: list[int] = []
    for turn in range(ROUNDS):
        if turn and time.monotonic() - began > BUDGET_S:
            break
        for kind in KINDS:
            step_s, chosen = _timed(folder, job, f"{kind.replace(' ', '-')}-{turn}", kind)
            steps[kind].append(step_s)
            every += chosen
            print(
                f"copies: round {turn + 1} of {ROUNDS}, {time.monotonic() - began:.0f} s: {kind}, {step_s * 1e3:.2f} ms a step",
                flush=True,
            )
    rows: list[Row] = [("a step without copies (median)", 1e3 * statistics.median(steps["none"]), "ms", None, None)]
    for kind in ("in memory", "on disk"):
        ratio = statistics.median(own / none for own, none in zip(steps[kind], steps["none"], strict=True))
        # The promise is 2 %; rounds of equal runs differ by about as much again.
        rows.append((f"a step with copies {kind} / without (median of rounds)", ratio, "", None, 1.04))
    spread = statistics.median(steps["none"])
    rows.append(("runs without copies: slowest / median", max(steps["none"]) / spread, "", None, None))
    rows.append(("steps between copies, as chosen (median)", statistics.median(every or [0]), "", None, None))
    return rows


def _timed(folder: Path, job: Path, name: str, kind: str) -> tuple[float, list[int]]:
    """(seconds of a step between ``FIRST`` and ``LAST``, the numbers of steps between copies that were chosen)."""
    options, variables, wanted = KINDS[kind]
    more = ["--set", f"checkpoint.buddy_every={wanted}", "--set", f"train.steps={LAST}"]
    run = folder / name
    with started(folder, job, run, RANKS, options, more, **variables) as (process, log):
        begins = []
        for step in (FIRST, LAST):
            if not wait_for(process, run, step):
                raise SystemExit(f"step {step} did not come:\n{log.read_text()}")
            begins.append(time.monotonic())
        ended(process)
    chosen = [int(found) for found in re.findall(r"Copies of .*: every (\d+) step", log.read_text())]
    return (begins[1] - begins[0]) / (LAST - FIRST), chosen
