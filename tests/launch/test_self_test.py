"""``doctor --selftest`` and the test at the start of a run: a GPU that computes wrongly, crashes or hangs is found and named.

The GPU is the stand-in, in the processes that the program starts; ``STAND_IN_GPU_FAULT`` spoils one of its operators.
"""

import json
import os
import socket
import sys
from pathlib import Path

import pytest
import torch

from hetero_mpi.device.backend import Backend
from hetero_mpi.device.backends import Accelerator
from hetero_mpi.device.backends.cuda import CudaBackend
from hetero_mpi.device.operators import product_on
from hetero_mpi.device.self_test import Result, SelfTest, self_test, text_of
from hetero_mpi.launch.doctor.host_facts import devices_to_test
from tests.stand_in_gpu import build
from tests.support.long_run import LongRun
from tests.support.mpi import run_bounded

pytestmark = pytest.mark.slow

needs_gpu = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
FAULT = "STAND_IN_GPU_FAULT"


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Processes started from here see two GPUs."""
    here = Path(build.__file__).parent
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(here / "site"), str(here.parents[1])]))
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    build.built()
    return monkeypatch


@needs_gpu
def test_a_gpu_that_computes_rightly_passes_and_its_copies_are_timed(gpus: pytest.MonkeyPatch) -> None:
    test = self_test("cuda", 1)
    assert not test.problems, text_of(test, "")
    names = [result.check for result in test.results]
    assert {"AdamW", "product fp32", "attention bf16", "masked attention fp16", "NF4 product bf16", "copies"} <= set(
        names
    )
    speeds = test.results[-1].speeds
    assert len(speeds) == 5 and all(speed > 0 for speed in speeds.values())
    text = "\n".join(text_of(test, "driver 580"))
    assert "stand-in GPU 1" in text and torch.__version__ in text and "driver 580" in text
    assert socket.gethostname() not in text.split() and str(Path.home()) not in text and sys.prefix not in text


@needs_gpu
@pytest.mark.parametrize(
    ("fault", "check", "problem", "remedy"),
    [
        pytest.param(
            "aten::_softmax_backward_data nan",
            "attention fp32",
            "gradient of queries is not finite",
            "pytorch#160787",
            marks=pytest.mark.long,
        ),
        ("aten::mm wrong", "product fp32", "differs by", "driver"),
        ("aten::_fused_adamw_ crash", "AdamW", "ended by SIGSEGV", "driver"),
    ],
)
def test_a_faulty_operator_is_found_and_named(
    gpus: pytest.MonkeyPatch, fault: str, check: str, problem: str, remedy: str
) -> None:
    gpus.setenv(FAULT, f"0 {fault}")
    gpus.setenv("STAND_IN_GPU_DTYPES", "fp32")
    test = self_test("cuda", 0)
    assert test.problems[0].startswith(f"{check}: ") and problem in test.problems[0]
    assert remedy in test.remedy()


@needs_gpu
@pytest.mark.long
def test_an_operator_that_hangs_is_found_and_its_process_killed(gpus: pytest.MonkeyPatch) -> None:
    gpus.setenv(FAULT, "0 aten::mm hang")
    gpus.setenv("STAND_IN_GPU_DTYPES", "fp32")
    test = self_test("cuda", 0, patience_s=45)
    assert test.problems == ["product fp32: no result within 45 s; its process was killed"]


def test_a_device_that_does_not_open_is_a_result() -> None:
    test = self_test("xpu", 0)
    assert [result.check for result in test.results] == ["opening the device"] and test.problems


def test_shortage_of_memory_is_no_fault() -> None:
    test = SelfTest("cuda", 0, results=(Result("product fp32", error="CUDA out of memory", short=True),))
    assert not test.problems
    assert "no memory left to try it" in text_of(test, "")[1]


def test_a_gpu_without_kernels_needs_another_torch() -> None:
    said = "CUDA error: no kernel image is available for execution on the device"
    results = (Result("attention fp32", error=said),)
    assert "which GPU" in SelfTest("cuda", 0, results=results).remedy()
    assert "HSA_OVERRIDE_GFX_VERSION" in SelfTest("rocm", 0, results=results).remedy(), "a GPU inside a processor"


def test_directories_of_a_message_are_not_published(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "hetero_mpi").mkdir()  # a package in which there is nothing to run
    (tmp_path / "hetero_mpi" / "__init__.py").write_text("raise RuntimeError(f'cannot load {__file__}')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (problem,) = self_test("cpu", 0).problems
    assert "cannot load __init__.py" in problem and str(tmp_path) not in problem


def test_the_processor_is_tested_where_there_is_no_gpu() -> None:
    cpu, gpu = {"backend": "cpu", "index": 0}, {"backend": "cuda", "index": 1}
    assert devices_to_test({"devices": [gpu, cpu]}) == [("cuda", 1)]
    assert devices_to_test({"devices": [cpu]}) == [("cpu", 0)]
    assert devices_to_test({"error": "no torch"}) == []
    test = self_test("cpu", 0)
    assert not test.problems, text_of(test, "")


@needs_gpu
@pytest.mark.long
def test_doctor_goes_on_with_the_next_device(gpus: pytest.MonkeyPatch) -> None:
    variables = {**os.environ, FAULT: "0 aten::_softmax crash", "STAND_IN_GPU_DTYPES": "fp32", "OMP_NUM_THREADS": "1"}
    result = run_bounded([sys.executable, "-m", "hetero_mpi", "doctor", "--selftest", "--json"], variables, 240)
    assert result.returncode == 1, result.stdout + result.stderr
    found = [one for one in json.loads(result.stdout)["findings"] if one["subject"] == "self-test"]
    assert [one["severity"] for one in found] == ["FAIL", "ok"]
    assert "cuda:0" in found[0]["text"] and "attention fp32: its process was ended by SIGSEGV" in found[0]["text"]
    assert "cuda:1" in found[1]["text"]


class Doubling(Backend):
    """A device on which everything is twice as large."""

    def from_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return 2 * tensor


class Refusing(Backend):
    """A device whose driver refuses."""

    def from_host(self, tensor: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no kernel image is available")


def test_a_start_compares_one_product() -> None:
    before = torch.random.get_rng_state()
    assert product_on(Backend()).problem == ""
    assert product_on(Doubling()).worst == pytest.approx(3.0), "4 x as large"
    refused = product_on(Refusing())
    assert "RuntimeError" in refused.problem and refused.worst is None
    assert torch.equal(before, torch.random.get_rng_state())


@needs_gpu
@pytest.mark.long
def test_the_start_of_a_run_refuses_a_faulty_gpu_or_computes_on_the_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(FAULT, "0 aten::mm nan")
    job = LongRun(tmp_path, 2, "tests.stand_in_gpu")
    result = job.finish(tmp_path / "auto", 2, "--set", "train.dtype=fp32")
    said = f"cuda:0 of rank 0 on {socket.gethostname()}"
    assert result.returncode == 0 and said in result.stdout, result.stdout + result.stderr
    assert (
        "product fp32: output is not finite" in result.stdout
        and "the rank computes on the CPU instead" in result.stdout
    )
    monkeypatch.setenv("HETERO_MPI_DEVICE", "cuda")
    result = job.finish(tmp_path / "asked", 2, "--set", "train.dtype=fp32")
    assert result.returncode == 2 and said in result.stderr and "doctor --selftest" in result.stderr


def test_cudnn_does_not_compute_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Accelerator, "make_current", lambda self: None)
    torch.backends.cuda.enable_cudnn_sdp(True)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    CudaBackend(0).make_current()
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("variable", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
@pytest.mark.parametrize("works", [True, False])
def test_cudas_allocator_expands_blocks_where_it_can_and_the_user_says_nothing(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, works: bool
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv(variable, "garbage_collection_threshold:0.8")

    def empty(size: int, device: torch.device) -> None:
        if not works:
            raise RuntimeError("CUDA driver error: operation not supported")

    settings: list[str] = []
    assert callable(torch._C._accelerator_setAllocatorSettings)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(Accelerator, "make_current", lambda self: None)
    CudaBackend(0).make_current()
    tried = ["expandable_segments:True"] if works else ["expandable_segments:True", "expandable_segments:False"]
    assert settings == (tried if variable is None and sys.platform == "linux" else [])
