"""Instruction records become the right tokens, and exactly the answers are targets.

Tables show a sequence as two lines: its tokens, and under each its target, "." where nothing is learnt; "+4" stands for
four padding tokens without targets.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from hetero_mpi.data.batch import IGNORED
from hetero_mpi.data.chat_template import choose_template, plain_texts, render_prompt, tokenize_records
from hetero_mpi.data.dataset import Dataset, SequenceSettings
from hetero_mpi.data.messages import ChatMessage
from hetero_mpi.data.record_sequences import RecordSequences, build_record_sequences, pack
from hetero_mpi.data.records import Record, read_records
from hetero_mpi.data.tokenizer import END_TOKEN, save_tokenizer, train_bpe
from tests.support.errors import refuses

ROOT = Path(__file__).parents[2]
CONTROL = ["<s>", "<system>", "<user>", "<assistant>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<' + message.role + '>' + message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token + '\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
"""Writes the beginning token by itself, as Llama 3's does, and a line break behind every answer, as ChatML does."""


def record(*turns: str, shape: str = "chat") -> Record:
    """``record("s: Be brief", "u: Hi", "a: Hello")``."""
    roles = {"s": "system", "u": "user", "a": "assistant"}
    messages = tuple(ChatMessage(roles[turn[0]], turn[3:]) for turn in turns)  # type: ignore[arg-type]
    return Record(messages, shape, f"file, line {len(turns)}")  # type: ignore[arg-type]


ALPACA = record("u: Add them\n\n1 and 2", "a: It is 3", shape="alpaca")
COMPLETION = record("u: Grass is", "a: green", shape="prompt/completion")
CHAT = record("s: Be brief", "u: Hi", "a: Hello you", "u: Why", "a: So it is")
RECORDS = (ALPACA, COMPLETION, CHAT)


CUT = ("packing", "held_out", "seed")


def build(tokenizer: PreTrainedTokenizerFast, template: str, length: int, *records: Record, **keys: object) -> Dataset:
    form = choose_template(tokenizer, template, records)  # type: ignore[arg-type]
    cut = {"packing": False, "held_out": 0.0, "seed": 0} | {key: keys[key] for key in keys.keys() & CUT}
    settings = SequenceSettings(length, **cut)  # type: ignore[arg-type]
    own = {key: value for key, value in keys.items() if key not in (*CUT, "evaluation")}
    sequences = RecordSequences(tokenizer, form, settings, **own)  # type: ignore[arg-type]
    return build_record_sequences([("data.records", records)], sequences, keys.get("evaluation"))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def plain() -> PreTrainedTokenizerFast:
    """Trained until every word is one token, so that tables can be read."""
    return train_bpe(plain_texts(RECORDS), 2000)


@pytest.fixture(scope="module")
def chatty() -> PreTrainedTokenizerFast:
    """One that begins every text with <s> by itself (as Llama's and Gemma's do), with a chat template that does too."""
    tokenizer = train_bpe(plain_texts(RECORDS), 2000)
    tokenizer.add_special_tokens({"bos_token": "<s>", "additional_special_tokens": CONTROL[1:]})
    begin = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        "<s> $A", special_tokens=[("<s>", begin)]
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    assert tokenizer("Hi")["input_ids"][0] == begin
    return tokenizer


def table(tokenizer: PreTrainedTokenizerFast, dataset: Dataset) -> str:
    """Every sequence of the dataset in two lines."""

    def shown(token: int) -> str:
        return "." if token == IGNORED else tokenizer.decode([token]).replace("\n", "\\n").replace(END_TOKEN, "<end>")

    lines = []
    for row, targets in zip(dataset.tokens.tolist(), dataset.targets.tolist(), strict=True):
        pairs = [(shown(token), shown(target)) for token, target in zip(row, targets, strict=True)]
        padding = 0
        while pairs[-1] == ("<end>", "."):
            pairs.pop()
            padding += 1
        widths = [max(map(len, pair)) for pair in pairs]
        for side, rest in ((0, f"|+{padding}" if padding else ""), (1, "")):
            cells = (pair[side].ljust(width) for pair, width in zip(pairs, widths, strict=True))
            lines.append(("|".join(cells) + rest).rstrip())
    return "\n".join(lines)


def drawn(text: str) -> str:
    return "\n".join(line.strip() for line in text.strip().split("\n"))


# Masks


