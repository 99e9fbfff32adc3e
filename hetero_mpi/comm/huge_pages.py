"""Host memory in large pages, for buffers that MPI copies from process to process.

Within one host MPI libraries let the kernel copy a long message from one process's pages to the other's, page by page. With pages
of 2 MiB that is two to three times as fast as with 4 KiB (benchmarks/LOG.md). Linux gives large pages to memory that begins at a
multiple of their size and asks for them. On other systems this is ordinary memory.
"""

from __future__ import annotations

import mmap
import sys

import numpy as np
from numpy.typing import NDArray

PAGE_BYTES = 2 << 20
MIN_HUGE_PAGE_BYTES = 1 << 20
"""Shorter buffers are not worth a large page."""


def empty(size_bytes: int) -> NDArray[np.uint8]:
    """Uninitialised memory of ``size_bytes``; it lives as long as the array or a view of it."""
    if size_bytes < MIN_HUGE_PAGE_BYTES or sys.platform != "linux" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.empty(size_bytes, np.uint8)
    pages = -(-size_bytes // PAGE_BYTES) + 1
    memory = mmap.mmap(-1, pages * PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without large pages: slower, no less right
        return np.empty(size_bytes, np.uint8)
    page_memory = np.frombuffer(memory, np.uint8)
    aligned_start = -page_memory.ctypes.data % PAGE_BYTES
    return page_memory[aligned_start : aligned_start + size_bytes]
