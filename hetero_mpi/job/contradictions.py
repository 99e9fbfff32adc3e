"""Checks across the keys of a job file: the conditions of fields (``OnlyIf``) and rules that involve several keys."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from hetero_mpi.job.rules import (
    ABSOLUTE_PATH_HINT,
    MAX_AUTO_MICRO_BATCH,
    MAX_MICRO_BATCHES,
    field_metadata,
    is_outside,
    speed_change,
)
from hetero_mpi.job.training_tables import OnlyIf
from hetero_mpi.objectives import Settings, names, objective

Problems = Iterator[tuple[str, str]]
"""Pairs of a dotted key, such as ``train.steps``, and the rule that it breaks."""


@dataclass(frozen=True)
class JobValues:
    """Look up values and defaults of a job file under validation by dotted key. Invalid values read as None."""

    values: Mapping[str, Mapping[str, Any]]
    broken: set[str]
    tables: Mapping[str, type[BaseModel]]

    def __call__(self, dotted: str) -> Any:
        table, _, key = dotted.partition(".")
        return None if dotted in self.broken else self.values[table].get(key, self.default(dotted))

    def default(self, dotted: str) -> Any:
        table, _, key = dotted.partition(".")
        return self.tables[table].model_fields[key].get_default()

    def changed(self, dotted: str) -> bool:
        """Return whether the value is valid and differs from the default."""
        return dotted not in self.broken and self(dotted) != self.default(dotted)

    def all_valid(self, *keys: str) -> bool:
        return self.broken.isdisjoint(keys)


def contradictions(values: JobValues, name: str) -> Problems:
    """Yield all broken rules, ignoring invalid values. ``name`` is the job's name, which ``output.run_dir`` may contain."""
    yield from _unmet_conditions(values)
    yield from _model(values)
    yield from _written_paths(values)
    if values("model.factory") is not None:
        yield from _factory(values)
    else:
        yield from _tokenizer(values)
        yield from _data(values)
    yield from _preference(values)
    yield from _train(values)
    if values("plan.schedule") == "split" and values("adapter.method") not in (None, "none"):
        rule = 'defers weight gradients, and with an adapter the weights are frozen: use "auto" or "1f1b"'
        yield "plan.schedule", rule
    yield from _cluster(values)
    yield from _run_dir(values, name)


def is_met(condition: str, value_of: Callable[[str], Any]) -> bool:
    """Return whether an ``OnlyIf`` condition without "and" holds, where ``value_of`` returns a key's value, None if empty."""
    for alternative in re.split(r" or (?=[a-z_]+[.])", condition):
        key, _, state = alternative.partition(" ")
        value = value_of(key)
        if state in ("is set", "is empty"):
            met = (value is None) == (state == "is empty")
        else:
            allowed = [json.loads(text) for text in state.removeprefix("= ").removeprefix("is not ").split(" or ")]
            met = (value in allowed) == state.startswith("=")
        if met:
            return True
    return False


def _unmet_conditions(values: JobValues) -> Problems:
    """Yield, for each key set without effect, the first of its conditions that is not met."""
    for table, model in values.tables.items():
        for key, conditions in field_metadata(model, OnlyIf).items():
            all_conditions = [part for text in conditions for part in text.split(" and ")]
            checkable = [text for text in all_conditions if values.all_valid(*re.findall(r"[a-z_]+[.]\w+", text))]
            unmet = [text for text in checkable if not is_met(text, values)]
            if unmet and values.changed(f"{table}.{key}"):
                yield f"{table}.{key}", f"has an effect only if {unmet[0]}: leave this key out, or meet the condition"


def _model(values: JobValues) -> Problems:
    keys = ("model.path", "model.config", "model.factory")
    if values.all_valid(*keys):
        set_keys = [key for key in keys if values(key) is not None]
        if len(set_keys) != 1:
            state = f"{' and '.join(set_keys)} are set" if set_keys else "none is set"
            yield "model.path", f"set exactly one of model.path, model.config and model.factory; {state}"
        config = values("model.config")
        if isinstance(config, dict) and "model_type" not in config:
            yield "model.config", 'requires model_type, the model family\'s name in transformers, such as "llama"'
    start = values("adapter.start")
    if start is not None and not re.fullmatch(r"default|olora|pissa(_niter_[1-9]\d?)?", start):
        yield "adapter.start", 'must be "default", "pissa", "pissa_niter_4" (or another number) or "olora"'


def _factory(values: JobValues) -> Problems:
    if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", values("model.factory")) is None:
        yield "model.factory", 'must be "package.module:function", such as "cnn_model:cnn"'
    if values.changed("data.sequence_length") and values("data.sequence_length") != 1:
        yield "data.sequence_length", "applies to language models only, not to model.factory: leave this key out"
    if any(isinstance(entry, int) for entry in values("train.freeze") or ()):
        yield "train.freeze", 'only language models have numbered blocks: list parameters, such as "conv1.weight"'
    if values("train.dtype") not in (None, "auto", "fp32"):
        yield "train.dtype", "must be fp32, the dtype of the layers of model.factory"


def _tokenizer(values: JobValues) -> Problems:
    config, path, vocab_size = values("model.config"), values("tokenizer.path"), values("tokenizer.train_vocab_size")
    sound = values.all_valid("model.path", "tokenizer.path", "tokenizer.train_vocab_size")
    if sound and path is None and vocab_size is None and values("model.path") is None:
        rule = "a tokenizer is required: set this key or tokenizer.train_vocab_size, or use the tokenizer of model.path"
        yield "tokenizer.path", rule
    rows = config.get("vocab_size") if isinstance(config, dict) else None
    if type(rows) is int and vocab_size is not None and vocab_size > rows:
        rule = f"must be at most model.config.vocab_size = {rows}: every token needs a row of the embedding"
        yield "tokenizer.train_vocab_size", rule