def test_the_chat_template_learns_answers_only(chatty: PreTrainedTokenizerFast) -> None:
    """<s> is the template's and stands once; the line break it prints behind an answer is not learnt."""
    assert table(chatty, build(chatty, "auto", 19, *RECORDS)) == drawn(r"""
        <s>|<user>|Add| them|\n|\n|1| and| 2|<assistant>|It | is| 3   |+6
        .  |.     |.  |.    |. |. |.|.   |. |It         | is| 3 |<end>
        <s>|<user>|Grass| is|<assistant>|green|+13
        .  |.     |.    |.  |green      |<end>
        <s>|<system>|Be| brief|<user>|Hi|<assistant>|Hello| you |<end>|\n|<user>|Why|<assistant>|So | it| is  |+2
        .  |.       |. |.     |.     |. |Hello      | you |<end>|.    |. |.     |.  |So         | it| is|<end>
        """)


def test_the_plain_form_learns_answers_only(plain: PreTrainedTokenizerFast) -> None:
    assert table(plain, build(plain, "auto", 17, ALPACA, COMPLETION)) == drawn(r"""
        ##| Task|\n|Add| them|\n|\n|1| and| 2|\n|\n|##| Answer|\n|It | is
        . |.    |. |.  |.    |. |. |.|.   |. |. |. |. |.      |It| is| 3
        ##| Task|\n|Grass| is|\n|\n|##| Answer|\n   |green|+6
        . |.    |. |.    |.  |. |. |. |.      |green|<end>
        """), "the alpaca record is cut: it needs 18 positions"
    assert table(plain, build(plain, "plain", 33, CHAT)) == drawn(r"""
        ##| About|\n|Be| brief|\n|\n|##| Task|\n|Hi|\n|\n|##| Answer|\n   |Hello| you |<end>|\n|\n|##| Task|\n|Why|\n|\n|##| Answer|\n|So | it| is
        . |.     |. |. |.     |. |. |. |.    |. |. |. |. |. |.      |Hello| you |<end>|.    |. |. |. |.    |. |.  |. |. |. |.      |So| it| is|<end>
        """)  # noqa: E501


@pytest.mark.parametrize(
    ("keys", "whole"),
    [
        ({"prompt": "Hi", "completion": "Hello you"}, False),
        ({"prompt": [{"role": "user", "content": "Hi"}], "completion": [{"role": "assistant", "content": "Hello"}]}, False),
        ({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}, True),
        ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}, True),
    ],
)  # fmt: skip
def test_prompts_of_chats_alone_are_learnt_when_asked_for(
    keys: object, whole: bool, chatty: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    (tmp_path / "one.jsonl").write_text(json.dumps(keys))
    (read,) = read_records([str(tmp_path / "one.jsonl")]).records
    chats, same = (build(chatty, "chat", 24, read, train_on_prompt=asked) for asked in ("chats", whole))
    assert chats.targets.tolist() == same.targets.tolist()


def test_the_plain_form_begins_as_the_tokenizer_begins_texts_and_prompts_are_learnt_when_asked_for(
    chatty: PreTrainedTokenizerFast,
) -> None:
    """Everything but a record's first token, which nothing of its own stands before."""
    assert table(chatty, build(chatty, "plain", 14, COMPLETION)) == drawn(r"""
        <s>|##| Task|\n|Grass| is|\n|\n|##| Answer|\n   |green|+2
        .  |. |.    |. |.    |.  |. |. |. |.      |green|<end>
        """)
    dataset = build(chatty, "chat", 24, COMPLETION, CHAT, train_on_prompt=True, packing=True)
    assert table(chatty, dataset) == drawn(r"""
        <s>   |<user>|Grass| is        |<assistant>|green|<end>|<s>     |<system>|Be    | brief|<user>|Hi         |<assistant>|Hello| you |<end>|\n    |<user>|Why        |<assistant>|So | it| is
        <user>|Grass | is  |<assistant>|green      |<end>|.    |<system>|Be      | brief|<user>|Hi    |<assistant>|Hello      | you |<end>|\n   |<user>|Why   |<assistant>|So         | it| is|<end>
        """)  # noqa: E501


def test_packing_keeps_records_whole(chatty: PreTrainedTokenizerFast) -> None:
    """14 and 7 tokens share a sequence of 23 + 1, in the order of the file; 18 have one for themselves."""
    dataset = build(chatty, "chat", 23, ALPACA, CHAT, COMPLETION, packing=True)
    assert table(chatty, dataset) == drawn(r"""
        <s>|<user>|Add| them|\n|\n|1| and| 2|<assistant>|It | is| 3   |<end>|<s>|<user>|Grass| is|<assistant>|green|+3
        .  |.     |.  |.    |. |. |.|.   |. |It         | is| 3 |<end>|.    |.  |.     |.    |.  |green      |<end>
        <s>|<system>|Be| brief|<user>|Hi|<assistant>|Hello| you |<end>|\n|<user>|Why|<assistant>|So | it| is  |+6
        .  |.       |. |.     |.     |. |Hello      | you |<end>|.    |. |.     |.  |So         | it| is|<end>
        """)
    assert all(value in dataset.notes[0] for value in ("39", "81 %", "13"))
    assert dataset.batch(0, 2).target_tokens == 13


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 20), max_size=60))
def test_packing_loses_and_splits_nothing(lengths: list[int]) -> None:
    groups = pack(lengths, 20)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    assert all(0 < sum(lengths[index] for index in group) <= 20 for group in groups)
    filled = sorted(sum(lengths[index] for index in group) for group in groups)
    assert sum(filled[:2]) > 20 or len(filled) < 2, "no two sequences would go into one"
    assert groups == pack(lengths, 20) == sorted(sorted(group) for group in groups)


