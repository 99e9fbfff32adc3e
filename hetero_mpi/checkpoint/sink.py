"""The file that HDF5 writes to, as an object that never fails in front of it.

HDF5 does not survive a disk that is full: a close that fails leaves objects behind in the library, which crash the process
when it exits (seen with HDF5 2.0: a segmentation fault in H5D_close, after the run had ended well). So it is told that every
write has worked; the first that did not is remembered here, and the writer gives up its file as soon as it looks.

Beside training, memory may be nearly full. Pages that are not on the disk yet cannot be dropped, and the system counts those of a
control group with its processes: it would end one of them for the pages of a large file. So the disk takes a window at a time.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

WINDOW_BYTES = 64 << 20
"""So much of a file is in memory at most."""


class Sink:
    """What h5py asks of a file object, over a descriptor. Raises OSError only when the file cannot be made.

    Attributes:
        error: the first write that failed.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | getattr(os, "O_CLOEXEC", 0), 0o666)
        self._position = 0
        self._window = 0
        """Bytes written since the disk took all."""
        self.error: OSError | None = None

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: os.fstat(self._descriptor).st_size}[whence]
        self._position = start + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, count: int) -> bytes:
        return os.pread(self._descriptor, count, self._position)

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        found = self.read(len(view))
        view[: len(found)] = found
        view[len(found) :] = bytes(len(view) - len(found))  # what could not be written
        return len(view)

    def write(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        written = 0
        while written < len(view) and self.error is None:
            try:
                written += os.pwrite(self._descriptor, view[written:], self._position + written)
            except OSError as error:
                self.error = error
        self._window += written
        if self._window >= WINDOW_BYTES and self.error is None:
            self._empty_window()
        return len(view)

    def truncate(self, size: int) -> int:
        try:
            os.ftruncate(self._descriptor, size)
        except OSError as error:
            self.error = self.error or error
        return size

    def flush(self) -> None:
        """Nothing is held back here; ``sync`` is what makes it last."""

    def sync(self) -> None:
        """Return when everything is on the disk. Raises OSError if it is not, or something has failed before."""
        self.raise_error()
        os.fsync(self._descriptor)

    def _empty_window(self) -> None:
        """Return when everything is on the disk; where the system can, nothing is in memory any more."""
        self._window = 0
        try:
            os.fsync(self._descriptor)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            self.error = error

    def raise_error(self) -> None:
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Let go of the file. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
