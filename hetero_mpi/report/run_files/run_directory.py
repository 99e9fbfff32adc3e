"""The run directory, and its lock: one run at a time, and a crashed run releases it."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from hetero_mpi.disk import lock, require_regular
from hetero_mpi.errors import UserError
from hetero_mpi.report.run_files.logs import write_line

LOCK_NAME = ".lock"
_WRITTEN = ("", "adapter", "checkpoints", "copies", "logs", "model", "tensorboard", "wandb")
"""Directories that a run writes into, relative to the run directory; "": itself."""


@contextlib.contextmanager
def claim(run_dir: str | Path, tell: Callable[[str], None] = write_line) -> Iterator[Path]:
    """Create the run directory and hold its lock while the context lasts. Rank 0 only.

    The operating system releases the lock when the process ends, however it ends. The lock file stays, and says who holds the lock.
    Its time is put back: a start that is refused leaves no trace. ``tell``: is told where the file system has no locks, so that
    nothing keeps a second run out.

    :raises UserError: another run holds it (names host, process and start), or the directory cannot be created or written.
    """
    directory = Path(run_dir)
    with opened_in(directory, LOCK_NAME) as file:
        try:
            if not lock(file):
                tell(
                    f"{directory}: its file system has no locks, so nothing keeps a second run out of it: start only one there"
                )
        except BlockingIOError:
            raise UserError(
                f"a run directory serves one run at a time; {directory} is in use by {_holder(file)}. "
                "Wait for that run, end it, or choose another directory with --run-dir."
            ) from None
        before = os.stat(file.fileno())
        file.truncate(0)
        started = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        holder = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "started": started}) + "\n"
        with contextlib.suppress(OSError):  # on a full disk the lock holds all the same
            os.write(file.fileno(), holder.encode())
        try:
            yield directory
        finally:
            file.truncate(0)
            os.utime(file.fileno(), ns=(before.st_atime_ns, before.st_mtime_ns))


def is_used(run_dir: Path) -> bool:
    """Does the directory hold anything but its lock?"""
    return run_dir.is_dir() and any(path.name != LOCK_NAME for path in run_dir.iterdir())


def opened_in(run_dir: Path, name: str) -> TextIO:
    """A file of the run directory, which is made if it is not there; opened to be read and appended to.

    :raises UserError: the directory cannot be created or written, or has a link that leads out of it.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        refuse_links(run_dir)
        return (run_dir / name).open("a+", encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"the run directory must be a directory this user can write to; {run_dir} is not: {error.strerror}. "
            "Choose another with output.run_dir or --run-dir."
        ) from None


def refuse_links(run_dir: str | Path) -> None:
    """Refuse a run directory with a link through which a run would write elsewhere, or with a pipe or a device in a file's place.
    Local: each host has its own directory.

    Raises UserError: with the first of them.
    """
    home = Path(run_dir).resolve()
    for name in _WRITTEN:
        folder = home / name
        for path in (folder, *(folder.iterdir() if folder.is_dir() else ())):
            if path.is_symlink() and not path.resolve().is_relative_to(home):
                raise UserError(
                    f"a run writes into its own directory only; {path} is a link that leads out of it, to {path.resolve()}. "
                    "Remove the link, or have the whole run directory there with --run-dir."
                )
            if not path.is_dir():
                require_regular(path)


def _holder(file: TextIO) -> str:
    file.seek(0)
    try:
        holder = json.loads(file.read())
        return f"process {holder['pid']} on {holder['host']}, started {holder['started']}"
    except (json.JSONDecodeError, KeyError, TypeError):
        return "another process"  # it has the lock and is about to write its name
