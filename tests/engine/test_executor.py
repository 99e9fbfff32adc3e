"""How a step is run: when buffers are free, when sums begin, what is left behind, who owns what.

On threads instead of ranks, over the plans of ``test_pipelines``.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import torch

from hetero_mpi.comm.transport import Group, Numbers, Request
from hetero_mpi.data.batch import Batch
from hetero_mpi.device.backend import Backend
from hetero_mpi.device.shortage import is_out_of_memory
from hetero_mpi.engine.channel import HostBuffers, Inbox
from hetero_mpi.engine.trainer import Trainer
from hetero_mpi.job.training_tables import TrainTable
from hetero_mpi.model.optimizer import StepDecision
from hetero_mpi.model.stage import Stage
from hetero_mpi.model.transformers.chain import TransformersChain
from hetero_mpi.planning.schedule import Op
from hetero_mpi.state.hdf5 import KINDS
from hetero_mpi.state.redistribute import LiveState, tensor_shards
from tests.engine.test_trainer import (
    BATCH,
    CHAINS,
    LAYERS,
    LAYOUTS,
    LENGTH,
    TRAIN,
    batch_of,
    check_same_bits,
    outcome_of,
)
from tests.support.late_copies import LateBackend
from tests.support.ranks import LoopbackTransport, Threads, plan_of


def test_devices_with_memory_of_their_own_compute_the_same_bits() -> None:
    """Copies end late; who reads a tensor before, or writes over one that is still read, computes something else."""
    chain = CHAINS[True]
    plan = plan_of(chain, LAYOUTS["unlike pipelines"], LENGTH, "split")
    copied, straight = (outcome_of(Threads(chain, plan, TRAIN, backend=one)) for one in (LateBackend, Backend))
    check_same_bits(copied, straight)


@pytest.mark.parametrize("schedule", ["1f1b", "split"])
def test_buffers_are_free_for_receives_when_the_backward_is_computed(
    monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    """Released earlier, the copies of all tensors that arrive from then on would wait for the backward that runs."""
    released: list[bool] = []
    release = Inbox.release

    class Computing(Backend):
        busy = False

        def finish_compute(self) -> None:
            self.busy = False

    def backward(name: str) -> Any:
        compute = getattr(Stage, name)

        def computing(stage: Stage, *arguments: Any) -> Any:
            cast(Computing, stage.backend).busy = True
            return compute(stage, *arguments)

        return computing

    def noted(inbox: Inbox) -> None:
        released.append(not cast(Computing, inbox.backend).busy)
        release(inbox)

    for name in ("backward", "backward_input"):
        monkeypatch.setattr(Stage, name, backward(name))
    monkeypatch.setattr(Inbox, "release", noted)
    chain = CHAINS[False]
    outcome_of(Threads(chain, plan_of(chain, LAYOUTS["unlike pipelines"], LENGTH, schedule), TRAIN, backend=Computing))
    assert released and all(released)


@pytest.mark.parametrize("kind", [LateBackend, Backend])
def test_a_transport_is_told_while_a_device_is_waited_for(monkeypatch: pytest.MonkeyPatch, kind: type[Backend]) -> None:
    chain = CHAINS[False]
    threads = Threads(chain, plan_of(chain, LAYOUTS["unlike pipelines"], LENGTH), TRAIN, backend=kind)
    told: list[bool] = []

    def finish_compute(backend: Backend) -> None:
        rank = next(trainer.rank for trainer in threads.trainers if trainer.backend is backend)
        told.append(threads.transports[rank].idle)

    monkeypatch.setattr(kind, "finish_compute", finish_compute)
    outcome_of(threads)
    assert told and set(told) == {kind is LateBackend}
    assert not any(transport.idle for transport in threads.transports)


def watched(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Per rank: ``sum NUMBERS`` when a sum starts, ``backward LAYER M`` when one of the stage that begins with LAYER has ended."""
    logs: list[list[str]] = [[] for _ in threads.trainers]
    reduce_scatter = LoopbackTransport.reduce_scatter

    def logged(transport: LoopbackTransport, group: Group, parts: list[Numbers], *hooks: Any) -> Request:
        logs[transport.rank].append(f"sum {sum(part.size for part in parts)}")
        return reduce_scatter(transport, group, parts, *hooks)

    monkeypatch.setattr(LoopbackTransport, "reduce_scatter", logged)
    for rank, stage in ((one.rank, stage) for one in threads.trainers for stage in one.stages):

        def backward(index: int, dy: Any = None, finished: Any = None, stage: Stage = stage, rank: int = rank) -> Any:
            dx = Stage.backward(stage, index, dy, finished)
            logs[rank].append(f"backward {stage.first} {index}")
            return dx

        monkeypatch.setattr(stage, "backward", backward)
    return logs


