"""``export``: runs and checkpoints become directories that plain transformers and peft load."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hetero_mpi.inference.source import open_source, stop_tokens
from hetero_mpi.interop.export import export
from hetero_mpi.model.adapters.adapter_files import adapter_of, check_adapter
from hetero_mpi.model.adapters.adapter_tuning import adapter_tuning
from hetero_mpi.model.transformers.chain import TransformersChain
from hetero_mpi.model.transformers.families import read_config
from hetero_mpi.state.directory import checkpoint_path
from tests.support import training_cases
from tests.support.errors import refuses
from tests.support.jobs import write_profile
from tests.support.mpi import ROOT, require_success
from tests.support.rank_pool import run_pooled
from tests.support.training_cases import Case

FULL = Case("full", "gemma2", True, 0.0, True, 4, "even", dtype="bf16")
TUNED = Case("tuned", "llama", False, 0.0, True, 4, "even", tuning="nf4")
DORA = Case("dora", "llama", False, 0.0, True, 4, "even", tuning="dora")
RSLORA = Case("rslora", "llama", False, 0.0, True, 4, "even", tuning="rslora")
PISSA = Case("pissa", "llama", False, 0.0, True, 4, "even", tuning="pissa-rslora")
NARROW = Case("narrow", "llama", False, 0.0, True, 4, "even", tuning="lora")
GENERATION = {"eos_token_id": list(range(3, 320, 2)), "temperature": 0.6, "top_k": 20, "use_cache": False}
"""Of two bases. So many tokens end a text that one of them is written soon."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A full run and runs of adapters on two ranks."""
    root = tmp_path_factory.mktemp("export")
    text = training_cases.corpus(root)
    tokenizer = training_cases.tokenizer_directory(root, text)
    entries = []
    for case in (FULL, TUNED, DORA, RSLORA, PISSA, NARROW):
        model = training_cases.model_directory(root, case)
        if case in (FULL, NARROW):
            (model / "generation_config.json").write_text(json.dumps(GENERATION))
        if case is NARROW:
            narrow(model)
        adapter = training_cases.adapter_directory(root, case) if case not in (FULL, PISSA) else None
        job = root / f"{case.name}.toml"
        job.write_text(training_cases.job_text(case, model, tokenizer, text, adapter))
        profile = write_profile(root / f"{case.name}.profile.toml", job, 2)
        entries.append({"job": str(job), "profile": str(profile), "run_dir": str(root / case.name)})
    (root / "cases.json").write_text(json.dumps(entries))
    require_success(run_pooled(2, "train_cases", [str(root / "cases.json")], timeout_s=240))
    return root


def narrow(model: Path) -> None:
    """Make the matrices bf16, and leave norms in fp32 and the label of config.json as it is."""
    tensors = load_file(model / "model.safetensors")
    narrowed = {name: tensor.bfloat16() if tensor.ndim > 1 else tensor for name, tensor in tensors.items()}
    save_file(narrowed, model / "model.safetensors", {"format": "pt"})
    assert json.loads((model / "config.json").read_text())["dtype"] == "float32"


def card_of(directory: Path, library: str = "transformers") -> str:
    """The text of a model card, which names this library."""
    card = ModelCard.load(directory / "README.md")
    assert card.data.library_name == library
    return str(card.text)


TOKENS = torch.arange(40).view(2, 20) * 7 % 320


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS, use_cache=False).logits.float()


@pytest.mark.slow
def test_a_full_run_np2(runs: Path, tmp_path: Path) -> None:
    sentence = export(runs / "full", tmp_path / "out", merge=False)
    assert "bfloat16" in sentence
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    written = AutoModelForCausalLM.from_pretrained(runs / "full" / "model")
    assert ours.dtype == torch.bfloat16 and torch.equal(logits(ours), logits(written))
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token == "<|end|>"
    assert "Loss: " in card_of(tmp_path / "out")
    export(checkpoint_path(runs / "full" / "checkpoints", 1), tmp_path / "earlier", merge=False)
    assert not torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "earlier")), logits(written))
    checkpoints = tmp_path / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    newest = max((runs / "full" / "checkpoints").glob("step-*.h5"))
    (checkpoints / newest.name).write_bytes(newest.read_bytes())
    assert "tokenizer" in export(checkpoints.parent, tmp_path / "bare", merge=False)
    assert not (tmp_path / "bare" / "tokenizer.json").exists()


