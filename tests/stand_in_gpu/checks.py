"""What a first run on a GPU would break, tried on a GPU made of host memory; run by tests/device/test_stand_in_gpu.py.

In a process of its own: torch counts the devices when the first backward of a process runs.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch

from hetero_mpi.comm import mpi_transport
from hetero_mpi.comm.mpi_transport import MpiTransport
from hetero_mpi.comm.ranks.world import World
from hetero_mpi.device import accelerators
from hetero_mpi.device.accelerators import has_kernels, open_backend, usable, visible_devices
from hetero_mpi.device.backend import Backend
from hetero_mpi.device.look import look
from hetero_mpi.engine.sharded_update import ShardedUpdate
from hetero_mpi.engine.trainer import Trainer
from hetero_mpi.errors import UserError
from hetero_mpi.job.load import AdapterTable, TrainTable
from hetero_mpi.model.layer import loss
from hetero_mpi.model.optimizer import Optimizer, StepDecision
from hetero_mpi.model.stage import Stage
from hetero_mpi.model.transformers.chain import TransformersChain
from hetero_mpi.model.transformers.families import read_config
from hetero_mpi.model.transformers.weights import SeededStart
from hetero_mpi.model.tuning import Tuning, adapter_tuning, full_training
from hetero_mpi.planning.schedule import Op
from hetero_mpi.profiling.bench import Bench
from hetero_mpi.profiling.device import DeviceBenchmark, DeviceTimes
from hetero_mpi.profiling.host_profiles import measure_memory
from hetero_mpi.profiling.subject import Subject
from hetero_mpi.state.background_save import Snapshot
from hetero_mpi.state.redistribute import Parcel
from tests.stand_in_gpu import backend, module
from tests.stand_in_gpu.backend import StandIn
from tests.support.device_copies import copies_there_and_back
from tests.support.threaded_training import Threads, plan_of

CHAIN = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "vocab_size": 512,
}


backend.install()


@pytest.fixture
def standin() -> Any:
    """The stand-in's C++ side."""
    gc.collect()  # what tests before have left
    module.device.set_delays(0.0, 0.0)
    return module.device


@pytest.fixture
def gpu(standin: Any) -> Iterator[Backend]:
    """Its second device, opened as a rank opens it."""
    yield open_backend("auto", 1)
    standin.maybe_set_device(0)
    standin.set_limit(1, 1 << 60, "")


def chain(**changes: Any) -> TransformersChain:
    return TransformersChain(read_config({**CHAIN, **changes}))


def subject(micro_batches: tuple[int, ...] = (1, 2)) -> Subject:
    model = chain()
    return Subject(
        model, full_training(model), TrainTable(steps=1, global_batch=8, dtype="bf16"), 16, micro_batches, 1.0, 1, None
    )


def measured(gpu: Backend, micro_batches: tuple[int, ...] = (1, 2)) -> DeviceTimes:
    return DeviceBenchmark(subject(micro_batches), gpu, 1).run("now")


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Python's collector comes by only where it is called."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_profiling_leaves_nothing_on_the_device(standin: Any, gpu: Backend, uncollected: None) -> None:
    before = standin.used(1)
    benchmark = DeviceBenchmark(subject(), gpu, 1)
    benchmark.run("now")
    assert standin.peak(1) > before
    assert standin.used(1) == before
    benchmark.run_alone()
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
    with pytest.raises(UserError, match="no memory left for one layer with 1 sequences of 16 tokens"):
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
    stage = Stage(model, 0, model.layer_count, gpu, "bf16", SeededStart(0), tuning=lora(model))
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
        return accelerators.Accelerator._free_memory(self)

    monkeypatch.setattr(StandIn, "_free_memory", asked)
    seen = look()
    assert [(device["backend"], device["index"]) for device in seen["devices"]] == [("cuda", 1), ("cpu", 0)]
    assert seen["errors"] == {"cuda:0": "CUDA error: all CUDA-capable devices are busy or unavailable"}


