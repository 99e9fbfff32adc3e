"""Record files: every accepted shape, and every bad record named with file and line; and jobs that bring them."""

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
        ({"instruction": "Add", "input": "1, 2", "output": "3", "text": "ignored"}, "alpaca",
         turns(("user", "Add\n\n1, 2"), ("assistant", "3"))),
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
    assert len(found.records) == 1 and found.lines()[1].startswith("4 ") and "a.jsonl, line 2" in found.lines()[1]
    with refuses("records.nothing_to_learn"):
        read_records([write(tmp_path, silent)])


# Bad records


ANSWERED = '{"messages": [%s, {"role": "assistant", "content": "c"}]}'
BAD: list[tuple[str | dict[str, Any], str, str]] = [
    *((line, "record.json", value) for line, value in (
        ("just text", "column 1"), ('\ufeff{"prompt": "a"}', "(BOM)"), ('{"prompt": "a"}\ufeff', "(BOM)"),
        ('\x1e{"prompt": "a"}', "(RS)"), ('{"prompt": "a\x1e"}', "(RS)"), ("\0\0\0", "NUL"), ('{"prompt": "a"}\0\0', "NUL"),
        ('{"prompt": "a"}\r{"prompt": "b"}', "(CR)"), ('{"prompt": "a\rb"}', "(CR)"), ("{'prompt': 'a'}", "single quotation mark"),
        ('{"prompt": "a"}{"prompt": "b"}', "line break"), ('{"prompt": "a"},', "comma"), (',{"prompt": "a"}', "comma"),
        ('{"prompt": "a",}', "comma"), ('{"prompt": [1,,2]}', "comma"), ('{"prompt": "a" "completion": "b"}', "column 16"),
        ('{"prompt": "a" "completion": "b"}', "comma is missing"))),
    ("[" * 100_000, "record.json", "nested"),
    ("3", "record.not_an_object", "number"),
    ('{"text": "a"}', "record.unknown_shape", "'text'"),
    ("{}", "record.unknown_shape", ""),
    ('{"instruction": "a", "response": "b"}', "record.unknown_shape", "'instruction', 'response'"),
    ('{"completion": "a"}', "record.unknown_shape", "'prompt'"),
    ('{"prompt": ["a"], "completion": "b"}', "record.message", "prompt[0]"),
    ('{"prompt": "a", "completion": 3}', "record.text", "'completion'"),
    ('{"instruction": " ", "output": "b"}', "record.empty_prompt", "'instruction'"),
    ('{"prompt": "a", "completion": "\\ud800"}', "record.surrogate", "'completion'"),
    ('{"messages": "a"}', "record.messages", "'messages'"),
    ('{"messages": ["a"]}', "record.message", "messages[0]"),
    ('{"messages": [{"from": "human"}]}', "record.message", "'from'"),
    ('{"messages": [{"role": "critic", "content": "a"}]}', "record.role", "messages[0] has the role 'critic'"),
    ('{"messages": [{"role": "user", "content": [1]}]}', "record.content_part", "messages[0].content[0]"),
    ({"messages": [{**USER, "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": "b"}]}]},
     "record.content_part", "messages[0].content[1]"),
    ('{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', "record.text", "'messages[0].content[0].text'"),
    ({"messages": [{"role": "tool", "content": "a"}, ASSISTANT]}, "record.first_role", "messages[0]"),
    ({"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {}}]}]}, "record.calls", "messages[1].tool_calls[0]"),
    ({"messages": [USER, {"role": "assistant", "tool_calls": "f"}]}, "record.calls", "tool_calls"),
    ({"messages": [USER, ASSISTANT], "tools": 3}, "record.tools", "number"),
    ({"messages": [USER, ASSISTANT], "tools": "[x"}, "record.tools", "JSON"),
    ({"messages": [USER, {**ASSISTANT, "weight": -0.5}]}, "record.weight", "messages[1].weight"),
    ({"messages": [{**USER, "train": True}, ASSISTANT]}, "record.trained_role", "messages[0].train"),
    ('{"prompt": "a", "completion": "b", "prompt": "c"}', "record.repeated_key", "'prompt'"),
    (ANSWERED % '{"role": "user", "content": "a", "content": "b"}', "record.repeated_key", "'content'"),
    ('{"messages": [{"role": "assistant", "content": "a"}]}', "record.first_role", "messages[0]"),
    ({"messages": [USER, {"role": "system", "content": "a"}, ASSISTANT]}, "record.late_system", "messages[1]"),
    ('{"prompt": "p", "completion": "c", "id": ' + "9" * 5000 + "}", "record.json", "digits"),
    ('{"prompt": "a", "completion": "b", "n": {"x": 1, "x": 2}}', "record.repeated_key", "'x'"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "kind", "shown"), BAD)
def test_a_bad_record_is_named_with_its_line(tmp_path: Path, value: Any, kind: str, shown: str) -> None:
    line, path = value if isinstance(value, str) else json.dumps(value), tmp_path / "a.jsonl"
    path.write_text(f"{json.dumps(ALPACA)}\n{line}\n")
    with refuses("records.malformed", f"\n  {path}, line 2: ", shown) as caught:
        read_records([str(path)])
    assert [problem.kind for problem in caught.value.problems] == [kind]


def test_a_handful_of_bad_records_is_named_and_the_rest_counted(tmp_path: Path) -> None:
    broken = write(tmp_path, [ALPACA, *range(7)], "a.jsonl")
    array = write(tmp_path, [[ALPACA, 3]], "b.json")
    (tmp_path / "c.json").write_text('[{"prompt": "a"},\n {"prompt" 3}]')
    with refuses("records.malformed", "data.evaluation", "9 ", "4 more") as caught:
        read_records([f"{tmp_path}/*"], "data.evaluation")
    for line in range(2, 9):
        assert (f"{broken}, line {line}: " in str(caught.value)) == (line < 7)
    with refuses("records.malformed", f"{array}, record 2: ", f"{tmp_path}/c.json, line 2: ", "column 12"):
        read_records([f"{tmp_path}/*.json"])
    (tmp_path / "d.json").write_text(f"[{json.dumps(ALPACA)}, {BAD[-1][0]}]")
    with refuses("record.repeated_key"):
        read_records([f"{tmp_path}/d.json"])


@pytest.mark.parametrize(
    ("content", "kind", "place"),
    [
        (b" \n\n", "records.empty", "a.jsonl"),
        (b"[ ]", "records.empty", "a.jsonl"),
        (b"{}\n{\xff}", "records.encoding", "a.jsonl, line 2"),
        (b'[{"prompt": "p", "id": ' + b"9" * 5000 + b"}]", "record.json", "digits"),
    ],
)
def test_useless_files(tmp_path: Path, content: bytes, kind: str, place: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with refuses(kind, place):
        read_records([f"{tmp_path}/*"])
    with refuses("data.no_files", f"{tmp_path}/none*"):
        read_records([f"{tmp_path}/none*"])


# Jobs

JOB = SMALLEST + '[data]\nrecords = ["a.jsonl"]\nsequence_length = 32\npacking = false\nevaluation_fraction = 0.5\n'


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
    assert any("1 alpaca, 1 prompt/completion" in note for note in material.notes)
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
    text = [
        "data.records=",
        "data.text=['*.txt']",
        "data.sequence_length=2",
        "data.packing=true",
        "data.evaluation_fraction=0",
    ]
    notes = prepare(job(workshop, *text)).notes
    assert "corpus: 1 document from 1 file, 0.0 MB of text" in notes
    assert f"corpus: 1 file skipped, such as {workshop}/empty.txt: is empty" in notes


def test_records_are_packed_only_where_they_can_be_isolated(workshop: Path) -> None:
    """What the job says of packing and isolation, for a family that can and for one that cannot."""
    config = {**tiny_keys("qwen3_next"), "vocab_size": 300, "pad_token_id": None}
    (workshop / "config.json").write_text(json.dumps(config))
    able, unable = [], ["model.config=config.json"]
    packed = ["data.packing=true", "data.sequence_length=64", "data.evaluation_fraction=0"]

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
    ("overrides", "kind", "value"),
    [
        (["data.records=['none']"], "data.no_files", "data.records"),
        (["data.evaluation=['none']"], "data.no_files", "data.evaluation"),
        (["data.records=['c.txt']"], "record.json", "c.txt, line 1"),
        (["data.records=", "data.text=['none']"], "data.no_files", "data.text"),
        (["data.records=", "data.text=['empty.txt']"], "text.no_text", "empty.txt"),
        ([], "model.missing", "nobody/nothing"),
    ],
)
def test_the_data_is_looked_at_before_a_model_is_fetched(
    workshop: Path, overrides: list[str], kind: str, value: str
) -> None:
    (workshop / "empty.txt").write_text("")
    text = (workshop / "job.toml").read_text()
    hub = '[model]\npath = "nobody/nothing"\ndownload = false\n[tokenizer]'
    (workshop / "job.toml").write_text(re.sub(r"\[model.config\].*\[tokenizer\]", hub, text, flags=re.DOTALL))
    with refuses(kind, value):
        prepare(job(workshop, *overrides))


@pytest.mark.parametrize(
    ("overrides", "kind", "values"),
    [
        (["data.sequence_length=65"], "data.sequence_length", (65, 64)),
        (["model.config.vocab_size=270"], "tokenizer.vocabulary_size", (270, 269)),
        (["data.template=chat"], "template.missing", ('"chat"',)),
        (["data.evaluation=['chat.jsonl']"], "template.missing", ("chat.jsonl, line 1",)),
        (["data.sequence_length=2"], "records.all_cut", ("data.sequence_length = 2", "2 records")),
        (["data.records=['b.jsonl']"], "data.too_few_sequences", ("data.records", "1 records")),
        (
            ["data.records=", "data.text=['a.jsonl']", "data.evaluation=['c.txt']", "data.packing=true"],
            "data.too_few_sequences",
            ("data.evaluation", "32 tokens"),
        ),
    ],
)
def test_what_a_job_cannot_be_made_of(workshop: Path, overrides: list[str], kind: str, values: tuple[Any, ...]) -> None:
    write(workshop, [{"messages": [USER, ASSISTANT]}], "chat.jsonl")
    with refuses(kind, *values):
        prepare(job(workshop, *overrides))


# Skipped records


def spoiled(directory: Path, name: str = "a.jsonl") -> str:
    """A file of good records and three bad ones: of a wrong kind, cut, and one that the template refuses."""
    good, chat, refused = map(
        json.dumps, (ALPACA, {"messages": [USER, ASSISTANT]}, {"messages": [USER, USER, ASSISTANT]})
    )
    (directory / name).write_text("\n".join([good, "3", chat, refused, '{"prompt": "a", ', good]))
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
    three = ["data.evaluation_fraction=0", "data.skip_bad=3"]
    material = prepare(job(workshop, *three))
    places = [note.split(": ")[0] for note in material.notes if note.startswith(f"  {path}, line ")]
    assert places == [f"  {path}, line {line}" for line in (2, 5, 4)] and material.skipped_records == 3
    assert "3 bad records skipped (data.skip_bad = 3):" in material.notes
    write(workshop, [ALPACA, {"messages": [USER, ASSISTANT]}, ALPACA])
    assert prepare(job(workshop, *three)).dataset.fingerprint() == material.dataset.fingerprint()
    spoiled(workshop)
    for limit, named in ((0, (2, 5)), (1, (2, 5)), (2, (2, 5, 4))):
        with refuses("records.malformed", f"data.skip_bad = {limit}" if limit else "") as caught:
            prepare(job(workshop, f"data.skip_bad={limit}"))
        assert [int(line) for line in re.findall(r"a.jsonl, line (\d+): ", str(caught.value))] == list(named)
    with refuses("records.malformed"):
        prepare(job(workshop, *three, "data.evaluation=['b.jsonl']"))
    assert prepare(job(workshop, "data.skip_bad=6", "data.evaluation=['b.jsonl']")).skipped_records == 6


def test_a_file_that_breaks_off_is_never_skipped(workshop: Path) -> None:
    (workshop / "c.json").write_text(json.dumps([ALPACA] * 3)[:-1])
    with refuses("record.json", "c.json, line 1: "):
        prepare(job(workshop, "data.skip_bad=100", "data.records=['a.jsonl', 'c.json']"))
    (workshop / "a.jsonl").write_text("3\n4")
    with refuses("records.nothing_to_learn", "data.records"):
        prepare(job(workshop, "data.skip_bad=2"))
