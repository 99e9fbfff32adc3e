"""Record files: every accepted shape, and every bad record named with file and line; and jobs that bring them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hetero_mpi.data.chat_template import render_prompt
from hetero_mpi.data.messages import ChatMessage
from hetero_mpi.data.records import read_records
from hetero_mpi.data.tokenizer import save_tokenizer, train_bpe
from hetero_mpi.job.load import LoadedJob, load_job
from hetero_mpi.training.setup.data_setup import prepare, prompt_template
from hetero_mpi.util.errors import UserError
from tests.support.errors import refuses
from tests.support.family_configs import tiny_keys
from tests.support.jobs import SMALLEST

USER, ASSISTANT = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
ALPACA = {"instruction": "Say hello", "input": "", "output": "Hello"}


def write(directory: Path, values: list[Any], name: str = "a.jsonl") -> str:
    path = directory / name
    path.write_text("\n".join(json.dumps(value, ensure_ascii=False) for value in values), encoding="utf-8")
    return str(path)


def turns(*pairs: tuple[str, str]) -> tuple[ChatMessage, ...]:
    return tuple(ChatMessage(role, content) for role, content in pairs)  # type: ignore[arg-type]


# Shapes


@pytest.mark.parametrize(
    ("value", "shape", "messages"),
    [
        (ALPACA, "alpaca", turns(("user", "Say hello"), ("assistant", "Hello"))),
        (
            {"instruction": "Add", "input": "1, 2", "output": "3", "text": "ignored"},
            "alpaca",
            turns(("user", "Add\n\n1, 2"), ("assistant", "3")),
        ),
        ({"instruction": "Add", "input": None, "output": "3"}, "alpaca", turns(("user", "Add"), ("assistant", "3"))),
        ({"prompt": "Grass is", "completion": " green"}, "prompt/completion",
         turns(("user", "Grass is"), ("assistant", " green"))),
        (
            {"prompt": "not this", "messages": [{"role": "system", "content": "Be brief"}, USER, ASSISTANT, USER]},
            "chat",
            turns(("system", "Be brief"), ("user", "Hi"), ("assistant", "Hello")),
        ),
        (
            {"id": 7, "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello\u2028!"}]},
            "chat",
            turns(("user", "Hi"), ("assistant", "Hello\u2028!")),
        ),
    ],
)  # fmt: skip
def test_shapes(tmp_path: Path, value: dict[str, Any], shape: str, messages: tuple[ChatMessage, ...]) -> None:
    for name, values in (("a.jsonl", [value]), ("a.json", [[value]])):
        (record,) = read_records([write(tmp_path, values, name)]).records
        assert (record.shape, record.messages) == (shape, messages)


def test_files_are_sorted_and_sources_are_named(tmp_path: Path) -> None:
    """JSON lines or an array is told by the content, not by the name; empty lines and a byte order mark are no matter."""
    (tmp_path / "b.json").write_text(
        f"\ufeff{json.dumps(ALPACA)}\r\n\n {json.dumps({'messages': [USER, ASSISTANT]})}\n"
    )
    (tmp_path / "a.jsonl").write_text(json.dumps([{"prompt": "a", "completion": "b"}] * 2, indent=1))
    found = read_records([f"{tmp_path}/b*", f"{tmp_path}/a*"])
    assert [record.source.removeprefix(f"{tmp_path}/") for record in found.records] == [
        "a.jsonl, record 1", "a.jsonl, record 2", "b.json, line 1", "b.json, line 3"]  # fmt: skip
    assert found.lines() == ["4 records from 2 files (1 alpaca, 1 chat, 2 prompt/completion)"]


def test_records_without_an_answer_are_left_out_and_counted(tmp_path: Path) -> None:
    silent = [{**ALPACA, "output": " "}, {"messages": [USER]}, {"prompt": "a", "completion": None}, {"messages": []}]
    found = read_records([write(tmp_path, [ALPACA, *silent])])
    assert len(found.records) == 1
    assert found.lines()[1] == f"4 records without an answer left out, such as {tmp_path}/a.jsonl, line 2"
    with refuses("records.nothing_to_learn"):
        read_records([write(tmp_path, silent)])


# Bad records


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"prompt": "a" "completion": "b"}', "line 2: broken JSON at column 16: Expecting ',' delimiter"),
        ("just text", "line 2: broken JSON at column 1: Expecting value"),
        ('\ufeff{"prompt": "a"}', "(BOM)"),
        ('{"prompt": "a"}\ufeff', "(BOM)"),
        ('\x1e{"prompt": "a"}', "(RS)"),
        ('{"prompt": "a\x1e"}', "(RS)"),
        ("\0\0\0", "NUL"),
        ('{"prompt": "a"}\0\0', "NUL"),
        ('{"prompt": "a"}\r{"prompt": "b"}', "(CR)"),
        ('{"prompt": "a\rb"}', "(CR)"),
        ("{'prompt': 'a'}", "single quotation mark"),
        ('{"prompt": "a"}{"prompt": "b"}', "line break is missing"),
        ('{"prompt": "a"},', "comma too many"),
        (',{"prompt": "a"}', "comma too many"),
        ('{"prompt": "a",}', "comma too many"),
        ('{"prompt": [1,,2]}', "comma too many"),
        ('{"prompt": "a" "completion": "b"}', "comma is missing"),
        ("[" * 100_000, "line 2: JSON nested too deeply"),
        ("3", "line 2: must be a JSON object; it is a number"),
        ('{"text": "a"}', "line 2: no shape has these keys: 'text'"),
        ("{}", "line 2: no shape has these keys: no keys"),
        (
            '{"instruction": "a", "response": "b"}',
            "line 2: 'output' is missing for the alpaca shape; the record has 'instruction', 'response'",
        ),
        ('{"completion": "a"}', "'prompt' is missing for the prompt/completion shape"),
        ('{"prompt": ["a"], "completion": "b"}', "prompt[0] must be an object with 'role' and 'content'; it is text"),
        ('{"prompt": "a", "completion": 3}', "'completion' must be text; it is a number"),
        ('{"instruction": " ", "output": "b"}', "'instruction' is empty: there is no prompt"),
        ('{"prompt": "a", "completion": "\\ud800"}', "'completion' holds half a character"),
        ('{"messages": "a"}', "'messages' must be a list of messages; it is text"),
        ('{"messages": ["a"]}', "messages[0] must be an object with 'role' and 'content'; it is text"),
        ('{"messages": [{"from": "human"}]}', "messages[0] must have 'role' and 'content'; it has 'from'"),
        (
            '{"messages": [{"role": "critic", "content": "a"}]}',
            "messages[0] has the role 'critic'; accepted are system, user",
        ),
        (
            '{"messages": [{"role": "user", "content": [1]}]}',
            "messages[0].content[0] must be a part of the type 'text'; it is a number",
        ),
        (
            '{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": "b"}]}]}',
            "messages[0].content[1] must be a part of the type 'text'; it is of the type 'image_url'",
        ),
        (
            '{"messages": [{"role": "user", "content": [{"type": "text"}]}]}',
            "'messages[0].content[0].text' must be text; it is null",
        ),
        (json.dumps({"messages": [{"role": "tool", "content": "a"}, ASSISTANT]}), "messages[0] is what a tool gave"),
        (
            json.dumps({"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {}}]}]}),
            'messages[1].tool_calls[0] must be {"function": {"name": "...", "arguments": {...}}}',
        ),
        (
            json.dumps({"messages": [USER, {"role": "assistant", "tool_calls": "f"}]}),
            "tool_calls must be a list of calls",
        ),
        (
            json.dumps({"messages": [USER, ASSISTANT], "tools": 3}),
            "'tools' must be a list of objects, or JSON of one; it",
        ),
        (json.dumps({"messages": [USER, ASSISTANT], "tools": "[x"}), "it is a text that is no JSON"),
        (
            json.dumps({"messages": [USER, {**ASSISTANT, "weight": -0.5}]}),
            "messages[1].weight must be a number from 0 to 1,000, or true or false; it is -0.5",
        ),
        (
            json.dumps({"messages": [{**USER, "train": True}, ASSISTANT]}),
            "messages[0].train asks for a user message to be learnt: data.train_on_prompt learns them all",
        ),
        ('{"prompt": "a", "completion": "b", "prompt": "c"}', "the key 'prompt' stands twice in one object"),
        (
            '{"messages": [{"role": "user", "content": "a", "content": "b"}, {"role": "assistant", "content": "c"}]}',
            "the key 'content' stands twice in one object: leave one of the two",
        ),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "messages[0] is an answer"),
        (json.dumps({"messages": [USER, {"role": "system", "content": "a"}, ASSISTANT]}), "messages[1] is a system"),
    ],
)
def test_a_bad_record_is_named_with_its_line(tmp_path: Path, line: str, expected: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f"{json.dumps(ALPACA)}\n{line}\n")
    with pytest.raises(UserError) as caught:
        read_records([str(path)])
    title, problem, *shapes = str(caught.value).split("\n")
    assert title == "data.records must hold records that can be learnt from; 1 cannot:"
    assert problem.startswith(f"  {path}, line 2: ") and expected in problem
    assert [shape.split("  ")[1] for shape in shapes[1:]] == [
        "alpaca",
        "chat",
        "chat (ShareGPT)",
        "prompt/completion",
        "preference",
        "labelled",
    ]


def test_a_handful_of_bad_records_is_named_and_the_rest_counted(tmp_path: Path) -> None:
    broken = write(tmp_path, [ALPACA, *range(7)], "a.jsonl")
    array = write(tmp_path, [[ALPACA, 3]], "b.json")
    (tmp_path / "c.json").write_text('[{"prompt": "a"},\n {"prompt" 3}]')
    with pytest.raises(UserError) as caught:
        read_records([f"{tmp_path}/*"], "data.evaluation")
    lines = str(caught.value).split("\n")
    assert lines[0] == "data.evaluation must hold records that can be learnt from; 9 cannot:"
    assert lines[1:7] == [f"  {broken}, line {n}: must be a JSON object; it is a number" for n in range(2, 7)] + [
        "  and 4 more"
    ]
    with pytest.raises(UserError) as caught:
        read_records([f"{tmp_path}/*.json"])
    assert str(caught.value).split("\n")[1:3] == [
        f"  {array}, record 2: must be a JSON object; it is a number",
        f"  {tmp_path}/c.json, line 2: broken JSON at column 12: Expecting ':' delimiter",
    ]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b" \n\n", "a.jsonl: the file of records is empty"),
        (b"[ ]", "a.jsonl: the file holds no records: its JSON array is empty"),
        (b"{}\n{\xff}", "a.jsonl, line 2: records must be JSON in UTF-8"),
    ],
)
def test_useless_files(tmp_path: Path, content: bytes, expected: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_records([f"{tmp_path}/*"])
    assert expected in str(caught.value)
    with refuses("data.no_files"):
        read_records([f"{tmp_path}/none*"])


# Jobs

JOB = (
    SMALLEST
    + """\
