"""Modelfiles: the chat template in Go's language gives the same text, and what ends an answer and how it is drawn is there."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from hetero_mpi.data.chat_template import PLAIN_FORM
from hetero_mpi.data.tokenizer import train_bpe
from hetero_mpi.interop.gguf import layout_of, write_modelfile
from tests.support.errors import refuses
from tests.support.go_template import ollama_renders

SPECIALS = [
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|eot_id|>",
    "<|user|>",
    "<|end|>",
]
TURNS = "{% for m in messages %}"
CHATML = (
    TURNS + "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "a default": "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou are \"Q\" {by} {{A}}.<|im_end|>\n' }}{% endif %}"
    + CHATML,
    "headers": "{{ bos_token }}" + TURNS + "{{ '<|' + m.role + '|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n\n' }}{% endif %}",
    "no system": "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    + TURNS + "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
    "folded": "{{ bos_token }}{% set ns = namespace(first='') %}{% if messages[0].role == 'system' %}"
    "{% set ns.first = messages[0].content + '\n\n' %}{% set messages = messages[1:] %}{% endif %}" + TURNS
    + "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + (ns.first if loop.first else '') + m.content "
    "+ '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
    "instruction": "{{ bos_token }}" + TURNS + "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}",
    "thinking": CHATML.replace("assistant\n' }}", "assistant\n<think>\n' }}"),
    "plain": PLAIN_FORM,
}  # fmt: skip
NO_SYSTEM = ("no system", "instruction")
UNSAYABLE = {
    "the date": "{{ strftime_now('%d %b %Y') }}" + CHATML,
    "the last": CHATML.replace("m.content +", "m.content + ('!' if m.role == 'user' and loop.index0 > 2 else '') +"),
    "quotes": CHATML.replace("<|im_end|>", '<|im_end|>"""'),
    "lost": CHATML.replace("+ m.content", "+ (m.content if m.role == 'user' else '')"),
    "refused": "{{ raise_exception('never') }}",
    "several": {"default": CHATML, "tool_use": CHATML},
}


def tokenizer_with(template: Any, begins: bool = False) -> PreTrainedTokenizerFast:
    engine = train_bpe(["a ship sails home"] * 4, 300).backend_tokenizer
    engine.add_special_tokens(SPECIALS)
    if begins:
        engine.post_processor = TemplateProcessing("<s> $A", None, [("<s>", engine.token_to_id("<s>"))])
    found = PreTrainedTokenizerFast(tokenizer_object=engine, bos_token="<s>", eos_token="</s>")
    found.chat_template = template
    return found


def talks(system: bool) -> list[list[dict[str, str]]]:
    """Conversations of one to four turns that end with the user's."""
    texts = ("Who\nare {you}?", "A: <b>me</b>", "{{ .Content }}", "", "no")
    turns = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]
    found = [turns[:length] for length in (1, 3, 5)]
    return found + [[{"role": "system", "content": "Be kind."}, *talk] for talk in found if system]


@pytest.mark.parametrize("name, begins", product(TEMPLATES, [False, True]))
def test_the_template_gives_the_chat_templates_text(name: str, begins: bool) -> None:
    tokenizer = tokenizer_with(TEMPLATES[name], begins)
    layout = layout_of(tokenizer)
    assert layout is not None
    for talk in talks(name not in NO_SYSTEM):
        expected = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
        begin = "<s>" if begins else ""  # Ollama puts it there, as the tokenizer does
        assert begin + ollama_renders(layout.template, talk) == (begin + expected.removeprefix(begin))


@pytest.mark.parametrize("name", UNSAYABLE)
def test_what_go_cannot_say_is_left_out_with_a_reason(name: str, tmp_path: Path) -> None:
    tokenizer_with(UNSAYABLE[name]).save_pretrained(tmp_path)
    with pytest.raises(ValueError):
        layout_of(tokenizer_with(UNSAYABLE[name]))
    (note,) = write_modelfile(tmp_path, tmp_path / "x.gguf", None)
    assert "TEMPLATE" in note
    assert (tmp_path / "Modelfile").read_text() == 'FROM .\nPARAMETER stop "</s>"\n'


def test_stop_texts_and_sampling(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(CHATML)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "x.gguf").touch()
    settings = {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "repetition_penalty": 1.05,
        "do_sample": True,
        "max_length": 9,
    }
    ends = tokenizer.convert_tokens_to_ids(["<|eot_id|>", "</s>"])
    (tmp_path / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": ends}))
    assert write_modelfile(tmp_path, tmp_path / "x.gguf", None) == []
    lines = (tmp_path / "Modelfile").read_text().splitlines()
    assert lines[0] == "FROM ./x.gguf" and lines[1].startswith('TEMPLATE """{{ if .System }}<|im_start|>system')
    assert sorted(line for line in lines if line.startswith("PARAMETER")) == [
        "PARAMETER repeat_penalty 1.05",
        *(f'PARAMETER stop "{text}"' for text in ("</s>", "<|eot_id|>", "<|im_end|>")),
        "PARAMETER temperature 0.6",
        "PARAMETER top_k 20",
        "PARAMETER top_p 0.95",
    ]
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": False, "temperature": 0.6}))
    write_modelfile(tmp_path, tmp_path / "x.gguf", None)
    assert "PARAMETER temperature 0\n" in (tmp_path / "Modelfile").read_text()


@pytest.mark.parametrize(
    "key, value", [("temperature", "hot"), ("top_k", [1]), ("top_p", True), ("min_p", float("nan"))]
)
def test_odd_settings_are_named(key: str, value: Any, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({key: value}))
    with refuses("generation.value", f"generation_config.json: {key} = "):
        write_modelfile(tmp_path, tmp_path / "x.gguf", None)
