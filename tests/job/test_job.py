"""Job files: what is accepted, and every problem said at once, in words a person can act on."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import pytest

from hetero_mpi.commands.reference_pages import reference_text
from hetero_mpi.job.load import LoadedJob, job_from_dict, job_to_dict, load_job, run_directory
from hetero_mpi.job.rules import REMOVED_KEYS, facts
from hetero_mpi.job.schema import TABLES, JobConfig
from hetero_mpi.job.training_tables import Example
from hetero_mpi.util.errors import UserError
from tests.support.errors import refuses

SMALL = """\
[model.config]
model_type = "llama"
vocab_size = 512
[tokenizer]
train_vocab_size = 512
[data]
text = ["notes/*.txt", "{stdlib}/*.py", "!a/**"]
"""


def write(directory: Path, text: str, name: str = "small.toml") -> Path:
    path = directory / name
    path.write_text(text, encoding="utf-8")
    return path


def problems(directory: Path, text: str, *overrides: str) -> list[str]:
    """The lines of the error, with the file's path shortened to its name."""
    path = write(directory, text)
    with pytest.raises(UserError) as caught:
        load_job(path, overrides)
    return str(caught.value).replace(str(path), path.name).split("\n")


def test_a_small_file_gets_all_defaults(tmp_path: Path) -> None:
    loaded = load_job(write(tmp_path, SMALL))
    assert isinstance(loaded, LoadedJob)
    assert (loaded.name, loaded.directory) == ("small", tmp_path)
    assert loaded.job.train.steps == 100
    assert loaded.job.model.config == {"model_type": "llama", "vocab_size": 512}


def test_whole_numbers_are_accepted_where_numbers_are_asked_for(tmp_path: Path) -> None:
    job = load_job(write(tmp_path, SMALL + "[train]\nlearning_rate = 1\nweight_decay = 0\n")).job
    assert (job.train.learning_rate, type(job.train.learning_rate)) == (1.0, float)
    assert job.train.weight_decay == 0.0


def test_an_optional_key_is_emptied_by_an_empty_string(tmp_path: Path) -> None:
    path = write(tmp_path, SMALL)
    assert load_job(path).job.train.clip_norm == 1.0
    assert load_job(path, ["train.clip_norm="]).job.train.clip_norm is None
    assert load_job(path, ['train.clip_norm=""']).job.train.clip_norm is None


def test_a_byte_order_mark_is_no_problem(tmp_path: Path) -> None:
    assert load_job(write(tmp_path, "\ufeff" + SMALL)).job.data.sequence_length == 256


@pytest.mark.parametrize(
    ("override", "table", "key", "value"),
    [
        ("train.steps=6", "train", "steps", 6),
        ("train.dtype=bf16", "train", "dtype", "bf16"),
        ('train.dtype="bf16"', "train", "dtype", "bf16"),
        ("train.learning_rate = 1e-3", "train", "learning_rate", 1e-3),
        ("data.packing=false", "data", "packing", False),
        ('data.text=["a.txt", "b.txt"]', "data", "text", ["a.txt", "b.txt"]),
        ("output.run_dir=runs/a=b", "output", "run_dir", "runs/a=b"),
        (
            "model.config.hidden_size=64",
            "model",
            "config",
            {"model_type": "llama", "vocab_size": 512, "hidden_size": 64},
        ),
    ],
)
def test_overrides(tmp_path: Path, override: str, table: str, key: str, value: object) -> None:
    job = load_job(write(tmp_path, SMALL), [override]).job
    assert getattr(getattr(job, table), key) == value


def test_later_overrides_win_and_may_repair_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, SMALL + "[train]\nsteps = -3\n")
    assert load_job(path, ["train.steps=5", "train.steps=7"]).job.train.steps == 7


