"""Memory of a GPU made of host memory: what profiling, weights, the loss and host buffers take."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from hetero_mpi.comm.ranks.world import World
from hetero_mpi.device.backend import Backend
from hetero_mpi.job.training_tables import AdapterTable
from hetero_mpi.model.adapters.adapter_tuning import adapter_tuning
from hetero_mpi.model.layer import loss
from hetero_mpi.model.transformers.chain import TransformersChain
from hetero_mpi.model.transformers.families import read_config
from hetero_mpi.model.transformers.weights import SeededStart
from hetero_mpi.model.tuning import Tuning
from hetero_mpi.profiling.device import DeviceBenchmark
from hetero_mpi.profiling.host_profiles import measure_memory
from hetero_mpi.state.redistribute import TensorShard
from hetero_mpi.state.saving import Snapshot
from tests.stand_in_gpu.fixtures import CHAIN, LARGE, measured, subject
from tests.support.errors import refuses
from tests.support.stages import stage_of


def test_profiling_leaves_nothing_on_the_device(standin: Any, gpu: Backend, uncollected: None) -> None:
    before = standin.used(1)
    times = DeviceBenchmark(replace(subject(), groups=True), gpu, 1).run("now", members=True)
    assert times.halved and standin.peak(1) > before
    assert standin.used(1) == before and standin.reserved(1) == before


def test_what_a_device_has_no_memory_for_is_left_out_of_the_profile(
    standin: Any, gpu: Backend, uncollected: None
) -> None:
    before = standin.used(1)
    standin.set_limit(
        1, before + (40 << 20), "MPS backend out of memory (MPS allocated: 8.23 GiB, max allowed: 9 GiB)."
    )
    times = measured(gpu, (1, 512))
    assert times.rows[0] == 1 and max(times.rows) < 512
    assert standin.used(1) == before


def test_other_errors_of_a_device_end_the_profiling(standin: Any, gpu: Backend) -> None:
    standin.set_limit(1, standin.used(1) + 4096, "an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        measured(gpu)


def test_no_memory_for_one_layer_is_an_error_that_says_so(standin: Any, gpu: Backend) -> None:
    standin.set_limit(1, standin.used(1) + (1 << 20), "CUDA out of memory.")
    with refuses("memory.exceeded"):
        measured(gpu)


def test_a_rank_touches_its_own_device_only(standin: Any) -> None:
    """A process of its own: contexts never go away. Both threads that copy, and dropout."""
    from tests.support.mpi import run_bounded

    program = """
import threading, torch
from tests.support.device_copies import copies_there_and_back
from tests.stand_in_gpu import backend, module
backend.install()
from hetero_mpi.device.accelerators import open_backend
gpu = open_backend("auto", 1)
copying, host, there = gpu.copying(), gpu.host_buffer((64,), torch.float32), torch.zeros(64, device=gpu.device)
host.fill_(3.0)
def copy():
    copying.copy(there, host).wait()
