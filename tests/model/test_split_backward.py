"""Backward in two parts gives the bits of backward in one, and layers are reported when their gradients are whole."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from hetero_mpi.device.backend import Backend
from hetero_mpi.job.training_tables import AdapterTable, TrainTable
from hetero_mpi.model.adapters.adapter_tuning import adapter_tuning
from hetero_mpi.model.held_layers import Segment, SharedPart
from hetero_mpi.model.layer.interface import seed_from
from hetero_mpi.model.layer.loss import IGNORED
from hetero_mpi.model.optimizer import Optimizer
from hetero_mpi.model.stage import MicroBatch, Stage
from hetero_mpi.model.transformers.chain import TransformersChain, materialize
from hetero_mpi.model.transformers.families import read_config
from hetero_mpi.model.tuning import Tuning
from tests.model.test_all_families import UNLIKE
from tests.support.family_configs import VOCABULARY, dropout_rates, tiny_keys
from tests.support.stages import stage_of

ROWS = (2, 2, 1)
"""Sequences of the micro-batches: the last one is short."""
TOKENS = 24


class NormalStart:
    """Random values for every family, each matrix drawn from its own name."""

    def fill(self, chain: TransformersChain, model: PreTrainedModel, layer: int) -> None:
        for root in chain.module_names(layer):
            for name, module in model.get_submodule(root).named_modules(prefix=root):
                materialize(module)
                generator = torch.Generator().manual_seed(seed_from(3, name))
                for parameter in module.parameters(recurse=False):
                    if parameter.is_floating_point():
                        mean, deviation = (0.0, 0.2) if parameter.ndim > 1 else (1.0, 0.1)
                        with torch.no_grad():
                            parameter.normal_(mean, deviation, generator=generator)


def chain_of(family: str, **changes: Any) -> TransformersChain:
    return TransformersChain(read_config({**tiny_keys(family), **changes}))


def build(
    chain: TransformersChain, dtype: str = "fp32", cut: int = 3, tuning: Tuning | None = None, **options: Any
) -> list[Stage]:
    bounds = ((0, cut), (cut, chain.layer_count))
    return [stage_of(chain, a, b, Backend(), dtype, NormalStart(), 7, tuning, **options) for a, b in bounds]


def data(index: int) -> tuple[MicroBatch, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(index)
    tokens, targets = torch.randint(1, VOCABULARY, (2, ROWS[index], TOKENS), generator=generator)
    targets[0, 3:7] = IGNORED
    return MicroBatch(index, 4, sum(ROWS[:index]), 100), tokens, targets


def step(stages: list[Stage], split: bool, optimizers: list[Optimizer] | None = None) -> dict[str, torch.Tensor]:
    """Gradients of three micro-batches, the loss and what went backward; split: a weight part waits for the next input part."""
    optimizers = optimizers or [Optimizer(stage, TrainTable(steps=1)) for stage in stages]
    found: dict[str, torch.Tensor] = {}
    for index in range(len(ROWS)):
        position, x, targets = data(index)
        for stage in stages:
            x = stage.forward(position, x, targets if stage.is_last else None)
        found[f"loss {index}"] = x
    for index in range(len(ROWS)):
        gradient: torch.Tensor | None = None
        for stage in reversed(stages):
            if not split:
                gradient = stage.backward(index, gradient)
                continue
            given = gradient
            gradient = stage.backward_input(index, given)
            if given is not None:
                given.fill_(torch.nan)  # the executor's buffers are used again
            if index > 0:
                stage.backward_weights(index - 1)
            if gradient is not None:
                gradient = gradient.clone()
                found[f"gradient {stage.first} {index}"] = gradient.clone()
    if split:
        for stage in stages:
            stage.backward_weights(len(ROWS) - 1)
    for optimizer in optimizers:
        found |= {name: optimizer.gradient(name).clone() for name in optimizer.targets}
    if stages[-1].tied_head is not None and stages[-1].tied_head.requires_grad:
        found["tied head"] = optimizers[-1].tied_gradient().clone()
    return found


def require_same_bits(chain: TransformersChain, **options: Any) -> None:
    whole = step(build(chain, **options), split=False)
    parts = step(build(chain, split_backward=True, **options), split=True)
    assert any(tensor.norm() > 0 for name, tensor in whole.items() if "loss" not in name)
    for name, tensor in whole.items():
        assert torch.equal(parts[name], tensor), f"{name}: {(parts[name] - tensor).norm() / tensor.norm()}"


@pytest.mark.parametrize("family", UNLIKE)
def test_both_parts_together_have_the_bits_of_one(family: str) -> None:
    require_same_bits(chain_of(family))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_narrow_dtypes_recompute_tied_heads_and_dropout(dtype: str, recompute: bool, tied: bool) -> None:
    changes = {"tie_word_embeddings": tied, **dropout_rates("granite")}
    require_same_bits(chain_of("granite", **changes), dtype=dtype, recompute=recompute)


def matrices(stage: Stage) -> dict[str, nn.Parameter]:
    modules = dict(stage.model.named_modules())
    return {
        n: p for n, p in stage.parameters.items() if type(modules[n.rpartition(".")[0]]) is nn.Linear and p.ndim == 2
    }


def test_recompute_is_asked_for_by_a_name_that_stays() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        for stage in build(chain_of("llama"), recompute=True):
            stage.chain.recompute(stage.model, False)


def test_matrices_wait_and_everything_else_does_not() -> None:
    stage = build(chain_of("llama"), split_backward=True)[1]
    optimizer = Optimizer(stage, TrainTable(steps=1))
    position, _, targets = data(0)
    stage.forward(position, torch.randn(ROWS[0], TOKENS, 32), targets)
    assert stage.deferred is not None and not any(stage.deferred.bytes_by_layer().values())
    stage.backward_input(0)
    waiting = matrices(stage)
    assert len(waiting) == 2 * 7 + 1, "two blocks and the head"
    for name in stage.parameters:
        assert bool(optimizer.gradient(name).count_nonzero() == 0) is (name in waiting), name
    stage.backward_weights(0)
    assert not any(stage.deferred.bytes_by_layer().values())
    assert all(optimizer.gradient(name).count_nonzero() > 0 for name in waiting)


def gradients_of(stage: Stage, layer: int) -> dict[str, torch.Tensor]:
    """Clones of what the parameters of a layer have so far, the head's copy of a tied matrix among them."""
    owned = {name: p for name, p in stage.parameters.items() if stage.chain.layer_of(name) == layer}
    if layer == stage.chain.layer_count - 1 and stage.tied_head is not None:
        owned["tied head"] = stage.tied_head
    return {name: p.grad.clone() for name, p in owned.items() if p.grad is not None}