def test_a_device_without_kernels_is_nobodys(standin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StandIn, "unusable", classmethod(lambda cls: {0: "it is too old for this torch"}))
    assert usable("cuda") == (1,) and list(visible_devices("auto")[1]) == [1]
    assert look()["errors"] == {"cuda:0": "it is too old for this torch"}
    assert open_backend("auto", None).name == "cpu"
    with pytest.raises(UserError, match="'cuda' cannot be used: it is too old for this torch"):
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
    monkeypatch.setattr(accelerators.XpuBackend, "module", classmethod(lambda cls: module))
    gpu = accelerators.XpuBackend(0)
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
    monkeypatch.setattr(accelerators.RocmBackend, "module", classmethod(lambda cls: module))
    assert ("bf16" in accelerators.RocmBackend(0).dtypes()) is bf16


def test_what_is_set_for_libraries_before_they_look(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "")
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")
    accelerators.MpsBackend().make_current()
    assert os.environ["TORCHDYNAMO_DISABLE"] == "1"


class Pair:
    """The collectives of two ranks of one host that see the same."""

    host = "box"

    def all_gather_json(self, value: Any) -> list[Any]:
        return [value, value]


def test_two_ranks_on_one_device_divide_its_memory(gpu: Backend) -> None:
    first, second = measure_memory(cast(World, Pair()), gpu, None)
    assert first == second and first.usable_bytes == gpu.memory().usable_bytes // 2
    assert first.reason.endswith("on the device, shared by 2 ranks") and not first.shares_host_memory


def test_a_device_of_a_doubtful_name_is_told_apart_by_what_the_process_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    import types

    properties = types.SimpleNamespace(uuid="GPU-XX", pci_bus_id=3)
    monkeypatch.setattr(
        accelerators.RocmBackend,
        "module",
        classmethod(lambda cls: types.SimpleNamespace(get_device_properties=lambda device: properties)),
    )
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "0")
    first = accelerators.RocmBackend(0).identity()
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "1")
    assert accelerators.RocmBackend(0).identity() != first


def test_results_and_copies_of_the_stand_in_are_late(standin: Any, gpu: Backend) -> None:
    """What it is for: a program that does not wait reads what is not there yet."""
    standin.set_delays(0.05, 0.0)
    try:
        host, there = gpu.host_buffer((16,), torch.float32), torch.zeros(16, device=gpu.device)
        host.fill_(1.0)
        copied = gpu.copying().copy(there, host)
        assert not copied.done()
        copied.wait()
        assert there.sum().item() == 16.0
    finally:
        standin.set_delays(0.0, 0.0)
    with pytest.raises(RuntimeError, match=r"host tensor|same device"):
        torch.add(there, torch.ones(16))


LARGE = ((5 << 20) + 4) // 4
"""Numbers of a block that no power of two fits."""


def test_large_host_buffers_are_as_large_as_asked_and_given_back(standin: Any, gpu: Backend) -> None:
    before, rounded = standin.registered_bytes(), standin.pinned_bytes()
    buffer = gpu.host_buffer((LARGE,), torch.float32)
    assert standin.registered_bytes() - before == buffer.nbytes == 4 * LARGE
    view = buffer[7:9]
    del buffer
    assert standin.registered_bytes() > before, "a view of it lives"
    del view
    assert standin.registered_bytes() == before and standin.pinned_bytes() == rounded


def test_copies_of_large_host_buffers_run_beside(standin: Any, gpu: Backend) -> None:
    host, there = gpu.host_buffer((LARGE,), torch.float32), torch.zeros(LARGE, device=gpu.device)
    host.fill_(1.0)
    standin.set_delays(0.2, 0.0)
    copied = gpu.copying().copy(there, host)
    assert not copied.done()
    copied.wait()
    assert there.sum().item() == LARGE


