"""The output of a run: each rank has a log file, and rank 0 also prints to stdout, above the status screen if there is one."""

import contextlib
import logging
import logging.handlers
import sys
import threading
from pathlib import Path
from typing import Any, Protocol

from hetero_mpi.util.terminal import CONSOLE_LOGGER, fit_to_terminal, printable, write_text

LOGGER = "hetero_mpi"


def setup_logging(run_dir: str | Path | None, rank: int, size: int, waits: bool = False) -> Path | None:
    """Append this process's log to ``run_dir/logs/rank-0003.log``, with time and rank/size on each line, and return the path.

    The file receives messages of INFO and above from this package, and warnings from other packages and Python's ``warnings``. If
    ``run_dir`` is None, there is no file. Another call replaces the earlier settings.

    If ``waits`` is true, lines are buffered in memory until ``write_waiting_logs`` or the first error. Another call discards them.
    """
    root = logging.getLogger()
    for logger in (root, logging.getLogger(CONSOLE_LOGGER)):
        for handler in [handler for handler in logger.handlers if handler.get_name() == LOGGER]:
            logger.removeHandler(handler)
            handler.close()
    logging.getLogger(LOGGER).setLevel(logging.INFO)
    logging.captureWarnings(True)
    if rank == 0:
        _add_handler(logging.getLogger(CONSOLE_LOGGER), _StdoutHandler(), "%(message)s")
    path = None
    if run_dir is not None:
        path = Path(run_dir) / "logs" / f"rank-{rank:04}.log"
        width = len(str(size))
        prefix = f"%(asctime)s {rank:>{width}}/{size} %(levelname)s %(name)s: %(message)s"
        file = _LogFile(path, encoding="utf-8", delay=True, errors="backslashreplace")
        file.setFormatter(logging.Formatter(prefix))
        _add_handler(root, _BufferedLog(file) if waits else file, prefix)
    return path


def write_waiting_logs() -> None:
    """Write the lines that ``setup_logging(waits=True)`` buffers. Later lines are written immediately."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _BufferedLog):
            handler.write_through()


def say(*lines: str) -> None:
    """Print lines for the user: to stdout on rank 0, and to the log file on every rank."""
    for line in lines:
        logging.getLogger(CONSOLE_LOGGER).info("%s", printable(line))


def note(*lines: str) -> None:
    """Write lines only to the log file."""
    for line in lines:
        logging.getLogger(LOGGER).info("%s", printable(line))


class _LogFile(logging.FileHandler):
    """A log file that tolerates a full disk by keeping lines in its buffer until there is space."""

    def _open(self) -> Any:
        Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
        return super()._open()

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore the error, because a traceback for every line would not help. Writers of other files report a full disk."""

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


class _BufferedLog(logging.handlers.MemoryHandler):
    """Buffers lines for the log file in memory until ``write_through`` is called or an error is logged."""

    def __init__(self, file: _LogFile) -> None:
        super().__init__(sys.maxsize, logging.ERROR, file, flushOnClose=False)
        self._file = file

    def shouldFlush(self, record: logging.LogRecord) -> bool:
        if super().shouldFlush(record):
            self.capacity = 0
        return self.capacity == 0

    def flush(self) -> None:
        if self.capacity == 0:  # before Python 3.12 process exit flushes too
            super().flush()

    def write_through(self) -> None:
        self.capacity = 0
        self.flush()

    def close(self) -> None:
        super().close()
        self._file.close()


class _StdoutHandler(logging.Handler):
    """Prints log messages to the current stdout, above the status screen if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        write_line(self.format(record))


def _add_handler(logger: logging.Logger, handler: logging.Handler, form: str) -> None:
    handler.set_name(LOGGER)
    handler.setFormatter(logging.Formatter(form))
    logger.addHandler(handler)


class Watched(Protocol):
    """A status screen on a terminal."""

    def print_above(self, text: str) -> None:
        """Print a line above the status screen."""


SHOWN: list[Watched] = []
"""The status screen on the terminal: a list with at most one entry."""
_LOCK = threading.RLock()


def write_line(text: str) -> None:
    """Print a line to stdout, above the status screen if there is one."""
    with _LOCK:
        if SHOWN:
            SHOWN[-1].print_above(fit_to_terminal(text))
        else:
            write_text(text + "\n", sys.stdout)
