"""Copies and computation of a GPU made of host memory: who waits for whom, and what is timed when."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from hetero_mpi.comm import mpi_transport
from hetero_mpi.comm.mpi_transport import MpiTransport
from hetero_mpi.data.batch import Batch
from hetero_mpi.device.backend import Backend
from hetero_mpi.engine.sharded_update import ShardedUpdate
from hetero_mpi.engine.trainer import Trainer
from hetero_mpi.job.training_tables import TrainTable
from hetero_mpi.model.held_layers import Segment, SharedPart
from hetero_mpi.model.optimizer import Optimizer, StepDecision
from hetero_mpi.model.stage import Stage
from hetero_mpi.model.transformers.weights import SeededStart
from hetero_mpi.planning.schedule import Op
from hetero_mpi.profiling.bench import Bench
from hetero_mpi.profiling.device import DeviceBenchmark
from tests.stand_in_gpu.backend import StandIn
from tests.stand_in_gpu.fixtures import LARGE, chain, subject
from tests.support.device_copies import copies_there_and_back
from tests.support.ranks import Threads, plan_of
from tests.support.stages import stage_of


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
    assert "could not be pinned (cudaHostRegister error 2)" in record.getMessage()


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
    (result,) = threads.together(lambda trainer: trainer.step(0, Batch(tokens, tokens, 32)))
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
    part = SharedPart(2, (0,))
    stage = stage_of(
        model, 0, model.layer_count, gpu, "fp32", SeededStart(0), shared={part: [[Segment(name) for name in names]]}
    )
    optimizer = Optimizer(stage, TrainTable(steps=1, global_batch=4))
    flat = optimizer.flat[part].gradients
    optimizer.zero()
    values = torch.rand(flat.shape)
    with MpiTransport(MPI.COMM_SELF) as transport:
        sums = ShardedUpdate(0, model.layer_count - 1, [part], None, optimizer, transport)
        sums.start_step()
        flat.copy_(values)
        with standing_still(standin, standin.current_stream(1)):
            sums.finished(2)
            time.sleep(0.02)
            assert transport.pending() == 1
        sums.reduce(2)
        sums.finish_step()
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
        for idle, expected in ((False, mpi_transport.MAX_SLEEP_S), (True, mpi_transport.MIN_SLEEP_S)):
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
        return trainer.step(0, Batch(tokens, tokens, 48)).decision

    threads.together(step)
    before = standin.blocking_bytes()
    threads.together(step)
    assert standin.blocking_bytes() - before < 32 * 4 << 15, "less than the matrix"


@pytest.mark.parametrize("copy_s", [0.0, 1e-3])
def test_copies_there_and_back_beside_computation(standin: Any, gpu: Backend, copy_s: float) -> None:
    standin.set_delays(copy_s, 1e-4)
    copies_there_and_back(gpu, 64)


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
