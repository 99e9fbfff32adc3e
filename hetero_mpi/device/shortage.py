"""Out of memory: counts processes that the kernel has killed and recognises OOM errors. Imports torch only for the latter."""

from pathlib import Path

from hetero_mpi.util.host_limits import read_counter


def memory_kills(counters: Path = Path("/proc/vmstat")) -> int:
    """Return how many processes the OOM killer has killed since boot, or 0 without this counter (Linux has it from 4.13 on)."""
    return read_counter(counters, "oom_kill")


def memory_kills_text(kills: dict[str, int]) -> str:
    """Describe OOM kills, given the number of killed processes on each host. Returns "" if there were none."""
    lines = [
        f"the kernel on {host} killed {count} process{'es' if count > 1 else ''} because it ran out of memory"
        for host, count in kills.items()
        if count > 0
    ]
    if not lines:
        return ""
    return (
        f"{', '.join(lines)} meanwhile (`oom_kill` in /proc/vmstat). Raise the cgroup memory limit (SLURM: --mem; Docker: "
        "--memory), stop other programs on that host, or lower the planner's memory budget: --set plan.memory_reserve=0.2, or "
        "--set cluster.memory_bytes=8000000000 per rank"
    )


_OOM_PHRASES = (
    "not enough memory", "can't allocate memory", "Cannot allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED", "HIPBLAS_STATUS_ALLOC_FAILED", "UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY",
    "UR_RESULT_ERROR_OUT_OF_HOST_MEMORY", "UR_RESULT_ERROR_OUT_OF_RESOURCES", "Invalid buffer size",
)  # fmt: skip
"""Phrases that mean out of memory in a RuntimeError from an allocator, driver or library: CPU, cuBLAS, cuDNN, SYCL, Metal."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error, from whatever library, means out of memory."""
    import torch

    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _OOM_PHRASES)
