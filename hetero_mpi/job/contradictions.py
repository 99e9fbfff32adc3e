"""Rules between the keys of a job file: conditions of its fields (``OnlyIf``), and what no single field can hold."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from hetero_mpi.job.rules import ELSEWHERE, LARGEST_AUTO, MOST_MICRO_BATCHES, facts, leads_out, speed_change
from hetero_mpi.job.training_tables import OnlyIf
from hetero_mpi.objectives import Settings, names, objective

Problems = Iterator[tuple[str, str]]
"""(key such as ``train.steps``, the rule it breaks)."""


@dataclass(frozen=True)
class Known:
    """The values of a file in the making by their keys, with defaults filled in; a broken value reads as empty (None)."""

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
        """True: it is sound, and other than the default."""
        return dotted not in self.broken and self(dotted) != self.default(dotted)

    def all_sound(self, *keys: str) -> bool:
        return self.broken.isdisjoint(keys)


def contradictions(known: Known, name: str) -> Problems:
    """All broken rules; a rule about a broken value keeps silent. ``name``: the job's, for ``output.run_dir``."""
    yield from _unmet_conditions(known)
    yield from _model(known)
    yield from _written_places(known)
    if known("model.factory") is not None:
        yield from _factory(known)
    else:
        yield from _tokenizer(known)
        yield from _data(known)
    yield from _preference(known)
    yield from _train(known)
    if known("plan.schedule") == "split" and known("adapter.method") not in (None, "none"):
        rule = 'puts off the gradients of trained matrices, and an adapter leaves these frozen: use "auto" or "1f1b"'
        yield "plan.schedule", rule
    yield from _cluster(known)
    yield from _run_dir(known, name)


def is_met(condition: str, value_of: Callable[[str], Any]) -> bool:
    """Whether a condition (``OnlyIf``, without "and") holds. ``value_of``: a key -> its value, None where it is empty."""
    for alternative in re.split(r" or (?=[a-z_]+[.])", condition):
        key, _, state = alternative.partition(" ")
        value = value_of(key)
        if state in ("is set", "is empty"):
            met = (value is None) == (state == "is empty")
        else:
            named = [json.loads(text) for text in state.removeprefix("= ").removeprefix("is not ").split(" or ")]
            met = (value in named) == state.startswith("=")
        if met:
            return True
    return False


def _unmet_conditions(known: Known) -> Problems:
    """The first condition that is not met, of each key that is set and has no effect without it."""
    for table, model in known.tables.items():
        for key, conditions in facts(model, OnlyIf).items():
            every = [part for text in conditions for part in text.split(" and ")]
            sound = [text for text in every if known.all_sound(*re.findall(r"[a-z_]+[.]\w+", text))]
            unmet = [text for text in sound if not is_met(text, known)]
            if unmet and known.changed(f"{table}.{key}"):
                yield f"{table}.{key}", f"has an effect only if {unmet[0]}: leave it out, or change that"


def _model(known: Known) -> Problems:
    keys = ("model.path", "model.config", "model.factory")
    if known.all_sound(*keys):
        named = [key for key in keys if known(key) is not None]
        if len(named) != 1:
            state = f"{' and '.join(named)} are set" if named else "none is set"
            yield "model.path", f"set exactly one of model.path, model.config and model.factory; {state}"
        config = known("model.config")
        if isinstance(config, dict) and "model_type" not in config:
            yield "model.config", 'needs model_type, the family\'s name in transformers, such as "llama"'
    start = known("adapter.start")
    if start is not None and not re.fullmatch(r"default|olora|pissa(_niter_[1-9]\d?)?", start):
        yield "adapter.start", 'must be "default", "pissa", "pissa_niter_4" (or another number) or "olora"'


def _factory(known: Known) -> Problems:
    if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", known("model.factory")) is None:
        yield "model.factory", 'is written "package.module:function", such as "cnn_model:cnn"'
    if known.changed("data.sequence_length") and known("data.sequence_length") != 1:
        yield "data.sequence_length", "is for language models, and this job's comes from model.factory: leave it out"
    if any(isinstance(entry, int) for entry in known("train.freeze") or ()):
        yield "train.freeze", 'blocks have numbers in language models only: name parameters, such as "conv1.weight"'
    if known("train.dtype") not in (None, "auto", "fp32"):
        yield "train.dtype", "must be fp32, as the model's layers are; it comes from model.factory"


def _tokenizer(known: Known) -> Problems:
    config, path, vocab_size = known("model.config"), known("tokenizer.path"), known("tokenizer.train_vocab_size")
    sound = known.all_sound("model.path", "tokenizer.path", "tokenizer.train_vocab_size")
    if sound and path is None and vocab_size is None and known("model.path") is None:
        rule = "a tokenizer is needed: set it, or tokenizer.train_vocab_size (only model.path brings its own)"
        yield "tokenizer.path", rule
    rows = config.get("vocab_size") if isinstance(config, dict) else None
    if type(rows) is int and vocab_size is not None and vocab_size > rows:
        rule = f"must be at most model.config.vocab_size = {rows}: every token needs a row of the embedding"
        yield "tokenizer.train_vocab_size", rule


