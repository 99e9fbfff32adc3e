"""``init --from``: files of axolotl, LLaMA-Factory and TRL, shaped as those projects' examples, become jobs."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest

from hetero_mpi.cli import main
from hetero_mpi.interop import job_draft
from hetero_mpi.interop.init import init
from hetero_mpi.interop.job_draft import NOT_UNDERSTOOD, TABLE, TOOLS, keys_of, tables_of
from hetero_mpi.interop.other_files import read_keys
from hetero_mpi.interop.other_tools import convert_file
from hetero_mpi.interop.trl_script import SIGNATURES, TRAINER
from hetero_mpi.job.load import LoadedJob, load_job
from hetero_mpi.job.schema import TABLES
from hetero_mpi.util import toml
from hetero_mpi.util.errors import UserError
from tests.support.errors import refuses

FILES = Path(__file__).with_name("other_tools")
KNOWN = toml.loads(Path(job_draft.__file__).with_name("known_keys.toml").read_text(encoding="utf-8"))["keys"]
EXPECTED: dict[str, dict[str, Any]] = json.loads(FILES.with_name("other_tools_jobs.json").read_text())
"""File -> keys of its job."""
UNKNOWN = {"trl-unknown.yaml": ["train_split", "max_train_samples", "mtp_enabled", "mtp_num_predictions"]}
"""File -> those of its keys that nobody knows."""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def made(file: Path, *options: str) -> LoadedJob:
    assert main(["init", "--from", str(file), *options]) == 0
    return load_job("job.toml")


def of(job: LoadedJob, dotted: str) -> Any:
    table, _, key = dotted.partition(".")
    return getattr(getattr(job.job, table), key)


def left_keys(text: str) -> str:
    return text.partition("# Keys that were left out, by reason:\n")[2]


@pytest.mark.parametrize("name", EXPECTED)
def test_a_file_becomes_a_job(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    job = made(FILES / name)
    assert {dotted: of(job, dotted) for dotted in EXPECTED[name]} == EXPECTED[name]
    text = Path("job.toml").read_text()
    sources = " ".join(re.findall(r"  # (.*)", text))
    for key in read_keys(FILES / name):
        assert re.search(rf"\b{re.escape(key)}\b", sources + left_keys(text)), f"{key} has got lost"
    (unknown,) = re.findall(rf"^{NOT_UNDERSTOOD}: (.*)", capsys.readouterr().out, re.MULTILINE) or [""]
    assert re.findall(r"(\w+) = ", unknown) == UNKNOWN.get(name, [])


def test_what_is_left_has_its_value_and_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    made(FILES / "axolotl-full-fsdp.yml")
    text = left_keys(Path("job.toml").read_text()).replace("\n#  ", "")
    for part in ('datasets[0].split = "train[:20%]"', 'attention = "flash"', "gradient_checkpointing = true"):
        assert part in text
    printed = re.findall(r"^  (\S+) = .*: ", capsys.readouterr().out, re.MULTILINE)
    assert printed == ["chat_template", "datasets[0].split"], "training differs without these alone"
    assert "datasets[0].message_property_mappings = " in text or "datasets[0].field_messages" in text
    pattern = "lora_target_modules: 'model.layers.[0-9].self_attn.q_proj'\nload_in_8bit: true\n"
    misspelled = (
        pattern + "lora_rank: 8\ndataset_prepard_path: x\nlr_scheduler: rex\noptimizer: lion_8bit\nseed_of_mine: 3"
    )
    Path("odd.yml").write_text(BASE + DATA + misspelled)
    lines = convert_file(Path("odd.yml"), Path("other/job.toml"), None)
    assert re.findall(r"(\w+) = \S+ \(did you mean (\w+)", lines[1]) == [
        ("lora_rank", "lora_r"),
        ("dataset_prepard_path", "dataset_prepared_path"),
    ]
    differing = ["load_in_8bit", "optimizer", "lora_target_modules", "lr_scheduler"]
    assert [line.split(" = ")[0].strip() for line in lines[3:-2]] == differing


def test_a_key_without_effect_has_a_reason_and_no_key_no_heading() -> None:
    for number, more in enumerate(("", "eval_steps: 50\neval_strategy: steps\nmax_steps: 5\nnum_train_epochs: 3\n")):
        Path("trl.yaml").write_text(THEIRS["trl"].replace("a/c", "./rows.jsonl") + more)
        printed, text = convert_file(Path("trl.yaml"), target := Path(f"{number}.toml"), None), target.read_text()
        assert len(printed) == 3 + 3 * number and ("left out" in text) == ("other keys" in printed[0]) == bool(more)
        assert "train.e" not in left_keys(text)


def test_gpus_and_the_place() -> None:
    file = FILES / "axolotl-local-files.yml"
    assert made(file, "--gpus", "3").job.train.global_batch == 24
    with refuses("init.gpus", "0"):
        init(None, Path(), file, 0)
    with refuses("init.exists", "job.toml"):
        convert_file(file, Path("job.toml"), None)
    assert main(["init", "--from", str(file), "below/mine.toml"]) == 0
    assert load_job("below/mine.toml").job.data.records == ["../data/chats.jsonl", "../data/more.jsonl"]
    assert main(["init", "--from", str(file), "other"]) == 0 and Path("other/job.toml").exists()


def test_pairs_fit_the_positions_of_a_local_model(capsys: pytest.CaptureFixture[str]) -> None:
    Path("start").mkdir()
    Path("start/config.json").write_text('{"max_position_embeddings": 512}')
    Path("dpo.yml").write_text(f"base_model: ./start\nrl: dpo\nsequence_len: 512\nwandb_project: mine\n{DATA}")
    assert made(Path("dpo.yml")).job.data.sequence_length == 512 and "  sequence_len = 512: " in capsys.readouterr().out
    assert 'wandb_project = "mine"' in left_keys(Path("job.toml").read_text())


def test_keys_inside_of_keys_are_named() -> None:
    made(FILES / "trl-handbook-qlora.yaml")
    text = left_keys(Path("job.toml").read_text())
    assert "dataset_mixture.test_split_size = 1000" in text and "dataset_mixture[0].weight = 1.0" in text


def test_gpus_go_before_what_a_launcher_was_told() -> None:
    assert made(FILES / "llamafactory-command.sh", "--gpus", "3").job.train.global_batch == 24
    text = left_keys(Path("job.toml").read_text())
    assert "nproc_per_node = 2" in text and "nnodes = 2" in text


@pytest.mark.parametrize(
    ("command", "preference", "batch"),
    [("trl orpo --config more.yaml --learning_rate 2e-6 --beta 0.5", "orpo", 8),
     ("pip install x\nexport CUDA_VISIBLE_DEVICES=0,1\nllamafactory-cli train more.yaml learning_rate=2e-6 stage=dpo", "dpo", 16),
     ("FORCE_TORCHRUN=1 NNODES=2 NPROC_PER_NODE=3 llamafactory-cli train more.yaml learning_rate=2e-6", "none", 48),
     ("export NPROC_PER_NODE=2\nllamafactory-cli train more.yaml learning_rate=2e-6", "none", 16),
     ("accelerate launch --num_processes 3 -m axolotl.cli.train axolotl.yml --learning_rate 2e-6", "none", 3),
     ("cd x && torchrun --nproc_per_node 2 src/train.py more.yaml learning_rate=2e-6 2>&1 | tee log", "none", 16)],
)  # fmt: skip
def test_a_command_line_reads_its_config(command: str, preference: str, batch: int) -> None:
    Path("below").mkdir()
    Path("below/more.yaml").write_text(
        "model_name_or_path: a/b\ndataset_name: a/c\ndataset: a/c\nlearning_rate: 1e-3\n"
    )
    Path("below/axolotl.yml").write_text(THEIRS["axolotl"])
    Path("below/run.sh").write_text(f"#!/bin/bash\n{command}\n")
    job = made(Path("below/run.sh")).job
    assert (job.train.preference, job.train.learning_rate, job.train.global_batch) == (preference, 2e-6, batch)


SCRIPT = """
import torch
NAME = "org/model"
RANK = 8
model = AutoModelForCausalLM.from_pretrained(NAME, quantization_config=BitsAndBytesConfig(load_in_4bit=True))
rows = load_dataset("json", data_files="rows.jsonl", split="train").train_test_split(test_size=0.1)
config = SFTConfig("out", learning_rate=2e-4, bf16=torch.cuda.is_bf16_supported(), max_steps=len(rows), packing=True)
lora = LoraConfig(r=RANK, target_modules=["q_proj"], task_type="CAUSAL_LM")
trainer = trl.SFTTrainer(args=config, train_dataset=rows["train"].map(str), eval_dataset=rows["test"], peft_config=lora)
"""


@pytest.mark.parametrize(
    ("changes", "expected"),
    [(("", ""), {"model.path": "org/model", "model.quantization": "nf4", "adapter.alpha": 8, "data.records": ["rows.jsonl"],
        "data.evaluation_fraction": 0.1, "train.learning_rate": 2e-4, "train.dtype": "auto", "train.epochs": 3, "adapter.rank": 8}),
     (("SFT", "DPO"), {"train.preference": "dpo", "data.packing": False}),
     (("SFTConfig", "TrainingArguments"), {"train.preference": "none", "train.learning_rate": 2e-4}),
     (("lora = ", "config.learning_rate = 1e-5\nconfig.seed += 1\nlora = "), {"train.learning_rate": 1e-5, "train.seed": 42}),
     (("lora = ", "config.save_total_limit = 0\nlora = "), {"checkpoint.keep": "all"}),
     (("packing=True)", "eval_strategy='steps')\nstop = EarlyStoppingCallback(4)"), {"train.early_stopping_patience": 4}),
     (("SFT", "GRPO"), "convert.value"), (("CausalLM", "SequenceClassification"), "convert.other_objective"),
     (("(NAME,", "(args.model,"), "convert.format"), (("RANK = 8", "RANK = = 8"), "convert.format")],
)  # fmt: skip
def test_a_script_that_uses_trl_is_read_and_not_run(changes: tuple[str, str], expected: Any) -> None:
    Path("train.py").write_text(SCRIPT.replace(*changes))
    if isinstance(expected, str):
        with refuses(expected, "train.py"):
            convert_file(Path("train.py"), Path("job.toml"), None)
        return
    job = made(Path("train.py"))
    assert {key: of(job, key) for key in expected} == expected
    left = left_keys(Path("job.toml").read_text()).replace("\n#  ", "")
    assert "(computed) max_steps" in left and "(computed) datasets.map" in left


@pytest.mark.parametrize(
    ("code", "expected"),
    [('rows.train_test_split(0.1, seed=1)', 0.1), ('rows.train_test_split(seed=1, test_size=0.1)', 0.1),
     ('rows.train_test_split(None, 0.9)', 0.1), ('rows.train_test_split()', 0.25), ('rows.train_test_split(share)', 0)],
)  # fmt: skip
def test_arguments_without_a_name_are_those_of_the_signature(code: str, expected: float) -> None:
    split = f"split = {code}\ntrain, test = split['train'], split['test']\n"
    rows = 'rows = load_dataset("json", None, None, "rows.jsonl", "train")\n'
    call = 'trl.DPOTrainer("org/model", None, DPOConfig("out", **more), None, train, test)\n'
    Path("train.py").write_text(rows + split + call)
    job, omitted = made(Path("train.py")), left_keys(Path("job.toml").read_text())
    assert (job.job.data.records, job.job.data.evaluation, job.job.output.run_dir) == (["rows.jsonl"], None, "out")
    assert job.job.data.evaluation_fraction == pytest.approx(expected)
    assert ("test_size" in omitted) == (expected == 0) and "**more" in omitted
    Path("train.py").write_text(rows + call.replace("train, test", "rows.select(1), rows.select(2)"))
    convert_file(Path("train.py"), Path("other.toml"), None)
    assert load_job("other.toml").job.data.evaluation is None and "eval_dataset" in Path("other.toml").read_text()


@pytest.mark.slow
def test_signatures_are_those_of_the_libraries() -> None:
    trl, datasets, peft, transformers = map(pytest.importorskip, ("trl", "datasets", "peft", "transformers"))
    named = {"train_test_split": datasets.Dataset.train_test_split, "SFTTrainer": trl.SFTTrainer}
    named["from_pretrained"] = transformers.PreTrainedModel.from_pretrained
    for library in (peft, transformers, datasets, trl):
        named |= {name: getattr(library, name) for name in SIGNATURES if hasattr(library, name)}
    for name, names in (SIGNATURES | {"SFTTrainer": TRAINER}).items():
        parameters = [key for key in inspect.signature(named[name]).parameters if key not in ("self", "cls")]
        assert tuple(parameters[: len(names)]) == names, name


@pytest.mark.parametrize(
    ("command", "script", "expected"),
    [("my_sft.py", "", "none"), ("train_dpo-2.py", "", "dpo"), ("mine.py", "CPOTrainer(a)", "convert.other_objective"),
     ("train.py", "trl.DPOTrainer(model=a)", "dpo"), ("my_run.py --packing", "", "none"), ("online_dpo.py", "", "convert.value"),
     ("my_grpo.py --beta 0.1", "", "convert.value")],
)  # fmt: skip
def test_the_trainer_of_a_script_with_options(command: str, script: str, expected: str) -> None:
    if script:
        Path(command).write_text(script)
    Path("run.txt").write_text(f"python {command} --model_name_or_path a/b --dataset_name a/c --beta 0.1")
    if "." in expected:
        with refuses(expected, "run.txt"):
            convert_file(Path("run.txt"), Path("job.toml"), None)
    else:
        assert made(Path("run.txt")).job.train.preference == expected


def test_files_of_a_local_directory_have_splits() -> None:
    Path("rows").mkdir()
    for name in ("train.jsonl", "test-0.jsonl", "README.md"):
        Path("rows", name).write_text("")
    run = "trl sft --model_name_or_path a/b --dataset_name rows --save_total_limit 2"
    for more, evaluation in ("", None), (" --eval_strategy epoch", ["rows/test-0.jsonl"]):
        Path("run.txt").write_text(run + more)
        convert_file(Path("run.txt"), Path(f"job{len(more)}.toml"), None)
        data = load_job(f"job{len(more)}.toml").job.data
        assert (data.records, data.evaluation) == (["rows/train.jsonl"], evaluation)


def test_data_sets_that_llama_factory_lists() -> None:
    Path("data").mkdir()
    listed = {
        "who_am_i": {"file_name": f"{Path().absolute()}/data/me.json", "columns": {"prompt": "q", "kto_tag": "label"}},
        "seen": {"file_name": "seen.json", "columns": {"prompt": "q", "images": "images"}},
        "more": {"hf_hub_url": "a/c", "subset": "en", "columns": {"prompt": "q"}},
        "pairs": {"file_name": "pairs.json", "ranking": True, "formatting": "sharegpt"},
    }
    Path("data/dataset_info.json").write_text(json.dumps(listed))
    job = made(FILES / "llamafactory-qlora.yaml").job
    assert job.data.records == ["data/me.json", "hf:a/c/en"] and job.data.keys == {"instruction": "q"}
    Path("pairs.yaml").write_text("model_name_or_path: a/b\nstage: dpo\ndataset: pairs\n")
    convert_file(Path("pairs.yaml"), Path("pairs.toml"), None)
    assert load_job("pairs.toml").job.data.keys == {"prompt": "conversations"}
    Path("images.yaml").write_text("model_name_or_path: a/b\nstage: sft\ndataset: seen\n")
    with refuses("convert.other_objective", "images"):
        convert_file(Path("images.yaml"), Path("other.toml"), None)


def test_the_table_leads_to_keys_that_there_are() -> None:
    for tool in TOOLS:
        keys, patterns = (
            keys_of(tool),
            [one for table in tables_of(tool) for group in table["left"] for one in group["keys"]],
        )
        for ours in keys.values():
            table, _, key = ours.partition(".")
            assert (
                ours.removeprefix("=") in TABLE["parts"] if ours.startswith("=") else key in TABLES[table].model_fields
            ), ours
        assert keys_of(tool, "defaults").keys() <= keys.keys() and len({*patterns}) == len(patterns), tool


@pytest.mark.parametrize("section", KNOWN)
def test_every_key_that_a_tool_knows_has_a_counterpart_or_a_reason(section: str) -> None:
    """``benchmarks/tool_keys.py --check`` compares the list with the installed packages."""
    tool, prefix = {"axolotl.trl": ("axolotl", "trl."), "trainer": ("trl", "")}.get(section, (section, ""))
    tables = [TABLE["entries"]] if section == "entries" else tables_of(tool)
    patterns = [one for table in tables for group in table["left"] for one in group["keys"]]
    keys = {"path", "name", *TABLE["columns"]} if section == "entries" else keys_of(tool).keys()
    covered = re.compile("|".join(re.escape(one).replace(r"\*", ".*") for one in [*keys, *patterns]))
    assert [key for key in KNOWN[section] if not covered.fullmatch(prefix + key)] == []


def effective(kind: str) -> dict[str, Any]:
    """Keys of a job -> what one of the installed TRL's trainers does where its command line names a model and data only."""
    import trl
    from trl.experimental import cpo, orpo

    configs = {
        "sft": trl.SFTConfig,
        "dpo": trl.DPOConfig,
        "kto": trl.KTOConfig,
        "orpo": orpo.ORPOConfig,
        "cpo": cpo.CPOConfig,
    }
    args, adapter = configs[kind](output_dir="out", use_cpu=True), trl.ModelConfig()
    still, compared = getattr(args, "disable_dropout", False), kind != "sft"
    answers = 2 if kind in ("dpo", "orpo", "cpo") else 1
    assert adapter.lora_target_modules is None and args.eval_strategy == "no" and args.save_strategy == "steps"
    assert compared or (args.completion_only_loss is None and not args.assistant_only_loss)
    return {
        **{f"train.{key}": getattr(args, key) for key in ("learning_rate", "warmup_steps", "weight_decay", "seed")},
        **{f"train.{ours}": getattr(args, f"adam_{ours}") for ours in ("beta1", "beta2", "epsilon")},
        "train.schedule": args.lr_scheduler_type, "train.optimizer": TABLE["values"]["train.optimizer"][args.optim],
        "train.clip_norm": args.max_grad_norm, "train.epochs": args.num_train_epochs, "train.steps": 100,
        "train.global_batch": args.per_device_train_batch_size * args.gradient_accumulation_steps,
        "train.last_batch": "full" if args.dataloader_drop_last else "smaller", "train.dtype": "bf16" if args.bf16 else "fp32",
        "train.dropout": not still, "adapter.dropout": 0.0 if still else adapter.lora_dropout, "adapter.targets": "family",
        "adapter.rank": adapter.lora_r, "adapter.alpha": adapter.lora_alpha, "adapter.rslora": adapter.use_rslora,
        "data.sequence_length": answers * args.max_length - 1, "data.packing": getattr(args, "packing", False),
        "data.train_on_prompt": False if compared else "chats", "data.evaluation_fraction": 0.0, "train.evaluate_every": 0,
        "checkpoint.every": args.save_steps, "train.neftune_noise_alpha": args.neftune_noise_alpha,
        "train.preference": {"sft": "none", "cpo": "simpo"}.get(kind, kind),
        "train.preference_beta": getattr(args, "beta", 0.1), "train.preference_margin": getattr(args, "simpo_gamma", 0.5),
        "train.preference_smoothing": getattr(args, "label_smoothing", 0.0),
        "train.desirable_weight": getattr(args, "desirable_weight", 1.0), "checkpoint.keep": args.save_total_limit or "all",
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "dpo", "kto", "orpo", "cpo"])
def test_a_silent_command_line_trains_as_the_trainer_of_trl_does(kind: str) -> None:
    pytest.importorskip("trl", reason="needs the extra trl")
    asked = " --loss_type simpo --cpo_alpha 0" if kind == "cpo" else ""
    Path("run.txt").write_text(f"trl {kind} --model_name_or_path a/b --dataset_name x.jsonl --use_peft{asked}")
    job = made(Path("run.txt"))
    expected = effective(kind)
    assert {dotted: of(job, dotted) for dotted in expected} == expected


