"""Trainers that take the calls of transformers' and TRL's trainers, and train on all ranks.

A script for TRL or transformers trains under mpirun as soon as it imports its trainer from ``hetero_mpi``.
"""

import glob
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from io import StringIO
from itertools import chain
from os import PathLike
from pathlib import Path
from types import NoneType, SimpleNamespace
from typing import Any

from hetero_mpi.api import Job, collective, steps, train
from hetero_mpi.interop import trainer_arguments, trainer_inputs
from hetero_mpi.interop.export import export, push_directory, push_obstacle
from hetero_mpi.interop.other_tools import convert_arguments
from hetero_mpi.interop.trainer_events import TrainerEvents, TrainerMembers, link_checkpoints
from hetero_mpi.interop.trainer_inputs import Rows
from hetero_mpi.model.files.model_files import read_json
from hetero_mpi.objectives import objective
from hetero_mpi.report.past_run import read_run
from hetero_mpi.rundir.logs import write_line
from hetero_mpi.rundir.metrics import Evaluation
from hetero_mpi.state.directory import LATEST, checkpoint_path
from hetero_mpi.step_iterator import Steps
from hetero_mpi.training.result import TrainResult
from hetero_mpi.util.disk import write_errors
from hetero_mpi.util.errors import UserError, require

trainer_arguments.keep_arguments_local()
_MIN_RATE = 1e-30
"""Learning rate of the step that precedes an evaluation: too small to change a weight."""


