"""One copy of the files: ranks without the model train on exactly what rank 0 has, receive only their own layers, and keep them.

One mpirun on 3 ranks goes through all entries (programs/train_files.py). Tied Qwen 3 in bf16, 4 blocks, several files:

    rank 0   embedding, block 0     block 1 .. 2   rank 1     block 3, head (and the embedding again)   rank 2
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hetero_mpi.inference.source import open_source
from hetero_mpi.interop.export import export
from hetero_mpi.model.files import hub
from hetero_mpi.state.directory import checkpoint_path
from hetero_mpi.state.reader import CheckpointReader
from tests.support import case_plans, training_cases
from tests.support.equality import assert_same_run, losses
from tests.support.jobs import write_profile
from tests.support.mpi import finish_mpi
from tests.support.training_cases import NORMAL, Case

pytestmark = pytest.mark.slow

CASE = next(case for case in NORMAL if case.name == "qwen3-tied-unequal")
RANKS = 3
ITEMS_OF = {1: (2, 3), 2: (0, 4, 5)}
"""What ranks 1 and 2 load under an even split of six layers; the embedding (0) is rank 2's too, as the head is tied to it."""

NF4 = ["model.quantization=nf4", "adapter.method=lora"]


@dataclass(frozen=True)
class Outcome:
    """How a job ended, per rank."""

    raised: list[str]
    texts: list[str]
    printed: str
    received_bytes: list[int]
    most_at_once: int