def _data(values: JobValues) -> Problems:
    if not values.all_valid("data.text", "data.records"):
        return
    text, records, weights = values("data.text"), values("data.records"), values("data.weights")
    if (text is None) == (records is None):
        state = "neither is set" if text is None else "both are set"
        yield "data.text", f"set exactly one of data.text and data.records; {state}"
        return
    for key in ("data.text", "data.evaluation") if records is None and values("data.documents") != "record" else ():
        if any(entry.startswith("hf:") for entry in values(key) or ()):
            rule = 'contains records: list it in data.records, or train on their text with data.documents = "record"'
            yield key, f"a dataset of the Hugging Face Hub (hf:...) {rule}"
    name_by_key = values("data.keys") or {}
    if len({*name_by_key.values()}) < len(name_by_key):
        yield "data.keys", "two keys map to the same name: map each key to a different name"
    foreign_key = next((name for name in name_by_key if (name == "text") == (records is not None)), None)
    if foreign_key is not None:
        yield (
            "data.keys",
            f"{foreign_key} is not a key of data.{'text' if records is None else 'records'}: leave it out",
        )
    if weights is not None and records is not None and len(weights) != len(records):
        rule = f"needs one weight per entry of data.records; their lengths are {len(weights)} and {len(records)}"
        yield "data.weights", rule
    if weights is not None and any(text.startswith("!") for text in records or ()):
        rule = "needs entries of data.records that add files, and an entry with ! excludes files: rewrite the patterns without !"
        yield "data.weights", rule
    if values("data.template") == "chat" and values("tokenizer.train_vocab_size") is not None:
        rule = 'a tokenizer trained by the job (tokenizer.train_vocab_size) has no chat template: use "plain"'
        yield "data.template", rule
    if values("train.preference") not in (None, "none") and values("data.isolate") is False:
        yield "data.isolate", "does not apply to preference records (train.preference): leave this key out"


def objectives_by_key() -> dict[str, list[str]]:
    """Map each objective-specific key of ``[train]`` to the names of the objectives that read it."""
    names_by_key: dict[str, list[str]] = {}
    for name in names():
        known_objective = objective(name)
        assert known_objective is not None
        for key in known_objective.keys:
            names_by_key.setdefault(key, []).append(name)
    return names_by_key


def _preference(values: JobValues) -> Problems:
    changed_keys = [key for key in Settings.__annotations__ if key != "preference" and values.changed(f"train.{key}")]
    readers = objectives_by_key() if changed_keys else {}  # imports torch
    for key in changed_keys:
        if values("train.preference") not in (None, *readers[key]):
            yield f"train.{key}", f"applies only to train.preference = {' or '.join(readers[key])}: leave this key out"


def _train(values: JobValues) -> Problems:
    """Yield the first broken rule about the batch and micro-batch sizes."""
    micro, batch = values("train.micro_batch"), values("train.global_batch")
    if micro is None or batch is None:
        return
    elif type(micro) is int and batch % micro:
        divisors = [size for size in range(1, min(batch, 1024) + 1) if batch % size == 0]
        yield "train.micro_batch", f"must divide train.global_batch = {batch}: {', '.join(map(str, divisors))}"
    else:
        largest = micro if type(micro) is int else max(d for d in range(1, MAX_AUTO_MICRO_BATCH + 1) if batch % d == 0)
        if batch // largest > MAX_MICRO_BATCHES:
            rule = (
                f"a step has {batch // largest:,} micro-batches of {largest} sequences; the maximum is {MAX_MICRO_BATCHES:,}. "
                f"Set a batch of at most {largest * MAX_MICRO_BATCHES:,}, or a larger train.micro_batch"
            )
            yield "train.global_batch", rule


def _cluster(values: JobValues) -> Problems:
    malformed = next((text for text in values("cluster.emulate_changes") or () if speed_change(text) is None), None)
    if malformed is not None:
        rule = 'must have entries "rank R runs at SPEED from step N", such as "rank 1 runs at 0.5 from step 20"'
        yield "cluster.emulate_changes", f"{rule}; got {malformed!r}"
    if values("profile.calibrate") is True and values("cluster.emulate") is not None:
        rule = "emulated devices match their profile, so a calibration run has no effect: leave this key out"
        yield "profile.calibrate", rule


def _run_dir(values: JobValues, name: str) -> Problems:
    text = values("output.run_dir")
    if text is None:
        return
    cwd, expanded = Path.cwd(), text.replace("{name}", name)
    if not text.strip():
        yield "output.run_dir", "must name a directory"
    elif re.search("[{}]", expanded):
        yield "output.run_dir", "must not contain placeholders other than {name}"
    elif not (run_dir := Path(expanded).expanduser()).is_absolute() and is_outside(cwd / run_dir, cwd):
        yield "output.run_dir", f"must stay inside the working directory {cwd}; {ABSOLUTE_PATH_HINT}"


def _written_paths(values: JobValues) -> Problems:
    """Check output paths without resolving links, which each rank does on its own machine when it opens the path."""
    for key in ("model.shard_cache", "profile.save_as"):
        text = values(key)
        if text is not None and os.path.normpath(Path(text).expanduser()).startswith(".."):
            yield key, f"must stay inside the job file's directory; {ABSOLUTE_PATH_HINT}"