def test_sums_start_while_the_last_backward_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = CHAINS[False]
    threads = Threads(chain, plan_of(chain, LAYOUTS["unlike pipelines"], LENGTH), TRAIN)
    logs = watched(threads, monkeypatch)
    outcome_of(threads)
    for trainer, log in zip(threads.trainers, logs, strict=True):
        assert trainer.optimizer is not None
        parts = [part.layer for part in trainer.optimizer.flat]
        assert parts == [*reversed(range(trainer.stages[0].first, trainer.stages[0].last))]
        expected = [f"sum {one.gradients.numel()}" for one in trainer.optimizer.flat.values()]
        last = max(index for index, line in enumerate(log) if line.startswith("backward"))
        backwards = [line for line in log if line.startswith("backward")]
        assert log == [*backwards[:-1], *expected, backwards[-1]] and last == len(log) - 1


def test_sums_start_while_the_last_backward_of_each_stage_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    chain, edges = CHAINS[False], [0, 1, 2, 4, 5]
    pipelines = [([0, 1, 0, 1], edges, 2, 4), ([2, 3, 2, 3], edges, 2, 4)]
    threads = Threads(chain, plan_of(chain, pipelines, LENGTH, "interleaved"), TRAIN)
    logs = watched(threads, monkeypatch)
    outcome_of(threads)
    for trainer, log in zip(threads.trainers, logs, strict=True):
        assert trainer.optimizer is not None and len(trainer.stages) == 2
        for stage in trainer.stages:
            flat = [one for part, one in trainer.optimizer.flat.items() if stage.first <= part.layer < stage.last]
            assert len(flat) == stage.last - stage.first
            last = log.index(f"backward {stage.first} 1")
            assert log[last - len(flat) : last] == [f"sum {one.gradients.numel()}" for one in flat]


def test_a_step_leaves_nothing_behind_and_allocates_no_buffer_twice() -> None:
    chain = CHAINS[True]
    threads = Threads(chain, plan_of(chain, LAYOUTS["pipeline and rank"], LENGTH, "split"), TRAIN)
    shapes = [(BATCH, LENGTH), (5, 7), (BATCH, 12), (3, LENGTH)]
    counts = []
    for step in range(3 * len(shapes)):
        threads.together(partial(stepped, step=step, batch=batch_of(step, *shapes[step % len(shapes)])))
        assert [transport.pending() for transport in threads.transports] == [0] * threads.size
        counts.append([box.buffers.allocated for trainer in threads.trainers for box in inboxes(trainer)])
    assert all(count > 0 for count in counts[-1]) and len(counts[-1]) == 4
    assert counts[len(shapes)] == counts[-1], "buffers are reused once the largest shape has been seen"


def stepped(trainer: Trainer, step: int, batch: Batch) -> StepDecision:
    return trainer.step(step, batch).decision


def inboxes(trainer: Trainer) -> list[Any]:
    executor = trainer.executor
    assert executor is not None
    return [box for own in executor.stages.values() for box in own.inboxes.values()]


def test_events_name_every_action_once() -> None:
    chain = CHAINS[True]
    threads = Threads(chain, plan_of(chain, LAYOUTS["unlike pipelines"], LENGTH, "split"), TRAIN)
    outcome_of(threads)
    for trainer in threads.trainers:
        assert trainer.executor is not None
        assert [event.action for event in trainer.latest.events] == list(trainer.executor.actions)
        assert {event.rank for event in trainer.latest.events} == {trainer.rank}
        assert all(event.bytes > 0 for event in trainer.latest.events if event.action.op in (Op.SEND_F, Op.RECV_B))
    operations = {event.action.op for trainer in threads.trainers for event in trainer.latest.events}
    assert operations == set(Op), "every operation has been run"


@pytest.mark.slow
def test_who_owns_what_changes_no_bit() -> None:
    """From each rank keeping as much as it holds to all state on as few ranks as can be: losses, norms, masters and moments."""
    chain = CHAINS[True]
    for layout, clip_norm in itertools.product(("data parallel, unequal", "unlike pipelines"), (None, 0.5)):
        found = [
            _trained_with_weights(
                chain, layout, weights, TRAIN.model_copy(update={"dtype": dtype, "clip_norm": clip_norm})
            )
            for dtype in ("fp32", "bf16")
            for weights in ((1.0, 1.0, 1.0, 1.0), (1.0, 2.0, 3.0, 4.0), (1e-9, 1.0, 1e-9, 1.0))
        ]
        for first, *others in (found[:3], found[3:]):
            for other in others:
                assert other[0] == first[0]
                assert other[1].keys() == first[1].keys()
                assert all(torch.equal(value, first[1][key]) for key, value in other[1].items())


