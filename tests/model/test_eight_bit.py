"""bitsandbytes' AdamW with moments in 8 bits: who has them, what they take, and that they move from plan to plan as they are.

``tests/runtime/test_equality.py`` holds whole runs against bitsandbytes in one process.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import bitsandbytes
import h5py
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from hetero_mpi.device.backend import Backend
from hetero_mpi.engine.trainer import Trainer
from hetero_mpi.job.training_tables import TrainTable
from hetero_mpi.model.adapters.adapter_tuning import with_moments
from hetero_mpi.model.library_optimizers import LibraryOptimizers
from hetero_mpi.model.model_cost import model_cost
from hetero_mpi.model.transformers.chain import TransformersChain
from hetero_mpi.model.transformers.families import read_config
from hetero_mpi.model.tuning import full_training
from hetero_mpi.planning.decision.decide import has_fitting_plan
from hetero_mpi.planning.decision.planner import make_plan, remedies
from hetero_mpi.planning.types.cluster_changes import with_copies, with_optimizer
from hetero_mpi.planning.types.cost import ModelCost
from hetero_mpi.planning.types.moments import EIGHT_BIT, TWO
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.request import PlanRequest
from hetero_mpi.state.hdf5 import KINDS
from hetero_mpi.state.reader import CheckpointReader, verify
from hetero_mpi.state.redistribute import LiveState, TensorShard, take_over, tensor_shards, transfers
from hetero_mpi.state.resume_checks import check_tensors, check_train
from hetero_mpi.state.saving import Snapshot
from hetero_mpi.state.writer import CheckpointWriter
from hetero_mpi.training.setup.setup import check_optimizer
from tests.engine.test_trainer import LAYOUTS, LENGTH, batch_of
from tests.support.checkpoint_samples import told
from tests.support.errors import refuses
from tests.support.family_configs import tiny_keys
from tests.support.planning_samples import make_model, make_profile
from tests.support.ranks import Threads, plan_of

TRAIN = TrainTable(steps=4, global_batch=8, learning_rate=3e-3, dtype="fp32", optimizer="adamw_8bit")
KEYS = {**tiny_keys("llama"), "hidden_size": 32, "intermediate_size": 200, "num_hidden_layers": 3, "vocab_size": 160}
CHAIN = TransformersChain(read_config({**KEYS, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}))
TUNING = with_moments(full_training(CHAIN), CHAIN, "adamw_8bit")
State = dict[tuple[str, str], torch.Tensor]


def threads_of(layout: str) -> Threads:
    return Threads(CHAIN, plan_of(CHAIN, LAYOUTS[layout], LENGTH), TRAIN, TUNING)


def take(threads: Threads, steps: range) -> list[float]:
    def play(trainer: Trainer) -> list[float]:
        return [trainer.step(step, batch_of(step)).decision.loss for step in steps]

    return list(threads.together(play)[0])


def state_of(threads: Threads) -> State:
    """Everything that a checkpoint holds, each from its owner, by way of a snapshot."""
    found: State = {}
    for trainer in threads.trainers:
        trainer.update.settle()
        own = [one for one in tensor_shards(trainer.tuning, trainer.plan, KINDS) if one.owner == trainer.rank]
        snapshot = Snapshot(own, trainer.backend)
        snapshot.copy_from(LiveState(trainer))
        assert all(torch.equal(snapshot(one), LiveState(trainer)(one)) for one in own)
        found |= {key: view.clone() for key, view in snapshot.views.items()}
    return found


@pytest.mark.parametrize("eight_bit", [True, False])
def test_steps_in_pieces_have_the_bits_of_bitsandbytes_own(eight_bit: bool) -> None:
    torch.manual_seed(3)
    start, *gradients = (torch.randn(300, 1777) for _ in range(4))  # two pieces and a part of a block
    own, plain = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    settings = {
        "lr": 1e-3,
        "betas": (TRAIN.beta1, TRAIN.beta2),
        "eps": TRAIN.epsilon,
        "weight_decay": TRAIN.weight_decay,
    }
    ours = LibraryOptimizers(TRAIN, True, [(own, True, EIGHT_BIT if eight_bit else TWO, 1.0)])
    theirs = bitsandbytes.optim.AdamW([plain], optim_bits=8 if eight_bit else 32, **settings)
    for gradient in gradients:
        own.grad, plain.grad = gradient.clone(), gradient.clone()
        ours.step(1e-3)
        theirs.step()
    assert torch.equal(own, plain)
    state = ours.state(own)
    assert len(state) == (4 if eight_bit else 2)
    for kind, tensor in state.items():
        assert torch.equal(tensor, theirs.state[plain][kind.replace("moments", "state")]), kind


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_embeddings_and_small_tensors_keep_fp32_as_in_transformers_trainer(family: str) -> None:
    keys = {**tiny_keys(family), "vocab_size": 300, "intermediate_size": 300}
    chain = TransformersChain(read_config(keys))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(chain.config)
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    expected = {n for n, p in model.named_parameters() if p.numel() >= 4096 and id(p) not in embeddings}
    assert with_moments(full_training(chain), chain, "adamw_8bit").moments == dict.fromkeys(expected, EIGHT_BIT)
    assert expected and any(spec.count >= 4096 for n, spec in chain.parameters.items() if n not in expected)


def test_moments_take_two_bytes_and_the_plan_counts_them() -> None:
    threads = threads_of("pipeline")
    take(threads, range(1))
    cost = model_cost(CHAIN, TUNING, "fp32", LENGTH, dict.fromkeys(CHAIN.kinds, 0.0))
    for trainer in threads.trainers:
        assert trainer.optimizer is not None and trainer.layers is not None
        held = {name: trainer.optimizer.state(name) for name in trainer.optimizer.targets}
        for name, state in held.items():
            count, eight_bit = CHAIN.parameters[name].count, name in TUNING.moments
            blocks = -(-count // 256)
            assert sum(t.nbytes for t in state.values()) == (2 * count + 8 * blocks if eight_bit else 8 * count)
        found = sum(tensor.nbytes for state in held.values() for tensor in state.values())
        assert abs(found - cost.owned_bytes(trainer.stages[0].first, trainer.stages[0].last)) <= 8 * len(held)


def brought_back(trainer: Trainer, reader: CheckpointReader) -> None:
    """Parameters and moments of a checkpoint that rank 0 reads, on the ranks that need them."""

    def tensor(shard: TensorShard) -> torch.Tensor:
        assert trainer.rank == 0
        return torch.from_numpy(reader.read(shard.kind, shard.name)[0])

    listed = tensor_shards(trainer.tuning, trainer.plan, KINDS)
    take_over(trainer, transfers(listed, lambda shard: (0,)), tensor, 2)


@pytest.mark.parametrize("layout", ["reversed, short micro-batch", "unlike pipelines"])
def test_a_checkpoint_goes_on_under_another_plan_with_the_same_bits(layout: str, tmp_path: Path) -> None:
    """From every owner to the file, and from there to the owners under the plan of one rank and back."""
    straight = threads_of(layout)
    take(straight, range(2))
    state, path = state_of(straight), tmp_path / "step.h5"
    assert {key[0]: t.dtype for key, t in state.items() if key[1] in TUNING.moments} == {
        "parameters": torch.float32,
        **dict.fromkeys(("moments1", "moments2"), torch.uint8),
        **dict.fromkeys(("absmax1", "absmax2"), torch.float32),
    }
    with CheckpointWriter(path, told(2)) as writer:
        for (kind, name), tensor in state.items():
            writer.write(kind, name, tensor.numpy(), str(tensor.dtype).removeprefix("torch."))
    assert verify(path) is None
    threads = threads_of("pipeline and rank")
    with CheckpointReader(path) as reader:
        check_tensors(reader, path, TUNING)
        threads.together(lambda trainer: brought_back(trainer, reader))
    moved = state_of(threads)
    assert moved.keys() == state.keys() and all(torch.equal(moved[key], tensor) for key, tensor in state.items())
    again = threads_of(layout)
    with CheckpointReader(path) as reader:
        again.together(lambda trainer: brought_back(trainer, reader))
    assert take(again, range(2, 4)) == take(straight, range(2, 4))
    found, expected = state_of(again), state_of(straight)
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


def test_a_checkpoint_without_its_scales_or_with_impossible_ones_is_damaged(tmp_path: Path) -> None:
    tensors = [("parameters", "float32", (5000,)), ("moments1", "uint8", (5000,)), ("moments2", "uint8", (5000,))]
    tensors += [("absmax1", "float32", (20,)), ("absmax2", "float32", (20,))]

    def write(path: Path, shapes: list[tuple[str, str, tuple[int, ...]]], value: float = 1.0) -> Path:
        with CheckpointWriter(path, told(1)) as writer:
            for kind, dtype, shape in shapes:
                number = value if kind.startswith("absmax") else 1
                writer.write(kind, "a.weight", torch.full(shape, number, dtype=getattr(torch, dtype)).numpy(), dtype)
        return path

    good = write(tmp_path / "good.h5", tensors)
    assert verify(good) is None
    for damaged in (tensors[:-1], [*tensors[:-1], ("absmax2", "float32", (19,))]):
        assert verify(write(tmp_path / f"{len(damaged)}.h5", damaged)) is not None
    with refuses("checkpoint.not_finite", "absmax1/a.weight"):
        write(tmp_path / "negative.h5", tensors, -1.0)
    with h5py.File(good, "r+") as file:  # as the format was before
        del file["absmax1"], file["absmax2"], file["moments1/a.weight"], file["moments2/a.weight"]
        file.attrs["format_version"] = 1
    assert verify(good) is None


def test_going_on_with_the_other_optimizer_is_refused(tmp_path: Path) -> None:
    """A checkpoint of before the key was there has fp32 moments."""
    path = tmp_path / "step.h5"
    plain, old = TRAIN.model_dump() | {"optimizer": "adamw"}, TRAIN.model_dump()
    del old["optimizer"]
    for then in (plain, old):
        with CheckpointWriter(path, told(1, job={"train": then, "data": {}})):
            pass
        with CheckpointReader(path) as reader:
            with refuses("resume.setting"):
                check_train(reader, path, TRAIN)
            check_train(reader, path, TRAIN.model_copy(update={"optimizer": "adamw"}))


def test_a_device_that_bitsandbytes_cannot_step_on_is_refused_by_name() -> None:
    class Meta(Backend):
        def __init__(self) -> None:
            super().__init__()
            self.device = torch.device("meta")

    check_optimizer(TRAIN, Backend(), "rank 0 (here)")
    with refuses("optimizer.unsupported"):
        check_optimizer(TRAIN, Meta(), "rank 3 (there)")


def test_plans_with_moments_in_8_bits_need_less_and_are_offered_as_a_remedy() -> None:
    model = replace(make_model(4), state_bytes_per_trainable_parameter=12.0)
    packed, trained = with_optimizer(model, "adamw_8bit"), sum(layer.trainable_parameters for layer in model.layers[1:])
    assert model.state_bytes(0, 6) - packed.state_bytes(0, 6) == pytest.approx((6 - 1 / 32) * trained)
    request = PlanRequest(4, 10, (1,), memory_reserve=0.0, streaming="never")

    def on(model: ModelCost, size: int) -> ClusterProfile:
        profile = make_profile([1.0, 1.0], model, size)
        return replace(profile, devices=tuple(replace(one, shares_host_memory=True) for one in profile.devices))

    size = next(size for size in range(10_000, 100_000, 250) if has_fitting_plan(on(packed, size), request))
    assert not has_fitting_plan(on(model, size), request)
    offered = list(remedies(on(model, size), request))
    assert any('train.optimizer = "adamw_8bit"' in text for text in offered), offered
    told = make_plan(on(packed, size), request).reasons
    assert any("adamw_8bit" in reason for reason in told), told
    counted = with_copies(on(packed, size), replace(request, copy_bytes_per_trainable_parameter=24.0)).model
    copies = 2 * packed.copy_bytes_per_trainable_parameter * (trained + 1000)
    assert counted.state_bytes(0, 6) - packed.state_bytes(0, 6) == pytest.approx(copies)
