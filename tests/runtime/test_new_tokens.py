"""New tokens: embedding and head grow, the new rows are trained, and results open in plain transformers and peft, equal to training
there, over three ranks."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from hetero_mpi.data.dataset import Dataset, SequenceSettings
from hetero_mpi.data.text_sequences import build_sequences
from hetero_mpi.interop.export import export
from hetero_mpi.state.directory import checkpoint_path
from tests.support.equality import assert_same_run, evaluation, losses
from tests.support.jobs import GLOBAL_BATCH, SEQUENCE, Workshop, once_per_ranks
from tests.support.mpi import on_ranks, require_success
from tests.support.plain_training import short
from tests.support.plans import pipeline, write_plan
from tests.support.rank_pool import run_pooled

pytestmark = pytest.mark.slow

OLD, NEW, STEPS = 320, ["<tool>", "<|end of it|>"], 3
PROMPT = "abc <tool> ab"
LORA = {"method": "lora", "rank": 4, "alpha": 8.0, "targets": ["q_proj", "v_proj"]}
KINDS = {
    "full": {},
    "tokens": {"adapter": LORA},
    "saved": {"adapter": {**LORA, "modules_to_save": ["embed_tokens", "lm_head", "model.norm"]}},
    "nf4": {"adapter": LORA, "model": {"quantization": "nf4"}},
}
RESUMED = ("full-tied", "tokens-tied", "saved-untied")
JOBS = {f"{kind}-{'tied' if tied else 'untied'}": (kind, tied) for kind in KINDS for tied in (False, True)}


@dataclass
class Runs:
    place: Workshop
    generated: dict[str, list[int]]

    def run(self, name: str) -> Path:
        return self.place.directory / name

    def base(self, name: str) -> Path:
        return self.place.directory / f"{'tied' if JOBS[name][1] else 'untied'}-start"

    def start(self, name: str) -> Any:
        """The start in a plain process: transformers grows the model, by the mean alone."""
        model = AutoModelForCausalLM.from_pretrained(self.base(name))
        model.resize_token_embeddings(OLD + 2, mean_resizing=False)
        for module in {model.get_input_embeddings(), model.get_output_embeddings()}:
            module.weight.data[OLD:] = module.weight.data[:OLD].mean(0)
        return model

    def dataset(self) -> Dataset:
        tokenizer = AutoTokenizer.from_pretrained(self.place.tokenizer)
        tokenizer.add_tokens(NEW[:1])
        tokenizer.add_tokens(NEW[1:], special_tokens=True)
        lines = [line for line in self.place.text.read_text().split("\n") if line.strip()]
        return build_sequences(lines, tokenizer, SequenceSettings(SEQUENCE, True, 0.1, 7))


@pytest.fixture(scope="module")
def on(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return once_per_ranks(tmp_path_factory, lambda directory, ranks: _run(Workshop(directory), ranks))


def _run(place: Workshop, ranks: int) -> Runs:
    torch.set_num_threads(1)
    lines = place.text.read_text().splitlines()
    text = "\n".join(f"{line} {NEW[0]} {line[::-1]}{NEW[1]} {line[:9]}" for line in lines)
    place.text.write_text(text + "\n")
    entries, plan = {}, place.plan("plan", ranks, GLOBAL_BATCH, SEQUENCE)
    for name, (kind, tied) in JOBS.items():
        model = place.model("tied" if tied else "untied", blocks=2, tied=tied, vocab_size=OLD)
        values = place.values(model)
        values["tokenizer"] |= {"add": NEW[:1], "add_special": NEW[1:]}
        values["train"] |= {"steps": STEPS, "dtype": "fp32", "weight_decay": 0.1, "clip_norm": 1.0}
        entries[name] = place.entry(name, values, {"plan": plan}, **KINDS[kind])
    elsewhere = write_plan(place.directory / "elsewhere.toml", pipeline([ranks - 1], [0, 4], 2))
    for name in RESUMED:
        resumed = {"plan": elsewhere, "resume": checkpoint_path(place.directory / name / "checkpoints", 1)}
        entries[f"{name}-resumed"] = {**entries[name], **resumed, "run_dir": place.directory / f"{name}-resumed"}
    place.finish_entries(ranks, entries)
    listed, results = place.directory / "generate.json", place.directory / "generated.json"
    sources = {name: place.directory / name for name in JOBS}
    sources |= {f"{name}-adapter": run / "adapter" for name, run in sources.items() if (run / "adapter").exists()}
    options = {"prompt": PROMPT, "max_new_tokens": 12, "raw": True}
    shares = {"shares": [(0, 1), (1, 3), (3, 4)]} if ranks == 3 else {}
    listed.write_text(json.dumps({name: {"source": str(one), **options, **shares} for name, one in sources.items()}))
    require_success(run_pooled(ranks, "generate_cases", [str(listed), str(results)], timeout_s=240))
    told = json.loads(results.read_text())
    assert not any(one[0]["error"] for one in told.values()), [one[0]["error"] for one in told.values()]
    return Runs(place, {name: one[0]["tokens"] for name, one in told.items()})


def train_in_one_process(runs: Runs, name: str) -> tuple[list[float], Any]:
    """(losses, the model) of torch's AdamW, and of peft's adapter with the start values of ours."""
    kind, tied = JOBS[name]
    model, ends = runs.start(name), ["embed_tokens"] if tied else ["embed_tokens", "lm_head"]
    if kind != "full":
        further: dict[str, Any] = {"trainable_token_indices": {end: [OLD, OLD + 1] for end in ends}}
        if kind == "saved":
            further = {"modules_to_save": [*ends, "model.norm"], "ensure_weight_tying": tied}
        model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=LORA["targets"], **further))
    ours = {} if kind == "full" else start_of_ours(runs, name)
    trained = {short(n): p for n, p in model.named_parameters() if p.requires_grad}
    for own, parameter in trained.items():
        if ".lora_" in own:
            parameter.data = ours[own].clone()
    decay = [p for n, p in trained.items() if "norm" not in n]
    rest = [p for n, p in trained.items() if "norm" in n]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([one for one in groups if one["params"]], lr=3e-3, betas=(0.9, 0.95), eps=1e-8)
    found, data = [], runs.dataset()
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, data.batch(step, GLOBAL_BATCH))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(trained.values()), 1.0)
        optimizer.step()
        found.append(loss.item())
    return found, model


def start_of_ours(runs: Runs, name: str) -> dict[str, torch.Tensor]:
    from hetero_mpi.model.tuning import start_value

    shapes = {n: p.shape for n, p in loaded_tensors(runs.run(name) / "adapter").items() if ".lora_" in n}
    return {n: start_value(n, tuple(shape), 7) for n, shape in shapes.items()}


def loaded_tensors(adapter: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    found = load_file(adapter / "adapter_model.safetensors")
    return {name.removeprefix("base_model.model."): tensor for name, tensor in found.items()}


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    logits = model(input_ids=torch.from_numpy(batch.tokens).long()).logits.float()
    words = torch.from_numpy(batch.targets).long()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), words.flatten())


def opened(runs: Runs, name: str) -> Any:
    """A run's result in a plain process."""
    run = runs.run(name)
    if JOBS[name][0] == "full":
        return AutoModelForCausalLM.from_pretrained(run / "model")
    return PeftModel.from_pretrained(runs.start(name), run / "adapter")


