"""Generation over 1 and 3 ranks gives the tokens of transformers' ``generate`` in this process, whatever is generated from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from hetero_mpi.data.chat_template import render_prompt
from hetero_mpi.data.tokenizer import load_tokenizer, save_tokenizer
from hetero_mpi.inference.layer_split import share_out
from hetero_mpi.util.terminal import printable
from tests.support.family_configs import tiny_keys
from tests.support.jobs import write_profile
from tests.support.mpi import finish_mpi, require_success
from tests.support.plain_training import load_reference, set_training, with_right_products
from tests.support.rank_pool import run_pooled
from tests.support.training_cases import (
    DTYPES,
    NF4,
    Case,
    adapter_directory,
    corpus,
    model_directory,
    tokenizer_directory,
)

PROMPT = "abc defgh ab cab"
TOKENS = 24
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


@dataclass(frozen=True)
class Written(Case):
    """A model of the equality tests with other keys in its configuration, and how three ranks share it."""

    changes: tuple[tuple[str, Any], ...] = ()
    shares: tuple[tuple[int, int], ...] = ()

    @property
    def config(self) -> dict[str, object]:
        return {**super().config, **dict(self.changes)}


def written(name: str, family: str, tied: bool = False, **rest: Any) -> Written:
    return Written(name, family, tied, 0.0, True, 1, "even", **rest)


LONG_ROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "rope_theta": 10000.0}
SLIDING = (("sliding_window", 6), ("initializer_range", 0.05))  # with larger embeddings Gemma repeats itself
TWO_ROTARIES = (("rope_parameters", LONG_ROPE), ("original_max_position_embeddings", 16))
ENDS, IDLE, UNEVEN = ((0, 1), (1, 5), (5, 6)), ((0, 2), (2, 2), (2, 6)), ((0, 3), (3, 5), (5, 6))
MODELS = (
    written("llama", "llama"),
    written("llama-tied-bf16", "llama", True, dtype="bf16"),
    written("qwen3-tied-ends", "qwen3", True, shares=ENDS),
    written("gemma2-sliding-tied", "gemma2", True, changes=SLIDING, shares=UNEVEN),
    written("gemma2-sliding-idle", "gemma2", changes=SLIDING, shares=IDLE),
    written("gpt_neox", "gpt_neox", changes=(("initializer_range", 0.4),), shares=UNEVEN),
    written("phi3-sliding", "phi3", changes=(("sliding_window", 6),)),
    written("phi3-two-rotaries", "phi3", changes=TWO_ROTARIES, shares=UNEVEN),
)
SMALL = 100_000
"""Bytes of a rank's memory: room for two layers of the first of these models, not for half of it."""
LORA = written("qwen3-lora", "qwen3", True, tuning="lora")
STOPPING = written("stopping", "llama", True)
ANSWERING = written("answering", "llama", True)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("generate")
    torch.set_num_threads(1)
    return directory


@pytest.fixture(scope="module")
def tokenizer(place: Path) -> Path:
    return tokenizer_directory(place, corpus(place))


def model_with_tokenizer(place: Path, tokenizer: Path, case: Written, template: str | None = None) -> Path:
    """The case's model in its dtype, a tokenizer beside it."""
    path = model_directory(place, case)
    if case.dtype != "fp32":
        AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES[case.dtype]).save_pretrained(path)
    loaded = load_tokenizer(tokenizer)
    loaded.chat_template = template
    save_tokenizer(loaded, path)
    return path


def job(model: Path, data: str, sample: str, rest: str = "") -> str:
    return f"""
model.path = "{model}"
{rest}
data = {{ {data}, sequence_length = 24, evaluation_fraction = 0.0 }}
train = {{ steps = 2, global_batch = 2, micro_batch = 1, dtype = "fp32", learning_rate = 3e-3, seed = 3 }}
cluster.threads = 1
profile = {{ repeats = 1, largest_message_bytes = 65536 }}
sample = {{ {sample} }}
"""