@pytest.mark.slow
def test_a_card_that_cannot_be_written_is_left_out_np2(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("hetero_mpi.interop.export.write_card", lambda *_: 1 // 0)
    for name, written in (("full", "model.safetensors"), ("tuned", "adapter_model.safetensors")):
        export(runs / name, tmp_path / name, merge=False)
        assert (tmp_path / name / written).exists() and not (tmp_path / name / "README.md").exists()
    assert [record.levelname for record in caplog.records if "model card" in record.message].count("WARNING") == 2


@pytest.mark.slow
def test_an_adapter_np2(runs: Path, tmp_path: Path) -> None:
    require_success(subprocess.run(
        [sys.executable, "-m", "hetero_mpi", "export", str(runs / "tuned"), str(tmp_path / "out")],
        cwd=ROOT, capture_output=True, text=True,
    ))  # fmt: skip
    start = runs / "tuned-start"
    base = logits(AutoModelForCausalLM.from_pretrained(start))
    ours, written = (
        logits(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(start), directory))
        for directory in (tmp_path / "out", runs / "tuned" / "adapter")
    )
    assert torch.equal(ours, written) and not torch.allclose(ours, base, atol=1e-3)
    assert "LoRA" in card_of(tmp_path / "out", "peft")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tuned", "dora", "rslora", "pissa"])
def test_a_merged_model_np2(runs: Path, tmp_path: Path, name: str) -> None:
    export(runs / name, tmp_path / "out", merge=True)
    base = AutoModelForCausalLM.from_pretrained(runs / f"{name}-start")
    merged = PeftModel.from_pretrained(base, runs / name / "adapter").merge_and_unload()
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.allclose(logits(ours), logits(merged), rtol=1e-5, atol=1e-5)
    assert ours.dtype == torch.float32
    assert "base" in card_of(tmp_path / "out")


@pytest.mark.slow
def test_an_adapter_that_began_with_the_weights_np2(runs: Path, tmp_path: Path) -> None:
    """It is one for the weights as they were, as the run wrote it and exported, and generates over them."""
    export(runs / "pissa", tmp_path / "out", merge=False)
    ours, written = (
        load_file(path / "adapter_model.safetensors") for path in (tmp_path / "out", runs / "pissa/adapter")
    )
    assert ours.keys() == written.keys() and all(torch.equal(ours[name], written[name]) for name in ours)
    opened = open_source(runs / "pissa")
    assert opened.source.adapter is not None and opened.source.adapter["start"] == "default"
    assert opened.source.adapter["rank"] == adapter_of(tmp_path / "out")[0].rank == 2 * training_cases.LORA["r"]  # type: ignore[operator]


@pytest.mark.slow
def test_a_merged_model_has_the_dtypes_of_its_base_np2(runs: Path, tmp_path: Path) -> None:
    sentence = export(runs / "narrow", tmp_path / "out", merge=True)
    base, ours = (load_file(path / "model.safetensors") for path in (runs / "narrow-start", tmp_path / "out"))
    assert {name: tensor.dtype for name, tensor in ours.items()} == {name: t.dtype for name, t in base.items()}
    assert any(not torch.equal(ours[name], base[name]) for name in ours)
    assert "bfloat16" in sentence and json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.slow
@pytest.mark.parametrize("what", ["full", "full exported", "narrow merged"])
def test_transformers_stops_where_we_stop_np2(runs: Path, tmp_path: Path, what: str) -> None:
    """The base's generation_config.json is kept, the taught end is added, and keys and values are cached."""
    name, directory = what.split()[0], tmp_path / "out"
    if what == "full":
        directory = runs / "full" / "model"
    else:
        export(runs / name, directory, merge=name == "narrow")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    end = tokenizer.eos_token_id
    written = json.loads((directory / "generation_config.json").read_text())
    kept = {key: value for key, value in GENERATION.items() if key != "use_cache"}
    assert written == {**kept, "eos_token_id": [*GENERATION["eos_token_id"], end]}
    config = json.loads((directory / "config.json").read_text())
    assert "use_cache" not in config and config["eos_token_id"] == end == 0
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert model.config.use_cache and model.generation_config.use_cache in (None, True)
    stops = stop_tokens(config, directory, tokenizer)
    assert sorted(model.generation_config.eos_token_id) == stops
    new = model.generate(TOKENS[:1], do_sample=False)[0, TOKENS.shape[1] :].tolist()
    assert new[-1] in stops and not set(new[:-1]) & set(stops)


@pytest.mark.slow
def test_what_cannot_be_exported_np2(runs: Path, tmp_path: Path) -> None:
    with refuses("export.nothing_to_merge", runs / "full"):
        export(runs / "full", tmp_path / "out", merge=True)
    for name, merge in (
        ("full", False),
        ("tuned", False),
        ("tuned", True),
    ):  # llama.cpp does not know the base's tokenizer
        with refuses("gguf.trained_tokenizer"):
            export(runs / name, tmp_path / "out", merge, gguf="auto")
    with refuses("export.source", tmp_path):
        export(tmp_path, tmp_path / "out", merge=False)
    (tmp_path / "config.json").touch()
    with refuses("export.result", tmp_path):
        export(tmp_path, tmp_path / "out", merge=False)
    (tmp_path / "checkpoints").mkdir()
    with refuses("export.no_checkpoint", tmp_path):
        export(tmp_path, tmp_path / "out", merge=False)
    (runs / "tuned-start").rename(runs / "moved")
    try:
        with refuses("export.base_missing"):
            export(runs / "tuned", tmp_path / "out", merge=True)
    finally:
        (runs / "moved").rename(runs / "tuned-start")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_adapters_are_read_as_what_they_are_np2(runs: Path) -> None:
    """A job that says otherwise is refused, naming the key."""
    for case in (TUNED, DORA, RSLORA):
        directory = runs / case.name / "adapter"
        table, _ = adapter_of(directory)
        assert (table.dora, table.rslora) == (case is DORA, case is RSLORA)
        chain = TransformersChain(read_config(runs / f"{case.name}-start" / "config.json"))
        check_adapter(directory, adapter_tuning(chain, table, False, True))
        other = table.model_copy(update={"rslora": not table.rslora})
        with refuses("adapter.setting_differs", directory, "rslora = "):
            check_adapter(directory, adapter_tuning(chain, other, False, True))
