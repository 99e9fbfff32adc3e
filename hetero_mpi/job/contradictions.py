"""Rules between the keys of a job file, which no single field can hold."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from hetero_mpi.job.rules import ELSEWHERE, LARGEST_AUTO, MOST_MICRO_BATCHES, leads_out

Problem = tuple[tuple[str, str], str]
"""((table, key), the rule it breaks)."""


@dataclass(frozen=True)
class Known:
    """The values of a file in the making, with defaults filled in; a broken value reads as empty (None)."""

    values: Mapping[str, Mapping[str, Any]]
    broken: set[tuple[str, str]]
    tables: Mapping[str, type[BaseModel]]

    def __call__(self, table: str, key: str) -> Any:
        if (table, key) in self.broken:
            return None
        return self.values[table].get(key, self.default(table, key))

    def default(self, table: str, key: str) -> Any:
        return self.tables[table].model_fields[key].get_default()

    def all_sound(self, *keys: tuple[str, str]) -> bool:
        return not any(key in self.broken for key in keys)


def speed_change(text: str) -> tuple[int, int, float] | None:
    """``rank 1 runs at 0.5 from step 20`` as (rank, number of the step from 0, speed); None: it is not written so."""
    match = re.fullmatch(r"rank (\d{1,9}) runs at (\d{1,9}(?:\.\d{1,9})?) from step (\d{1,9})", text.strip())
    if match is None or float(match[2]) == 0 or int(match[3]) == 0:
        return None
    return int(match[1]), int(match[3]) - 1, float(match[2])


def contradictions(known: Known, name: str) -> list[Problem]:
    """All broken rules; a rule about a broken value keeps silent. ``name``: the job's, for ``output.run_dir``."""
    return [
        *_model(known),
        *_shard_cache(known),
        *(_factory(known) if known("model", "factory") is not None else [*_tokenizer(known), *_data(known)]),
        *_train(known),
        *_plan(known),
        *_cluster(known),
        *_output(known, name),
    ]


def _model(known: Known) -> list[Problem]:
    found: list[Problem] = []
    config, keys = known("model", "config"), ("path", "config", "factory")
    if known.all_sound(*(("model", key) for key in keys)):
        named = [f"model.{key}" for key in keys if known("model", key) is not None]
        if len(named) != 1:
            state = f"{' and '.join(named)} are set" if named else "none is set"
            rule = f"set exactly one of model.path, model.config and model.factory; {state}"
            found.append((("model", "path"), rule))
        if isinstance(config, dict) and "model_type" not in config:
            found.append((("model", "config"), 'needs model_type, the family\'s name in transformers, such as "llama"'))
    if known("model", "quantization") == "nf4" and known("adapter", "method") == "none":
        rule = 'frozen 4-bit weights cannot be trained themselves: set adapter.method = "lora"'
        found.append((("model", "quantization"), rule))
    if known("adapter", "parameters") and known("adapter", "dropout"):
        rule = "peft adds an adapter of experts to their weights, so nothing can be dropped before it: set adapter.dropout = 0"
        found.append((("adapter", "parameters"), rule))
    if known("adapter", "parameters") and known("adapter", "dora"):
        found.append((("adapter", "dora"), "peft has no DoRA for experts: leave it out, or adapter.parameters"))
    return found


_TEXT_ONLY = {
    "model": ("shard_cache", "quantization"),
    "adapter": ("method", "path"),
    "tokenizer": ("path", "train_vocab_size"),
    "data": (
        (
            "text",
            "records",
            "weights",
            "evaluation",
            "skip_bad",
            "documents",
            "template",
            "train_on_prompt",
            "packing",
            "isolate",
            "pad",
            "max_bytes",
        )
    ),
    "train": ("preference", "wire"),
    "sample": ("prompt",),
    "cluster": ("emulate",),
}
"""What is said of language models only."""


def _factory(known: Known) -> list[Problem]:
    text = known("model", "factory")
    found: list[Problem] = []
    if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", text) is None:
        found.append((("model", "factory"), 'is written "package.module:function", such as "cnn_model:cnn"'))
    rule = "is for language models, and this job's comes from model.factory: leave it out"
    for table, keys in _TEXT_ONLY.items():
        for key in keys:
            if known.all_sound((table, key)) and known(table, key) != known.default(table, key):
                found.append(((table, key), rule))
    if known("data", "sequence_length") not in (None, 1, known.default("data", "sequence_length")):
        found.append((("data", "sequence_length"), rule))
    if known("train", "dtype") not in (None, "auto", "fp32"):
        found.append((("train", "dtype"), "must be fp32, as the model's layers are; it comes from model.factory"))
    return found


def _tokenizer(known: Known) -> list[Problem]:
    found: list[Problem] = []
    config, path, vocab_size = (
        known("model", "config"),
        known("tokenizer", "path"),
        known("tokenizer", "train_vocab_size"),
    )
    if known.all_sound(("model", "path"), ("tokenizer", "path"), ("tokenizer", "train_vocab_size")):
        if path is None and vocab_size is None and known("model", "path") is None:
            rule = "a tokenizer is needed: set it, or tokenizer.train_vocab_size (only model.path brings its own)"
            found.append((("tokenizer", "path"), rule))
        if path is not None and vocab_size is not None:
            found.append((("tokenizer", "path"), "set tokenizer.path or tokenizer.train_vocab_size, not both"))
    rows = config.get("vocab_size") if isinstance(config, dict) else None
    if type(rows) is int and vocab_size is not None and vocab_size > rows:
        rule = f"must be at most model.config.vocab_size = {rows}: every token needs a row of the embedding"
        found.append((("tokenizer", "train_vocab_size"), rule))
    return found


