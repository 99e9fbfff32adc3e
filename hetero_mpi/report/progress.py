"""Progress of the training loop: a bar on a terminal, plain lines at a sensible rate elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

from tqdm import tqdm

from hetero_mpi.report import units

LINE_EVERY_S = 5.0
LINES_PER_RUN = 10


def is_terminal(stream: TextIO) -> bool:
    """Does a person watch this stream?

    Open MPI gives every rank a pseudo-terminal, also when its own output goes to a file; then the launcher's stdout, which
    is this process's parent's, tells. Where that cannot be seen the answer is no: plain lines are right everywhere.
    """
    if not stream.isatty():
        return False
    if not any(name in os.environ for name in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")):
        return True
    try:
        return os.readlink(f"/proc/{os.getppid()}/fd/1").startswith(("/dev/pts/", "/dev/tty"))
    except OSError:
        return False


class Progress:
    """Shows steps as they are done. A context manager; ``update`` once per step.

    ``first_step``: steps done before this run (0 unless resumed). On a terminal one bar with loss, tokens/s and time
    left. Otherwise a line for the first step, the last, and in between after 5 s or a tenth of the run, whichever
    comes first.
    """

    def __init__(
        self,
        total_steps: int,
        first_step: int = 0,
        stream: TextIO | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total_steps = total_steps
        self.first_step = first_step
        self._stream = sys.stdout if stream is None else stream
        self._now_s = now_s
        self._started_s = now_s()
        self._shown_s = self._started_s
        self._shown_step = first_step
        self._bar: tqdm[None] | None = None
        if is_terminal(self._stream):
            self._bar = tqdm(
                total=total_steps, initial=first_step, file=self._stream, unit="step", dynamic_ncols=True, leave=True
            )

    def update(self, step: int, loss: float, tokens_per_s: float) -> None:
        """``step`` steps are done now; ``loss`` of the latest, nats per token."""
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {loss:.4f}, {tokens_per_s:,.0f} tokens/s", refresh=False)
            self._bar.update(step - self._bar.n)
        elif self._is_due(step):
            self._shown_s, self._shown_step = self._now_s(), step
            self._stream.write(self._line(step, loss, tokens_per_s) + "\n")
            self._stream.flush()

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _is_due(self, step: int) -> bool:
        some_steps = max(1, (self.total_steps - self.first_step) // LINES_PER_RUN)
        return (
            step == self.total_steps
            or self._shown_step == self.first_step
            or step - self._shown_step >= some_steps
            or self._now_s() - self._shown_s >= LINE_EVERY_S
        )

    def _line(self, step: int, loss: float, tokens_per_s: float) -> str:
        width = len(str(self.total_steps))
        line = f"step {step:>{width}}/{self.total_steps}  loss {loss:.4f}  {tokens_per_s:,.0f} tokens/s"
        if step < self.total_steps:
            per_step_s = (self._now_s() - self._started_s) / (step - self.first_step)
            line += f"  {units.clock(per_step_s * (self.total_steps - step))} left"
        return line