def reports(stages: list[Stage], split: bool = False) -> list[int]:
    """Layers reported in one backward. Each must be whole when it is reported, and the next one must not have begun."""
    order: list[int] = []
    position, x, targets = data(0)
    for stage in stages:
        x = stage.forward(position, x, targets if stage.is_last else None)
    gradient: torch.Tensor | None = None
    for stage in reversed(stages):
        then: dict[int, dict[str, torch.Tensor]] = {}

        def finished(layer: int, stage: Stage = stage, then: dict[int, dict[str, torch.Tensor]] = then) -> None:
            order.append(layer)
            then[layer] = gradients_of(stage, layer)
            matrices_only = matrices(stage) if split else stage.parameters
            assert layer == stage.first or not gradients_of(stage, layer - 1).keys() & matrices_only.keys(), "late"

        if split:
            gradient = stage.backward_input(0, gradient)
            stage.backward_weights(0, finished)
        else:
            gradient = stage.backward(0, gradient, finished)
        for layer, seen in then.items():
            now = gradients_of(stage, layer)
            assert now.keys() == seen.keys() and all(torch.equal(now[name], seen[name]) for name in now), layer
    return order


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("family", UNLIKE)
def test_layers_are_reported_when_their_gradients_are_whole(family: str, recompute: bool) -> None:
    chain = chain_of(family)
    assert reports(build(chain, recompute=recompute)) == [5, 4, 3, 2, 1, 0]
    assert reports(build(chain, recompute=recompute, split_backward=True), split=True) == [5, 4, 3, 2, 1, 0]


def test_an_end_without_parameters_of_its_own_is_reported_for_its_tied_matrix() -> None:
    stages = build(chain_of("llama", tie_word_embeddings=True), cut=5)
    assert reports(stages) == [5, 4, 3, 2, 1, 0]
    assert stages[1].tied_head is not None and stages[1].tied_head.grad is not None


def test_parameters_without_gradient_hold_no_report_back() -> None:
    """As experts to which no token went."""
    stages = build(chain_of("llama"))
    for stage in stages:
        for name, parameter in stage.parameters.items():
            parameter.requires_grad_("_proj" not in name and "lm_head" not in name)
    assert reports(stages) == [5, 4, 3, 2, 1, 0]