@pytest.fixture(scope="module")
def entries(place: Path, tokenizer: Path) -> dict[str, dict[str, Any]]:
    """name -> options of ``generate``, or of ``train``."""
    found: dict[str, dict[str, Any]] = {}

    def add(name: str, source: Path, prompt: str = PROMPT, shares: Any = None, **options: Any) -> None:
        options = {"max_new_tokens": TOKENS, **options}
        found[name] = {"source": str(source), "prompt": prompt, **options, **({"shares": shares} if shares else {})}

    for case in MODELS:
        add(case.name, model_with_tokenizer(place, tokenizer, case), shares=case.shares)
    llama = model_directory(place, MODELS[0])
    add("streamed", llama)
    found["streamed"]["memory"] = SMALL

    lora = adapter_directory(place, LORA)
    written_config = json.loads((lora / "adapter_config.json").read_text())
    written_config["base_model_name_or_path"] = str(model_with_tokenizer(place, tokenizer, LORA))
    (lora / "adapter_config.json").write_text(json.dumps(written_config))
    add("lora", lora, shares=UNEVEN)

    stopping = model_with_tokenizer(place, tokenizer, STOPPING)
    (stopping / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, reference(stopping)[5]]}))
    add("stopping", stopping)
    answering = model_with_tokenizer(place, tokenizer, ANSWERING, TEMPLATE)
    add("answering", answering)
    add("answering-raw", answering, raw=True)

    for seed, top_p in ((3, 0.9), (4, 0.9), (3, 0.001)):
        add(f"sampled-{seed}-{top_p}", llama, temperature=0.9, top_p=top_p, seed=seed, shares=UNEVEN)

    records = place / "records.jsonl"
    records.write_text("\n".join(json.dumps({"prompt": f"ab {i}", "completion": "cab"}) for i in range(8)))
    nf4 = 'model.quantization = "nf4"\nadapter = { method = "lora", rank = 4 }'
    for name, text in {
        "text-run": job(llama, f'text = ["{place / "corpus.txt"}"], documents = "line"', f'prompt = "{PROMPT}"'),
        "records-run": job(
            model_directory(place, STOPPING),
            f'records = ["{records}"]',
            f'prompt = "{PROMPT}", max_new_tokens = 9',
            nf4,
        ),
    }.items():
        path = place / f"{name}.toml"
        path.write_text(text)
        profile = write_profile(place / f"{name}.profile.toml", path, 3)
        found[f"train-{name}"] = {"job": str(path), "profile": str(profile), "run_dir": str(place / name)}
        add(name, place / name)
    add("records-run-raw", place / "records-run", raw=True)
    for name, (options, _) in errors(place, llama).items():
        add(name, **options)
    return found


def errors(place: Path, llama: Path) -> dict[str, tuple[dict[str, Any], tuple[str, ...]]]:
    """name -> (options, values that the message shows)."""
    blank, gpt2, orphan, unfinished, own_cache = (
        place / name for name in ("blank", "gpt2", "orphan", "unfinished", "minimax")
    )
    for path in (blank, gpt2, orphan, unfinished / "checkpoints"):
        path.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(3)
    if not (own_cache / "config.json").exists():
        keys = tiny_keys("minimax")
        AutoModelForCausalLM.from_config(AutoConfig.for_model(keys.pop("model_type"), **keys)).save_pretrained(
            own_cache
        )
    (gpt2 / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (gpt2 / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    adapter = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ".*_proj"}
    adapter["base_model_name_or_path"] = "/no/such/model"
    (orphan / "adapter_config.json").write_text(json.dumps(adapter))
    weights = adapter_directory(place, LORA) / "adapter_model.safetensors"
    (orphan / "adapter_model.safetensors").write_bytes(weights.read_bytes())
    return {
        "missing": ({"source": place / "llama-stat"}, ("llama-stat", "llama-start")),
        "no model": ({"source": blank}, (str(blank), "config.json")),
        "unfinished": ({"source": unfinished}, (str(unfinished),)),
        "no tokenizer": (
            {"source": model_directory(place, written("bare", "llama"))},
            ("bare-start", "tokenizer.json"),
        ),
        "own cache": ({"source": own_cache}, ("'minimax'",)),
        "not proven": ({"source": gpt2}, ("'gpt2'",)),
        "no base": ({"source": orphan}, ("'/no/such/model'", "base_model_name_or_path")),
        "empty": ({"source": llama, "prompt": " \n"}, ("prompt",)),
        "too long": ({"source": llama, "max_new_tokens": 64}, ("64", "--max-new-tokens")),
        "hot": ({"source": llama, "temperature": -1.0}, ("--temperature -1.0",)),
    }


@pytest.fixture(scope="module")
def outcomes(place: Path, entries: dict[str, dict[str, Any]]) -> dict[int, dict[str, list[dict[str, Any]]]]:
    """ranks -> name -> what each rank saw. Three ranks go first and train; one rank generates from what they trained."""
    found = {}
    for ranks in (3, 1):
        listed, results = place / f"np{ranks}.json", place / f"np{ranks}-outcomes.json"
        listed.write_text(json.dumps({k: v for k, v in entries.items() if ranks == 3 or "job" not in v}, default=str))
        require_success(run_pooled(ranks, "generate_cases", [str(listed), str(results)], timeout_s=240))
        found[ranks] = json.loads(results.read_text())
    return found


def prompt_of(path: Path) -> list[int]:
    return list(AutoTokenizer.from_pretrained(path)(PROMPT).input_ids)


def continue_with(model: torch.nn.Module, prompt: list[int], tokens: int = TOKENS) -> list[int]:
    set_training(model, False)  # not model.eval(): see there
    ids = torch.tensor([prompt])
    with torch.no_grad():
        whole = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens
        )
    return [int(token) for token in whole[0, len(prompt) :]]


