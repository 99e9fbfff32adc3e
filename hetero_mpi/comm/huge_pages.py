"""Host memory in huge pages, for buffers that MPI copies between processes.

Within a host, MPI libraries let the kernel copy a long message page by page from one process to the other. With 2 MiB pages, the
copy is two to three times as fast as with 4 KiB pages (benchmarks/RESULTS.md). Linux provides huge pages for aligned memory on
request. On other systems this module returns ordinary memory.
"""

import mmap
import sys

import numpy as np
from numpy.typing import NDArray

PAGE_BYTES = 2 << 20
MIN_HUGE_PAGE_BYTES = 1 << 20
"""Minimum size of a buffer in huge pages. Smaller buffers do not benefit."""


def empty(size_bytes: int) -> NDArray[np.uint8]:
    """Allocate ``size_bytes`` of uninitialised memory, which stays valid while the array or a view of it exists."""
    if size_bytes < MIN_HUGE_PAGE_BYTES or sys.platform != "linux" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.empty(size_bytes, np.uint8)
    pages = -(-size_bytes // PAGE_BYTES) + 1
    memory = mmap.mmap(-1, pages * PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without huge pages: slower, same result
        return np.empty(size_bytes, np.uint8)
    page_memory = np.frombuffer(memory, np.uint8)
    aligned_start = -page_memory.ctypes.data % PAGE_BYTES
    return page_memory[aligned_start : aligned_start + size_bytes]