THEIRS = {
    "": "",
    "axolotl": "base_model: a/b\ndatasets: [{path: a/c}]\n",
    "llamafactory": "model_name_or_path: a/b\ndataset: x\ntemplate: llama3\n",
    "trl": "model_name_or_path: a/b\ndataset_name: a/c\n",
}
LORA, RATE = "adapter: lora\n", "learning_rate: 1e-4\n"
OF_TRANSFORMERS = {
    "weight_decay": 0.0, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "clip_norm": 1.0, "seed": 42, "optimizer": "adamw",
    "data.evaluation_fraction": 0.0, "evaluate_every": 0, "adapter.dropout": 0.0,
}  # fmt: skip
BECOMES: list[tuple[str, str, dict[str, Any]]] = [
    *(("", f"trl sft --model_name_or_path a/b --dataset_name a/c --completion_only_loss {only}", {"data.train_on_prompt": learnt})
      for only, learnt in ((True, "chats"), (False, True))),
    ("trl", "beta: 0.2\nloss_type: [sigmoid]", {"preference": "dpo"}),
    # How is learnt.
    ("llamafactory", "stage: dpo\npref_loss: simpo\nsimpo_gamma: 1.5\npref_beta: 2\ndpo_label_smoothing: 0.1\nkto_chosen_weight: 2",
     {"preference": "simpo", "preference_margin": 1.5, "preference_beta": 2, "preference_smoothing": 0.1, "desirable_weight": 1}),
    ("llamafactory", "stage: kto\nkto_chosen_weight: 1.5\npref_beta: 0.2\npref_loss: sigmoid",
     {"preference": "kto", "desirable_weight": 1.5, "preference_beta": 0.2}),
    ("llamafactory", RATE + "lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr: 1e-5}\nwarmup_ratio: 0.05",
     {"schedule": "cosine", "min_learning_rate_ratio": 0.1, "warmup_steps": 0.05, "last_batch": "smaller"}),
    ("llamafactory",
     "lr_scheduler_type: warmup_stable_decay\nlr_scheduler_kwargs: '{\"num_decay_steps\": 50, \"decay_type\": \"linear\"}'",
     {"schedule": "warmup_stable_decay", "decay_steps": 50, "decay": "linear"}),
    ("llamafactory", "lr_scheduler_type: cosine_with_restarts\nlr_scheduler_kwargs: {num_cycles: 3}\ndataloader_drop_last: true",
     {"schedule": "cosine_with_restarts", "cycles": 3, "last_batch": "full"}),
    ("llamafactory", "optim: adafactor\nadam_beta2: 0.99", {"optimizer": "adafactor", "beta2": 0.95}),
    ("llamafactory", "optim: adamw_torch\nuse_muon: true\nadam_beta2: 0.99", {"optimizer": "muon", "beta2": 0.99}),
    ("llamafactory", "loraplus_lr_ratio: 16\nneftune_noise_alpha: 5", {"lora_plus_ratio": 16.0, "neftune_noise_alpha": 5.0}),
    ("llamafactory", "finetuning_type: full\nloraplus_lr_ratio: 16\nneftune_noise_alpha: 0",
     {"lora_plus_ratio": 1.0, "neftune_noise_alpha": None}),
    ("axolotl", "num_epochs: 3\nsample_packing: true\neval_strategy: 'no'", {"last_batch": "full", "evaluate_every": 0}),
    # How an adapter begins.
    ("llamafactory", "pissa_init: true", {"adapter.start": "pissa_niter_16"}),
    ("llamafactory", "pissa_init: true\npissa_iter: -1\npissa_convert: true", {"adapter.start": "pissa"}),
    ("llamafactory", "pissa_init: false\npissa_iter: 4", {"adapter.start": "default"}),
    ("axolotl", LORA + "peft_init_lora_weights: olora", {"adapter.start": "olora"}),
    ("axolotl", LORA + "peft_init_lora_weights: eva", {"adapter.start": "default"}),
    # Training data do not become held-out data.
    ("", "model_name_or_path: a/b\ndataset_name: own.jsonl\neval_strategy: steps\neval_steps: 10\n",
     {"data.records": ["own.jsonl"], "data.evaluation": None, "evaluate_every": 0}),
    # How axolotl warms up.
    *(("axolotl", RATE + text, {"warmup_steps": warm_up, "max_warmup_steps": None})
      for text, warm_up in (("max_steps: 200", 6), ("max_steps: 50", 2), ("max_steps: 30", 0), ("max_steps: 9000", 100),
                            ("max_steps: 9000\nwarmup_ratio: 0.1", 900), ("max_steps: 200\nwarmup_steps: 0", 0),
                            ("warmup_steps: 1", 2), ("warmup_steps: 0", 0), ("warmup_ratio: 0.2", 0.2),
                            ("lr_scheduler: constant", 0))),
    # What is done several times in an epoch.
    *(("axolotl", RATE + text, {"evaluate_every": evaluate_every, "checkpoint.every": every})
      for text, evaluate_every, every in (
          ("num_epochs: 4\nval_set_size: 0.1\nevals_per_epoch: 5\nsaves_per_epoch: 2", 0.05, 0.125),
          ("num_epochs: 4\nval_set_size: 0.1\nevals_per_epoch: 5\nmax_steps: 400\nsaves_per_epoch: 1", 20, 100),
          ("val_set_size: 0.1\nevals_per_epoch: 1\nsaves_per_epoch: 0", 0, 0),
          ("num_epochs: 3\nevals_per_epoch: 5\nsave_strategy: 'no'", 0, 0),
          ("num_epochs: 2\nval_set_size: 0.1\neval_strategy: epoch", 0.5, 0.5),
          ("val_set_size: 0.1\neval_steps: 0.2\nsave_steps: 30", 0.2, 30), ("val_set_size: 500\neval_steps: 20", 20, 0))),
    ("axolotl", RATE + "embedding_lr_scale: 0.1\nlr_groups: [{name: low, modules: [q_proj, o_proj], lr: 1.0e-6}]",
     {"learning_rates": {"embed_tokens|lm_head": 1e-4 * 0.1, "q_proj": 1e-6, "o_proj": 1e-6}}),
    *(("", f"base_model: a/b\ndatasets: [{{path: a/c, {text}}}]", {"data.keys": keys}) for text, keys in (
        ("field_messages: chat, message_property_mappings: {role: from, content: value}", {"conversations": "chat"}),
        ("type: {field_instruction: q, field_output: output}", {"instruction": "q"}), ("field_messages: messages", None))),
    *(("", f"base_model: a/b\nrl: dpo\noutput_dir: {{cwd}}/out\ndatasets: [{{path: a/c, {text}}}]",
       {"data.keys": keys, "output.run_dir": "out"})
      for text, keys in (("type: chat_template.default, field_messages: chat", {"prompt": "chat"}), ("type: chatml.intel", None),
                         ("type: chat_template.default", {"prompt": "messages"}), ("type: llama3.icr", {"prompt": "input"}),
                         ("type: chatml.argilla", {"chosen": "chosen_response", "rejected": "rejected_response"}),
                         ("type: {field_prompt: q, field_chosen: a}", {"prompt": "q", "chosen": "a"}))),
    ("", "base_model: a/b\nrl: kto\nsave_total_limit: 0\ndatasets: [{path: a/c, type: llama3.argilla}]",
     {"data.keys": {"prompt": "instruction"}, "checkpoint.keep": "all"}),
    *(("axolotl", f"{LORA}lora_target_modules: {pattern}", {"adapter.targets": [f"{name}_proj" for name in names.split()]})
      for pattern, names in ((r"'model.layers.[\d]+.(mlp|self_attn).(up|down|gate|q|k|v|o)_proj'", "q k v o gate up down"),
                             (r"'model.language_model.layers.[\d]+.self_attn.(q|v)_proj'", "q v"), ("'.*(k|o)_proj'", "k o"),
                             ("'.*(q|v)_proj'", "q v"), ("'q_proj|v_proj'", "q v"), (r"'.*\.(q|up)_proj$'", "q up"),
                             ("[.*q_proj, v_proj]", "q v"))),
    # Keys that change nothing, or have a counterpart.
    ("axolotl", "reward_model: false\nplugins: [axolotl.integrations.liger.LigerPlugin]\nlabel_smoothing_factor: 0", {}),
    ("axolotl", LORA + "unfrozen_parameters: [lm_head]\nmodel_type: AutoModelForCausalLM", {}),
    ("axolotl", "rl: simpo\ncpo_alpha: 0\nsimpo_gamma: 0.7", {"preference": "simpo", "preference_margin": 0.7}),
    ("axolotl", "rl: dpo\ntrl: {beta: 0.3}\ndpo_loss_type: [hinge]", {"preference": "hinge", "preference_beta": 0.3}),
    ("trl", "beta: 0.1\nf_divergence_type: reverse_kl\nlabel_smoothing: 0.0", {"preference": "dpo", "adapter.dropout": 0.0}),
    ("trl", "desirable_weight: 2.0\nbeta: 0.3", {"preference": "kto", "preference_beta": 0.3, "learning_rate": 1e-6}),
    ("trl", "beta: 0.2\nloss_type: robust\nlabel_smoothing: 0.1", {"preference": "robust", "preference_smoothing": 0.1}),
    ("trl", "beta: 0.2\ndisable_dropout: false\nuse_peft: true", {"preference": "dpo", "dropout": True, "adapter.dropout": 0.05}),
    # Where the files of programs that are not installed here are silent: the table of keys names the sources of these values.
    ("axolotl", RATE + LORA + "lora_r: 8\nlora_alpha: 4",
     OF_TRANSFORMERS | {
         "schedule": "cosine", "warmup_steps": 0.03, "max_warmup_steps": 100, "epochs": 1, "global_batch": 1, "dtype": "auto",
         "data.sequence_length": 511, "data.packing": False, "data.train_on_prompt": False, "adapter.targets": "family",
         "checkpoint.every": 0, "checkpoint.keep": 4, "dropout": True}),
    ("axolotl", RATE + LORA + "rl: dpo\nlora_dropout: 0.1",
     OF_TRANSFORMERS | {"preference": "dpo", "preference_beta": 0.1, "dropout": False, "data.sequence_length": 1023}),
    ("llamafactory", "stage: sft",
     OF_TRANSFORMERS | {
         "learning_rate": 5e-5, "schedule": "linear", "warmup_steps": 0, "epochs": 3, "adapter.rank": 8, "global_batch": 8,
         "adapter.alpha": 16, "adapter.targets": "all-linear", "data.sequence_length": 2047, "data.packing": False, "dtype": "auto",
         "checkpoint.every": 500, "checkpoint.keep": "all", "data.train_on_prompt": False}),
    ("llamafactory", "stage: sft\nfinetuning_type: full", OF_TRANSFORMERS | {"dtype": "fp32", "dropout": True}),
    ("axolotl", "bf16: full", OF_TRANSFORMERS | {"dtype": "bf16"}),
    ("llamafactory", "stage: pt", OF_TRANSFORMERS | {"data.packing": True, "data.sequence_length": 2047}),
    ("llamafactory", "stage: dpo\nlora_dropout: 0.1",
     OF_TRANSFORMERS | {"preference": "dpo", "preference_beta": 0.1, "dropout": False, "data.sequence_length": 4095}),
    ("llamafactory", "stage: kto\nlora_dropout: 0.1", OF_TRANSFORMERS | {"preference": "kto", "dropout": False}),
]  # fmt: skip
"""(tool, text behind what stands in every file of it, keys of the job; those without a table are of [train])."""