def reference(path: Path, prompt: list[int] | None = None) -> list[int]:
    return continue_with(AutoModelForCausalLM.from_pretrained(path), prompt or prompt_of(path))


def tokens_of(outcomes: dict[int, dict[str, list[dict[str, Any]]]], ranks: int, name: str) -> list[int]:
    """The tokens, which every rank that took part must have."""
    seen = outcomes[ranks][name]
    assert not seen[0]["error"], seen[0]["error"]
    for other in seen[1:]:
        assert other["tokens"] in ([], seen[0]["tokens"]) and not other["printed"]
    assert isinstance(seen[0]["tokens"], list)
    return seen[0]["tokens"]


RANKS = pytest.mark.parametrize("ranks", [1, 3], ids=["np1", "np3"])
Outcomes = dict[int, dict[str, list[dict[str, Any]]]]


@pytest.mark.slow
@RANKS
@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)
def test_greedy_tokens_are_those_of_transformers(case: Written, ranks: int, outcomes: Outcomes, place: Path) -> None:
    expected = reference(model_directory(place, case))
    assert len(set(expected)) > 5, "a model that repeats itself proves nothing"
    assert tokens_of(outcomes, ranks, case.name) == expected
    part = [rank for rank in outcomes[ranks][case.name] if rank["tokens"]]
    assert len(part) == (1 if ranks == 1 else 2 if case.shares == IDLE else 3)


@pytest.mark.slow
@RANKS
def test_a_model_larger_than_the_memory_is_streamed(ranks: int, outcomes: Outcomes, place: Path) -> None:
    assert tokens_of(outcomes, ranks, "streamed") == reference(model_directory(place, MODELS[0]))
    assert ("offloaded layer by layer" in outcomes[ranks]["streamed"][0]["printed"]) is (ranks == 1)


@pytest.mark.slow
@RANKS
def test_adapter_directory_is_used_over_its_base(ranks: int, outcomes: Outcomes, place: Path) -> None:
    base = model_directory(place, LORA)
    expected = continue_with(load_reference(LORA, base, adapter_directory(place, LORA)), prompt_of(base))
    assert expected != reference(base), "the adapter must matter"
    assert tokens_of(outcomes, ranks, "lora") == expected


@pytest.mark.slow
@RANKS
def test_text_stops_at_an_end_token_of_the_generation_config(ranks: int, outcomes: Outcomes, place: Path) -> None:
    expected = reference(model_directory(place, STOPPING))
    tokens = tokens_of(outcomes, ranks, "stopping")
    assert tokens == expected and len(tokens) < TOKENS
    assert f"{len(tokens)} tokens in" in outcomes[ranks]["stopping"][0]["printed"]


@pytest.mark.slow
@RANKS
def test_prompt_is_wrapped_where_there_is_a_chat_template(ranks: int, outcomes: Outcomes, place: Path) -> None:
    path = model_directory(place, ANSWERING)
    wrapped = list(AutoTokenizer.from_pretrained(path)(f"<user>{PROMPT}<a>").input_ids)
    assert tokens_of(outcomes, ranks, "answering") == reference(path, wrapped)
    assert tokens_of(outcomes, ranks, "answering-raw") == reference(path)
    assert "--raw" in outcomes[ranks]["answering-raw"][0]["printed"]