def test_all_problems_at_once(tmp_path: Path) -> None:
    text = """\
steps = 3
[model.config]
hidden_size = 4
[trian]
a = 1
[data]
sequence_length = true
dtype = "bf16"
[train]
stpes = 5
micro_batch = "some"
learning_rate = nan
beta1 = 1.0
data = 1
[plan]
lerning_rate = 3
"""
    assert problems(tmp_path, text, "train.seed=many", "checkpoint.keep=0", "x=[1", "train.steps.x=[1") == [
        "--set x=[1: must be table.key=value, such as --set train.steps=6",
        "--set train.steps.x=[1: the value is no TOML value: Unclosed array (at end of document)",
        "small.toml: steps = 3: unknown outside a table; it belongs to [train]",
        "small.toml: trian = {a = 1}: unknown table; did you mean '[train]'?",
        "small.toml: [data] sequence_length = true: must be a whole number of at least 1",
        'small.toml: [data] dtype = "bf16": unknown key in this table; it belongs to [train]',
        'small.toml: [train] micro_batch = "some": must be a whole number of at least 1 or "auto"',
        '--set: [train] seed = "many": must be a whole number of at least 0 and below 9223372036854775808',
        "small.toml: [train] learning_rate = nan: must be a number above 0",
        "small.toml: [train] beta1 = 1.0: must be a number of at least 0 and below 1",
        "small.toml: [train] stpes = 5: unknown key; did you mean 'steps'?",
        "small.toml: [train] data = 1: unknown key; [data] is a table of its own",
        "--set: [checkpoint] keep = 0: must be a whole number of at least 1",
        "small.toml: [plan] lerning_rate = 3: unknown key; did you mean 'learning_rate' in [train]?",
        "small.toml: [model] config = {hidden_size = 4}: needs model_type, the family's name in transformers, "
        'such as "llama"',
        "small.toml: [tokenizer] path: a tokenizer is needed: set it, or tokenizer.train_vocab_size "
        "(only model.path brings its own)",
        "small.toml: [data] text: set exactly one of data.text and data.records; neither is set",
    ]