class DatasetTrainer(TrainerMembers):
    """Train a model on a dataset. Takes the call of transformers' ``Trainer``; the subclasses take those of TRL's trainers.

    Under mpirun, create a trainer with the same arguments on every rank; only rank 0's data and callbacks are used.

    Args:
        model: a model directory, the name of a model on the Hugging Face Hub, or a loaded model of transformers or peft.
        args: ``TrainingArguments``, ``SFTConfig``, ``DPOConfig``, ``KTOConfig``, ``ORPOConfig``, or a dict of their arguments.
        data_collator: makes token ids and labels of single tokenised rows or texts.
        train_dataset: a ``datasets.Dataset``, or a list of dicts, in the formats of docs/data.md.
        eval_dataset: evaluation rows, or a dict of sets, the first of which determines the best model.
        processing_class: a tokenizer; its older name is ``tokenizer``. Defaults to the model's tokenizer.
        callbacks: ``TrainerCallback`` objects or classes. They receive no model, since no rank has all of it.
        quantization_config: a ``BitsAndBytesConfig`` for NF4.
        formatting_func: returns the text of a row.
        set: overrides for job keys, such as ``{"model.quantization": "nf4"}``.
        options: further arguments, as if they were in ``args``; older versions of TRL take some of them here.

    Attributes:
        notes: messages about arguments that have no effect, one for each reason; ``train`` prints them.
        result: result of the last call of ``train``, or None.

    Raises:
        UserError: If an argument is not supported. Lists all such arguments with reasons.
    """

    _objective: str | None = None
    """TRL's name for the objective; None: the class of the arguments determines it."""

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        data_collator: Callable[[Any], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        *,
        callbacks: Any = None,
        peft_config: Any = None,
        quantization_config: Any = None,
        formatting_func: Callable[[Any], Any] | None = None,
        tokenizer: Any = None,
        set: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        trainer, loaded = type(self).__name__.removeprefix("Dataset"), hasattr(model, "save_pretrained")
        is_valid = loaded or isinstance(model, (str, PathLike))
        require(is_valid, "trainer.model", "model", "a directory, the name of a Hub model or a loaded model", model)
        named = tokenizer if processing_class is None else processing_class
        is_valid = isinstance(named, (str, PathLike, NoneType)) or hasattr(named, "save_pretrained")
        require(is_valid, "trainer.processing_class", "processing_class", "a tokenizer", named)
        values_by_name, changed, title = trainer_arguments.arguments_of(args, trainer, self._objective)
        refused = [(trainer, *entry) for entry in trainer_arguments.unsupported_options(options, model)]
        refused += [(trainer, *entry) for entry in trainer_arguments.unsupported_members(dir(type(self)))]
        options = {"max_length" if key == "max_seq_length" else key: options[key] for key in options}
        values_by_name |= {key: value for key, value in options.items() if value is not None}
        changed |= {key for key, value in options.items() if value not in (None, False)}
        settings = self._settings = trainer_arguments.take_settings(values_by_name, changed)
        self.args = SimpleNamespace(**values_by_name | vars(settings)) if title == "args" else args
        quantization = quantization_config or settings.quantization_config
        quantization = getattr(model.config, "quantization_config", None) if loaded else quantization
        refused += [(trainer, *entry) for entry in trainer_arguments.convert_quantization(values_by_name, quantization)]
        adapters = getattr(model, "peft_config", {})
        if adapters and peft_config is not None:
            refused.append((trainer, "peft_config", "the model has an adapter: pass the base model, or no peft_config"))
        peft_config = next(iter(adapters.values()), peft_config)
        self._model, self._column = model, settings.dataset_text_field
        self.tokenizer = self.processing_class = named
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self._name = str(model.name_or_path or "model") if loaded else os.fspath(model)
        self._collator, self._formatting_func, self._run_dir = data_collator, formatting_func, Path(settings.output_dir)
        self.hub_model_id = settings.hub_model_id or self._run_dir.absolute().name
        self._limit = (values_by_name.get("max_steps") or 0) * trainer_arguments.rows_per_step(values_by_name)
        self._rows, form = self._read(train_dataset, "train_dataset")
        self._tests, self._texts = self._read_sets(eval_dataset), form == "texts"
        if form == "tokens" and (self._objective, title) == (None, "TrainingArguments"):  # which never truncates
            token_rows = chain(self._rows, *self._tests.values())
            values_by_name["max_length"] = max(len(row["input_ids"]) for row in token_rows)
        rows = {"path": "./rows.jsonl"} | ({"type": "completion", "text_column": self._column} if self._texts else {})
        values_by_name |= {"model_name_or_path": "model", "datasets": [rows], "use_peft": peft_config is not None}
        steps_per_epoch = partial(trainer_arguments.steps_per_epoch, values_by_name, len(self._rows))
        if values_by_name.get("save_strategy") == "epoch":
            values_by_name |= {"save_strategy": "steps", "save_steps": steps_per_epoch()}
        values, unsupported, ignored = convert_arguments(title, values_by_name, changed)
        self.notes = [
            f"{title}: {', '.join(key for key, why in ignored if why == reason)} has no effect: {reason}"
            for reason in dict.fromkeys(why for _, why in ignored)
        ]
        file = Path(self._name) / "config.json"
        config = model.config.to_dict() if loaded else read_json(file, "") if file.is_file() else {}
        unsupported += trainer_arguments.convert_lora(values, config, peft_config)
        main = f"eval_{next(iter(self._tests), '')}".removesuffix("_") + "_loss"
        if settings.load_best_model_at_end and settings.metric_for_best_model not in (None, "loss", main, main[5:]):
            unsupported.append(("metric_for_best_model", f"the best model is that with the lowest {main}"))
        nested = settings.model_init_kwargs
        refused += [(f"{title}: model_init_kwargs" if entry[0] in nested else title, *entry) for entry in unsupported]
        if refused:
            lines = [f"{where}: {key} is not supported: {reason}" for where, key, reason in refused]
            raise UserError("trainer.argument", "\n".join(lines))
        if self._tests:
            intervals = {"no": 0, "steps": settings.eval_steps or settings.logging_steps}
            interval = intervals.get(str(settings.eval_strategy))
            values["train.evaluate_every"] = steps_per_epoch() if interval is None else interval
            values["train.evaluate_sequences"] = max(map(len, self._tests.values()))
        positions = config.get("max_position_embeddings") or values["data.sequence_length"]
        values["data.sequence_length"] = min(values["data.sequence_length"], positions)  # longer rows fail there
        values |= {"data.evaluation_fraction": 0.0, "output.run_dir": self._run_dir.absolute()}
        values |= {"data.template": "none"} if form in ("tokens", "completions") else {}
        self._values = values | dict(set or {})
        table = self._job(False, self._tests).tables.train  # reports problems early
        per_epoch = None if values["data.packing"] else steps_per_epoch()
        self._max_steps = math.ceil(table.epochs * (per_epoch or 0)) if table.epochs is not None else table.steps
        every = {"no": 0, "steps": settings.logging_steps}.get(str(settings.logging_strategy), per_epoch or 0)
        self._events = TrainerEvents(self.args, every, bool(settings.logging_first_step), self._max_steps)
        self.result: TrainResult | None = None
        self._current, self._peft_config = model if loaded and (adapters or peft_config is None) else None, peft_config
        self._evaluation: Evaluation | None = None
        for callback in callbacks or ():
            self.add_callback(callback)

    def train(self, resume_from_checkpoint: bool | str | PathLike[str] | None = None, **options: Any) -> TrainResult:
        """Train to the end, and update a loaded model in place. Collective.

        Accepts the options of ``hetero_mpi.train``, but callbacks only as ``callbacks``.

        Args:
            resume_from_checkpoint: a checkpoint, or what ``get_last_checkpoint(output_dir)`` returns; True: the newest one.
        """
        if resume_from_checkpoint:
            choice = LATEST if resume_from_checkpoint is True else os.fspath(resume_from_checkpoint)
            own_name = lambda match: str(checkpoint_path(Path("checkpoints"), int(match[1])))  # noqa: E731
            options["resume"] = re.sub(r"checkpoint-(\d+)/?$", own_name, choice)
        job, events, begin_s = self._ready(self._tests), self._events, time.perf_counter()
        events.begin(self._rank, self._max_steps)
        events.call("on_train_begin")
        on_step = partial(events.on_step, sets=list(self._tests))
        try:
            result = train(job, on_step=on_step, on_checkpoint=events.on_checkpoint, **options)
        finally:
            if self._rank == 0:
                link_checkpoints(Path(options.get("run_dir") or self._run_dir))
        seconds, evaluations = time.perf_counter() - begin_s, result.evaluations
        is_last = bool(evaluations) and evaluations[-1].step == len(result.losses)
        self._evaluation = evaluations[-1] if is_last else None
        if self._settings.load_best_model_at_end and evaluations:
            with collective() as world, world.on_leader("exporting the best checkpoint"):
                result = replace(result, result=result.run_dir / "best")
                if world.rank == 0:
                    shutil.rmtree(result.result, ignore_errors=True)
                    export(result.run_dir, result.result, merge=False, best=True)
            self._evaluation = min(evaluations, key=lambda evaluation: evaluation.loss)
        with collective() as world:
            if self.state.global_step < result.global_step:  # the run was finished before
                steps = read_run(result.run_dir).metrics.steps if world.rank == 0 else ()
                events.set_step(result.global_step, world.broadcast_json(steps[-1].epoch if steps else None))
            is_updated = trainer_inputs.update_model(world, self._model, result.result)
            self._current = self._model if is_updated and hasattr(self._model, "save_pretrained") else None
            if not is_updated and world.rank == 0:
                write_line("the loaded model is not updated: trainer.model and save_model() have the trained weights")
        metrics = events.end(result, seconds, len(result.losses) * job.tables.train.global_batch)
        self.result = replace(result, metrics=metrics)
        return self.result

    def steps(self, **options: Any) -> Steps:
        """Iterate over the steps of a run, like ``hetero_mpi.steps``. Collective."""
        return steps(self._ready(self._tests), **options)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate the trained model, or before ``train`` the given model. Collective.

        Returns:
            Metrics by transformers' names, such as ``eval_loss``.
        """
        tests = self._tests if eval_dataset is None else self._read_sets(eval_dataset)
        evaluation = self._evaluation if eval_dataset is None else None
        return self._events.on_evaluate(evaluation or self._measure(tests), list(tests), metric_key_prefix)

    def save_model(self, output_dir: str | PathLike[str] | None = None) -> None:
        """Copy the model, or the adapter, to ``output_dir`` on rank 0's host, by default that of ``args``. Collective."""
        target = Path(output_dir or self._run_dir)
        with collective() as world, world.on_leader("copying the result"):
            if world.rank == 0:
                with write_errors(target, "choose another directory"):
                    shutil.copytree(self._trained("save_model()"), target, dirs_exist_ok=True)
        if self._settings.push_to_hub:
            try:
                self.push_to_hub()
            except UserError as error:  # the script goes on with the saved model
                self.accelerator.print(error)

    def push_to_hub(self, commit_message: str = "End of training", **options: Any) -> None:
        """Upload the model, or the adapter, from rank 0's host to the Hugging Face Hub. Collective."""
        with collective() as world, world.on_leader("uploading the result"):
            if world.rank == 0:
                token = options.get("token") or self._settings.hub_token
                private = options.get("private", self._settings.hub_private_repo) is not False
                result, name = self._trained("push_to_hub()"), self.hub_model_id
                write_line(push_directory(result, name, private, token, commit_message))

    @property
    def model(self) -> Any:
        """The loaded model that was passed; else before ``train`` one without weights, then the trained one, on rank 0 only."""
        if self._current is None and self.result is None:
            self._current = trainer_inputs.weightless(self._model, self._peft_config)
        elif self._current is None:
            path = self._trained("trainer.model")
            if not self.is_world_process_zero():
                raise UserError("trainer.other_rank", f"trainer.model: rank 0 has it, in {path}; or call save_model()")
            self._current = trainer_inputs.load_result(path)
        return self._current

    def _trained(self, caller: str) -> Path:
        if self.result is None:
            raise UserError("trainer.not_trained", f"{caller} needs the result of train(): call train() first")
        return self.result.result

    def _read_sets(self, dataset: Any) -> dict[str, Rows]:
        """Return the rows of evaluation sets by name; "" is the name of a single set."""
        sets = dataset if isinstance(dataset, Mapping) else {} if dataset is None else {"": dataset}
        return {name: self._read(rows, " ".join(["eval_dataset", name]).strip())[0] for name, rows in sets.items()}

    def _read(self, dataset: Any, name: str) -> tuple[Rows, str]:
        """Return rows of a dataset and their form: ``texts``, ``tokens``, ``completions`` or ``records``."""
        rows, first = trainer_inputs.rows_of(dataset, name, self._limit if self._limit > 0 else None)
        if self._formatting_func is not None and "input_ids" not in first:
            rows, first, self._column = trainer_inputs.formatted(rows, self._formatting_func), {"text": ""}, "text"
        is_text = self._column in first and not any(key in first for key in trainer_inputs.RECORD_KEYS)
        if is_text and self._collator is not None:
            tokenizer = self.processing_class or getattr(self._collator, "tokenizer", None) or self._name
            rows = trainer_inputs.text_tokens(rows, self._column, tokenizer, self._settings.eos_token)
        elif is_text:
            return rows, "texts"
        elif "input_ids" not in first:
            if self._collator is not None:
                raise UserError("trainer.data_collator", f"data_collator: needs texts or input_ids in {name}; omit it")
            return rows, "records" if trainer_inputs.has_messages(first) or "prompt" not in first else "completions"
        return trainer_inputs.tokenised(rows, name, self._collator), "tokens"

    def _measure(self, tests: Mapping[str, Rows]) -> Evaluation:
        """Evaluate the model by a run of one step that changes no weight. Collective."""
        if not tests:
            raise UserError("trainer.not_evaluated", "evaluate() needs rows: pass eval_dataset here or to the trainer")
        values: dict[str, Any] = {"train.steps": 1, "train.epochs": None, "train.learning_rate": _MIN_RATE}
        values |= {"train.evaluate_every": 1, "train.evaluate_sequences": max(map(len, tests.values()))}
        values |= {"checkpoint.every": 0, "train.warmup_steps": 0, "report.trackers": []}
        if self.result is not None:
            compared = objective(self._values.get("train.preference", "none"))
            if compared is not None and compared.reference:
                text = "rewards compare with the first model: pass eval_dataset to the trainer"
                raise UserError("trainer.not_evaluated", text)
            is_adapter = self._values["adapter.method"] == "lora"
            values["adapter.path" if is_adapter else "model.path"] = self.result.result
        run_dir = self._run_dir.with_name(f"{self._run_dir.absolute().name}.evaluation")
        self.accelerator.print(f"Evaluating on {', '.join(f'{len(rows):,}' for rows in tests.values())} rows")
        with redirect_stdout(StringIO()):  # lines about the step, and about files that are removed
            evaluation = train(self._ready(tests, values), run_dir=run_dir).evaluations[-1]
        if self._rank == 0:
            shutil.rmtree(run_dir, ignore_errors=True)
        return evaluation

    def _ready(self, tests: Mapping[str, Rows], values: Mapping[str, Any] | None = None) -> Job:
        """Write the inputs to files on rank 0's host, and build the job. Collective. ``values``: further job keys."""
        with collective() as world, world.on_leader("writing the dataset"):
            self._rank = world.rank
            if world.rank == 0 and values is None:
                if self._settings.push_to_hub and (obstacle := push_obstacle(self._settings.hub_token)):
                    text = f"push_to_hub: {obstacle}; without push_to_hub, export RUN OUT --push uploads"
                    raise UserError("trainer.push", text)
                for line in self.notes:
                    write_line(line)
            return self._job(world.rank == 0, tests, values)

    def _job(self, write: bool, tests: Mapping[str, Rows], further: Mapping[str, Any] | None = None) -> Job:
        """Build the job, with the files of all inputs if ``write``; other ranks than 0 need only a valid job."""

        def file_of(rows: Rows) -> list[str]:
            return [glob.escape(trainer_inputs.rows_file(rows)) if write else "rows.jsonl"]

        stores = write and "model.path" not in (further or {})
        base_folder = self._run_dir if self._values.get("adapter.method") == "lora" else None
        model, adapter = trainer_inputs.model_directory(self._model, base_folder) if stores else (self._name, None)
        key = "data.text" if self._texts else "data.records"
        values: dict[str, Any] = {key: file_of(self._rows), "model.path": model}
        files = {name: file_of(rows) for name, rows in tests.items()}
        values["data.evaluation"] = files.pop(next(iter(files), ""), None)
        values["data.evaluation_sets"] = files or None
        values |= {"adapter.path": adapter} if adapter is not None else {}
        if write:
            named = self.processing_class or getattr(self._collator, "tokenizer", None)
            named = self._name if named is None and model != self._name else named
            tokenizer = trainer_inputs.tokenizer_directory(named, self._name, self._settings.eos_token)
            values |= {"tokenizer.path": tokenizer} if tokenizer is not None else {}
        return Job.build({}, self._run_dir.name or "run", set=self._values | values | dict(further or {}))


Trainer = DatasetTrainer


class SFTTrainer(DatasetTrainer):
    """Supervised fine-tuning by the call of TRL's ``SFTTrainer``."""

    _objective = "sft"


class DPOTrainer(DatasetTrainer):
    """Direct preference optimisation by the call of TRL's ``DPOTrainer``."""

    _objective = "dpo"

    def __init__(self, model: Any = None, ref_model: Any = None, *arguments: Any, **options: Any) -> None:
        super().__init__(model, *arguments, ref_model=ref_model, **options)


class KTOTrainer(DPOTrainer):
    """Kahneman-Tversky optimisation by the call of TRL's ``KTOTrainer``."""

    _objective = "kto"


class ORPOTrainer(DatasetTrainer):
    """Odds ratio preference optimisation by the call of TRL's ``ORPOTrainer``."""

    _objective = "orpo"