def test_memory_that_the_driver_does_not_pin_is_copied_all_the_same(
    standin: Any, gpu: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    standin.set_register_limit(0)
    try:
        buffers = [gpu.host_buffer((LARGE,), torch.float32) for _ in range(2)]
    finally:
        standin.set_register_limit(1 << 60)
    there = torch.ones(LARGE, device=gpu.device)  # the refusal is nobody else's error
    for host in buffers:
        host.fill_(2.0)
        gpu.copying().copy(there, host).wait()
        assert there.sum().item() == 2 * LARGE
    (record,) = caplog.records
    assert "could not be pinned (error 2 of cudaHostRegister)" in record.getMessage()


def test_a_snapshot_takes_what_its_tensors_do(standin: Any, gpu: Backend, uncollected: None) -> None:
    """The checks for room before it count no more than that."""
    shapes = ((700, 1000), (3,), (600, 1000))
    listed = [Parcel("parameters", str(shape), shape, torch.float32, 0) for shape in shapes]
    live = {parcel.name: torch.rand(parcel.shape).to(gpu.device) for parcel in listed}
    before, rounded = standin.registered_bytes(), standin.pinned_bytes()
    snapshot = Snapshot(listed, gpu)
    assert standin.registered_bytes() - before == 4 * 1_300_003 and standin.pinned_bytes() == rounded
    snapshot.take(lambda parcel: live[parcel.name])
    assert all(torch.equal(snapshot(parcel), live[parcel.name].cpu()) for parcel in listed)
    del snapshot
    assert standin.registered_bytes() == before


def test_marks_tell_when_the_device_computed_and_nobody_waits(standin: Any, gpu: Backend) -> None:
    stream = standin.current_stream(1)
    begin, first = time.perf_counter(), gpu.mark()
    standin.compute_for(stream, 0.2)
    second = gpu.mark()
    assert time.perf_counter() - begin < 0.2, "nobody waits while work is given to the device"
    assert second.seconds_since(first) >= 0.2


def test_layers_are_timed_while_the_devices_queue_runs_on(
    standin: Any, gpu: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host waits for the device after a pass, not at the ends of every layer; and it warms the device up first."""
    benchmark = DeviceBenchmark(subject((1,)), gpu, 1)
    bench = Bench(benchmark.subject, gpu, 0, benchmark.chain.layer_count)
    block = bench.stage.model.get_submodule(benchmark.chain.module_names(2)[0])
    block.register_forward_hook(lambda *_: standin.compute_for(standin.current_stream(1), 0.2), prepend=True)
    for name in ("synchronize", "finish_compute"):
        monkeypatch.setattr(StandIn, name, lambda self: pytest.fail("the host waits"))
    layers, _ = bench.forward(1)
    assert layers[2] >= 0.2 and layers[1] < 0.2
    assert all(seconds >= 0 for seconds in bench.backward(1)[0].values())
    begin, passes = time.perf_counter(), []
    monkeypatch.setattr(benchmark, "_pass", lambda *_: passes.append(time.sleep(0.05)))
    benchmark._warm_up([bench])
    assert len(passes) > 1 and time.perf_counter() - begin >= 0.5


def test_events_of_a_pipeline_of_one_stage_are_the_devices_times(
    standin: Any, gpu: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host is done with a backward when it is given to the device; its time is what the device takes."""
    model, train = chain(), TrainTable(steps=1, global_batch=4, dtype="fp32")
    backward = Stage.backward

    def longer(stage: Stage, *arguments: Any) -> Any:
        gradient = backward(stage, *arguments)
        standin.compute_for(standin.current_stream(1), 0.1)
        return gradient

    monkeypatch.setattr(Stage, "backward", longer)
    threads = Threads(model, plan_of(model, [([0], [0, model.layer_count], 2, 4)], 8), train, backend=lambda: gpu)
    tokens = np.ones((4, 8), np.int32)
    (result,) = threads.together(lambda trainer: trainer.step(0, tokens, tokens, 32))
    events = [event for event in result.events if event.action.op is Op.B]
    assert len(events) == 2
    assert all(event.end_s - event.start_s >= 0.1 for event in events)
    assert events[0].end_s <= events[1].start_s


@contextlib.contextmanager
def standing_still(standin: Any, stream: int) -> Iterator[None]:
    """The device computes nothing inside, or for 30 seconds at most."""
    gate = standin.new_stream(1)
    standin.wait_for(stream, gate, standin.added(gate) + 1)
    opener = threading.Timer(30, standin.compute_for, (gate, 0.0))
    opener.start()
    try:
        yield
        assert opener.is_alive(), "somebody waited for the device"
    finally:
        opener.cancel()
        standin.compute_for(gate, 0.0)


def test_gradients_leave_for_their_sum_beside_what_the_device_computes(standin: Any, gpu: Backend) -> None:
    """Nobody waits for the device where a backward reports a layer, and the numbers are sent once they are there."""
    from mpi4py import MPI

    model = chain()
    names = [name for name in model.parameters if model.layer_of(name) == 2]
    stage = Stage(model, 0, model.layer_count, gpu, "fp32", SeededStart(0), shared={2: [names]})
    optimizer = Optimizer(stage, TrainTable(steps=1, global_batch=4))
    flat = optimizer.flat[2].gradients
    optimizer.zero()
    values = torch.rand(flat.shape)
    with MpiTransport(MPI.COMM_SELF) as transport:
        sums = ShardedUpdate(0, model.layer_count - 1, {2: (0,)}, None, optimizer, transport)
        sums.begin()
        flat.copy_(values)
        with standing_still(standin, standin.current_stream(1)):
            sums.finished(2)
            time.sleep(0.02)
            assert transport.pending() == 1
        sums.reduce(2)
        sums.end()
        assert transport.pending() == 0
    assert torch.equal(flat.cpu(), values)


def test_messages_are_looked_after_often_while_a_rank_waits_for_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from mpi4py import MPI

    slept: list[float] = []
    sleep = time.sleep

    def noted(seconds: float) -> None:
        slept.append(seconds)
        sleep(seconds)

    monkeypatch.setattr(mpi_transport.time, "sleep", noted)
    with MpiTransport(MPI.COMM_SELF) as transport:
        transport.post_receive(0, 1, np.empty(8, np.uint8))
        for idle, expected in ((False, mpi_transport.LONGEST_SLEEP_S), (True, mpi_transport.SHORTEST_SLEEP_S)):
            transport.idle = idle
            slept.clear()
            while len(slept) < 10 or slept[-1] != expected:
                sleep(0.01)
                assert len(slept) < 10_000
        assert set(slept[1:]) == {expected}


def test_no_gradient_nor_tied_matrix_is_waited_for(standin: Any, gpu: Backend) -> None:
    model, train = (
        chain(vocab_size=1 << 15, tie_word_embeddings=True),
        TrainTable(steps=2, global_batch=6, dtype="fp32"),
    )
    plan = plan_of(model, [([0, 1], [0, 3, model.layer_count], 1, 3), ([2], [0, model.layer_count], 1, 3)], 8)
    threads = Threads(model, plan, train, backend=lambda: gpu)
    tokens = np.ones((6, 8), np.int32)

    def step(trainer: Trainer) -> StepDecision:
        gpu.make_current()
        return trainer.step(0, tokens, tokens, 48).decision

    threads.together(step)
    before = standin.blocking_bytes()
    threads.together(step)
    assert standin.blocking_bytes() - before < 32 * 4 << 15, "less than the matrix"


@pytest.mark.parametrize("copy_s", [0.0, 1e-3])
def test_copies_there_and_back_beside_computation(standin: Any, gpu: Backend, copy_s: float) -> None:
    standin.set_delays(copy_s, 1e-4)
    copies_there_and_back(gpu)


def test_a_copy_in_another_thread_belongs_to_the_same_device(gpu: Backend) -> None:
    there, done = torch.zeros(8, device=gpu.device), []

    def copy() -> None:
        host = gpu.host_buffer((8,), torch.float32)
        host.fill_(2.0)
        copying = gpu.copying()
        copying.copy(there, host).wait()
        done.append(there.sum().item())

    thread = threading.Thread(target=copy)
    thread.start()
    thread.join()
    assert done == [16.0]
