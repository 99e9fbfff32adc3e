"""The run directory: its lock, its events, its ``run.json``, and what becomes of an earlier run in it.

* One run at a time holds the lock, and a crashed run releases it.
* When a directory is used again, the files of the earlier run move to ``RUN/set-aside-1``, which is a run directory itself. Every
  move is a rename within the directory. The files by which a run is recognised (metrics, then checkpoints) move last. So a crash
  between two moves loses nothing: the next start goes on with the same target.

Also here: a supervisor's events, in ``RUN/events.jsonl`` and on its stderr.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from hetero_mpi.rundir.line_files import EVENTS_NAME, METRICS_NAME, STEPS_NAME, LineFile, objects
from hetero_mpi.rundir.logs import write_line
from hetero_mpi.rundir.present import PRESENT_NAME
from hetero_mpi.util.background import warn_on_failure
from hetero_mpi.util.disk import lock, require_regular, write_atomic
from hetero_mpi.util.errors import UserError
from hetero_mpi.util.shipped import USED_PROFILE
from hetero_mpi.util.terminal import write_text

LOCK_NAME, RUN_NAME = ".lock", "run.json"
REPORT_NAME, TRACE_NAME = "report.html", "trace.json"
SAMPLE_NAME = "sample.txt"
"""File of the text that the trained model wrote at the end, where the job asks for it."""
START_VARIABLE = "HETERO_MPI_START"
"""Environment variable of all processes of a start: ``SUPERVISOR.NUMBER``."""
_WRITTEN = ("", "adapter", "checkpoints", "copies", "logs", "model", "tensorboard", "wandb")
"""Directories that a run writes into, relative to the run directory; "": itself."""
_PLANNED = ("profile.toml", "plan.toml", "architecture.png", "architecture.svg")
_LOGS = "logs"
_MOVED = (
    "adapter", "model", SAMPLE_NAME, "simulation", "tensorboard", "wandb", REPORT_NAME, TRACE_NAME, USED_PROFILE, PRESENT_NAME,
    STEPS_NAME, EVENTS_NAME, RUN_NAME, METRICS_NAME, "checkpoints",
)  # fmt: skip
_FILES = {name for name in (LOCK_NAME, *_PLANNED, *_MOVED) if "." in name}
"""Entries of a run directory that are files; all others are directories."""


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
                "run.in_use",
                f"a run directory serves one run at a time; {directory} is in use by {_holder(file)}. "
                "Wait for that run, end it, or choose another directory with --run-dir.",
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
    """Whether the directory holds anything but its lock."""
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
            "run.unwritable",
            f"the run directory must be a directory this user can write to; {run_dir} is not: {error.strerror}. "
            "Choose another with output.run_dir or --run-dir.",
        ) from None


def refuse_links(run_dir: str | Path) -> None:
    """Refuse a run directory with a link through which a run would write elsewhere, or with something else in the place of a file
    or directory. Local: each host has its own directory.

    Raises UserError: with the first of them.
    """
    home = Path(run_dir).resolve()
    for name in _WRITTEN:
        folder = home / name
        for path in (folder, *(folder.iterdir() if folder.is_dir() else ())):
            if path.is_symlink() and not path.resolve().is_relative_to(home):
                raise UserError(
                    "run.link",
                    f"a run writes into its own directory only; {path} is a link that leads out of it, to {path.resolve()}. "
                    "Remove the link, or have the whole run directory there with --run-dir.",
                )
            if not path.is_dir() or (folder == home and path.name in _FILES):
                require_regular(path)
            if path == folder and path.exists() and not path.is_dir():
                raise UserError(
                    "run.not_a_directory",
                    f"{path}: must be a directory, and is a file: remove it, or choose another --run-dir",
                )


def _holder(file: TextIO) -> str:
    file.seek(0)
    try:
        holder = json.loads(file.read())
        return f"process {holder['pid']} on {holder['host']}, started {holder['started']}"
    except (ValueError, LookupError, TypeError, RecursionError):
        return "another process"  # it has the lock and is about to write its name


def append_event(run_dir: Path, event: str, text: str, **values: Any) -> None:
    """Append one event of the run itself, without a supervisor. No failure ends the run."""
    with warn_on_failure(f"writing {EVENTS_NAME}"):
        LineFile(run_dir / EVENTS_NAME).write(as_event(event, text, values))


def as_event(event: str, text: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {"unix_s": round(time.time(), 3), "event": event, "text": text, **values}


def own_event(values: Mapping[str, Any]) -> bool:
    """Whether an event belongs to this process's run: its supervisor wrote it, or its ranks have since they began."""
    import psutil  # doctor runs before it is installed

    supervisor = os.environ.get(START_VARIABLE, "").partition(".")[0]
    told_s = values.get("unix_s")
    if not isinstance(told_s, (int, float)):
        return False
    return told_s >= psutil.Process().create_time() or bool(supervisor and values.get("supervisor") == supervisor)


def describe_run(
    directory: Path,
    name: str,
    job_file: str,
    job: Mapping[str, Any],
    versions: Mapping[str, str],
    ranks: int,
    step: int,
    skipped_records: int = 0,
    run_id: str = "",
) -> None:
    """Write ``run.json`` when training starts from ``step``; earlier starts of a resumed run are kept."""
    path = directory / RUN_NAME
    starts = [one for one in run_starts(run_json(path)) if step > 0 and one["step"] <= step]
    start = {"unix_s": round(time.time(), 3), "step": step, "ranks": ranks, "skipped_records": skipped_records}
    starts.append(start)
    values = {"name": name, "job_file": job_file, "job": job, "versions": dict(versions), "starts": starts}
    _tell(path, {**values, "run_id": run_id, "last_step": run_table(job, "train").get("steps", 0)})