PLAIN = [name for name in JOBS if not name.startswith("nf4")]


@on_ranks(3)
@pytest.mark.parametrize("name", PLAIN)
def test_ranks_equal_transformers_and_peft(on: Any, ranks: int, name: str) -> None:
    runs = on(ranks)
    expected, model = train_in_one_process(runs, name)
    assert losses(runs.run(name)) == pytest.approx(expected, rel=1e-6)
    theirs = dict(model.named_parameters())
    for own, parameter in opened(runs, name).named_parameters():
        assert torch.allclose(parameter, theirs[own], atol=2e-5), own


@on_ranks(3)
@pytest.mark.parametrize("name", JOBS)
def test_results_open_elsewhere_merged_and_not(on: Any, ranks: int, name: str, tmp_path: Path) -> None:
    runs, run = on(ranks), on(ranks).run(name)
    kind, tied = JOBS[name]
    result = run / ("model" if kind == "full" else "adapter")
    tokenizer = AutoTokenizer.from_pretrained(result)
    assert tokenizer.convert_tokens_to_ids(NEW) == [OLD, OLD + 1]
    assert tokenizer.decode([OLD, OLD + 1], skip_special_tokens=True) == NEW[0]
    model = opened(runs, name)
    plain = model.get_base_model() if kind != "full" else model
    assert plain.get_input_embeddings().weight.shape[0] == OLD + 2
    held_out = next(runs.dataset().held_out_batches(10_000, 64))
    with torch.no_grad():
        expected = loss_of(model, held_out).item()
    assert evaluation(run) == pytest.approx(expected, rel=1e-5 if kind != "nf4" else 0.2)
    if kind == "full":
        return
    export(run, tmp_path / "merged", merge=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.config.tie_word_embeddings is tied and len(merged.get_output_embeddings().weight) == OLD + 2
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").convert_tokens_to_ids(NEW) == [OLD, OLD + 1]
    with torch.no_grad():
        assert loss_of(merged, held_out).item() == pytest.approx(expected, rel=1e-6)
        own = model.merge_and_unload()
        assert loss_of(own, held_out).item() == pytest.approx(expected, rel=1e-6)


@on_ranks(3)
@pytest.mark.parametrize("name", RESUMED)
def test_a_run_goes_on_under_another_plan(on: Any, ranks: int, name: str) -> None:
    run = on(ranks).run(name)
    assert_same_run(run.with_name(f"{name}-resumed"), run)


@on_ranks(3)
@pytest.mark.parametrize("name", PLAIN)
def test_generate_knows_the_new_rows(on: Any, ranks: int, name: str) -> None:
    runs = on(ranks)
    model, prompt = opened(runs, name), AutoTokenizer.from_pretrained(runs.place.tokenizer)
    prompt.add_tokens(NEW)
    ids = torch.tensor([prompt(PROMPT).input_ids])
    assert OLD in ids[0].tolist()
    with torch.no_grad():
        whole = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, eos_token_id=0
        )
    expected = whole[0, ids.shape[1] :].tolist()
    assert runs.generated[name] == expected
    assert runs.generated.get(f"{name}-adapter", expected) == expected
