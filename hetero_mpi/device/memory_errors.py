"""Whether an error means that memory was short, whoever says it."""

from __future__ import annotations

import torch

_SIGNS = (
    "not enough memory",
    "can't allocate memory",
    "Cannot allocate memory",
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "HIPBLAS_STATUS_ALLOC_FAILED",
    "UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY",
    "UR_RESULT_ERROR_OUT_OF_HOST_MEMORY",
    "UR_RESULT_ERROR_OUT_OF_RESOURCES",
    "Invalid buffer size",
)
"""What allocators, libraries beneath torch and drivers put into a plain RuntimeError: CPU, cuBLAS, cuDNN, SYCL (XPU), Metal."""


def is_out_of_memory(error: BaseException) -> bool:
    """Does the error mean that memory was short?"""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)