def test_an_answer_that_is_cut_keeps_its_beginning_and_one_that_is_lost_is_counted(
    chatty: PreTrainedTokenizerFast,
) -> None:
    dataset = build(chatty, "chat", 7, ALPACA, COMPLETION, CHAT, packing=True)
    assert table(chatty, dataset) == drawn("""
        <s>|<user>|Grass| is|<assistant>|green|+1
        .  |.     |.    |.  |green      |<end>
        <s>|<system>|Be| brief|<user>|Hi|<assistant>
        .  |.       |. |.     |.     |. |Hello
        """)
    assert "data.sequence_length = 7" in dataset.notes[1] and "file, line 2" in dataset.notes[2]
    whole = build(chatty, "chat", 7, ALPACA, COMPLETION, CHAT, train_on_prompt=True)
    assert len(whole.tokens) == 2, "a prompt alone is no reason to keep a record"
    with refuses("records.all_cut", "data.sequence_length = 5", "2 records", "file, line 2", "18 tokens"):
        build(chatty, "chat", 5, ALPACA, CHAT)


def test_a_merge_across_the_edge_belongs_to_the_answer() -> None:
    """The template ends the prompt with a line break, the answer begins with one, and the tokenizer joins the two."""
    tokenizer = train_bpe(["a\n\n\nb"], 300)
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message.content + '\n' }}"
        "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    )
    assert tokenizer.decode(render_prompt(tokenizer, "a", "chat")) == "a\n"
    assert table(tokenizer, build(tokenizer, "chat", 6, record("u: a", "a: \n\nb"))) == drawn(r"""
        a   |\n\n|\n|b |\n   |+1
        \n\n|\n  |b |\n|<end>
        """)


def test_a_template_without_an_end_gets_one_at_the_end_of_the_record(chatty: PreTrainedTokenizerFast) -> None:
    """Gemma's, for one, closes a turn with a token that is not the end token, and a line break, which is not learnt."""
    endless = with_template(chatty, CHAT_TEMPLATE.replace("eos_token", "'<system>'"))
    assert table(endless, build(endless, "chat", 17, record("u: Hi", "a: Hello", "u: Why", "a: So"))) == drawn(r"""
        <s>|<user>|Hi|<assistant>|Hello   |<system>|\n|<user>|Why|<assistant>|So      |<system>|+5
        .  |.     |. |Hello      |<system>|.       |. |.     |.  |So         |<system>|<end>
        """)


# Templates with a will of their own


def with_template(tokenizer: PreTrainedTokenizerFast, template: str) -> PreTrainedTokenizerFast:
    copy = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        bos_token="<s>",
        eos_token=END_TOKEN,
        pad_token=END_TOKEN,
        chat_template=template,
    )
    return copy


THOUGHT = "{% if loop.last %}{{ '<system>' }}{% endif %}"
"""As Qwen3's: only the last answer of a conversation is preceded by an empty thought."""


