"""A trainer with the interface of transformers' and TRL's trainers, which takes an in-memory dataset and their arguments.

Arguments are converted to job keys by the same tables as config files (``interop.other_tools``). A non-default argument without a
counterpart is rejected, or only reported if it affects nothing but speed, memory or output.
"""

import glob
import hashlib
import json
import math
import secrets
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import NoneType
from typing import Any

from hetero_mpi.api import Job, collective, steps, train
from hetero_mpi.interop.other_tools import PEFT, convert_arguments
from hetero_mpi.rundir.logs import write_line
from hetero_mpi.rundir.metrics import Evaluation
from hetero_mpi.step_iterator import Steps
from hetero_mpi.training.result import TrainResult
from hetero_mpi.util.disk import cache_folder, sync, write_errors
from hetero_mpi.util.errors import UserError
from hetero_mpi.util.sealed import discard, load_sealed, store_folder

_OBJECTIVES = {
    "SFTConfig": "sft",
    "TrainingArguments": "sft",
    "DPOConfig": "dpo",
    "KTOConfig": "kto",
    "ORPOConfig": "orpo",
}
"""Maps the class of the arguments to TRL's name for the objective."""
_RECORD_KEYS = ("messages", "conversations", "prompt", "instruction", "chosen")
"""Keys that identify a row as a record; other rows are plain text."""
_CACHE_HINT = "set XDG_CACHE_HOME to a directory that you can write to"


