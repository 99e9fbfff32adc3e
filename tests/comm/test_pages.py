"""Host memory in large pages."""

import gc
import sys

import numpy as np
import pytest
import torch

from hetero_mpi.comm import huge_pages
from hetero_mpi.device.accelerators import open_backend
from hetero_mpi.device.backend import HOST


@pytest.mark.parametrize(
    "size", [0, 1, huge_pages.MIN_HUGE_PAGE_BYTES - 1, huge_pages.MIN_HUGE_PAGE_BYTES, 3 * huge_pages.PAGE_BYTES + 5]
)
def test_memory_is_as_long_as_asked_and_can_be_written(size: int) -> None:
    memory = huge_pages.empty(size)
    assert memory.shape == (size,) and memory.flags.writeable and memory.flags.c_contiguous
    memory.fill(7)
    assert int(memory.sum(dtype=np.int64)) == 7 * size


@pytest.mark.skipif(sys.platform != "linux", reason="large pages are asked for on Linux only")
def test_long_buffers_begin_at_a_large_page() -> None:
    assert all(
        huge_pages.empty(huge_pages.MIN_HUGE_PAGE_BYTES + i).ctypes.data % huge_pages.PAGE_BYTES == 0 for i in range(3)
    )


def test_a_view_keeps_the_memory_alive() -> None:
    views = []
    for value in range(20):
        memory = huge_pages.empty(4 * huge_pages.PAGE_BYTES)
        memory.fill(value)
        views.append(memory[-1000:])
        del memory
    gc.collect()
    assert [int(view[0]) for view in views] == list(range(20)) and all((view == view[0]).all() for view in views)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buffers_of_a_cpu_rank_are_such_memory(dtype: torch.dtype) -> None:
    buffer = open_backend("cpu", 0).host_buffer((3, 1000, 1000), dtype)
    assert buffer.shape == (3, 1000, 1000) and buffer.dtype == dtype and buffer.device == HOST
    assert buffer.data_ptr() % huge_pages.PAGE_BYTES == 0 or sys.platform != "linux"
    assert open_backend("cpu", 0).host_buffer((0, 4), dtype).numel() == 0