def _data(known: Known) -> list[Problem]:
    if not known.all_sound(("data", "text"), ("data", "records")):
        return []
    text, records = known("data", "text"), known("data", "records")
    if (text is None) == (records is None):
        state = "neither is set" if text is None else "both are set"
        return [(("data", "text"), f"set exactly one of data.text and data.records; {state}")]
    other, used = ("records", "text") if records is None else ("text", "records")
    keys = (
        ("weights", "skip_bad", "template", "train_on_prompt", "isolate")
        if records is None
        else ("documents", "max_bytes")
    )
    found: list[Problem] = []
    for key in keys:
        if known.all_sound(("data", key)) and known("data", key) != known.default("data", key):
            found.append((("data", key), f"applies to data.{other} only, and this job has data.{used}: leave it out"))
    for key in ("text", "evaluation") if records is None else ():
        if any(entry.startswith("hf:") for entry in known("data", key) or ()):
            found.append((("data", key), "a data set of the hub (hf:...) holds records: name it in data.records"))
    weights = known("data", "weights")
    if weights is not None and records is not None and len(weights) != len(records):
        rule = f"must be one for each entry of data.records: there are {len(weights)} and {len(records)}"
        found.append((("data", "weights"), rule))
    if weights is not None and any(text.startswith("!") for text in records or ()):
        rule = "gives each entry of data.records a share, and one that begins with ! takes files away: name the files otherwise"
        found.append((("data", "weights"), rule))
    if known("data", "template") == "chat" and known("tokenizer", "train_vocab_size") is not None:
        rule = 'a tokenizer trained here (tokenizer.train_vocab_size) has no chat template: use "plain"'
        found.append((("data", "template"), rule))
    if known("train", "preference") not in (None, "none"):
        if records is None:
            found.append((("train", "preference"), "learns from pairs of answers: set data.records, not data.text"))
        for key, wrong in (("isolate", False), ("train_on_prompt", True)):
            if known("data", key) is wrong:
                rule = "does not apply to preferences (train.preference), whose records are compared: leave it out"
                found.append((("data", key), rule))
    return found


def _train(known: Known) -> list[Problem]:
    micro, batch = known("train", "micro_batch"), known("train", "global_batch")
    if known("train", "epochs") is not None and known("train", "steps") not in (None, known.default("train", "steps")):
        return [(("train", "epochs"), "takes the place of train.steps: set one of them")]
    if known("train", "patience") and known("train", "evaluate_every") == 0:
        return [(("train", "patience"), "counts evaluations: set train.evaluate_every, the steps between them")]
    if known("train", "patience") and known("data", "held_out") == 0 and known("data", "evaluation") is None:
        rule = "counts evaluations, and nothing is held out: set data.held_out or data.evaluation"
        return [(("train", "patience"), rule)]
    if micro is None or batch is None:
        return []
    if type(micro) is int and batch % micro:
        divisors = [size for size in range(1, min(batch, 1024) + 1) if batch % size == 0]
        return [
            (("train", "micro_batch"), f"must divide train.global_batch = {batch}: {', '.join(map(str, divisors))}")
        ]
    largest = micro if type(micro) is int else max(d for d in range(1, LARGEST_AUTO + 1) if batch % d == 0)
    if batch // largest <= MOST_MICRO_BATCHES:
        return []
    rule = (
        f"a step of {batch // largest:,} micro-batches of {largest} is too long to be planned: at most "
        f"{MOST_MICRO_BATCHES:,}. Lower it (at most {largest * MOST_MICRO_BATCHES:,} so), or set a larger train.micro_batch"
    )
    return [(("train", "global_batch"), rule)]


def _plan(known: Known) -> list[Problem]:
    if known("plan", "schedule") == "split" and known("adapter", "method") not in (None, "none"):
        rule = 'puts off the gradients of trained matrices, and an adapter leaves these frozen: use "auto" or "1f1b"'
        return [(("plan", "schedule"), rule)]
    return []


def _cluster(known: Known) -> list[Problem]:
    for text in known("cluster", "emulate_changes") or ():
        if speed_change(text) is None:
            rule = 'each is written "rank R runs at SPEED from step N", such as "rank 1 runs at 0.5 from step 20"'
            return [(("cluster", "emulate_changes"), f"{rule}; this is not: {text!r}")]
    if known("cluster", "emulate") is not None or not known.all_sound(("cluster", "emulate")):
        return []
    found: list[Problem] = []
    for key in ("time_scale", "emulate_first", "emulate_changes"):
        if known.all_sound(("cluster", key)) and known("cluster", key) != known.default("cluster", key):
            found.append((("cluster", key), "applies to emulated clusters only: set cluster.emulate, or leave it out"))
    return found


def _output(known: Known, name: str) -> list[Problem]:
    run_dir = known("output", "run_dir")
    problem = _run_dir_problem(run_dir, name) if run_dir is not None else None
    return [(("output", "run_dir"), problem)] if problem is not None else []


def _run_dir_problem(text: str, name: str) -> str | None:
    rest = text.replace("{name}", name)
    if not text.strip():
        return "must name a directory"
    if "{" in rest or "}" in rest:
        return "may hold {name} and no other placeholder"
    cwd = Path.cwd()
    inside = Path(rest).expanduser()
    if not inside.is_absolute() and leads_out(cwd / inside, cwd):
        return f"must stay inside the working directory {cwd}; {ELSEWHERE}"
    return None


def _shard_cache(known: Known) -> list[Problem]:
    """Where links lead is looked at on each rank's machine, when the cache is opened."""
    text = known("model", "shard_cache")
    if text is None or not os.path.normpath(Path(text).expanduser()).startswith(".."):
        return []
    return [(("model", "shard_cache"), f"must stay inside the job file's directory; {ELSEWHERE}")]
