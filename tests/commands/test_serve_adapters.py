"""``serve`` with several adapters beside one base: each request is answered as peft would with that adapter set."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from hetero_mpi.data.tokenizer import load_tokenizer
from hetero_mpi.serve.served_models import served_models
from tests.commands.test_generate import TEMPLATE, continue_with, model_with_tokenizer, written
from tests.commands.test_serve import Served, service
from tests.support.errors import refuses
from tests.support.plain_training import set_training
from tests.support.training_cases import corpus, tokenizer_directory

openai = pytest.importorskip("openai")
CASE = written("beside", "llama", changes=(("initializer_range", 0.4),))
PROMPT = "abc defgh"
ADAPTERS: dict[str, dict[str, Any]] = {
    "first": {"r": 2, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "second": {"r": 3, "lora_alpha": 3, "target_modules": ["q_proj", "down_proj"], "use_dora": True},
    "third": {"r": 4, "lora_alpha": 9, "target_modules": ["o_proj"], "layers_to_transform": [3], "use_rslora": True},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tmp_path_factory.mktemp("beside")


@pytest.fixture(scope="module")
def base(place: Path) -> Path:
    return model_with_tokenizer(place, tokenizer_directory(place, corpus(place)), CASE, TEMPLATE)


@pytest.fixture(scope="module")
def adapters(place: Path, base: Path) -> dict[str, Path]:
    """Saved by peft: unlike ranks, targets and kinds."""
    found = {}
    for seed, (name, options) in enumerate(ADAPTERS.items()):
        torch.manual_seed(seed)
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(task_type="CAUSAL_LM", **options))
        for own, parameter in model.named_parameters():
            if "lora_B" in own:
                torch.nn.init.normal_(parameter, std=0.7)
        found[name] = place / name
        model.save_pretrained(str(found[name]))
    return found


@pytest.fixture(scope="module")
def expected(base: Path, adapters: dict[str, Path]) -> dict[str, list[int]]:
    """Name of a model -> the tokens of peft, after ``set_adapter``; of the base with its adapters switched off."""
    model: Any = None
    for name, path in adapters.items():
        if model is None:
            model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), path, adapter_name=name)
        else:
            model.load_adapter(path, adapter_name=name)
    set_training(model, False)
    known, found = list(load_tokenizer(base)(PROMPT).input_ids), {}
    for name in adapters:
        model.set_adapter(name)
        found[name] = continue_with(model.base_model.model, known, 12)
    with model.disable_adapter():
        found[base.name] = continue_with(model.base_model.model, known, 12)
    assert len({tuple(tokens) for tokens in found.values()}) == 4, "each of them says something else"
    return found


@pytest.fixture(scope="module", params=[2, 3], ids=["np2, the source has an adapter", "np3, the source is the base"])
def served(request: pytest.FixtureRequest, place: Path, base: Path, adapters: dict[str, Path]) -> Iterator[Served]:
    others = [f"--adapter=second={adapters['second']}", f"--adapter={adapters['third']}"]
    source = adapters["first"] if request.param == 2 else base
    options = others if request.param == 2 else [*others, f"--adapter=first={adapters['first']}"]
    with service(request.param, source, place / f"output-{request.param}.txt", options) as running:
        yield Served(running, load_tokenizer(base), None)  # type: ignore[arg-type]


@pytest.mark.slow
def test_requests_are_answered_by_the_adapter_that_they_name(
    served: Served, base: Path, adapters: dict[str, Path], expected: dict[str, list[int]]
) -> None:
    """In one batch as alone, to the bit: all are peft's answers."""
    assert sorted(model.id for model in served.client.models.list().data) == sorted([base.name, *adapters])
    texts = {name: served.tokenizer.decode(tokens, skip_special_tokens=True) for name, tokens in expected.items()}

    def asked(name: str) -> tuple[str, Any]:
        answer = served.client.completions.create(model=name, prompt=PROMPT, max_tokens=12, temperature=0, logprobs=2)
        assert answer.model == name
        return answer.choices[0].text, answer.choices[0].logprobs

    alone = {name: asked(name) for name in texts}
    assert {name: text for name, (text, _) in alone.items()} == texts
    with ThreadPoolExecutor(8) as pool:
        names = list(texts) * 3
        assert list(pool.map(asked, names)) == [alone[name] for name in names]
    with pytest.raises(openai.NotFoundError, match=r"'nobody' .*second"):
        asked("nobody")


def test_what_cannot_be_served_beside_is_refused(base: Path, adapters: dict[str, Path], place: Path) -> None:
    first = adapters["first"]
    other = place / "other"
    other.mkdir()
    for path in base.iterdir():
        (other / path.name).symlink_to(path)
    foreign = place / "foreign"
    foreign.mkdir()
    for path in first.iterdir():
        (foreign / path.name).write_bytes(path.read_bytes())
    config = json.loads((foreign / "adapter_config.json").read_text())
    (foreign / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": str(other)}))
    for words in ([str(base)], [f"x={foreign}"], [str(first), f"first={adapters['second']}"], [f"{base.name}={first}"]):
        with refuses("serve.adapter", words[-1]):
            served_models(base, words)
    for key, value in (("modules_to_save", ["lm_head"]), ("trainable_token_indices", [3, 4])):
        whole = get_peft_model(
            AutoModelForCausalLM.from_pretrained(base), LoraConfig(**ADAPTERS["first"], **{key: value})
        )
        whole.save_pretrained(str(place / key))
        for source, other in ((base, place / key), (place / key, first)):
            with refuses("serve.adapter"):
                served_models(source, [str(other)])
        assert [model.name for model in served_models(place / key, [])] == [key]
    grown = place / "grown"
    shutil.copytree(first, grown)
    tokenizer = load_tokenizer(base)
    tokenizer.add_tokens([f"<{number}>" for number in range(400)])
    tokenizer.save_pretrained(grown)
    with refuses("serve.adapter"):
        served_models(base, [str(grown)])
    assert [model.name for model in served_models(base, [f"a={first}"])] == [base.name, "a"]
    assert [model.name for model in served_models(first, [])] == ["first"]
