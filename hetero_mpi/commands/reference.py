"""``jobs/reference.toml``, made from the fields of ``job/schema.py``: every key with its meaning, its rule and its default.

Print it with ``python -m hetero_mpi reference``; ``reference_pages.py`` makes Markdown of the same.
"""

from __future__ import annotations

import textwrap

from pydantic.fields import FieldInfo

from hetero_mpi.job.load import TABLES
from hetero_mpi.job.rules import as_toml, rule_of

HEADER = """\
# Every key of a job file, with its meaning, the values it accepts and its default. Nothing here needs to be copied:
# a job file names what differs from the default. Keys without a default are commented out and show an example; an
# optional key is left empty by leaving it out, or by "".
#
# Any key can be changed for one run on the command line: --set train.steps=6 --set model.config.hidden_size=64
"""

EXAMPLES: dict[tuple[str, str], str] = {
    ("model", "path"): '"models/SmolLM2-135M"',
    ("model", "shard_cache"): '"~/.cache/hetero_mpi"',
    ("model", "config"): '{ model_type = "llama", hidden_size = 256, num_hidden_layers = 8 }',
    ("model", "factory"): '"cnn_model:cnn"',
    ("adapter", "path"): '"runs/first/adapter"',
    ("tokenizer", "path"): '"models/SmolLM2-135M"',
    ("tokenizer", "train_vocab_size"): "4096",
    ("data", "text"): '["{stdlib}/**/*.py", "notes/*.txt"]',
    ("data", "records"): '["data/*.jsonl", "more/chat.parquet", "hf:org/name:train"]',
    ("data", "weights"): "[3, 1]",
    ("data", "evaluation"): '["evaluation/*.jsonl"]',
    ("data", "max_bytes"): "30_000_000",
    ("train", "epochs"): "3",
    ("sample", "prompt"): '"def main("',
    ("profile", "path"): '"profiles/homelab.toml"',
    ("cluster", "emulate"): '"homelab-5090-strix-halo"',
    ("cluster", "memory_bytes"): "8_000_000_000",
}
"""(table, key) -> what a key without a default may look like, as TOML."""


def reference_text() -> str:
    """The text of ``jobs/reference.toml``: TOML, with every key of every table in the order of ``job/schema.py``."""
    parts = [HEADER]
    for table, model in TABLES.items():
        parts.append(f"\n{_comment(model.__doc__ or '')}\n[{table}]\n")
        parts.extend(_key(table, key, field) for key, field in model.model_fields.items())
    return "\n".join(parts)


def _key(table: str, key: str, field: FieldInfo) -> str:
    lines = _comment(field.description or "") + "\n" + _comment(f"Accepts {rule_of(field)}.")
    default = None if field.is_required() else field.default
    if default is not None:
        return f"{lines}\n{key} = {as_toml(default)}\n"
    required = "Required, for example" if field.is_required() else "Empty by default; for example"
    return f"{lines}\n# {required}:\n# {key} = {EXAMPLES[table, key]}\n"


def _comment(text: str) -> str:
    plain = " ".join(text.replace("``", "`").split())
    return textwrap.fill(
        plain, width=118, initial_indent="# ", subsequent_indent="# ", break_long_words=False, break_on_hyphens=False
    )


if __name__ == "__main__":
    print(reference_text(), end="")
