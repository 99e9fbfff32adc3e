"""Rules between the keys of a job file, which no single field can hold."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

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
        *_tokenizer(known),
        *_data(known),
        *_train(known),
        *_plan(known),
        *_cluster(known),
        *_output(known, name),
    ]


def _model(known: Known) -> list[Problem]:
    found: list[Problem] = []
    path, config = known("model", "path"), known("model", "config")
    if known.all_sound(("model", "path"), ("model", "config")):
        if (path is None) == (config is None):
            state = "neither is set" if path is None else "both are set"
            found.append((("model", "path"), f"set exactly one of model.path and model.config; {state}"))
        if isinstance(config, dict) and "model_type" not in config:
            found.append((("model", "config"), 'needs model_type, the family\'s name in transformers, such as "llama"'))
    if known("model", "quantization") == "nf4" and known("adapter", "method") == "none":
        rule = 'frozen 4-bit weights cannot be trained themselves: set adapter.method = "lora"'
        found.append((("model", "quantization"), rule))
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
    keys = ("template", "train_on_prompt") if records is None else ("documents", "max_bytes")
    found: list[Problem] = []
    for key in keys:
        if known.all_sound(("data", key)) and known("data", key) != known.default("data", key):
            found.append((("data", key), f"applies to data.{other} only, and this job has data.{used}: leave it out"))
    if known("data", "template") == "chat" and known("tokenizer", "train_vocab_size") is not None:
        rule = 'a tokenizer trained here (tokenizer.train_vocab_size) has no chat template: use "plain"'
        found.append((("data", "template"), rule))
    return found


def _train(known: Known) -> list[Problem]:
    micro, batch = known("train", "micro_batch"), known("train", "global_batch")
    if type(micro) is not int or batch is None or batch % micro == 0:
        return []
    divisors = [size for size in range(1, batch + 1) if batch % size == 0 and size <= 1024]
    return [(("train", "micro_batch"), f"must divide train.global_batch = {batch}: {', '.join(map(str, divisors))}")]


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
    if not inside.is_absolute() and not (cwd / inside).resolve().is_relative_to(cwd.resolve()):
        return f"must stay inside the working directory {cwd}; write an absolute path to go elsewhere"
    return None
