"""Processors without products in bf16 or fp16: this one, told to use AVX2 only, as torch reads when it is imported."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import pytest
import torch

from hetero_mpi.device import products
from hetero_mpi.device.accelerators import best_dtype
from hetero_mpi.device.backend import Backend
from hetero_mpi.device.backends import Accelerator
from hetero_mpi.device.backends.cuda import CudaBackend
from hetero_mpi.device.backends.rocm import RocmBackend
from hetero_mpi.rundir.metrics import read_metrics
from tests.support.long_run import LongRun
from tests.support.mpi import require_success, run_bounded
from tests.support.products_checks import ALONE, settle_products

AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
x86 = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="only x86 can be told to use AVX2 only")


@pytest.mark.slow
@x86
def test_products_in_fp32() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/support/products_checks.py"]
    result = require_success(run_bounded(command, {**os.environ, **AVX2, "OMP_NUM_THREADS": "1"}, 300))
    assert " passed" in result.stdout and "skipped" not in result.stdout, result.stdout


@pytest.mark.skipif(not products.has_products("bf16"), reason="this processor has no products in bf16")
def test_nothing_is_replaced_where_the_processor_has_them() -> None:
    settle_products(ALONE, Backend(), "bf16")
    assert not products._libraries


def test_cpus_alone_compute_in_fp32_and_are_offered_bf16_where_it_is_faster() -> None:
    cpus, setting = [("cpu", ["fp32", "bf16", "fp16"])] * 2, 'dtype = "bf16"'
    (dtype, reason), (faster_dtype, offer) = best_dtype(cpus), best_dtype(cpus, faster_in_bf16=True)
    assert dtype == faster_dtype == "fp32" and setting in offer and setting not in reason
    assert best_dtype([*cpus, ("cuda", ["fp32", "bf16"])], faster_in_bf16=True) == best_dtype([("mps", ["bf16"])])


@pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="reads the flags of Linux on x86")
def test_bf16_is_faster_where_the_processor_has_units_for_it() -> None:
    flags = set(Path("/proc/cpuinfo").read_text().split()) & {"avx512_bf16", "amx_bf16"}
    assert products.is_faster_in_bf16() is bool(flags)
    code = "from hetero_mpi.device import products; print(products.is_faster_in_bf16())"
    assert run_bounded([sys.executable, "-c", code], {**os.environ, **AVX2}, 120).stdout.split() == ["False"]


@pytest.mark.parametrize("kind", [CudaBackend, RocmBackend])
def test_gpus_multiply_in_the_dtype_they_are_asked_for(
    kind: type[Accelerator], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:native")  # settled: no block is tried
    matrices = torch.backends.cuda.matmul
    sums = [f"allow_{dtype}_reduced_precision_reduction" for dtype in ("bf16", "fp16")]
    flags = [(torch.backends.cudnn, "allow_tf32"), (matrices, "allow_tf32"), *((matrices, name) for name in sums)]
    for holder, name in flags:
        setattr(holder, name, True)
    kind(0).make_current()
    assert not any(getattr(holder, name) for holder, name in flags)


@x86
@pytest.mark.long
def test_a_job_in_bf16_says_it_and_learns_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = LongRun(tmp_path, 2)
    plain = job.finish(tmp_path / "plain", 4, "--set", "train.dtype=bf16")
    for name, value in AVX2.items():
        monkeypatch.setenv(name, value)
    narrow = job.finish(tmp_path / "narrow", 4, "--set", "train.dtype=bf16")
    assert plain.returncode == narrow.returncode == 0, plain.stdout + plain.stderr + narrow.stdout + narrow.stderr
    told = "rank 0, 1: matrix products use fp32, because the CPU has no bf16 kernels"
    assert narrow.stdout.count(told) == 1
    assert (told in plain.stdout) is not products.has_products("bf16")
    losses = [
        [line.loss for line in read_metrics(tmp_path / run / "metrics.jsonl").steps] for run in ("plain", "narrow")
    ]
    assert len(losses[1]) == 4 and losses[1] == pytest.approx(losses[0], rel=2e-3)
