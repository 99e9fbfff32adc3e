"""What is learnt of a conversation is what transformers' masks of assistant tokens hold, token by token.

The templates below are written after the formats that families of models document, with their answers marked
(``{% generation %}``); without the marks they are what a model directory brings.
"""

import re
from dataclasses import dataclass

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hetero_mpi.data.chat_template import PLAIN_FORM, choose_template, tokenize_records
from hetero_mpi.data.messages import ChatMessage
from hetero_mpi.data.records import Record


@dataclass(frozen=True)
class Format:
    """A chat template with its answers marked, and the tokens it needs."""

    marked: str
    end: str
    special: tuple[str, ...]
    begin: str | None = None
    system: bool = True

    @property
    def template(self) -> str:
        """As a model directory has it."""
        return re.sub(r"\{%-? *(end)?generation *-?%\}", "", self.marked)


VALUES = {"{role}": "message.role", "{content}": "message.content", "{trimmed}": "message.content | trim",
          "{bos}": "bos_token", "{eos}": "eos_token"}  # fmt: skip


def printed(text: str) -> str:
    """What prints a text, of which parts are ``VALUES``; what is a template already stays as it is."""
    parts = [VALUES.get(part, repr(part)) for part in re.split(r"(\{\w+\})", text) if part]
    return text if "{{" in text or not text else f"{{{{ {' + '.join(parts)} }}}}"


def turns(
    other: str, answer: str, behind: str = "", asking: str = "", before: str = "", asked: str | None = None
) -> str:
    """A template: every message by ``other``, but the answers, which are learnt, by ``answer``; ``behind`` each of these.

    ``asking``: before an answer; ``asked``: where an answer is asked for, if that is something else.
    """
    asking = printed(asking)
    return (
        printed(before)
        + "{% for message in messages %}{% if message.role == 'assistant' %}"
        + f"{asking}{{% generation %}}{printed(answer)}{{% endgeneration %}}{printed(behind)}"
        + "{% else %}"
        + printed(other)
        + "{% endif %}{% endfor %}{% if add_generation_prompt %}"
        + (asking if asked is None else printed(asked))
        + "{% endif %}"
    )


CHATML = "<|im_start|>{role}\n{content}<|im_end|>\n"
LLAMA3 = turns("<|start_header_id|>{role}<|end_header_id|>\n\n{trimmed}<|eot_id|>", "{trimmed}<|eot_id|>", "",
               "<|start_header_id|>assistant<|end_header_id|>\n\n", "{bos}")  # fmt: skip