class Scene:
    """A model, copies of it, and the jobs that run over them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.text = training_cases.corpus(directory)
        self.tokenizer = training_cases.tokenizer_directory(directory, self.text)
        self.model = self._model(CASE)
        self.nowhere = directory / "nowhere"
        self.cache = directory / "cache"

    def entry(self, name: str, model: str | None = None, **more: Any) -> dict[str, Any]:
        """A job of two steps, and ``more`` for programs/train_files.py."""
        job = self.directory / f"{name}.toml"
        cache = more.pop("cache", "")
        text = training_cases.job_text(CASE, self.model, self.tokenizer, self.text, None)
        plain = self.directory / "plain.toml"
        plain.write_text(text)
        text = text.replace(f'path = "{self.model}"', f'path = "{model or self.model}"\nshard_cache = "{cache}"')
        if model is not None:  # it brings its tokenizer
            text = text.replace(f'path = "{self.tokenizer}"', "")
        job.write_text(text)
        pipelines = more.pop("pipelines", "one")
        split = more.pop("split", "even")
        path, case = self.directory / f"{pipelines}-{split}.plan.toml", replace(CASE, schedule="zbv", tuning="lora")
        plan = case_plans.write_plan(path, case, RANKS, split, pipelines)
        changes = more.pop("set", ())
        made_up = self.directory / f"{'-'.join(changes)}.profile.toml"
        profile = made_up if made_up.exists() else write_profile(made_up, plain, RANKS, changes)
        common = {"job": job, "plan": plan, "profile": profile, "run_dir": self.directory / name}
        return {**common, "set": ["train.steps=2", *changes], **more}

    def hidden(self, *ranks: int) -> dict[str, str]:
        return {str(rank): str(self.nowhere) for rank in ranks}

    def cached_layers(self) -> dict[int, Path]:
        return {int(path.name.removeprefix("layer-")): path for path in self.cache.glob("*/layer-*")}

    def other_values(self) -> Path:
        """A model of the same shapes, file names and file sizes."""
        other = self.directory / "other-values"
        shutil.copytree(self.model, other)
        for path in other.glob("*.safetensors"):
            save_file({name: tensor * 1.01 for name, tensor in load_file(path).items()}, path, {"format": "pt"})
        return other

    def hub(self, home: Path, name: str) -> None:
        """The layout of the Hugging Face cache, made by hand."""
        folder = home / "hub" / f"models--{name.replace('/', '--')}"
        snapshot = folder / "snapshots" / ("0123456789" * 4)
        shutil.copytree(self.model, snapshot)
        for path in self.tokenizer.iterdir():
            shutil.copy(path, snapshot)
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text(snapshot.name)

    def layer_bytes(self) -> dict[int, int]:
        """Layer -> bytes of its tensors, from the files alone."""
        sizes = dict.fromkeys(range(6), 0)
        for path in self.model.glob("*.safetensors"):
            for name, tensor in load_file(path).items():
                assert tensor.dtype == torch.bfloat16
                block = name.removeprefix("model.layers.").split(".")[0]
                layer = int(block) + 1 if block.isdigit() else 0 if "embed_tokens" in name else 5
                sizes[layer] += tensor.nbytes
        return sizes

    def _model(self, case: Case) -> Path:
        start = AutoModelForCausalLM.from_pretrained(training_cases.model_directory(self.directory, case))
        target = self.directory / "model"
        start.to(torch.bfloat16).save_pretrained(target, max_shard_size="30KB")
        assert len(list(target.glob("*.safetensors"))) > 2
        return target


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="module")
def outcomes(scene: Scene) -> dict[str, Outcome]:
    home = scene.directory / "huggingface"
    scene.hub(home, "tiny/qwen3")
    scene.hub(home, "tiny/half")
    next((home / "hub" / "models--tiny--half" / "snapshots").rglob("model-00002-*")).unlink()
    (scene.directory / "file").write_text("not a directory")
    hidden = scene.hidden(1, 2)
    spoilt = [str(scene.cache / "*" / "layer-00002" / "*.safetensors")]
    entries = {
        "everywhere": scene.entry("everywhere"),
        "hidden": scene.entry("hidden", at=hidden),
        "hidden-looped": scene.entry("hidden-looped", at=hidden, split="looped"),
        "fails": scene.entry("fails", at=hidden, fails=2),
        "damaged-there": scene.entry("damaged-there", at={"1": str(scene.directory / "damaged")}),
        "other-there": scene.entry("other-there", at={"1": str(scene.other_values())}),
        "unusable": scene.entry("unusable", at=hidden, cache=scene.directory / "file"),
        "cache-first": scene.entry("cache-first", at=hidden, cache=scene.cache),
        "cache-second": scene.entry("cache-second", at=hidden, cache=scene.cache),
        "cache-spoilt": scene.entry("cache-spoilt", at=hidden, cache=scene.cache, spoil=spoilt),
        "nf4": scene.entry("nf4", set=NF4),
        "nf4-hidden": scene.entry("nf4-hidden", at=hidden, set=NF4),
        "pipelines": scene.entry("pipelines", at=hidden, pipelines="two"),
        "hub": scene.entry("hub", "tiny/qwen3", at=scene.hidden(2)),
        "hub-lora": scene.entry("hub-lora", "tiny/qwen3", set=["adapter.method=lora", "adapter.targets=['q_proj']"]),
        "hub-half": scene.entry("hub-half", "tiny/half"),
        "hub-absent": scene.entry("hub-absent", "tiny/absent"),
    }
    damaged = shutil.copytree(scene.model, scene.directory / "damaged")
    cut = next(damaged.glob("model-00002-*"))
    cut.write_bytes(cut.read_bytes()[:-100])
    listed, results = scene.directory / "entries.json", scene.directory / "outcomes.json"
    listed.write_text(json.dumps(list(entries.values()), default=str))
    environment = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(home / "hub")}
    finish_mpi(RANKS, ["tests/programs/train_files.py", str(listed), str(results)], 240, environment)
    return {
        name: Outcome(
            [rank["raised"] for rank in ranks],
            [rank["text"] for rank in ranks],
            ranks[0]["printed"],
            [rank["received_bytes"] for rank in ranks],
            ranks[0]["most_at_once"],
        )
        for name, ranks in zip(entries, json.loads(results.read_text()), strict=True)
    }


def expected_bytes(scene: Scene, layers: dict[int, tuple[int, ...]]) -> list[int]:
    sizes = scene.layer_bytes()
    return [sum(sizes[layer] for layer in layers.get(rank, ())) for rank in range(RANKS)]


@pytest.mark.parametrize("name", ["hidden", "hidden-looped", "damaged-there", "other-there", "cache-first", "cache-second",
                                  "cache-spoilt", "hub"])  # fmt: skip
def test_the_run_equals_the_one_where_all_ranks_have_the_files_np3(
    outcomes: dict[str, Outcome], scene: Scene, name: str
) -> None:
    assert outcomes["everywhere"].raised == outcomes[name].raised == [""] * RANKS, outcomes[name].texts
    assert len(losses(scene.directory / "everywhere")) == 2
    assert_same_run(scene.directory / name, scene.directory / "everywhere")


def test_every_holder_of_an_layer_receives_it_np3(outcomes: dict[str, Outcome], scene: Scene) -> None:
    """Rank 2 alone is one pipeline, ranks 0 and 1 another."""
    assert outcomes["pipelines"].raised == [""] * RANKS, outcomes["pipelines"].texts
    ours, expected = (losses(scene.directory / name)[0] for name in ("pipelines", "everywhere"))
    assert ours == pytest.approx(expected, rel=1e-6)
    layers = {1: (0, 5), 2: tuple(range(6))}
    assert outcomes["pipelines"].received_bytes == expected_bytes(scene, layers)


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("everywhere", {}),
        ("hidden", ITEMS_OF),
        ("hidden-looped", {1: (1, 4), 2: (2, 0, 5)}),
        ("nf4-hidden", ITEMS_OF),
        ("damaged-there", {1: ITEMS_OF[1]}),
        ("other-there", {1: ITEMS_OF[1]}),
        ("cache-first", ITEMS_OF),
        ("cache-second", {}),
        ("cache-spoilt", {1: (2,)}),
        ("hub", {2: ITEMS_OF[2]}),
    ],
)
def test_a_rank_receives_only_what_it_lacks_np3(
    outcomes: dict[str, Outcome], scene: Scene, name: str, layers: dict[int, tuple[int, ...]]
) -> None:
    assert outcomes[name].received_bytes == expected_bytes(scene, layers)
    assert outcomes[name].most_at_once <= 2


def test_frozen_weights_are_sent_like_trained_ones_np3(outcomes: dict[str, Outcome], scene: Scene) -> None:
    assert outcomes["nf4"].raised == outcomes["nf4-hidden"].raised == [""] * RANKS, outcomes["nf4-hidden"].texts
    assert_same_run(scene.directory / "nf4-hidden", scene.directory / "nf4")
    assert losses(scene.directory / "nf4") != losses(scene.directory / "everywhere")


def test_rank_0_says_what_it_sends_and_why_np3(outcomes: dict[str, Outcome], scene: Scene) -> None:
    printed = outcomes["hidden"].printed
    assert f"): no {scene.nowhere}; sending " in printed and "kB to rank 2" in printed
    assert " of the model in " in printed and "/s)" in printed
    assert "sending" not in outcomes["everywhere"].printed
    other = outcomes["other-there"].printed
    assert "differs from rank 0's model (" in other and "has different values); send" in other and "rank 1 (" in other
    assert "damaged/model-00002-" in outcomes["damaged-there"].printed
    second = outcomes["cache-second"].printed
    assert (
        "2 of its 2 layers are in its shard cache" in second
        and "3 of its 3 layers" in second
        and "sending" not in second
    )


def test_an_adapter_names_its_base_as_the_job_does_np3(
    outcomes: dict[str, Outcome], scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by where this machine keeps it; and it is found again by that name."""
    assert outcomes["hub-lora"].raised == [""] * RANKS, outcomes["hub-lora"].texts
    run, home = scene.directory / "hub-lora", scene.directory / "huggingface"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    export(run, scene.directory / "exported", merge=False)
    for directory in (run / "adapter", scene.directory / "exported"):
        config = directory / "adapter_config.json"
        assert json.loads(config.read_text())["base_model_name_or_path"] == "tiny/qwen3"
        assert open_source(directory).source.base == str(hub.cached("tiny/qwen3"))
    assert open_source(run).source.base == str(hub.cached("tiny/qwen3"))
    with CheckpointReader(checkpoint_path(run / "checkpoints", 2)) as reader:
        assert reader.required("base_model") == "tiny/qwen3"
    export(run, scene.directory / "merged", merge=True)
    told = [path.read_text() for path in scene.directory.glob("exported/*.json")]
    assert not any(str(home) in text for text in told)
    snapshot = hub.cached("tiny/qwen3")
    assert snapshot is not None and hub.name_of(snapshot) == "tiny/qwen3"
    assert hub.name_of(scene.model) == str(scene.model)