def test_a_template_that_treats_the_last_answer_apart(chatty: PreTrainedTokenizerFast) -> None:
    body = "{{ '<' + message.role + '>' }}{% if message.role == 'assistant' %}" + THOUGHT + "{% endif %}"
    thinking = with_template(chatty, CHAT_TEMPLATE.replace("{{ '<' + message.role + '>' + message.content }}",
                                                           body + "{{ message.content }}"))  # fmt: skip
    assert table(thinking, build(thinking, "chat", 12, record("u: Hi", "a: Hello", "u: Why", "a: So"))) == drawn(r"""
        <s>|<user>|Hi|<assistant>|Hello|<end>|\n|<user>|Why|<assistant>|<system>|So
        .  |.     |. |Hello      |<end>|.    |. |.     |.  |<system>   |So      |<end>
        """)


@pytest.mark.parametrize(
    ("old", "new", "shown"),
    [
        ("{{ '<assistant>' }}", "{{ '<assistant>Well' }}", "2 of 4"),
        ("message.content }}", "message.content + messages|length|string }}", "2 of 4"),
        ("message.content }}", "(message.content if loop.last or loop.index != 2 else '') }}", "2 of 4 ('Hello')"),
        ("{{ bos_token }}", "{{ raise_exception('Never ' + messages[0].role) }}", "TemplateError: Never user"),
        ("{{ bos_token }}", "{% if %}", "TemplateSyntaxError"),
    ],
)
def test_templates_that_hide_where_answers_are(chatty: PreTrainedTokenizerFast, old: str, new: str, shown: str) -> None:
    assert CHAT_TEMPLATE.replace(old, new) != CHAT_TEMPLATE
    broken = with_template(chatty, CHAT_TEMPLATE.replace(old, new))
    with refuses("template.failed", "file, line 4: ", shown, 'data.template = "plain"'):
        build(broken, "chat", 30, record("u: Hi", "a: Hello", "u: Why", "a: So"))


def test_a_template_knows_no_other_day_than_one(chatty: PreTrainedTokenizerFast) -> None:
    dated = with_template(chatty, "{{ strftime_now('%d %b %Y, %Y-%m-%d') }}" + CHAT_TEMPLATE)
    text = dated.decode(render_prompt(dated, "Hi", "chat"))
    assert text == "26 Jul 2024, 2024-07-26<s><user>Hi<assistant>"


def test_a_missing_template(plain: PreTrainedTokenizerFast) -> None:
    with refuses("template.missing", 'data.template = "chat"', '"plain"'):
        choose_template(plain, "chat", [ALPACA])
    with refuses("template.missing", "file, line 5", 'data.template = "plain"'):
        choose_template(plain, "auto", RECORDS)
    assert {choose_template(plain, "auto", RECORDS[:2]).kind, choose_template(plain, "plain", RECORDS).kind} == {
        "plain"
    }


def test_positions_count_in_every_record_of_a_sequence(chatty: PreTrainedTokenizerFast) -> None:
    dataset = build(chatty, "chat", 30, COMPLETION, CHAT, packing=True)
    lengths = [
        len(entry.ids) for entry in tokenize_records(chatty, choose_template(chatty, "chat"), [COMPLETION, CHAT])
    ]
    rest = 31 - sum(lengths)
    assert dataset.positions is not None and rest > 1
    assert dataset.positions.tolist() == [[*range(lengths[0]), *range(lengths[1]), *range(rest - 1)]]
    assert dataset.batch(0, 1).trimmed(1).positions.shape == dataset.batch(0, 1).trimmed(1).tokens.shape  # type: ignore[union-attr]
    assert build(chatty, "chat", 30, COMPLETION, CHAT, packing=True, isolate=False).positions is None


# Prompts for generation


@pytest.mark.parametrize("template", ["chat", "plain", "auto"])
def test_a_prompt_is_wrapped_as_training_wrapped_it(chatty: PreTrainedTokenizerFast, template: str) -> None:
    (trained,) = tokenize_records(chatty, choose_template(chatty, template), [COMPLETION])  # type: ignore[arg-type]
    prompt = render_prompt(chatty, "Grass is", template)  # type: ignore[arg-type]
    assert prompt == trained.ids[~trained.answer].tolist()
    assert chatty.decode([*prompt, *trained.ids[trained.answer]]).endswith("green" + END_TOKEN)


def test_a_prompt_of_a_text_job_is_the_beginning_of_a_document(chatty: PreTrainedTokenizerFast) -> None:
    assert chatty.decode(render_prompt(chatty, "Grass is", None)) == "<s>Grass is"
    assert render_prompt(chatty, "<s>Grass", None) == render_prompt(chatty, "Grass", None), "it begins once"
    assert render_prompt(chatty, "", None) == [chatty.bos_token_id]
    bare = train_bpe(plain_texts(RECORDS), 2000)
    assert bare.decode(render_prompt(bare, "Grass is", None)) == "Grass is"
    assert render_prompt(bare, "", None) == [bare.eos_token_id]