@pytest.mark.parametrize(("tool", "text", "expected"), BECOMES)
def test_what_stands_in_a_file_becomes(tool: str, text: str, expected: dict[str, Any]) -> None:
    file = Path("theirs.yaml")
    file.write_text(f"{THEIRS[tool]}{text}\n".replace("{cwd}", str(Path.cwd())))
    job, found = made(file), Path("job.toml").read_text()
    assert {key: of(job, key if "." in key else f"train.{key}") for key in expected} == expected
    sources = " ".join(re.findall(r"  # (.*)", found)) + left_keys(found)
    assert all(key in sources for key in read_keys(file)), "none has got lost"


OTHER, PREFERENCE = "convert.other_objective", "beta: 0.1\n"
REFUSED = [
    *((tool, text, "convert.value", f"{text.split()[-2].removesuffix(':')} = {text.split()[-1]}") for tool, text in (
        ("axolotl", "rl: grpo"), ("llamafactory", "stage: ppo"), ("llamafactory", "stage: dpo\npref_loss: kto_pair"),
        ("llamafactory", "stage: sft\nfinetuning_type: freeze"))),
    *(("axolotl", text, OTHER, text.partition(":")[0]) for text in (
        "rl: simpo", "reward_model: true", "process_reward_model: true", "diffusion: {noise_schedule: cosine}",
        "plugins: [axolotl.integrations.liger.LigerPlugin, axolotl.integrations.diffusion.DiffusionPlugin]", "kd_trainer: true",
        "model_type: AutoModelForSequenceClassification", "model_type: AutoModelForImageTextToText", "dense_mixer: true",
        "processor_type: AutoProcessor", "use_eaft: true",
        "unfrozen_parameters: [lm_head]", "rl: simpo\nsimpo_gamma: 0.5")),
    *(("llamafactory", text, OTHER, text.rpartition("\n")[2].partition(":")[0]) for text in (
        "mask_history: true",
        "stage: dpo\npref_ftx: 0.2", "use_dft_loss: true", "image_max_pixels: 262144")),
    *(("trl", text, OTHER, text.rpartition("\n")[2].partition(":")[0]) for text in (
        PREFERENCE + "num_generations: 4", PREFERENCE + "loss_weights: [0.5]", PREFERENCE + "f_divergence_type: js_divergence",
        PREFERENCE + "label_smoothing: 0.1", "label_smoothing_factor: 0.1", "max_length: null")),
    *(("", f"{words} --model_name_or_path a/b --dataset_name a/c{more}", "convert.value", value) for words, more, value in (
        ("trl grpo", "", "trainer = grpo"), ("trl dpo", " --loss_type exo_pair", "loss_type = exo_pair"),
        ("trl sft", " --loss_type dft", "loss_type = dft"), ("trl dpo", " --loss_type sigmoid bco_pair", "loss_type = "),
        ("python train_mine.py", "", "trainer = train_mine"))),
    ("", "trl sft --model_name_or_path $MODEL --dataset_name a/c", "convert.format", "$MODEL"),
    ("", "base_model: a/b\nlearning_rate: 1e-4\nlearning_rate: 2e-4", "convert.format", "learning_rate"),
    ("axolotl", "learning_rate: -1", "convert.invalid_job", "[train] learning_rate = -1"),
    ("axolotl", "micro_batch_size: auto", "convert.value", "micro_batch_size = "),
    ("", "base_model: a/b\ndatasets: a/c: d", "convert.format", "theirs"),
    ("", "base_model: a/b", "convert.no_data", "theirs"),
    ("", "distributed_type: MULTI_GPU\nnum_processes: 2", "convert.no_model", "accelerate config"),
    ("", "model_name_or_path: a/b\nexport_dir: out", "convert.no_data", "exports"),
    ("", "- 1", "convert.format", "theirs"),
    ("", "base_model: a/b\nk0: &k0 x\n" + "".join(f"k{at}: &k{at} [{', '.join(9 * [f'*k{at - 1}'])}]\n" for at in range(1, 9)),
     "convert.format", "100,000"),
]  # fmt: skip