@pytest.mark.parametrize("dotted", REMOVED_KEYS)
def test_removed_keys_are_refused_with_what_to_do(tmp_path: Path, dotted: str) -> None:
    table, _, key = dotted.partition(".")
    assert key not in TABLES[table].model_fields
    (told,) = (line for line in problems(tmp_path, SMALL, f"{dotted}=true") if f"[{table}] {key} = true" in line)
    assert REMOVED_KEYS[dotted] in told


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["model.path=x"],
            'model] path = "x": set exactly one of model.path, model.config and model.factory; model.path',
        ),
        (["model.path=x"], "model.factory; model.path and model.config are set"),
        (["model.config="], "model] path: set exactly one of model.path, model.config and model.factory; none is set"),
        (["tokenizer.path=x"], 'tokenizer] path = "x": has an effect only if tokenizer.train_vocab_size is empty'),
        (["tokenizer.train_vocab_size=513"], "must be at most model.config.vocab_size = 512"),
        (["tokenizer.train_vocab_size=256"], 'must be a whole number of at least 257 or empty ("")'),
        (["cluster.time_scale=2.0"], "[cluster] time_scale = 2.0: has an effect only if cluster.emulate is set"),
        (
            ["cluster.emulate_first=true"],
            "[cluster] emulate_first = true: has an effect only if cluster.emulate is set",
        ),
        (
            ["profile.trial=true", "cluster.emulate=p.toml"],
            "[profile] trial = true: emulated devices keep to their profile",
        ),
        (["profile.trial=maybe"], "[profile] trial"),
        (
            ["profile.save_as=a.toml", "cluster.emulate=p.toml"],
            '[profile] save_as = "a.toml": has an effect only if cluster.emulate is empty',
        ),
        (["adapter.method=lora", "plan.schedule=split"], "an adapter leaves these frozen"),
        (["plan.pipelines=0"], '[plan] pipelines = 0: must be a whole number of at least 1 or "auto"'),
        (["train.global_batch=12", "train.micro_batch=5"], "must divide train.global_batch = 12: 1, 2, 3, 4, 6, 12"),
        (
            ["train.global_batch=8000000"],
            "[train] global_batch = 8000000: a step of 500,000 micro-batches of 16 is too long to be planned: at most 8,192. "
            "Lower it (at most 131,072 so), or set a larger train.micro_batch",
        ),
        (["train.global_batch=8209"], "a step of 8,209 micro-batches of 1 is too long"),  # a prime
        (["train.global_batch=20000", "train.micro_batch=2"], "a step of 10,000 micro-batches of 2 is too long"),
        (["output.run_dir=../elsewhere"], "must stay inside the working directory"),
        (["output.run_dir=runs/{host}"], "may hold {name} and no other placeholder"),
        (["model.config=config.json", "model.config.hidden_size=4"], "is no table to set a key of"),
        (["train=3"], "must be table.key=value"),
        (["train.steps"], "must be table.key=value"),
        (["train.checkpoint.every=2"], "[checkpoint] is a table of its own"),
        (["data.text=a.txt"], 'text = "a.txt": must be a list of texts in quotes (at least 1) or empty ("")'),
        (["data.records=[]"], "records = []: must be a list of texts in quotes (at least 1)"),
        (
            ["train.learning_rates={q_proj = 0}"],
            "{q_proj = 0}: must be a table (a regular expression = a number above 0) or empty",
        ),
        (["train.freeze=['(']"], "must be a list of whole numbers of at least 0 or a regular expression"),
        (
            ["data.records=['a.jsonl']"],
            'text = ["notes/*.txt", "{stdlib}/*.py", "!a/**"]: set exactly one of data.text',
        ),
        (["data.text="], '[data] text = "": set exactly one of data.text and data.records; neither is set'),
        (["data.template=jinja"], 'must be "auto" or "chat" or "plain"'),
        (
            ["train.cycles=2"],
            'cycles = 2: has an effect only if train.schedule = "cosine_with_restarts": leave it out',
        ),
        (["train.decay=linear"], 'decay = "linear": has an effect only if train.schedule = "warmup_stable_decay"'),
        (["train.warmup_steps=1.5"], "must be a whole number of at least 0 or a number of at least 0 and below 1"),
        (["train.schedule=constant", "train.min_learning_rate_ratio=0.1"], 'only if train.schedule is not "constant"'),
        (["data.template=plain"], 'template = "plain": has an effect only if data.records is set'),
        (["data.train_on_prompt=true"], "train_on_prompt = true: has an effect only if data.records is set"),
        (["train.epochs=2", "train.steps=7"], "steps = 7: has an effect only if train.epochs is empty"),
        (["train.patience=2"], "patience = 2: has an effect only if train.evaluate_every is not 0"),
        (
            ["data.evaluation_sets={a=['x']}", "data.held_out=0"],
            "only if data.held_out is not 0 or data.evaluation is set",
        ),
        (
            ["data.text=", "data.records=['a.jsonl']", "data.evaluation_sets={a=['x']}", "train.preference='dpo'"],
            'only if train.preference = "none"',
        ),
        (["data.evaluation_sets={'a b'=['x']}"], "a name of at most 40 letters, digits, points, - and _ ="),
        (
            ["train.patience=2", "train.evaluate_every=5", "data.held_out=0"],
            "patience = 2: has an effect only if data.held_out is not 0 or data.evaluation",
        ),
        (["data.isolate=true"], "isolate = true: has an effect only if data.records is set"),
        (
            ["data.text=", "data.records=['a.jsonl']", "data.max_bytes=5", "data.documents=line"],
            "max_bytes = 5: has an effect only if data.text is set: leave it out",
        ),
        (
            ["data.text=", "data.records=['a']", "data.documents=line"],
            'documents = "line": has an effect only if data.text is set',
        ),
        (
            ["data.text=", "data.records=['a']", "data.template=chat"],
            'template = "chat": a tokenizer trained here (tokenizer.train_vocab_size) has no chat template: use "plain"',
        ),
        (["train.preference=dpo"], 'preference = "dpo": has an effect only if data.records is set'),
        (
            ["train.preference_beta=0.2"],
            "preference_beta = 0.2: is for train.preference = dpo and hinge and ipo and kto and orpo and robust",
        ),
        (
            ["train.preference=orpo", "train.preference_smoothing=0.1"],
            "preference_smoothing = 0.1: is for train.preference = dpo and robust and simpo",
        ),
        (["train.preference=dpo", "train.undesirable_weight=2"], "is for train.preference = kto: leave it out"),
        (
            ["train.preference_smoothing=0.5"],
            "preference_smoothing = 0.5: must be a number of at least 0 and below 0.5",
        ),
        (["data.packing=1"], "packing = 1: must be true or false"),
        (["train.learning_rate=inf"], "learning_rate = inf: must be a number above 0"),
        (["train.steps=2.0"], "steps = 2.0: must be a whole number of at least 1"),
        (
            ["train.optimizer=adafactor", "train.beta2=0.9"],
            'beta2 = 0.9: has an effect only if train.optimizer is not "adafactor"',
        ),
        (
            ["adapter.method=lora", "adapter.start=pissa_4"],
            'start = "pissa_4": must be "default", "pissa", "pissa_niter_4" (or',
        ),
        (
            ["adapter.method=lora", "adapter.start=olora", "adapter.dora=true"],
            "only if adapter.dora = false",
        ),
        (["adapter.method=lora", "adapter.start=pissa", "adapter.path=a"], "only if adapter.path is empty"),
        (["adapter.method=lora", "adapter.start="], 'start = "": must be "default"'),
        (["adapter.start=pissa"], 'only if adapter.method = "lora"'),
        (["adapter.tokens_in=head"], 'only if adapter.method = "lora"'),
    ],
)
def test_contradictions(tmp_path: Path, overrides: list[str], expected: str) -> None:
    assert expected in "\n".join(problems(tmp_path, SMALL, *overrides))


