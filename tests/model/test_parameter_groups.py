"""Learning rates of groups of parameters, what is frozen, noise on embeddings: what they mean for a model, and refusals."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.integrations.neftune import neftune_post_forward_hook

from hetero_mpi.device.backend import Backend
from hetero_mpi.job.schema import JobConfig
from hetero_mpi.job.training_tables import TrainTable
from hetero_mpi.model.adapters.adapter_tuning import tuning_of
from hetero_mpi.model.group.refusals import refusal
from hetero_mpi.model.model_cost import model_cost
from hetero_mpi.model.optimizer import Optimizer
from hetero_mpi.model.stage import MicroBatch, Stage
from hetero_mpi.model.transformers.chain import TransformersChain
from hetero_mpi.model.transformers.families import read_config
from hetero_mpi.model.transformers.weights import SeededStart
from hetero_mpi.model.tuning import Tuning
from hetero_mpi.state.reader import CheckpointReader
from hetero_mpi.state.resume_checks import check_fits, check_train, rate_change, step_change
from hetero_mpi.state.writer import CheckpointWriter
from tests.support.checkpoint_samples import told
from tests.support.errors import refuses
from tests.support.family_configs import tiny_keys
from tests.support.stages import stage_of


def chain(**keys: Any) -> TransformersChain:
    return TransformersChain(read_config({**tiny_keys("llama"), "tie_word_embeddings": False, **keys}))


def tuned(train: dict[str, Any], own: TransformersChain | None = None, **adapter: Any) -> Tuning:
    model, data = {"config": {"model_type": "llama"}}, {"text": ["a"]}
    return tuning_of(
        JobConfig.model_validate({"model": model, "data": data, "train": train, "adapter": adapter}), own or chain()
    )


def embedding(alpha: float | None, slices: int | None = None) -> Stage:
    tuning = tuned({"neftune_noise_alpha": alpha})
    stage = stage_of(chain(), 0, 1, Backend(), "fp32", SeededStart(1), tuning=tuning, slice_sequences=slices)
    assert isinstance(stage, Stage)
    return stage


def test_each_parameter_has_its_share_of_the_learning_rate() -> None:
    train = TrainTable(
        learning_rate=1e-3, learning_rates={"q_proj": 1e-4, "self_attn": 2e-3}, freeze=[0], weight_decay=0.5
    )
    own = chain()
    stage = stage_of(own, 0, own.layer_count, Backend(), "fp32", SeededStart(1), tuning=tuned(train.model_dump()))
    optimizer = Optimizer(stage, train)
    library = optimizer.library
    library.step(2e-3)
    found = {id(p): (group["lr"], group["weight_decay"]) for group in library.groups for p in group["params"]}
    layer = "model.layers.1."
    for name, expected in {f"{layer}self_attn.q_proj.weight": (2e-4, 0.5), f"{layer}self_attn.v_proj.weight": (4e-3, 0.5),
                           f"{layer}mlp.up_proj.weight": (2e-3, 0.5),
                           f"{layer}input_layernorm.weight": (2e-3, 0.0)}.items():  # fmt: skip
        assert found[id(optimizer.targets[name])] == pytest.approx(expected), name
    assert stage.parameters.keys() == {name for name in own.parameters if not name.startswith("model.layers.0.")}


def test_later_matrices_of_adapters_learn_faster() -> None:
    tuning = tuned(
        {"lora_plus_ratio": 8.0, "learning_rates": {"layers.0.*q_proj.lora_B": 3e-5}}, method="lora", dora=True
    )
    assert {name.partition(".lora_")[2].split(".")[0] for name in tuning.shares} == {"B", "magnitude_vector"}
    assert sorted({*tuning.shares.values()}) == pytest.approx([0.1, 8.0])


@pytest.mark.parametrize(
    ("keys", "kind", "shown"),
    [
        ({"learning_rates": {"q_prj": 1e-4}}, "train.pattern", '"q_prj"'),
        ({"learning_rates": {"_proj": 1e-3, "q_proj": 1e-4}}, "train.learning_rates", '"q_proj"'),
        ({"learning_rates": {"layers.0": 1e-3}, "freeze": [0]}, "train.learning_rates", '"layers.0"'),
        ({"freeze": ["nothing"]}, "train.pattern", '"nothing"'),
        ({"freeze": [9]}, "train.freeze", "block 9; its blocks are 0 to"),
        ({"freeze": ["."]}, "train.freeze", ""),
    ],
)
def test_what_names_nothing_is_refused(keys: dict[str, Any], kind: str, shown: str) -> None:
    with refuses(kind, shown):
        tuned(keys)
    with refuses("train.freeze", "embed_tokens"):  # a tied matrix is not frozen
        tuned({"freeze": ["embed_tokens"]}, chain(tie_word_embeddings=True))


def test_noise_depends_on_the_sequence_and_not_on_how_the_batch_is_cut() -> None:
    tokens = torch.arange(4 * 16).view(4, 16) % 50
    plain = embedding(None).forward(MicroBatch(0, 3, 0, 1), tokens)
    stage = embedding(5.0)
    whole = stage.forward(MicroBatch(0, 3, 0, 1), tokens)
    halves = [stage.forward(MicroBatch(i, 3, 2 * i, 1), tokens[2 * i : 2 * i + 2]) for i in range(2)]
    assert torch.equal(torch.cat(halves), whole)
    assert torch.equal(embedding(5.0, slices=1).forward(MicroBatch(0, 3, 0, 1), tokens), whole)
    assert not torch.equal(stage.forward(MicroBatch(0, 4, 0, 1), tokens), whole), "another step"
    assert torch.equal(stage.evaluate(tokens), plain)


def test_noise_has_the_distribution_of_transformers() -> None:
    tokens = torch.arange(32 * 64).view(32, 64) % 50
    plain = embedding(None).forward(MicroBatch(0, 3, 0, 1), tokens)
    ours = embedding(5.0).forward(MicroBatch(0, 3, 0, 1), tokens) - plain
    module = torch.nn.Identity()
    module.neftune_noise_alpha = 5.0  # type: ignore[assignment]
    theirs = neftune_post_forward_hook(module, plain, plain) - plain
    most = 5.0 / math.sqrt(plain.shape[1] * plain.shape[2])
    for noise in (ours, theirs):
        assert 0.99 * most < float(noise.abs().max()) <= 1.001 * most
        assert abs(float(noise.mean())) < 0.02 * most and float(noise.std()) == pytest.approx(
            most / math.sqrt(3), rel=0.02
        )
    assert not torch.equal(ours[0], ours[1])


def test_a_resume_with_other_rates_of_some_parameters_says_so() -> None:
    train = TrainTable(learning_rates={"q_proj": 1e-4})
    assert rate_change(train.model_dump(), train, 5) is None
    text = rate_change({**train.model_dump(), "learning_rates": None, "lora_plus_ratio": 2.0}, train, 5)
    assert text is not None and text.startswith(
        "Warning: learning rates of some parameters jump at step 6, since [train]"
    )
    assert 'learning_rates is { q_proj = 0.0001 }, was "", lora_plus_ratio is 1.0, was 2.0' in text


def test_a_resume_with_other_steps_says_so() -> None:
    train = TrainTable(preference="dpo", preference_smoothing=0.1, weight_decay=0.2)
    then = train.model_dump()
    assert step_change(then, train, 5) is None
    remark = step_change({**then, "preference_smoothing": 0.0, "weight_decay": 0.0, "clip_norm": None}, train, 5)
    expected = 'preference_smoothing is 0.1, was 0.0, weight_decay is 0.2, was 0.0, clip_norm is 1.0, was ""'
    assert remark == f"From step 6 on, [train] {expected}"


def test_going_on_with_another_preference_or_freeze_is_refused(tmp_path: Path) -> None:
    train, path = TrainTable(preference="dpo", freeze=[0]), tmp_path / "step.h5"
    with CheckpointWriter(path, told(1, job={"train": train.model_dump(), "data": {}})):
        pass
    with CheckpointReader(path) as reader:
        check_train(reader, path, train)
        with refuses("resume.setting"):
            check_train(reader, path, train.model_copy(update={"preference": "simpo"}))
        with refuses("resume.setting"):
            check_train(reader, path, train.model_copy(update={"freeze": []}))


def test_going_on_with_what_a_removed_key_did_is_refused(tmp_path: Path) -> None:
    for value in (False, True):
        train = {**TrainTable().model_dump(), "stale_step": value}
        with CheckpointWriter(tmp_path / f"{value}.h5", told(1, job={"train": train, "data": {}})):
            pass
        expected = refuses("resume.setting", "stale_step") if value else contextlib.nullcontext()
        with CheckpointReader(tmp_path / f"{value}.h5") as reader, expected:
            check_train(reader, reader.path, TrainTable())


def test_going_on_with_an_adapter_that_means_something_else_is_refused(tmp_path: Path) -> None:
    """Names and shapes of its tensors are the same."""
    own, path, train = chain(), tmp_path / "step.h5", TrainTable(dtype="fp32")
    keys: dict[str, Any] = {"method": "lora", "rank": 2, "start": "olora", "tokens": [3, 4]}

    job = {"train": train.model_dump(), "data": {}, "adapter": keys, "model": {"quantization": "none"}}
    with CheckpointWriter(path, told(1, job=job)):
        pass
    with CheckpointReader(path) as reader:
        for changed in ({"start": "pissa"}, {"tokens": [3, 5]}, {"alpha": 8.0}, {"rslora": True}):
            with refuses("resume.setting"):
                check_fits(reader, path, own, tuned({}, own, **{**keys, **changed}), train, 8)
        with refuses("resume.setting"):
            check_fits(reader, path, own, replace(tuned({}, own, **keys), nf4=True), train, 8)
        with refuses("resume.other_model"):
            check_fits(reader, path, own, tuned({}, own, **keys), train, 8)


def test_groups_of_ranks_take_frozen_parameters_and_noise() -> None:
    own = chain()
    assert refusal(own, tuned({"freeze": [0], "neftune_noise_alpha": 5.0}), (1, 1)) is None
    assert refusal(own, tuned({"learning_rates": {"q_proj": 1e-4}}), (1, 1)) is None


def test_frozen_parameters_take_no_memory_but_their_own() -> None:
    """Of a bf16 stage, where what is trained has masters; and of the plan."""
    own, tuning = chain(), tuned({"freeze": [0, "embed_tokens"]})
    stage = stage_of(own, 0, own.layer_count, Backend(), "bf16", SeededStart(1), tuning=tuning)
    trained = {spec.name for spec in tuning.specs(0, own.layer_count)}
    assert trained == own.parameters.keys() - tuning.still != set()
    assert trained == stage.parameters.keys() == stage.masters.keys() == Optimizer(stage, TrainTable()).targets.keys()
    assert all(stage.model_parameter(name).requires_grad == (name in trained) for name in own.parameters)
    cost, whole = (model_cost(own, one, "bf16", 16, dict.fromkeys(own.kinds, 0.0)) for one in (tuning, tuned({})))
    frozen = sum(own.parameters[name].count for name in tuning.still)
    assert whole.state_bytes(0, own.layer_count) - cost.state_bytes(0, own.layer_count) == 16 * frozen
    assert [x.parameters for x in whole.layers] == [x.parameters for x in cost.layers]