R1 = turns("<User>{content}", "{content}{eos}", "", "<Assistant>", "{bos}", "<Assistant><think>\n")
"""Asks for a thought, which answers without one do not have."""
THOUGHT = (
    "{% if loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ message.content.lstrip('\n') + '<|im_end|>' }}"
)
NAMED = "{{ ('User: ' if message.role == 'user' else '') + message.content + '\n\n' }}"
_SAID = '{{- message.content }}{{- eos_token if message.role == "assistant" else "" }}'
_ANSWER = "{% generation %}{{- message.content + eos_token }}{% endgeneration %}"
PLAIN = PLAIN_FORM.replace(
    _SAID, '{% if message.role == "assistant" %}' + _ANSWER + "{% else %}{{- message.content }}{% endif %}"
)
LLAMA3_TOKENS = ("<|start_header_id|>", "<|end_header_id|>")
COMMAND_R = ("<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|END_OF_TURN_TOKEN|>")
DEEPSEEK = "<|end_of_sentence|>", "<|begin_of_sentence|>"
FORMATS = {
    "chatml": Format(turns(CHATML, "{content}<|im_end|>", "\n", "<|im_start|>assistant\n"), "<|im_end|>", ("<|im_start|>",)),
    "qwen3": Format(turns(CHATML, THOUGHT, "\n", "<|im_start|>assistant\n"), "<|im_end|>",
                    ("<|im_start|>", "<think>", "</think>")),
    "gemma": Format(turns("<start_of_turn>{role}\n{trimmed}<end_of_turn>\n", "{trimmed}<end_of_turn>", "\n",
                          "<start_of_turn>model\n", "{bos}"),
                    "<eos>", ("<start_of_turn>", "<end_of_turn>"), "<bos>", system=False),
    "llama3": Format(LLAMA3, "<|end_of_text|>", (*LLAMA3_TOKENS, "<|eot_id|>"), "<|begin_of_text|>"),
    "llama3-instruct": Format(LLAMA3, "<|eot_id|>", (*LLAMA3_TOKENS, "<|end_of_text|>"), "<|begin_of_text|>"),
    "llama2": Format(turns("{bos}[INST] {trimmed} [/INST]", " {trimmed} {eos}"), "</s>", (), "<s>", system=False),
    "mistral": Format(turns("[INST] {content}[/INST]", " {content}{eos}", before="{bos}"),
                      "</s>", ("[INST]", "[/INST]"), "<s>", system=False),
    "zephyr": Format(turns("<|{role}|>\n{content}{eos}\n", "{content}{eos}", "\n", "<|assistant|>\n"), "</s>", (), "<s>"),
    "phi3": Format(turns("<|{role}|>\n{content}<|end|>\n", "{content}<|end|>", "\n", "<|assistant|>\n"),
                   "<|endoftext|>", ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>")),
    "deepseek": Format(turns(NAMED, " {content}{eos}", "", "Assistant:", "{bos}"), DEEPSEEK[0], (), DEEPSEEK[1]),
    "r1": Format(R1, DEEPSEEK[0], ("<User>", "<Assistant>", "<think>"), DEEPSEEK[1]),
    "r1-in-letters": Format(R1, DEEPSEEK[0], (), DEEPSEEK[1]),
    "command-r": Format(turns("<|START_OF_TURN_TOKEN|><|USER_TOKEN|>{trimmed}<|END_OF_TURN_TOKEN|>",
                              "{trimmed}<|END_OF_TURN_TOKEN|>", "", "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", "{bos}"),
                        "<EOS_TOKEN>", COMMAND_R, "<BOS_TOKEN>"),
    "granite": Format(turns("<|start_of_role|>{role}<|end_of_role|>{content}<|end_of_text|>\n", "{content}<|end_of_text|>", "\n",
                            "<|start_of_role|>assistant<|end_of_role|>"),
                      "<|end_of_text|>", ("<|start_of_role|>", "<|end_of_role|>")),
    "glm4": Format(turns("<|{role}|>\n{content}", "\n{trimmed}", "", "<|assistant|>", "[gMASK]<sop>"),
                   "<|endoftext|>", ("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|system|>")),
    "plain": Format(PLAIN, "<|end|>", ()),
    "alpaca": Format(turns("### Instruction:\n{content}\n\n", "{content}", "\n\n", "### Response:\n"), "</s>", (), "<s>"),
}  # fmt: skip
RECORDS = (
    ("u: Hi", "a: Hello there."),
    ("u: Why?\n\nTell me", "a: Because it is so.\n", "u: And then", "a: So it is:\n\n* one\n* two"),
    ("u: Hello", "a: Hello", "u: Hello", "a: Hello Hello", "u: x", "a: \n y "),
    ("s: Be brief.", "u: Grün or blue", "a: Grün — 🙂!", "u: Why", "a: ..."),
)


def record(*said: str) -> Record:
    roles = {"s": "system", "u": "user", "a": "assistant"}
    messages = tuple(ChatMessage(roles[turn[0]], turn[3:]) for turn in said)  # type: ignore[arg-type]
    return Record(messages, "chat", "here")


def tokenizer_of(wanted: Format) -> PreTrainedTokenizerFast:
    """Byte-level, with the merges that Llama 3's has: of a full stop with the line breaks behind it, for one."""
    engine = Tokenizer(models.BPE())
    words = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    engine.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    engine.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    texts = [
        "### Instruction:\n### Response:\n.\n\n :\n\n Hello. \n\n User: Assistant: [INST] Because it is so.\n\n ## Task"
    ]
    engine.train_from_iterator(texts * 3, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=engine, eos_token=wanted.end, bos_token=wanted.begin)
    tokenizer.add_special_tokens({"additional_special_tokens": list(wanted.special)})
    return tokenizer


@pytest.mark.parametrize("said", RECORDS, ids=range(len(RECORDS)))
@pytest.mark.parametrize("name", FORMATS)
def test_what_is_learnt_is_transformers_mask(name: str, said: tuple[str, ...]) -> None:
    wanted = FORMATS[name]
    said = said if wanted.system else tuple(turn for turn in said if not turn.startswith("s"))
    tokenizer = tokenizer_of(wanted)
    tokenizer.chat_template = wanted.template
    conversation = [{"role": m.role, "content": m.content} for m in record(*said).messages]
    theirs = tokenizer.apply_chat_template(
        conversation, chat_template=wanted.marked, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, mask = list(theirs["input_ids"]), [bool(learnt) for learnt in theirs["assistant_masks"]]
    assert any(mask) and not all(mask)
    (ours,) = tokenize_records(
        tokenizer, choose_template(tokenizer, "plain" if name == "plain" else "chat"), [record(*said)]
    )
    last = max(index for index, learnt in enumerate(mask) if learnt) + 1
    expected, learnt = ids[:last], mask[:last]
    if expected[-1] != tokenizer.eos_token_id:
        expected, learnt = [*expected, tokenizer.eos_token_id], [*learnt, True]
    assert tokenizer.convert_ids_to_tokens(ours.ids) == tokenizer.convert_ids_to_tokens(expected)
    assert ours.answer.tolist() == learnt