LAYERS = '[model]\nfactory = "my_model:model"\n'


def test_a_model_of_layers_needs_nothing_else(tmp_path: Path) -> None:
    job = load_job(write(tmp_path, LAYERS)).job
    assert (job.model.factory, job.data.sequence_length, job.train.dtype) == ("my_model:model", 1, "fp32")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["data.text=['a.txt']"], 'text = ["a.txt"]: has an effect only if model.factory is empty'),
        (["tokenizer.path=t"], '[tokenizer] path = "t": has an effect only if model.factory is empty'),
        (["adapter.method=lora"], 'method = "lora": has an effect only if model.factory is empty'),
        (["data.sequence_length=64"], "sequence_length = 64: is for language models"),
        (["data.pad=longest"], 'pad = "longest": has an effect only if model.factory is empty'),
        (["sample.prompt=hello"], 'prompt = "hello": has an effect only if model.factory is empty'),
        (["cluster.emulate=p.toml"], 'emulate = "p.toml": has an effect only if model.factory is empty'),
        (["train.desirable_weight=2"], "desirable_weight = 2: is for train.preference = kto"),
        (["train.freeze=[0]"], "freeze = [0]: blocks have numbers in language models only: name parameters"),
        (["train.dtype=bf16"], 'dtype = "bf16": must be fp32, as the model\'s layers are'),
        (["model.factory=my_model.model"], 'is written "package.module:function"'),
        (["model.path=x"], "model.path and model.factory are set"),
    ],
)
def test_what_a_model_of_layers_cannot_have(tmp_path: Path, overrides: list[str], expected: str) -> None:
    assert expected in "\n".join(problems(tmp_path, LAYERS, *overrides))


def test_a_rule_about_a_broken_value_keeps_silent(tmp_path: Path) -> None:
    assert problems(tmp_path, SMALL, "train.global_batch=0", "train.micro_batch=3") == [
        "--set: [train] global_batch = 0: must be a whole number of at least 1"
    ]


def test_a_table_given_as_a_value(tmp_path: Path) -> None:
    assert problems(tmp_path, "data = 3\n" + SMALL.split("[data]")[0]) == [
        "small.toml: data = 3: must be a table; write [data] and its keys below it"
    ]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "there is no such job file"),
        (b"[train\nsteps = 3", "a job file must be TOML: "),
        (b"[train]\nsteps = 3\nsteps = 4", "a job file must be TOML: "),
        (b"# \xff\xfe", "this one is not UTF-8"),
    ],
)
def test_unreadable_files(tmp_path: Path, content: bytes | None, expected: str) -> None:
    path = tmp_path / "small.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=expected):
        load_job(path)
    with refuses("file.not_regular"):
        load_job(tmp_path)


