"""The command ``reference``: every key of a job file and every option of every command, from the code.

The fields of ``job/schema.py`` make ``jobs/reference.toml`` and ``docs/job.md`` (``--markdown``), the parser makes
``docs/commands.md`` (``--commands``); ``tests/test_docs.py`` holds the files to what is printed.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator
from pathlib import Path

from pydantic.fields import FieldInfo

from hetero_mpi.commands.options import parser
from hetero_mpi.job.rules import as_toml, field_metadata, rule_text
from hetero_mpi.job.schema import TABLES
from hetero_mpi.job.training_tables import LANGUAGE, Example, OnlyIf, OnResume, Unit
from hetero_mpi.util.errors import UserError
from hetero_mpi.util.terminal import line_width

HEADER = """\
# Every key of a job file, with its meaning, the values it accepts and its default. Nothing here needs to be copied:
# a job file names what differs from the default. Keys without a default are commented out and show an example; an
# optional key is left empty by leaving it out, or by "".
# Paths begin at the job file, but for output.run_dir, which begins at the working directory.
#
# Any key can be changed for one run on the command line: --set train.steps=6 --set model.config.hidden_size=64
"""

JOB_HEADER = """\
# Job file reference

<!-- Written by `python -m hetero_mpi reference --markdown > docs/job.md`; the words are those of hetero_mpi/job/schema.py. -->

