"""Which devices are used, how, and with which dtypes, tried on GPUs made of host memory and on made-up ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hetero_mpi.device.accelerators import open_backend, usable, visible_devices
from hetero_mpi.device.backend import Backend
from hetero_mpi.device.backends import Accelerator
from hetero_mpi.device.backends.cuda import has_kernels
from hetero_mpi.device.backends.mps import MpsBackend
from hetero_mpi.device.backends.rocm import RocmBackend
from hetero_mpi.device.backends.xpu import XpuBackend
from hetero_mpi.device.device_probe import devices_seen
from tests.stand_in_gpu.backend import StandIn
from tests.support.errors import refuses


@pytest.mark.parametrize("shared, repeated, shares", [(1, 1, True), (0, 2, False), (0, 0, True)])
def test_keys_are_shared_unless_torch_has_a_fused_kernel_for_repeated_ones_only(
    gpu: Backend, monkeypatch: pytest.MonkeyPatch, shared: int, repeated: int, shares: bool
) -> None:
    assert gpu.shares_keys(torch.bfloat16)  # as the host's kernels have it

    def choice(query: torch.Tensor, key: torch.Tensor, *rest: Any, enable_gqa: bool) -> int:
        assert key.device == gpu.device and key.dtype == torch.float32
        assert query.shape[1] == (2 if enable_gqa else 1) * key.shape[1]
        return shared if enable_gqa else repeated

    monkeypatch.setattr(torch, "_fused_sdp_choice", choice)
    assert gpu.shares_keys(torch.float32) is shares


def test_a_device_that_cannot_be_asked_hides_no_other(standin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(self: StandIn) -> Any:
        if self.index == 0:
            raise RuntimeError("CUDA error: all CUDA-capable devices\nare busy or unavailable")
        return Accelerator._free_memory(self)

    monkeypatch.setattr(StandIn, "_free_memory", asked)
    seen = devices_seen()
    assert [(device["backend"], device["index"]) for device in seen["devices"]] == [("cuda", 1), ("cpu", 0)]
    assert seen["errors"] == {"cuda:0": "CUDA error: all CUDA-capable devices are busy or unavailable"}


def test_a_device_without_kernels_is_nobodys(standin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StandIn, "unusable", classmethod(lambda cls: {0: "it is too old for this torch"}))
    assert usable("cuda") == (1,) and list(visible_devices("auto")[1]) == [1]
    assert devices_seen()["errors"] == {"cuda:0": "it is too old for this torch"}
    assert open_backend("auto", None).name == "cpu"
    with refuses("device.unusable"):
        open_backend("cuda", 0)
    monkeypatch.setattr(StandIn, "only_by_name", classmethod(lambda cls: {1}))
    assert visible_devices("cuda") == ("cuda", {})
    assert open_backend("cuda", 1).index == 1


@pytest.mark.parametrize(
    "capability, built, works",
    [
        ((6, 1), ("sm_75", "sm_80", "sm_90", "sm_120"), False),  # a P40 and today's default wheel
        ((5, 2), ("sm_50", "sm_60", "sm_70"), True),
        ((7, 0), ("sm_75", "compute_75"), False),
        ((8, 9), ("sm_80", "sm_90"), True),
        ((12, 1), ("sm_90", "sm_120"), True),
        ((13, 0), ("sm_90a", "compute_120"), True),
        ((9, 0), ("sm_90a",), True),
        ((8, 6), (), True),
    ],
)
def test_kernels_for_a_compute_capability(capability: tuple[int, int], built: tuple[str, ...], works: bool) -> None:
    assert has_kernels(capability, built) is works


class _Refuses:
    """A GPU that does not say how much memory is free."""

    def mem_get_info(self, device: object) -> tuple[int, int]:
        raise RuntimeError("The device (Intel(R) Arc(TM) Graphics) doesn't support querying the available free memory.")


@pytest.mark.parametrize(
    "name, integrated, shares",
    [
        ("Intel(R) Arc(TM) Graphics", {"is_integrated_gpu": True}, True),
        ("Intel(R) Arc(TM) Graphics", {}, True),
        ("Intel(R) Arc(TM) A770 Graphics", {}, False),
        ("Intel(R) Arc(TM) B580 Graphics", {"is_integrated_gpu": False}, False),
    ],
)
def test_intels_gpus_that_cannot_be_asked_for_memory(
    monkeypatch: pytest.MonkeyPatch, name: str, integrated: dict[str, bool], shares: bool
) -> None:
    import types

    properties = types.SimpleNamespace(total_memory=8_000_000_000, name=name, **integrated)
    module = types.SimpleNamespace(
        mem_get_info=_Refuses().mem_get_info,
        memory_reserved=lambda device: 1_000_000_000,
        get_device_properties=lambda device: properties,
        get_device_name=lambda device: name,
    )
    monkeypatch.setattr(XpuBackend, "module", classmethod(lambda cls: module))
    gpu = XpuBackend(0)
    assert gpu.shares_host_memory() is shares
    if not shares:
        assert gpu.memory().usable_bytes == 8_000_000_000
        assert gpu.memory(2).usable_bytes == 4_000_000_000 and "shared by 2 ranks" in gpu.memory(2).reason


@pytest.mark.parametrize(
    "architecture, bf16",
    [
        ("gfx906:sramecc+", False),
        ("gfx1030", False),
        ("gfx908", True),
        ("gfx942:xnack-", True),
        ("gfx1100", True),
        ("gfx1201", True),
    ],
)
def test_bf16_of_amds_gpus(monkeypatch: pytest.MonkeyPatch, architecture: str, bf16: bool) -> None:
    import types

    module = types.SimpleNamespace(get_device_properties=lambda device: types.SimpleNamespace(gcnArchName=architecture))
    monkeypatch.setattr(RocmBackend, "module", classmethod(lambda cls: module))
    assert ("bf16" in RocmBackend(0).dtypes()) is bf16


def test_what_is_set_for_libraries_before_they_look(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "")
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")
    MpsBackend().make_current()
    assert os.environ["TORCHDYNAMO_DISABLE"] == "1"


def test_a_device_of_a_doubtful_name_is_told_apart_by_what_the_process_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    import types

    properties = types.SimpleNamespace(uuid="GPU-XX", pci_bus_id=3)
    monkeypatch.setattr(
        RocmBackend,
        "module",
        classmethod(lambda cls: types.SimpleNamespace(get_device_properties=lambda device: properties)),
    )
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "0")
    first = RocmBackend(0).identity()
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "1")
    assert RocmBackend(0).identity() != first
