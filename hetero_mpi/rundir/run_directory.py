"""The run directory: its lock, ``run.json``, events, and archiving of an earlier run.

* One run at a time holds the lock. If a run crashes, its lock is released.
* When a directory is reused, the files of the earlier run are archived in ``RUN/set-aside-1``, which is a run directory too. Every
  move is a rename within the run directory. The files that identify a run (metrics, then checkpoints) are moved last, so a crash
  between two moves loses nothing: the next start continues with the same target.

This module also writes the events of a supervisor to ``RUN/events.jsonl`` and to the supervisor's stderr.
"""

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
from typing import Any, Literal, TextIO

from hetero_mpi.rundir.line_files import EVENTS_NAME, METRICS_NAME, STEPS_NAME, LineFile, objects
from hetero_mpi.rundir.logs import write_line
from hetero_mpi.rundir.present import PRESENT_NAME
from hetero_mpi.util.background import warn_on_failure
from hetero_mpi.util.disk import lock, require_regular, write_atomic
from hetero_mpi.util.errors import UserError
from hetero_mpi.util.shipped import USED_PROFILE
from hetero_mpi.util.terminal import write_text

LOCK_NAME, RUN_NAME = ".lock", "run.json"
REPORT_NAME, SHARED_NAME, TRACE_NAME, EVALUATION_NAME = (
    "report.html",
    "report-shared.html",
    "trace.json",
    "evaluation.json",
)
SAMPLE_NAME = "sample.txt"
"""File with the text that the trained model generates at the end if the job requests a sample."""
START_VARIABLE = "HETERO_MPI_START"
"""Environment variable ``SUPERVISOR.NUMBER``, which is the same in all processes that a supervisor starts together."""
_WRITTEN_FOLDERS = ("", "adapter", "checkpoints", "copies", "logs", "model", "tensorboard", "wandb")
"""Directories into which a run writes, relative to the run directory, which is ""."""
_PLAN_FILES = ("profile.toml", "plan.toml", "architecture.png", "architecture.svg")
_LOGS = "logs"
_ARCHIVED = (
    "adapter", "model", SAMPLE_NAME, "simulation", "tensorboard", "wandb", REPORT_NAME, SHARED_NAME, TRACE_NAME, EVALUATION_NAME,
    "profile.png", USED_PROFILE, PRESENT_NAME,
    STEPS_NAME, EVENTS_NAME, RUN_NAME, METRICS_NAME, "checkpoints",
)  # fmt: skip
_FILES = {name for name in (LOCK_NAME, *_PLAN_FILES, *_ARCHIVED) if "." in name}
"""Names in a run directory that are files. All other names are directories."""


@contextlib.contextmanager
def claim(run_dir: str | Path, tell: Callable[[str], None] = write_line) -> Iterator[Path]:
    """Create the run directory and hold its lock during the block. Called only on rank 0.

    The operating system releases the lock when the process ends for any reason. The lock file names the holder during the block and
    remains afterwards, with its old modification time, so that a rejected start leaves no trace. If the file system has no locks,
    ``tell`` is called with a warning that a second run cannot be prevented.

    Raises UserError if another run, named in the message, holds the lock, or if the directory is not writable.
    """
    directory = Path(run_dir)
    with opened_in(directory, LOCK_NAME) as file:
        try:
            if not lock(file):
                tell(f"{directory}: its file system does not support file locking, so start only one run there")
        except BlockingIOError:
            raise UserError(
                "run.in_use",
                f"a run directory is for one run at a time; {directory} is in use by {_holder(file)}. "
                "Wait for that run, stop it, or choose another directory (--run-dir, run_dir=).",
            ) from None
        before = os.stat(file.fileno())
        file.truncate(0)
        started = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        holder = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "started": started}) + "\n"
        with contextlib.suppress(OSError):  # on a full disk the lock still works
            os.write(file.fileno(), holder.encode())
        try:
            yield directory
        finally:
            file.truncate(0)
            os.utime(file.fileno(), ns=(before.st_atime_ns, before.st_mtime_ns))


def is_used(run_dir: Path) -> bool:
    """Return whether the directory contains anything other than its lock file."""
    return run_dir.is_dir() and any(path.name != LOCK_NAME for path in run_dir.iterdir())