class DatasetTrainer:
    """Train a model on a dataset (``hetero_mpi.Trainer``).

    Under mpirun, create a trainer with the same arguments on every rank; only rank 0's data is used.

    Args:
        model: a model directory, or the name of a model on the Hugging Face Hub.
        dataset: a ``datasets.Dataset``, or a list of dicts with ``text``, ``messages``, ``prompt`` and ``completion``, or pairs.
        args: ``SFTConfig``, ``TrainingArguments``, ``DPOConfig``, ``KTOConfig`` or ``ORPOConfig``, or a dict of their arguments.
        eval_dataset: evaluation rows in the same format.
        processing_class: a tokenizer. Defaults to the model's tokenizer.
        peft_config: a ``LoraConfig``, or None for full fine-tuning.
        set: overrides for job keys, such as ``{"model.quantization": "nf4"}``.

    Attributes:
        notes: messages about arguments that have no effect, one for each reason; ``train`` prints them.

    Raises:
        UserError: If an argument is not supported. Lists all such arguments with reasons.
    """

    def __init__(
        self,
        model: str | Path,
        dataset: Iterable[Mapping[str, Any]],
        args: Any = None,
        *,
        eval_dataset: Iterable[Mapping[str, Any]] | None = None,
        processing_class: Any = None,
        peft_config: Any = None,
        set: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(model, (str, Path)):
            raise UserError(
                "trainer.model", f"model: must be a directory or the name of a Hub model, not a {type(model).__name__}"
            )
        if not isinstance(processing_class, (str, Path, NoneType)) and not hasattr(processing_class, "save_pretrained"):
            raise UserError(
                "trainer.processing_class",
                f"processing_class: must be a tokenizer, not a {type(processing_class).__name__}",
            )
        self._rows, first = _rows_of(dataset, "dataset")
        self._test_rows = _rows_of(eval_dataset, "eval_dataset")[0] if eval_dataset is not None else None
        self._tokenizer = processing_class
        values_by_name, changed, title = _arguments_of(args)
        column = values_by_name.pop("dataset_text_field", "text")
        self._texts = not any(key in first for key in _RECORD_KEYS)
        self._run_dir = Path(values_by_name.pop("output_dir", None) or "trainer_output")
        evaluation = {key: values_by_name.pop(key, None) for key in ("eval_strategy", "eval_steps")}
        rows = {"path": "./rows.jsonl"} | ({"type": "completion", "text_column": column} if self._texts else {})
        values_by_name |= {"model_name_or_path": str(model), "datasets": [rows], "use_peft": peft_config is not None}
        if values_by_name.get("save_strategy") == "epoch":
            values_by_name |= {"save_strategy": "steps", "save_steps": self._per_epoch(values_by_name)}
        values, refused, ignored = convert_arguments(title, values_by_name, changed)
        self.notes = [
            f"{title}: {', '.join(key for key, why in ignored if why == reason)} has no effect: {reason}"
            for reason in dict.fromkeys(why for _, why in ignored)
        ]
        refused += _convert_lora(values, model, peft_config)
        if refused:
            raise UserError(
                "trainer.argument", "\n".join(f"{title}: {key} is not supported: {reason}" for key, reason in refused)
            )
        if self._test_rows is not None:
            intervals = {"no": 0, "steps": evaluation["eval_steps"] or values_by_name.get("logging_steps") or 500}
            interval = intervals.get(str(evaluation["eval_strategy"] or "no"))
            values["train.evaluate_every"] = self._per_epoch(values_by_name) if interval is None else interval
            values["train.evaluate_sequences"] = len(list(self._test_rows))
        values |= {"data.evaluation_fraction": 0.0, "output.run_dir": self._run_dir.absolute(), "model.path": model}
        if isinstance(first.get("prompt"), str):
            values["data.template"] = "none"
        self._values = values | dict(set or {})
        self._result: TrainResult | None = None
        self._job(Path("rows.jsonl"), None, None)  # report problems early

    @property
    def result(self) -> TrainResult | None:
        """Result of the last call of ``train``, or None."""
        return self._result

    def train(self, **options: Any) -> TrainResult:
        """Train to the end. Collective. Accepts the options of ``hetero_mpi.train``, including callbacks and ``resume``."""
        self._result = train(self._ready(), **options)
        return self._result

    def steps(self, **options: Any) -> Steps:
        """Iterate over the steps of a run, like ``hetero_mpi.steps``. Collective."""
        return steps(self._ready(), **options)

    def evaluate(self) -> Evaluation:
        """Return the last evaluation of ``train``. Raises UserError if there was no training or no evaluation."""
        if self._result is None or not self._result.evaluations:
            raise UserError(
                "trainer.not_evaluated",
                "evaluate() returns the last evaluation of train(): pass an eval_dataset, and call train() first",
            )
        return self._result.evaluations[-1]

    def save_model(self, output_dir: str | Path) -> None:
        """Copy the model, or the adapter, to ``output_dir`` on rank 0's host. Collective."""
        with collective() as world, world.on_leader("copying the result"):
            if self._result is None:
                raise UserError("trainer.not_trained", "save_model() copies the result of train(): call train() first")
            if world.rank == 0:
                with write_errors(Path(output_dir), "choose another directory"):
                    shutil.copytree(self._result.result, output_dir, dirs_exist_ok=True)

    def _per_epoch(self, options: Mapping[str, Any]) -> int:
        """Return the number of steps per epoch. Raises UserError with packing, which makes the number unknown in advance."""
        if options.get("packing"):
            raise UserError(
                "trainer.steps_per_epoch",
                "with packing, steps per epoch are unknown in advance: set save_strategy and eval_strategy to steps",
            )
        keys = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
        batch = [options.get(key, default) for key, default in keys.items()]
        if not all(isinstance(size, int) and size > 0 for size in batch):
            raise UserError("trainer.value", f"{' and '.join(keys)}: must be whole numbers above 0")
        return math.ceil(len(list(self._rows)) / math.prod(batch))

    def _ready(self) -> Job:
        """Write the data to files on rank 0's host, and build the job. Collective."""
        with collective() as world, world.on_leader("writing the dataset"):
            if world.rank != 0:
                return self._job(Path("rows.jsonl"), None, None)  # rank 0's value counts
            for line in self.notes:
                write_line(line)
            test = _rows_file(self._test_rows) if self._test_rows is not None else None
            return self._job(_rows_file(self._rows), test, _tokenizer_directory(self._tokenizer))

    def _job(self, rows: Path, test_rows: Path | None, tokenizer: str | None) -> Job:
        values: dict[str, Any] = {"data.text" if self._texts else "data.records": [glob.escape(str(rows))]}
        values |= {"data.evaluation": [glob.escape(str(test_rows))]} if test_rows is not None else {}
        values |= {"tokenizer.path": tokenizer} if tokenizer is not None else {}
        return Job.build({}, self._run_dir.name or "run", set=self._values | values)


Trainer = DatasetTrainer


def _arguments_of(args: Any) -> tuple[dict[str, Any], set[str], str]:
    """Return the values of the arguments by name, the names of non-default arguments, and the name of their class."""
    if args is None or isinstance(args, Mapping):
        named = dict(args or {})
        if odd := [key for key in named if not isinstance(key, str)]:
            raise UserError("trainer.argument", f"args: argument name {odd[0]!r} must be a string")
        return named, {key for key, value in named.items() if value not in (None, False, "no", "none", [], {})}, "args"
    title = type(args).__name__
    if title not in _OBJECTIVES:
        raise UserError(
            "trainer.argument",
            f"args: {title} is not supported; use {', '.join(_OBJECTIVES)}, or a dict of their arguments",
        )
    basics = {key: getattr(args, key) for key in ("output_dir", "use_cpu", "bf16", "fp16")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about arguments that the user did not set
        values, defaults = args.to_dict(), type(args)(**basics).to_dict()
    changed = {key for key, value in values.items() if value != defaults.get(key)} - {"do_eval", "do_train"}
    changed -= {"save_strategy"} if values["save_strategy"] == "no" else set()
    return values | {"trainer": _OBJECTIVES[title]}, changed, title


def _convert_lora(values: dict[str, Any], model: str | Path, config: Any) -> list[tuple[str, str]]:
    """Add the job keys for peft's arguments to ``values``, and return the unsupported arguments with reasons."""
    if config is None:
        return []
    if type(config).__name__ != "LoraConfig":
        return [(f"peft_config: {type(config).__name__}", "only LoRA is supported: pass a LoraConfig")]
    lora, defaults = config.to_dict(), type(config)().to_dict()
    targets, layers = lora["target_modules"], lora["layers_to_transform"]
    if isinstance(targets, str) and targets != "all-linear":
        return [("target_modules", 'patterns are not supported: list layer names, or use "all-linear"')]
    lora["target_modules"] = sorted(targets) if isinstance(targets, (list, set)) else targets or "family"
    if values.get("train.dropout") is False:
        lora["lora_dropout"] = 0.0
    lora["layers_to_transform"] = [layers] if isinstance(layers, int) else layers
    refused = _convert_extras(values, model, lora)
    values |= {ours: lora[key] for key, ours in PEFT["keys"].items() if lora[key] not in (None, {})}
    changed = {key for key, value in lora.items() if value != defaults.get(key)} - PEFT["keys"].keys()
    return refused + [(f"peft_config.{key}", PEFT["reason"]) for key in sorted(changed - set(PEFT["aside"]))]


_TOKEN_MODULES = {"embed_tokens": "embedding", "lm_head": "head"}
"""Maps a module in ``trainable_token_indices`` to the value of ``adapter.tokens_in``."""


def _convert_extras(values: dict[str, Any], model: str | Path, lora: dict[str, Any]) -> list[tuple[str, str]]:
    """Convert peft's ``init_lora_weights``, ``modules_to_save`` and ``trainable_token_indices``; return unsupported arguments."""
    refused = []
    start, saved, rows = (lora[key] for key in ("init_lora_weights", "modules_to_save", "trainable_token_indices"))
    lora["init_lora_weights"] = start if isinstance(start, str) else None
    if start is not True and not str(start).startswith(("pissa", "olora")):
        refused.append(("peft_config.init_lora_weights", 'must be True, "pissa", "pissa_niter_4" or "olora"'))
    lora["modules_to_save"] = sorted(saved) if saved else None
    description = Path(model) / "config.json"
    keys = json.loads(description.read_text(encoding="utf-8")) if saved and description.is_file() else {}
    untied = keys.get("tie_word_embeddings") and not lora["ensure_weight_tying"]
    if untied and any(name.endswith(tuple(_TOKEN_MODULES)) for name in saved):
        reason = "must be True, as this model ties embedding and LM head"
        refused.append(("peft_config.ensure_weight_tying", reason))
    by_end = rows if isinstance(rows, dict) else {"embed_tokens": rows}
    ends = {_TOKEN_MODULES.get(name.rpartition(".")[2]) for name in by_end}
    lora["trainable_token_indices"] = next(iter(by_end.values()), None) or None
    if None in ends or len({tuple(sorted(indices or ())) for indices in by_end.values()}) > 1:
        reason = "must list the same rows for embed_tokens and lm_head, or rows for only one of them"
        refused.append(("peft_config.trainable_token_indices", reason))
    elif rows:
        values["adapter.tokens_in"] = "both" if len(ends) == 2 else ends.pop()
    return refused


def _rows_of(dataset: Any, name: str) -> tuple[Iterable[Mapping[str, Any]], dict[str, Any]]:
    """Return the rows as a re-iterable, and the first row. Raises UserError if there are no rows or their format is unsupported."""
    if isinstance(dataset, (str, bytes, Mapping)) or not isinstance(dataset, Iterable):
        hint = ": pass one of its splits" if isinstance(dataset, Mapping) else ""
        raise UserError(
            "trainer.dataset",
            f"{name}: must be a datasets.Dataset, or a list of dicts, not a {type(dataset).__name__}{hint}",
        )
    rows = list(dataset) if isinstance(dataset, Iterator) else dataset
    first = next(iter(rows), None)
    if isinstance(first, Mapping):
        first = {key: value for key, value in first.items() if value is not None}  # columns without a value
    elif first is not None:
        raise UserError(
            "trainer.dataset",
            f"{name}: rows must be dicts, not {type(first).__name__}; see docs/data.md for the formats",
        )
    if not first or "input_ids" in first:
        raise UserError(
            "trainer.dataset", f"{name}: must have rows with text, not token ids; see docs/data.md for the formats"
        )
    return rows, first


def _rows_file(rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write the rows as JSON Lines to the user's cache, where equal datasets share a file."""
    folder, digest = cache_folder("datasets"), hashlib.sha256()
    temporary = folder / f".{secrets.token_hex(8)}"
    with write_errors(folder, _CACHE_HINT):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                for number, row in enumerate(rows):
                    try:
                        line = json.dumps(dict(row), ensure_ascii=False).encode() + b"\n"
                    except (TypeError, ValueError) as error:
                        raise UserError(
                            "trainer.dataset", f"dataset: row {number} is not serialisable as JSON: {error}"
                        ) from None
                    digest.update(line)
                    file.write(line)
            sync(temporary)
            path = folder / f"{digest.hexdigest()[:32]}.jsonl"
            if not path.is_file():
                discard(path)
            return temporary.rename(path)
        finally:
            temporary.unlink(missing_ok=True)


def _tokenizer_directory(tokenizer: Any) -> str | None:
    """Return the path of a tokenizer. An object is saved to the user's cache, where equal tokenizers share a directory."""
    if tokenizer is None or isinstance(tokenizer, (str, Path)):
        return str(tokenizer) if tokenizer is not None else None
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = sorted(file for file in Path(folder).rglob("*") if file.is_file())
        digest = hashlib.sha256(b"".join(file.name.encode() + file.read_bytes() for file in files)).hexdigest()[:32]
        path = cache_folder("datasets") / f"tokenizer-{digest}"
        if load_sealed(path, lambda *_: True, write_line) is None:
            store_folder(path, tokenizer.save_pretrained, _CACHE_HINT)
    return str(path)