def _data(known: Known) -> Problems:
    if not known.all_sound("data.text", "data.records"):
        return
    text, records, weights = known("data.text"), known("data.records"), known("data.weights")
    if (text is None) == (records is None):
        state = "neither is set" if text is None else "both are set"
        yield "data.text", f"set exactly one of data.text and data.records; {state}"
        return
    for key in ("data.text", "data.evaluation") if records is None and known("data.documents") != "record" else ():
        if any(entry.startswith("hf:") for entry in known(key) or ()):
            rule = 'holds records: name it in data.records, or learn their text: data.documents = "record"'
            yield key, f"a data set of the hub (hf:...) {rule}"
    names = known("data.keys") or {}
    if len({*names.values()}) < len(names):
        yield "data.keys", "two keys cannot be read from one: give each a name of its own"
    wrong = next((name for name in names if (name == "text") == (records is not None)), None)
    if wrong is not None:
        yield (
            "data.keys",
            f"{wrong} is no key of what is learnt from data.{'text' if records is None else 'records'}: leave it out",
        )
    if weights is not None and records is not None and len(weights) != len(records):
        yield "data.weights", f"must be one for each entry of data.records: there are {len(weights)} and {len(records)}"
    if weights is not None and any(text.startswith("!") for text in records or ()):
        rule = "gives each entry of data.records a share, and one that begins with ! takes files away: name the files otherwise"
        yield "data.weights", rule
    if known("data.template") == "chat" and known("tokenizer.train_vocab_size") is not None:
        rule = 'a tokenizer trained here (tokenizer.train_vocab_size) has no chat template: use "plain"'
        yield "data.template", rule
    if known("train.preference") not in (None, "none") and known("data.isolate") is False:
        yield (
            "data.isolate",
            "does not apply to preferences (train.preference), whose records are compared: leave it out",
        )


def objectives_by_key() -> dict[str, list[str]]:
    """Key of ``[train]`` -> names of the objectives that read it."""
    listed: dict[str, list[str]] = {}
    for name in names():
        known = objective(name)
        assert known is not None
        for key in known.keys:
            listed.setdefault(key, []).append(name)
    return listed


def _preference(known: Known) -> Problems:
    changed = [key for key in Settings.__annotations__ if key != "preference" and known.changed(f"train.{key}")]
    readers = objectives_by_key() if changed else {}  # imports torch
    for key in changed:
        if known("train.preference") not in (None, *readers[key]):
            yield f"train.{key}", f"is for train.preference = {' and '.join(readers[key])}: leave it out"


def _train(known: Known) -> Problems:
    """The first rule that is broken."""
    micro, batch = known("train.micro_batch"), known("train.global_batch")
    if micro is None or batch is None:
        return
    elif type(micro) is int and batch % micro:
        divisors = [size for size in range(1, min(batch, 1024) + 1) if batch % size == 0]
        yield "train.micro_batch", f"must divide train.global_batch = {batch}: {', '.join(map(str, divisors))}"
    else:
        largest = micro if type(micro) is int else max(d for d in range(1, LARGEST_AUTO + 1) if batch % d == 0)
        if batch // largest > MOST_MICRO_BATCHES:
            rule = (
                f"a step of {batch // largest:,} micro-batches of {largest} is too long to be planned: at most "
                f"{MOST_MICRO_BATCHES:,}. Lower it (at most {largest * MOST_MICRO_BATCHES:,} so), or set a larger train.micro_batch"
            )
            yield "train.global_batch", rule


def _cluster(known: Known) -> Problems:
    wrong = next((text for text in known("cluster.emulate_changes") or () if speed_change(text) is None), None)
    if wrong is not None:
        rule = 'each is written "rank R runs at SPEED from step N", such as "rank 1 runs at 0.5 from step 20"'
        yield "cluster.emulate_changes", f"{rule}; this is not: {wrong!r}"
    if known("profile.trial") is True and known("cluster.emulate") is not None:
        rule = "emulated devices keep to their profile, so a trial would tell nothing of it: leave it out"
        yield "profile.trial", rule


def _run_dir(known: Known, name: str) -> Problems:
    text = known("output.run_dir")
    if text is None:
        return
    cwd, rest = Path.cwd(), text.replace("{name}", name)
    if not text.strip():
        yield "output.run_dir", "must name a directory"
    elif re.search("[{}]", rest):
        yield "output.run_dir", "may hold {name} and no other placeholder"
    elif not (inside := Path(rest).expanduser()).is_absolute() and leads_out(cwd / inside, cwd):
        yield "output.run_dir", f"must stay inside the working directory {cwd}; {ELSEWHERE}"


def _written_places(known: Known) -> Problems:
    """Where links lead is looked at on each rank's machine, when the place is opened."""
    for key in ("model.shard_cache", "profile.save_as"):
        text = known(key)
        if text is not None and os.path.normpath(Path(text).expanduser()).startswith(".."):
            yield key, f"must stay inside the job file's directory; {ELSEWHERE}"