def test_adapters_are_whole_after_the_first_part() -> None:
    chain = chain_of("llama")
    tuning = adapter_tuning(chain, AdapterTable(method="lora", rank=2), False, False)
    stages = build(chain, tuning=tuning, split_backward=True)
    position, x, targets = data(0)
    for stage in stages:
        x = stage.forward(position, x, targets if stage.is_last else None)
    order: list[int] = []
    stages[0].backward_input(0, stages[1].backward_input(0))
    adapters = [p for stage in stages for p in stage.parameters.values()]
    before = [p.grad.clone() for p in adapters]
    for stage in reversed(stages):
        assert stage.deferred is None
        stage.backward_weights(0, order.append)
    assert all(torch.equal(a, p.grad) for a, p in zip(before, adapters, strict=True))
    assert order == [4, 3, 2, 1], "neither embedding nor head is trained"


def halves_of(chain: TransformersChain, layer: int) -> list[list[Segment]]:
    """As if two ranks owned every other parameter."""
    segments = [Segment(name) for name in chain.parameters if chain.layer_of(name) == layer]
    return [segments[::2], segments[1::2]]


def part_of(layer: int) -> SharedPart:
    return SharedPart(layer, (0, 1))


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_gradients_of_a_layer_lie_in_one_buffer(dtype: str, split: bool) -> None:
    """The same gradients as without, in the same memory step after step, for a layer of experts and both ends."""
    chain = chain_of("mixtral", tie_word_embeddings=True)
    plain = step(build(chain, dtype, split_backward=split), split)
    bounds = (((0, 3), [0, 2]), ((3, chain.layer_count), [5]))
    stages = [
        stage_of(
            chain, *edges, Backend(), dtype, NormalStart(), 7, split_backward=split,
            shared={part_of(layer): halves_of(chain, layer) for layer in layers},
        )
        for edges, layers in bounds
    ]  # fmt: skip
    optimizers = [Optimizer(stage, TrainTable(steps=1)) for stage in stages]
    flat = {
        layer: (o, o.flat[part_of(layer)].gradients)
        for o, layers in zip(optimizers, ([0, 2], [5]), strict=True)
        for layer in layers
    }
    addresses = {layer: buffer.data_ptr() for layer, (_, buffer) in flat.items()}
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.zero()
        for _, buffer in flat.values():
            buffer.zero_()
        assert not any(buffer.count_nonzero() for _, buffer in flat.values())
        found = step(stages, split, optimizers)
        for layer, (optimizer, buffer) in flat.items():
            assert optimizer.flat[part_of(layer)].gradients.data_ptr() == addresses[layer]
            names = [name for name in optimizer.targets if chain.layer_of(name) == layer]
            assert buffer.dtype == torch.float32 and buffer.is_contiguous()
            assert buffer.double().square().sum() == pytest.approx(
                sum(optimizer.squared_norms()[name] for name in names)
            )
            for name in names:
                distance = optimizer.gradient(name).data_ptr() - addresses[layer]
                assert 0 <= distance < buffer.nbytes, f"{name}: a view"
        for name, gradient in plain.items():
            assert torch.equal(found[name], gradient), name
    buffer = flat[2][1]
    buffer.mul_(2)
    name = next(name for name in plain if chain.layer_of(name) == 2)
    assert torch.equal(optimizers[0].gradient(name), 2 * plain[name]), "what is summed in place is what AdamW sees"


@pytest.mark.parametrize(("recompute", "waits"), [(False, True), (True, False)])
def test_inputs_of_recomputed_layers_do_not_wait_for_backward(recompute: bool, waits: bool) -> None:
    stage = build(chain_of("llama"), split_backward=True, recompute=recompute)[1]
    inputs: list[weakref.ref[torch.UntypedStorage]] = []
    down = stage.model.get_submodule(f"{stage.chain.blocks_name}.2.mlp.down_proj")
    down.register_forward_pre_hook(lambda module, given: inputs.append(weakref.ref(given[0].untyped_storage())))
    position, _, targets = data(0)
    stage.forward(position, torch.randn(ROWS[0], TOKENS, 32), targets)
    assert (inputs[0]() is not None) is waits
    stage.backward_input(0)
    assert inputs[-1]() is not None, "the weight part needs it"
    stage.backward_weights(0)
    assert all(storage() is None for storage in inputs)