def note_end(directory: Path, step: int) -> None:
    """Note in ``run.json`` that training is over after ``step`` steps."""
    path = directory / RUN_NAME
    _tell(path, {**run_json(path), "last_step": step})


def note_result(directory: Path, step: int) -> None:
    """Note in ``run.json`` that the result of ``step`` steps is written whole."""
    path = directory / RUN_NAME
    _tell(path, {**run_json(path), "result_step": step})


def result_step(directory: Path) -> int | None:
    """Number of steps after which the result in the run directory was written; None: none was."""
    step = run_json(directory / RUN_NAME).get("result_step")
    return step if type(step) is int else None


def _tell(path: Path, values: Mapping[str, Any]) -> None:
    write_atomic(path, json.dumps(values, indent=1) + "\n")


def run_json(path: Path) -> dict[str, Any]:
    require_regular(path)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def run_table(told: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = told.get(key)
    return found if isinstance(found, dict) else {}


def run_starts(told: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The starts in ``run.json``; entries of another form are left out."""
    listed = told.get("starts")
    known = {"unix_s": (int, float), "step": (int,), "ranks": (int,)}
    return [
        one
        for one in (listed if isinstance(listed, list) else [])
        if isinstance(one, dict) and all(type(one.get(key)) in kinds for key, kinds in known.items())
    ]


def holds_run(run_dir: Path) -> bool:
    """Whether there is a run that has taken a step."""
    metrics = run_dir / METRICS_NAME
    has_metrics = metrics.exists() and metrics.stat().st_size > 0
    return has_metrics or any((run_dir / "checkpoints").glob("step-*.h5"))


def refuse_files_of_run(run_dir: Path, read: Iterable[Path]) -> None:
    """Raise UserError where a new run, which begins in the directory of an earlier one, reads files of that: the paths ``read``."""
    used = next(
        (path for path in read for name in _MOVED if path.resolve().is_relative_to((run_dir / name).resolve())), None
    )
    if used is not None:
        raise UserError(
            "run.files_in_use",
            f"a run that begins anew sets aside the run in its directory, {run_dir}, but this one reads {used} there: "
            "choose another directory with --run-dir, or go on with --resume.",
        )


def set_run_aside(run_dir: Path, own: Callable[[Mapping[str, Any]], bool]) -> Path:
    """Move the files of an earlier run; returns where they are now.

    ``own``: does an event belong to the new run? Raises UserError: its files cannot be moved.
    """
    moved, number = [name for name in _MOVED if (run_dir / name).exists()], 1
    while any((run_dir / f"set-aside-{number}" / name).exists() for name in moved):
        number += 1
    target = run_dir / f"set-aside-{number}"
    copied_only = not target.exists()
    try:
        target.mkdir(exist_ok=True)
        for name in _PLANNED:  # the new run may have been planned by them
            if (run_dir / name).exists():
                shutil.copy2(run_dir / name, target / name)
        if (run_dir / _LOGS).is_dir():  # open, and the new run's too
            shutil.copytree(run_dir / _LOGS, target / _LOGS, dirs_exist_ok=True)
        for name in moved:
            (run_dir / name).rename(target / name)
            copied_only = False
            if name == EVENTS_NAME:
                _bring_back(target / name, run_dir / name, own)
    except OSError as error:
        if copied_only:
            shutil.rmtree(target, ignore_errors=True)
        raise UserError(
            "run.not_archived",
            f"{run_dir} holds a run, which could not be moved to {target} ({error.strerror}): choose another directory with "
            "--run-dir, or go on with --resume.",
        ) from None
    return target


def _bring_back(source: Path, target: Path, own: Callable[[Mapping[str, Any]], bool]) -> None:
    """Bring the new run's events back, such as its supervisor's start. The supervisor may write more at this moment."""
    if mine := [line for line, values in objects(source) if own(values)]:
        lines = source.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        with target.open("a", encoding="utf-8") as file:
            file.writelines(mine)
        write_atomic(source, "".join(line for line in lines if line not in mine))


_OF_EVERY_START = ("hosts", "start", "ended", "end")


class EventLog:
    """A supervisor's events: lines with the time of day on stderr, and the same in ``RUN/events.jsonl``.

    In a directory that is used, they wait for one that shows more than a start that is refused or has nothing to do.

    ``supervisor``: its name, which is in all its events, and in the environment of its starts. Raises as ``opened_in``.
    """

    def __init__(self, run_dir: Path, supervisor: str) -> None:
        opened_in(run_dir, LOCK_NAME).close()  # the run looks as well, but events may be written before it starts
        self._supervisor, self._file = supervisor, LineFile(run_dir / EVENTS_NAME, _print)
        self._waiting: list[dict[str, Any]] = []
        self._waits, self._run = is_used(run_dir), run_dir / RUN_NAME
        self._before = _changed_ns(self._run)

    def tell(self, event: str, text: str, **values: Any) -> None:
        _print(text)
        self._waiting.append(as_event(event, text, {**values, "supervisor": self._supervisor}))
        if not self._waits or event not in _OF_EVERY_START or _changed_ns(self._run) != self._before:
            self._waits = False
            self._file.write(*self._waiting)
            self._waiting.clear()


def _changed_ns(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.exists() else None


def _print(text: str) -> None:
    clock = datetime.datetime.now().strftime("%H:%M:%S")
    write_text(f"launch {clock}: {text}\n", sys.stderr)