def _trained_with_weights(
    chain: TransformersChain, layout: str, weights: tuple[float, ...], train: TrainTable
) -> tuple[list[StepDecision], dict[tuple[str, str], torch.Tensor]]:
    """(decisions of three steps, masters and moments), where each rank's share of the state has such a weight."""
    plan = plan_of(chain, LAYOUTS[layout], LENGTH)
    weighted = [
        replace(pipeline, stages=tuple(replace(s, state_weight=weights[s.ranks[0]]) for s in pipeline.stages))
        for pipeline in plan.pipelines
    ]
    threads = Threads(chain, replace(plan, pipelines=tuple(weighted)), train)
    decisions = [threads.together(partial(stepped, step=step, batch=batch_of(step)))[0] for step in range(3)]
    state: dict[tuple[str, str], torch.Tensor] = {}
    for trainer in threads.trainers:
        assert trainer.optimizer is not None and trainer.layers is not None
        trainer.update.settle()
        live = LiveState(trainer)
        own = [shard for shard in tensor_shards(trainer.tuning, trainer.plan, KINDS) if shard.owner == trainer.rank]
        assert {shard.name for shard in own} == trainer.optimizer.targets.keys()
        state |= {(shard.kind, shard.name): live(shard).clone() for shard in own}
    for trainer in threads.trainers:
        assert trainer.layers is not None
        for name, parameter in trainer.layers.parameters.items():
            assert torch.equal(parameter, state["parameters", name].to(parameter.dtype)), f"a replica of {name} differs"
    return decisions, state


@pytest.mark.parametrize(("dtype", "alone"), [("fp32", 16), ("bf16", 18)])
@pytest.mark.parametrize("pipelines", [1, 2])
def test_masters_and_moments_exist_once(dtype: str, alone: int, pipelines: int) -> None:
    """Bytes of a trained parameter on each of two ranks that hold the whole model: 12, within one parameter."""
    chain = CHAINS[False]
    each = [([rank], [0, LAYERS], 2, 4) for rank in range(pipelines)]
    threads = Threads(chain, plan_of(chain, each, LENGTH), TRAIN.model_copy(update={"dtype": dtype, "global_batch": 4}))
    threads.together(partial(stepped, step=0, batch=batch_of(0, 4 * pipelines)))
    counts = [spec.count for spec in chain.parameters.values()]
    for trainer in threads.trainers:
        assert trainer.optimizer is not None and trainer.layers is not None
        held = [*trainer.layers.parameters.values(), *trainer.layers.masters.values()]
        held += [optimizer.gradient(name) for optimizer in [trainer.optimizer] for name in trainer.layers.parameters]
        held += [moment for name in trainer.optimizer.targets for moment in trainer.optimizer.state(name).values()]
        found = sum(tensor.nbytes for tensor in held) / sum(counts)
        expected = alone if pipelines == 1 else 12
        assert found == pytest.approx(expected, abs=12 * max(counts) / sum(counts) / 2)


def test_host_buffers_grow_to_the_largest_shape_and_stay() -> None:
    buffers = HostBuffers(Backend(), torch.bfloat16)
    small = buffers.lend((2, 3))
    assert small.shape == (2, 3) and small.dtype == torch.bfloat16
    buffers.give_back(small)
    large = buffers.lend((4, 5))
    buffers.give_back(large)
    again = buffers.lend((3, 2))
    assert again.shape == (3, 2) and again.data_ptr() == large.data_ptr() and buffers.allocated == 2


@pytest.mark.parametrize(
    ("error", "short"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (MemoryError(), True),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:121] data. DefaultCPUAllocator: not enough memory: you tried"),
            True,
        ),
        (RuntimeError("MPS backend out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"), True),
        (RuntimeError("Invalid buffer size: 17.50 GiB"), True),
        (RuntimeError("the device fell off the bus"), False),
        (ValueError("not enough memory"), False),
    ],
)
def test_shortage_of_memory_is_recognised(error: Exception, short: bool) -> None:
    assert is_out_of_memory(error) is short