thread = threading.Thread(target=copy)
thread.start(); thread.join(); copy()
gpu.seed(5)
print(module.device.contexts(), module.seeded, there.sum().item())
"""
    import os
    import sys

    result = run_bounded([sys.executable, "-c", program], {**os.environ, "PYTHONPATH": "."}, 120)
    assert result.stdout.split("\n")[0] == "[False, True] [(1, 5)] 192.0", result.stdout + result.stderr


def lora(model: TransformersChain) -> Tuning:
    return adapter_tuning(model, AdapterTable(method="lora", rank=2), False, False)


def test_frozen_weights_reach_the_device_in_the_compute_dtype_only(standin: Any, gpu: Backend) -> None:
    model = TransformersChain(read_config({**CHAIN, "vocab_size": 8192}))  # beside which nothing else counts
    gc.collect()
    standin.reset_peak(1)
    before = standin.used(1)
    stage = stage_of(model, 0, model.layer_count, gpu, "bf16", SeededStart(0), tuning=lora(model))
    embedding = stage.model.get_parameter("model.embed_tokens.weight")
    assert embedding.dtype == torch.bfloat16 and embedding.device == gpu.device
    assert before < standin.used(1) <= standin.peak(1) < standin.used(1) + embedding.nbytes // 2


def test_the_peak_counts_from_where_training_begins(standin: Any, gpu: Backend) -> None:
    large = torch.zeros(1 << 20, device=gpu.device)
    small = torch.zeros(1 << 10, device=gpu.device)
    del large
    assert gpu.peak_bytes() >= 4 << 20
    gpu.begin_peak()
    assert small.nbytes <= gpu.peak_bytes() < 1 << 20


def test_the_peak_of_a_cpu_rank_too() -> None:
    cpu = Backend()
    large = torch.ones(64 << 20)
    before = cpu.peak_bytes()
    assert before >= large.nbytes
    del large
    gc.collect()
    cpu.begin_peak()
    assert cpu.peak_bytes() < before - (100 << 20)


def test_the_loss_in_pieces_takes_the_memory_that_planning_counts(
    standin: Any, gpu: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice the logits beside themselves, once their gradient; bits are those of the CPU, which takes other pieces."""
    monkeypatch.setattr(loss, "PIECE", 1 << 12)
    rows, words = 256, 1000
    values, targets = torch.randn((1, rows, words)).bfloat16(), torch.arange(rows)[None] % words
    own, there = values.clone().requires_grad_(True), values.to(gpu.device).requires_grad_(True)
    loss.summed_loss(own, targets).backward()
    on_device = targets.to(gpu.device)
    gc.collect()
    standin.reset_peak(1)
    before = standin.used(1)
    loss.summed_loss(there, on_device).backward()
    assert own.grad is not None and there.grad is not None and torch.equal(own.grad, there.grad.cpu())
    assert values.nbytes < standin.peak(1) - before <= 2 * values.nbytes


class Pair:
    """The collectives of two ranks of one host that see the same."""

    host = "box"

    def all_gather_json(self, value: Any) -> list[Any]:
        return [value, value]


def test_two_ranks_on_one_device_divide_its_memory(gpu: Backend) -> None:
    first, second = measure_memory(cast(World, Pair()), gpu)
    assert first == second and first.usable_bytes == gpu.memory().usable_bytes // 2
    assert first.reason.endswith("on the device, shared by 2 ranks") and not first.shares_host_memory


def test_large_host_buffers_are_as_large_as_asked_and_given_back(standin: Any, gpu: Backend) -> None:
    before, rounded = standin.registered_bytes(), standin.pinned_bytes()
    buffer = gpu.host_buffer((LARGE,), torch.float32)
    assert standin.registered_bytes() - before == buffer.nbytes == 4 * LARGE
    view = buffer[7:9]
    del buffer
    assert standin.registered_bytes() > before, "a view of it lives"
    del view
    assert standin.registered_bytes() == before and standin.pinned_bytes() == rounded


def test_a_snapshot_takes_what_its_tensors_do(standin: Any, gpu: Backend, uncollected: None) -> None:
    """The checks for room before it count no more than that."""
    shapes = ((700, 1000), (3,), (600, 1000))
    listed = [TensorShard("parameters", str(shape), shape, torch.float32, 0) for shape in shapes]
    live = {shard.name: torch.rand(shard.shape).to(gpu.device) for shard in listed}
    before, rounded = standin.registered_bytes(), standin.pinned_bytes()
    snapshot = Snapshot(listed, gpu)
    assert standin.registered_bytes() - before == 4 * 1_300_003 and standin.pinned_bytes() == rounded
    snapshot.copy_from(lambda shard: live[shard.name])
    assert all(torch.equal(snapshot(shard), live[shard.name].cpu()) for shard in listed)
    del snapshot
    assert standin.registered_bytes() == before