def test_a_spoilt_entry_is_named_and_replaced_np3(outcomes: dict[str, Outcome], scene: Scene) -> None:
    entry = scene.cached_layers()[2]
    assert f"{entry} is damaged (" in outcomes["cache-spoilt"].printed
    assert set(scene.cached_layers()) == {0, 2, 3, 4, 5}


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("fails", ("rank 2 on ", "this layer cannot be converted")),
        ("unusable", ("ranks 1 on ", "[model] shard_cache", "/file/", "leave it empty")),
        ("hub-half", ('path = "tiny/half"', "1 of the ", "model-00002-", "hf download tiny/half", "HF_HUB_OFFLINE")),
        (
            "hub-absent",
            ('path = "tiny/absent"', "/huggingface/hub: it is not cached", "HF_HUB_OFFLINE", "hf download"),
        ),
    ],
)
def test_what_cannot_be_done_ends_all_ranks_with_a_clear_text_np3(
    outcomes: dict[str, Outcome], name: str, parts: tuple[str, ...]
) -> None:
    outcome = outcomes[name]
    assert outcome.raised == ["CollectiveUserError"] * RANKS
    assert len(set(outcome.texts)) == 1
    for part in parts:
        assert part in outcome.texts[0]
    assert "Traceback" not in outcome.texts[0]