def test_paths_start_at_the_job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "jobs[1]"
    directory.mkdir()
    (directory / "notes").mkdir()
    write(directory, SMALL)
    monkeypatch.chdir(tmp_path)
    loaded = load_job("jobs[1]/small.toml")
    stdlib = sysconfig.get_path("stdlib")
    assert loaded.resolve("models/a") == directory / "models/a"
    assert loaded.resolve("/models/a") == Path("/models/a")
    assert loaded.resolve("{stdlib}/json") == Path(stdlib) / "json"
    assert loaded.patterns("text") == (
        str(tmp_path / "jobs[[]1]" / "notes/*.txt"),
        f"{stdlib}/*.py",
        f"!{tmp_path}/jobs[[]1]/a/**",
    )
    assert loaded.patterns("records") == loaded.patterns("evaluation") == ()
    records = load_job("jobs[1]/small.toml", ["data.text=", "data.records=['a.jsonl']", "data.evaluation=['/b.json']"])
    assert records.patterns("text") == ()
    assert records.patterns("records") == (str(tmp_path / "jobs[[]1]" / "a.jsonl"),)
    assert records.patterns("evaluation") == ("/b.json",)


def test_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path, SMALL)
    assert run_directory(load_job(path)) == tmp_path / "runs/small"
    assert run_directory(load_job(path, ["output.run_dir=/scratch/{name}-1"])) == Path("/scratch/small-1")
    assert run_directory(load_job(path), "../other") == tmp_path / "../other"
    with refuses("job.run_directory"):
        run_directory(load_job(path), " ")


def test_a_job_survives_json(tmp_path: Path) -> None:
    job = load_job(
        write(tmp_path, SMALL), ["train.learning_rate=1e-5", "train.clip_norm=", "model.config.a.b=[1, 2.5]"]
    ).job
    again = job_from_dict(json.loads(json.dumps(job_to_dict(job))))
    assert again == job
    assert isinstance(again, JobConfig)


REFERENCE = Path(__file__).parents[2] / "jobs" / "reference.toml"


def test_the_reference_file_is_the_code() -> None:
    assert REFERENCE.read_text(encoding="utf-8") == reference_text(), (
        "run: python -m hetero_mpi reference > jobs/reference.toml"
    )


def test_the_reference_file_loads_when_completed() -> None:
    needed = [
        f"model.config={facts(TABLES['model'], Example)['config'][0]}",
        "tokenizer.train_vocab_size=512",
        "data.text=['a.txt']",
    ]
    completed = load_job(REFERENCE, needed).job
    minimal = JobConfig.model_validate(
        {"model": completed.model, "tokenizer": completed.tokenizer, "data": {"text": ["a.txt"]}}, strict=False
    )
    assert completed == minimal, "every value in the file is the default"


def test_every_example_of_the_reference_is_a_valid_value() -> None:
    """Uncommenting an example gives a file whose only problems are keys that exclude each other."""
    examples = [(table, *one) for table, model in TABLES.items() for one in facts(model, Example).items()]
    for table, key, (example,) in examples:
        assert f"# {key} = {example}\n" in reference_text()
        complete = {"model.path": "m", "data.text": "['a.txt']", f"{table}.{key}": example}
        if (table, key) == ("data", "records"):
            complete["data.text"] = ""
        if (table, key) in (("data", "weights"), ("data", "keys")):
            complete |= {"data.text": "", "data.records": "['a.jsonl', 'b.jsonl']"}
        if (table, key) == ("model", "config"):
            complete |= {"model.path": "", "tokenizer.path": "t"}
        if table == "adapter" and key in ("modules_to_save", "tokens", "tokens_in"):
            complete["adapter.method"] = "'lora'"
        if (table, key) == ("model", "factory"):
            complete = {f"{table}.{key}": example}
        load_job(REFERENCE, [f"{dotted}={value}" for dotted, value in complete.items()])
