"""Streamed stages on a GPU made of host memory."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_mpi.device.accelerators import open_backend
from hetero_mpi.device.backend import Backend
from hetero_mpi.job.training_tables import AdapterTable, TrainTable
from hetero_mpi.model import host_weights
from hetero_mpi.model.adapters.adapter_tuning import adapter_tuning
from hetero_mpi.model.host_weights import HostLayer
from hetero_mpi.model.model_cost import model_cost
from hetero_mpi.model.optimizer import Optimizer
from hetero_mpi.model.stage import MicroBatch, Stage
from hetero_mpi.model.streamed_stage import StreamedStage
from hetero_mpi.model.transformers.chain import TransformersChain
from hetero_mpi.model.transformers.families import read_config
from hetero_mpi.model.transformers.weights import SeededStart
from hetero_mpi.model.tuning import Tuning, full_training
from hetero_mpi.planning.durations import duration
from hetero_mpi.planning.memory import OFFLOADED_LAYER_COUNT
from hetero_mpi.planning.schedule import Op, schedule_of
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan
from hetero_mpi.planning.types.profile import Curve, LayerTimes
from hetero_mpi.planning.types.sizes import GRADIENT_BYTES
from hetero_mpi.util.disk import SPARE_BYTES
from hetero_mpi.util.errors import UserError
from tests.stand_in_gpu import module
from tests.support.planning_samples import make_device, make_profile
from tests.support.processes import wait_until
from tests.support.stages import stage_of, streamed_stage_of

CONFIG = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "vocab_size": 512,
}
ROWS, SLICE, TOKENS = 4, 2, 8
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture
def gpu() -> Iterator[Backend]:
    gc.collect()
    yield open_backend("auto", 1)
    module.device.set_delays(0.0, 0.0)
    module.device.maybe_set_device(0)


@pytest.fixture
def chain() -> TransformersChain:
    return TransformersChain(read_config(CONFIG))


def check_waits_for_copies(
    resident: Stage, streamed: StreamedStage, gpu: Backend, micro_batches: int, copy_s: float
) -> None:
    """Equal bits while copies take long: one that nobody waits for gives the weights of another layer."""
    expected = steps(resident, gpu, micro_batches)
    module.device.set_delays(copy_s, 0.0)
    for one, other in zip(expected, steps(streamed, gpu, micro_batches), strict=True):
        assert torch.equal(one, other)


def tuning(chain: TransformersChain, nf4: bool, **further: Any) -> Tuning:
    return adapter_tuning(chain, AdapterTable(method="lora", rank=2, dropout=0.1, **further), nf4, True)


def steps(stage: Stage, gpu: Backend, micro_batches: int, count: int = 2) -> list[torch.Tensor]:
    """Losses and gradients of steps, the values after them, then the held-out loss, in host memory."""
    optimizer, found = Optimizer(stage, TrainTable(steps=count)), []
    for number in range(count):
        optimizer.zero()
        for index in range(micro_batches):
            generator = torch.Generator().manual_seed(micro_batches * number + index)
            tokens = torch.randint(1, 512, (ROWS, TOKENS), generator=generator).to(gpu.device)
            found.append(stage.forward(MicroBatch(index, number, 0, micro_batches * ROWS * TOKENS), tokens, tokens))
            stage.backward(index)
        tied = stage.tuning.tied(stage.chain)
        if tied is not None:
            optimizer.gradient(tied).add_(optimizer.tied_gradient())
        found += [optimizer.gradient(name).clone() for name in optimizer.targets]
        optimizer.end_step(number, 0.5)
    found += [value for name in optimizer.targets for value in (optimizer.targets[name], stage.parameters[name])]
    return [tensor.detach().cpu() for tensor in (*found, stage.evaluate(tokens, tokens))]


@pytest.mark.parametrize(
    "tied, dtype, slices, frozen, kept",
    [
        (False, "fp32", SLICE, (), 0),
        (True, "fp32", None, ("layers.0.",), 0),
        (True, "bf16", SLICE, (), 1),
        (False, "bf16", SLICE, ("embed", "layers.0.", "layers.3.", "norm"), 2),
    ],
)
def test_full_training_gives_the_bits_of_a_resident_stage(
    gpu: Backend, tied: bool, dtype: str, slices: int | None, frozen: tuple[str, ...], kept: int
) -> None:
    chain = TransformersChain(read_config({**CONFIG, "tie_word_embeddings": tied, "attention_dropout": 0.1}))
    still = frozenset(name for name in chain.parameters if any(part in name for part in frozen))
    trained = replace(full_training(chain), still=still)
    given: Any = chain, 0, chain.layer_count, gpu, dtype, SeededStart(0), 7, trained
    resident = stage_of(*given, recompute=True, slice_sequences=slices)
    streamed = streamed_stage_of(*given, slice_sequences=slices, kept_slices=kept)
    check_waits_for_copies(resident, streamed, gpu, 2, 0.01)


def test_of_full_training_few_layers_are_on_the_device(chain: TransformersChain, gpu: Backend) -> None:
    gc.collect()
    before = module.device.used(1)
    stage = streamed_stage_of(chain, 0, chain.layer_count, gpu, "bf16", SeededStart(0), 7)
    optimizer = Optimizer(stage, TrainTable(steps=1))
    gc.collect()
    block = max(sum(spec.count for spec in chain.specs(layer, layer + 1)) for layer in range(chain.layer_count))
    slots = OFFLOADED_LAYER_COUNT * (2 + GRADIENT_BYTES) * block
    assert module.device.used(1) - before <= slots + (1 << 16)
    assert slots < sum(value.nbytes for value in stage.masters.values()) / 2
    optimizer.zero()
    optimizer.step(0, 1.0)
    assert {value.device.type for value in optimizer.state(EMBEDDING).values()} == {"cpu"}


WHOLE = {"modules_to_save": ["embed_tokens", "norm"]}


@pytest.mark.parametrize(
    "nf4, tied, further",
    [
        (False, False, {}),
        (True, False, {}),
        (True, True, {"tokens": [3, 500]}),
        (False, True, WHOLE),
        (True, False, WHOLE),
    ],
)
def test_copies_that_take_long_are_waited_for(gpu: Backend, nf4: bool, tied: bool, further: dict[str, Any]) -> None:
    chain = TransformersChain(read_config({**CONFIG, "tie_word_embeddings": tied}))
    given: Any = chain, 0, chain.layer_count, gpu, "bf16", SeededStart(0), 7, tuning(chain, nf4, **further)
    resident = stage_of(*given, recompute=True, slice_sequences=SLICE)
    check_waits_for_copies(resident, streamed_stage_of(*given, slice_sequences=SLICE), gpu, 1, 0.02)


@pytest.mark.parametrize("nf4", [False, True, None])
def test_kept_slices_find_weights_that_have_come_to_another_place(
    chain: TransformersChain, gpu: Backend, nf4: bool | None
) -> None:
    """The last layer's weights come anew between two backwards. None: all weights are trained."""
    given: Any = (
        chain,
        0,
        chain.layer_count,
        gpu,
        "bf16",
        SeededStart(0),
        7,
        None if nf4 is None else tuning(chain, nf4),
    )
    found = []
    for stage in (
        stage_of(*given, slice_sequences=SLICE),
        streamed_stage_of(*given, slice_sequences=SLICE, kept_slices=1),
    ):
        optimizer = Optimizer(stage, TrainTable(steps=1))
        optimizer.zero()
        for index in range(2):
            tokens = torch.randint(1, 512, (ROWS, TOKENS), generator=torch.Generator().manual_seed(index))
            tokens = tokens.to(gpu.device)
            stage.forward(MicroBatch(index, 0, 0, 2 * ROWS * TOKENS), tokens, tokens)
        for index in range(2):
            stage.backward(index)
        found.append({name: optimizer.gradient(name).cpu() for name in optimizer.targets})
    resident, streamed = found
    assert all(torch.equal(streamed[name], gradient) for name, gradient in resident.items())


