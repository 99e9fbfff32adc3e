"""Work beside the main thread: how it begins, how it ends, and who hears of its error; and work whose failure must end nothing.

* Work begins when its object is made, and never keeps the process alive.
* Who began it asks it to end by closing what it waits for (a transport, a server, a pipe, an event) and then calls ``finish``.
* What went wrong is raised again by ``finish``, on the thread that waits there; the traceback names the action. Where nobody waits
  (``start_unattended``) it is a line of the log.
* Pages, reports, sensors and the like stand beside a run: ``warn_on_failure`` makes a line of their failure, and ``BestEffort`` leaves
  them out from then on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, AnyStr, Generic, TypeVar

from hetero_mpi.util.terminal import CONSOLE_LOGGER, printable

T = TypeVar("T")


class Background(Generic[T]):
    """``work`` on a thread of its own. ``action`` is in the words of "rank 1 failed while ...": "writing the checkpoint"."""

    def __init__(self, action: str, work: Callable[[], T]) -> None:
        self._action, self._work = action, work
        self._result: T | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=action, daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def finish(self, patience_s: float | None = None) -> T | None:
        """Wait for its end, at most ``patience_s``; returns what ``work`` returned, None where it has not ended.

        :raises BaseException: what ended ``work``.
        """
        self._thread.join(patience_s)
        if self._error is not None:
            raise self._error
        return self._result

    def _run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:
            if sys.version_info >= (3, 11):
                error.add_note(f"(on a background thread, while {self._action})")
            self._error = error


@contextlib.contextmanager
def warn_on_failure(action: str) -> Iterator[None]:
    """A block that no failure ends more than: a line for the user says so. No other rank may wait for the block."""
    try:
        yield
    except Exception as error:
        logging.getLogger(__name__).info("failed while %s", action, exc_info=True)
        reason = printable(getattr(error, "strerror", None) or f"{type(error).__name__}: {error}")
        logging.getLogger(CONSOLE_LOGGER).warning("Warning: %s failed (%s); everything else continues", action, reason)


class BestEffort(Generic[T]):
    """A function that is ``warn_on_failure``. After its first failure, and while it runs, calls do nothing and return None."""

    def __init__(self, action: str, function: Callable[..., T]) -> None:
        self._action = action
        self._function: Callable[..., T] | None = function

    def __call__(self, *arguments: Any) -> T | None:
        function, self._function = self._function, None
        if function is not None:
            with warn_on_failure(self._action):
                result = function(*arguments)
                self._function = function
                return result
        return None


def start_unattended(action: str, work: Callable[[], object]) -> None:
    """Begin ``work`` on a thread whose end nobody waits for. It is ``warn_on_failure``, as is its start."""
    with warn_on_failure(action):
        Background(action, lambda: BestEffort(action, work)())


def start_module(module: str, *arguments: str, **options: Any) -> subprocess.Popen[Any]:
    """Start ``python -m module`` of this package, with pipes to its stdin and from its stdout. ``options``: of Popen."""
    paths = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {"PYTHONPATH": os.pathsep.join(paths), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": os.environ, **options}
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments], **{**options, "env": {**options["env"], **variables}}
    )


def lines_of(stream: IO[AnyStr]) -> queue.Queue[AnyStr | None]:
    """A pipe's lines as they come, and None at its end: they can be waited for with a time limit."""
    lines: queue.Queue[AnyStr | None] = queue.Queue()

    def read() -> None:
        try:
            with contextlib.suppress(ValueError, OSError):  # closed meanwhile
                for line in stream:
                    lines.put(line)
        finally:
            lines.put(None)

    start_unattended("reading a pipe", read)
    return lines