def opened_in(run_dir: Path, name: str) -> TextIO:
    """Open a file in the run directory for reading and appending. The directory is created if necessary.

    Raises UserError if the directory cannot be created or written, or if it contains a link that leads out of it.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        refuse_links(run_dir)
        return (run_dir / name).open("a+", encoding="utf-8")
    except OSError as error:
        raise UserError(
            "run.unwritable",
            f"the run directory must be a writable directory; {run_dir} is not: {error.strerror}. "
            "Choose another (output.run_dir, --run-dir).",
        ) from None


def refuse_links(run_dir: str | Path) -> None:
    """Raise UserError if a run directory contains a link that leads out of it or an entry of the wrong type.

    This is a local check, because each host has its own directory.
    """
    home = Path(run_dir).resolve()
    for name in _WRITTEN_FOLDERS:
        folder = home / name
        for path in (folder, *(folder.iterdir() if folder.is_dir() else ())):
            if path.is_symlink() and not path.resolve().is_relative_to(home):
                raise UserError(
                    "run.link",
                    f"a run writes only into its run directory, but {path} is a link to {path.resolve()}, outside it. Remove the "
                    f"link, or set --run-dir to a directory there.",
                )
            if not path.is_dir() or (folder == home and path.name in _FILES):
                require_regular(path)
            if path == folder and path.exists() and not path.is_dir():
                raise UserError(
                    "run.not_a_directory",
                    f"{path}: must be a directory, but is a file: remove it, or choose another --run-dir",
                )


def _holder(file: TextIO) -> str:
    file.seek(0)
    try:
        holder = json.loads(file.read())
        return f"process {holder['pid']} on {holder['host']}, started {holder['started']}"
    except (ValueError, LookupError, TypeError, RecursionError):
        return "another process"  # it holds the lock and is about to write its name


def append_event(run_dir: Path, event: str, text: str, **values: Any) -> None:
    """Append an event of the run itself, as opposed to its supervisor. A failure to write does not end the run."""
    with warn_on_failure(f"writing {EVENTS_NAME}"):
        LineFile(run_dir / EVENTS_NAME).write(as_event(event, text, values))


def as_event(event: str, text: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {"unix_s": round(time.time(), 3), "event": event, "text": text, **values}


def own_event(values: Mapping[str, Any]) -> bool:
    """Return whether an event belongs to this process's run: its supervisor wrote it, or it is newer than this process."""
    import psutil  # doctor runs before psutil is installed

    supervisor = os.environ.get(START_VARIABLE, "").partition(".")[0]
    written_s = values.get("unix_s")
    if not isinstance(written_s, (int, float)):
        return False
    return written_s >= psutil.Process().create_time() or bool(supervisor and values.get("supervisor") == supervisor)


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
    """Write ``run.json`` when training starts from ``step``. Earlier starts of a resumed run are retained."""
    path = directory / RUN_NAME
    starts = [entry for entry in run_starts(run_json(path)) if step > 0 and entry["step"] <= step]
    start = {"unix_s": round(time.time(), 3), "step": step, "ranks": ranks, "skipped_records": skipped_records}
    starts.append(start)
    values = {"name": name, "job_file": job_file, "job": job, "versions": dict(versions), "starts": starts}
    _write_run_json(path, {**values, "run_id": run_id, "last_step": run_table(job, "train").get("steps", 0)})


def note_step(directory: Path, what: Literal["last_step", "result_step"], step: int) -> None:
    """Record in ``run.json`` that training ended after ``step`` steps, or that the result of training for ``step`` is complete."""
    path = directory / RUN_NAME
    _write_run_json(path, {**run_json(path), what: step})


def result_step(directory: Path) -> int | None:
    """Return the number of steps after which the run wrote its result, or None if there is no result."""
    step = run_json(directory / RUN_NAME).get("result_step")
    return step if type(step) is int else None


def _write_run_json(path: Path, values: Mapping[str, Any]) -> None:
    write_atomic(path, json.dumps(values, indent=1) + "\n")