def test_an_integrated_gpu_streams_from_mapped_files(
    chain: TransformersChain, gpu: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the memory that it computes in, a copy of the weights would spare nothing."""
    given: Any = chain, 0, chain.layer_count, gpu, "bf16", SeededStart(0), 7, tuning(chain, True)
    resident = stage_of(*given, recompute=True, slice_sequences=SLICE)
    monkeypatch.setattr(gpu, "shares_host_memory", lambda: True)
    streamed = streamed_stage_of(*given, slice_sequences=SLICE, folder=tmp_path)
    assert all(layer._file is not None for layer in streamed.weights.layers.values())
    check_waits_for_copies(resident, streamed, gpu, 1, 0.02)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every layer that was read from its file, of a disk that takes long: of a buffer that is handed out before it is
    filled, the last bytes are another layer's."""
    found: list[int] = []
    whole = HostLayer.read

    def slowly(layer: HostLayer, to: torch.Tensor) -> None:
        to.fill_(7)
        time.sleep(0.01)
        whole(layer, to)
        found.append(layer.bytes)

    monkeypatch.setattr(HostLayer, "read", slowly)
    return found


@pytest.mark.parametrize(
    "nf4, kept, on_disk, copy_s",
    [(False, 0, (2, 5), 0.02), (True, 1, (2, 5), 0.0), (True, 0, tuple(range(1, 7)), 0.01)],
)
def test_layers_on_disk_give_the_bits_of_resident_ones(
    chain: TransformersChain,
    gpu: Backend,
    tmp_path: Path,
    read: list[int],
    nf4: bool,
    kept: int,
    on_disk: tuple[int, ...],
    copy_s: float,
) -> None:
    given: Any = chain, 0, chain.layer_count, gpu, "bf16", SeededStart(0), 7, tuning(chain, nf4)
    resident = stage_of(*given, recompute=True, slice_sequences=SLICE)
    streamed = streamed_stage_of(*given, slice_sequences=SLICE, kept_slices=kept, on_disk=on_disk, folder=tmp_path)
    check_waits_for_copies(resident, streamed, gpu, 2, copy_s)
    # Two steps of two forwards and backwards, and an evaluation, some of which begin with layers that are there.
    assert 6 * len(on_disk) <= len(read) <= 9 * len(on_disk) + OFFLOADED_LAYER_COUNT
    assert not list(tmp_path.iterdir()), "the files have no names"


def test_layers_on_disk_take_no_host_memory_but_what_is_staged(
    chain: TransformersChain, gpu: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    buffer = gpu.host_buffer
    monkeypatch.setattr(gpu, "host_buffer", lambda shape, dtype: (taken.append(*shape), buffer(shape, dtype))[1])
    given: Any = chain, 0, chain.layer_count, gpu, "bf16", SeededStart(0), 7, tuning(chain, False)
    stage = streamed_stage_of(*given, on_disk=(1, 2, 4, 5), folder=tmp_path)
    layers = stage.weights.layers
    pinned = sum(layers[layer].bytes for layer in (0, 3, 6, 7)) + OFFLOADED_LAYER_COUNT * layers[1].bytes
    assert sum(taken) == pinned


def test_layers_are_read_ahead_and_a_file_that_fails_ends_the_pass(
    chain: TransformersChain, gpu: Backend, tmp_path: Path, read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: Any = chain, 0, chain.layer_count, gpu, "bf16", SeededStart(0), 7, tuning(chain, False)
    stage = streamed_stage_of(*given, on_disk=(1, 3, 5), folder=tmp_path)
    weights, tokens = stage.weights, torch.ones((ROWS, TOKENS), dtype=torch.int64).to(gpu.device)
    weights.need(0)
    weights.prefetch(1, keeping=0)
    wait_until(lambda: len(read) >= OFFLOADED_LAYER_COUNT, "layers are read")  # 1, which leaves, 3, and then 5
    weights.need(1)
    weights.prefetch(2, keeping=1)
    wait_until(lambda: len(read) == 3, "layers are read")
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(OSError, match="an offloaded layer's file ends after 0 of"):
        for index in range(3):
            stage.forward(MicroBatch(index, 0, 0, ROWS * TOKENS), tokens, tokens)


def test_a_disk_too_small_for_all_layers_is_refused_before_one_is_written(
    chain: TransformersChain, gpu: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: Any = chain, 0, chain.layer_count, gpu, "bf16", SeededStart(0), 7, tuning(chain, False)
    each = streamed_stage_of(*given).weights.layers[1].bytes
    written: list[int] = []
    fsync, room = os.fsync, 4
    monkeypatch.setattr(os, "fsync", lambda file: (written.append(file), fsync(file))[1])
    monkeypatch.setattr(host_weights, "free_bytes", lambda _: (room - len(written)) * each + SPARE_BYTES)
    for count in (3, 4, 5):
        written.clear()
        refused = pytest.raises(UserError, match=f"{count * each:,} bytes .*{room * each + SPARE_BYTES:,} bytes")
        with refused if count > room else contextlib.nullcontext():
            streamed_stage_of(*given, on_disk=range(1, 1 + count), folder=tmp_path)
        assert len(written) == (0 if count > room else count)


def test_few_layers_are_on_the_device(chain: TransformersChain, gpu: Backend) -> None:
    gc.collect()
    before = module.device.used(1)
    stage = streamed_stage_of(chain, 0, chain.layer_count, gpu, "bf16", SeededStart(0), 7, tuning(chain, False))
    gc.collect()
    layers = stage.weights.layers.values()
    trained = sum(value.nbytes for value in (*stage.parameters.values(), *stage.masters.values()))
    slots = OFFLOADED_LAYER_COUNT * max(layer.bytes for layer in layers)
    assert slots < stage.weights.bytes / 2
    assert module.device.used(1) - before <= slots + trained + (1 << 16)


def test_weights_are_copied_once_for_all_slices(
    chain: TransformersChain, gpu: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = streamed_stage_of(
        chain, 0, chain.layer_count, gpu, "bf16", SeededStart(0), 7, tuning(chain, True), slice_sequences=1
    )
    begun: list[int] = []
    copying = stage.weights._copying
    assert copying is not None
    copy = copying.copy
    monkeypatch.setattr(copying, "copy", lambda to, source: (begun.append(len(source)), copy(to, source))[1])
    tokens = torch.ones((ROWS, TOKENS), dtype=torch.int64, device=gpu.device)
    stage.forward(MicroBatch(0, 0, 0, ROWS * TOKENS), tokens, tokens)
    assert sum(begun) == stage.weights.bytes
    stage.backward(0)
    # The last layers are there from the forward.
    assert len(begun) == 2 * chain.layer_count - OFFLOADED_LAYER_COUNT


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("warm_up", [0, 1, 3])
def test_copies_are_priced_that_are_made(
    chain: TransformersChain, gpu: Backend, monkeypatch: pytest.MonkeyPatch, whole: bool, warm_up: int
) -> None:
    """Where nothing but copies takes time, and each a second, a step lasts as many seconds as the longer queue has copies."""
    trained, layers = full_training(chain) if whole else tuning(chain, False), chain.layer_count
    stage = streamed_stage_of(chain, 0, layers, gpu, "bf16", SeededStart(0), 7, trained)
    optimizer, tokens = Optimizer(stage, TrainTable(steps=2)), torch.ones((1, TOKENS), dtype=torch.int64).to(gpu.device)
    queues = [one for one in (stage.weights, stage.offloaded) if one is not None]
    made: Counter[tuple[Op, int]] = Counter()
    now = Op.F
    for number, queue in enumerate(queues):
        copy = queue._copying.copy  # type: ignore[union-attr]

        def counted(to: torch.Tensor, source: torch.Tensor, copy: Any = copy, number: int = number) -> Any:
            made[now, number] += 1
            return copy(to, source)

        monkeypatch.setattr(queue._copying, "copy", counted)

    model = model_cost(chain, trained, "bf16", TOKENS, dict.fromkeys(chain.kinds, 1.0))
    model = replace(model, layers=tuple(replace(layer, parameter_bytes=1 << 20) for layer in model.layers))
    nothing = LayerTimes(Curve((TOKENS,), (0.0,)), Curve((TOKENS,), (0.0,)))
    device = replace(make_device(0), copy_latency_s=1.0, layers=dict.fromkeys(chain.kinds, nothing))
    profile = replace(make_profile([1.0], model), devices=(device,))
    plan = Plan((PipelinePlan((StagePlan((0,), 0, layers, warm_up, streamed=True),), 1, 4),), 4, TOKENS, layers)
    schedule = [action for action in schedule_of(plan, model)[0] if action.op in (Op.F, Op.B)]
    for step in range(2):
        made.clear()  # the first step begins otherwise than those after it
        optimizer.zero()
        for action in schedule:
            now, index = action.op, action.micro_batch
            assert index is not None
            if now is Op.F:
                stage.forward(MicroBatch(index, step, 0, 4 * TOKENS), tokens, tokens)
            else:
                stage.backward(index)
        optimizer.step(step, 1.0)
    for op in (Op.F, Op.B):
        priced = sum(duration(action, plan, profile) for action in schedule if action.op is op)
        assert priced == pytest.approx(max(made[op, number] for number in range(len(queues)))), op


def test_weights_stay_until_they_have_been_computed_with(chain: TransformersChain, gpu: Backend) -> None:
    weights = streamed_stage_of(
        chain, 0, chain.layer_count, gpu, "bf16", SeededStart(0), 7, tuning(chain, False)
    ).weights
    weights.need(1)
    weights.prefetch(2, keeping=1)
    weights.need(2)
    stream = module.device.current_stream(1)
    module.device.compute_for(stream, 0.2)
    weights.prefetch(3, keeping=2)  # in the place of layer 1, with which the device may still compute
    coming = weights._started_copies[3]()
    assert coming is not None
    time.sleep(0.05)
    assert not coming.done()
    module.device.compute_for(stream, 0.0)
    coming.wait()


def test_gradients_leave_when_they_have_been_computed(chain: TransformersChain, gpu: Backend) -> None:
    gradients = streamed_stage_of(chain, 0, chain.layer_count, gpu, "bf16", SeededStart(0), 7).offloaded
    assert gradients is not None
    gradients.zero()
    gradients.start_layer(2)
    stream = module.device.current_stream(1)
    module.device.compute_for(stream, 0.2)
    gradients.finish_layer(2)
    leaving = gradients._copied[gradients._computing]
    time.sleep(0.05)
    assert not leaving.done()
    module.device.compute_for(stream, 0.0)
    gradients.wait()
    assert leaving.done()