@pytest.mark.parametrize(("tool", "text", "kind", "value"), REFUSED)
def test_what_is_not_here_is_refused_and_writes_nothing(tool: str, text: str, kind: str, value: str) -> None:
    Path("theirs").write_text(f"{THEIRS[tool]}{text}\n")
    with refuses(kind, value):
        convert_file(Path("theirs"), Path("job.toml"), None)
    assert main(["init", "--from", "theirs"]) == 2
    assert [path.name for path in Path().iterdir()] == ["theirs"]


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with refuses("convert.format", "absent"):
        read_keys(tmp_path / "absent")
    Path("data").mkdir()
    Path("data/dataset_info.json").write_text("[1")
    Path("odd.yml").write_text("model_name_or_path: a/b\nstage: sft\ndataset: one\ncutoff_len: 64\n")
    with refuses("convert.format", "dataset_info.json"):
        convert_file(Path("odd.yml"), Path("job.toml"), None)


BASE = "base_model: a/b\nadapter: lora\n"
DATA = "datasets:\n  - path: x.jsonl\n    type: alpaca\n"


@pytest.mark.parametrize(
    "key", ["lora_r", "lr_scheduler", "bf16", "micro_batch_size", "datasets", "lora_model_dir", "report_to"]
)
@pytest.mark.parametrize(
    "value",
    [".nan", "2024-01-01", "!!binary aGk=", "!!set {a}", "{a b: 1}", "[[{a: null}]]", "&r [*r]", r'"\x7f"', r'"\ud800"', r'"a\0"',
     "'" + 5000 * "x" + "'", "[{path: json, data_files: 5}]", "[{path: null}]", "[null]",
     "[{path: json, data_files: {test: [b.json], train: a.json}}]"],
)  # fmt: skip
def test_values_of_any_kind_make_a_job_or_a_refusal(key: str, value: str) -> None:
    Path("odd.yml").write_text(BASE + ("" if key == "datasets" else DATA) + f"{key}: {value}\n", encoding="utf-8")
    try:
        convert_file(Path("odd.yml"), Path("job.toml"), None)
    except UserError as error:
        assert "odd.yml: " in str(error) and not Path("job.toml").exists()
    else:
        load_job("job.toml")
        assert key in Path("job.toml").read_text(encoding="utf-8").split("\n", 1)[1]


@pytest.mark.parametrize(
    "text",
    [BASE + DATA + "# see\nlora_r: 8  # as in: train --lora_r 4\n", BASE + DATA + "lora_r: 8\nnote: try --more\n",
     "\ufeff" + (BASE + DATA + "lora_r: 8\n").replace("\n", "\r\n"),
     '{\n\t"base_model": "a/b", "adapter": "lora", "lora_r": 8,\n\t"note": "\\ud83d\\ude00", "datasets": [{"path": "x.jsonl"}]}'],
)  # fmt: skip
def test_forms_of_a_file(text: str) -> None:
    Path("odd\n[x]\n.yml").write_bytes(text.encode())
    job = made(Path("odd\n[x]\n.yml"))
    assert of(job, "adapter.rank") == 8 and of(job, "data.records") == ["x.jsonl"]


def test_texts_beside_records_are_refused() -> None:
    Path("odd.yml").write_text(BASE + DATA + "  - path: y.jsonl\n    type: completion\n    field: body\n")
    with refuses(OTHER, "x.jsonl", "y.jsonl"):
        convert_file(Path("odd.yml"), Path("job.toml"), None)
