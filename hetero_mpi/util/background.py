"""Background threads whose errors reach the waiting thread, and best-effort work whose failure must not end a run.

* Work starts when its ``Background`` object is created, and never keeps the process alive.
* To end the work, close the object on which it waits (a transport, server, pipe or event), then call ``finish``.
* If the work fails, ``finish`` raises its error on the calling thread, and the traceback names the action. If no thread waits
  (``start_unattended``), the error is logged.
* Pages, reports, sensors and other auxiliary work must not end a run: ``warn_on_failure`` logs a failure, and ``BestEffort``
  disables the function that failed.
"""

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
    """Runs ``work`` on a separate thread. ``action`` describes it in error messages, such as "writing the checkpoint"."""

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
        """Wait up to ``patience_s`` for ``work`` and return its result, or None on timeout. Raises the error if ``work`` failed."""
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
    """Turn an exception in the block into a warning. No other rank may be waiting for the block."""
    try:
        yield
    except Exception as error:
        logging.getLogger(__name__).info("failed while %s", action, exc_info=True)
        reason = printable(getattr(error, "strerror", None) or f"{type(error).__name__}: {error}")
        logging.getLogger(CONSOLE_LOGGER).warning("Warning: %s failed (%s); the program continues", action, reason)


class BestEffort(Generic[T]):
    """Calls a function under ``warn_on_failure``. After the first failure, and during a call, further calls return None."""

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
    """Start ``work`` on a thread that is never joined. If starting or running it fails, a warning is logged."""
    with warn_on_failure(action):
        Background(action, lambda: BestEffort(action, work)())


def start_module(module: str, *arguments: str, **options: Any) -> subprocess.Popen[Any]:
    """Start ``python -m module``, with pipes for stdin and stdout unless ``options`` (of Popen) override them."""
    paths = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {"PYTHONPATH": os.pathsep.join(paths), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": os.environ, **options}
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments], **{**options, "env": {**options["env"], **variables}}
    )


def lines_of(stream: IO[AnyStr]) -> queue.Queue[AnyStr | None]:
    """Return a queue that receives the lines of a pipe, then None, so that a caller can wait for a line with a timeout."""
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