def test_the_plain_form_works_as_a_saved_chat_template(plain: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    form = choose_template(plain, "plain", RECORDS)
    save_tokenizer(with_template(plain, form.source), tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert render_prompt(again, "Hi", "auto") == render_prompt(plain, "Hi", "plain")
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    assert again.apply_chat_template(messages, tokenize=False) == "## Task\nHi\n\n## Answer\nHello" + END_TOKEN


# Shares


def test_shares_and_order_are_functions_of_the_data(plain: PreTrainedTokenizerFast) -> None:
    records = [record(f"u: Say {i}", f"a: It is {i}") for i in range(40)]

    def dataset(**keys: object) -> Dataset:
        return build(plain, "plain", 24, *records, **{"held_out": 0.1, "packing": True, **keys})

    first, again = dataset(), dataset()
    assert first.fingerprint() == again.fingerprint() != dataset(seed=1).fingerprint()
    assert first.fingerprint() != dataset(train_on_prompt=True).fingerprint()
    assert sorted([*first.train, *first.held_out]) == list(range(len(first.tokens)))
    assert all((first.targets != IGNORED).any(axis=1)), "no sequence is without a target"

    other = dataset(evaluation=[record("u: Say 7", "a: green"), record("u: Say 8", "a: brief")])
    everything = dataset(held_out=0.0)
    assert np.array_equal(other.tokens[other.train], everything.tokens)
    (batch,) = other.held_out_batches(9)
    assert batch.tokens.shape == (1, 24) or batch.tokens.shape == (2, 24)
    assert "green" in plain.decode(batch.tokens.ravel()) and "green" not in plain.decode(everything.tokens.ravel())
    with refuses("data.too_few_sequences", "40 tokens", "2 records"):
        build(plain, "plain", 40, ALPACA, COMPLETION, packing=True, held_out=0.1)


# The records that come with the program


@pytest.mark.parametrize("template", ["chat", "plain"])
def test_the_sample_data_is_sound(chatty: PreTrainedTokenizerFast, template: str) -> None:
    found = read_records([str(ROOT / "jobs" / "data" / "*.jsonl")])
    assert len(found.records) >= 200 and not found.unanswered
    assert {entry.shape for entry in found.records} == {"alpaca", "chat", "prompt/completion"}
    dataset = build(chatty, template, 4096, *found.records, packing=True, held_out=0.1)
    assert len(dataset.notes) == 1, "none is cut or dropped"
    for entry in tokenize_records(chatty, choose_template(chatty, template), found.records):  # type: ignore[arg-type]
        answers = [message.content for message in entry.record.messages if message.role == "assistant"]
        assert chatty.decode(entry.ids[entry.answer]) == "".join(answer + END_TOKEN for answer in answers)


def test_without_a_template_a_completion_stands_behind_its_prompt_as_in_trl(
    chatty: PreTrainedTokenizerFast, plain: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    trl = pytest.importorskip("trl", reason="needs the extra trl")
    rows = [{"prompt": f"Grass {n} is", "completion": text} for n, text in enumerate([" green", "", "ish\n", " a b "])]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    records = read_records([str(tmp_path / "a.jsonl")]).records
    theirs = [row for row in rows if row["completion"]]
    for tokenizer in (chatty, plain):
        tiny = AutoModelForCausalLM.from_config(
            AutoConfig.for_model("llama", vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                 num_attention_heads=1)
        )  # fmt: skip
        args = trl.SFTConfig(
            output_dir=str(tmp_path), report_to=[], use_cpu=True, max_length=None, eos_token=tokenizer.eos_token
        )
        trainer = trl.SFTTrainer(
            tiny,
            args,
            train_dataset=pytest.importorskip("datasets").Dataset.from_list(theirs),
            processing_class=tokenizer,
        )
        found = list(tokenize_records(tokenizer, choose_template(tokenizer, "none", records), records))
        assert [one.ids.tolist() for one in found] == trainer.train_dataset["input_ids"]
        labels = [np.where(one.answer, one.ids, -100).tolist() for one in found]
        assert labels == trainer.train_dataset["labels"]
    (tmp_path / "b.jsonl").write_text(json.dumps({**rows[0], "system": "Be brief"}))
    with refuses("template.conversation_without_template"):
        choose_template(plain, "none", read_records([str(tmp_path / "b.jsonl")]).records)