A job file is TOML and sets the model, the data and the training. You write only the keys that differ from their defaults.
Copy [jobs/quickstart.toml](../jobs/quickstart.toml), or print all keys, commented, with [`reference`](commands.md#reference).

* Override any key for one run: `--set train.steps=20 --set model.config.hidden_size=64`. The value is TOML; a bare word is text.
* Paths are relative to the job file, `[output] run_dir` to the working directory; `~` is your home directory.
* To unset a key whose default is *empty*, omit it or set it to `""`. Units are in parentheses.
* A wrong file is rejected with all of its errors at once, each with the rule and the nearest valid name.

"""

COMMANDS_HEADER = """\
# Command reference

<!-- Written by `python -m hetero_mpi reference --commands > docs/commands.md`; the words are those of `--help`. -->

Prefix each command with `python -m hetero_mpi` or `hetero-mpi`. [Exit codes](recovery.md#exit-codes).

| run it | commands |
| --- | --- |
| on all ranks (`mpirun`, `launch`) | `train`, `profile`, `mesh verify`; `generate`, `serve`, `evaluate` and `doctor` also alone |
| on one machine of the cluster | `launch`, `doctor`, `mesh init`, `generate`, `serve`, `evaluate`, `export`, `cache` |
| anywhere, without torch and MPI | `plan`, `simulate`, `inspect`, `report`, `watch`, `compare`, `baseline`, `init` |
| anywhere, about the program | `reference`, `completion` |

"""

ENVIRONMENT = {
    "HETERO_MPI_DEVICE": "device of this rank, such as `cuda` or `cuda:1`; overrides `[cluster] device`",
    "HETERO_MPI_MPIEXEC": "path of the MPI launcher that `launch` runs; default: the one it finds",
    "HETERO_MPI_TOKEN": "[API key](serving.md#api-key) for clients of `serve`, and for the live page",
    "XDG_CACHE_HOME": "directory of the caches of token ids and device times, instead of `~/.cache`",
}
"""Environment variables that users may set and their effects. Those of MPI, torch and Hugging Face apply too."""

_SHORT = {
    'empty ("")': "empty",
    "texts in quotes": "texts",
    "text in quotes": "text",
    "true or false": "true/false",
    "a whole number": "integer",
    "whole numbers": "integers",
    "a number": "number",
    " of at least ": " ≥ ",
    " above ": " > ",
    " below ": " < ",
    " at most ": " ≤ ",
    "a list of": "list of",
    "a table of keys": "table",
    "a table (a ": "table (",
    '" or "': '", "',
}
"""Words of a rule -> what a table of ``docs/job.md`` has in their place."""


def reference(markdown: bool, commands: bool) -> str:
    """The text to print."""
    return commands_page(parser()) if commands else job_page() if markdown else reference_text()


def reference_text() -> str:
    """The text of ``jobs/reference.toml``: TOML, with every key of every table in the order of ``job/schema.py``."""
    parts = [HEADER]
    for table, model in TABLES.items():
        parts.append(f"\n{_comment(model.__doc__ or '')}\n[{table}]\n")
        parts.extend(_key(table, key, field) for key, field in model.model_fields.items())
    return "\n".join(parts)


def _key(table: str, key: str, field: FieldInfo) -> str:
    lines = _comment(_meaning(table, key)) + "\n" + _comment(f"Accepts {rule_text(field)}.")
    if field.default is not None:
        return f"{lines}\n{key} = {as_toml(field.default)}\n"
    return f"{lines}\n# Empty by default; for example:\n# {key} = {_fact(table, key, Example)}\n"


def _fact(table: str, key: str, kind: type[str]) -> str:
    return next(iter(field_metadata(TABLES[table], kind).get(key, [])), "")


def _meaning(table: str, key: str) -> str:
    """The text below a field, the conditions under which its key has an effect, and what becomes of a change on resume."""
    conditions = [text for text in field_metadata(TABLES[table], OnlyIf).get(key, []) if text != LANGUAGE]
    notes = [f"Only if {' and '.join(f'``{text}``' for text in conditions)}."] if conditions else []
    notes += ["A resumed run must not change it."] if _fact(table, key, OnResume) == "same" else []
    return " ".join([TABLES[table].model_fields[key].description or "", *notes])


def _comment(text: str) -> str:
    return textwrap.fill(
        _plain(text),
        width=min(118, line_width()),
        initial_indent="# ",
        subsequent_indent="# ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def job_page() -> str:
    """The text of ``docs/job.md``: a Markdown table for every table of a job file, in the order of ``job/schema.py``."""
    parts = [JOB_HEADER, "Tables: " + ", ".join(f"[`[{table}]`](#{table})" for table in TABLES) + ".\n"]
    for table, model in TABLES.items():
        parts.append(f"\n## `[{table}]`\n\n{_plain(model.__doc__ or '')}\n\n")
        parts.append("| key | accepts | default | meaning |\n| --- | --- | --- | --- |\n")
        parts.extend(_key_row(table, key, field) for key, field in model.model_fields.items())
    return "".join(parts)


def _key_row(table: str, key: str, field: FieldInfo) -> str:
    meaning = _plain(_meaning(table, key))
    if example := _fact(table, key, Example):
        meaning += f" Example: `{example}`"
    accepts = rule_text(field)
    for words, short in _SHORT.items():
        accepts = accepts.replace(words, short)
    if field.default is None:
        accepts = accepts.removesuffix(" or empty")
    if unit := _fact(table, key, Unit):
        accepts += f" ({unit})"
    usual = "empty" if field.default is None else f"`{as_toml(field.default)}`"
    return _row(f"`{key}`", accepts, usual, meaning)


def completion(shell: str) -> str:
    """Script that makes a shell complete commands, options and files. Raises UserError: its package is not installed."""
    try:
        import shtab
    except ImportError:
        raise UserError("completion.package_missing", "completion needs the package shtab: pip install shtab") from None
    top = parser()
    for _, _, command in _commands(top, ""):
        for action in command._actions:
            if action.type is Path:
                vars(action).update(complete=shtab.FILE)  # where shtab looks for it
    return str(shtab.complete(top, shell))


def commands_page(top: argparse.ArgumentParser) -> str:
    """The text of ``docs/commands.md``: a Markdown section for every command of ``top``, actions of commands included."""
    found = list(_commands(top, ""))
    parts = [COMMANDS_HEADER]
    for name, help_text, command in found:
        parts.append(f"## {name}\n\n{_sentence(help_text)}\n\n```\n{_usage(name, command)}\n```\n\n")
        rows = [_argument_row(action, command) for action in _own_arguments(command)]
        if rows:
            parts.append("| argument | |\n| --- | --- |\n" + "".join(rows) + "\n")
    parts.append("## Environment variables\n\n| variable | |\n| --- | --- |\n")
    parts.extend(_row(f"`{name}`", text) for name, text in ENVIRONMENT.items())
    return "".join(parts)


def _commands(parser: argparse.ArgumentParser, before: str) -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    """(name, description, parser) of every command below ``parser`` that does something itself, in the order of ``--help``."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                deeper = list(_commands(inner, f"{before}{name} "))
                yield from deeper or [(before + name, inner.description or "", inner)]


def _own_arguments(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Positional arguments, then options; without ``--help``."""
    shown = [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]
    return sorted(shown, key=lambda action: bool(action.option_strings))


def _usage(name: str, parser: argparse.ArgumentParser) -> str:
    arguments = _own_arguments(parser)
    needed = [f"{act.option_strings[0]} {_values(act)}" for act in arguments if act.option_strings and act.required]
    optional = ["[OPTIONS]"] if any(action.option_strings and not action.required for action in arguments) else []
    positional = [_values(action) for action in arguments if not action.option_strings]
    return " ".join([name, *optional, *needed, *positional])


def _argument_row(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    text = (action.help or "") % {**vars(action), "prog": parser.prog}
    if action.option_strings and action.required:
        text = f"required{': ' if text else ''}{text}"
    others = [
        other.option_strings[-1]
        for group in parser._mutually_exclusive_groups
        if action in group._group_actions
        for other in group._group_actions
        if other is not action
    ]
    if others:
        text += f"; not with {', '.join(f'`{other}`' for other in others)}"
    spelled = f"{', '.join(action.option_strings)} {_values(action)}".strip()  # such as -o, --output DIR
    return _row(f"`{spelled}`", text)


def _values(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    name = "|".join(map(str, action.choices)) if action.choices else str(action.metavar or action.dest.upper())
    return {"?": f"[{name}]", "*": f"[{name} ...]", "+": f"{name} [{name} ...]"}.get(str(action.nargs), name)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _plain(text: str) -> str:
    """A docstring as one line of Markdown."""
    return " ".join(text.replace("``", "`").split())


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "?", "!")) else ".")