@pytest.mark.slow
def test_command_line_np1(place: Path, outcomes: Outcomes) -> None:
    """Of 1 and of 3 ranks in a program, and of the command: the text is printed as it is spelt."""
    path = model_directory(place, MODELS[0])
    words = ["--max-new-tokens", str(TOKENS), "--temperature", "0", "--top-p", "1", "--seed", "0"]
    result = finish_mpi(1, ["-m", "hetero_mpi", "generate", str(path), "--prompt", PROMPT, *words])
    text = load_tokenizer(path).decode(tokens_of(outcomes, 1, "llama"), skip_special_tokens=True)
    for printed in (result.stdout, *(outcomes[ranks]["llama"][0]["printed"] for ranks in (1, 3))):
        assert text in printed and "tokens/s" in printed


@pytest.mark.slow
def test_drawn_tokens_depend_on_the_seed_alone_np1_np3(outcomes: Outcomes, place: Path) -> None:
    names = ("sampled-3-0.9", "sampled-4-0.9", "sampled-3-0.001")
    drawn = [tokens_of(outcomes, 1, name) for name in names]
    assert drawn == [tokens_of(outcomes, 3, name) for name in names]
    assert drawn[0] != drawn[1]
    assert drawn[2] == reference(model_directory(place, MODELS[0])), "a tiny nucleus holds the likeliest token only"
    assert drawn[0] != drawn[2]


@pytest.mark.slow
@RANKS
def test_run_that_learnt_text_continues_it(ranks: int, outcomes: Outcomes, place: Path) -> None:
    run = place / "text-run"
    expected = reference(run / "model", render_prompt(load_tokenizer(run / "model"), PROMPT, None))
    assert tokens_of(outcomes, ranks, "text-run") == expected


@pytest.mark.slow
@RANKS
def test_run_that_learnt_records_answers_with_its_nf4_adapter(ranks: int, outcomes: Outcomes, place: Path) -> None:
    adapter = place / "records-run" / "adapter"
    base = AutoModelForCausalLM.from_pretrained(
        model_directory(place, STOPPING), dtype=torch.float32, quantization_config=BitsAndBytesConfig(**NF4)
    )
    model = PeftModel.from_pretrained(with_right_products(base), adapter)
    tokenizer = load_tokenizer(adapter)
    asked, raw = render_prompt(tokenizer, PROMPT, "plain"), prompt_of(adapter)
    assert tokens_of(outcomes, ranks, "records-run") == continue_with(model, asked)
    assert tokens_of(outcomes, ranks, "records-run-raw") == continue_with(model, raw)
    assert "NF4" in outcomes[ranks]["records-run"][0]["printed"]


@pytest.mark.slow
def test_sample_at_the_end_of_a_run_is_what_generate_writes_np3(outcomes: Outcomes, place: Path) -> None:
    for name, limit in (("text-run", 64), ("records-run", 9)):
        printed = outcomes[3][f"train-{name}"][0]
        assert not printed["error"], printed["error"]
        sample = (place / name / "sample.txt").read_text()
        assert printable(sample.rstrip("\n")) in printed["printed"], "an untrained model says anything"
        head, _, text = sample.partition("## Continuation\n")
        assert PROMPT in head and "greedy" in head
        tokens = tokens_of(outcomes, 3, name)[:limit]
        directory = place / name / ("model" if name == "text-run" else "adapter")
        # A character of several tokens may be cut in two by the limit, so the last ones are not compared.
        known = load_tokenizer(directory).decode(tokens, skip_special_tokens=True).rstrip("�")
        assert known and text.startswith(known)


@pytest.mark.slow
@RANKS
def test_errors_say_what_to_do(ranks: int, outcomes: Outcomes, place: Path) -> None:
    for name, (_, parts) in errors(place, model_directory(place, MODELS[0])).items():
        for rank in outcomes[ranks][name]:
            assert all(part in rank["error"] for part in parts), (name, rank["error"])


def test_shares_fill_memory_alike_on_few_ranks() -> None:
    table = [
        # layer bytes, memory of each rank, expected shares
        ([1, 1, 1, 1], [10, 10], [(0, 2), (2, 4)]),
        ([1, 1, 1, 1], [30, 10], [(0, 3), (3, 4)]),
        ([1, 1, 1, 1], [0, 10, 10], [(0, 0), (0, 2), (2, 4)]),
        ([1, 1], [10, 10, 10], [(0, 1), (1, 2), (2, 2)]),
        ([8, 1, 1, 1], [10, 10, 10], [(0, 1), (1, 4), (4, 4)]),
        ([5], [10], [(0, 1)]),
    ]
    for layer_bytes, memory, expected in table:
        assert share_out(layer_bytes, memory) == expected
