"""Atomic file writes, locks and free space on any file system, and rejection of files that would block a reader."""

import contextlib
import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from hetero_mpi.util.errors import UserError

PROCESS_MARK = os.urandom(4).hex()
"""Part of the names of this process's temporary files. Files with a different mark may be left over from a killed process."""
SPARE_BYTES = 100_000_000
"""Disk space that caches and files backing memory must leave free."""
MIN_FREE_BYTES = 1_000_000
"""Disk space needed to start a run: Open MPI 5.0.11 wrote 100 kB for 2 ranks and 190 kB for 16."""
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.EPERM, errno.EEXIST}
"""Errors from file systems that lack a feature, such as NFS without its lock daemon, Lustre without ``-o flock``, and FUSE."""


def cache_folder(kind: str = "") -> Path:
    """Return this user's cache folder for one kind of reproducible data, such as ``profiles`` or ``tokens``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hetero_mpi" / kind


@contextlib.contextmanager
def atomic_write(path: Path, durable: bool = False) -> Iterator[Path]:
    """Yield the path of a temporary file, which replaces ``path`` if the block succeeds. Otherwise ``path`` is unchanged.

    If ``durable`` is true, the new file survives a power loss once the block has ended.
    """
    temporary = path.with_name(f".{path.name}.tmp-{os.urandom(2).hex()}-{PROCESS_MARK}")
    try:
        yield temporary
        if durable:
            sync(temporary)
        _replace(temporary, path)
        if durable:
            sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomic(path: Path, content: str | bytes, durable: bool = False, make_folder: bool = False) -> None:
    """Write ``content`` (strings as UTF-8) to ``path`` with ``atomic_write``. Raises OSError."""
    if make_folder:
        path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path, durable) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def write_errors(path: Path, remedy: str = "choose another path with -o") -> Iterator[None]:
    """Turn an OSError in a block that writes ``path`` into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError("file.unwritable", f"{path}: cannot be written ({error.strerror}); {remedy}") from error


def sync(path: Path) -> None:
    """Flush (fsync) a file or directory. Syncing a directory makes renames in it durable where the file system supports that."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not (path.is_dir() and error.errno in _UNSUPPORTED):
            raise
    finally:
        os.close(descriptor)


def _replace(new: Path, path: Path) -> None:
    """Rename ``new`` to ``path``, in two steps if the file system cannot replace an existing file."""
    try:
        os.replace(new, path)
    except OSError as error:
        if error.errno not in _UNSUPPORTED or not path.is_file():
            raise
        backup = path.with_name(f"{new.name}-former")
        os.rename(path, backup)
        try:
            os.rename(new, path)
        except OSError:
            os.rename(backup, path)
            raise
        backup.unlink()


def lock(file: IO[str]) -> bool:
    """Lock a file until the process ends. Returns False if the file system has no locks; raises BlockingIOError if locked."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        return False
    return True


def free_bytes(path: Path) -> int:
    """Return the free bytes on the disk that contains, or would contain, ``path``. Raises OSError."""
    path = path.absolute()
    return shutil.disk_usage(next(folder for folder in (path, *path.parents) if folder.exists())).free


def temporary_folder() -> Path:
    """Return the folder in which programs on this machine, including launchers, create temporary files."""
    return Path(next((folder for name in ("TMPDIR", "TEMP", "TMP") if (folder := os.environ.get(name))), "/tmp"))


def folder_space(path: Path, must_exist: bool = False) -> dict[str, Any]:
    """Check a folder; return JSON-serialisable ``path``, ``free_bytes``, and the ``problem`` that prevents writing, or "".

    If ``must_exist`` is false, a folder that a run could create is accepted.
    """
    path, free_space, problem = path.absolute(), 0, ""
    try:
        free_space = free_bytes(path)
        parent = path if must_exist else next(folder for folder in (path, *path.parents) if folder.exists())
        if free_space < MIN_FREE_BYTES:
            problem = f"has {free_space / 1e6:.1f} MB of free space; a run needs at least {MIN_FREE_BYTES / 1e6:.0f} MB"
        elif not os.access(parent, os.W_OK | os.X_OK):
            problem = "cannot be written" if parent == path else f"cannot be created: no write permission in {parent}"
    except OSError as error:
        problem = f"cannot be used ({error.strerror})"
    return {"path": str(path), "free_bytes": free_space, "problem": problem}


def require_regular(path: Path) -> None:
    """Raise UserError for a directory, device, pipe or socket without opening it, because opening or reading it may block.

    A missing path is accepted; the code that opens it reports the error.
    """
    try:
        mode = path.stat().st_mode
    except OSError:
        return
    if stat.S_ISREG(mode):
        return
    kinds = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    kind, hint = kinds.get(stat.S_IFMT(mode), "a device"), ""
    if stat.S_ISFIFO(mode):  # such as the shell's <(...) and /dev/stdin
        hint = "; it is read more than once, so write its output to a file first"
    raise UserError("file.not_regular", f"{path}: must be a regular file, but is {kind}{hint}")
