"""Job files: what is accepted, and every problem said at once, in words a person can act on."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import pytest

from hetero_mpi.commands.reference_pages import reference_text
from hetero_mpi.job.load import job_from_dict, job_to_dict, load_job, run_directory
from hetero_mpi.job.other_names import read_names
from hetero_mpi.job.rules import broken_keys, field_metadata, override_value
from hetero_mpi.job.schema import TABLES, JobConfig
from hetero_mpi.job.training_tables import Example
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


def test_a_small_file_gets_all_defaults(tmp_path: Path) -> None:
    loaded = load_job(write(tmp_path, "\ufeff" + SMALL))  # a byte order mark is no problem
    assert (loaded.name, loaded.directory, loaded.job.train.steps) == ("small", tmp_path, 100)
    assert loaded.job.model.config == {"model_type": "llama", "vocab_size": 512}
    job = load_job(write(tmp_path, SMALL + "[train]\nlearning_rate = 1\nweight_decay = 0\n")).job
    assert (job.train.learning_rate, type(job.train.learning_rate), job.train.weight_decay) == (1.0, float, 0.0)
    path = write(tmp_path, SMALL + "[train]\nsteps = -3\n")
    assert load_job(path, ["train.steps=5", "train.steps=7"]).job.train.steps == 7, (
        "the last one, which repairs the file"
    )


def test_an_optional_key_is_emptied_by_an_empty_string(tmp_path: Path) -> None:
    path = write(tmp_path, SMALL)
    assert load_job(path).job.train.clip_norm == 1.0
    assert load_job(path, ["train.clip_norm="]).job.train.clip_norm is None
    assert load_job(path, ['train.clip_norm=""']).job.train.clip_norm is None


@pytest.mark.parametrize(
    ("override", "table", "key", "value"),
    [
        ("train.steps=6", "train", "steps", 6),
        ("train.dtype=bf16", "train", "dtype", "bf16"),
        ('train.dtype="bf16"', "train", "dtype", "bf16"),
        ("train.dtype=float16", "train", "dtype", "fp16"),
        ("train.dtype=torch.bfloat16", "train", "dtype", "bf16"),
        ("train.learning_rate = 1e-3", "train", "learning_rate", 1e-3),
        ("data.packing=false", "data", "packing", False),
        ('data.text=["a.txt", "b.txt"]', "data", "text", ["a.txt", "b.txt"]),
        ("output.run_dir=runs/a=b", "output", "run_dir", "runs/a=b"),
        ("model.config.hidden_size=64", "model", "config", {"model_type": "llama", "vocab_size": 512, "hidden_size": 64}),
    ],
)  # fmt: skip
def test_overrides(tmp_path: Path, override: str, table: str, key: str, value: object) -> None:
    job = load_job(write(tmp_path, SMALL), [override]).job
    assert getattr(getattr(job, table), key) == value


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
    expected = [
        ("set", "x=[1"), ("set", "train.steps.x=[1"), ("table", "small.toml: steps = 3", "[train]"), ("table", "trian", "[train]"),
        ("data.sequence_length", "small.toml", "true"), ("data.dtype", '"bf16"', "[train]"), ("train.micro_batch", "some", "auto"),
        ("train.seed", "--set: ", "many", "9223372036854775808"), ("train.learning_rate", "nan"), ("train.beta1", "1.0"),
        ("train.stpes", "5", "[train] steps = 5"), ("train.data", "1", "[data]"), ("checkpoint.keep", "--set: ", "0"),
        ("plan.lerning_rate", "3", "[train] learning_rate = 3"), ("model.config", "{ hidden_size = 4 }", "model_type"),
        ("tokenizer.path", "tokenizer.train_vocab_size"), ("data.text", "data.records"),
    ]  # fmt: skip
    with refuses("job.invalid") as caught:
        load_job(write(tmp_path, text), ["train.seed=many", "checkpoint.keep=0", "x=[1", "train.steps.x=[1"])
    found = caught.value.problems
    assert [problem.kind for problem in found] == [f"job.{key}" for key, *_ in expected]
    for problem, (_, *values) in zip(found, expected, strict=True):
        assert all(value in problem.text for value in values), problem.text


@pytest.mark.parametrize(
    ("override", "key", "written"),
    [
        ("train.lr=1e-4", "train.lr", "--set train.learning_rate=0.0001"),
        ("train.patience=3", "train.patience", "--set train.early_stopping_patience=3"),
        ("train.stepz=10", "train.stepz", "--set train.steps=10"),
        ("train.packing=True", "train.packing", "--set data.packing=true"),
        ("train.max_seq_length=512", "train.max_seq_length", "--set data.sequence_length=512"),
        ("train.load_in_4bit=true", "train.load_in_4bit", "--set adapter.method=lora --set model.quantization=nf4"),
        ("train.warmup_ratio=0.1", "train.warmup_ratio", "--set train.warmup_steps=0.1"),
        ("model.torch_dtype=float16", "model.torch_dtype", "--set train.dtype=fp16"),
        ("adapter.method=qlora", "adapter.method", "--set adapter.method=lora --set model.quantization=nf4"),
        ("data.text=a.txt", "data.text", "--set 'data.text=[\"a.txt\"]'"),
        ("adapter.targets=q_proj,v_proj", "adapter.targets", '--set \'adapter.targets=["q_proj", "v_proj"]\''),
        ("train.steps=1e3", "train.steps", "--set train.steps=1000"),
        ("train.optimizer=adamw_torch", "train.optimizer", "--set train.optimizer=adamw"),
        ("cluster.memory_bytes=8GB", "cluster.memory_bytes", "--set cluster.memory_bytes=8000000000"),
        ("cluster.device=cuda:0", "cluster.device", "--set cluster.device=cuda"),
        ("train.warmup_steps=5%", "train.warmup_steps", "--set train.warmup_steps=0.05"),
        ("train.clip_norm=none", "train.clip_norm", "--set 'train.clip_norm=\"\"'"), ("steps=10", "set", "--set train.steps=10"),
        ("lora.r=8", "table", "[adapter] rank = 8"),
    ],
)  # fmt: skip
def test_a_name_or_value_from_elsewhere_gets_what_to_write(
    tmp_path: Path, override: str, key: str, written: str
) -> None:
    with refuses(f"job.{key}", written):
        load_job(write(tmp_path, SMALL), [override])


def test_what_to_write_is_accepted() -> None:
    """Every setting in the table of names is one of an existing key, with a value that it accepts."""
    names = read_names()
    words = [
        (key, word) for kind in ("synonyms", "values") for key, words in names[kind].items() for word in words.values()
    ]
    entries = [*names["keys"].values(), *(word if "=" in word else f"{key}={word}" for key, word in words)]
    for dotted, equals, word in (setting.partition("=") for entry in entries for setting in entry.split()):
        table, _, key = dotted.partition(".")
        assert key in TABLES[table].model_fields, dotted
        assert not equals or not broken_keys(TABLES[table], {key: override_value(word)}).keys() & {key}, (dotted, word)


RECORDS = "data.text=", "data.records=['a.jsonl']"
LORA = "adapter.method=lora"
CONTRADICTIONS: list[tuple[tuple[str, ...], str, tuple[object, ...]]] = [
    (("model.path=x",), "model.path", ('"x"', "model.path and model.config")),
    (("model.config=",), "model.path", ("model.factory",)),
    (("tokenizer.path=x",), "tokenizer.path", ("tokenizer.train_vocab_size",)),
    (("tokenizer.train_vocab_size=513",), "tokenizer.train_vocab_size", ("model.config.vocab_size = 512",)),
    (("tokenizer.train_vocab_size=256",), "tokenizer.train_vocab_size", (257,)),
    (("cluster.time_scale=2.0",), "cluster.time_scale", ("2.0",)),
    (("cluster.emulate_first=true",), "cluster.emulate_first", ("true",)),
    (("profile.calibrate=true", "cluster.emulate=p.toml"), "profile.calibrate", ("true",)),
    (("profile.save_as=a.toml", "cluster.emulate=p.toml"), "profile.save_as", ("a.toml",)),
    ((LORA, "plan.schedule=split"), "plan.schedule", ("split",)),
    (("plan.pipelines=0",), "plan.pipelines", (0, '"auto"')),
    (("train.global_batch=12", "train.micro_batch=5"), "train.micro_batch", ("12: 1, 2, 3, 4, 6, 12",)),
    (("train.global_batch=8000000",), "train.global_batch", ("500,000 micro-batches of 16", "8,192", "131,072")),
    (("train.global_batch=8209",), "train.global_batch", ("8,209 micro-batches of 1 ",)),  # a prime
    (("train.global_batch=20000", "train.micro_batch=2"), "train.global_batch", ("10,000 micro-batches of 2 ",)),
    (("output.run_dir=../elsewhere",), "output.run_dir", ("../elsewhere",)),
    (("output.run_dir=runs/{host}",), "output.run_dir", ("{name}",)),
    (("model.config=config.json", "model.config.hidden_size=4"), "set", ("config.json",)),
    (("train=3",), "set", ("train=3",)), (("train.checkpoint.every=2",), "train.checkpoint", ("[checkpoint]",)),
    (("data.records=[]",), "data.records", ("[]",)),
    (("train.learning_rates={q_proj = 0}",), "train.learning_rates", ("{ q_proj = 0 }",)),
    (("train.freeze=['(']",), "train.freeze", ("(",)),
    (("data.records=['a.jsonl']",), "data.text", ('["notes/*.txt", "{stdlib}/*.py", "!a/**"]',)),
    (("data.text=",), "data.text", ("data.records",)),
    (("data.template=jinja",), "data.template", ('"auto" or "chat" or "plain"',)),
    (("train.cycles=2",), "train.cycles", ('"cosine_with_restarts"',)),
    (("train.decay=linear",), "train.decay", ('"warmup_stable_decay"',)),
    (("train.warmup_steps=1.5",), "train.warmup_steps", ("1.5",)),
    (("train.schedule=constant", "train.min_learning_rate_ratio=0.1"), "train.min_learning_rate_ratio", ('"constant"',)),
    (("data.template=plain",), "data.template", ("data.records",)),
    (("data.train_on_prompt=true",), "data.train_on_prompt", ("data.records",)),
    (("train.epochs=2", "train.steps=7"), "train.steps", ("train.epochs",)),
    (("train.early_stopping_patience=2",), "train.early_stopping_patience", ("train.evaluate_every",)),
    (("data.evaluation_sets={a=['x']}", "data.evaluation_fraction=0"), "data.evaluation_sets", ("data.evaluation",)),
    ((*RECORDS, "data.evaluation_sets={a=['x']}", "train.preference='dpo'"), "data.evaluation_sets", ()),
    (("data.evaluation_sets={'a b'=['x']}",), "data.evaluation_sets", ("a b", 40)),
    (("train.early_stopping_patience=2", "train.evaluate_every=5", "data.evaluation_fraction=0"),
     "train.early_stopping_patience", ()),
    (("data.isolate=true",), "data.isolate", ("data.records",)),
    ((*RECORDS, "data.max_bytes=5", "data.documents=line"), "data.max_bytes", ("data.text",)),
    ((*RECORDS, "data.documents=line"), "data.documents", ("data.text",)),
    ((*RECORDS, "data.template=chat"), "data.template", ("tokenizer.train_vocab_size", '"plain"')),
    (("train.preference=dpo",), "train.preference", ("data.records",)),
    (("train.preference_beta=0.2",), "train.preference_beta", ("dpo or hinge or ipo",)),
    (("train.preference_margin=1",), "train.preference_margin", ("simpo",)),
    (("train.preference=orpo", "train.preference_smoothing=0.1"), "train.preference_smoothing", ("dpo or robust or simpo",)),
    (("train.preference=dpo", "train.undesirable_weight=2"), "train.undesirable_weight", ("kto",)),
    (("train.preference_smoothing=0.5",), "train.preference_smoothing", (0.5,)),
    (("train.learning_rate=inf",), "train.learning_rate", ("inf",)),
    (("train.optimizer=adafactor", "train.beta2=0.9"), "train.beta2", ('"adafactor"',)),
    ((LORA, "adapter.start=pissa_4"), "adapter.start", ("pissa_4", '"pissa_niter_4"')),
    ((LORA, "adapter.start=olora", "adapter.dora=true"), "adapter.start", ("adapter.dora",)),
    ((LORA, "adapter.start=pissa", "adapter.path=a"), "adapter.start", ("adapter.path",)),
    ((LORA, "adapter.start="), "adapter.start", ('"default"',)),
    (("adapter.start=pissa",), "adapter.start", ('adapter.method = "lora"',)),
    (("adapter.tokens_in=head",), "adapter.tokens_in", ('adapter.method = "lora"',)),
]  # fmt: skip
"""(overrides of a small job, the key that is named, values beside it)."""


@pytest.mark.parametrize(("overrides", "key", "values"), CONTRADICTIONS)
def test_contradictions(tmp_path: Path, overrides: tuple[str, ...], key: str, values: tuple[object, ...]) -> None:
    with refuses(f"job.{key}", *values):
        load_job(write(tmp_path, SMALL), overrides)


LAYERS = '[model]\nfactory = "my_model:model"\n'


def test_a_model_of_layers_needs_nothing_else(tmp_path: Path) -> None:
    job = load_job(write(tmp_path, LAYERS)).job
    assert (job.model.factory, job.data.sequence_length, job.train.dtype) == ("my_model:model", 1, "fp32")


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("data.text=['a.txt']", "data.text", "a.txt"),
        ("tokenizer.path=t", "tokenizer.path", "t"),
        (LORA, "adapter.method", "lora"),
        ("data.sequence_length=64", "data.sequence_length", 64),
        ("data.pad=longest", "data.pad", "longest"),
        ("sample.prompt=hello", "sample.prompt", "hello"),
        ("cluster.emulate=p.toml", "cluster.emulate", "p.toml"),
        ("train.desirable_weight=2", "train.desirable_weight", "kto"),
        ("train.freeze=[0]", "train.freeze", "[0]"),
        ("train.dtype=bf16", "train.dtype", "fp32"),
        ("model.factory=my_model.model", "model.factory", '"package.module:function"'),
        ("model.path=x", "model.path", "model.path and model.factory"),
    ],
)
def test_what_a_model_of_layers_cannot_have(tmp_path: Path, override: str, key: str, value: object) -> None:
    with refuses(f"job.{key}", value):
        load_job(write(tmp_path, LAYERS), [override])


def test_a_broken_value_is_named_once(tmp_path: Path) -> None:
    for text, overrides, kind in (
        (SMALL, ["train.global_batch=0", "train.micro_batch=3"], "job.train.global_batch"),
        ("data = 3\n" + SMALL.split("[data]")[0], [], "job.table"),
    ):
        with refuses(kind) as caught:
            load_job(write(tmp_path, text), overrides)
        assert len(caught.value.problems) == 1


@pytest.mark.parametrize(
    ("name", "content", "kind", "written"),
    [
        ("small.toml", None, "job.missing", "init quickstart"), ("smol", None, "job.missing", "small.toml"),
        ("small.toml", b"[train\nsteps = 3", "job.toml", ""), ("small.toml", b"[train]\nsteps = 3\nsteps = 4", "job.toml", ""),
        ("small.toml", b"# \xff\xfe", "job.encoding", ""), ("axolotl.yml", b"a: b\n", "job.toml", "init --from "),
        ("a.jsonl", b"{}\n", "job.toml", "data.records="), ("train.py", b"import torch\n", "job.toml", "mpirun -np N python "),
    ],
)  # fmt: skip
def test_unreadable_files(tmp_path: Path, name: str, content: bytes | None, kind: str, written: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    if name == "smol":
        (tmp_path / "small.toml").touch()
    with refuses(kind, path, written):
        load_job(path)
    (tmp_path / "run.json").touch()
    with refuses("file.not_regular", tmp_path, f"train JOB --resume latest --run-dir {tmp_path}"):
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
        f"model.config={field_metadata(TABLES['model'], Example)['config'][0]}",
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
    examples = [(table, *one) for table, model in TABLES.items() for one in field_metadata(model, Example).items()]
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