def run_json(path: Path) -> dict[str, Any]:
    require_regular(path)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def run_table(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    table = values.get(key)
    return table if isinstance(table, dict) else {}


def run_starts(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the valid starts listed in ``run.json``."""
    listed = values.get("starts")
    types_by_key = {"unix_s": (int, float), "step": (int,), "ranks": (int,)}
    return [
        entry
        for entry in (listed if isinstance(listed, list) else [])
        if isinstance(entry, dict) and all(type(entry.get(key)) in kinds for key, kinds in types_by_key.items())
    ]


def holds_run(run_dir: Path) -> bool:
    """Return whether the directory contains a run that has completed at least one step."""
    metrics = run_dir / METRICS_NAME
    has_metrics = metrics.exists() and metrics.stat().st_size > 0
    return has_metrics or any((run_dir / "checkpoints").glob("step-*.h5"))


def refuse_files_of_run(run_dir: Path, read: Iterable[Path]) -> None:
    """Raise UserError if any of the paths that a new run will ``read`` belongs to the earlier run in its directory."""
    used = next(
        (path for path in read for name in _ARCHIVED if path.resolve().is_relative_to((run_dir / name).resolve())), None
    )
    if used is not None:
        raise UserError(
            "run.files_in_use",
            f"a new run archives the earlier run in its directory, {run_dir}, but this run reads {used} there: choose another "
            f"directory (--run-dir, run_dir=), or resume the earlier run (--resume, resume=).",
        )


def set_run_aside(run_dir: Path, is_own: Callable[[Mapping[str, Any]], bool]) -> Path:
    """Archive the files of an earlier run and return the directory with the archived files.

    ``is_own`` tells whether an event belongs to the new run. Raises UserError if the files cannot be moved.
    """
    entries, number = [name for name in _ARCHIVED if (run_dir / name).exists()], 1
    files = (*run_dir.glob("*/results_*.json"), *run_dir.glob("checkpoint-*/step-*.h5"))  # of evaluations, of trainers
    entries += sorted({file.parent.name for file in files} - {*entries})
    while any((run_dir / f"set-aside-{number}" / name).exists() for name in entries):
        number += 1
    target = run_dir / f"set-aside-{number}"
    copied_only = not target.exists()
    try:
        target.mkdir(exist_ok=True)
        for name in _PLAN_FILES:  # the new run may have been planned with them
            if (run_dir / name).exists():
                shutil.copy2(run_dir / name, target / name)
        if (run_dir / _LOGS).is_dir():  # open, and also the new run's
            shutil.copytree(run_dir / _LOGS, target / _LOGS, dirs_exist_ok=True)
        for name in entries:
            (run_dir / name).rename(target / name)
            copied_only = False
            if name == EVENTS_NAME:
                _restore_own_events(target / name, run_dir / name, is_own)
    except OSError as error:
        if copied_only:
            shutil.rmtree(target, ignore_errors=True)
        raise UserError(
            "run.not_archived",
            f"{run_dir} contains a run, which could not be moved to {target} ({error.strerror}): choose another directory "
            "(--run-dir, run_dir=), or resume the earlier run (--resume, resume=).",
        ) from None
    return target


def _restore_own_events(source: Path, target: Path, is_own: Callable[[Mapping[str, Any]], bool]) -> None:
    """Move events of the new run back, such as the start of its supervisor, which may be writing at the same time."""
    if own_lines := [line for line, values in objects(source) if is_own(values)]:
        lines = source.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        with target.open("a", encoding="utf-8") as file:
            file.writelines(own_lines)
        write_atomic(source, "".join(line for line in lines if line not in own_lines))


_ROUTINE_EVENTS = ("hosts", "start", "ended", "end")


class EventLog:
    """Writes a supervisor's events as timestamped lines to stderr and as JSON objects to ``RUN/events.jsonl``.

    In a used directory, events are buffered until it is clear that a start was not rejected and has something to do.

    All events contain the name ``supervisor``, and so does ``START_VARIABLE``. Raises UserError like ``opened_in``.
    """

    def __init__(self, run_dir: Path, supervisor: str) -> None:
        opened_in(run_dir, LOCK_NAME).close()  # the run checks too, but events may be written before it starts
        self._supervisor, self._file = supervisor, LineFile(run_dir / EVENTS_NAME, _print)
        self._waiting: list[dict[str, Any]] = []
        self._waits, self._run = is_used(run_dir), run_dir / RUN_NAME
        self._before = _changed_ns(self._run)

    def report(self, event: str, text: str, **values: Any) -> None:
        _print(text)
        self._waiting.append(as_event(event, text, {**values, "supervisor": self._supervisor}))
        if not self._waits or event not in _ROUTINE_EVENTS or _changed_ns(self._run) != self._before:
            self._waits = False
            self._file.write(*self._waiting)
            self._waiting.clear()


def _changed_ns(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.exists() else None


def _print(text: str) -> None:
    clock = datetime.datetime.now().strftime("%H:%M:%S")
    write_text(f"launch {clock}: {text}\n", sys.stderr)