[data]
records = ["a.jsonl"]
sequence_length = 32
packing = false
held_out = 0.5
"""
)


@pytest.fixture
def workshop(tmp_path: Path) -> Path:
    save_tokenizer(train_bpe(["## Task\nSay hello\n\n## Answer\nHello"], 300), tmp_path / "tokenizer")
    write(tmp_path, [ALPACA, {"prompt": "Say", "completion": "hello"}])
    write(tmp_path, [ALPACA], "b.jsonl")
    (tmp_path / "c.txt").write_text("Hello hello")
    (tmp_path / "job.toml").write_text(JOB)
    return tmp_path


def job(workshop: Path, *overrides: str) -> LoadedJob:
    return load_job(workshop / "job.toml", overrides)


def test_a_job_with_records(workshop: Path) -> None:
    material = prepare(job(workshop))
    assert material.template == "plain"
    assert material.notes[-3:-1] == (
        "2 records from 1 file (1 alpaca, 1 prompt/completion)",
        "records become text by the plain form (## Task, ## Answer), which is saved as the tokenizer's chat template",
    )
    assert (len(material.dataset.train), len(material.dataset.held_out)) == (1, 1)
    prompt = render_prompt(material.tokenizer, "Say", prompt_template(job(workshop).job))
    save_tokenizer(material.tokenizer, workshop / "result")
    again = prepare(job(workshop, "tokenizer.path=result"))
    assert again.template == "chat" and again.dataset.fingerprint() == material.dataset.fingerprint()
    assert render_prompt(again.tokenizer, "Say", "auto") == prompt
    trained = prepare(job(workshop, "tokenizer.path=", "tokenizer.train_vocab_size=270"))
    assert len(trained.tokenizer) == 270


def test_evaluation_files_take_the_place_of_the_held_out_share(workshop: Path) -> None:
    dataset = prepare(job(workshop, "data.evaluation=['b.jsonl']")).dataset
    assert (dataset.train.tolist(), dataset.held_out.tolist()) == ([0, 1], [2])
    assert dataset.tokens[2].tolist() == dataset.tokens[0].tolist(), "the same record, read from the other file"
    text = ["data.records=", "data.text=['a.jsonl']", "data.evaluation=['c.txt']", "data.sequence_length=2"]
    material = prepare(job(workshop, *text))
    assert material.template is None and prompt_template(job(workshop, *text).job) is None
    (batch,) = material.dataset.held_out_batches(9)
    assert material.tokenizer.decode(batch.tokens.ravel()) in "Hello hello"
    assert 2 not in material.dataset.held_out and len(batch.tokens) == 1


def test_text_files_that_give_nothing_are_told(workshop: Path) -> None:
    (workshop / "empty.txt").write_text("")
    text = ["data.records=", "data.text=['*.txt']", "data.sequence_length=2", "data.packing=true", "data.held_out=0"]
    notes = prepare(job(workshop, *text)).notes
    assert "corpus: 1 document from 1 file, 0.0 MB of text" in notes
    assert f"corpus: 1 files skipped, such as {workshop}/empty.txt: is empty" in notes


def test_records_are_packed_only_where_they_can_be_isolated(workshop: Path) -> None:
    """What the job says of packing and isolation, for a family that can and for one that cannot."""
    config = {**tiny_keys("qwen3_next"), "vocab_size": 300, "pad_token_id": None}
    (workshop / "config.json").write_text(json.dumps(config))
    able, unable = [], ["model.config=config.json"]
    packed = ["data.packing=true", "data.sequence_length=64", "data.held_out=0"]

    def found(*overrides: str) -> tuple[int, bool, bool]:
        """(sequences, are there positions, is it said that records are not packed)"""
        material = prepare(job(workshop, *packed, *overrides))
        said = any(note.startswith("records are not packed") and "qwen3_next" in note for note in material.notes)
        batch = material.dataset.batch(0, len(material.dataset.train))
        return len(batch.tokens), batch.positions is not None, said

    assert found(*able) == found(*able, "data.isolate=true") == (1, True, False)
    assert found(*able, "data.isolate=false") == found(*unable, "data.isolate=false") == (1, False, False)
    assert found(*unable) == (2, False, True)
    assert found(*unable, "data.packing=false") == (2, False, False)
    with refuses("data.isolation"):
        found(*unable, "data.isolate=true")
    seen, apart = (prepare(job(workshop, *packed, f"data.isolate={value}")).dataset for value in ("false", "true"))
    assert seen.fingerprint() != apart.fingerprint()


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["data.records=['none']"], "data.records must match at least one file"),
        (["data.evaluation=['none']"], "data.evaluation must match at least one file"),
        (["data.records=['c.txt']"], "c.txt, line 1: broken JSON at column 1"),
        (["data.records=", "data.text=['none']"], "data.text must match at least one file"),
        (["data.records=", "data.text=['empty.txt']"], r"data.text must match files with text .*empty.txt: is empty"),
        ([], r'path = "nobody/nothing" is neither a directory'),
    ],
)
def test_the_data_is_looked_at_before_a_model_is_fetched(workshop: Path, overrides: list[str], expected: str) -> None:
    (workshop / "empty.txt").write_text("")
    text = (workshop / "job.toml").read_text()
    hub = '[model]\npath = "nobody/nothing"\ndownload = false\n[tokenizer]'
    (workshop / "job.toml").write_text(re.sub(r"\[model.config\].*\[tokenizer\]", hub, text, flags=re.DOTALL))
    with pytest.raises(UserError, match=expected):
        prepare(job(workshop, *overrides))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["data.sequence_length=65"], r"sequence_length = 65: the model has positions for 64 tokens"),
        (["model.config.vocab_size=270"], r"the tokenizer's largest id is \d+, the model's vocab_size is 270"),
        (["data.template=chat"], r'"chat" needs a tokenizer with a chat template; this one has none'),
        (["data.evaluation=['chat.jsonl']"], r"this one has none \(.*chat.jsonl, line 1 is a chat\)"),
        (["data.sequence_length=2"], r"data.sequence_length = 2 all 2 records are cut before their first answer"),
        (["data.evaluation=['none']"], r"data.evaluation must match at least one file"),
        (["data.records=['c.txt']"], r"c.txt, line 1: broken JSON at column 1"),
        (
            ["data.records=['b.jsonl']"],
            r"data.records must give at least 2 sequence\(s\) .*; it gives 1, from 1 records",
        ),
        (
            ["data.records=", "data.text=['a.jsonl']", "data.evaluation=['c.txt']"],
            r"the text of data.evaluation must give at least 1 sequence\(s\) of 32 tokens; it gives 0",
        ),
    ],
)
def test_what_a_job_cannot_be_made_of(workshop: Path, overrides: list[str], expected: str) -> None:
    write(workshop, [{"messages": [USER, ASSISTANT]}], "chat.jsonl")
    packed = ["data.packing=true"] if "data.text" in str(overrides) else []
    with pytest.raises(UserError, match=expected):
        prepare(job(workshop, *overrides, *packed))


@pytest.mark.parametrize("form", ["{}", "[{}]"])
def test_a_number_of_very_many_digits_is_a_broken_record(form: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(form.replace("{}", '{"prompt": "p", "completion": "c", "id": ' + "9" * 5000 + "}"))
    with pytest.raises(UserError, match="more digits than can be read"):
        read_records([str(path)])


# Skipped records


def spoiled(directory: Path, name: str = "a.jsonl") -> str:
    """A file of good records and three bad ones: of a wrong kind, cut, and one that the template refuses."""
    lines = [
        json.dumps(ALPACA),
        "3",
        json.dumps({"messages": [USER, ASSISTANT]}),
        '{"prompt": "a", ',
        json.dumps(ALPACA),
    ]
    lines.insert(3, json.dumps({"messages": [USER, USER, ASSISTANT]}))
    (directory / name).write_text("\n".join(lines))
    return f"{directory}/{name}"


ALTERNATING = (
    "{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ '<' + message.role + '>' + message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_bad_records_are_skipped_up_to_a_number(workshop: Path) -> None:
    path = spoiled(workshop)
    tokenizer = train_bpe(["Say hello Hi Hello"], 300)
    tokenizer.chat_template = ALTERNATING
    save_tokenizer(tokenizer, workshop / "tokenizer")
    spoiled(workshop, "b.jsonl")
    three = ["data.held_out=0", "data.skip_bad=3"]
    material = prepare(job(workshop, *three))
    places = [note.split(": ")[0] for note in material.notes if note.startswith(f"  {path}, line ")]
    assert places == [f"  {path}, line {line}" for line in (2, 5, 4)] and material.skipped_records == 3
    assert "3 bad records skipped (data.skip_bad = 3):" in material.notes
    (workshop / "a.jsonl").write_text(
        "\n".join(json.dumps(one) for one in (ALPACA, {"messages": [USER, ASSISTANT]}, ALPACA))
    )
    assert prepare(job(workshop, *three)).dataset.fingerprint() == material.dataset.fingerprint(), (
        "as if they were not there"
    )
    spoiled(workshop)
    for limit, named in ((0, (2, 5)), (1, (2, 5)), (2, (2, 5, 4))):
        with pytest.raises(UserError) as caught:
            prepare(job(workshop, f"data.skip_bad={limit}"))
        said = str(caught.value)
        assert [int(line) for line in re.findall(r"a.jsonl, line (\d+): ", said)] == list(named), said
        assert (f"(data.skip_bad = {limit} are skipped at most)" in said) == (limit > 0)
    with pytest.raises(UserError, match=r"6 cannot|4 cannot"):
        prepare(job(workshop, *three, "data.evaluation=['b.jsonl']"))
    assert prepare(job(workshop, "data.skip_bad=6", "data.evaluation=['b.jsonl']")).skipped_records == 6


def test_a_file_that_breaks_off_is_never_skipped(workshop: Path) -> None:
    (workshop / "c.json").write_text(json.dumps([ALPACA] * 3)[:-1])
    with pytest.raises(UserError, match=r"c.json, line 1: broken JSON at column") as caught:
        prepare(job(workshop, "data.skip_bad=100", "data.records=['a.jsonl', 'c.json']"))
    assert "what follows there cannot be read, and is never skipped" in str(caught.value)


def test_a_whole_file_of_skipped_records(workshop: Path) -> None:
    (workshop / "a.jsonl").write_text("3\n4")
    with refuses("records.nothing_to_learn"):
        prepare(job(workshop, "data.skip_bad=2"))


def test_every_key_that_stands_twice_is_found(tmp_path: Path) -> None:
    doubled = '{"prompt": "a", "completion": "b", "n": {"x": 1, "x": 2}}'
    (tmp_path / "a.json").write_text(f"[{json.dumps(ALPACA)}, {doubled}, {json.dumps(ALPACA)}]")
    with refuses("record.repeated_key"):
        read_records([f"{tmp_path}/a.json"])
